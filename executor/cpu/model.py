"""An `ArchSpec`'s weights, read and packed for the CPU program."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headrace.executor.cpu.weights import CpuLinear, CpuNorm, CpuWeights
from headrace.executor.models.arch import ArchSpec, RopeSpec
from headrace.executor.models.blocks import Held, LayerHeld, Linear, Norm, Stream
from headrace.executor.models.reading import Part
from headrace.executor.models.rotary import inverse_frequencies
from headrace.executor.parallel.load_balancing import BalancedExperts
from headrace.kernels.cpu.facade import EmbeddingTable, PackedLinear, Rotary


@dataclass(frozen=True)
class CpuModel:
    """One rank's weights. A tied `table` is also the head. Only the first stage needs a table for lookups; only the
    last has a head."""

    spec: ArchSpec
    dtype: torch.dtype
    table: PackedLinear | None  # for this rank's tokens
    embedding_norm: CpuNorm | None
    positions: Tensor | None  # [rows, hidden]
    token_types: Tensor | None  # [types, hidden]
    project_in: CpuLinear | None
    layers: tuple[LayerHeld, ...]  # of this stage
    final_norm: CpuNorm | None
    project_out: CpuLinear | None
    head: CpuLinear | None
    nbytes: int
    balanced: tuple[BalancedExperts, ...] = ()
    """Experts that may move between ranks."""
    embedding_deltas: EmbeddingTable | None = None
    """None where adapters cannot change the table."""
    layer_table: PackedLinear | None = None
    """The table of the spec's stream, for this rank's tokens; of the first stage."""
    beginning: Held = field(default_factory=dict)
    """What the beginning of the spec's stream reads; of the first stage."""
    end: Held = field(default_factory=dict)
    """Likewise, of the last stage."""


def read_model(spec: ArchSpec, weights: CpuWeights) -> CpuModel:
    """Reads the weights of the reader's rank. Raises ModelError, naming the tensor, when weights and spec disagree."""
    names, hidden, width, place = spec.names, spec.hidden_size, spec.embedding_width, weights.place
    prefix = names.prefix_in(weights)
    embedding_deltas = table = embedding_norm = positions = token_types = project_in = project_out = final_norm = (
        head
    ) = None
    own_tokens = place.vocabulary(spec.vocab_size) if place.tp_size > 1 else None
    if place.is_first_stage or (place.is_last_stage and spec.tied_head):
        table = weights.table(Part(prefix + names.embedding, spec.vocab_size, own_tokens), width)
    if place.is_first_stage:
        embedding_deltas = weights.embedding_deltas(prefix + names.embedding)
    if place.is_first_stage and spec.embedding_norm:
        embedding_norm = weights.norm(Norm.of_stream(spec, names.embedding_norm), prefix)
    if place.is_first_stage and spec.learned_position_offset is not None:
        rows = spec.max_positions + spec.learned_position_offset
        positions = weights.matrix(f"{prefix}{names.positions}.weight", rows, hidden)
    if place.is_first_stage and spec.token_types:
        token_types = weights.matrix(f"{prefix}{names.token_types}.weight", spec.token_types, hidden)
    if place.is_first_stage and width != hidden:
        project_in = weights.linear(Linear(((names.project_in, hidden),), width), prefix)
    layer_table, beginning, end = None, dict[str, Any](), dict[str, Any]()
    if place.is_first_stage and (stream := spec.stream) is not None:
        layer_table = _layer_table(stream, weights, prefix)
        beginning = {key: weights.read(each, prefix) for key, each in stream.declare_beginning(spec).items()}
    if place.is_last_stage and spec.stream is not None:
        end = {key: weights.read(each, prefix) for key, each in spec.stream.declare_end(spec).items()}
    read: dict[str, LayerHeld] = {}
    layers: list[LayerHeld] = []
    for index in place.layers(spec.num_layers):
        if (start := spec.layer_prefix(prefix, index)) not in read:
            read[start] = weights.read_layer(spec, spec.layers[index], start)
        layers.append(read[start])
    if place.is_last_stage:
        if spec.final_norm:
            final_norm = weights.norm(Norm.of_stream(spec, names.final_norm, spec.logit_scale), prefix)
        if width != hidden:
            project_out = weights.linear(Linear(((names.project_out, width),), hidden), prefix)
    if place.is_last_stage and spec.has_head:
        head_name = next((n for n in names.lm_heads if f"{n}.weight" in weights), names.lm_heads[0])
        head = weights.head(
            Part(head_name, spec.vocab_size, own_tokens), width, table if spec.tied_head else None, bias=spec.head_bias
        )
    weights.check_rest(spec, prefix)
    weights.report_unpacked()
    return CpuModel(
        spec=spec,
        dtype=weights.dtype,
        table=table,
        embedding_norm=embedding_norm,
        positions=positions,
        token_types=token_types,
        project_in=project_in,
        layers=tuple(layers),
        final_norm=final_norm,
        project_out=project_out,
        head=head,
        nbytes=weights.nbytes,
        balanced=tuple(weights.balanced),
        embedding_deltas=embedding_deltas,
        layer_table=layer_table,
        beginning=beginning,
        end=end,
    )


def _layer_table(stream: Stream, weights: CpuWeights, prefix: str) -> PackedLinear | None:
    if (table := stream.table) is None:
        return None
    own = weights.place.vocabulary(table.vocab_size) if weights.place.tp_size > 1 else None
    return weights.table(Part(prefix + table.name, table.vocab_size, own), table.width)


def rotary_tables(rope: RopeSpec, num_positions: int) -> Rotary:
    """cos and sin of every position below `num_positions`. Not for `dynamic` scaling, whose base varies."""
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inverse_frequencies(rope)
    return Rotary(angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor)
