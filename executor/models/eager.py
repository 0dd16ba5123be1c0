"""Eager execution: the implementation of `blocks.Ops` that runs each op at once on tensors, and its weights.

Only a `LinearWeight`, which the kernel registry's `linear` op packs, knows the layout of its weight; a layer calls
`apply`. Nothing here keeps state between steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from headrace import kernels
from headrace.core.options.adapters import AdapterLimits
from headrace.executor.checkpoints.weights import WeightSource
from headrace.executor.models import blocks
from headrace.executor.models.arch import ArchSpec, LayerSpec, RopeSpec
from headrace.executor.models.blocks import Attend, Linear, Role, Routing, emit_layer, size_of
from headrace.executor.models.blocks.beside import Beside
from headrace.executor.models.chunks import in_chunks, query_growth
from headrace.executor.models.reading import CheckedWeights, Part, fail_by_name, own_part, own_slopes
from headrace.executor.parallel.padding import grouped_part
from headrace.executor.parallel.rank_place import SINGLE, RankCoordinates
from headrace.executor.step.adapters import TokenAdapters
from headrace.executor.step.inputs import StepAdapters
from headrace.kernels.grouped import GroupedWeight, joined
from headrace.kernels.low_rank import EmbeddingDelta
from headrace.kernels.reference.attention import AttentionParams
from headrace.kernels.reference.latent import LatentUp, TorchLatentDeltas
from headrace.kernels.reference.low_rank import LinearDeltas, SlottedDeltas
from headrace.kernels.reference.moe import AdaptableExperts, AdaptedExperts, ExpertWeights
from headrace.kernels.reference.rotary_cache import LayerCache, Rotation
from headrace.kernels.reference.rows import LinearWeight
from headrace.kernels.reference.states import StateBatch

ChooseKernel = Callable[..., Callable[..., Any]]
"""(op's name, **facts) -> the function that computes the op; `kernels.choose` is one."""


@runtime_checkable
class FusableLinear(Protocol):
    """A `LinearWeight` whose kernel can also compute the norm before the product and the ops after it."""

    most_fused_rows: int
    """Most rows of x for which `apply_fused` may be called; 0: none."""

    def apply_fused(
        self,
        x: Tensor,
        norm: tuple[Tensor, float] | None = None,
        activation: str | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """x [num_rows, in_features] -> the result of these ops in order, without those whose argument is None: RMS norm
        (weight [in_features] float32, eps), product and bias, `activate_and_multiply`, addition of `residual`."""
        ...


@dataclass(frozen=True, eq=False)
class SharedInputs:
    """Inputs that all layers of one forward pass share."""

    batch: Any
    """The PagedBatch of the layer's cache group; of no meaning for a layer that caches no tokens."""
    cos_sin: tuple[tuple[Tensor, Tensor], ...]
    """One pair per distinct rotary spec, each [num_tokens, rotary_dim / 2] float32"""
    replica_keys: Tensor | None = None
    """[num_tokens] int64: keys by which tokens choose among an expert's replicas (`kernels.expert_places`); None
    without load balancing of experts."""
    states: StateBatch | None = None
    """For layers that keep a state per sequence."""
    adapters: StepAdapters | None = None
    """None where no token has any."""
    memo: dict[str, Any] = field(default_factory=dict, repr=False)
    """What layers leave to later layers of the same pass, whatever their cache group."""
    token_ids: Tensor | None = None
    """[num_tokens] int64, for layers that read them; None where there are no tokens."""
    earlier_ids: Tensor | None = None
    """Of `StepInputs`."""


class EagerNorm:
    """RMS or layer norm; a residual can be added before it in the same kernel."""

    def __init__(self, weights: EagerWeights, declared: blocks.Norm, prefix: str) -> None:
        name, self.place = prefix + declared.name, weights.place
        own, self._whole_size = own_part(declared.size, weights.place), size_of(declared.size)
        self.columns = self._whole_size if own is None else own.stop - own.start
        """Columns of this rank."""
        weight = bias = None
        if declared.affine:
            weight = weights.vector(f"{name}.{declared.weight_name}", self._whole_size, declared.weight_offset, own)
            bias = weights.vector(f"{name}.bias", self._whole_size, 0.0, own) if declared.bias else None
            weight, bias = weight * declared.scale, None if bias is None else bias * declared.scale
        self.eps, self.groups = declared.eps, declared.groups
        self._weights: tuple[Tensor | None, ...] = (weight, bias)
        if declared.kind == "rms":
            self._weights = (weight if weight is not None else torch.ones(self.columns, device=weights.device),)
        self._op = weights.kernel(f"{declared.kind}_norm", size=self.columns)
        self._grouped = weights.kernel("gated_norm") if self.groups > 1 else None

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x and residual [..., size] -> (norm of their sum, their sum)"""
        if self._grouped is not None:
            total = x if residual is None else x + residual
            grouped = self._grouped(total, None, self.weight, self.columns // self.groups, self.eps, "none")
            return grouped, total
        normed, total = self._op(x, residual, *self._weights, self.eps)
        return normed, total

    def of_part(self, x: Tensor) -> Tensor:
        """RMS norm of rows whose columns the ranks divide: x has this rank's, [num_tokens, columns]. The mean square is
        that of all ranks' columns."""
        if self.columns == self._whole_size:
            return self(x.contiguous())[0]
        assert self.weight is not None, "whole norms have weights"
        wide = x.float()
        mean = self.place.all_reduce(wide.square().sum(-1, keepdim=True)) / self._whole_size
        return (wide * torch.rsqrt(mean + self.eps) * self.weight).to(x.dtype)

    @property
    def weight(self) -> Tensor | None:
        """[columns] float32, with the declared offset and scale; None for a layer norm without weights."""
        return self._weights[0]

    @property
    def parameters(self) -> tuple[Tensor, float]:
        """(weight, eps) of an RMS norm."""
        assert self.weight is not None, "an RMS norm without one has ones"
        return self.weight, self.eps


class EagerWeights(CheckedWeights):
    """Reads a source into tensors of the model's dtype, packed for the device's kernels."""

    reader = "eager_reader"

    def __init__(
        self,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        place: RankCoordinates = SINGLE,
        choose: ChooseKernel = kernels.choose,
        ropes: Sequence[RopeSpec] = (),
    ) -> None:
        """ropes: the model's rotary specs, in the order of `SharedInputs.cos_sin`."""
        super().__init__(source, dtype, device, place)
        self._choose, self.ropes = choose, tuple(ropes)

    def linear(
        self, parts: Sequence[Part], in_features: int, columns: slice | None, bias: bool, role: Role
    ) -> LinearWeight:
        """The parts' rows, or their `columns` alone, stacked and packed for the kernel that the registry chooses."""
        if (grouped := self._grouped(parts, in_features, columns, bias, role)) is not None:
            return grouped
        weight = self.stack([(f"{part.name}.weight", part) for part in parts], in_features, columns)
        biases = self.stack([(f"{part.name}.bias", part) for part in parts], None, None) if bias else None
        return self.pack(role, weight, biases)

    def _grouped(
        self, parts: Sequence[Part], in_features: int, columns: slice | None, bias: bool, role: Role
    ) -> LinearWeight | None:
        """As `linear`, but quantised; None unless all parts are stored with group scales and a kernel takes them."""
        if self.device.type == "cpu" and not self.fused_kernel("linear_int4", shape=(1, 1)):
            return None
        found: list[GroupedWeight] = []
        for part in parts:
            stored = self._check(f"{part.name}.weight", (part.num_rows, in_features))
            whole = None if stored.numbers.packed is None else stored.numbers.packed()
            own = None
            if isinstance(whole, GroupedWeight):
                own = grouped_part(stored, whole, part.rows, columns)
            if own is None or (found and not own.goes_with(found[0])):
                return None
            found.append(own)
        weight = joined(found).to(self.device)
        if (arguments := _arguments_of_kernel(weight)) is None:
            return None
        op = f"linear_{'fp8' if weight.kind == 'e4m3' else weight.kind}"
        if (pack := self.fused_kernel(op, shape=weight.shape, role=role)) is None:
            return None
        biases = self.stack([(f"{part.name}.bias", part) for part in parts], None, None) if bias else None
        result: LinearWeight = pack(*arguments, biases)
        self.nbytes += result.nbytes
        return result

    def pack(self, role: Role, weight: Tensor, bias: Tensor | None) -> LinearWeight:
        """weight [out, in] and bias [out] in the layout of the kernel that the registry chooses."""
        packed: LinearWeight = self.kernel("linear", shape=tuple(weight.shape), role=role)(weight, bias)
        self.nbytes += packed.nbytes
        return packed

    def kernel(self, op: str, **facts: Any) -> Callable[..., Any]:
        """The version of `op` that the registry chooses for this model's device and dtype and these facts."""
        return self._choose(op, device=self.device, dtype=self.dtype, **facts)

    def with_own_deltas(self, held: EagerLinear, declared: Linear, source: str, prefix: str) -> EagerLinear:
        """A layer's matrices, which are those of the layer at `source`, with adapters of its own."""
        parts, columns, bias = self.parts_of(declared, source)
        own_columns = size_of(declared.columns) if columns is None else columns.stop - columns.start
        deltas = self.deltas(parts, own_columns, bias=bias, name=prefix + declared.matrices[0][0])
        return replace(held, deltas=deltas)

    def deltas(self, parts: Sequence[Part], columns: int, *, bias: bool, name: str = "") -> LinearDeltas | None:
        """The adapters of a linear layer of these parts, columns and bias of this rank; None if there are none. name:
        of its table, if it is not that of the first part."""
        if self.adapters is None:
            return None
        own = self.stack([(f"{part.name}.bias", part) for part in parts], None, None) if bias else None
        rows = sum(part.taken for part in parts)
        given = self.slot_limits, rows, columns, len(parts), own, self.device
        deltas: LinearDeltas
        if self.adapters.in_device_memory:
            slotted: SlottedDeltas = self.kernel("slotted_low_rank")(*given)
            self.nbytes += slotted.nbytes
            deltas = slotted
        else:
            deltas = self.kernel("low_rank")(*given)
        self.adapter_tables[name or parts[0].name] = deltas
        return deltas

    @property
    def adapts_all(self) -> bool:
        """Whether adapters may change more than linear layers: experts, latent attention and both ends of a model."""
        return self.adapters is not None and not self.adapters.in_device_memory

    def fused_kernel(self, op: str, **facts: Any) -> Callable[..., Any] | None:
        """As `kernel`, for a fused op; None if there is only the reference, which is no faster than the single ops."""
        found = self.kernel(op, **facts)
        return None if found is kernels.choose_reference(op) else found

    def stack(self, named: Sequence[tuple[str, Part]], in_features: int | None, columns: slice | None) -> Tensor:
        """[rows of all parts, columns], or [rows] where in_features is None."""
        tail = () if in_features is None else (in_features,)
        for name, part in named:
            self._check(name, (part.num_rows, *tail))
        if len(named) == 1:
            name, part = named[0]
            return self._floats(name, part.rows, columns).to(self.device, self.dtype).contiguous()
        width = tail if columns is None else (columns.stop - columns.start,)
        stacked = torch.empty((sum(p.taken for _, p in named), *width), dtype=self.dtype, device=self.device)
        start = 0
        for name, part in named:
            stacked[start : start + part.taken].copy_(self._floats(name, part.rows, columns))
            start += part.taken
        return stacked


def _arguments_of_kernel(weight: GroupedWeight) -> tuple[Any, ...] | None:
    """Arguments of the ops linear_int4, linear_int8 and linear_fp8; None if they do not support such a weight."""
    if weight.order is not None:
        return None
    scales = weight.scales.float() if weight.scales.dtype == torch.bfloat16 else weight.scales
    if weight.kind == "int4":
        return weight.codes, scales, None if weight.zeros is None else weight.zeros.float()
    if weight.kind == "int8" and weight.zeros is None:
        return (weight.codes ^ 0x80).view(torch.int8), scales
    if weight.kind == "e4m3" and weight.group == weight.shape[1]:
        return weight.codes.view(torch.float8_e4m3fn), scales.float()
    return None


class EagerEmbeddingDeltas:
    """The adapters of a table of token embeddings, by slot."""

    def __init__(self, limits: AdapterLimits, table_scale: float) -> None:
        """table_scale: by which rows of the table are multiplied."""
        self._scale = table_scale
        self._slots: list[EmbeddingDelta | None] = [None] * limits.slots

    def pack(self, delta: EmbeddingDelta) -> EmbeddingDelta:
        return delta

    def put(self, slot: int, packed: EmbeddingDelta | None) -> None:
        self._slots[slot] = packed

    def added(self, token_ids: Tensor, embedded: Tensor, adapters: TokenAdapters) -> Tensor:
        """The rows of token_ids [num_tokens], `embedded`, with what their adapters add to them."""
        found = embedded.clone()
        for slot, scale, rows in adapters.groups():
            if (delta := self._slots[slot]) is not None:
                change = delta.added(token_ids[rows], embedded[rows], scale, self._scale)
                found[rows] = (found[rows].float() + change).to(found.dtype)
        return found


@dataclass(frozen=True, eq=False)
class EagerLinear:
    """A `Linear`'s packed weight, and the activation of its product."""

    weight: LinearWeight
    activate: Callable[[Tensor, str], Tensor] | None = None
    activation: str | None = None
    gated: bool = False
    deltas: LinearDeltas | None = None
    """None where adapters cannot change it."""

    @classmethod
    def read(cls, weights: EagerWeights, declared: Linear, prefix: str) -> EagerLinear:
        parts, columns, bias = weights.parts_of(declared, prefix)
        weight = weights.linear(parts, size_of(declared.columns), columns, bias, declared.role)
        own_columns = size_of(declared.columns) if columns is None else columns.stop - columns.start
        deltas = weights.deltas(parts, own_columns, bias=bias)
        if declared.activation is None:
            return cls(weight, deltas=deltas)
        op = "activate_and_multiply" if declared.gated else "activate"
        activate = weights.kernel(op, kind=declared.activation)
        return cls(weight, activate, declared.activation, declared.gated, deltas)

    def __call__(self, x: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        """x [num_tokens, in_features] -> [num_tokens, this rank's out_features]"""
        product = self.weight.apply(x)
        if adapters is not None and self.deltas is not None:
            product = self.deltas.added(x, product, adapters)
        if self.activate is None or self.activation is None:
            return product
        return self.activate(product, self.activation)


class EagerAttend:
    """An `Attend` with its kernels."""

    def __init__(self, weights: EagerWeights, declared: Attend, prefix: str) -> None:
        size = weights.place.tp_size
        head_dim, self.num_heads = declared.head_dim, declared.num_heads // size
        self.head_dim, self.num_kv_heads = head_dim, max(1, declared.num_kv_heads // size)
        query_norm = declared.query_norm
        self.query_norm, self.key_norm, self._value_norm = (
            None if norm is None else EagerNorm(weights, norm, prefix)
            for norm in (query_norm, declared.key_norm, declared.value_norm)
        )
        self._keys_are_values = declared.keys_are_values
        self._rope_index = None if declared.rope is None else weights.ropes.index(declared.rope)
        sinks = None if declared.sinks is None else weights.read(declared.sinks, prefix)
        alibi = own_slopes(declared, weights.place, weights.device)
        self._params = AttentionParams(
            declared.scale,
            declared.sliding_window,
            declared.soft_cap,
            sinks=sinks,
            sink_tokens=None if declared.sink_tokens is None else weights.sink_tokens(declared.sink_tokens, prefix),
            alibi=alibi,
            alibi_root=declared.alibi_root,
            grow_after=declared.grow_after,
            causal=declared.causal,
            distance_bias=None
            if declared.distance_bias is None
            else weights.distance_bias(declared.distance_bias, prefix),
        )
        self._chunk_size, self._chunks_before = declared.chunk_size, declared.chunks_before
        self._query_growth = declared.query_growth
        self._reads_only, self._clip = declared.reads_only, declared.clip_qkv
        self._rotate = weights.kernel("rotary", head_dim=head_dim)
        self._write = weights.kernel("write_cache", head_dim=head_dim)
        # Norms, rotation and cache write as one kernel, where the device has it: each is small and costs a launch.
        self._norm_after_rotation = declared.norm_after_rotation
        can_norm = query_norm is None or (query_norm.kind == "rms" and not declared.norm_after_rotation)
        norms_alike = (query_norm is None) == (declared.key_norm is None)
        is_fusable = not declared.reads_only and can_norm and norms_alike
        self._prepare = weights.fused_kernel("rotary_and_write", head_dim=head_dim) if is_fusable else None
        self._attend = weights.kernel(
            "paged_attention",
            **{"head_dim": head_dim, "num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads},
            has_alibi=alibi is not None,
            grows=declared.grow_after is not None,
            has_sink_tokens=declared.sink_tokens is not None,
            is_causal=declared.causal,
        )

    def __call__(self, qkv: Tensor, step: SharedInputs, cache: LayerCache) -> Tensor:
        """qkv [num_tokens, (num_heads + 2 num_kv_heads) * head_dim], of which some layers have queries, or queries and
        keys, alone -> [num_tokens, num_heads * head_dim]"""
        query, batch = self.prepared(qkv, step, cache), step.batch
        if self._query_growth is not None:
            query = (query * query_growth(batch, *self._query_growth)[:, None, None]).to(query.dtype)
        if self._chunk_size is not None:
            batch = in_chunks(batch, self._chunk_size, self._chunks_before)
        attended = self._attend(query, cache.keys, cache.values, batch, self._params, cache.scales)
        return attended.view(len(query), -1)

    def prepared(self, qkv: Tensor, step: SharedInputs, cache: LayerCache) -> Tensor:
        """Writes the cache. qkv as above -> queries, normed and rotated, [num_tokens, num_heads, head_dim]"""
        num_keys = 0 if self._reads_only else self.num_kv_heads
        num_values = 0 if self._keys_are_values else num_keys
        if self._clip is not None:
            qkv = qkv.clamp(-self._clip, self._clip)
        heads = qkv.view(len(qkv), self.num_heads + num_keys + num_values, self.head_dim)
        query, key, value = heads.split((self.num_heads, num_keys, num_values), dim=1)
        if self._keys_are_values:
            value = key
        if self._value_norm is not None:
            value = self._value_norm(value)[0]
        if self._prepare is not None:
            prepared: Tensor = self._prepare(query, key, value, self._rotation(step), cache, step.batch)
            return prepared
        if self._norm_after_rotation:
            query, key = self._normed(*self._turned(query, key, step))
        else:
            query, key = self._turned(*self._normed(query, key), step)
        if not self._reads_only:
            self._write(key, value, cache.keys, cache.values, step.batch, cache.scales)
        return query

    def _normed(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return (
            query if self.query_norm is None else self.query_norm(query)[0],
            key if self.key_norm is None else self.key_norm(key)[0],
        )

    def _turned(self, query: Tensor, key: Tensor, step: SharedInputs) -> tuple[Tensor, Tensor]:
        if self._rope_index is None:
            return query, key
        turned: tuple[Tensor, Tensor] = self._rotate(query, key, *step.cos_sin[self._rope_index])
        return turned

    def _rotation(self, step: SharedInputs) -> Rotation:
        cos, sin = (None, None) if self._rope_index is None else step.cos_sin[self._rope_index]
        if self.query_norm is None or self.key_norm is None:
            return Rotation(cos, sin)
        query_norm, key_norm = self.query_norm, self.key_norm
        return Rotation(cos, sin, query_norm=query_norm.weight, key_norm=key_norm.weight, eps=query_norm.eps)


class AdaptedRows(NamedTuple):
    """The tokens of a step whose adapters change an up-projection."""

    rows: np.ndarray
    deltas: TorchLatentDeltas
    adapters: TokenAdapters

    def within(self, tokens: slice) -> np.ndarray:
        """Those among these tokens."""
        return self.rows[(self.rows >= tokens.start) & (self.rows < tokens.stop)]


class EagerLatent:
    """An `AttendLatent` with its up-projection and its kernels."""

    def __init__(self, weights: EagerWeights, declared: blocks.AttendLatent, prefix: str) -> None:
        self._declared, self._num_heads = declared, declared.num_heads // weights.place.tp_size
        rows, name = declared.up_rows, prefix + declared.up
        part = Part(name, rows.size, own_part(rows, weights.place))
        stacked = weights.stack([(f"{name}.weight", part)], declared.latent_dim, None)
        keys, values = stacked.unflatten(0, (self._num_heads, -1)).split((declared.nope_dim, declared.value_dim), 1)
        self._up = LatentUp(keys.contiguous(), values.transpose(1, 2).contiguous())
        weights.nbytes += stacked.nbytes
        self._deltas: TorchLatentDeltas | None = None
        if weights.adapters is not None and weights.adapts_all:
            sizes = declared.nope_dim, declared.value_dim
            self._deltas = TorchLatentDeltas(weights.adapters.slots, *sizes, weights.device)
            weights.adapter_tables[name] = self._deltas
        self._rope_index = None if declared.rope is None else weights.ropes.index(declared.rope)
        self._params = AttentionParams(declared.scale, declared.sliding_window)
        if declared.rope is not None:
            self._rotate = weights.kernel("rotary", head_dim=declared.rope_dim)
        self._write = weights.kernel("write_cache", head_dim=declared.latent_dim + declared.rope_dim)
        self._attend = weights.kernel(
            "latent_attention",
            num_heads=self._num_heads,
            latent_dim=declared.latent_dim,
            rope_dim=declared.rope_dim,
            **({} if declared.sliding_window is None else {"sliding_window": declared.sliding_window}),
        )

    def __call__(self, query: Tensor, latent: Tensor, step: SharedInputs, cache: LayerCache) -> Tensor:
        """query [num_tokens, heads * (nope_dim + rope_dim)], latent [num_tokens, latent_dim + rope_dim] ->
        [num_tokens, heads * value_dim]"""
        query, vector = self.rotated(query, latent, step)
        self._write(vector, vector, cache.keys, cache.values, step.batch, cache.scales)
        given = query, self._up, cache.keys, step.batch, self._params, cache.scales
        attended: Tensor = self._attend(*given)
        if (adapted := self._adapted(step)) is not None:
            attended[adapted.rows] = adapted.deltas.attention(*given, adapted.adapters)[adapted.rows]
        return attended.reshape(len(query), -1)

    def _adapted(self, step: SharedInputs) -> AdaptedRows | None:
        """None if no adapter of the step's tokens changes the up-projection."""
        if step.adapters is None or self._deltas is None or not len(rows := self._deltas.rows(step.adapters)):
            return None
        return AdaptedRows(rows, self._deltas, step.adapters)

    def rotated(self, query: Tensor, latent: Tensor, step: SharedInputs) -> tuple[Tensor, Tensor]:
        """[num_tokens, heads, nope_dim + rope_dim] and, for the cache, [num_tokens, 1, latent_dim + rope_dim]; the
        last rope_dim dimensions are rotated."""
        declared = self._declared
        query = query.view(len(query), self._num_heads, -1)
        queries, q = query.split((declared.nope_dim, declared.rope_dim), dim=-1)
        compressed, k = latent[:, None].split((declared.latent_dim, declared.rope_dim), dim=-1)
        q, k = self._turned(q, k, step, pairs=declared.interleaved)
        query = torch.cat([queries, q], dim=-1)
        if declared.query_growth is not None:
            query = (query * query_growth(step.batch, *declared.query_growth)[:, None, None]).to(query.dtype)
        return query, torch.cat([compressed, k], dim=-1)

    def _turned(self, query: Tensor, key: Tensor, step: SharedInputs, *, pairs: bool) -> tuple[Tensor, Tensor]:
        """Rotated queries and keys. pairs: dimension 2i is rotated with 2i + 1; both are then reordered alike, so that
        their products do not change."""
        if self._rope_index is None:
            return query, key
        if pairs:
            query, key = (each.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for each in (query, key))
        turned: tuple[Tensor, Tensor] = self._rotate(
            query.contiguous(), key.contiguous(), *step.cos_sin[self._rope_index]
        )
        return turned


class EagerExperts:
    """An `ExpertStack`'s weights with their kernels."""

    def __init__(self, weights: EagerWeights, declared: blocks.ExpertStack, prefix: str) -> None:
        inner, hidden = declared.inner.size, declared.hidden
        experts, own = weights.own_experts(declared, prefix)
        count, own_inner = len(experts), inner if own is None else own.stop - own.start
        gate_up = torch.empty(count, 2 * own_inner, hidden, dtype=weights.dtype, device=weights.device)
        down = torch.empty(count, hidden, own_inner, dtype=weights.dtype, device=weights.device)
        for index, expert in enumerate(experts):
            gate, up, last = (f"{prefix}{names[expert]}.weight" for names in _names(declared))
            gate_up[index] = weights.stack([(name, Part(name, inner, own)) for name in (gate, up)], hidden, None)
            down[index] = weights.stack([(last, Part(last, hidden))], inner, own)
        self._factors = None if declared.factors is None else weights.read(declared.factors, prefix)
        places, self._loads = weights.expert_places(declared)
        self._places = None if places is None else places.to(weights.device)
        self.are_divided = places is not None
        self._route = weights.kernel("route_experts", num_experts=len(declared.gates))
        biases = weights.expert_biases(declared, prefix) if declared.bias else None
        pack = weights.kernel(
            "experts",
            hidden=hidden,
            inner=own_inner,
            num_experts=count,
            activation=declared.activation,
            has_biases=declared.bias,
        )
        given = () if biases is None else (biases,)
        self._experts: ExpertWeights = pack(gate_up, down, declared.activation, *given)
        self._adapted: AdaptedExperts | None = None
        deltas: Any = None
        if weights.adapts_all and isinstance(self._experts, AdaptableExperts):
            self._adapted, deltas = self._experts.adaptable(
                weights.slot_limits, None if self._loads is None else list(experts)
            )
            self._experts, weights.adapter_tables[prefix + declared.gates[0]] = self._adapted, deltas
        weights.nbytes += self._experts.nbytes
        if self._places is not None and self._loads is not None:
            movable: Any = self._experts  # a CPU's packed experts are MovableExperts
            weights.note_balanced(movable, self._places, self._loads, deltas)

    def __call__(
        self,
        x: Tensor,
        logits: Tensor,
        routing: Routing,
        correction: Tensor | None,
        keys: Tensor | None = None,
        adapters: StepAdapters | None = None,
    ) -> Tensor:
        """x [num_tokens, hidden], logits [num_tokens, num_experts], correction [num_experts] float32 ->
        [num_tokens, hidden]. keys: `SharedInputs.replica_keys`."""
        expert_ids, shares = self._route(logits, top_k=routing.num_chosen, bias=correction, **routing.options)
        if self._factors is not None:
            shares = shares * self._factors[expert_ids]
        return self._computed(x, expert_ids, shares, keys, adapters)

    def _computed(
        self, x: Tensor, expert_ids: Tensor, shares: Tensor, keys: Tensor | None, adapters: StepAdapters | None
    ) -> Tensor:
        """expert_ids, shares [num_tokens, num_chosen]; an expert below 0 computes nothing."""
        if self._places is not None:
            own = self._places.own(expert_ids.clamp(min=0), keys)
            expert_ids = torch.where(expert_ids < 0, expert_ids, own)
        if self._loads is not None:
            self._loads += torch.bincount(expert_ids[expert_ids >= 0], minlength=len(self._loads))
        if adapters is not None and self._adapted is not None:
            return self._adapted.apply_adapted(x, expert_ids, shares, adapters)
        return self._experts.apply(x, expert_ids, shares)


def _names(stack: blocks.ExpertStack) -> tuple[tuple[str, ...], ...]:
    return stack.gates, stack.ups, stack.downs


def _computed(op: Callable[..., Any], *given: Any) -> Any:
    """Raises ModelError, naming the op, if one of another package fails."""
    try:
        return op(*given)
    except BaseException as error:
        if not op.__module__.startswith("headrace."):
            fail_by_name(f"the op {op.__module__}.{getattr(op, '__qualname__', type(op).__qualname__)}", error)
        raise


class EagerOps:
    """`blocks.Ops`."""

    def __init__(
        self, place: RankCoordinates, replica_keys: Tensor | None = None, adapters: StepAdapters | None = None
    ) -> None:
        """replica_keys, adapters: of `SharedInputs`."""
        self._place, self._replica_keys, self._adapters = place, replica_keys, adapters

    def linear(self, weight: EagerLinear, x: Tensor) -> Tensor:
        return weight(x, self._adapters)

    def norm(self, norm: EagerNorm, x: Tensor, first: int = 0, last: int | None = None) -> Tensor:
        part = x[:, first:last]
        part.copy_(norm.of_part(part))
        return x

    def compute(self, op: Callable[..., Any], *values: Any) -> Any:
        return _computed(op, *values)

    def product(self, weight: EagerLinear, x: Tensor) -> Any:
        return weight(x, self._adapters)

    def experts(
        self, stack: EagerExperts, x: Tensor, logits: Tensor, routing: Routing, correction: Tensor | None = None
    ) -> Tensor:
        exchange = self._place.exchange
        if exchange is None or not stack.are_divided:
            return stack(x, logits, routing, correction, self._replica_keys, self._adapters)
        parts = stack(exchange.gather(x), exchange.gather(logits), routing, correction)
        return exchange.own_sum(parts)

    def columns(self, x: Tensor, first: int, count: int) -> Tensor:
        return x[:, first : first + count].contiguous()

    def call(self, function: Callable[..., Tensor], *values: Any) -> Tensor:
        return function(*values)

    def gathered(self, x: Tensor) -> Tensor:
        return self._place.all_gather(x)

    def partial(self, contribution: Any) -> Tensor:
        found: Tensor = contribution
        return found

    def total(self, contributions: Sequence[Any]) -> Tensor:
        total: Tensor = contributions[0]
        for each in contributions[1:]:
            total = total + each
        return self._place.all_reduce(total)


class OpsForOthers(EagerOps):
    """Of a step in which this core has no tokens: nothing is mixed, and what is added to the stream is nobody's."""

    def mix(self, op: Callable[..., Any], *values: Any) -> Any:
        return values[0] if values else None


class EagerLayerOps(EagerOps):
    """`blocks.LayerOps`. The residual stream is hidden + delta: the last contribution stays in `delta` until the next
    norm, whose kernel also adds."""

    def __init__(
        self,
        place: RankCoordinates,
        hidden: Tensor,
        delta: Tensor | None,
        step: SharedInputs,
        cache: LayerCache,
        beside: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> None:
        """hidden, delta: [num_tokens, hidden]. beside and rows: [num_tokens, columns], of a `Beside`."""
        super().__init__(place, step.replica_keys, step.adapters)
        self.hidden, self.delta, self._beside, self._rows = hidden, delta, beside, rows
        self._step, self._cache = step, cache

    def mix(self, op: Callable[..., Any], *values: Any) -> Any:
        return _computed(op, *values, self._step, self._cache)

    def stream(self) -> Tensor:
        if self.delta is not None:
            self.hidden, self.delta = self.hidden + self.delta, None
        return self.hidden

    def replace(self, value: Tensor) -> None:
        self.hidden, self.delta = value, None

    def rows(self) -> Tensor:
        assert self._rows is not None, "no layer of another stream asks"
        return self._rows

    def put_rows(self, rows: Tensor) -> None:
        self._rows = rows

    def beside(self) -> Tensor:
        assert self._beside is not None, "no layer of another stream asks"
        return self._beside

    def wide(self) -> Tensor:
        return torch.cat([self.stream(), self.beside()], dim=1)

    def normed(self, norm: EagerNorm) -> Any:
        normed, self.hidden = norm(self.hidden, self.delta)
        self.delta = None
        return normed

    def add(
        self, contributions: Sequence[Any], post_norm: EagerNorm | None = None, factor: Tensor | float | None = None
    ) -> None:
        total = self.total(contributions)
        if post_norm is None:
            self.stream()
            self.delta = total
        else:
            self.add_whole(total, post_norm, factor)

    def add_whole(self, value: Tensor, post_norm: EagerNorm, factor: Tensor | float | None = None) -> None:
        self.stream()
        self.delta, _ = post_norm(value)
        if factor is not None:
            self.hidden = (self.stream() * factor).to(self.hidden.dtype)

    def norm_stream(self, norm: EagerNorm) -> None:
        self.hidden, _ = norm(self.hidden, self.delta)
        self.delta = None


class Normed(NamedTuple):
    """The norm of the stream, not yet computed: the kernel of the matrix that reads it does so."""

    norm: EagerNorm


class FusedProduct(NamedTuple):
    """A contribution, not yet computed: the matrix's kernel adds its product to the stream."""

    weight: FusableLinear
    x: Tensor


class FusedOps(EagerLayerOps):
    """`EagerLayerOps` for steps of few tokens without adapters: each matrix's kernel also computes the norm before it,
    its activation and the addition after it. `Layer._rows_to_fuse` gives the most tokens for which a layer uses it."""

    def linear(self, weight: EagerLinear, x: Tensor | Normed) -> Tensor:
        fusable: Any = weight.weight
        if isinstance(x, Normed):
            result: Tensor = fusable.apply_fused(self.hidden, norm=x.norm.parameters, activation=weight.activation)
        else:
            result = fusable.apply_fused(x, activation=weight.activation)
        return result

    def product(self, weight: EagerLinear, x: Tensor) -> Any:
        return FusedProduct(weight.weight, x)  # type: ignore[arg-type]

    def call(self, function: Callable[..., Tensor], *values: Any) -> Tensor:
        return function(*(each.norm(self.hidden)[0] if isinstance(each, Normed) else each for each in values))

    def normed(self, norm: EagerNorm) -> Normed:
        self.stream()
        return Normed(norm)

    def add(
        self, contributions: Sequence[Any], post_norm: EagerNorm | None = None, factor: Tensor | float | None = None
    ) -> None:
        assert post_norm is None, "layers with norms behind their blocks are not fused"
        self.stream()
        for each in contributions:
            if isinstance(each, FusedProduct):
                self.hidden = each.weight.apply_fused(each.x, residual=self.hidden)
            else:
                self.hidden = self.hidden + each


class Layer:
    """A layer's blocks with their weights."""

    def __init__(self, weights: EagerWeights, prefix: str, spec: ArchSpec, layer: LayerSpec) -> None:
        self._spec, self._layer, self._place = spec, layer, weights.place
        self._held = weights.read_layer(spec, layer, prefix)
        self._most_fused_rows = self._rows_to_fuse()

    def again(self, layer: LayerSpec) -> Layer:
        """A further run of the layer, with the weights that this one has read."""
        found = copy.copy(self)
        found._layer = layer
        return found

    def __call__(
        self, hidden: Tensor, delta: Tensor | None, step: SharedInputs, cache: LayerCache
    ) -> tuple[Tensor, Tensor | None]:
        """hidden, delta: [num_tokens, hidden] -> the same after this layer"""
        # The fused kernels add no adapters: they end with the activation, or have added to the stream.
        fuses = step.adapters is None and len(hidden) <= self._most_fused_rows
        kind = FusedOps if fuses else EagerLayerOps
        if isinstance(stream := self._spec.stream, Beside):
            return self._with_beside(stream, hidden, step, cache), None
        ops = kind(self._place, hidden, delta, step, cache)
        if stream is not None:
            return stream.emit_layer(self._layer, self._held, ops, hidden), None
        emit_layer(self._spec, self._layer, self._held, ops)
        return ops.hidden, ops.delta

    def _with_beside(self, stream: Beside, x: Tensor, step: SharedInputs, cache: LayerCache) -> Tensor:
        """x: the stream -> the stream after this layer"""
        width = stream.width_of_rows
        rows, columns = x[:, :width].contiguous(), x[:, width:]
        own = columns[:, : stream.taken] if stream.taken else columns
        ops = EagerLayerOps(self._place, rows, None, step, cache, own, rows)
        stream.emit(self._layer, self._held, ops)
        return torch.cat([ops.stream() if stream.rows == 1 else ops.rows(), columns[:, stream.taken :]], dim=1)

    def compute_for_others(self, dtype: torch.dtype) -> None:
        """Computes this rank's experts for tokens of other engine cores, in a step in which this one has none."""
        if any(isinstance(each, EagerExperts) and each.are_divided for each in self._held.ffn.values()):
            nothing = torch.empty(0, self._spec.hidden_size, dtype=dtype)
            self._layer.ffn.emit(OpsForOthers(self._place), self._held.ffn, nothing)

    def _rows_to_fuse(self) -> int:
        """Most tokens of a step that `FusedOps` compute in this layer; 0: never."""
        spec = self._spec
        # Fused kernels support RMS norms of whole rows, before the blocks only, and no sum over ranks between product
        # and addition.
        if (
            spec.norm.kind != "rms"
            or spec.norm.groups > 1
            or spec.norm_placement != "pre"
            or self._place.world_size > 1
        ):
            return 0
        if spec.stream is not None:
            return 0
        rows = []
        for held in (*self._held.mixer.values(), *self._held.ffn.values()):
            if isinstance(held, EagerAttend):
                continue
            is_plain = isinstance(held, EagerLinear) and (held.activation is None or held.gated)
            rows.append(held.weight.most_fused_rows if is_plain and isinstance(held.weight, FusableLinear) else 0)
        return min(rows, default=0)
