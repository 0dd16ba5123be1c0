"""The CPU program of a whole step against a straightforward torch decoder of the same weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from thinned import every
from torch import Tensor

from headrace.kernels.cpu import build
from headrace.kernels.cpu.linear.linear import PackedLinear, Runtime, pack
from headrace.kernels.cpu.program.parts import AttentionLayer, LayerCache, Norm, Rotary
from headrace.kernels.cpu.program.program import Builder
from headrace.kernels.cpu.program.run import Program, ProgramStep
from headrace.kernels.cpu.runtime.threads import ThreadPool

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))

BLOCK_SIZE = 8
NUM_BLOCKS = 80
MAX_TOKENS = 192


@dataclass(frozen=True)
class Shape:
    hidden: int = 96
    intermediate: int = 160
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 16
    vocab: int = 203
    layers: int = 3
    qk_norm: bool = False
    window: int | None = None
    soft_cap: float | None = None
    final_cap: float | None = None
    sandwich: bool = False
    """Norms after attention and MLP too, and GELU: Gemma's layer."""
    factor: float = 1.0
    """Of the stream after each layer, in a sandwich."""
    value_norm: bool = False
    keys_are_values: bool = False
    last_reads_only: bool = False
    """The last layer has queries alone, and reads the cache of the one before it."""

    def kv_parts(self, layer: int) -> int:
        if self.last_reads_only and layer == self.layers - 1:
            return 0
        return 1 if self.keys_are_values else 2


class Weights:
    """Random weights of a decoder, in one dtype, and what torch makes of them."""

    def __init__(self, shape: Shape, dtype: torch.dtype, seed: int = 0) -> None:
        self.shape, self.dtype = shape, dtype
        generator = torch.Generator().manual_seed(seed)

        def matrix(rows: int, columns: int) -> Tensor:
            return (torch.randn(rows, columns, generator=generator) * columns**-0.5).to(dtype)

        def vector(size: int) -> Tensor:
            return 1 + 0.1 * torch.randn(size, generator=generator)

        self.embedding = torch.randn(shape.vocab, shape.hidden, generator=generator).to(dtype)
        widths = [(shape.heads + shape.kv_parts(i) * shape.kv_heads) * shape.head_dim for i in range(shape.layers)]
        self.layers = [
            {
                "qkv": matrix(width, shape.hidden),
                "o": matrix(shape.hidden, shape.heads * shape.head_dim),
                "gate_up": matrix(2 * shape.intermediate, shape.hidden),
                "down": matrix(shape.hidden, shape.intermediate),
                "norm1": vector(shape.hidden),
                "norm2": vector(shape.hidden),
                "post1": vector(shape.hidden),
                "post2": vector(shape.hidden),
                "q_norm": vector(shape.head_dim),
                "k_norm": vector(shape.head_dim),
            }
            for width in widths
        ]
        self.norm = vector(shape.hidden)
        half = shape.head_dim // 2
        angles = torch.arange(512).float()[:, None] / 10000 ** (torch.arange(half) / half)
        self.cos, self.sin = angles.cos(), angles.sin()

    def reference(self, token_ids: list[int]) -> Tensor:
        """Logits of every position of one sequence, [n, vocab], all in float64."""
        shape, n = self.shape, len(token_ids)
        cos, sin = self.cos[:n].double(), self.sin[:n].double()
        row, column = torch.arange(n)[:, None], torch.arange(n)
        visible = column <= row
        if shape.window:
            visible &= column > row - shape.window

        def norm(x: Tensor, weight: Tensor) -> Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight.double()

        def rotate(x: Tensor) -> Tensor:  # [n, heads, head_dim]
            a, b = x.chunk(2, -1)
            return torch.cat((a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None]), -1)

        x = self.embedding.double()[token_ids]
        k = v = torch.empty(0)
        group = shape.heads // shape.kv_heads
        for index, layer in enumerate(self.layers):
            qkv = norm(x, layer["norm1"]) @ layer["qkv"].double().T
            q, *kv = qkv.view(n, -1, shape.head_dim).split((shape.heads, *[shape.kv_heads] * shape.kv_parts(index)), 1)
            if kv:
                k, v = kv[0], kv[-1]
                k = norm(k, layer["k_norm"]) if shape.qk_norm else k
                v = norm(v, torch.ones(shape.head_dim)) if shape.value_norm else v
                k = rotate(k).repeat_interleave(group, 1)
            q = rotate(norm(q, layer["q_norm"]) if shape.qk_norm else q)
            scores = torch.einsum("qhd,khd->hqk", q, k) * shape.head_dim**-0.5
            if shape.soft_cap:
                scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
            weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
            attended = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1)).reshape(n, -1)
            delta = attended @ layer["o"].double().T
            x = x + (norm(delta, layer["post1"]) if shape.sandwich else delta)
            gate, up = (norm(x, layer["norm2"]) @ layer["gate_up"].double().T).chunk(2, -1)
            gate = F.gelu(gate, approximate="tanh") if shape.sandwich else F.silu(gate)
            delta = (gate * up) @ layer["down"].double().T
            x = (x + norm(delta, layer["post2"])) * shape.factor if shape.sandwich else x + delta
        logits = norm(x, self.norm) @ self.embedding.double().T
        return logits if shape.final_cap is None else shape.final_cap * torch.tanh(logits / shape.final_cap)


class Model:
    """The same decoder as a program, with its cache."""

    def __init__(self, weights: Weights, cache_dtype: torch.dtype, num_threads: int = 1) -> None:
        shape, dtype = weights.shape, weights.dtype
        library = build.build()
        self.runtime = Runtime(library, ThreadPool(library, num_threads))
        cache_shape = (NUM_BLOCKS, shape.kv_heads, BLOCK_SIZE, shape.head_dim)
        # Slots that were never written hold NaN: whatever reads one is found out.
        self.caches = [
            LayerCache(
                torch.full(cache_shape, torch.nan, dtype=cache_dtype),
                torch.full(cache_shape, torch.nan, dtype=cache_dtype),
            )
            for _ in range(shape.layers)
        ]
        self.program = self._build(weights, torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)

    def _pack(self, weight: Tensor, gated: bool = False) -> PackedLinear:
        return pack(weight, gated=gated, runtime_=self.runtime)

    def _build(self, weights: Weights, inner: torch.dtype) -> Program:
        shape = weights.shape
        builder = Builder(self.runtime, max_tokens=MAX_TOKENS, max_logits=MAX_TOKENS)
        hidden = builder.buffer(shape.hidden, torch.float32)
        normed = builder.buffer(shape.hidden, inner, own=True)
        attended = builder.buffer(shape.heads * shape.head_dim, inner)
        activated = builder.buffer(shape.intermediate, inner)
        delta = builder.buffer(shape.hidden, torch.float32)
        table = self._pack(weights.embedding)
        builder.embedding(table, hidden)
        for index, layer in enumerate(weights.layers):
            parts = shape.kv_parts(index)
            cache, qkv = self.caches[index if parts else index - 1], builder.buffer(len(layer["qkv"]), torch.float32)
            norms = {name: Norm("rms", 1e-6, layer[name]) for name in layer if layer[name].dim() == 1}
            builder.norm(hidden, normed, norms["norm1"])
            builder.linear(self._pack(layer["qkv"]), normed, qkv)
            attention = AttentionLayer(
                shape.heads,
                cache,
                shape.head_dim**-0.5,
                Rotary(weights.cos, weights.sin),
                norms["q_norm"] if shape.qk_norm else None,
                norms["k_norm"] if shape.qk_norm else None,
                shape.window,
                shape.soft_cap,
                value_norm=Norm("rms", 1e-6, torch.ones(shape.head_dim)) if shape.value_norm and parts else None,
                reads_only=not parts,
                keys_are_values=parts == 1,
            )
            builder.write_cache(qkv, attention)
            if layer is weights.layers[-1]:
                # From here on only the rows that logits are wanted of.
                builder.start_of_logits()
                wanted = builder.buffer(shape.hidden, torch.float32, rows="logits")
                builder.gather(hidden, wanted)
                builder.attend(qkv, attended, attention, only_logits=True)
                hidden, normed, activated, delta = (
                    wanted,
                    *(x.of_logits(MAX_TOKENS) for x in (normed, activated, delta)),
                )
                self.attended, attended = attended, builder.buffer(attended.columns, inner, rows="logits", own=True)
                builder.gather(self.attended, attended)
            else:
                builder.attend(qkv, attended, attention)
            if shape.sandwich:
                builder.linear(self._pack(layer["o"]), attended, delta)
                builder.norm(delta, hidden, norms["post1"], add=True)
            else:
                builder.linear(self._pack(layer["o"]), attended, hidden, residual=hidden)
            builder.norm(hidden, normed, norms["norm2"])
            activation = "gelu_tanh" if shape.sandwich else "silu"
            builder.linear(self._pack(layer["gate_up"], gated=True), normed, activated, activation=activation)
            if shape.sandwich:
                builder.linear(self._pack(layer["down"]), activated, delta)
                builder.norm(delta, hidden, norms["post2"], add=True, factor=shape.factor)
            else:
                builder.linear(self._pack(layer["down"]), activated, hidden, residual=hidden)
        final = builder.buffer(shape.hidden, inner, rows="logits")
        logits = builder.buffer(shape.vocab, torch.float32, rows="logits")
        builder.norm(hidden, final, Norm("rms", 1e-6, weights.norm))
        builder.linear(table, final, logits)
        if shape.final_cap is not None:
            builder.soft_cap(logits, shape.final_cap)
        return builder.build(logits)


def step(sequences: list[list[int]], computed: list[int], ends: list[int]) -> ProgramStep:
    """Sequence i computes its tokens [computed[i], ends[i]); its blocks are those from 20 i on, backwards."""
    spans = [(i, range(a, b)) for i, (a, b) in enumerate(zip(computed, ends, strict=True))]
    tables = np.array([[20 * i + 19 - j for j in range(20)] for i in range(len(sequences))], np.int32)
    places = [(i, position) for i, span in spans for position in span]
    return ProgramStep(
        token_ids=np.array([sequences[i][position] for i, position in places], np.int32),
        positions=np.array([position for _, position in places], np.int32),
        slot_mapping=np.array([tables[i, p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for i, p in places], np.int64),
        query_start=np.cumsum([0, *(len(span) for _, span in spans)], dtype=np.int32),
        seq_lens=np.array(ends, np.int32),
        block_tables=tables,
        logits_rows=np.arange(len(places), dtype=np.int32),
    )


def sequences_of(lengths: list[int], vocab: int) -> list[list[int]]:
    generator = np.random.default_rng(5)
    return [generator.integers(0, vocab, length).tolist() for length in lengths]


def run_in_chunks(model: Model, sequences: list[list[int]], chunk: int) -> list[Tensor]:
    """Logits of every position of every sequence, computed `chunk` tokens of each at a time."""
    found: list[list[Tensor]] = [[] for _ in sequences]
    for start in range(0, max(map(len, sequences)), chunk):
        alive = [i for i, tokens in enumerate(sequences) if len(tokens) > start]
        # Block tables go by index, so a sequence that has ended keeps its place with no tokens.
        ends = [min(start + chunk, len(tokens)) for tokens in sequences]
        starts = [min(start, len(tokens)) for tokens in sequences]
        logits = model.program.run(step(sequences, starts, ends)).clone()
        parts = logits.split([end - begin for begin, end in zip(starts, ends, strict=True)])
        for i in alive:
            found[i].append(parts[i])
    return [torch.cat(parts) for parts in found]


SHAPES = {
    "llama": Shape(),
    "odd": Shape(hidden=72, intermediate=56, heads=5, kv_heads=5, head_dim=24, vocab=101),
    "window, caps, q/k norm, sandwich": Shape(
        qk_norm=True, window=11, soft_cap=3.0, final_cap=5.0, sandwich=True, heads=4, kv_heads=1, head_dim=32
    ),
    "keys as values, a shared cache, large heads": Shape(
        qk_norm=True, value_norm=True, keys_are_values=True, last_reads_only=True, heads=4, kv_heads=2, head_dim=512
    ),
    "normed values, a shared cache, factors": Shape(
        qk_norm=True, value_norm=True, last_reads_only=True, sandwich=True, factor=0.7, head_dim=24
    ),
}


@pytest.mark.parametrize("shape", every(2, SHAPES.values()), ids=SHAPES.keys())
@pytest.mark.parametrize("chunk", [1, 7, 60], ids=["token by token", "chunks", "whole prompts"])
def test_fp32_program_equals_the_decoder(shape: Shape, chunk: int) -> None:
    weights = Weights(shape, torch.float32)
    model = Model(weights, torch.float32, num_threads=2)
    sequences = sequences_of([33, 1, 60], shape.vocab)
    for tokens, logits in zip(sequences, run_in_chunks(model, sequences, chunk), strict=True):
        wanted = weights.reference(tokens)
        assert (logits.double() - wanted).abs().max() <= 1e-5 * wanted.abs().max()
        assert torch.equal(logits.argmax(1), wanted.argmax(1))


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float32])
def test_bf16_program_is_as_near_as_bf16_can_be(cache_dtype: torch.dtype) -> None:
    weights = Weights(Shape(), torch.bfloat16)
    model = Model(weights, cache_dtype, num_threads=2)
    sequences = sequences_of([50, 20], weights.shape.vocab)
    for tokens, logits in zip(sequences, run_in_chunks(model, sequences, 16), strict=True):
        wanted = weights.reference(tokens)
        # Every layer rounds its inputs to 2^-9 a few times; the errors are random and largely cancel.
        error = (logits.double() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
        assert error < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("more", [{}, {"value_norm": True, "keys_are_values": True, "last_reads_only": True}])
def test_results_do_not_depend_on_threads_chunks_or_batch(dtype: torch.dtype, more: dict[str, bool]) -> None:
    weights = Weights(Shape(qk_norm=True, **more), dtype)
    sequences = sequences_of([45, 18, 30], weights.shape.vocab)
    wanted = run_in_chunks(Model(weights, dtype), sequences, 60)
    for chunk in (1, 13):
        found = run_in_chunks(Model(weights, dtype, num_threads=2), sequences, chunk)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    alone = run_in_chunks(Model(weights, dtype), sequences[:1], 5)
    assert torch.equal(alone[0], wanted[0])


def test_logits_of_other_rows_can_be_had_afterwards() -> None:
    weights = Weights(Shape(), torch.float32)
    model = Model(weights, torch.float32)
    arrays = step(sequences_of([40], 203), [0], [40])
    every = model.program.run(arrays).clone()
    only_last = ProgramStep(**{**vars(arrays), "logits_rows": np.array([39], np.int32)})
    assert torch.equal(model.program.run(only_last), every[39:])
    assert torch.equal(model.program.run_logits(np.array([3, 17], np.int32)), every[[3, 17]])


def test_the_last_layer_attends_for_no_more_than_the_rows_that_are_wanted() -> None:
    weights = Weights(Shape(), torch.float32)
    model = Model(weights, torch.float32)
    arrays = step(sequences_of([100], 203), [0], [100])
    model.program.run(arrays)
    every = model.attended.tensor.clone()
    model.program.run(ProgramStep(**{**vars(arrays), "logits_rows": np.array([99], np.int32)}))
    assert torch.equal(model.attended.tensor[99], every[99])
    assert (model.attended.tensor[:64] != every[:64]).any(1).all(), "they are still those of the layer before"


@pytest.mark.parametrize("wanted", [[], [1], [2, 0]])
def test_single_tokens_are_in_the_cache_also_where_nobody_wants_their_logits(wanted: list[int]) -> None:
    weights = Weights(Shape(), torch.float32)
    model = Model(weights, torch.float32, num_threads=2)
    sequences = sequences_of([9, 12, 5], weights.shape.vocab)
    model.program.run(step(sequences, [0, 0, 0], [7, 10, 3]))
    arrays = step(sequences, [7, 10, 3], [8, 11, 4])
    model.program.run(ProgramStep(**{**vars(arrays), "logits_rows": np.array(wanted, np.int32)}))
    last = model.program.run(step(sequences, [8, 11, 4], [9, 12, 5]))
    for tokens, logits in zip(sequences, last, strict=True):
        exact = weights.reference(tokens)[-1]
        assert (logits.double() - exact).abs().max() <= 1e-5 * exact.abs().max()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": np.array([203], np.int32)}, "token id 203 is outside the vocabulary of 203"),
        ({"token_ids": np.array([-2], np.int32)}, "token id -2 is outside"),
        ({"positions": np.array([512], np.int32)}, "position 512 is outside the tables, which hold 512"),
        ({"positions": np.array([0], np.int64)}, "positions is int64"),
        ({"slot_mapping": np.zeros(2, np.int64)}, r"slot_mapping is int64 \[2\]"),
        ({"logits_rows": np.array([1], np.int32)}, "logits_rows name a token"),
    ],
)
def test_a_step_that_does_not_fit_is_refused(change: dict[str, np.ndarray], message: str) -> None:
    model = Model(Weights(Shape(layers=1), torch.float32), torch.float32)
    arrays = step([[1]], [0], [1])
    with pytest.raises(ValueError, match=message):
        model.program.run(ProgramStep(**{**vars(arrays), **change}))


def test_more_tokens_than_there_is_room_for_are_refused() -> None:
    model = Model(Weights(Shape(layers=1), torch.float32), torch.float32)
    sequences = sequences_of([MAX_TOKENS + 1], 203)
    arrays = ProgramStep(
        token_ids=np.array(sequences[0], np.int32),
        positions=np.arange(MAX_TOKENS + 1, dtype=np.int32),
        slot_mapping=np.full(MAX_TOKENS + 1, -1, np.int64),
        query_start=np.array([0, MAX_TOKENS + 1], np.int32),
        seq_lens=np.array([MAX_TOKENS + 1], np.int32),
        block_tables=np.zeros((1, 30), np.int32),
        logits_rows=np.array([0], np.int32),
    )
    with pytest.raises(ValueError, match=f"a step of {MAX_TOKENS + 1} tokens; this program has room for {MAX_TOKENS}"):
        model.program.run(arrays)


def test_a_profile_accounts_for_the_time() -> None:
    model = Model(Weights(Shape(), torch.float32), torch.float32)
    profile = model.program.profile(step(sequences_of([40], 203), [0], [40]), runs=5)
    assert set(profile.working_s) == {"embedding", "norm", "linear", "rotary", "attention", "gather"}
    assert 0 < sum(profile.working_s.values()) <= profile.seconds
    assert 0 <= profile.share_outside < 1


def test_shapes_that_do_not_fit_are_refused_as_the_program_is_written() -> None:
    model = Model(Weights(Shape(layers=1), torch.float32), torch.float32)
    builder = Builder(model.runtime, max_tokens=4, max_logits=4)
    weight = pack(torch.randn(8, 16), runtime_=model.runtime)
    with pytest.raises(ValueError, match=r"a linear layer's input \(12\) must equal its weight's columns \(16\)"):
        builder.linear(weight, builder.buffer(12, torch.float32), builder.buffer(8, torch.float32))
    with pytest.raises(ValueError, match=r"contiguous float32 \[16\]"):
        builder.norm(
            builder.buffer(16, torch.float32), builder.buffer(16, torch.float32), Norm("rms", 1e-6, torch.ones(8))
        )


def test_parts_of_a_buffer_are_written_without_a_barrier_between_them_and_read_after_one() -> None:
    model = Model(Weights(Shape(layers=1), torch.float32), torch.float32)
    builder = Builder(model.runtime, max_tokens=4, max_logits=4)
    x, joined, out = (builder.buffer(columns, torch.float32) for columns in (16, 24, 12))
    builder.linear(pack(torch.randn(16, 16), runtime_=model.runtime), x, joined.part(0, 16))
    builder.linear(pack(torch.randn(8, 16), runtime_=model.runtime), x, joined.part(16, 8))
    builder.activation_multiply(joined, out, "silu")
    builder.linear(pack(torch.randn(8, 16), runtime_=model.runtime), x, joined.part(16, 8))
    assert [op.barrier_before for op in builder._many.ops] == [0, 0, 1, 1]
    right = joined.part(12, 12)
    assert right.part(4, 8).span == joined.part(16, 8).span, "a part of a part"
    with pytest.raises(ValueError, match=r"columns \[16, 25\) are no part of a shared buffer of 24"):
        joined.part(16, 9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_activated_by_xielu_and_columns_scaled_by_their_rows_position(dtype: torch.dtype) -> None:
    columns, num_positions = 37, 60
    model = Model(Weights(Shape(layers=1), torch.float32), torch.float32, num_threads=2)
    builder = Builder(model.runtime, max_tokens=MAX_TOKENS, max_logits=MAX_TOKENS)
    table = torch.randn(203, columns) * 10.0 ** torch.arange(-6, 2).repeat(5)[:columns]
    factors = 1 + torch.arange(num_positions).div(16, rounding_mode="floor").float().log1p()
    x, out = builder.buffer(columns, torch.float32), builder.buffer(columns, dtype)
    read = builder.buffer(columns, dtype, rows="logits")
    builder.embedding(pack(table, runtime_=model.runtime), x)
    builder.xielu(x, out, above=0.7, below=1.3, linear=0.5, most=-1e-6)
    builder.scale_rows(out.part(5, 30), factors)
    builder.gather(out, read)
    tokens = sequences_of([num_positions], 203)
    found = builder.build(read).run(step(tokens, [0], [num_positions]))
    wide = table[tokens[0]].double()
    wanted = torch.where(wide > 0, 0.7 * wide * wide, 1.3 * (wide.clamp(max=-1e-6).expm1() - wide)) + 0.5 * wide
    wanted[:, 5:35] *= factors.double()[:, None]
    precision = 1e-6 if dtype == torch.float32 else 1e-2
    # The two terms cancel out where x is near -0.7.
    assert ((found.double() - wanted).abs() <= precision * (wanted.abs() + wide.abs())).all()
    with pytest.raises(ValueError, match=r"position"):
        builder.build(read).run(step(sequences_of([num_positions + 1], 203), [0], [num_positions + 1]))


def test_token_ids_that_a_table_lacks_have_the_row_of_the_first() -> None:
    model = Model(Weights(Shape(layers=1), torch.float32), torch.float32)
    builder = Builder(model.runtime, max_tokens=8, max_logits=8)
    table = torch.randn(203, 12)
    x, read = builder.buffer(12, torch.float32), builder.buffer(12, torch.float32, rows="logits")
    builder.embedding(pack(table[:90], runtime_=model.runtime), x, 0.5, vocab_size=203, known_ids=90)
    builder.gather(x, read)
    found = builder.build(read).run(step([[89, 90, 0, 202, 5]], [0], [5]))
    assert torch.equal(found, table[[89, 0, 0, 0, 5]] * 0.5)
