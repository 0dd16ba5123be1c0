"""Joins latent attention's up-projection, which newer GGUF files store as two tensors: that of keys, transposed for
multiplication with queries, and that of values.

    k_b [heads, latent, nope]   v_b [heads, value, latent]   joined [heads x (nope + value), latent]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headrace.executor.checkpoints.sources.gguf.names import LATENT_HALVES
from headrace.executor.checkpoints.weights import Packed, WeightSource, WrappedWeights, take_part
from headrace.executor.models.arch import ArchSpec

if TYPE_CHECKING:
    from headrace.executor.checkpoints.sources.gguf.file import GGUFWeights


def joined_latent(spec: ArchSpec, source: GGUFWeights) -> GGUFWeights | JoinedLatent:
    """The source with both tensors joined to the matrix that the model declares; the source itself if it has that."""
    held, names = source.names(), spec.names
    keys, values = LATENT_HALVES
    found: dict[str, tuple[str, str]] = {}
    for index in range(spec.num_layers):
        joined = f"{names.layer(names.prefixes[0], index)}{names.latent_up}.weight"
        start = joined.removesuffix(".weight").rpartition(".")[0]
        halves = f"{start}.{keys}.weight", f"{start}.{values}.weight"
        if held.issuperset(halves):
            found[joined] = halves
    return JoinedLatent(source, found) if found else source


class JoinedLatent(WrappedWeights):
    """A `WeightSource` of joined matrices around another one."""

    def __init__(self, source: WeightSource, halves: dict[str, tuple[str, str]]) -> None:
        super().__init__(source, frozenset(name for pair in halves.values() for name in pair), frozenset(halves))
        self._halves = halves

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._halves:
            return self.source.shape(name)
        keys, values = map(self.source.shape, self._halves[name])
        return values[0] * (keys[-1] + values[1]), values[-1]

    def get(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        if name not in self._halves:
            return self.source.get(name, rows=rows, columns=columns)
        keys, values = map(self.source.get, self._halves[name])
        joined = torch.cat([keys.transpose(1, 2).to(values.dtype), values], dim=1).flatten(0, 1)
        return take_part(joined, tuple(joined.shape), rows, columns)

    def _packed(self, name: str) -> Packed | None:
        """The source's packed weight; None for joined matrices, which are floats."""
        return None if name in self._halves else super()._packed(name)

    def _group_of(self, name: str) -> int | None:
        return None if name in self._halves else super()._group_of(name)
