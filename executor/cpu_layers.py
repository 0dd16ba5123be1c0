"""An `ArchSpec`'s weights, read and packed for the CPU program."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.executor.arch import ArchSpec, NormSpec, RopeSpec
from headrace.executor.cpu_weights import CpuLinear, CpuWeights
from headrace.executor.rotary import inverse_frequencies
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
    """A model's weights. `table` is the head too where that is tied."""

    spec: ArchSpec
    dtype: torch.dtype
    table: PackedLinear
    positions: Tensor | None  # [rows, hidden]
    project_in: CpuLinear | None
    layers: tuple[CpuLayer, ...]
    final_norm: Norm | None
    project_out: CpuLinear | None
    head: CpuLinear
    nbytes: int


def read_model(spec: ArchSpec, weights: CpuWeights) -> CpuModel:
    """Reads all of it. Raises ModelError, naming the tensor, when weights and spec disagree."""
    names, hidden, width = spec.names, spec.hidden_size, spec.embedding_width
    prefix = next((p for p in names.prefixes if f"{p}{names.embedding}.weight" in weights), names.prefixes[0])
    head_name = next((n for n in names.lm_heads if f"{n}.weight" in weights), names.lm_heads[0])
    table = weights.table(f"{prefix}{names.embedding}.weight", spec.vocab_size, width)
    positions = project_in = project_out = None
    if spec.learned_position_offset is not None:
        rows = spec.max_positions + spec.learned_position_offset
        positions = weights.matrix(f"{prefix}{names.positions}.weight", rows, hidden)
    if width != hidden:
        project_in = weights.linear_of([(prefix + names.project_in, hidden)], width)
        project_out = weights.linear_of([(prefix + names.project_out, width)], hidden)
    layers = tuple(_read_layer(spec, weights, f"{prefix}layers.{index}.") for index in range(spec.num_layers))
    final_norm = _read_norm(weights, prefix + names.final_norm, hidden, spec.norm) if spec.final_norm else None
    if spec.tied_head:
        head = CpuLinear((table,), (None,))
    else:
        head = weights.head(head_name, spec.vocab_size, width)
    # A tied checkpoint may carry a copy of the embedding as its head.
    excused = [f"^{re.escape(name)}\\.weight$" for name in names.lm_heads] if spec.tied_head else []
    weights.check_all_used((*names.ignorable, *excused))
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


def _read_layer(spec: ArchSpec, weights: CpuWeights, prefix: str) -> CpuLayer:
    names, hidden, inner = spec.names, spec.hidden_size, spec.intermediate_size
    query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    qkv = [(prefix + names.query, query), (prefix + names.key, key), (prefix + names.value, key)]
    up = [(prefix + names.gate, inner)] if spec.gated_mlp else []
    up.append((prefix + names.up, inner))

    def norm(name: str, size: int = hidden) -> Norm:
        return _read_norm(weights, prefix + name, size, spec.norm)

    is_sandwich = spec.norm_placement == "sandwich"
    return CpuLayer(
        attention_norm=norm(names.attention_norm),
        attention_post_norm=norm(names.attention_post_norm) if is_sandwich else None,
        qkv=weights.linear_of(qkv, hidden, bias=spec.attention_bias),
        query_norm=norm(names.query_norm, spec.head_dim) if spec.qk_norm else None,
        key_norm=norm(names.key_norm, spec.head_dim) if spec.qk_norm else None,
        output=weights.linear_of([(prefix + names.output, hidden)], query, bias=spec.output_bias),
        mlp_norm=norm(names.mlp_norm),
        mlp_post_norm=norm(names.mlp_post_norm) if is_sandwich else None,
        up=weights.linear_of(up, hidden, bias=spec.mlp_bias, gated=spec.gated_mlp),
        down=weights.linear_of([(prefix + names.down, hidden)], inner, bias=spec.mlp_bias),
    )


def _read_norm(weights: CpuWeights, name: str, size: int, spec: NormSpec) -> Norm:
    if not spec.affine:
        return Norm(spec.kind, spec.eps)
    weight = weights.vector(f"{name}.weight", size, spec.weight_offset)
    bias = weights.vector(f"{name}.bias", size) if spec.kind == "layer" else None
    return Norm(spec.kind, spec.eps, weight, bias)
