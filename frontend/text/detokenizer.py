"""Incremental detokenisation: returned pieces never end within a character and never contain a stop string.

Text returned by `extend` and `add` is final. The joined pieces do not depend on how tokens were divided into calls.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = range(6, 25)
_MAX_HELD_TOKENS = 16
"""Most tokens held back because they decode to an incomplete character. A character has at most four bytes, so a longer
run will not become one; it is returned as it decodes, which bounds the work per token."""


class Detokenizer(Protocol):
    """Turns one sequence's tokens into text."""

    def extend(self, token_ids: Sequence[int]) -> str:
        """The new text that is final after these tokens."""
        ...

    def finish(self) -> str:
        """The text still held back; an incomplete character becomes U+FFFD."""
        ...


class ByteDetokenizer:
    """For byte-level tokenisers, whose tokens are byte strings: joins them through an incremental UTF-8 decoder.

    Exact for any tokens: the joined pieces equal `Tokenizer.decode` of all tokens.
    """

    __slots__ = ("_bytes_of", "_decode")

    def __init__(self, bytes_of: Mapping[int, bytes]) -> None:
        """bytes_of: each token id's bytes; empty for a token that is skipped."""
        self._bytes_of = bytes_of
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def extend(self, token_ids: Sequence[int]) -> str:
        bytes_of = self._bytes_of
        if len(token_ids) == 1:
            return self._decode(bytes_of[token_ids[0]])
        return self._decode(b"".join(map(bytes_of.__getitem__, token_ids)))

    def finish(self) -> str:
        return self._decode(b"", True)


class DecodesTokens(Protocol):
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = ...) -> str: ...


class WindowDetokenizer:
    """For any other tokeniser: decodes a window that begins with tokens whose text was returned already, and returns
    the text that the new tokens add.

        window:  | returned in the previous step | new, held back until they decode to whole characters |
                 |<--------- num_given --------->|

    The returned part is context for the new tokens: SentencePiece drops the space before the first token it decodes,
    and joins runs of byte tokens. At first the context is the end of the prompt, which the output continues.
    """

    __slots__ = ("_given_text", "_joined", "_num_given", "_skipped", "_tokenizer", "_window")

    def __init__(
        self,
        tokenizer: DecodesTokens,
        skipped_ids: Collection[int] = (),
        prompt_token_ids: Sequence[int] = (),
        joined: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """skipped_ids: tokens left out of the text, such as the special tokens. joined: the texts of tokens between
        which no space stands, whatever the tokenizer decodes there."""
        self._tokenizer, self._skipped, self._joined = tokenizer, skipped_ids, joined
        self._window: list[int] = []
        for length in _CONTEXT_TOKENS if prompt_token_ids else ():
            context = [each for each in prompt_token_ids[-length:] if each not in skipped_ids]
            # A context that begins inside a character would garble the byte tokens after it.
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
        follows = self._window[-1] if len(self._window) == self._num_given and self._window else None
        self._window.append(token_id)
        text = self._decode(self._window)
        if token_id in self._joined and follows in self._joined:
            text = self._given_text + self._joined[token_id]
        incomplete = len(text) <= len(self._given_text) or text.endswith(REPLACEMENT)
        if incomplete and len(self._window) - self._num_given < _MAX_HELD_TOKENS:
            return ""
        new = text[len(self._given_text) :]
        del self._window[: self._num_given]
        self._num_given, self._given_text = len(self._window), self._decode(self._window)
        return new

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)  # skipped tokens never enter the window


class StopChecker:
    """Finds stop strings in text that arrives in pieces, and holds back text that could still become one.

    The stop string that is complete first matches; of several that are complete at once, the longest. One that is
    complete in text that does not count (before min_tokens) is none; one that begins there and is complete later is.
    """

    __slots__ = ("_first_characters", "_held", "_include", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        self._stops, self._include = tuple(stops), include_in_output
        # Text can end in an incomplete stop string only if its last character is one of these.
        self._first_characters = frozenset("".join(stop[:-1] for stop in stops))
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found; callers must not call `add` after that."""

    def add(self, text: str, *, counts: bool = True) -> str:
        """The new text that is final. If this call sets `matched`, it is the last text."""
        if not text:
            return ""
        known, text = len(self._held), self._held + text
        ends = []
        for stop in self._stops if counts else ():
            if (at := text.find(stop, max(0, known + 1 - len(stop)))) >= 0:
                ends.append((at + len(stop), -len(stop), stop))
        if ends:
            end, _, self.matched = min(ends)
            self._held = ""
            return text[: end if self._include else end - len(self.matched)]
        num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        """The text that was held back, at the end of the output."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Length of the longest suffix of `text` that begins a stop string."""
        if text[-1] not in self._first_characters:
            return 0
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
