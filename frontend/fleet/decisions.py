"""The router's inputs and outputs: its options, requests, and decisions about them."""

from __future__ import annotations

from typing import Protocol

import msgspec

from headrace.frontend.fleet.members import Member
from headrace.frontend.fleet.prefixes import MOST_PREFIXES
from headrace.ipc.failure import Failure
from headrace.ipc.prefix_names import NO_KEY, PrefixKey, prefix_names


class RouterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Thresholds and limits. Times are in seconds."""

    max_migrations: int = 3
    """How often a request may move after losing its engine, without a token in between; 0: never."""
    suspect_after_s: float = 2.0
    """An engine with requests that is silent for this long (it reports each second) is suspected: its requests move."""
    working_suspect_factor: float = 30.0
    """How many times longer one of this host may be silent whose process uses processor time, or waits for a
    processor: others compete with it, or a library computes in it."""
    again_suspect_factor: float = 4.0
    """How many times longer the next engine may be silent before a request moves once more: each such move that brought
    no token makes it likelier that engines are busy and not lost, and is paid with computing its prompt again."""
    stalled_after_s: float = 20.0
    """The same for one that reports, but generates no token for requests in decode."""
    slow_factor: float = 10.0
    """An engine whose tokens take this many times longer than the group's median gets no requests for a while."""
    slow_for_s: float = 30.0
    own_pause_s: float = 1.0
    """Ticks further apart than this mean that this process itself was stopped: no engine is suspected for it."""
    migrations_per_capacity_s: float = 0.5
    """Rate of moves, as a share of the requests that all engines can run at once; the burst is four seconds' worth."""
    mean_output_tokens: float = 128.0
    """Assumed length of an answer before any has ended."""
    most_prefixes: int = MOST_PREFIXES
    """Limit of the prefix index."""


class Affinity(msgspec.Struct, frozen=True):
    """A request's preference for an engine."""

    session: str = ""
    """Requests with the same session name prefer the same engine."""
    rank: int | None = None
    """data_parallel_rank of the only engine that may start the request; None for any."""


ANYWHERE = Affinity()


class RequestProgress(Protocol):
    """The progress of a request, as the router reads it."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens generated so far."""
        ...

    @property
    def first_token_s(self) -> float | None:
        """Seconds from submission to the first token."""
        ...

    @property
    def num_cached_tokens(self) -> int | None:
        """Prompt tokens that came from the prefix cache, once the engine has reported it."""
        ...


class Progress(msgspec.Struct, frozen=True):
    """That of a request that does not run: it is not sent yet, or it has ended."""

    num_tokens: int = 0
    first_token_s: float | None = None
    num_cached_tokens: int | None = None


NO_PROGRESS = Progress()


class RoutedRequest:
    """The router's record of a request."""

    __slots__ = (
        "_arrival",
        "_events",
        "_names",
        "_names_weights",
        "expected_cached_tokens",
        "member",
        "model",
        "num_migrations",
        "num_outputs",
        "num_prompt_tokens",
        "pending_tokens",
        "placed_s",
        "prefix_key",
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
        work: RequestProgress,
        *,
        num_prompt_tokens: int,
        tokens: bytes | memoryview = b"",
        prefix_key: PrefixKey = NO_KEY,
        num_outputs: int = 1,
        priority: int = 0,
        affinity: Affinity = ANYWHERE,
    ) -> None:
        """tokens: the prompt, little-endian int32; if empty, prefixes are not used for routing. prefix_key: without
        weights, which are those of an engine."""
        self.model, self.work, self.tokens, self.prefix_key = model, work, tokens, prefix_key
        self.num_prompt_tokens, self.num_outputs = num_prompt_tokens, num_outputs
        self.priority, self.session, self.rank = priority, affinity.session, affinity.rank
        self._names: list[int] | None = None  # of the prompt's prefixes, of the weights `_names_weights`
        self._names_weights = ""
        self.member: Member | None = None
        self.version: str | None = None  # model version of the engine that began it, on which it must continue
        self.num_migrations = 0
        self._events: dict[str, tuple[int, int]] = {}  # how often in a row, after how many tokens
        self.placed_s = 0.0
        self.tokens_seen = 0  # num_tokens at the last tick
        self.seen_s: float | None = None  # time of its last new tokens; None before the first, infinite after a move
        self.pending_tokens = 0  # tokens that its engine has to compute before its first token
        self.expected_cached_tokens = 0
        self.refusals: set[Member] = set()  # engines that have refused it
        self._arrival = 0

    def names(self, weights: str, chunk: int) -> list[int]:
        """The names of the prompt's prefixes, as engines with these weights report them."""
        if self._names is None or self._names_weights != weights:
            key = msgspec.structs.replace(self.prefix_key, weights=weights)
            self._names, self._names_weights = prefix_names(self.tokens, key, chunk), weights
        return self._names

    @property
    def has_names(self) -> bool:
        """Whether `names` has been asked for."""
        return self._names is not None

    @property
    def has_begun(self) -> bool:
        return self.work.num_tokens > 0

    @property
    def moves_without_token(self) -> int:
        """How often it was moved since its last token. A stream that continues on each engine may be moved any number
        of times."""
        return self._in_a_row("move")

    @property
    def deaths_without_token(self) -> int:
        """How many engines died while running it, since its last token: a request kills each at the same point."""
        return self._in_a_row("death")

    @property
    def is_suspect(self) -> bool:
        """Whether it may be what kills engines. Two suspects are never assigned to the same engine."""
        return self.deaths_without_token >= 2

    @property
    def suspicions_without_token(self) -> int:
        """How often it was moved off an engine that was only suspected, since its last token."""
        return self._in_a_row("suspicion")

    def _in_a_row(self, event: str) -> int:
        """A token that is generated between two events begins a new row."""
        times, num_tokens = self._events.get(event, (0, 0))
        return times if self.work.num_tokens <= num_tokens else 0

    def note_suspicion(self) -> None:
        self._note("suspicion")

    def note_move(self) -> None:
        self.num_migrations += 1
        self._note("move")

    def note_death(self) -> None:
        self._note("death")

    def _note(self, event: str) -> None:
        self._events[event] = (self._in_a_row(event) + 1, self.work.num_tokens)


class Move(msgspec.Struct, frozen=True):
    """The request continues at `target`; remove it from `source`, if that still exists."""

    request: RoutedRequest
    source: Member | None
    target: Member
    reason: str


class Wait(msgspec.Struct, frozen=True):
    """The request waits for an engine; a Move or a Fail follows."""

    request: RoutedRequest
    source: Member | None
    reason: str


class Fail(msgspec.Struct, frozen=True):
    """The request ends with this failure."""

    request: RoutedRequest
    source: Member | None
    failure: Failure


Decision = Move | Wait | Fail


class NoEngineError(Exception):
    """No engine of this model accepts requests now; `failure` is the last engine's, if known."""

    def __init__(self, why: str, failure: Failure | None = None) -> None:
        super().__init__(why)
        self.failure = failure


class AllFullError(Exception):
    """Every engine has reached its limit of requests."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(f"the queues of all engines are full; try again in about {retry_after_s:.0f} s")
        self.retry_after_s = retry_after_s
