"""Writes a model's step as one program of the CPU kernels.

The residual stream and the queries, keys and values are float32; the inputs of linear layers are rounded to bf16 where
the weights are bf16 (the layers would round them themselves), and stay float32 otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headrace.core.options.adapters import AdapterLimits
from headrace.executor.cpu.model import CpuModel, rotary_tables
from headrace.executor.cpu.weights import CpuLinear, CpuNorm
from headrace.executor.models.arch import RopeSpec
from headrace.executor.models.blocks import NoMixer, Routing, emit_layer, rounded_up
from headrace.executor.models.blocks.beside import Beside
from headrace.executor.models.chunks import growth_at
from headrace.executor.models.kv_cache import KVCache
from headrace.executor.models.vocabulary import stream_scale, table_scale
from headrace.executor.parallel.collectives import SharedCollectives
from headrace.executor.parallel.rank_place import SINGLE, RankCoordinates
from headrace.ipc.adapters import most_of_request
from headrace.kernels.cpu.facade import (
    Buffer,
    Builder,
    GroupC,
    LayerCache,
    PackedExperts,
    Program,
    Rotary,
    Runtime,
    SampleBuffers,
    StateStepC,
    StepBuffers,
    rank_gather,
    rank_meet,
    rank_sum,
)
from headrace.kernels.reference.states import LayerState

MOST_MATRICES = 8
"""Most matrices of a linear layer."""
ALONE_S = 500e-6
"""A step shorter than this runs on one thread: beside other busy processes (the client, the HTTP server) two threads
wait for each other longer than one would take."""


@dataclass(frozen=True)
class StepLimits:
    """The limits of one step, for which buffers and tables are made."""

    max_tokens: int
    max_seqs: int
    max_positions: int
    """Tokens of one sequence."""
    more_logits: int = 0
    """Rows of logits beyond one for each sequence, for draft tokens."""
    pools: bool = False
    """Steps may ask for the states of tokens after the final norm."""
    batch_invariant: bool = False
    """A row's bits depend on nothing else that a step computes, at any number of a sequence's tokens."""

    adapters: AdapterLimits | None = None
    """None: rows have no adapters."""

    def delta_bytes(self, head_columns: int) -> int:
        """Room for the products of a step's rows with the first factors of a layer's adapters, or for the rows of the
        head. Memory is taken as it is used."""
        if self.adapters is None:
            return 0
        width = MOST_MATRICES * rounded_up(self.adapters.max_rank, 16)
        most_used = most_of_request(self.adapters.max_loras)
        return most_used * 4 * max(self.max_tokens * width, self.max_logits * rounded_up(head_columns, 16))

    @property
    def max_logits(self) -> int:
        return min(self.max_seqs + self.more_logits, self.max_tokens)


@dataclass(frozen=True, eq=False)
class WrittenProgram:
    """A program with its input and output buffers."""

    kv_cache: KVCache
    program: Program
    buffers: StepBuffers
    embedded: Tensor | None
    """[max_tokens, embedding width]: where the program writes token embeddings, those of this rank's tokens; None if
    it does not begin with them. Rows with GIVEN_ROW in the place of a token id keep what is in it."""
    hidden: Tensor
    """[max_tokens, width of the stream before the stage's first layer] float32: the input of a pipeline stage after
    the first, and, without what the stage's layers remove, of the next stage."""
    states: Tensor  # [max_logits, width] float32: what the head reads; no rows unless steps may ask for them
    logits: Tensor  # [max_logits, vocab_size] float32; no rows where there is no head
    sampling: SampleBuffers  # no rows where there is no head


@dataclass(frozen=True)
class Stream:
    """The buffers of a layer's ops: for all tokens or, after the last attention, for tokens whose logits are needed."""

    hidden: Buffer
    """The residual stream."""
    normed: Buffer
    delta: Buffer
    """A contribution that is normed before it is added."""


class Product(NamedTuple):
    """A contribution x W^T (+ b), computed directly into the buffer that it is added to."""

    weight: CpuLinear
    x: Buffer


class ChosenExperts(NamedTuple):
    """The contribution of each token's chosen experts, computed directly into the buffer that it is added to."""

    stack: PackedExperts
    x: Buffer
    expert_ids: Buffer
    weights: Buffer


Contribution = Product | ChosenExperts | Buffer


def _columns_of(contribution: Contribution) -> int:
    if isinstance(contribution, Product):
        return contribution.weight.columns
    return contribution.stack.hidden if isinstance(contribution, ChosenExperts) else contribution.columns


class ProgramOps:
    """`blocks.LayerOps` that write a layer's ops into the program. In the last layer, whatever follows what reads other
    tokens is computed only for tokens whose logits are needed."""

    def __init__(
        self,
        builder: Builder,
        model: CpuModel,
        place: RankCoordinates,
        limits: StepLimits,
        num_positions: int,
        states: StateStepC,
    ) -> None:
        """num_positions: the size of the tables of cos and sin. states: of each step's sequences."""
        spec = model.spec
        self.builder, self.max_logits, self.states = builder, limits.max_logits, states
        self.batch_invariant = limits.batch_invariant
        self.ranks = RankBuffers(place, limits.max_tokens) if place.tp_size > 1 else None
        self.inner = inner_dtype(model)
        self._spec, self.place, self._num_positions = spec, place, num_positions
        self._rotaries: dict[RopeSpec, Rotary] = {}
        self._growths: dict[tuple[int, float, int], Tensor] = {}
        self._rooms: dict[tuple[int, torch.dtype, int], Buffer] = {}
        self._taken: dict[tuple[int, torch.dtype], int] = {}
        width = own_width = spec.hidden_size
        if isinstance(spec.stream, Beside):
            width, own_width = spec.stream.width(place.layers(spec.num_layers).start), spec.stream.width_of_rows
        self._wide = builder.buffer(width, torch.float32)
        self._beside: Buffer | None = None
        self._rows = self._wide if width == own_width else self._wide.part(0, own_width)
        self.tokens = self.at = Stream(
            hidden=self._rows if own_width == spec.hidden_size else builder.buffer(spec.hidden_size, torch.float32),
            normed=builder.buffer(spec.hidden_size, self.inner, own=True),
            delta=builder.buffer(spec.hidden_size, torch.float32),
        )
        self.cache: Any
        """The layer's `LayerCache`, which attention needs."""
        self.state: Any = None
        """The layer's `LayerState`, if it keeps one."""
        self.kept: Buffer | None = None
        """What an op of the layer leaves to a later one."""
        self._is_last = False
        self._left: Buffer | None = None

    def begin_layer(
        self,
        cache: LayerCache,
        state: LayerState | None,
        *,
        is_last: bool,
        mixes: bool = True,
        beside: Buffer | None = None,
    ) -> None:
        """is_last: this layer's output goes to the head. mixes: it reads other tokens. beside: the columns of
        `LayerOps.beside`."""
        self.cache, self.state, self._is_last, self._beside = cache, state, is_last, beside
        self._taken.clear()
        if is_last and not mixes:
            self._narrow()

    def linear(self, weight: CpuLinear, x: Buffer) -> Buffer:
        if weight.activation == "none":
            out = self.room(weight.columns, torch.float32)
            self.multiply(weight, x, out)
        elif not weight.gated or weight.gates_itself:
            out = self.room(weight.columns, self.inner)
            self.multiply(weight, x, out, activation=weight.activation)
        else:  # gate and up are stored in different types
            gate_up, out = self.room(weight.columns, torch.float32), self.room(weight.columns // 2, self.inner)
            self.multiply(weight, x, gate_up)
            self.builder.activation_multiply(gate_up, out, weight.activation)
        return out

    def norm(self, norm: CpuNorm, x: Buffer, first: int = 0, last: int | None = None) -> Buffer:
        x, last = self.shared(x), x.columns if last is None else last
        part = x.part(first, last - first)
        self.builder.norm(part, part, norm.constants)
        return x

    def compute(self, op: Any, *values: Buffer) -> Buffer:
        written: Buffer = op.write(self, *map(self.shared, values))
        return written

    mix = compute

    def shared(self, x: Buffer) -> Buffer:
        """x in memory that all threads share: the input of a block, for one, is not."""
        if x.copies is None:
            return x
        out = self.room(x.columns, x.tensor.dtype)
        self.builder.copy(x, out)
        return out

    def leave(self, x: Buffer) -> None:
        """Keeps x for a later layer, whose `left` it is."""
        if self._left is None:
            self._left = self.builder.buffer(x.columns, x.tensor.dtype)
        self.builder.copy(x, self._left)

    def left(self) -> Buffer:
        assert self._left is not None, "an earlier layer leaves it"
        return self._left

    def repeats_from_here(self) -> bool:
        """Called by an op that may be computed again, from inputs that later ops leave as they are, before it computes.
        Returns whether it need compute only rows whose logits are needed, as in the last layer. There
        `Program.run_logits` begins here, or else behind the block's ops."""
        if self._is_last and self.at is self.tokens:
            self._narrow()
        return self._is_last

    def narrowed(self, x: Buffer, *, own: bool = True) -> Buffer:
        """In the last layer, the rows of x whose logits are needed; else x. own: they are read whole, not in column
        ranges."""
        if not self._is_last or x.rows == "logits":
            return x
        if self.at is self.tokens:
            self._narrow()
        wanted = self.builder.buffer(x.columns, x.tensor.dtype, rows="logits", own=own)
        self.builder.gather(x, wanted)
        return wanted

    def as_rows_of(self, x: Buffer, other: Buffer) -> Buffer:
        """`other`, without the rows that x lacks: of those the last attention has kept the ones alone whose logits are
        needed."""
        return other if x.rows == other.rows else self.narrowed(other, own=False)

    def _narrow(self) -> None:
        """From here on, ops compute only rows whose logits are needed, and may be computed again for other rows: what
        they read of all tokens stays unchanged."""
        builder, tokens = self.builder, self.tokens
        self.at = Stream(
            hidden=builder.buffer(self._spec.hidden_size, torch.float32, rows="logits"),
            normed=tokens.normed.of_logits(self.max_logits),
            delta=tokens.delta.of_logits(self.max_logits),
        )
        builder.start_of_logits()
        builder.gather(tokens.hidden, self.at.hidden)

    def product(self, weight: CpuLinear, x: Buffer) -> Product:
        return Product(weight, self.narrowed(x))

    def experts(
        self, stack: PackedExperts, x: Buffer, logits: Buffer, routing: Routing, correction: Tensor | None = None
    ) -> ChosenExperts:
        if x.address == self.at.hidden.address:  # to which their results are added
            read = self.room(x.columns, x.tensor.dtype)
            self.builder.copy(x, read)
            x = read
        expert_ids = self.room(routing.num_chosen, torch.int32)
        weights = self.room(routing.num_chosen, torch.float32)
        options = routing.options | {"places": stack.places}
        self.builder.route(logits, expert_ids, weights, bias=correction, factors=stack.factors, **options)
        return ChosenExperts(stack, x, expert_ids, weights)

    def call(self, function: Callable[..., Any], *values: Any) -> Any:
        raise NotImplementedError(f"a program cannot call {function}: the block's why_no_program should say so")

    def gathered(self, x: Any) -> Any:
        if self.ranks is not None:
            raise NotImplementedError("a program gathers no columns of ranks: the block's why_no_program should say so")
        return x

    def columns(self, x: Buffer, first: int, count: int) -> Buffer:
        return x.part(first, count)

    def partial(self, contribution: Contribution) -> Buffer:
        out = self.room(_columns_of(contribution), torch.float32)
        self._write([contribution], out)
        return out

    def total(self, contributions: Sequence[Contribution]) -> Buffer:
        if self.ranks is None and isinstance(contributions[0], Buffer):
            return contributions[0]
        out = self.room(_columns_of(contributions[0]), torch.float32)
        if self.ranks is None:
            self._write(contributions, out)
        else:
            self._write_sum(self.ranks, contributions, out, add=False)
        return out

    def _write_sum(self, ranks: RankBuffers, contributions: Sequence[Contribution], out: Buffer, *, add: bool) -> None:
        """out = (or, with add, +=) the sum of contributions over the ranks"""
        parts = ranks.next_parts(out.columns)[:, : len(out.tensor)]
        self._write(contributions, Buffer(parts[self.place.tp_rank], out.rows))
        rank_sum(self.builder, ranks.group, parts, out, add=add)

    def sum_rows(self, own: Buffer, out: Buffer) -> None:
        """out = the sum of `own` over the ranks, of any number of columns."""
        assert self.ranks is not None, "one rank has nothing to sum"
        most = self._spec.hidden_size
        for first in range(0, own.columns, most):
            span = first, min(most, own.columns - first)
            self._write_sum(self.ranks, [own.part(*span)], out.part(*span), add=False)

    def stream(self) -> Buffer:
        return self.at.hidden

    def replace(self, value: Buffer) -> None:
        if value is not self.at.hidden:
            self.builder.copy(value, self.at.hidden)

    def rows(self) -> Buffer:
        """The rows of a `Beside`, of all tokens or, after the last layer, of those whose logits are needed."""
        return self._rows

    def put_rows(self, rows: Buffer) -> None:
        if rows.rows == self._rows.rows:
            self.builder.copy(rows, self._rows)
        else:
            self._rows = rows

    def beside(self) -> Buffer:
        assert self._beside is not None, "no layer of another stream asks"
        return self._beside if self.at is self.tokens else self.narrowed(self._beside, own=False)

    def wide(self) -> Buffer:
        return self._wide

    def normed(self, norm: CpuNorm) -> Buffer:
        self.builder.norm(self.at.hidden, self.at.normed, norm.constants)
        return self.at.normed

    def add(
        self,
        contributions: Sequence[Contribution],
        post_norm: CpuNorm | None = None,
        factor: Tensor | float | None = None,
    ) -> None:
        at = self.at
        if self.ranks is not None:
            out = at.hidden if post_norm is None else at.delta
            self._write_sum(self.ranks, contributions, out, add=post_norm is None)
        elif post_norm is None:
            self._write(contributions, at.hidden, residual=at.hidden)
        else:
            self._write(contributions, at.delta)
        if post_norm is not None:
            self.add_whole(at.delta, post_norm, factor)

    def add_whole(self, value: Buffer, post_norm: CpuNorm, factor: Tensor | float | None = None) -> None:
        by = 1.0 if factor is None else float(factor)
        self.builder.norm(value, self.at.hidden, post_norm.constants, add=True, factor=by)

    def norm_stream(self, norm: CpuNorm) -> None:
        self.builder.norm(self.at.hidden, self.at.hidden, norm.constants)

    def multiply(
        self, linear: CpuLinear, x: Buffer, out: Buffer, *, residual: Buffer | None = None, activation: str = "none"
    ) -> None:
        """out = activation(x W^T + b) [+ residual]"""
        first = 0
        tables = [None] * len(linear.weights) if linear.deltas is None else linear.deltas.tables
        for weight, bias, deltas in zip(linear.weights, linear.biases, tables, strict=True):
            part = out if len(linear.weights) == 1 else out.part(first, weight.columns)
            self.builder.linear(weight, x, part, bias=bias, residual=residual, activation=activation, deltas=deltas)
            first += weight.columns

    def _write(self, contributions: Sequence[Contribution], out: Buffer, residual: Buffer | None = None) -> None:
        """out = sum of contributions [+ residual]"""
        for each in contributions:
            if isinstance(each, Product):
                self.multiply(each.weight, each.x, out, residual=residual)
            elif isinstance(each, Buffer):
                assert residual is None, "a result of `linear` is the only contribution"
                self.builder.copy(each, out)
            else:
                self.builder.experts(*each, out, add=residual is not None)
            residual = out

    def room(self, columns: int, dtype: torch.dtype) -> Buffer:
        """A buffer that no other value of this layer uses. The n-th of a size and type is the same in every layer."""
        key = columns, dtype
        order = self._taken[key] = self._taken.get(key, -1) + 1
        if (*key, order) not in self._rooms:
            self._rooms[*key, order] = self.builder.buffer(columns, dtype)
        room = self._rooms[*key, order]
        return room if self.at is self.tokens else room.of_logits(self.max_logits)

    def rotary(self, rope: RopeSpec | None) -> Rotary | None:
        if rope is not None and rope not in self._rotaries:
            self._rotaries[rope] = rotary_tables(rope, self._num_positions)
        return None if rope is None else self._rotaries[rope]

    def scale_queries(self, queries: Buffer, growth: tuple[int, float, int] | None) -> None:
        """growth: `Attention.query_growth`"""
        if growth is None:
            return
        if growth not in self._growths:
            self._growths[growth] = growth_at(torch.arange(self._num_positions, dtype=torch.float32), *growth)
        self.builder.scale_rows(queries, self._growths[growth])


class ProgramWriter:
    """Writes one rank's program. Raises ValueError for what the kernels do not support."""

    def __init__(
        self, model: CpuModel, kv_cache: KVCache, limits: StepLimits, runtime: Runtime, place: RankCoordinates = SINGLE
    ) -> None:
        self._model, self._spec, self._kv_cache, self._limits = model, model.spec, kv_cache, limits
        self._place, self._runtime = place, runtime
        self._builder = Builder(
            runtime,
            max_tokens=limits.max_tokens,
            max_logits=limits.max_logits,
            alone_s=ALONE_S,
            delta_bytes=limits.delta_bytes(model.spec.embedding_width),
        )
        num_positions = limits.max_positions
        full = (each for each in model.spec.mixers if each.cache is not None and each.sliding_window is None)
        if any(full):  # their blocks hold a whole sequence
            num_positions = min(num_positions, kv_cache.num_blocks * kv_cache.block_size)
        self._buffers = StepBuffers(
            max_tokens=limits.max_tokens,
            max_seqs=limits.max_seqs,
            max_logits=limits.max_logits,
            max_blocks=-(-limits.max_positions // kv_cache.block_size),
            num_groups=kv_cache.num_groups,
        )
        self._ops = ProgramOps(self._builder, model, place, limits, num_positions, self._buffers.states)
        self._ranks = self._ops.ranks
        self._hidden = self._ops.tokens.hidden

    def write(self) -> WrittenProgram:
        place, spec = self._place, self._spec
        embedded = self._embed() if place.is_first_stage else None
        own = place.layers(spec.num_layers)
        for index, held in enumerate(self._model.layers):
            is_last = place.is_last_stage and index == len(own) - 1
            layer = spec.layers[own[index]]
            mixes = not isinstance(layer.mixer, NoMixer)
            state = self._kv_cache.states[index] if self._kv_cache.states else None
            beside = self._beside(index)
            self._ops.begin_layer(self._layer_cache(index), state, is_last=is_last, mixes=mixes, beside=beside)
            if isinstance(spec.stream, Beside):
                spec.stream.emit(layer, held, self._ops)
            else:
                emit_layer(spec, layer, held, self._ops)
        states, logits = torch.empty(0, spec.hidden_size), torch.empty(0, spec.vocab_size)
        sampling = SampleBuffers(self._runtime, 0, spec.vocab_size)
        output = self._ops.rows()
        last = self._ops.at.hidden
        if place.is_last_stage and isinstance(spec.stream, Beside) and spec.stream.rows > 1:
            last = spec.stream.last_row(self._ops, self._model.end, self._ops.rows())
        if place.is_last_stage and self._limits.pools:
            output = self._last_states(last, torch.float32)
            states = output.tensor
        if place.is_last_stage and spec.has_head:
            output = self._logits(self._last_states(last))
            logits, sampling = output.tensor, self._builder.sample(output)
        elif self._ranks is not None:
            rank_meet(self._builder, self._ranks.group, output)
        program = self._builder.build(output)
        return WrittenProgram(
            self._kv_cache, program, self._buffers, embedded, self._ops.wide().tensor, states, logits, sampling
        )

    def _beside(self, index: int) -> Buffer | None:
        """The columns beside the hidden values that a layer of this stage reads."""
        stream, wide, first = self._spec.stream, self._ops.wide(), self._ops.rows().columns
        if not isinstance(stream, Beside) or wide.columns == first:
            return None
        return wide.part(first + index * stream.taken, stream.taken or wide.columns - first)

    def _layer_cache(self, index: int) -> LayerCache:
        cache, buffers = self._kv_cache, self._buffers
        group = cache.groups[index]
        return LayerCache(
            cache.keys[index],
            cache.values[index],
            cache.scales(index),
            slots_offset=group * math.prod(buffers.slot_mapping.shape[1:]),
            tables_offset=group * math.prod(buffers.block_tables.shape[1:]),
        )

    def _embed(self) -> Tensor:
        """Returns `WrittenProgram.embedded`."""
        model, spec, builder = self._model, self._spec, self._builder
        scale = stream_scale(spec, model.dtype)
        assert model.table is not None, "the first stage has the table"
        embedded = self._hidden
        if model.project_in is not None:
            embedded = builder.buffer(spec.embedding_width, self._ops.inner)
        own = embedded
        if self._ranks is None:
            builder.embedding(model.table, embedded, scale)
        else:
            first_id = self._place.vocabulary(spec.vocab_size).start
            parts = self._ranks.next_parts(spec.embedding_width)
            own = Buffer(parts[self._place.tp_rank], "tokens")
            builder.embedding(model.table, own, scale, first_id=first_id, vocab_size=spec.vocab_size)
            rank_sum(builder, self._ranks.group, parts, embedded, add=False)
        if model.embedding_deltas is not None:
            builder.embedding_deltas(model.embedding_deltas, embedded, scale)
        if model.project_in is not None:
            self._ops.multiply(model.project_in, embedded, self._hidden)
        if model.positions is not None:
            builder.add_positions(model.positions, self._hidden, spec.learned_position_offset or 0)
        if model.token_types is not None:
            builder.add_types(model.token_types, self._hidden)
        if model.embedding_norm is not None:
            builder.norm(self._hidden, self._hidden, model.embedding_norm.constants)
        if isinstance(spec.stream, Beside):
            self._begin(spec.stream)
        return own.tensor

    def _begin(self, stream: Beside) -> None:
        """Writes the rows before the first layer and what is beside them."""
        model, wide, first = self._model, self._ops.wide(), self._ops.rows().columns
        if stream.rows > 1:
            self._ops.put_rows(stream.first_rows(self._ops, model.beginning, self._hidden))
        if wide.columns == first:
            return
        beside, inputs = wide.part(first, wide.columns - first), None
        if (table := stream.table) is not None:
            assert model.layer_table is not None, "the first stage has the table"
            inputs, scale = beside, table_scale(table, model.dtype)
            known = {"vocab_size": self._spec.vocab_size, "known_ids": table.vocab_size}
            if self._ranks is None:
                self._builder.embedding(model.layer_table, inputs, scale, **known)
            else:
                first_id = self._place.vocabulary(table.vocab_size).start
                own = self._builder.buffer(table.width, torch.float32)
                self._builder.embedding(model.layer_table, own, scale, first_id=first_id, **known)
                self._ops.sum_rows(own, inputs)
        found = stream.first_beside(self._ops, model.beginning, self._hidden, inputs)
        if found is not None and found is not beside:
            self._builder.copy(found, beside)

    def _last_states(self, hidden: Buffer, dtype: torch.dtype | None = None) -> Buffer:
        """What the head reads; with dtype, in a buffer of that type for a reader outside the program."""
        model, spec, builder = self._model, self._spec, self._builder
        x = hidden
        if model.final_norm is not None:
            x = self._ops.tokens.normed.of_logits(self._ops.max_logits)
            if dtype is not None and model.project_out is None:
                x = builder.buffer(spec.hidden_size, dtype, rows="logits")
            builder.norm(hidden, x, model.final_norm.constants)
        if model.project_out is not None:
            projected = builder.buffer(spec.embedding_width, dtype or self._ops.inner, rows="logits")
            self._ops.multiply(model.project_out, x, projected)
            x = projected
        return x

    def _logits(self, x: Buffer) -> Buffer:
        model, spec, builder = self._model, self._spec, self._builder
        assert model.head is not None, "the last stage has the head"
        # After a plain projection a step may need only the highest logit.
        is_plain = self._ranks is None and model.head.biases == (None,) and spec.final_soft_cap is None
        logits = builder.buffer(spec.vocab_size, torch.float32, rows="logits", highest=is_plain)
        if self._ranks is None:
            self._ops.multiply(model.head, x, logits)
        else:
            own = self._place.vocabulary(spec.vocab_size)
            shared = Buffer(self._ranks.logits(self._ops.max_logits, spec.vocab_size), "logits")
            self._ops.multiply(model.head, x, shared.part(own.start, own.stop - own.start))
            rank_gather(builder, self._ranks.group, shared, logits)
        if spec.final_soft_cap is not None:
            builder.soft_cap(logits, spec.final_soft_cap)
        return logits


class RankBuffers:
    """Where the ranks of a stage exchange values: the shared memory of `SharedCollectives`."""

    def __init__(self, place: RankCoordinates, max_tokens: int) -> None:
        assert isinstance(place.link, SharedCollectives), "why_not has said that the ranks share no memory"
        self._shared, self._max_tokens, self._turn = place.link, max_tokens, 0
        self.group: GroupC = place.link.group

    def next_parts(self, columns: int) -> Tensor:
        """[tp_size, max_tokens, columns] float32. Two buffers alternate, since ranks may still be reading the last."""
        self._turn ^= 1
        return self._shared.parts(self._turn, self._max_tokens, columns)

    def logits(self, rows: int, columns: int) -> Tensor:
        """[rows, columns] float32"""
        return self._shared.logits(rows, columns)


def inner_dtype(model: CpuModel) -> torch.dtype:
    """The dtype of linear layers' inputs: bfloat16 if the last linear of the first mixer that has any has it, else
    float32."""
    for layer in model.layers:
        if linears := [held for held in layer.mixer.values() if isinstance(held, CpuLinear)]:
            return torch.bfloat16 if linears[-1].weights[0].dtype == torch.bfloat16 else torch.float32
    return torch.float32
