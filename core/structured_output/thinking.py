"""Answers that begin with reasoning: limits the length of the reasoning, and applies the grammar only after it.

    BEFORE ----begin----> THINKING ----end----> AFTER        the tokens of the markers `begin` and `end` lead on
       |                      |                   ^          (without a form, AFTER ----begin----> THINKING again)
       |                      +- budget spent --> CLOSING -- forced tokens: the end marker, perhaps after some text
       +--- a token of the form, if there is one ---------->

In BEFORE and THINKING any token is allowed. With a form (a grammar), an answer either begins with the marker, or
follows the form from its first token on. If the prompt ends within reasoning, the answer starts in THINKING. Without a
form, an answer may reason again and again, each time with the whole budget, as in vLLM; a later beginning counts only
in the marker's own tokens, since an answer may mention the marker.

A marker is found in the text, since a model may write it in other tokens, together with its neighbours.
White space behind it is no part of the answer. Before a form, no token is allowed that completes the marker and begins
the answer with anything else, as the form could not be applied to that.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from headrace.core.structured_output.backend import Matcher
from headrace.ipc.messages import Thinking


class Stage(enum.Enum):
    BEFORE = enum.auto()
    OPENING = enum.auto()  # the rest of the begin marker is forced
    THINKING = enum.auto()
    CLOSING = enum.auto()
    AFTER = enum.auto()


class ReasoningPosition(NamedTuple):
    stage: Stage
    num_tokens: int = 0
    """Tokens of the reasoning so far; in OPENING and CLOSING, of the marker so far."""
    recent: tuple[int, ...] | bytes = ()
    """What came last, in tokens or in text, and may have begun the expected marker."""


class Marker:
    """Recognises a marker in the text, or, without a text, by its tokens."""

    def __init__(self, token_ids: tuple[int, ...], text: bytes, near: Mapping[int, bytes]) -> None:
        """text: empty to compare tokens. near: the bytes of each token that may have a part of the text."""
        self.token_ids, self.text, self._near = token_ids, text, near
        self._merged: dict[bytes, list[int]] = {}

    def next(self, recent: tuple[int, ...] | bytes, token_id: int) -> tuple[tuple[int, ...] | bytes, bool]:
        """What may have begun the marker after this token, and whether the token completes it."""
        if not self.text:
            tokens = (*recent, token_id)[-len(self.token_ids) :] if self.token_ids else ()
            return tokens, bool(self.token_ids) and tokens == self.token_ids
        data = self._data(recent, token_id)
        is_found = self.text in data
        return b"" if is_found else data[max(0, len(data) - len(self.text) + 1) :], is_found

    def _data(self, recent: tuple[int, ...] | bytes, token_id: int) -> bytes:
        """The text up to this token, as far as it may have a part of the marker."""
        own = self._near.get(token_id)
        return b"" if own is None else (recent or b"") + own  # type: ignore[operator]

    def merged(self, recent: tuple[int, ...] | bytes) -> list[int]:
        """The tokens that complete the marker and have more behind it than white space."""
        if not self.text:
            return []
        data = bytes(recent)
        if data not in self._merged:
            after = {each: self._data(data, each).partition(self.text)[2] for each in self._near}
            self._merged[data] = [token_id for token_id, rest in after.items() if rest.strip()]
        return self._merged[data]

    def begun(self, recent: tuple[int, ...] | bytes, forced: tuple[int, ...]) -> int:
        """How many of the forced tokens have been written already."""
        for count in range(len(forced) - 1, 0, -1):
            if isinstance(recent, bytes):
                said = [self._near.get(each) for each in forced[:count]]
                if None not in said and recent.endswith(b"".join(each or b"" for each in said)):
                    return count
            elif recent[-count:] == forced[:count]:
                return count
        return 0


class ThinkingMatcher:
    """A `Matcher` that makes its own masks until AFTER, and then uses those of the form's matcher."""

    def __init__(
        self,
        thinking: Thinking,
        form: Matcher | None,
        position: ReasoningPosition | None = None,
        markers: tuple[Marker, Marker, Marker] | None = None,
    ) -> None:
        """form: matcher of the answer's form, at its start. None: any answer may follow the reasoning."""
        self._thinking, self._form = thinking, form
        near = dict(zip(thinking.near, thinking.near_texts, strict=False))
        self._markers = markers or (
            Marker(thinking.begin, thinking.begin_text, near),
            Marker(thinking.end, thinking.end_text, near),
            Marker(thinking.begin, b"", {}),
        )
        self._closing = thinking.forced or thinking.end
        start = Stage.THINKING if thinking.is_open else Stage.BEFORE
        self._position = position or self._entered(ReasoningPosition(start))

    # --- as a matcher ---------------------------------------------------------------------------------------------

    def accept(self, token_id: int) -> bool:
        if self._position.stage is Stage.BEFORE and self._form is not None and not self._opens(token_id):
            self._position = ReasoningPosition(Stage.AFTER)
        if self._position.stage is Stage.AFTER and self._form is not None:
            return self._form.accept(token_id)
        is_allowed = self._allows(self._position, token_id)
        self._position = self._next(self._position, token_id)
        return is_allowed

    @property
    def is_complete(self) -> bool:
        return self._position.stage is Stage.AFTER and self._form is not None and self._form.is_complete

    @property
    def problem(self) -> str:
        return self._form.problem if self._form is not None else ""

    def num_valid(self, token_ids: Sequence[int]) -> int:
        num, form, rest = self.free_of_form(list(token_ids))
        return num if form is None else num + form.num_valid(rest)

    def free_of_form(self, token_ids: list[int]) -> tuple[int, Matcher | None, list[int]]:
        """How many of the tokens are allowed before the form's matcher has to be asked, that matcher, and the tokens to
        ask it about. None: it has not."""
        position = self._position
        for nth, token_id in enumerate(token_ids):
            if self._form is not None and position.stage in (Stage.BEFORE, Stage.AFTER):
                return nth, self._form, token_ids[nth:]
            if not self._allows(position, token_id):
                return nth, None, []
            position = self._next(position, token_id)
        return len(token_ids), None, []

    def forced_tokens(self) -> list[int]:
        if self._position.stage is Stage.AFTER and self._form is not None:
            return self._form.forced_tokens()
        return self._forced(self._position)

    @property
    def present_form(self) -> Matcher | None:
        """The form's matcher if all tokens from here on are for it."""
        return self._form if self._position.stage is Stage.AFTER else None

    def copy(self) -> ThinkingMatcher:
        form = None if self._form is None else self._form.copy()
        return ThinkingMatcher(self._thinking, form, self._position, self._markers)

    # --- masks ----------------------------------------------------------------------------------------------------

    def rest(self, at: int, drafts: list[int]) -> Position | None:
        """The position, as in `Backend.fill`, of those masks that the form's matcher makes."""
        for nth, position in enumerate(self._positions(drafts)):
            if self._form is not None and position.stage in (Stage.BEFORE, Stage.AFTER):
                return self._form, at + nth, drafts[nth:]
        return None

    def fill_own(self, at: int, drafts: list[int], masks: np.ndarray) -> None:
        """Writes the others, from masks[at] on."""
        for nth, position in enumerate(self._positions(drafts)):
            if self._form is not None and position.stage in (Stage.BEFORE, Stage.AFTER):
                return
            if forced := self._forced(position):
                masks[at + nth] = 0
                allow(masks[at + nth], forced[0])
            else:
                masks[at + nth] = -1
                for token_id in self._merged(position):
                    forbid(masks[at + nth], token_id)

    def _positions(self, drafts: list[int]) -> Iterator[ReasoningPosition]:
        """Where it is now, and after each draft."""
        position = self._position
        yield position
        for token_id in drafts:
            position = self._next(position, token_id)
            yield position

    @property
    def opener(self) -> int | None:
        """The first token of the begin marker if it is allowed in addition to the form's tokens, else None."""
        is_before = self._position.stage is Stage.BEFORE and self._form is not None
        return self._thinking.begin[0] if is_before and self._thinking.begin else None

    # --- transitions ----------------------------------------------------------------------------------------------

    def _opens(self, token_id: int) -> bool:
        """Before a form: whether the token begins the marker, and not the form."""
        assert self._form is not None, "only a form has to be told from its marker"
        return token_id == self.opener and not self._form.num_valid([token_id])

    def _allows(self, position: ReasoningPosition, token_id: int) -> bool:
        """Whether the token may come next, where the form's matcher does not say it."""
        forced = self._forced(position)
        return forced[0] == token_id if forced else token_id not in self._merged(position)

    def _merged(self, position: ReasoningPosition) -> list[int]:
        """Tokens with the end of the reasoning and the beginning of an answer that must have a form."""
        is_thinking = self._form is not None and position.stage is Stage.THINKING
        return self._markers[1].merged(position.recent) if is_thinking else []

    def _forced(self, position: ReasoningPosition) -> list[int]:
        if position.stage is Stage.OPENING:
            return list(self._thinking.begin[position.num_tokens :])
        return list(self._closing[position.num_tokens :]) if position.stage is Stage.CLOSING else []

    def _next(self, position: ReasoningPosition, token_id: int) -> ReasoningPosition:
        """The position after a token; it must be the forced token, if one is forced."""
        match position.stage:
            case Stage.BEFORE if self._form is not None:
                return self._entered(ReasoningPosition(Stage.OPENING, 1))
            case Stage.BEFORE:
                recent, is_begun = self._markers[0].next(position.recent, token_id)
                if not is_begun:
                    return ReasoningPosition(Stage.BEFORE, 0, recent)
                return self._entered(ReasoningPosition(Stage.THINKING))
            case Stage.THINKING:
                recent, is_ended = self._markers[1].next(position.recent, token_id)
                if is_ended:
                    return ReasoningPosition(Stage.AFTER)
                return self._entered(ReasoningPosition(Stage.THINKING, position.num_tokens + 1, recent))
            case Stage.OPENING | Stage.CLOSING:
                return self._entered(ReasoningPosition(position.stage, position.num_tokens + 1))
            case Stage.AFTER if self._form is None:
                recent, is_begun = self._markers[2].next(position.recent, token_id)
                if is_begun:
                    return self._entered(ReasoningPosition(Stage.THINKING))
                return ReasoningPosition(Stage.AFTER, 0, recent)
        return position

    def _entered(self, position: ReasoningPosition) -> ReasoningPosition:
        """Where `position` leads without a further token: a marker is complete, or the budget is spent."""
        thinking = self._thinking
        if position.stage is Stage.OPENING and position.num_tokens == len(thinking.begin):
            position = ReasoningPosition(Stage.THINKING)
        if position.stage is Stage.CLOSING and position.num_tokens == len(self._closing):
            return ReasoningPosition(Stage.AFTER)
        if position.stage is Stage.THINKING and thinking.budget is not None and position.num_tokens >= thinking.budget:
            return ReasoningPosition(Stage.CLOSING, self._markers[1].begun(position.recent, self._closing))
        return position


Position = tuple[Matcher, int, list[int]]


def for_forms(passed: Sequence[tuple[Matcher, list[int]]]) -> list[tuple[Matcher, list[int]]]:
    """The tokens that forms' matchers are to accept, of those that matchers are to accept."""
    forms = [
        (each.present_form if isinstance(each, ThinkingMatcher) else each, token_ids) for each, token_ids in passed
    ]
    return [(form, token_ids) for form, token_ids in forms if form is not None]


def free_of_form(matcher: Matcher, token_ids: list[int]) -> tuple[int, Matcher | None, list[int]]:
    """As `ThinkingMatcher.free_of_form`, for any matcher."""
    return matcher.free_of_form(token_ids) if isinstance(matcher, ThinkingMatcher) else (0, matcher, token_ids)


def split(
    positions: Sequence[Position],
) -> tuple[list[Position], list[tuple[ThinkingMatcher, int, list[int]]], list[tuple[int, int]]]:
    """Divides the positions of masks: those that forms' matchers make, those of which thinking matchers make some
    themselves, and pairs of mask index and token to allow in addition."""
    left, own, openers = list[Position](), [], []
    for matcher, at, drafts in positions:
        if not isinstance(matcher, ThinkingMatcher):
            left.append((matcher, at, drafts))
            continue
        if (opener := matcher.opener) is not None:
            openers.append((at, opener))
        own.append((matcher, at, drafts))
        if (rest := matcher.rest(at, drafts)) is not None:
            left.append(rest)
    return left, own, openers


def forbid(mask: np.ndarray, token_id: int) -> None:
    """Clears the token's bit in mask, [num_words] int32."""
    mask.view(np.uint32)[token_id // 32] &= ~np.uint32(1 << token_id % 32)


def allow(mask: np.ndarray, token_id: int) -> None:
    """Sets the token's bit in mask, [num_words] int32."""
    mask.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)
