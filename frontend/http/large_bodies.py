"""Bodies that would hold the event loop up: bounded in what they hold, decoded and tokenised in threads of their own.

What is read of bodies and not decoded yet has a bound over all connections, and so has the number of values in one
body, counted before any object is made: msgspec and Python keep the interpreter to themselves while they make them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import TypeVar

from headrace.frontend.http.errors import ApiError
from headrace.ipc.failure import HeadraceError

T = TypeVar("T")

INLINE_BYTES = 16 << 10
"""Smaller bodies are decoded, and their texts tokenised, at once."""
MOST_SEPARATORS = 1 << 20
"""Commas in a body: about a value each, token ids most likely, and those of texts count too."""
MOST_CONTAINERS = 1 << 18
"""Quotes, brackets and braces that open: texts, lists and objects take more time and memory than numbers."""
_NUM_THREADS = 2
_BODIES_IN_MEMORY = 8
"""Bodies of the largest size that may be read and wait at a time."""
_COUNT_BYTES = 1 << 20
_TRIM_BYTES = 1 << 20


class LargeBodies:
    """One for all connections of a process. Everything but `run`'s function happens in the event loop."""

    def __init__(self, max_body_bytes: int) -> None:
        self._most_bytes = _BODIES_IN_MEMORY * max_body_bytes
        self._num_bytes = 0
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="large-body")
        self._is_trim_due = False

    def reserve(self, num_bytes: int) -> None:
        """So much more of a body is in memory, until `release`. Raises ApiError where that is too much of all."""
        if self._num_bytes + num_bytes > self._most_bytes:
            raise ApiError(
                HTTPStatus.TOO_MANY_REQUESTS,
                "the bodies of other requests fill the memory that this server has for them; try again",
                type="rate_limit_error",
                code="too_many_bodies",
                retry_after_s=1.0,
            )
        self._num_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        self._num_bytes -= num_bytes

    async def run(self, body: bytes, make: Callable[[bytes], T]) -> T:
        """What `make` makes of a body, in another thread unless it is small. Raises what it raises, and ApiError."""
        if len(body) <= INLINE_BYTES:
            return make(body)
        only = [body]
        del body  # what is raised refers to this frame, and would keep the body until the next collection
        return await asyncio.get_running_loop().run_in_executor(self._threads, _make, only, make)

    def give_back(self, num_bytes: int) -> None:
        """A request whose body had so many bytes has ended: its memory goes back to the system, if it was much."""
        if num_bytes > _TRIM_BYTES and not self._is_trim_due:
            self._is_trim_due = True
            asyncio.get_running_loop().run_in_executor(self._threads, self._trim)

    def _trim(self) -> None:
        self._is_trim_due = False
        with contextlib.suppress(AttributeError):  # glibc's alone
            ctypes.CDLL(None).malloc_trim(0)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _make(only: list[bytes], make: Callable[[bytes], T]) -> T:
    try:
        check_shape(only[0])
        return make(only.pop())
    except (ApiError, HeadraceError) as error:
        only.clear()
        raise error.with_traceback(None) from None  # its frames hold what was decoded


def check_shape(body: bytes) -> None:
    """Raises ApiError for a body of too many values. Counted by parts, between which other threads have their turn."""
    separators = containers = 0
    for start in range(0, len(body), _COUNT_BYTES):
        part = body[start : start + _COUNT_BYTES]
        separators += part.count(b",")
        containers += part.count(b'"') // 2 + part.count(b"[") + part.count(b"{")
        if separators > MOST_SEPARATORS or containers > MOST_CONTAINERS:
            raise ApiError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the body has more than {MOST_SEPARATORS} commas, or more than {MOST_CONTAINERS} texts, lists and "
                "objects: spread it over several requests",
                code="body_too_large",
            )
