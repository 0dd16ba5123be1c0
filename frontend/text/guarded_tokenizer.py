"""The `tokenizers` library's tokenizer, whose faults are refusals: it panics of some texts, and takes hours for others.

Its panics are no Exceptions: they would end the thread, not the request. Its regular expressions, which a model's file
brings, may try exponentially many ways to match a text, and nothing can interrupt them. A tokenizer with such an
expression works in threads, for a limited processor time each; a thread beyond that is left alone, and new work is
refused while too many of these go on.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec

from headrace.frontend.text.template_renderer import leave_event_loop, renderer
from headrace.ipc.failure import InvalidRequestError, QueueFullError
from headrace.ipc.struct_types import threadsafe

T = TypeVar("T")

MOST_WORK_S = 5.0
"""Limit of processor time for one call, where an expression may take for ever."""
_LONGEST_S = 60.0
"""Limit by the clock, for work that the library does on threads of its own."""
_MOST_HANGING = 4
_LOOK_S = 0.1
_REPEATS = re.compile(r"[+*]|\{\d+,\d*\}")
_MOST_REPEATS = 2
"""Parts without a bound in one alternative of an expression, up to which its work stays small. The expressions of
published models have at most two."""


class TokenizingError(InvalidRequestError):
    """The model's tokenizer fails at a text or at tokens."""


class GuardedTokenizer:
    """Has the library's methods. Those that work on text raise TokenizingError."""

    def __init__(self, library: Any, tokenizer_json: bytes) -> None:
        self._library = library
        self._may_hang = any(map(_may_hang, _expressions(tokenizer_json)))
        self._hanging = threading.Semaphore(_MOST_HANGING)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    @property
    def encode_special_tokens(self) -> bool:
        return bool(self._library.encode_special_tokens)

    @encode_special_tokens.setter
    def encode_special_tokens(self, value: bool) -> None:
        self._library.encode_special_tokens = value

    def encode(self, text: str, *, add_special_tokens: bool) -> Any:
        """The encoding of a text."""
        if not self._may_hang:
            return self._guarded(_PROMPT, self._library.encode, text, add_special_tokens=add_special_tokens)
        # Unlike `encode`, this lets other threads run meanwhile.
        several = self._guarded(_PROMPT, self._library.encode_batch, [text], add_special_tokens=add_special_tokens)
        return several[0]

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> Any:
        """The encodings of several texts, without offsets, on several threads."""
        if self._may_hang:
            return [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]
        return self._guarded(_PROMPT, self._library.encode_batch_fast, texts, add_special_tokens=add_special_tokens)

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text of tokens."""
        text: str = self._guarded(_TOKENS, self._library.decode, ids, skip_special_tokens=skip_special_tokens)
        return text

    def decode_batch(self, sequences: list[list[int]], *, skip_special_tokens: bool) -> list[str]:
        """The texts of several sequences of tokens."""
        texts: list[str] = self._guarded(
            _TOKENS, self._library.decode_batch, sequences, skip_special_tokens=skip_special_tokens
        )
        return texts

    def post_process(self, encoding: Any, pair: Any, add_special_tokens: bool) -> Any:
        """The encoding with special tokens."""
        return self._guarded(_PROMPT, self._library.post_process, encoding, pair, add_special_tokens)

    def _guarded(self, what: str, work: Callable[..., T], *args: Any, **named: Any) -> T:
        """Calls the library. what: the subject of an error's message."""
        try:
            if self._may_hang:
                return self._watched(what, functools.partial(work, *args, **named))
            return work(*args, **named)
        except BaseException as error:
            if not is_panic(error) and type(error) is not Exception:  # as which the library raises its other faults
                raise
            raise TokenizingError(f"{what}: the model's tokenizer fails: {str(error)[:_LONGEST_REASON]}") from None

    def _watched(self, what: str, work: Callable[[], T]) -> T:
        leave_event_loop()
        num_ends = renderer().num_ends
        if not self._hanging.acquire(blocking=False):
            raise QueueFullError("the model's tokenizer still works on other prompts, which take very long; try again")
        results: list[T] = []
        errors: list[BaseException] = []
        clocks: list[int] = []

        def run() -> None:
            try:
                clocks.append(time.pthread_getcpuclockid(threading.get_ident()))
                results.append(work())
            except BaseException as error:
                errors.append(error)
            finally:
                self._hanging.release()

        thread = threading.Thread(target=run, name="tokenizer", daemon=True)
        thread.start()
        end_s = time.monotonic() + _LONGEST_S
        thread.join(_LOOK_S)
        while thread.is_alive():
            try:
                used_s = time.clock_gettime(clocks[0]) if clocks else 0.0
            except OSError:  # the thread has ended
                break
            if renderer().num_ends != num_ends:  # this process waits at its end for the thread that waits here
                raise TokenizingError(f"{what}: the server ends")
            if used_s > MOST_WORK_S or time.monotonic() > end_s:
                raise TokenizingError(
                    f"{what}: the model's tokenizer takes more than {MOST_WORK_S:g} s of processor time, as much as it "
                    "may take"
                )
            thread.join(_LOOK_S)
        thread.join()
        if errors:
            raise errors[0]
        return results[0]


def is_panic(error: BaseException) -> bool:
    """Whether a library in Rust panicked. That is no Exception, and its class cannot be imported."""
    return type(error).__name__ == "PanicException"


_PROMPT = "the prompt cannot be tokenised"
_TOKENS = "the tokens cannot be made text"
_LONGEST_REASON = 300


class _Described(msgspec.Struct):
    """The parts of a tokenizer's file that may hold expressions. The vocabulary, nearly all of it, is left out."""

    normalizer: Any = None
    pre_tokenizer: Any = None
    decoder: Any = None


def _expressions(tokenizer_json: bytes) -> Iterator[str]:
    """The regular expressions in a tokenizer's file."""
    described = msgspec.json.decode(tokenizer_json, type=threadsafe(_Described))
    todo = [described.normalizer, described.pre_tokenizer, described.decoder]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            if isinstance(part.get("Regex"), str):
                yield part["Regex"]
            todo += part.values()
        elif isinstance(part, list):
            todo += part


def _may_hang(expression: str) -> bool:
    """Whether an expression repeats what repeats, or has many parts without a bound in an alternative."""
    plain = re.sub(r"\\.", "x", expression, flags=re.DOTALL)
    plain = re.sub(r"\[(?:[^\[\]]|\[[^\[\]]*\])*\]", "x", plain)  # characters of a set
    plain = plain.replace("(?:", "(").replace("(?i:", "(")
    while (found := re.search(r"\(([^()]*)\)", plain)) is not None:
        inner = found.group(1)
        if (_REPEATS.search(inner) or "|" in inner) and _REPEATS.match(plain, found.end()):
            return True
        repeats = max(len(_REPEATS.findall(each)) for each in inner.split("|"))
        if repeats > _MOST_REPEATS:
            return True
        plain = plain[: found.start()] + "x" + "+x" * repeats + plain[found.end() :]
    return any(len(_REPEATS.findall(each)) > _MOST_REPEATS for each in plain.split("|"))
