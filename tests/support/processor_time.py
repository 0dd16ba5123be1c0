"""What work costs, in processor seconds of a machine at rest. A busy one computes several times slower: its caches, its
memory and the two halves of its cores are shared with whatever runs beside."""

from __future__ import annotations

import time
from collections.abc import Callable

from headrace.ipc.process.gc_pauses import no_collections

AT_REST_S = 0.005
"""Of `_reference` on an idle machine."""
TRIES = 4


def processor_s(work: Callable[[], object]) -> float:
    """Of the calling thread, without collections of what other tests left, as an idle machine would take."""
    with no_collections():
        before_s = _thread_s(_reference)
        took_s = _thread_s(work)
        slower = max(before_s, _thread_s(_reference)) / AT_REST_S
    return took_s / max(1.0, slower)


def least_processor_s(work: Callable[[], object], most_s: float) -> float:
    """Of several tries, until one takes less than `most_s`: for work that can be repeated."""
    if (took_s := _here_s(work)) < most_s:
        return took_s
    least_s = processor_s(work)
    for _ in range(TRIES - 1):
        if least_s < most_s:
            break
        least_s = min(least_s, processor_s(work))
    return least_s


def is_linear(whole: Callable[[], object], eighth: Callable[[], object], most_s: float) -> bool:
    """Whether work takes less than `most_s`, or not much more than its length of what an eighth of it takes."""
    return _here_s(whole) < most_s or processor_s(whole) < max(most_s, 20 * processor_s(eighth))


def _here_s(work: Callable[[], object]) -> float:
    """As the machine is now, which is no less than at rest. What compares with that takes longer than most work."""
    with no_collections():
        return _thread_s(work)


def _reference() -> None:
    counts = dict[str, int]()
    for number in range(20_000):
        name = str(number % 1000)
        counts[name] = counts.get(name, 0) + 1


def _thread_s(work: Callable[[], object]) -> float:
    began_s = time.thread_time()
    work()
    return time.thread_time() - began_s
