"""Torch references of the ops on rows of hidden values: linear layers, norms, rotary, cache writes and activations.

Norms and rotary compute in float32 and round once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.reference.attention import CacheScales, PagedBatch


class LinearWeight(Protocol):
    """A linear layer's weight in the layout that its kernel needs; no other code depends on that layout."""

    def apply(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features], in x's dtype, bias added if there is one."""
        ...

    def look_up(self, ids: Tensor) -> Tensor:
        """Rows of the weight, [*ids.shape, in_features] in the weight's dtype, for embeddings tied to the LM head."""
        ...

    @property
    def nbytes(self) -> int: ...


class DenseLinear:
    """The weight as a row-major torch matrix. Shares the tensors that it is given."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight  # [out_features, in_features]
        self.bias = bias  # [out_features]

    def apply(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def look_up(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (self.bias.nbytes if self.bias is not None else 0)


def linear(weight: Tensor, bias: Tensor | None) -> LinearWeight:
    """Packs weight [out_features, in_features] and bias [out_features] for `apply`.

    Facts: `shape` (out_features, in_features)."""
    return DenseLinear(weight, bias)


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMS norm (Zhang and Sennrich 2019, eq. 4) of x + residual, over the last dimension.

    x, residual: [..., size]; weight: [size] float32, any constant offset already added.
    Returns (normed, sum), both of x's shape and dtype; without a residual the sum is x itself.
    """
    total = x if residual is None else x + residual
    wide = total.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype), total


def layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Layer norm (Ba et al. 2016) of x + residual. weight, bias: [size] float32 or None. Returns as `rms_norm`."""
    total = x if residual is None else x + residual
    return F.layer_norm(total.float(), total.shape[-1:], weight, bias, eps).to(x.dtype), total


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates the first 2 * half dimensions of each head (Su et al. 2021), paired i with i + half.

    query [num_tokens, num_heads, head_dim], key [num_tokens, num_kv_heads, head_dim],
    cos and sin [num_tokens, half] float32. Returns new tensors.
    """
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    parts = [(first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype)]
    if 2 * half < x.shape[-1]:
        parts.append(x[..., 2 * half :])
    return torch.cat(parts, dim=-1)


def write_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    scales: CacheScales | None = None,
) -> None:
    """Stores each token's key and value at its slot. A token with a negative slot is padding and is not stored.

    key, value: [num_tokens, num_kv_heads, head_dim]; caches [num_blocks, num_kv_heads, block_size, head_dim], mutated.
    An int8, float8_e4m3fn or float8_e5m2 cache gets values divided by their scale, rounded to nearest and clamped.
    If `scales` has a scale per row, each is computed and stored here: the row's largest magnitude over the type's
    largest value, or 1 for a row of zeros. A row that is not finite is not finite where it is read.
    """
    slots = batch.slot_mapping
    if bool((slots < 0).any()):
        kept = slots >= 0
        slots, key, value = slots[kept], key[kept], value[kept]
    block = torch.div(slots, batch.block_size, rounding_mode="floor")
    offset = slots - block * batch.block_size
    scales = scales or CacheScales()
    for rows, cache, scale, row_scales in (
        (key, key_cache, scales.key, scales.keys),
        (value, value_cache, scales.value, scales.values),
    ):
        if cache.dtype not in LARGEST_STORED:
            cache[block, :, offset] = rows.to(cache.dtype)
            continue
        divisor: Tensor | float = scale[:, None] if isinstance(scale, Tensor) else scale
        if row_scales is not None:
            largest = rows.float().abs().amax(-1, keepdim=True)
            divisor = torch.where(largest == 0, 1.0, largest / LARGEST_STORED[cache.dtype])
            row_scales[block, :, offset] = divisor[..., 0]
        cache[block, :, offset] = narrow(rows.float() / divisor, cache.dtype)


LARGEST_STORED: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
)
"""The cache dtypes that need scales, and the largest value of each."""


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts x float32 of any shape to int8 or a float8: rounded to nearest and clamped to the type's range, except
    that infinities become NaN in a float8."""
    clamped = x.clamp(-LARGEST_STORED[dtype], LARGEST_STORED[dtype]) + x * 0
    return clamped.round().to(dtype) if dtype == torch.int8 else clamped.to(dtype)


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "relu": F.relu,
        "relu2": lambda x: F.relu(x).square(),
        "normal_cdf": lambda x: 0.5 * (1 + torch.erf(x * 0.5**0.5)),
        "silu_to_7": lambda x: F.silu(x).clamp(max=LIMITS["silu_to_7"]),
        "silu_to_16": lambda x: F.silu(x).clamp(max=LIMITS["silu_to_16"]),
        "silu_below_10": lambda x: F.silu(x.clamp(max=LIMITS["silu_below_10"])),
    }
)
LIMITS: Mapping[str, float] = MappingProxyType({"silu_to_7": 7.0, "silu_to_16": 16.0, "silu_below_10": 10.0})
"""The largest results of activations that have a limit, or (below) the largest values that they are applied to. It is
the largest magnitude of the up projection too."""
CLAMPED_SILU, CLAMPED_SLOPE, CLAMP = "clamped_silu", 1.702, 7.0


def activate(x: Tensor, kind: str) -> Tensor:
    """Applies an activation: x [..., size] -> [..., size]; `kind` is a key of ACTIVATIONS."""
    return ACTIVATIONS[kind](x)


def activate_and_multiply(gate_up: Tensor, kind: str) -> Tensor:
    """activation(gate) * up: gate_up [..., 2 * size], the gate's half first -> [..., size].

    `kind` is a key of ACTIVATIONS, or CLAMPED_SILU (gpt-oss): gate * sigmoid(1.702 * gate) * (up + 1), with the gate
    clamped to at most 7 and up to -7 .. 7. With one of LIMITS, up is clamped to its magnitude."""
    gate, up = gate_up.chunk(2, dim=-1)
    if kind == CLAMPED_SILU:
        gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
        return gate * torch.sigmoid(CLAMPED_SLOPE * gate) * (up + 1)
    if kind in LIMITS:
        up = up.clamp(-LIMITS[kind], LIMITS[kind])
    return ACTIVATIONS[kind](gate) * up


REFERENCES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "linear": linear,
        "rms_norm": rms_norm,
        "layer_norm": layer_norm,
        "rotary": rotary,
        "write_cache": write_cache,
        "activate": activate,
        "activate_and_multiply": activate_and_multiply,
    }
)
