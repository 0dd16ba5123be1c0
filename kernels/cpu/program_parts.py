"""What a program is made of: buffers of activations, and the constants of norms and attention layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from .linear import DTYPES
from .ops import CacheScales

FEW_ROWS = 16
"""Steps of at most this many tokens take the list in which each thread norms every row for itself."""


@dataclass(frozen=True, eq=False)
class Buffer:
    """Activations of a step. `tensor` holds what the last step left."""

    tensor: Tensor  # [max rows, columns]
    rows: Literal["tokens", "logits"]
    copies: Tensor | None = None  # [num_threads, FEW_ROWS, columns], where threads make their own in small steps

    @property
    def columns(self) -> int:
        return self.tensor.shape[1]

    @property
    def type(self) -> int:
        return DTYPES[self.tensor.dtype]

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm's constants. weight and bias: [size] float32, any constant offset already added, or None."""

    kind: Literal["rms", "layer"]
    eps: float
    weight: Tensor | None = None
    bias: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Rotary:
    """cos and sin: [max positions, half] float32; dimensions i and i + half of a head are rotated together."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, eq=False)
class LayerCache:
    """One layer's keys and values, each [num_blocks, num_kv_heads, block_size, head_dim]."""

    keys: Tensor
    values: Tensor
    scales: CacheScales | None = None


@dataclass(frozen=True, eq=False)
class Attention:
    """One layer's attention. Norms apply to each head before rotation."""

    num_heads: int
    cache: LayerCache
    scale: float
    rotary: Rotary | None = None
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    window: int | None = None
    soft_cap: float | None = None
