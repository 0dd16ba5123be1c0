"""Regular expressions that a checkpoint's or an adapter's files have for names of modules.

Python's own `re` may take longer than the universe has for one such as `(a|.)+$(?<!z)`, and no other thread of the
process runs meanwhile. The package `regex` has the same syntax, lets other threads run, and can be told when to stop.
"""

from __future__ import annotations

import time

import regex

from headrace.ipc.failure import ModelError
from headrace.ipc.process.log import printable

MOST_S = 5.0
"""Processor time for all matches of a file's expressions. Those that people write take some microseconds each."""


def check_expression(expression: str, written: str, field: str) -> None:
    """Raises ModelError if the expression is not valid. written: how the field has it."""
    try:
        regex.compile(expression)
    except (regex.error, RecursionError) as error:
        raise ModelError(f"{field} has {printable(written)!r:.80}, which is no regular expression: {error}") from error


class Expressions:
    """Matches the expressions of one file, all within MOST_S."""

    def __init__(self, of: str) -> None:
        """of: what has the expressions, for messages."""
        self._of, self._left_s = of, MOST_S

    def matches(self, expression: str, name: str) -> bool:
        """Whether a name begins with what an expression stands for. Raises ModelError once MOST_S are used up."""
        began_s = time.thread_time()
        try:
            return regex.match(expression, name, timeout=self._left_s) is not None
        except TimeoutError:
            raise ModelError(
                f"{self._of}: its regular expressions for modules' names take too long to match; the last one was "
                f"{printable(expression)!r:.80}, of {printable(name)!r:.80}"
            ) from None
        finally:
            self._left_s = max(self._left_s - (time.thread_time() - began_s), 0.001)
