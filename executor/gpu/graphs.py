"""Captures decode steps as CUDA graphs, one per batch size, `StepEnding` and number of a row's adapters, while requests
are already served.

A decode batch of n requests runs in the smallest captured size that holds it, filled up with the padding row. Until
that size is captured it runs eagerly, so no request waits for all captures: they are made one at a time between steps.
The largest size is captured first, since all graphs share one memory pool and the smaller ones then fit into it; then
the graph that most steps lacked, then the rest from large to small.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.executor.gpu.sampler import StepEnding
from headrace.ipc.failure import HeadraceError, OptionError

logger = logging.getLogger(__name__)
LARGEST_DEFAULT = 512
STEPS_BETWEEN_CAPTURES = 8
"""While requests run, a capture (some 50 ms) is made only after this many steps have lacked a graph."""


def capture_sizes(max_num_seqs: int, sizes: Sequence[int] = (), largest: int | None = None) -> tuple[int, ...]:
    """The batch sizes to capture, ascending: `sizes` or, without them, vLLM's list 1, 2, 4, 8, 16, 24 ... 256, 272 ...

    A batch has at most max_num_seqs requests; sizes beyond the first that holds them all are dropped. Raises
    OptionError for a size below 1, or when `largest` is not the largest of `sizes`.
    """
    if bad := [size for size in sizes if size < 1]:
        raise OptionError(f"cudagraph_capture_sizes holds {bad[0]}; a batch has at least 1 request")
    if sizes and largest is not None and max(sizes) != largest:
        raise OptionError(
            f"max_cudagraph_capture_size={largest} contradicts cudagraph_capture_sizes, whose largest is {max(sizes)}; "
            "give only one of the two"
        )
    wanted = sorted(set(sizes)) or _default_sizes(min(max_num_seqs, largest or LARGEST_DEFAULT))
    covering = [size for size in wanted if size >= max_num_seqs]
    return tuple(size for size in wanted if size < max_num_seqs or size == covering[0])


def _default_sizes(largest: int) -> list[int]:
    """Multiples of 8 up to 256 and of 16 beyond, and `largest`: padding is at most 7 of 16 rows, and 15 of 272."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, largest + 1, 16)]
    return [size for size in sizes if size < largest] + [largest]


class Replay(Protocol):
    def __call__(self) -> None:
        """Runs the captured work again, on the same tensors as at its capture."""
        ...


class Capturer(Protocol):
    """Captures graphs. `hardware.cuda.CudaCapturer` captures CUDA graphs."""

    def capture(self, run: Callable[[], Any]) -> tuple[Replay, Any]:
        """Runs `run` once to warm up and once to capture; returns the replay, and the captured run's result.
        Both runs may write to whatever `run` writes to. Raises RuntimeError when something in it cannot be captured.
        """
        ...

    @property
    def pool_bytes(self) -> int:
        """Memory of the graphs captured so far."""
        ...

    def forget(self) -> None:
        """Frees the memory of the graphs captured so far; they must not be replayed any more."""
        ...


@dataclass(frozen=True)
class GraphKey:
    size: int
    ending: StepEnding
    most_adapters: int = 0
    """Of a row; 0: the step adds none."""


@dataclass(frozen=True, eq=False)
class Graph:
    key: GraphKey
    replay: Replay
    result: Any
    """What the captured function returned: tensors that each replay overwrites."""


class DecodeGraphs:
    """The captured graphs, and the choice of the next one to capture."""

    def __init__(self, sizes: Sequence[int], capturer: Capturer | None, run: Callable[[GraphKey], Any]) -> None:
        """capturer: None where all steps run eagerly; run: runs one decode step of padding rows for the key."""
        self.sizes = tuple(sizes)
        self._capturer, self._run = capturer, run
        self._graphs: dict[GraphKey, Graph] = {}
        self._kinds: list[tuple[StepEnding, int]] = [(StepEnding.ARGMAX, 0)] if capturer is not None else []
        """The ending and the most adapters of a row, of which each size gets a graph."""
        self._lacked: dict[GraphKey, int] = {}
        self._failed: dict[GraphKey, str] = {}
        """Graphs that could not be captured, with the reason. They are not tried again before `forget`."""
        self._steps_lacking = 0

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def pool_bytes(self) -> int:
        return self._capturer.pool_bytes if self._capturer is not None else 0

    @property
    def why_eager(self) -> str:
        """Why some or all decode steps run eagerly; "" if none has to."""
        if self._capturer is None:
            return "enforce_eager is set"
        if not self._failed:
            return ""
        key, why = next(reversed(self._failed.items()))
        return f"{len(self._failed)} graphs could not be captured, the last for a batch of {key.size}: {why}"

    def key_for(self, batch_size: int, ending: StepEnding, most_adapters: int = 0) -> GraphKey | None:
        """The graph for such a batch, captured or not: the smallest capturable size that holds it; None without one."""
        keys = (GraphKey(size, ending, most_adapters) for size in self.sizes if size >= batch_size)
        return next((key for key in keys if key not in self._failed), None)

    def find(self, batch_size: int, ending: StepEnding, most_adapters: int = 0) -> Graph | None:
        """The graph for a batch; None to run it eagerly. A missing graph is counted, and the most missed is next."""
        key = self.key_for(batch_size, ending, most_adapters)
        if key is None or self._capturer is None:
            return None
        if (ending, most_adapters) not in self._kinds:
            self._kinds.append((ending, most_adapters))
        graph = self._graphs.get(key)
        if graph is None:
            self._lacked[key] = self._lacked.get(key, 0) + 1
            self._steps_lacking += 1
        return graph

    def forget(self) -> None:
        """Drops all graphs, since the tensors that they use are about to move. All will be captured again."""
        self._graphs.clear()
        self._lacked.clear()
        self._failed.clear()
        self._steps_lacking = 0
        if self._capturer is not None:
            self._capturer.forget()

    @property
    def is_one_left(self) -> bool:
        """Whether there is a graph left to capture."""
        return self._next_key() is not None

    def due(self) -> bool:
        """Whether enough steps have lacked graphs that the next step should wait for a capture."""
        return self._steps_lacking >= STEPS_BETWEEN_CAPTURES

    def capture_next(self) -> bool:
        """Tries to capture one more graph; returns False when none is left to try.

        A graph that cannot be captured is logged and left out: its batches run in the next larger graph, or eagerly.
        Raises HeadraceError if its step cannot be run at all, as when another rank is gone.
        """
        key = self._next_key()
        if key is None or self._capturer is None:
            return False
        self._steps_lacking = 0
        self._lacked.pop(key, None)
        try:
            replay, result = self._capturer.capture(lambda: self._run(key))
        except HeadraceError:  # not of the graph: this rank or another one cannot go on
            raise
        except Exception as error:  # Triton's own errors, such as of a kernel that needs too much, share no other base
            why = self._failed[key] = str(error).partition("\n")[0]
            logger.warning("decode steps of a batch of %d run without a CUDA graph of its size: %s", key.size, why)
        else:
            self._graphs[key] = Graph(key, replay, result)
        if self._next_key() is None:
            logger.info("captured %d decode graphs, which take %d bytes", len(self._graphs), self.pool_bytes)
        return True

    def _next_key(self) -> GraphKey | None:
        left = [
            key
            for kind in self._kinds
            for size in reversed(self.sizes)
            if (key := GraphKey(size, *kind)) not in self._graphs and key not in self._failed
        ]
        if not left or not self._graphs:
            return left[0] if left else None
        return max(left, key=lambda key: self._lacked.get(key, 0))  # the first of equals: the largest size
