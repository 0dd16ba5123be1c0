"""What the router is given and what it answers: requests, and what is to be done with them."""

from __future__ import annotations

from typing import Protocol

import msgspec

from headrace.frontend.fleet.members import Member
from headrace.ipc.failure import Failure


class Affinity(msgspec.Struct, frozen=True):
    """Which engine a request wants."""

    session: str = ""
    """Requests of one name prefer one engine."""
    rank: int | None = None
    """data_parallel_rank of the engine that alone may begin it."""


ANYWHERE = Affinity()


class Work(Protocol):
    """What the router reads of a request that runs."""

    @property
    def num_tokens(self) -> int:
        """That it has brought so far."""
        ...

    @property
    def first_token_s(self) -> float | None:
        """From its submission to its first token."""
        ...

    @property
    def num_cached_tokens(self) -> int | None:
        """Of its prompt, once the engine has said so."""
        ...


class Losses:
    """What happened to a request in a row: a token that it brings between two makes them count anew."""

    __slots__ = ("_num_tokens", "_times")

    def __init__(self) -> None:
        self._times = self._num_tokens = 0

    def note(self, num_tokens: int) -> None:
        self._times = self.in_a_row(num_tokens) + 1
        self._num_tokens = num_tokens

    def in_a_row(self, num_tokens: int) -> int:
        return self._times if num_tokens <= self._num_tokens else 0


class RoutedRequest:
    """A request as the router sees it."""

    __slots__ = (
        "_arrival",
        "_deaths",
        "_moves",
        "cache_salt",
        "expected_cached_tokens",
        "keys",
        "member",
        "model",
        "num_migrations",
        "num_outputs",
        "num_prompt_tokens",
        "pending_tokens",
        "placed_s",
        "priority",
        "rank",
        "refusals",
        "seen_s",
        "session",
        "tokens",
        "tokens_seen",
        "version",
        "work",
    )  # fmt: skip

    def __init__(
        self,
        model: str,
        work: Work,
        *,
        num_prompt_tokens: int,
        tokens: bytes | memoryview = b"",
        cache_salt: str = "",
        num_outputs: int = 1,
        priority: int = 0,
        affinity: Affinity = ANYWHERE,
    ) -> None:
        """tokens: the prompt, little-endian int32; without it no prefix is looked for."""
        self.model, self.work, self.tokens, self.cache_salt = model, work, tokens, cache_salt
        self.num_prompt_tokens, self.num_outputs = num_prompt_tokens, num_outputs
        self.priority, self.session, self.rank = priority, affinity.session, affinity.rank
        self.keys: list[int] | None = None  # of the prompt's prefixes, once they were asked for
        self.member: Member | None = None
        self.version: str | None = None  # of the engine that began it; what goes on elsewhere does so at this version
        self.num_migrations = 0
        self._moves, self._deaths = Losses(), Losses()
        self.placed_s = 0.0
        self.tokens_seen = 0  # by the last tick
        self.seen_s: float | None = None  # when it last was; None before its first token, infinite after a move
        self.pending_tokens = 0  # that its engine has to compute before its first token
        self.expected_cached_tokens = 0
        self.refusals: set[Member] = set()  # engines that would not have it
        self._arrival = 0

    @property
    def has_begun(self) -> bool:
        return self.work.num_tokens > 0

    @property
    def moves_without_token(self) -> int:
        """How often it was moved since it last brought a token: a stream that goes on at each engine may lose any
        number of them."""
        return self._moves.in_a_row(self.work.num_tokens)

    @property
    def deaths_without_token(self) -> int:
        """Of engines with it on board: what kills an engine does so at one place."""
        return self._deaths.in_a_row(self.work.num_tokens)

    @property
    def is_suspect(self) -> bool:
        """It may be what kills the engines: it is on board of none with another suspect."""
        return self.deaths_without_token >= 2

    def note_move(self) -> None:
        self.num_migrations += 1
        self._moves.note(self.work.num_tokens)

    def note_death(self) -> None:
        self._deaths.note(self.work.num_tokens)


class Move(msgspec.Struct, frozen=True):
    """The request goes on at `target`; `source` is to forget it, where that is still there."""

    request: RoutedRequest
    source: Member | None
    target: Member
    reason: str


class Wait(msgspec.Struct, frozen=True):
    """The request waits for an engine; a Move or a Fail will follow."""

    request: RoutedRequest
    source: Member | None
    reason: str


class Fail(msgspec.Struct, frozen=True):
    """The request ends with this."""

    request: RoutedRequest
    source: Member | None
    failure: Failure


Decision = Move | Wait | Fail


class NoEngineError(Exception):
    """No engine of this model takes requests now; `failure` is why the last of them does not, where that is known."""

    def __init__(self, why: str, failure: Failure | None = None) -> None:
        super().__init__(why)
        self.failure = failure


class AllFullError(Exception):
    """Each engine has as much as it takes."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(f"the queues of all engines are full; try again in about {retry_after_s:.0f} s")
        self.retry_after_s = retry_after_s
