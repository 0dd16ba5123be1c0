"""Decode steps captured as graphs, one per batch size and kind of choice, while requests are already served.

A decode batch of n requests runs in the smallest captured size that holds it, padded with the row that belongs to
nobody. Until that size is captured it runs eagerly, so that nobody waits for captures: between steps one is made at
a time. The first to be captured is the largest, since all share one pool of memory and the smaller ones then fit
into what it took; then the one that steps lack most, then the rest from large to small.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.executor.gpu.sampler import Choice
from headrace.ipc.failure import OptionError

logger = logging.getLogger(__name__)
LARGEST_DEFAULT = 512
STEPS_BETWEEN_CAPTURES = 8
"""While requests run, a capture (some 50 ms) waits for so many steps that lacked one."""


def capture_sizes(max_num_seqs: int, sizes: Sequence[int] = (), largest: int | None = None) -> tuple[int, ...]:
    """The batch sizes to capture, ascending: those asked for, or vLLM's list 1, 2, 4, 8, 16, 24 ... 256, 272 ...

    Only batches of up to max_num_seqs requests exist; a size beyond the first that holds them all is dropped.
    Raises OptionError for a size below 1, or when `sizes` holds more than `largest`.
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
    """Steps of 8 up to 256 and of 16 beyond, and `largest` itself: padding wastes at most 8 of 16 and 16 of 272."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, largest + 1, 16)]
    return [size for size in sizes if size < largest] + [largest]


class Replay(Protocol):
    def __call__(self) -> None:
        """Starts the captured work again, on the tensors that were there at its capture."""
        ...


class Capturer(Protocol):
    """Makes graphs. `gpu_cuda.CudaCapturer` is the real one."""

    def capture(self, run: Callable[[], Any]) -> tuple[Replay, Any]:
        """Runs `run` once to warm up and once to capture; the second's result, and what repeats it.

        Both may write to what `run` writes to. Raises RuntimeError when something in it cannot be captured.
        """
        ...

    @property
    def pool_bytes(self) -> int:
        """Memory that the graphs captured so far take."""
        ...

    def forget(self) -> None:
        """The graphs captured so far are gone, and their memory is free."""
        ...


@dataclass(frozen=True)
class GraphKey:
    size: int
    choice: Choice


@dataclass(frozen=True, eq=False)
class Graph:
    key: GraphKey
    replay: Replay
    result: Any
    """What the captured function returned: tensors that each replay writes again."""


class DecodeGraphs:
    """The graphs captured so far and those still to come."""

    def __init__(self, sizes: Sequence[int], capturer: Capturer | None, run: Callable[[GraphKey], Any]) -> None:
        """capturer: None where everything runs eagerly; run: one decode step of padding rows, of that size."""
        self.sizes = tuple(sizes)
        self._capturer, self._run = capturer, run
        self._graphs: dict[GraphKey, Graph] = {}
        self._kinds: list[Choice] = [Choice.ARGMAX] if capturer is not None else []
        self._lacked: dict[GraphKey, int] = {}
        self._failed: dict[GraphKey, str] = {}
        """What could not be captured, and why. It is not tried again until all are captured anew."""
        self._steps_lacking = 0

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def pool_bytes(self) -> int:
        return self._capturer.pool_bytes if self._capturer is not None else 0

    @property
    def why_eager(self) -> str:
        """Why some decode steps run eagerly, or all of them; "" where none has to."""
        if self._capturer is None:
            return "enforce_eager is set"
        if not self._failed:
            return ""
        key, why = next(reversed(self._failed.items()))
        return f"{len(self._failed)} graphs could not be captured, the last for a batch of {key.size}: {why}"

    def key_for(self, batch_size: int, choice: Choice) -> GraphKey | None:
        """What such a batch would run in: the smallest size that holds it and can be captured; None without one."""
        keys = (GraphKey(size, choice) for size in self.sizes if size >= batch_size)
        return next((key for key in keys if key not in self._failed), None)

    def find(self, batch_size: int, choice: Choice) -> Graph | None:
        """The graph for a batch; None when it must run eagerly. One that is lacked counts towards what is captured
        next."""
        key = self.key_for(batch_size, choice)
        if key is None or self._capturer is None:
            return None
        if choice not in self._kinds:
            self._kinds.append(choice)
        graph = self._graphs.get(key)
        if graph is None:
            self._lacked[key] = self._lacked.get(key, 0) + 1
            self._steps_lacking += 1
        return graph

    def forget(self) -> None:
        """Drops them all, as what they compute on is about to move. They are captured again as at the start."""
        self._graphs.clear()
        self._lacked.clear()
        self._failed.clear()
        self._steps_lacking = 0
        if self._capturer is not None:
            self._capturer.forget()

    @property
    def is_one_left(self) -> bool:
        """There is something to capture."""
        return self._next_key() is not None

    def due(self) -> bool:
        """Whether steps have lacked graphs for long enough that the next one should wait for a capture."""
        return self._steps_lacking >= STEPS_BETWEEN_CAPTURES

    def capture_next(self) -> bool:
        """Tries to capture one more; False when there is none left to try.

        What cannot be captured is logged and left out: its batches run in the next larger graph, or eagerly.
        """
        key = self._next_key()
        if key is None or self._capturer is None:
            return False
        self._steps_lacking = 0
        self._lacked.pop(key, None)
        try:
            replay, result = self._capturer.capture(lambda: self._run(key))
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
            for choice in self._kinds
            for size in reversed(self.sizes)
            if (key := GraphKey(size, choice)) not in self._graphs and key not in self._failed
        ]
        if not left or not self._graphs:
            return left[0] if left else None
        return max(left, key=lambda key: self._lacked.get(key, 0))  # the first of equals: the largest
