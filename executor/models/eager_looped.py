"""What `blocks.looped_attention` declares, op by op."""

from __future__ import annotations

from torch import Tensor

from headrace.executor.models.blocks import size_of
from headrace.executor.models.blocks.looped_attention import HeadGates, RotatedHeads
from headrace.executor.models.eager import EagerWeights, SharedInputs
from headrace.executor.models.reading import CheckedWeights, own_part
from headrace.kernels.reference.rotary_cache import LayerCache


def head_gates(weights: CheckedWeights, declared: HeadGates, prefix: str) -> tuple[Tensor, Tensor]:
    """Of the heads of this rank: [heads, head_dim] and [heads] float32."""
    name, count, own = prefix + declared.name, size_of(declared.heads), own_part(declared.heads, weights.place)
    matrix = weights.exact_matrix(f"{name}.weight", count, declared.head_dim, own)
    bias = weights.vector(f"{name}.bias", count, take=own)
    return (-matrix, -bias) if declared.opposite else (matrix, bias)


class EagerHeadGates:
    """A `HeadGates`."""

    def __init__(self, weights: EagerWeights, declared: HeadGates, prefix: str) -> None:
        self._matrix, self._bias = head_gates(weights, declared, prefix)

    def __call__(self, heads: Tensor) -> Tensor:
        products = heads.unflatten(1, self._matrix.shape).float() * self._matrix
        return (products.sum(-1) + self._bias).to(heads.dtype)


class EagerRotatedHeads:
    """A `RotatedHeads` with its kernel."""

    def __init__(self, weights: EagerWeights, declared: RotatedHeads, prefix: str) -> None:
        self._head_dim, self._rope_index = declared.head_dim, weights.ropes.index(declared.rope)
        self._rotate = weights.kernel("rotary", head_dim=declared.head_dim)

    def __call__(self, queries: Tensor, step: SharedInputs, cache: LayerCache) -> Tensor:
        heads = queries.unflatten(1, (-1, self._head_dim))
        rotated: Tensor = self._rotate(heads, heads[:, :0], *step.cos_sin[self._rope_index])[0]
        return rotated.flatten(1)
