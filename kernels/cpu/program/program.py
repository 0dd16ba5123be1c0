"""CPU programs: a model's whole step as one list of ops, built once and run with one call in one parallel region.

A `Builder` allocates the activation buffers and records the ops in order; it contains nothing of any model. It keeps
two lists of the same ops, with bitwise equal results: one for steps of few rows, in which every thread norms all rows
itself instead of waiting for the others, and one for steps of many rows, which are divided among threads. Barriers are
derived from what the ops read and write: one precedes an op that reads what was written since the last barrier, or
that overwrites what was read or written since.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any, Literal, Unpack

import torch
from torch import Tensor

from headrace.kernels.cpu.attention.args import AttentionArgs, KvCacheC, RotaryArgs
from headrace.kernels.cpu.attention.cache import why_no_prepared_heads
from headrace.kernels.cpu.attention.latent import LatentLayer, PackedLatentUp, expanded_args, latent_args
from headrace.kernels.cpu.elementwise.args import (
    ActivationArgs,
    AddArgs,
    CopyArgs,
    EmbeddingArgs,
    GatedNormArgs,
    GatherArgs,
    NormArgs,
    ScaleRowsArgs,
    SoftCapArgs,
    XieluArgs,
)
from headrace.kernels.cpu.experts.moe import PackedExperts, RouteOptions, route_args, route_scratch_bytes
from headrace.kernels.cpu.linear.args import EmbedDeltasArgs
from headrace.kernels.cpu.linear.deltas import DeltaTable, EmbeddingTable
from headrace.kernels.cpu.linear.linear import (
    ACTIVATIONS,
    ROWS_LOGITS,
    ROWS_TOKENS,
    EmbedArgs,
    LinearArgs,
    PackedLinear,
    Runtime,
)
from headrace.kernels.cpu.ops import MOST_ROW_VALUES, WORKSPACE_BYTES
from headrace.kernels.cpu.program.args import ProgramOp
from headrace.kernels.cpu.program.op_list import OpList, shared_spans
from headrace.kernels.cpu.program.parts import (
    CORE_BYTES_PER_S,
    CORE_MULTIPLY_ADDS_PER_S,
    FEW_ROWS,
    NORM_KINDS,
    PANEL_ROWS,
    AttentionLayer,
    Buffer,
    Norm,
    Rotary,
    address_of,
    check_vector,
    matrix_of,
    require_same,
    rotary_args,
    rows_within,
    set_rotation,
    with_own_copies,
)
from headrace.kernels.cpu.program.run import Program, Written
from headrace.kernels.cpu.runtime.pointers import pointer
from headrace.kernels.cpu.sampling.sampling import SampleBuffers
from headrace.kernels.reference.attention import BIAS_PADDING

ROW_COUNTS = {"tokens": ROWS_TOKENS, "logits": ROWS_LOGITS}


class Builder:
    """Builds a program. The methods named after ops append one op each.

    They raise ValueError for shapes that do not match and for anything else that the kernels do not support. The
    program uses tensors in place and keeps them alive.
    """

    def __init__(
        self, runtime: Runtime, *, max_tokens: int, max_logits: int, alone_s: float = 0.0, delta_bytes: int = 0
    ) -> None:
        """max_tokens, max_logits: the most rows of a step. alone_s: the calling thread runs alone those steps that
        one thread is estimated to compute in this many seconds. delta_bytes: the most that y of a linear layer takes
        (deltas.h); 0: there are no adapters."""
        if max_tokens < 1 or max_logits < 1:
            raise ValueError(f"a step has at least one row; max_tokens={max_tokens}, max_logits={max_logits}.")
        self.runtime = runtime
        self._max_rows = {"tokens": max_tokens, "logits": max_logits}
        self._few, self._many = OpList(), OpList()
        self._kept: list[Any] = []
        self._scratch = [0, 0]  # shared, per thread
        self._alone_s, self._weight_bytes, self._multiply_adds = alone_s, 0, 0
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8)
        self._delta_rooms: tuple[Tensor, Tensor] | None = None
        """Two, since threads may still be reading one when the next layer begins."""
        self._delta_turn = 0
        if delta_bytes:
            self._delta_rooms = torch.empty(delta_bytes, dtype=torch.uint8), torch.empty(delta_bytes, dtype=torch.uint8)
        self._inner: dict[tuple[int, int, torch.dtype], Tensor] = {}
        """Activations between the two products of experts; layers of one size share them, since they run in turn."""
        self._logits_start: tuple[int, int] | None = None
        self._vocab_size = 0
        self._max_position: int | None = None
        for op in ("attention", "latent_expanded"):
            getattr(runtime.library.dll, f"hr_{op}_scratch_bytes").restype = ctypes.c_int64

    def buffer(
        self,
        columns: int,
        dtype: torch.dtype,
        rows: Literal["tokens", "logits"] = "tokens",
        *,
        own: bool = False,
        highest: bool = False,
    ) -> Buffer:
        """Allocates a buffer of one row per token or per row of logits.

        own: in steps of few rows each thread has its own copy; only norms and gathers may write the buffer, and only
        linear layers and experts may read it. highest: steps with `Step.only_highest` keep only the highest value of
        each row; one plain linear layer writes the buffer, and only `sample` reads it."""
        copies = kept = None
        num_threads, num_rows = self.runtime.pool.num_threads, self._max_rows[rows]
        if own:
            copies = torch.empty(num_threads, FEW_ROWS, columns, dtype=dtype)
        if highest:
            kept = torch.empty(num_threads, num_rows, 2 * PANEL_ROWS, dtype=torch.int32)
        return Buffer(torch.empty(num_rows, columns, dtype=dtype), rows, copies, highest=kept)

    def embedding(
        self,
        table: PackedLinear | Tensor,
        out: Buffer,
        scale: float = 1.0,
        *,
        first_id: int = 0,
        vocab_size: int = 0,
        known_ids: int = 0,
    ) -> None:
        """out = table[token ids] * scale. table: packed, or dense [vocab, columns] in fp32, bf16 or fp16.

        A packed table may hold only the rows from `first_id` on of a vocabulary of `vocab_size`; the rows of other
        token ids are then 0. With known_ids, token ids from it on have the row of token 0.
        """
        num_rows, columns = (table.n, table.k) if isinstance(table, PackedLinear) else table.shape
        self._vocab_size = vocab_size or num_rows
        require_same(columns, out.columns, "the embedding's width", "its output's")
        if isinstance(table, PackedLinear):
            packed = EmbedArgs(
                weight=table.descriptor,
                out=out.address,
                out_stride=out.stride,
                out_dtype=out.type,
                rows=ROWS_TOKENS,
                first_id=first_id,
                known_ids=known_ids,
                scale=scale,
            )
            self._need(0, 4 * table.k)
            self._add("embedding", "hr_op_embed", packed, (), (out,), keep=(table,))
            return
        self._dense_embedding(table, None, out, scale)

    def embedding_deltas(self, table: EmbeddingTable, out: Buffer, scale: float = 1.0) -> None:
        """Adds what adapters have for the tokens to out, which `embedding` has written with this scale."""
        args = EmbedDeltasArgs(slots=ctypes.addressof(table.slots), out=out.address, out_stride=out.stride)
        args.width, args.out_dtype, args.scale = out.columns, out.type, scale
        self._need(0, 2 * 4 * out.columns)
        self._add("embedding_deltas", "hr_op_embed_deltas", args, (out,), (out,), keep=(table,))

    def add_positions(self, table: Tensor, out: Buffer, offset: int = 0) -> None:
        """out += table[position + offset]. table: [positions, columns], learned."""
        require_same(table.shape[1], out.columns, "the position table's width", "its output's")
        self._limit_positions(table.shape[0] - offset)
        self._dense_embedding(None, table, out, offset=offset)

    def add_types(self, table: Tensor, out: Buffer) -> None:
        """out += table[token type]. table: [types, columns]; the steps' types must be below `types`."""
        require_same(table.shape[1], out.columns, "the type table's width", "its output's")
        self._dense_embedding(None, table, out, by_type=True)

    def _dense_embedding(
        self,
        table: Tensor | None,
        positions: Tensor | None,
        out: Buffer,
        scale: float = 1.0,
        *,
        offset: int = 0,
        by_type: bool = False,
    ) -> None:
        args = EmbeddingArgs(output=out.address, output_stride=out.stride, size=out.columns, scale=scale)
        args.output_type, args.position_offset, args.by_type = out.type, offset, by_type
        if table is not None:
            args.table, args.table_stride, args.table_type = matrix_of(table)
        if positions is not None:
            args.positions, args.positions_stride, args.positions_type = matrix_of(positions)
        reads = () if positions is None else (out,)
        self._add("embedding", "hr_op_embedding", args, reads, (out,), keep=(table, positions))

    def scale_rows(self, x: Buffer, factors: Tensor) -> None:
        """x *= factors[position], in place. factors: [positions] float32."""
        check_vector(factors, len(factors), "the factors of positions")
        self._limit_positions(len(factors))
        args = ScaleRowsArgs(values=x.address, factors=pointer(factors), stride=x.stride, size=x.columns, type=x.type)
        self._add("scale_rows", "hr_op_scale_rows", args, (x,), (x,), keep=(factors,))

    def gather(self, source: Buffer, out: Buffer) -> None:
        """out = the rows of source, which has one per token, whose logits the step asks for."""
        require_same(
            (source.columns, source.type), (out.columns, out.type), "the columns and type gathered from", "its output's"
        )
        require_same((source.rows, out.rows), ("tokens", "logits"), "the rows gathered from and into", "those of")
        args = GatherArgs(
            input=source.address,
            output=out.address,
            input_stride=source.row_bytes,
            output_stride=out.row_bytes,
            row_bytes=out.columns * out.tensor.itemsize,
        )
        self._add("gather", "hr_op_gather", args, (source,), (out,), few=with_own_copies(args, "output", out))

    def copy(self, source: Buffer, out: Buffer) -> None:
        """out = source, which may be a buffer of which each thread has its own copy."""
        found, wanted = ((each.columns, each.type, each.rows) for each in (source, out))
        require_same(found, wanted, "the columns, type and rows copied from", "its output's")
        args = CopyArgs(
            input=source.address,
            output=out.address,
            input_stride=source.row_bytes,
            output_stride=out.row_bytes,
            row_bytes=out.columns * out.tensor.itemsize,
            rows=ROW_COUNTS[out.rows],
        )
        self._add("copy", "hr_op_copy", args, (source,), (out,), few=with_own_copies(args, "input", source))

    def norm(self, source: Buffer, out: Buffer, norm: Norm, *, add: bool = False, factor: float = 1.0) -> None:
        """out = norm(source) * factor, or (add) out = (out + norm(source)) * factor."""
        require_same(source.columns, out.columns, "a norm's input", "its output")
        for vector in (norm.weight, norm.bias):
            check_vector(vector, source.columns, "a norm's weight or bias")
        if source.columns > MOST_ROW_VALUES:
            raise ValueError(f"a norm takes rows of at most {MOST_ROW_VALUES} values, not {source.columns}.")
        require_same(source.rows, out.rows, "a norm's input rows", "its output rows")
        args = NormArgs(
            input=source.address,
            output=out.address,
            weight=address_of(norm.weight),
            bias=address_of(norm.bias),
            input_stride=source.stride,
            output_stride=out.stride,
            size=source.columns,
            rows=ROW_COUNTS[out.rows],
            add_to_output=add,
            kind=NORM_KINDS[norm.kind],
            input_type=source.type,
            output_type=out.type,
            eps=norm.eps,
            factor=factor,
            groups=norm.groups,
        )
        reads = (source, out) if add else (source,)
        self._add("norm", "hr_op_norm", args, reads, (out,), few=with_own_copies(args, "output", out), keep=(norm,))

    def gated_norm(
        self,
        source: Buffer,
        gate: Buffer | None,
        weight: Tensor | None,
        out: Buffer,
        *,
        group: int,
        eps: float = 0.0,
        activation: str = "none",
    ) -> None:
        """out = `reference.states.gated_norm` of source."""
        gates = () if gate is None else (gate,)
        shares_gates = gate is not None and gate.columns * group == source.columns and group > 1
        columns = {each.columns for each in (source, out, *(() if shares_gates else gates))}
        require_same(columns, {source.columns}, "the columns of a gated norm", "those of its input")
        require_same({each.rows for each in (out, *gates)}, {source.rows}, "the rows of a gated norm", "its input's")
        if source.columns % group or group > MOST_ROW_VALUES:
            raise ValueError(f"{source.columns} columns are not normed in groups of {group}.")
        if weight is not None and len(weight) not in (group, source.columns):
            raise ValueError(f"a gated norm of groups of {group} has {len(weight)} weights.")
        args = GatedNormArgs(
            input=source.address,
            gate=None if gate is None else gate.address,
            weight=address_of(weight),
            output=out.address,
            input_stride=source.stride,
            gate_stride=0 if gate is None else gate.stride,
            output_stride=out.stride,
            size=source.columns,
            group=group,
            weight_stride=0 if weight is None or len(weight) == group else group,
            rows=ROW_COUNTS[source.rows],
            activation=ACTIVATIONS[activation],
            input_type=source.type,
            gate_type=source.type if gate is None else gate.type,
            output_type=out.type,
            eps=eps,
            gate_per_group=shares_gates,
        )
        self._add("gated_norm", "hr_op_gated_norm", args, (source, *gates), (out,), keep=(weight,))

    def linear(
        self,
        weight: PackedLinear,
        x: Buffer,
        out: Buffer,
        *,
        bias: Tensor | None = None,
        residual: Buffer | None = None,
        activation: str = "none",
        deltas: DeltaTable | None = None,
    ) -> None:
        """out = act(x W^T + bias) [+ residual]; for a gated pair act(x Wg^T + bg) * (x Wu^T + bu) [+ residual].

        deltas: the weight's slots, if adapters may add to its products."""
        require_same(x.columns, weight.k, "a linear layer's input", "its weight's columns")
        require_same(out.columns, weight.columns, "a linear layer's output", "its weight's rows")
        check_vector(bias, weight.n, "a linear layer's bias")
        require_same(x.rows, out.rows, "a linear layer's input rows", "its output rows")
        args = LinearArgs(
            weight=weight.descriptor,
            x=x.address,
            x_stride=x.stride,
            bias=address_of(bias),
            residual=None if residual is None else residual.address,
            residual_stride=0 if residual is None else residual.stride,
            out=out.address,
            out_stride=out.stride,
            x_dtype=x.type,
            residual_dtype=0 if residual is None else residual.type,
            out_dtype=out.type,
            activation=ACTIVATIONS[activation],
            rows=ROW_COUNTS[out.rows],
        )
        if out.highest is not None:
            is_plain = bias is None and residual is None and activation == "none" and not weight.gated
            if not is_plain or out.tensor.dtype != torch.float32:
                raise ValueError("the highest of each row is kept of plain products in float32 alone.")
            args.highest, args.highest_rows = pointer(out.highest), out.highest.shape[1]
        self._need(*weight.scratch(self._max_rows[out.rows]))
        self._weight_bytes += weight.nbytes
        self._multiply_adds += weight.n * weight.k
        site = None
        if deltas is not None and self._delta_rooms is not None:
            self._delta_turn ^= 1
            site = deltas.describe(self._delta_rooms[self._delta_turn])
            args.site = ctypes.addressof(site)
            self._need(0, deltas.scratch_bytes())
        reads, kept = (x,) if residual is None else (x, residual), (weight, bias, site, deltas)
        self._add("linear", "hr_op_linear", args, reads, (out,), few=with_own_copies(args, "x", x), keep=kept)

    def route(
        self,
        logits: Buffer,
        expert_ids: Buffer,
        weights: Buffer,
        *,
        bias: Tensor | None = None,
        factors: Tensor | None = None,
        **options: Unpack[RouteOptions],
    ) -> None:
        """expert_ids (int32), weights (float32) = `reference.route_experts` of logits [.., num_experts], with top_k as
        the number of their columns. factors: [num_experts] float32, multiply the weights of chosen experts."""
        require_same(expert_ids.columns, weights.columns, "the columns of experts chosen", "those of their weights")
        require_same({logits.rows}, {expert_ids.rows, weights.rows}, "the rows of logits", "those of what is chosen")
        found = expert_ids.tensor.dtype, weights.tensor.dtype
        require_same(found, (torch.int32, torch.float32), "the types of experts and weights", "what routing writes")
        check_vector(bias, logits.columns, "a router's bias")
        check_vector(factors, logits.columns, "the factors of experts")
        args = route_args(logits.columns, expert_ids.columns, options)
        args.logits, args.logits_stride, args.logits_dtype = logits.address, logits.stride, logits.type
        args.bias, args.factors, args.rows = address_of(bias), address_of(factors), ROW_COUNTS[logits.rows]
        args.expert_ids, args.weights = expert_ids.address, weights.address
        self._need(0, route_scratch_bytes(logits.columns))
        self._add(
            "route", "hr_op_route", args, (logits,), (expert_ids, weights), keep=(bias, factors, options.get("places"))
        )

    def experts(
        self,
        packed: PackedExperts,
        x: Buffer,
        expert_ids: Buffer,
        weights: Buffer,
        out: Buffer,
        *,
        add: bool = False,
    ) -> None:
        """out = (or, with add, +=) the weighted sum of the chosen experts' outputs for x, as `ExpertWeights.apply`.

        out is float32 and not x. Each run adds the number of experts read to `packed.experts_read`."""
        require_same(x.columns, packed.hidden, "the input of experts", "their weights' columns")
        require_same(out.columns, packed.hidden, "the output of experts", "their weights' rows")
        require_same(expert_ids.columns, weights.columns, "the columns of experts chosen", "those of their weights")
        require_same(
            {out.rows}, {x.rows, expert_ids.rows, weights.rows}, "the rows of experts' output", "their input's"
        )
        if out.tensor.dtype != torch.float32 or out.span[0] == x.span[0]:
            raise ValueError(f"experts add up in float32 and elsewhere than in their input, not in {out.tensor.dtype}.")
        max_rows, top_k = self._max_rows[out.rows], expert_ids.columns
        args, kept = packed.describe(top_k, max_rows)
        key = args.pass_rows, packed.inner, packed.inner_dtype
        if key not in self._inner:
            self._inner[key] = torch.empty(args.pass_rows, packed.inner, dtype=packed.inner_dtype)
        inner = pointer(self._inner[key])
        args.x, args.x_stride, args.x_dtype = x.address, x.stride, x.type
        args.expert_ids, args.weights, args.inner = expert_ids.address, weights.address, inner
        args.out, args.out_stride, args.add_to_out = out.address, out.stride, add
        args.rows = ROW_COUNTS[out.rows]
        self._need(*packed.scratch(args, max_rows))
        # Every row may read other experts, so the time to read them is charged per row, as multiply-adds.
        read = int(packed.expert_bytes * CORE_MULTIPLY_ADDS_PER_S / CORE_BYTES_PER_S)
        self._multiply_adds += top_k * (3 * packed.inner * packed.hidden + read)
        reads = (x, expert_ids, weights, inner, *((out,) if add else ()))
        few = with_own_copies(args, "x", x)
        self._add("experts", "hr_op_experts", args, reads, (out, inner), few=few, keep=(kept, self._inner[key]))

    def write_cache(self, qkv: Buffer, layer: AttentionLayer) -> None:
        """q/k norm, rotation and the cache write. It is skipped in steps where every sequence computes one token: there
        `attend` does the same.

        qkv: queries, keys and values side by side, (num_heads + 2 num_kv_heads) head_dim columns, or those of them
        that the layer has; its queries are overwritten.
        """
        source, keys = rotary_args(qkv, layer), pointer(layer.cache.keys)
        if layer.rotary is not None:
            self._limit_positions(len(layer.rotary.cos))
        name = "hr_op_rotary_and_cache_write"
        self._add("rotary", name, source, (qkv, keys), (qkv, keys), keep=(layer,), skipped_when_single=True)

    def prepare_heads(self, x: Buffer, head_dim: int, rotary: Rotary | None, norm: Norm | None = None) -> None:
        """Norms each head of x, then rotates it to its token's position, in place. Nothing is written to a cache.

        Raises ValueError for sizes that the kernel does not support."""
        if reason := why_no_prepared_heads(head_dim):
            raise ValueError(reason)
        args = RotaryArgs(
            query=x.address,
            query_stride=x.stride,
            cache=KvCacheC(head_dim=head_dim),
            num_heads=x.columns // head_dim,
            type=x.type,
        )
        if norm is not None:
            for vector in (norm.weight, norm.bias):
                check_vector(vector, head_dim, "a head's norm")
            args.query_norm, args.query_norm_bias = address_of(norm.weight), address_of(norm.bias)
            args.norm_eps, args.norm_kind = norm.eps, NORM_KINDS[norm.kind]
        if rotary is not None:
            set_rotation(args, rotary, head_dim)
            self._limit_positions(len(rotary.cos))
        self._add("rotary", "hr_op_rotary_and_cache_write", args, (x,), (x,), keep=(rotary, norm))

    def attend(self, qkv: Buffer, out: Buffer, layer: AttentionLayer, *, only_logits: bool = False) -> None:
        """Paged attention, after `write_cache`. only_logits: only rows whose logits the step asks for need to be
        computed."""
        require_same(out.columns, layer.num_heads * layer.cache.keys.shape[3], "attention's output", "its heads'")
        check_vector(layer.sinks, layer.num_heads, "attention's sinks")
        check_vector(layer.alibi, layer.num_heads, "attention's slopes")
        if layer.sink_tokens is not None:
            kept = layer.cache.keys
            for each in layer.sink_tokens:
                given = each.dtype, tuple(each.shape[1:]), each.is_contiguous()
                require_same(given, (torch.float32, (kept.shape[1], kept.shape[3]), True), "sinks", "the cache's heads")
        args = AttentionArgs(
            source=rotary_args(qkv, layer),
            sinks=address_of(layer.sinks),
            sink_keys=None if layer.sink_tokens is None else pointer(layer.sink_tokens.keys),
            sink_values=None if layer.sink_tokens is None else pointer(layer.sink_tokens.values),
            num_sinks=0 if layer.sink_tokens is None else len(layer.sink_tokens.keys),
            alibi=address_of(layer.alibi),
            alibi_root=layer.alibi_root,
            chunk=layer.chunk_size or 0,
            chunks_before=layer.chunks_before,
            grow_after=layer.grow_after or 0,
            scale=layer.scale,
            soft_cap=layer.soft_cap or 0.0,
            window=layer.window or 0,
            both_sides=layer.both_sides,
            value_dim=layer.cache.keys.shape[3],
            only_logits=only_logits,
        )
        if (bias := layer.distance_bias) is not None:
            require_same((bias.dtype, len(bias)), (torch.float32, layer.num_heads), "attention's bias", "its heads'")
            args.distance_bias, args.bias_stride = pointer(bias), bias.shape[1]
            self._limit_positions(bias.shape[1] // 2 - BIAS_PADDING)
        self._attend(args, qkv, out, layer)

    def write_latent(self, query: Buffer, absorbed: Buffer, latent: Buffer, layer: LatentLayer) -> None:
        """Rotates queries and the token's vector, and writes the vector to the cache. The rotated queries go into the
        last columns of each head of `absorbed`; other ops write its first `layer.latent_dim` columns."""
        args, keys = latent_args(query, absorbed, latent, layer), pointer(layer.cache.keys)
        self._limit_positions(len(layer.rotary.cos))
        dim, first = layer.vector_dim, layer.latent_dim
        rotated = [absorbed.part(head * dim + first, dim - first) for head in range(layer.num_heads)]
        self._add("latent", "hr_op_latent_write", args, (query, latent, keys), (*rotated, keys), keep=(layer,))

    def attend_latent(
        self,
        absorbed: Buffer,
        out: Buffer,
        layer: LatentLayer,
        *,
        most_tokens: int = 0,
        only_logits: bool = False,
        adapted: DeltaTable | None = None,
    ) -> None:
        """Paged attention of absorbed queries, after `write_latent`: layer.latent_dim columns of `out` per head.

        If most_tokens is not 0, the rows of sequences that compute more tokens are left undefined, but for those with
        an adapter in `adapted`."""
        require_same(out.columns, layer.num_heads * layer.latent_dim, "attention's output", "its heads'")
        source = RotaryArgs(
            query=absorbed.address,
            query_stride=absorbed.stride,
            cache=layer.describe_cache(),
            num_heads=layer.num_heads,
            type=absorbed.type,
        )
        args = AttentionArgs(source=source, scale=layer.scale, value_dim=layer.latent_dim, only_logits=only_logits)
        args.most_tokens = most_tokens
        args.never_skipped = None if adapted is None else adapted.slots_address
        self._attend(args, absorbed, out, layer)

    def attend_expanded(
        self,
        query: Buffer,
        absorbed: Buffer,
        latent: Buffer,
        out: Buffer,
        layer: LatentLayer,
        up: Tensor,
        *,
        adapted: DeltaTable | None = None,
    ) -> None:
        """The expanded form of attention, after `write_latent`, for sequences that compute at least
        `layer.least_expanded` tokens and have no adapter in `adapted`: value_dim columns of `out` per head. Other rows
        are not changed.

        up: [num_heads, nope_dim + value_dim, latent_dim]."""
        keys = layer.cache.keys
        packed = PackedLatentUp.of(up, layer.nope_dim, keys, self.runtime.library)
        args = expanded_args(latent_args(query, absorbed, latent, layer), out, layer, packed)
        args.skipped = None if adapted is None else adapted.slots_address
        self._need(0, self.runtime.library.dll.hr_latent_expanded_scratch_bytes(ctypes.byref(args)))
        reads, name = (query, absorbed, pointer(keys)), "hr_op_latent_expanded"
        self._add("attention", name, args, reads, (out,), keep=(layer, packed), skipped_when_single=True)

    def _attend(self, args: AttentionArgs, query: Buffer, out: Buffer, layer: AttentionLayer | LatentLayer) -> None:
        args.output, args.output_stride, args.output_type = out.address, out.stride, out.type
        args.workspace, args.workspace_bytes = pointer(self._workspace), self._workspace.nbytes
        self._need(0, self.runtime.library.dll.hr_attention_scratch_bytes(ctypes.byref(args)))
        touched = (pointer(self._workspace), pointer(layer.cache.keys))
        self._add("attention", "hr_op_attention", args, (query, *touched), (out, *touched), keep=(layer,))

    def activation_multiply(self, gate_up: Buffer, out: Buffer, activation: str) -> None:
        """out = act(gate) * up, for a buffer with the gate's columns first. A gated linear layer does it without this
        op."""
        require_same(gate_up.columns, 2 * out.columns, "the gate and up buffer's columns", "twice the output's")
        args = ActivationArgs(
            gate=gate_up.address,
            up=gate_up.address + out.columns * gate_up.tensor.itemsize,
            output=out.address,
            gate_stride=gate_up.stride,
            output_stride=out.stride,
            size=out.columns,
            rows=ROW_COUNTS[out.rows],
            kind=ACTIVATIONS[activation],
            input_type=gate_up.type,
            output_type=out.type,
        )
        self._add("activation", "hr_op_activation_multiply", args, (gate_up,), (out,))

    def xielu(self, x: Buffer, out: Buffer, *, above: float, below: float, linear: float, most: float) -> None:
        """out = linear x + above x^2 for x > 0, else linear x + below (e^min(x, most) - 1 - x)."""
        require_same((x.columns, x.rows), (out.columns, out.rows), "an activation's input", "its output")
        args = XieluArgs(
            input=x.address,
            output=out.address,
            input_stride=x.stride,
            output_stride=out.stride,
            size=x.columns,
            rows=ROW_COUNTS[out.rows],
            input_type=x.type,
            output_type=out.type,
            above=above,
            below=below,
            linear=linear,
            most=most,
        )
        self._add("xielu", "hr_op_xielu", args, (x,), (out,))

    def add(self, source: Buffer, out: Buffer, scale: float = 1.0) -> None:
        """out += source * scale. A linear layer can add a residual without this op."""
        require_same(source.columns, out.columns, "an addition's input", "its output")
        args = AddArgs(
            input=source.address,
            output=out.address,
            input_stride=source.stride,
            output_stride=out.stride,
            size=out.columns,
            rows=ROW_COUNTS[out.rows],
            input_type=source.type,
            output_type=out.type,
            scale=scale,
        )
        self._add("add", "hr_op_add", args, (source, out), (out,))

    def op(
        self,
        function: Any,
        args: ctypes.Structure,
        reads: Iterable[Buffer],
        writes: Iterable[Buffer],
        keep: Iterable[object],
    ) -> None:
        """Appends an op whose arguments another module made. function: hr_op_NAME, or a function of another library
        with the interface of `op.h`; keep: objects to keep alive. Raises ValueError for a buffer of which each thread
        has its own copy: `copy` makes it shared."""
        reads, writes = tuple(reads), tuple(writes)
        if any(buffer.copies is not None for buffer in (*reads, *writes)):
            raise ValueError("an op of another module takes shared buffers.")
        name = function if isinstance(function, str) else function.__name__
        self._add(name.removeprefix("hr_op_"), function, args, reads, writes, keep=keep)

    def need_scratch(self, per_thread_bytes: int) -> None:
        """Scratch that the ops need on each thread."""
        self._need(0, per_thread_bytes)

    def start_of_logits(self) -> None:
        """Marks that later ops work only on rows of logits, so that `Program.run_logits` can rerun them for others."""
        self._logits_start = (len(self._few.ops), len(self._many.ops))

    def soft_cap(self, logits: Buffer, cap: float) -> None:
        """logits = cap * tanh(logits / cap), float32."""
        if logits.tensor.dtype != torch.float32 or cap <= 0:
            raise ValueError(f"a soft cap is positive and over float32, not {cap} over {logits.tensor.dtype}.")
        args = SoftCapArgs(values=logits.address, stride=logits.stride, size=logits.columns, cap=cap)
        args.rows = ROW_COUNTS[logits.rows]
        self._add("soft_cap", "hr_op_soft_cap", args, (logits,), (logits,))

    def sample(self, logits: Buffer) -> SampleBuffers:
        """Samples a token for each row of logits. The returned buffers take the parameters and hold the tokens."""
        buffers = SampleBuffers(self.runtime, len(logits.tensor), logits.columns)
        args = buffers.args(logits.tensor, ROW_COUNTS[logits.rows], logits.highest)
        self._add("sample", "hr_op_sample", args, (logits,), (), keep=(buffers,))
        return buffers

    def build(self, output: Buffer) -> Program:
        """Returns the program, whose runs return the rows of `output`. The builder must not be used afterwards."""
        self.runtime.pool.reserve(*self._scratch)
        written = Written(
            ops=(self._few.ops, self._many.ops),
            names=(self._few.names, self._many.names),
            output=output,
            max_rows=dict(self._max_rows),
            vocab_size=self._vocab_size,
            max_position=self._max_position,
            logits_start=self._logits_start,
            alone_rows=rows_within(self._alone_s, self._weight_bytes, self._multiply_adds),
            kept=(self._kept, self._workspace, self._delta_rooms),
        )
        return Program(self.runtime, written)

    def _need(self, shared_bytes: int, per_thread_bytes: int) -> None:
        self._scratch = [max(self._scratch[0], shared_bytes), max(self._scratch[1], per_thread_bytes)]

    def _limit_positions(self, count: int) -> None:
        self._max_position = count if self._max_position is None else min(self._max_position, count)

    def _add(
        self,
        name: str,
        function: Any,
        args: ctypes.Structure,
        reads: Iterable[Buffer | int],
        writes: Iterable[Buffer | int],
        *,
        few: ctypes.Structure | None = None,
        keep: Iterable[object] = (),
        skipped_when_single: bool = False,
    ) -> None:
        reads, writes = tuple(reads), tuple(writes)
        self._kept.append((args, few, reads, writes, *keep))
        if isinstance(function, str):
            function = getattr(self.runtime.library.dll, function)
        address = ctypes.cast(function, ctypes.c_void_p).value
        for ops, used, own in ((self._few, few or args, True), (self._many, args, False)):
            op = ProgramOp(run=address, args=ctypes.addressof(used), skipped_when_single=skipped_when_single)
            ops.append(name, op, shared_spans(reads, own), shared_spans(writes, own))
