"""A null executor whose first step holds the interpreter for seconds, as a library does that computes in one call."""

from __future__ import annotations

import time

from null_with_tokenizer import TokenizingNullExecutor

from headrace.ipc.step import StepResult

BUSY = "busy_executor:BusyExecutor"
HELD_S = 5.0


class BusyExecutor(TokenizingNullExecutor):
    is_fresh = True

    def collect(self) -> StepResult:
        if self.is_fresh:
            self.is_fresh = False
            hold_interpreter(HELD_S)
        return super().collect()


def hold_interpreter(seconds: float) -> None:
    """Computes in one call of C, in which no other thread of Python runs."""
    exponent, took_s = 1 << 16, 0.0
    while took_s < 0.05:
        exponent *= 2
        began_s = time.thread_time()
        pow(3, exponent)
        took_s = time.thread_time() - began_s
    pow(3, int(exponent * (seconds / took_s) ** 0.64))  # Karatsuba: the time grows as the 1.585th power
