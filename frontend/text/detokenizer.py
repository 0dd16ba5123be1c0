"""Text from tokens as they come: never half a character, never a stop string.

What `extend` and `add` returned is final. Pieces joined are the same however the tokens were cut into calls.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = range(6, 25)
_MAX_HELD_TOKENS = 16
"""Tokens held back because they decode to an incomplete character. A character takes four bytes at most, so a
longer run will not become one; it is given as it is, which bounds the work per token."""


class Detokenizer(Protocol):
    """Turns one sequence's tokens into text."""

    def extend(self, token_ids: Sequence[int]) -> str:
        """The text that is certain now, less what was given before."""
        ...

    def finish(self) -> str:
        """The rest: an incomplete character becomes U+FFFD."""
        ...


class ByteDetokenizer:
    """For byte-level tokenisers, whose tokens are byte strings: joins them through an incremental UTF-8 decoder.

    Exact for any tokens at all: the joined pieces equal `Tokenizer.decode` of them.
    """

    __slots__ = ("_bytes_of", "_decode")

    def __init__(self, bytes_of: Mapping[int, bytes]) -> None:
        """`bytes_of[token_id]` are the token's bytes; empty for one that is skipped."""
        self._bytes_of = bytes_of
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def extend(self, token_ids: Sequence[int]) -> str:
        bytes_of = self._bytes_of
        if len(token_ids) == 1:
            return self._decode(bytes_of[token_ids[0]])
        return self._decode(b"".join([bytes_of[token_id] for token_id in token_ids]))

    def finish(self) -> str:
        return self._decode(b"", True)


class DecodesTokens(Protocol):
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = ...) -> str: ...


class WindowDetokenizer:
    """For any other tokeniser: decodes a window that begins with tokens already given, and gives what it adds.

        window:  | given in the step before | new, held back until they decode to whole characters |
                 |<------- num_given ------>|

    The given part is the new tokens' context: sentencepiece drops the space before the first token it decodes,
    and joins runs of byte tokens. It starts as the end of the prompt, so that the output reads on from there.
    """

    __slots__ = ("_given_text", "_num_given", "_skipped", "_tokenizer", "_window")

    def __init__(
        self, tokenizer: DecodesTokens, skipped_ids: Collection[int] = (), prompt_token_ids: Sequence[int] = ()
    ) -> None:
        """`skipped_ids` never show in the text: the special tokens, when those are skipped."""
        self._tokenizer, self._skipped = tokenizer, skipped_ids
        self._window: list[int] = []
        for length in _CONTEXT_TOKENS if prompt_token_ids else ():
            context = [each for each in prompt_token_ids[-length:] if each not in skipped_ids]
            # A context cut inside a character would spoil every byte token that follows it.
            if REPLACEMENT not in self._decode(context):
                self._window = context
                break
        self._num_given, self._given_text = len(self._window), self._decode(self._window)

    def extend(self, token_ids: Sequence[int]) -> str:
        return "".join([self._add(token_id) for token_id in token_ids])

    def finish(self) -> str:
        return self._decode(self._window)[len(self._given_text) :]

    def _add(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        incomplete = len(text) <= len(self._given_text) or text.endswith(REPLACEMENT)
        if incomplete and len(self._window) - self._num_given < _MAX_HELD_TOKENS:
            return ""
        new = text[len(self._given_text) :]
        del self._window[: self._num_given]
        self._num_given, self._given_text = len(self._window), self._decode(self._window)
        return new

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)  # they never enter the window


class StopChecker:
    """Finds stop strings in text that comes in pieces, and holds back what could still become one.

    The stop string that is complete first counts; of several complete at once, the longest.
    """

    __slots__ = ("_first_characters", "_held", "_include", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        self._stops, self._include = tuple(stops), include_in_output
        # Only text that ends in one of these can be the beginning of a stop string.
        self._first_characters = frozenset("".join(stop[:-1] for stop in stops))
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found; nothing is to be added after that."""

    def add(self, text: str) -> str:
        """The text that is certain now. Once `matched` is set, it is the last."""
        if not text:
            return ""
        text = self._held + text
        if ends := [(at + len(stop), -len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0]:
            end, _, self.matched = min(ends)
            self._held = ""
            return text[: end if self._include else end - len(self.matched)]
        num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        """What was held back, now that nothing follows."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        if text[-1] not in self._first_characters:
            return 0
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
