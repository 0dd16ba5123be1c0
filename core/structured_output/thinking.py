"""An answer that begins with reasoning: how long that may be, and a form that holds only after it.

    BEFORE ----begin----> THINKING ----end----> AFTER        the tokens of the markers `begin` and `end` lead on
       |                      |                   ^
       |                      +- budget spent --> CLOSING -- the tokens that are forced: the end, or words and the end
       +--- a token of the form, where there is one ------->

In BEFORE and THINKING any token may come; where a form is asked for, an answer either begins with the marker or is of
the form from its first token on. A prompt may leave the reasoning open: then answers start in THINKING.
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
    OPENING = enum.auto()  # the rest of the marker that has begun has to come
    THINKING = enum.auto()
    CLOSING = enum.auto()
    AFTER = enum.auto()


class Place(NamedTuple):
    stage: Stage
    num_tokens: int = 0
    """Of the reasoning; in OPENING and CLOSING, of the marker."""
    recent: tuple[int, ...] = ()
    """The last tokens, fewer than the marker that is waited for has."""


class ThinkingMatcher:
    """A `Matcher`. Its masks are its own up to AFTER, and those of the form's matcher from there on."""

    def __init__(self, thinking: Thinking, form: Matcher | None, place: Place | None = None) -> None:
        """form: at its beginning; None where any answer may follow."""
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
        """Writes the masks, from masks[at] on, that are not the form's. The others, as `Backend.fill` takes them."""
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
        """The token that may come besides those of the form; None where there is none."""
        is_before = self._place.stage is Stage.BEFORE and self._form is not None
        return self._thinking.begin[0] if is_before and self._thinking.begin else None

    # --- its places -----------------------------------------------------------------------------------------------

    def _opens(self, token_id: int) -> bool:
        """Before a form: the marker begins, and nothing that the form has."""
        assert self._form is not None, "only a form has to be told from its marker"
        return token_id == self.opener and not self._form.num_valid([token_id])

    def _forced(self, place: Place) -> list[int]:
        if place.stage is Stage.OPENING:
            return list(self._thinking.begin[place.num_tokens :])
        return list(self._closing[place.num_tokens :]) if place.stage is Stage.CLOSING else []

    def _next(self, place: Place, token_id: int) -> Place:
        """After a token, which what is forced allows."""
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
        """Where a place leads without another token: a marker is whole, or the budget is spent."""
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
    """The places whose masks backends fill, the others being written; and tokens to allow besides, by mask."""
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
    """mask: [num_words] int32, changed."""
    mask.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)
