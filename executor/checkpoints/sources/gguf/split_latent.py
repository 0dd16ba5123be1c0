"""Joins latent attention's up-projection, which newer GGUF files store as two tensors: that of keys, transposed for
multiplication with queries, and that of values.

    k_b [heads, latent, nope]   v_b [heads, value, latent]   joined [heads x (nope + value), latent]
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.executor.checkpoints.sources.gguf.names import LATENT_HALVES
from headrace.executor.checkpoints.weights import StoredTensor, Weights, take_part
from headrace.executor.models.arch import ArchSpec


def joined_latent(spec: ArchSpec, weights: Weights) -> Weights:
    """The weights with both tensors joined to the matrix that the model declares, in floats; unchanged if they have
    it."""
    held, names = weights.names(), spec.names
    keys, values = LATENT_HALVES
    found: dict[str, tuple[str, str]] = {}
    for index in range(spec.num_layers):
        joined = f"{names.layer(names.prefixes[0], index)}{names.latent_up}.weight"
        start = joined.removesuffix(".weight").rpartition(".")[0]
        halves = f"{start}.{keys}.weight", f"{start}.{values}.weight"
        if held.issuperset(halves):
            found[joined] = halves
    if not found:
        return weights
    gone = frozenset(name for pair in found.values() for name in pair)
    return weights.then(
        "halves of latent up-projections joined", frozenset(found), lambda name: _joined(weights, *found[name]), gone
    )


def _joined(weights: Weights, key_half: str, value_half: str) -> StoredTensor:
    keys, values = weights.stored(key_half), weights.stored(value_half)
    shape = values.shape[0] * (keys.shape[-1] + values.shape[1]), values.shape[-1]

    def part(rows: slice | None, columns: slice | None) -> Tensor:
        own = values.numbers.part(None, None)
        transposed = keys.numbers.part(None, None).transpose(1, 2)
        return take_part(torch.cat([transposed.to(own.dtype), own], dim=1).flatten(0, 1), shape, rows, columns)

    return StoredTensor.plain(shape, values.format, part)
