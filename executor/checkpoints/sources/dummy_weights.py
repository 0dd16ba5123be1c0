"""Random weights, made when they are asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from headrace.executor.checkpoints.weights import StoredTensor, WeightSource, dtype_name, take_part
from headrace.ipc.process.deferred_imports import import_deferred

DUMMY_STANDARD_DEVIATION = 0.02


class DummyWeights(WeightSource):
    """Random weights of given shapes, made on a device: normally distributed, small, and on one kind of device always
    the same for a name and shape. On a CPU an 8-billion-parameter model takes about a minute.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        tables: frozenset[str] = frozenset(),
    ) -> None:
        """tables: weights that are whole numbers, which are 0, 1, 2, ... in each row."""
        import_deferred()  # torch.Generator cannot be made before one of them has told torch its metaclass
        self._shapes, self._dtype, self._device, self._tables = dict(shapes), dtype, device, tables

    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def stored(self, name: str) -> StoredTensor:
        return StoredTensor.plain(self._shapes[name], dtype_name(self._dtype), partial(self._make, name))

    def _make(self, name: str, rows: slice | None, columns: slice | None) -> Tensor:
        if name in self._tables:
            table = torch.arange(self._shapes[name][-1], device=self._device).expand(self._shapes[name])
            return take_part(table, self._shapes[name], rows, columns)
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True)
        generator = torch.Generator(self._device).manual_seed(seed)
        whole = torch.empty(self._shapes[name], dtype=self._dtype, device=self._device)
        whole.normal_(std=DUMMY_STANDARD_DEVIATION, generator=generator)
        return take_part(whole, self._shapes[name], rows, columns)
