"""Ops of layers that keep a state per sequence, for tests of their kernels: inputs, states, and steps of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace import kernels
from headrace.kernels.reference.gated_lru import GatedLruParams
from headrace.kernels.reference.linear_attention import LinearAttentionParams
from headrace.kernels.reference.selective import SelectiveParams
from headrace.kernels.reference.states import ConvolveParams, KeptUnits, LayerState, ScanParams, StateBatch

MOST_DRAFTS = 4
PAGES = 40


@dataclass(frozen=True)
class Case:
    """An op with its inputs for one token after another, and where its state lies."""

    op: str
    params: Any
    columns: tuple[int, ...]
    """Of each input; 0: it is None."""
    units: int
    shape: tuple[int, ...]
    draft_elements: int

    def state(self, dtype: torch.dtype = torch.float32) -> LayerState:
        elements = int(torch.tensor(self.shape).prod())
        per_page = -(-self.units // 2)  # of two pages
        page = torch.arange(self.units) // per_page
        offset = torch.arange(self.units) % per_page * (elements + 3) + 5
        memory = torch.full((PAGES, per_page * (elements + 3) + 9), torch.nan, dtype=dtype)
        name = self.params.history if self.op == "convolve" else "state"
        drafted = torch.full((8, MOST_DRAFTS, self.draft_elements), torch.nan)
        return LayerState({name: KeptUnits(memory, page, offset, self.shape)}, drafted)

    def inputs(self, num_tokens: int, seed: int = 0) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        return tuple(torch.randn(num_tokens, size, generator=generator) for size in self.columns)

    @property
    def reference(self) -> Callable[..., Tensor]:
        return kernels.choose_reference(self.op)


def convolution(
    channels: int, width: int, *, gated: bool = False, silu: bool = False, bias: bool = False, second: bool = False
) -> Case:
    """second: whether it is not the first convolution of its layer."""
    places = ("history_mixer", 7) if second else ("history", 0)
    weight, activation = torch.randn(channels, width), "silu" if silu else None
    params = ConvolveParams(weight, torch.randn(channels) if bias else None, activation, gated, *places)
    return Case("convolve", params, (channels * (3 if gated else 1),), width - 1, (channels,), places[1] + channels)


def recurrence(heads: int, head_dim: int, size: int, groups: int, limits: tuple[float, float] = (0.0, 1e9)) -> Case:
    params = ScanParams(
        decay=-torch.rand(heads) * 4,
        skip=torch.randn(heads),
        step_bias=torch.randn(heads),
        step_limits=limits,
        num_heads=heads,
        head_dim=head_dim,
        state_size=size,
        num_groups=groups,
        first_draft_element=6,
    )
    inner, mixed = heads * head_dim, heads * head_dim + 2 * groups * size
    return Case("scan", params, (mixed, heads, inner), heads, (head_dim, size), 6 + mixed + heads)


def attention(
    heads: int,
    key_heads: int,
    key_dim: int,
    value_dim: int,
    *,
    decays: int,
    correction: float = 0.0,
    floor: float = 0.0,
) -> Case:
    """decays: columns of each head."""
    params = LinearAttentionParams(
        num_heads=heads,
        num_key_heads=key_heads,
        key_of_head=torch.arange(heads) % key_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        decay=-torch.rand(heads),
        decay_bias=torch.randn(heads * decays) if decays else None,
        correction=correction,
        unit_keys=correction > 0,
        scale=key_dim**-0.5,
        decay_floor=floor,
        first_draft_element=3,
    )
    columns = (sum(params.parts), heads * decays, heads if correction else 0)
    return Case("linear_attention", params, columns, heads, (key_dim, value_dim), 3 + sum(columns))


def selection(channels: int, size: int) -> Case:
    params = SelectiveParams(-torch.rand(size, channels) * 4, torch.randn(channels))
    columns = (channels, channels, 2 * size, channels)
    return Case("selective_scan", params, columns, size, (channels,), 3 * channels + 2 * size)


def linear_units(heads: int, head_dim: int) -> Case:
    channels, shape = heads * head_dim, (heads, head_dim, head_dim)
    params = GatedLruParams(
        decay=torch.randn(channels),
        input_weight=torch.randn(shape),
        input_bias=torch.randn(heads, 1, head_dim),
        recurrence_weight=torch.randn(shape),
        recurrence_bias=torch.randn(heads, 1, head_dim),
    )
    return Case("gated_lru", params, (channels,), heads, (head_dim,), 2 * channels)


torch.manual_seed(0)
CASES = {
    "LFM2's convolution": convolution(64, 3, gated=True),
    "Mamba's convolution": convolution(83, 4, silu=True, bias=True),
    "two taps": convolution(20, 2),
    "a layer's second convolution": convolution(20, 4, second=True),
    "a scan": recurrence(2, 16, 128, 1),
    "odd sizes, groups, limits": recurrence(6, 7, 20, 3, (0.01, 0.8)),
    "a gated delta rule": attention(4, 2, 128, 128, decays=1, correction=1.0),
    "of odd sizes, with decays of channels": attention(3, 3, 19, 21, decays=19, correction=2.0),
    "of decays of channels with a floor": attention(3, 3, 19, 21, decays=19, correction=1.0, floor=-5.0),
    "of decays with a floor": attention(2, 2, 16, 32, decays=1, correction=1.0, floor=-5.0),
    "of constant decays, without corrections": attention(2, 2, 32, 80, decays=0),
    "a selective scan": selection(83, 16),
    "gated linear units": linear_units(3, 19),
}


@dataclass(frozen=True)
class Part:
    """A sequence's tokens in one step."""

    sequence: int
    first: int
    count: int
    drafts: int = 0
    """Of `count`, the last ones."""
    replayed: int = 0
    source: int | None = None
    """Sequence or snapshot whose pages have the state; None: zeros, in a first step; by default its own."""
    snapshots: tuple[tuple[int, int], ...] = ()
    """(inputs, number of the snapshot)"""


def pages(number: int) -> Tensor:
    return torch.tensor([2 * number + 1, 2 * number])


def run(case: Case, op: Callable[..., Tensor], state: LayerState, parts: Sequence[Part], inputs: Any) -> list[Tensor]:
    """One step; inputs: by sequence. Returns each part's rows."""
    tokens = [tuple(each[part.first : part.first + part.count] for each in inputs[part.sequence]) for part in parts]
    given = [torch.cat(each) if each[0].shape[1] else None for each in zip(*tokens, strict=True)]
    snapshots = [each for part in parts for each in part.snapshots]
    counts = [len(part.snapshots) for part in parts]
    batch = StateBatch(
        query_start=torch.tensor([0, *(part.count for part in parts)]).cumsum(0).to(torch.int32),
        rows=torch.tensor([part.sequence for part in parts]),
        pages=torch.stack([pages(part.sequence) for part in parts]),
        sources=torch.stack([pages(part.source or 0) for part in parts]),
        has_source=torch.tensor([int(part.source is not None) for part in parts]),
        replayed=torch.tensor([part.replayed for part in parts]),
        committed=torch.tensor([part.count - part.drafts for part in parts]),
        snapshot_start=torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
        snapshot_ends=torch.tensor([end for end, _ in snapshots], dtype=torch.int32),
        snapshot_pages=torch.stack([pages(number) for _, number in snapshots]) if snapshots else pages(0)[None][:0],
        max_query_len=max(part.count for part in parts),
    )
    return list(op(*given, case.params, batch, state).split([part.count for part in parts]))


def in_chunks(case: Case, op: Callable[..., Tensor], inputs: Any, sizes: int, state: LayerState) -> Tensor:
    """All tokens of sequence 0, in steps of `sizes`."""
    total, found = len(inputs[0][0]), []
    for first in range(0, total, sizes):
        part = Part(0, first, min(sizes, total - first), source=None if first == 0 else 0)
        found += run(case, op, state, [part], inputs)
    return torch.cat(found)


def kept(case: Case, state: LayerState, number: int) -> Tensor:
    return next(iter(state.kept.values())).read(pages(number))
