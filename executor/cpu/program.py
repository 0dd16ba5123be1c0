"""Writes a model's step down as one program of the CPU kernels.

The residual stream and the queries, keys and values are float32; what linear layers read is rounded to bf16 where the
weights are bf16 (they would round it themselves), and stays float32 everywhere else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.executor.cpu.layers import CpuLayer, CpuModel, rotary_tables
from headrace.executor.cpu.weights import CpuLinear
from headrace.executor.models.arch import LayerSpec, RopeSpec
from headrace.executor.models.kv_cache import KVCache
from headrace.executor.parallel.collectives import SharedCollectives
from headrace.executor.parallel.rank_place import SINGLE, RankPlace
from headrace.kernels.cpu.collectives import GroupC
from headrace.kernels.cpu.linear import Runtime
from headrace.kernels.cpu.ops import CacheScales
from headrace.kernels.cpu.program import Builder
from headrace.kernels.cpu.program_parts import Attention, Buffer, LayerCache, Norm, Rotary, SamplingColumns
from headrace.kernels.cpu.program_ranks import rank_gather, rank_meet, rank_sum
from headrace.kernels.cpu.program_run import Program, StepBuffers

ALONE_S = 500e-6
"""A step shorter than this takes one thread: beside other busy processes (the client, the HTTP server) two of them
wait longer for each other than one takes."""


@dataclass(frozen=True)
class StepLimits:
    """The most that one step may hold, which buffers and tables are made for."""

    max_tokens: int
    max_seqs: int
    """Sequences, and so rows of logits."""
    max_positions: int
    """Tokens of one sequence."""


@dataclass(frozen=True, eq=False)
class WrittenProgram:
    """A program, where it reads a step from and where it leaves what came of it."""

    kv_cache: KVCache
    program: Program
    buffers: StepBuffers
    hidden: Tensor
    """[max_tokens, hidden_size] float32: where a stage of a pipeline starts from, and what it leaves to the next."""
    logits: Tensor  # [max_seqs, vocab_size] float32; no rows where another stage has the head
    columns: SamplingColumns  # the same


@dataclass(frozen=True)
class Stream:
    """What a layer works on after its attention: of all tokens, or of those that logits are wanted of."""

    hidden: Buffer
    normed: Buffer
    attended: Buffer
    activated: Buffer
    delta: Buffer


class ProgramWriter:
    """Writes one rank's program. Raises ValueError for what the kernels cannot do."""

    def __init__(
        self, model: CpuModel, kv_cache: KVCache, limits: StepLimits, runtime: Runtime, place: RankPlace = SINGLE
    ) -> None:
        spec = model.spec
        self._model, self._spec, self._kv_cache, self._limits = model, spec, kv_cache, limits
        self._place, self._runtime = place, runtime
        self._ranks = RankBuffers(place, limits.max_tokens) if place.tp_size > 1 else None
        self._positions = min(limits.max_positions, kv_cache.num_blocks * kv_cache.block_size)
        self._rotaries: dict[RopeSpec, Rotary] = {}
        self._max_logits = min(limits.max_seqs, limits.max_tokens)
        builder = self._builder = Builder(
            runtime, max_tokens=limits.max_tokens, max_logits=self._max_logits, alone_s=ALONE_S
        )
        inner = inner_dtype(model)
        self._num_heads = spec.num_heads // place.tp_size
        self._inner_size = spec.intermediate_size // place.tp_size
        heads = self._num_heads + 2 * spec.local_kv_heads(place.tp_size)
        self._hidden = builder.buffer(spec.hidden_size, torch.float32)
        self._qkv = builder.buffer(heads * spec.head_dim, torch.float32)
        self._tokens = Stream(
            hidden=self._hidden,
            normed=builder.buffer(spec.hidden_size, inner, own=True),
            attended=builder.buffer(self._num_heads * spec.head_dim, inner),
            activated=builder.buffer(self._inner_size, inner),
            delta=builder.buffer(spec.hidden_size, torch.float32),
        )

    def write(self) -> WrittenProgram:
        place, spec = self._place, self._spec
        if place.is_first_stage:
            self._embed()
        own, stream = place.layers(spec.num_layers), self._tokens
        for index, layer in enumerate(self._model.layers):
            if place.is_last_stage and index == len(own) - 1:
                stream = self._wanted_stream()
            write = self._post_norm_layer if spec.norm_placement == "post" else self._layer
            write(layer, spec.layers[own[index]], self._layer_cache(index), stream)
        if place.is_last_stage:
            output = self._logits(stream.hidden)
            logits, columns = output.tensor, self._builder.sample(output)
        else:
            output = self._hidden
            logits, columns = torch.empty(0, spec.vocab_size), SamplingColumns(self._runtime, 0, spec.vocab_size)
            if self._ranks is not None:
                rank_meet(self._builder, self._ranks.group, self._hidden)
        program = self._builder.build(output)
        buffers = StepBuffers(
            max_tokens=self._limits.max_tokens,
            max_seqs=self._limits.max_seqs,
            max_logits=self._limits.max_seqs,
            max_blocks=-(-self._limits.max_positions // self._kv_cache.block_size),
        )
        return WrittenProgram(self._kv_cache, program, buffers, self._hidden.tensor, logits, columns)

    def _layer_cache(self, index: int) -> LayerCache:
        cache, scales = self._kv_cache, None
        if cache.key_scales:
            scales = CacheScales(keys=cache.key_scales[index], values=cache.value_scales[index])
        return LayerCache(cache.keys[index], cache.values[index], scales)

    def _embed(self) -> None:
        model, spec, builder = self._model, self._spec, self._builder
        # Rounded to the model's dtype, as the models that have a scale were trained.
        scale = float(torch.tensor(spec.embedding_scale, dtype=model.dtype))
        assert model.table is not None, "the first stage has the table"
        embedded = self._hidden
        if model.project_in is not None:
            embedded = builder.buffer(spec.embedding_width, inner_dtype(model))
        if self._ranks is None:
            builder.embedding(model.table, embedded, scale)
        else:
            first_id = self._place.vocabulary(spec.vocab_size).start
            parts = self._ranks.next_parts(spec.embedding_width)
            own = Buffer(parts[self._place.tp_rank], "tokens")
            builder.embedding(model.table, own, scale, first_id=first_id, vocab_size=spec.vocab_size)
            rank_sum(builder, self._ranks.group, parts, embedded, add=False)
        if model.project_in is not None:
            self._linear(model.project_in, embedded, self._hidden)
        if model.positions is not None:
            builder.add_positions(model.positions, self._hidden, spec.learned_position_offset or 0)

    def _layer(self, layer: CpuLayer, spec: LayerSpec, cache: LayerCache, to: Stream) -> None:
        """Norms before attention and MLP, and (sandwich) after them too."""
        self._builder.norm(self._hidden, self._tokens.normed, layer.attention_norm)
        self._attention(layer, spec, cache, self._tokens.normed, to)
        self._add_to_stream(layer.output, to.attended, layer.attention_post_norm, to)
        self._builder.norm(to.hidden, to.normed, layer.mlp_norm)
        self._mlp(layer, to.normed, to)
        self._add_to_stream(layer.down, to.activated, layer.mlp_post_norm, to)

    def _post_norm_layer(self, layer: CpuLayer, spec: LayerSpec, cache: LayerCache, to: Stream) -> None:
        """The original transformer's order: each norm follows the addition, and its result is the stream."""
        self._attention(layer, spec, cache, self._hidden, to)
        self._add_to_stream(layer.output, to.attended, None, to)
        self._builder.norm(to.hidden, to.hidden, layer.attention_norm)
        self._mlp(layer, to.hidden, to)
        self._add_to_stream(layer.down, to.activated, None, to)
        self._builder.norm(to.hidden, to.hidden, layer.mlp_norm)

    def _wanted_stream(self) -> Stream:
        """Where the last layer goes on with the tokens that logits are wanted of. All that `Program.run_logits` starts
        from, queries and hidden states of all tokens, stays as it is."""
        tokens, spec, builder = self._tokens, self._spec, self._builder
        return Stream(
            hidden=builder.buffer(spec.hidden_size, torch.float32, rows="logits"),
            normed=tokens.normed.of_logits(self._max_logits),
            attended=builder.buffer(tokens.attended.columns, tokens.attended.tensor.dtype, rows="logits", own=True),
            activated=tokens.activated.of_logits(self._max_logits),
            delta=tokens.delta.of_logits(self._max_logits),
        )

    def _attention(self, layer: CpuLayer, spec: LayerSpec, cache: LayerCache, x: Buffer, to: Stream) -> None:
        self._linear(layer.qkv, x, self._qkv)
        attention = Attention(
            num_heads=self._num_heads,
            cache=cache,
            scale=self._spec.attention_scale,
            rotary=self._rotary(spec.rope),
            query_norm=layer.query_norm,
            key_norm=layer.key_norm,
            window=spec.sliding_window,
            soft_cap=self._spec.attention_soft_cap,
        )
        builder, tokens = self._builder, self._tokens
        builder.write_cache(self._qkv, attention)
        if to is tokens:
            builder.attend(self._qkv, tokens.attended, attention)
            return
        builder.start_of_logits()
        builder.gather(self._hidden, to.hidden)
        builder.attend(self._qkv, tokens.attended, attention, only_logits=True)
        builder.gather(tokens.attended, to.attended)

    def _rotary(self, rope: RopeSpec | None) -> Rotary | None:
        if rope is not None and rope not in self._rotaries:
            self._rotaries[rope] = rotary_tables(rope, self._positions)
        return None if rope is None else self._rotaries[rope]

    def _mlp(self, layer: CpuLayer, x: Buffer, to: Stream) -> None:
        spec = self._spec
        if not spec.gated_mlp or layer.up.is_gated:
            self._linear(layer.up, x, to.activated, activation=spec.activation)
            return
        # Gate and up are stored in different types.
        gate_up = self._builder.buffer(2 * self._inner_size, torch.float32, rows=x.rows)
        self._linear(layer.up, x, gate_up)
        self._builder.activation_multiply(gate_up, to.activated, spec.activation)

    def _add_to_stream(self, weight: CpuLinear, x: Buffer, post_norm: Norm | None, to: Stream) -> None:
        if self._ranks is not None:
            parts = self._ranks.next_parts(self._spec.hidden_size)[:, : len(to.hidden.tensor)]
            self._linear(weight, x, Buffer(parts[self._place.tp_rank], x.rows))
            out = to.hidden if post_norm is None else to.delta
            rank_sum(self._builder, self._ranks.group, parts, out, add=post_norm is None)
        elif post_norm is None:
            self._linear(weight, x, to.hidden, residual=to.hidden)
        else:
            self._linear(weight, x, to.delta)
        if post_norm is not None:
            self._builder.norm(to.delta, to.hidden, post_norm, add=True)

    def _logits(self, hidden: Buffer) -> Buffer:
        model, spec, builder = self._model, self._spec, self._builder
        x = hidden
        if model.final_norm is not None:
            x = self._tokens.normed.of_logits(self._max_logits)
            builder.norm(hidden, x, model.final_norm)
        if model.project_out is not None:
            projected = builder.buffer(spec.embedding_width, inner_dtype(model), rows="logits")
            self._linear(model.project_out, x, projected)
            x = projected
        assert model.head is not None, "the last stage has the head"
        # What comes after a plain projection may be nothing but a choice.
        is_plain = self._ranks is None and model.head.biases == (None,) and spec.final_soft_cap is None
        logits = builder.buffer(spec.vocab_size, torch.float32, rows="logits", highest=is_plain)
        if self._ranks is None:
            self._linear(model.head, x, logits)
        else:
            own = self._place.vocabulary(spec.vocab_size)
            shared = Buffer(self._ranks.logits(self._max_logits, spec.vocab_size), "logits")
            self._linear(model.head, x, shared.part(own.start, own.stop - own.start))
            rank_gather(builder, self._ranks.group, shared, logits)
        if spec.final_soft_cap is not None:
            builder.soft_cap(logits, spec.final_soft_cap)
        return logits

    def _linear(
        self, linear: CpuLinear, x: Buffer, out: Buffer, *, residual: Buffer | None = None, activation: str = "none"
    ) -> None:
        first = 0
        for weight, bias in zip(linear.weights, linear.biases, strict=True):
            part = out if len(linear.weights) == 1 else out.part(first, weight.columns)
            self._builder.linear(weight, x, part, bias=bias, residual=residual, activation=activation)
            first += weight.columns


class RankBuffers:
    """Where the ranks of a stage meet: what `SharedCollectives` has in shared memory."""

    def __init__(self, place: RankPlace, max_tokens: int) -> None:
        assert isinstance(place.link, SharedCollectives), "why_not has said that the ranks share no memory"
        self._shared, self._max_tokens, self._turn = place.link, max_tokens, 0
        self.group: GroupC = place.link.group

    def next_parts(self, columns: int) -> Tensor:
        """[tp_size, max_tokens, columns] float32, in turns: ranks may still be reading those before."""
        self._turn ^= 1
        return self._shared.parts(self._turn, self._max_tokens, columns)

    def logits(self, rows: int, columns: int) -> Tensor:
        """[rows, columns] float32"""
        return self._shared.logits(rows, columns)


def inner_dtype(model: CpuModel) -> torch.dtype:
    """Of what linear layers read."""
    return torch.bfloat16 if model.layers[0].output.weights[0].dtype == torch.bfloat16 else torch.float32
