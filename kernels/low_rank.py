"""What an adapter adds to a matrix, in the form that kernels pack: `kernels/cpu/linear/deltas.h` has the formula."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor


class AdaptedTokens(Protocol):
    """The adapters of a step's tokens. No token has the same slot twice."""

    @property
    def slots(self) -> np.ndarray:
        """[most_used, num_tokens] int32; -1: none"""

    @property
    def scales(self) -> np.ndarray:
        """[most_used, num_tokens] float32"""

    def groups(self) -> Iterator[tuple[int, float, np.ndarray]]:
        """Tokens with the same slot and scale: (slot, scale, indices)."""


@dataclass(frozen=True, eq=False)
class SlottedTokens:
    """As `AdaptedTokens`, on the device, which alone knows them: the first adapter of each token, the second and so
    on."""

    uses: tuple[tuple[Tensor, Tensor], ...]
    """For each: slots [num_tokens] int32, -1 for none, and scales [num_tokens] float32."""


class SlotLimits(NamedTuple):
    """What an op's adapters are like."""

    dtype: torch.dtype
    """That factors are kept and multiplied in."""
    num_slots: int
    most_used: int
    """Of a token."""
    max_rank: int


@dataclass(frozen=True, eq=False)
class LowRankPart:
    """The outputs [first_row, first_row + rows) of a linear layer, which depend on the columns [first_column,
    first_column + rank) of x A^T."""

    first_row: int
    first_column: int
    b: Tensor  # [rows, rank], as stored
    scale: float = 1.0
    """Of B: the adapter's own scaling, and what the model multiplies its weight by."""


@dataclass(frozen=True, eq=False)
class LowRank:
    """An adapter's part of a linear layer, which may consist of several matrices with the same input."""

    num_rows: int
    """Outputs of the layer."""
    a: Tensor  # [columns of x A^T, in_features], as stored
    parts: tuple[LowRankPart, ...] = ()
    bias: Tensor | None = None  # [num_rows] float32
    magnitude: Tensor | None = None  # [num_rows] float32: the factor of the whole product (DoRA)
    whole: Tensor | None = None  # [num_rows, in_features]: takes the weight's place; `a` and `parts` are empty

    def of_rows(self, first: int, last: int) -> LowRank:
        """The part of outputs first .. last - 1."""
        if (first, last) == (0, self.num_rows):
            return self
        parts = []
        for part in self.parts:
            begin, end = max(first, part.first_row), min(last, part.first_row + len(part.b))
            if begin < end:
                b = part.b[begin - part.first_row : end - part.first_row]
                parts.append(replace(part, first_row=begin - first, b=b))
        vectors = {name: getattr(self, name) for name in ("bias", "magnitude", "whole")}
        cut: dict[str, Any] = {name: None if each is None else each[first:last] for name, each in vectors.items()}
        return replace(self, num_rows=last - first, parts=tuple(parts), **cut)

    @property
    def nbytes(self) -> int:
        whole = (self.a, self.bias, self.magnitude, self.whole, *(part.b for part in self.parts))
        return sum(each.nbytes for each in whole if each is not None)

    @property
    def is_nothing(self) -> bool:
        return not self.parts and self.bias is None and self.magnitude is None and self.whole is None

    def dense_b(self) -> Tensor:
        """[num_rows, columns of x A^T] float32"""
        found = torch.zeros(self.num_rows, len(self.a))
        for part in self.parts:
            rank = part.b.shape[1]
            rows = slice(part.first_row, part.first_row + len(part.b))
            found[rows, part.first_column : part.first_column + rank] = part.b.float() * part.scale
        return found

    def to(self, dtype: torch.dtype) -> LowRank:
        """With the factors in another dtype; biases and magnitudes stay float32."""
        parts = tuple(replace(part, b=(part.b.float() * part.scale).to(dtype), scale=1.0) for part in self.parts)
        whole = None if self.whole is None else self.whole.to(dtype)
        return replace(self, a=self.a.to(dtype), parts=parts, whole=whole)

    def added(self, x: Tensor, product: Tensor, scale: float) -> Tensor:
        """What is added to `product`, x W^T without bias, for rows x [n, in_features]: [n, num_rows] float32. Only of a
        result of `to`, for x of that type."""
        if self.whole is not None:
            found = torch.nn.functional.linear(x, self.whole).float() - product.float()
        else:
            found, low = torch.zeros(len(x), self.num_rows), torch.nn.functional.linear(x, self.a)
            for part in self.parts:
                columns = low[:, part.first_column : part.first_column + part.b.shape[1]]
                high = torch.nn.functional.linear(columns, part.b)
                found[:, part.first_row : part.first_row + len(part.b)] = high.float()
        if self.magnitude is not None:
            found = (self.magnitude - 1) * product.float() + self.magnitude * found
        return (found if self.bias is None else found + self.bias) * scale


@dataclass(frozen=True, eq=False)
class EmbeddingDelta:
    """An adapter's part of a table of token embeddings."""

    a: Tensor  # [vocab_size, rank] float32
    b: Tensor  # [rank, width] float32, the adapter's own scaling included
    rows: Tensor | None = None  # [vocab_size, width] float32: takes the table's place

    def added(self, token_ids: Tensor, embedded: Tensor, scale: float, table_scale: float) -> Tensor:
        """What is added to `embedded`, rows of the table times table_scale: [n, width] float32."""
        found = (self.a[token_ids] @ self.b) * table_scale
        if self.rows is not None:
            found = found + self.rows[token_ids] * table_scale - embedded.float()
        return found * scale

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.a, self.b, self.rows) if each is not None)


@dataclass(frozen=True, eq=False)
class LowRankExperts:
    """An adapter's part of a layer's experts; None for those that it leaves as they are."""

    gate_up: tuple[LowRank | None, ...]
    """The gate's rows, then the up projection's."""
    down: tuple[LowRank | None, ...]

    def to(self, dtype: torch.dtype) -> LowRankExperts:
        sides = (tuple(None if each is None else each.to(dtype) for each in side) for side in (self.gate_up, self.down))
        return LowRankExperts(*sides)

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (*self.gate_up, *self.down) if each is not None)


def factors_of_heads(delta: LowRank, nope_dim: int, value_dim: int) -> tuple[Tensor, Tensor]:
    """The rows of B, scaled, of the matrix that makes keys and values of compressed vectors (latent attention), whose
    heads have nope_dim rows for keys and then value_dim for values: [heads, nope_dim, rank], [heads, value_dim, rank].

    Raises ValueError for what the absorbed form of attention cannot add to its products."""
    if delta.bias is not None or delta.magnitude is not None:
        raise ValueError("biases and magnitudes (DoRA) of the matrix of keys and values are not computed")
    heads = delta.dense_b().unflatten(0, (-1, nope_dim + value_dim))
    keys, values = heads.split((nope_dim, value_dim), dim=1)
    return keys, values
