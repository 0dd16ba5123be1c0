"""Answers that begin with reasoning: limits the length of the reasoning, and applies the grammar only after it.

    BEFORE ----begin----> THINKING ----end----> AFTER        the tokens of the markers `begin` and `end` lead on
       |                      |                   ^
       |                      +- budget spent --> CLOSING -- forced tokens: the end marker, perhaps after some text
       +--- a token of the form, if there is one ---------->

In BEFORE and THINKING any token is allowed. With a form (a grammar), an answer either begins with the marker, or
follows the form from its first token on. If the prompt ends within reasoning, the answer starts in THINKING.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from headrace.core.structured_output.backend import Backend, Matcher
from headrace.ipc.messages import Thinking


class Stage(enum.Enum):
    BEFORE = enum.auto()
    OPENING = enum.auto()  # the rest of the begin marker is forced
    THINKING = enum.auto()
    CLOSING = enum.auto()
    AFTER = enum.auto()


class Place(NamedTuple):
    stage: Stage
    num_tokens: int = 0
    """Tokens of the reasoning so far; in OPENING and CLOSING, of the marker so far."""
    recent: tuple[int, ...] = ()
    """The last tokens, at most as many as the expected marker has, to recognise it."""


class ThinkingMatcher:
    """A `Matcher` that makes its own masks until AFTER, and then uses those of the form's matcher."""

    def __init__(self, thinking: Thinking, form: Matcher | None, place: Place | None = None) -> None:
        """form: matcher of the answer's form, at its start. None: any answer may follow the reasoning."""
        self._thinking, self._form = thinking, form
        self._closing = thinking.forced or thinking.end
        self._place = place or self._entered(Place(Stage.THINKING if thinking.is_open else Stage.BEFORE))

    # --- as a matcher ---------------------------------------------------------------------------------------------

    @property
    def backend(self) -> Backend:
        raise AssertionError("`split` has given its places to the backends")

    def accept(self, token_id: int) -> bool:
        if self._place.stage is Stage.BEFORE and self._form is not None and not self._opens(token_id):
            self._place = Place(Stage.AFTER)
        if self._place.stage is Stage.AFTER:
            return self._form is None or self._form.accept(token_id)
        forced = self._forced(self._place)
        self._place = self._next(self._place, token_id)
        return not forced or forced[0] == token_id

    @property
    def is_complete(self) -> bool:
        return self._place.stage is Stage.AFTER and self._form is not None and self._form.is_complete

    @property
    def problem(self) -> str:
        return self._form.problem if self._form is not None else ""

    def num_valid(self, token_ids: Sequence[int]) -> int:
        place = self._place
        for nth, token_id in enumerate(token_ids):
            if self._form is not None and place.stage in (Stage.BEFORE, Stage.AFTER):
                return nth + self._form.num_valid(token_ids[nth:])
            forced = self._forced(place)
            if forced and forced[0] != token_id:
                return nth
            place = self._next(place, token_id)
        return len(token_ids)

    def forced_tokens(self) -> list[int]:
        if self._place.stage is Stage.AFTER:
            return [] if self._form is None else self._form.forced_tokens()
        return self._forced(self._place)

    def copy(self) -> ThinkingMatcher:
        return ThinkingMatcher(self._thinking, None if self._form is None else self._form.copy(), self._place)

    # --- masks ----------------------------------------------------------------------------------------------------

    def fill_own(self, at: int, drafts: list[int], masks: np.ndarray) -> tuple[Matcher, int, list[int]] | None:
        """Writes those masks, from masks[at] on, that the form's matcher does not make. Returns the place of the others
        in the form of `Backend.fill`, or None."""
        place = self._place
        for nth in range(len(drafts) + 1):
            if self._form is not None and place.stage in (Stage.BEFORE, Stage.AFTER):
                return self._form, at + nth, drafts[nth:]
            if forced := self._forced(place):
                masks[at + nth] = 0
                allow(masks[at + nth], forced[0])
            else:
                masks[at + nth] = -1
            if nth < len(drafts):
                place = self._next(place, drafts[nth])
        return None

    @property
    def opener(self) -> int | None:
        """The first token of the begin marker if it is allowed in addition to the form's tokens, else None."""
        is_before = self._place.stage is Stage.BEFORE and self._form is not None
        return self._thinking.begin[0] if is_before and self._thinking.begin else None

    # --- transitions ----------------------------------------------------------------------------------------------

    def _opens(self, token_id: int) -> bool:
        """Before a form: whether the token begins the marker, and not the form."""
        assert self._form is not None, "only a form has to be told from its marker"
        return token_id == self.opener and not self._form.num_valid([token_id])

    def _forced(self, place: Place) -> list[int]:
        if place.stage is Stage.OPENING:
            return list(self._thinking.begin[place.num_tokens :])
        return list(self._closing[place.num_tokens :]) if place.stage is Stage.CLOSING else []

    def _next(self, place: Place, token_id: int) -> Place:
        """The place after a token; it must be the forced token, if one is forced."""
        begin, end = self._thinking.begin, self._thinking.end
        match place.stage:
            case Stage.BEFORE if self._form is not None:
                return self._entered(Place(Stage.OPENING, 1))
            case Stage.BEFORE:
                recent = (*place.recent, token_id)[-len(begin) :] if begin else ()
                is_begun = bool(begin) and recent == begin
                return self._entered(Place(Stage.THINKING)) if is_begun else Place(Stage.BEFORE, 0, recent)
            case Stage.THINKING:
                recent = (*place.recent, token_id)[-len(end) :]
                if recent == end:
                    return Place(Stage.AFTER)
                return self._entered(Place(Stage.THINKING, place.num_tokens + 1, recent))
            case Stage.OPENING | Stage.CLOSING:
                return self._entered(Place(place.stage, place.num_tokens + 1))
        return place

    def _entered(self, place: Place) -> Place:
        """The place reached from `place` without a further token: a marker is complete, or the budget is spent."""
        thinking = self._thinking
        if place.stage is Stage.OPENING and place.num_tokens == len(thinking.begin):
            place = Place(Stage.THINKING)
        if place.stage is Stage.CLOSING and place.num_tokens == len(self._closing):
            return Place(Stage.AFTER)
        if place.stage is Stage.THINKING and thinking.budget is not None and place.num_tokens >= thinking.budget:
            closing = self._closing
            begun = (n for n in range(len(closing) - 1, 0, -1) if place.recent[-n:] == closing[:n])
            return Place(Stage.CLOSING, next(begun, 0))
        return place


def split(
    places: Sequence[tuple[Matcher, int, list[int]]], masks: np.ndarray
) -> tuple[list[tuple[Matcher, int, list[int]]], list[tuple[int, int]]]:
    """Fills the masks that thinking matchers make themselves. Returns the places that backends fill, and pairs of mask
    index and token to allow in addition."""
    left, openers = [], []
    for matcher, at, drafts in places:
        if not isinstance(matcher, ThinkingMatcher):
            left.append((matcher, at, drafts))
            continue
        if (opener := matcher.opener) is not None:
            openers.append((at, opener))
        if (rest := matcher.fill_own(at, drafts, masks)) is not None:
            left.append(rest)
    return left, openers


def allow(mask: np.ndarray, token_id: int) -> None:
    """Sets the token's bit in mask, [num_words] int32."""
    mask.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)
