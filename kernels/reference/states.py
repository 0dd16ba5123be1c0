"""Layers that keep a state per sequence, in torch: short convolutions and Mamba 2's recurrence, token by token.

A sequence's state lies in pages of the cache. A step reads it from `sources` (its own pages or, in its first step,
those of a snapshot), applies the drafts that the step before had accepted, then this step's tokens, and stores what is
known to stay in its own pages; drafts are computed on top and only their inputs are kept:

    inputs      | replayed drafts | this step's tokens | this step's drafts |
    state       source ..................... stored in `pages`        not stored: inputs go to `drafted`
    snapshots         stored in pages of their own as their ends are passed

Every token is computed by the same operations in the same order, however the tokens are divided among steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, eq=False)
class StateBatch:
    """What the states of a step's sequences need, for all layers: int32 tensors."""

    query_start: Tensor
    """[num_seqs + 1]: as in `PagedBatch`"""
    rows: Tensor
    """[num_seqs]: each sequence's row of the batch, which its drafts' inputs are kept by"""
    pages: Tensor
    """[num_seqs, pages of a state]: each sequence's own pages"""
    sources: Tensor
    """[num_seqs, pages of a state]: where its state is read"""
    has_source: Tensor
    """[num_seqs]: 0 where the state is zeros instead"""
    replayed: Tensor
    """[num_seqs]: accepted drafts of the step before, whose inputs are applied first"""
    committed: Tensor
    """[num_seqs]: tokens of this step before its drafts"""
    snapshot_start: Tensor
    """[num_seqs + 1]: sequence i stores snapshots snapshot_start[i] .. snapshot_start[i + 1]"""
    snapshot_ends: Tensor
    """[num_snapshots], ascending within a sequence: a snapshot is stored after so many inputs of this step, replayed
    ones included; at most replayed + committed. Negative: it is none"""
    snapshot_pages: Tensor
    """[num_snapshots, pages of a state]"""
    max_query_len: int | None = None
    """As in `PagedBatch`"""

    @cached_property
    def sequences(self) -> list[_Sequence]:
        starts, firsts = self.query_start.tolist(), self.snapshot_start.tolist()
        snapshots = list(zip(self.snapshot_ends.tolist(), self.snapshot_pages, strict=True))
        rows, has, replayed, committed = (
            each.tolist() for each in (self.rows, self.has_source, self.replayed, self.committed)
        )
        found = []
        for index, row in enumerate(rows):
            taken = [each for each in snapshots[firsts[index] : firsts[index + 1]] if each[0] >= 0]
            source = self.sources[index] if has[index] else None
            span = slice(starts[index], starts[index + 1])
            found.append(_Sequence(row, span, self.pages[index], source, replayed[index], committed[index], taken))
        return found


class _Sequence(NamedTuple):
    row: int
    span: slice
    pages: Tensor
    source: Tensor | None
    replayed: int
    committed: int
    snapshots: list[tuple[int, Tensor]]

    @property
    def stores(self) -> list[tuple[int, Tensor]]:
        """(number of inputs, pages): when the state is stored, and where."""
        return [*self.snapshots, (self.replayed + self.committed, self.pages)]


@dataclass(frozen=True, eq=False)
class KeptUnits:
    """Where a layer's state lies in the pages of a sequence: unit u, `shape` values, begins at element offset[u] of the
    page[u]th page. It is computed in float32, whatever the type of the pages."""

    memory: Tensor
    """[num_pages, elements of a page] float32, float16 or bfloat16: all pages of the cache"""
    page: Tensor
    """[num_units] int64"""
    offset: Tensor
    """[num_units] int64"""
    shape: tuple[int, ...]

    def _places(self, pages: Tensor) -> Tensor:
        first = pages[self.page].long() * self.memory.shape[1] + self.offset
        size = int(torch.tensor(self.shape).prod())
        return first[:, None] + torch.arange(size, device=first.device)

    def read(self, pages: Tensor | None) -> Tensor:
        """pages: of one sequence; None: zeros -> [num_units, *shape], a copy"""
        if pages is None:
            return torch.zeros(len(self.page), *self.shape, device=self.memory.device)
        return self.memory.view(-1)[self._places(pages)].float().view(-1, *self.shape)

    def write(self, pages: Tensor, values: Tensor) -> None:
        self.memory.view(-1)[self._places(pages)] = values.reshape(len(self.page), -1).to(self.memory.dtype)


@dataclass(frozen=True, eq=False)
class LayerState:
    """One layer's state, with the inputs of drafts."""

    kept: Mapping[str, KeptUnits]
    drafted: Tensor
    """[num_rows, most drafts, elements of a draft's input] float32"""


@dataclass(frozen=True, eq=False)
class ConvolveParams:
    weight: Tensor
    """[channels, width] float32"""
    bias: Tensor | None
    """[channels] float32"""
    activation: str | None
    gated: bool
    history: str = "history"
    """Name of the kept inputs."""
    first_draft_element: int = 0
    """Where in a draft's kept input those of this op begin."""


def convolve(x: Tensor, params: ConvolveParams, batch: StateBatch, state: LayerState) -> Tensor:
    """A causal convolution of each channel. x [num_tokens, channels], or if gated [num_tokens, 3 * channels]: b, c and
    x, for c * convolution of (b * x). Returns [num_tokens, channels] in x's dtype; sums are in float32, from the oldest
    input to the newest, then the bias."""
    channels, width = params.weight.shape
    values, after = x.float(), None
    if params.gated:
        before, after, inner = values.split(channels, dim=1)
        values = before * inner
    result = torch.empty(len(x), channels, device=x.device)
    history, drafted = state.kept[params.history], state.drafted[:, :, params.first_draft_element :]
    for each in batch.sequences:
        own = values[each.span]
        replayed = drafted[each.row, : each.replayed, :channels]
        inputs = torch.cat([history.read(each.source), replayed, own])  # the first width - 1 are of tokens before
        count = len(own)
        total = torch.zeros_like(own)
        for tap in range(width):
            first = each.replayed + tap
            total = total + params.weight[:, tap] * inputs[first : first + count]
        result[each.span] = total if params.bias is None else total + params.bias
        for end, pages in each.stores:
            history.write(pages, inputs[end : end + width - 1])
        drafts = own[each.committed :]
        drafted[each.row, : len(drafts), :channels] = drafts
    if params.activation == "silu":
        result = F.silu(result)
    return (result if after is None else after * result).to(x.dtype)


@dataclass(frozen=True, eq=False)
class ScanParams:
    decay: Tensor
    """[num_heads] float32: exp of the stored logarithm, negated"""
    skip: Tensor
    """[num_heads] float32"""
    step_bias: Tensor
    """[num_heads] float32"""
    step_limits: tuple[float, float]
    num_heads: int
    """Heads and groups of this rank."""
    head_dim: int
    state_size: int
    num_groups: int
    first_draft_element: int
    """Where in a draft's kept input those of this op begin, after the convolution's."""


def scan(
    mixed: Tensor, steps: Tensor, gate: Tensor, params: ScanParams, batch: StateBatch, state: LayerState
) -> Tensor:
    """Mamba 2's recurrence (Dao and Gu 2024, section 3): for each head, with dt = softplus(steps + bias),

        h = exp(dt * decay) * h + (dt * x) outer B,    y = h C + skip * x,    result y * silu(gate)

    mixed [num_tokens, heads * head_dim + 2 * groups * state_size]: x, B, C; steps [num_tokens, heads]; gate
    [num_tokens, heads * head_dim]. Returns [num_tokens, heads * head_dim] in mixed's dtype; all is in float32."""
    inner, shared = params.num_heads * params.head_dim, params.num_groups * params.state_size
    known = torch.cat([mixed.float(), steps.float()], dim=1)  # x, B, C, steps
    result = torch.empty(len(mixed), inner, device=mixed.device)
    units, first = state.kept["state"], params.first_draft_element
    for each in batch.sequences:
        own = known[each.span]
        drafted = state.drafted[each.row, :, first:]
        inputs = torch.cat([drafted[: each.replayed], own])
        x, b, c, raw = inputs.split((inner, shared, shared, params.num_heads), dim=1)
        x = x.unflatten(1, (params.num_heads, params.head_dim))
        b, c = (_by_head(each_of, params) for each_of in (b, c))
        dt = F.softplus(raw + params.step_bias).clamp(*params.step_limits)
        held, stores = units.read(each.source), each.stores
        outputs = []
        for token in range(len(inputs)):
            step = dt[token][:, None]
            kept_share = torch.exp(step * params.decay[:, None])[..., None]
            held = kept_share * held + (step * x[token])[..., None] * b[token][:, None]
            while stores and stores[0][0] == token + 1:
                units.write(stores.pop(0)[1], held)
            if token >= each.replayed:
                outputs.append((held * c[token][:, None]).sum(-1) + params.skip[:, None] * x[token])
        result[each.span] = torch.stack(outputs).flatten(1)
        drafts = own[each.committed :]
        drafted[: len(drafts)] = drafts
    return (result * F.silu(gate.float())).to(mixed.dtype)


def _by_head(values: Tensor, params: ScanParams) -> Tensor:
    """[num_tokens, groups * state_size] -> [num_tokens, heads, state_size]"""
    grouped = values.unflatten(1, (params.num_groups, params.state_size))
    return grouped.repeat_interleave(params.num_heads // params.num_groups, dim=1)


GATES: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "silu": F.silu,
        "sigmoid": torch.sigmoid,
        "gelu": F.gelu,
        "gelu_tanh": lambda values: F.gelu(values, approximate="tanh"),
        "relu": F.relu,
        "relu2": lambda values: F.relu(values).square(),
        "softplus": F.softplus,
        "softplus2": lambda values: F.softplus(values, beta=math.log(2)),  # log2(1 + 2^x)
    }
)


def gated_norm(
    x: Tensor, gate: Tensor | None, weight: Tensor | None, group: int, eps: float, activation: str
) -> Tensor:
    """RMS norm of each run of `group` columns of x [num_tokens, columns], unless weight is None, times activation(gate)
    [num_tokens, columns, or one for each group], unless that is None. weight: [columns] float32, or [group] if it
    serves all groups."""
    result = x.float()
    if weight is not None:
        grouped = result.unflatten(1, (-1, group))
        normed = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)
        result = (normed * weight.view(-1, group)).flatten(1)
    if gate is not None and gate.shape[1] != x.shape[1]:
        gate = gate.repeat_interleave(group, dim=1)
    return (result if gate is None else result * GATES[activation](gate.float())).to(x.dtype)


REFERENCES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"convolve": convolve, "scan": scan, "gated_norm": gated_norm}
)
