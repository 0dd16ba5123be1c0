"""A stand-in for CUDA graphs on the CPU: records the torch operations of a function, and repeats them on their tensors.

As with a real graph, no Python runs in a replay: every size, number and branch is that of the capture, and data reaches
a replay only through the memory that the capture read. An operation that would have to wait for its data raises, as in
a real capture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "repeat_interleave.Tensor")


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.made: set[int] = set()
        self.read: dict[int, Tensor] = {}
        """By address, the tensors that existed before the capture and are used in it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if any(word in name for word in WAITING) and "output_size" not in (kwargs or {}):
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and address(leaf) not in self.made:
                self.read[address(leaf)] = leaf
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and address(leaf) not in self.read:
                self.made.add(address(leaf))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        with torch.inference_mode():
            for func, args, kwargs, recorded in self.calls:
                inputs = {address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
                repeated = func(*args, **kwargs)
                for old, new in zip(tree_leaves(recorded), tree_leaves(repeated), strict=True):
                    if isinstance(old, Tensor) and address(old) not in inputs:
                        old.copy_(new)


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


OUT_OF_MEMORY = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB\nand more that nobody wants to read")


class RecordingCapturer:
    """`executor.graphs.Capturer` over the recorder."""

    def __init__(self, fail_at: int = 0, error: Exception = OUT_OF_MEMORY) -> None:
        """fail_at: the number, from 1, of the capture that raises the error; 0 for none."""
        self.graphs: list[Recorder] = []
        self.num_replays = 0
        self.pool_bytes = 0
        self._fail_at, self._error, self._num_captures = fail_at, error, 0

    def forget(self) -> None:
        self.graphs.clear()
        self.pool_bytes = 0

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        run()
        recorder = Recorder()
        with recorder:
            result = run()
        self._num_captures += 1
        if self._num_captures == self._fail_at:
            raise self._error
        self.graphs.append(recorder)
        self.pool_bytes += 1000

        def replay() -> None:
            self.num_replays += 1
            recorder.replay()

        return replay, result
