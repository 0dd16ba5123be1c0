"""An `ArchSpec`'s weights, read and packed for the CPU program."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.executor.cpu.weights import CpuLinear, CpuWeights
from headrace.executor.models.arch import ArchSpec, NormSpec, RopeSpec
from headrace.executor.models.decoder import not_read
from headrace.executor.models.layers import Part, own_kv_heads
from headrace.executor.models.rotary import inverse_frequencies
from headrace.executor.parallel.rank_place import SINGLE, RankPlace
from headrace.kernels.cpu.linear import PackedLinear
from headrace.kernels.cpu.program_parts import Norm, Rotary


@dataclass(frozen=True)
class CpuLayer:
    """One layer's weights."""

    attention_norm: Norm
    attention_post_norm: Norm | None
    qkv: CpuLinear
    query_norm: Norm | None
    key_norm: Norm | None
    output: CpuLinear
    mlp_norm: Norm
    mlp_post_norm: Norm | None
    up: CpuLinear
    """Gate and up where the MLP is gated."""
    down: CpuLinear


@dataclass(frozen=True)
class CpuModel:
    """One rank's weights. `table` is the head too where that is tied; only the first stage has a table to look rows
    up in, only the last one a head."""

    spec: ArchSpec
    dtype: torch.dtype
    table: PackedLinear | None  # of this rank's tokens
    positions: Tensor | None  # [rows, hidden]
    project_in: CpuLinear | None
    layers: tuple[CpuLayer, ...]  # of this stage
    final_norm: Norm | None
    project_out: CpuLinear | None
    head: CpuLinear | None
    nbytes: int


def read_model(spec: ArchSpec, weights: CpuWeights, place: RankPlace = SINGLE) -> CpuModel:
    """Reads this place's part. Raises ModelError, naming the tensor, when weights and spec disagree."""
    names, hidden, width = spec.names, spec.hidden_size, spec.embedding_width
    prefix = names.prefix_in(weights)
    table = positions = project_in = project_out = final_norm = head = None
    own_tokens = place.vocabulary(spec.vocab_size) if place.tp_size > 1 else None
    if place.is_first_stage or (place.is_last_stage and spec.tied_head):
        table = weights.table(Part(prefix + names.embedding, spec.vocab_size, own_tokens), width)
    if place.is_first_stage and spec.learned_position_offset is not None:
        rows = spec.max_positions + spec.learned_position_offset
        positions = weights.matrix(f"{prefix}{names.positions}.weight", rows, hidden)
    if place.is_first_stage and width != hidden:
        project_in = weights.linear_of([Part(prefix + names.project_in, hidden)], width)
    own_layers = place.layers(spec.num_layers)
    layers = tuple(_read_layer(spec, weights, f"{prefix}layers.{index}.", place) for index in own_layers)
    if place.is_last_stage:
        if spec.final_norm:
            final_norm = _read_norm(weights, prefix + names.final_norm, hidden, spec.norm)
        if width != hidden:
            project_out = weights.linear_of([Part(prefix + names.project_out, width)], hidden)
        if spec.tied_head:
            assert table is not None
            head = CpuLinear((table,), (None,))
        else:
            head_name = next((n for n in names.lm_heads if f"{n}.weight" in weights), names.lm_heads[0])
            head = weights.head(Part(head_name, spec.vocab_size, own_tokens), width)
    weights.check_all_used(not_read(spec, place, prefix))
    weights.report_unpacked()
    return CpuModel(
        spec=spec,
        dtype=weights.dtype,
        table=table,
        positions=positions,
        project_in=project_in,
        layers=layers,
        final_norm=final_norm,
        project_out=project_out,
        head=head,
        nbytes=weights.nbytes,
    )


def rotary_tables(rope: RopeSpec, num_positions: int) -> Rotary:
    """cos and sin of every position below `num_positions`. Not for `dynamic`, whose base is no constant."""
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inverse_frequencies(rope)
    return Rotary(angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor)


def _read_layer(spec: ArchSpec, weights: CpuWeights, prefix: str, place: RankPlace) -> CpuLayer:
    names, hidden, inner, head_dim = spec.names, spec.hidden_size, spec.intermediate_size, spec.head_dim
    heads = place.share(spec.num_heads, "attention heads")
    kv_heads = own_kv_heads(spec, place)
    query, key = spec.num_heads * head_dim, spec.num_kv_heads * head_dim
    query_rows = slice(heads.start * head_dim, heads.stop * head_dim)
    key_rows = slice(kv_heads.start * head_dim, kv_heads.stop * head_dim)
    inner_rows = place.share(inner, "an MLP's inner size")
    qkv = [Part(prefix + names.query, query, query_rows)]
    qkv += [Part(prefix + name, key, key_rows) for name in (names.key, names.value)]
    up = [Part(prefix + names.gate, inner, inner_rows)] if spec.gated_mlp else []
    up.append(Part(prefix + names.up, inner, inner_rows))

    def norm(name: str, size: int = hidden) -> Norm:
        return _read_norm(weights, prefix + name, size, spec.norm)

    def row_parallel(name: str, in_features: int, columns: slice, bias: bool) -> CpuLinear:
        if bias and place.tp_rank > 0:
            weights.leave(f"{prefix}{name}.bias", hidden)  # added once, by rank 0
        part = Part(prefix + name, hidden)
        own = columns if place.tp_size > 1 else None
        return weights.linear_of([part], in_features, own, bias=bias and place.tp_rank == 0)

    is_sandwich = spec.norm_placement == "sandwich"
    return CpuLayer(
        attention_norm=norm(names.attention_norm),
        attention_post_norm=norm(names.attention_post_norm) if is_sandwich else None,
        qkv=weights.linear_of(qkv, hidden, bias=spec.attention_bias),
        query_norm=norm(names.query_norm, head_dim) if spec.qk_norm else None,
        key_norm=norm(names.key_norm, head_dim) if spec.qk_norm else None,
        output=row_parallel(names.output, query, query_rows, spec.output_bias),
        mlp_norm=norm(names.mlp_norm),
        mlp_post_norm=norm(names.mlp_post_norm) if is_sandwich else None,
        up=weights.linear_of(up, hidden, bias=spec.mlp_bias, gated=spec.gated_mlp),
        down=row_parallel(names.down, inner, inner_rows, spec.mlp_bias),
    )


def _read_norm(weights: CpuWeights, name: str, size: int, spec: NormSpec) -> Norm:
    if not spec.affine:
        return Norm(spec.kind, spec.eps)
    weight = weights.vector(f"{name}.weight", size, spec.weight_offset)
    bias = weights.vector(f"{name}.bias", size) if spec.kind == "layer" else None
    return Norm(spec.kind, spec.eps, weight, bias)
