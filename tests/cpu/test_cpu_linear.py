"""Packed linear layers against fp64 products within the stated bounds; results that do not depend on the batch.

Every test runs at every instruction-set level that this machine can run, so the AVX2 and portable paths are held to
the same bounds as the native one. AVX-512 with BF16, of which the native one consists where it can run, is left for
`make test-system`. Exact: packing (nothing lost), the row look-up, and batch invariance.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from thinned import every
from torch import Tensor

from headrace.kernels import ops
from headrace.kernels.cpu import build
from headrace.kernels.cpu.linear import limits, linear
from headrace.kernels.cpu.linear.linear import LinearArgs, PackedLinear, Runtime
from headrace.kernels.cpu.runtime.threads import Step, ThreadPool

UNIT = 2.0**-24
"""Largest relative error of one fp32 rounding."""
QUANTISED = [name for name, kind in linear.WEIGHT_TYPES.items() if kind.quantised]
LEVELS = ["native", pytest.param("avx512_bf16", marks=pytest.mark.system), "avx512", "avx2", "portable"]
FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@pytest.fixture(scope="module", params=LEVELS)
def runtime(request: pytest.FixtureRequest) -> Runtime:
    if request.param != "native":  # the native one must build; a lower one needs what it is made of
        try:
            build._level(request.param)
        except build.BuildError as error:
            pytest.skip(str(error))
    return linear.runtime(request.param, 2)


@pytest.fixture
def one_thread(runtime: Runtime) -> Iterator[ThreadPool]:
    pool = ThreadPool(runtime.library, 1)
    yield pool
    pool.close()


def random_rows(type_name: str, n: int, k: int, seed: int = 0) -> Tensor:
    """[n, bytes] uint8: every bit of codes and small scales random; fp16 scales of ordinary size and both signs."""
    rng = np.random.default_rng(seed)
    kind = linear.WEIGHT_TYPES[type_name]
    raw = rng.integers(0, 256, (n, k // kind.block_size, kind.block_bytes), dtype=np.uint8)
    for at, scale in _half_fields(type_name).items():
        halves = (rng.standard_normal(raw.shape[:2]) * scale).astype(np.float16)
        raw[:, :, at : at + 2] = halves.view(np.uint8).reshape(*raw.shape[:2], 2)
    return torch.from_numpy(raw.reshape(n, -1))


def _half_fields(type_name: str) -> dict[int, float]:
    if type_name == "Q6_K":
        return {208: 0.01}
    if type_name.endswith("_K"):
        return {0: 0.01, 2: 0.01}
    return {0: 0.1, 2: 0.5} if type_name.endswith("_1") else {0: 0.1}


def minimum_of(type_name: str, rows: Tensor) -> Tensor:
    """The largest minimum |m| that each weight's block may subtract or add: [n, k] float64."""
    kind = linear.WEIGHT_TYPES[type_name]
    blocks = rows.numpy().reshape(rows.shape[0], -1, kind.block_bytes)
    if 2 not in _half_fields(type_name):
        return torch.zeros(rows.shape[0], blocks.shape[1] * kind.block_size, dtype=torch.float64)
    halves = np.abs(np.ascontiguousarray(blocks[:, :, 2:4]).view(np.float16).astype(np.float64))[:, :, 0]
    return torch.from_numpy(np.repeat(halves * (63 if type_name.endswith("_K") else 1), kind.block_size, axis=1))


def random_weight(
    type_name: str, n: int, k: int, runtime: Runtime, *, gated: bool = False
) -> tuple[PackedLinear, Tensor]:
    """A packed weight and its exact values [n, k] (in the stored type for floats, fp32 for blocks)."""
    if type_name in FLOATS:
        weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n * 7919 + k)).to(FLOATS[type_name])
        return linear.pack(weight, gated=gated, runtime_=runtime), weight
    rows = random_rows(type_name, n, k, seed=n * 7919 + k)
    return linear.pack((type_name, rows), gated=gated, runtime_=runtime), linear.dequantise(type_name, rows)


def random_x(rows: int, k: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(rows * 104729 + k)).to(dtype)


def as_two_bytes(x: Tensor) -> tuple[Tensor, Tensor]:
    """x as the quantised kernels see it, and the step of each value's block; both [rows, k] float64."""
    blocks = x.to(torch.float32).view(x.shape[0], -1, 32)
    largest = blocks.abs().amax(-1, keepdim=True)
    # A true division: 127.0 / tensor is a product with the reciprocal, which rounds twice.
    inverse = torch.where(largest > 0, torch.full_like(largest, 127.0) / largest, 0.0)
    high = (blocks * inverse).round()
    low = ((blocks * inverse - high) * 256).round().clamp(-127, 127)
    step = (largest / (127.0 * 256.0)).double()
    return ((256 * high + low).double() * step).view(x.shape), step.expand_as(blocks).reshape(x.shape)


FLOAT_SHAPES = [(1, 1, 1), (3, 17, 7), (2, 3, 33), (16, 192, 576), (70, 1000, 64), (5, 1, 1536), (13, 40, 8201)]
BLOCK_SHAPES = [(1, 1, 32), (3, 17, 96), (2, 3, 576), (17, 192, 1536), (70, 1000, 256), (9, 33, 2048)]


@pytest.mark.parametrize("x_dtype", every(2, [torch.bfloat16, torch.float16, torch.float32]))
@pytest.mark.parametrize("type_name", list(FLOATS))
def test_float_products_are_within_the_rounding_of_fp32_sums(
    runtime: Runtime, type_name: str, x_dtype: torch.dtype
) -> None:
    for rows, n, k in FLOAT_SHAPES:
        packed, weight = random_weight(type_name, n, k, runtime)
        x, bias = random_x(rows, k, x_dtype), torch.randn(n)
        seen = (x.to(torch.bfloat16) if type_name == "BF16" else x).double()
        exact = seen @ weight.double().T + bias.double()
        magnitude = seen.abs() @ weight.double().abs().T + bias.double().abs()
        got = packed.apply(x, bias, out_dtype=torch.float32).double()
        assert got.shape == (rows, n)
        assert ((got - exact).abs() <= (k + 2) * UNIT * magnitude).all(), (rows, n, k)


@pytest.mark.parametrize("type_name", every(2, QUANTISED))
def test_quantised_products_differ_by_the_rounding_of_x_to_two_bytes(runtime: Runtime, type_name: str) -> None:
    block = linear.WEIGHT_TYPES[type_name].block_size
    for rows, n, k in BLOCK_SHAPES:
        if k % block:
            continue
        packed, weight = random_weight(type_name, n, k, runtime)
        minimum = minimum_of(type_name, random_rows(type_name, n, k, seed=n * 7919 + k))
        x = random_x(rows, k)
        x[:, :32] = 0  # a block without a step
        _, step = as_two_bytes(x)
        w = weight.double()
        fp32_sums = (k / 8 + 8) * UNIT * ((x.double().abs() + step) @ (w.abs() + minimum).T)
        got = packed.apply(x).double()
        assert ((got - x.double() @ w.T).abs() <= step @ w.abs().T + fp32_sums).all(), (rows, n, k)


@pytest.mark.parametrize("type_name", every(4, [*FLOATS, *QUANTISED]))
def test_a_row_is_the_same_to_the_bit_in_any_batch_and_on_any_number_of_threads(
    runtime: Runtime, one_thread: ThreadPool, type_name: str
) -> None:
    alone = Runtime(runtime.library, one_thread)
    # The last shape makes float panels larger than one pass over K takes.
    for n, k in ((70, 256), (33, 768), (40, 8704)):
        packed, weight = random_weight(type_name, n, k, runtime)
        source = weight if type_name in FLOATS else (type_name, random_rows(type_name, n, k, seed=n * 7919 + k))
        by_one = linear.pack(source, runtime_=alone)
        x = random_x(64, k, torch.bfloat16)
        singly = torch.cat([packed.apply(x[row : row + 1], out_dtype=torch.float32) for row in range(64)])
        for rows in (2, 3, 8, 13, 17, 64):
            assert torch.equal(packed.apply(x[:rows], out_dtype=torch.float32), singly[:rows]), (n, k, rows)
            assert torch.equal(packed.apply(x[64 - rows :], out_dtype=torch.float32), singly[64 - rows :]), (n, k, rows)
        for rows in (1, 7, 64):
            assert torch.equal(by_one.apply(x[:rows], out_dtype=torch.float32), singly[:rows]), (n, k, rows)


@pytest.mark.parametrize("spread", [0, 40, 126])
def test_a_row_of_few_values_is_the_same_to_the_bit_in_any_batch(runtime: Runtime, spread: int) -> None:
    """spread: of the exponents. With 126 products overflow, and fall below the normal numbers."""
    generator = torch.Generator().manual_seed(spread)

    def random_bf16(rows: int, k: int) -> Tensor:
        exponents = torch.randint(-spread, spread + 1, (rows, k), generator=generator)
        return torch.ldexp(torch.randn(rows, k, generator=generator), exponents).to(torch.bfloat16)

    for k in (1, 2, 7, 8, 16, 24, 30, 31, 33, 48, 80):
        packed, x = linear.pack(random_bf16(70, k), runtime_=runtime), random_bf16(40, k)
        singly = torch.cat([packed.apply(x[row : row + 1], out_dtype=torch.float32) for row in range(40)])
        for rows in (2, 3, 4, 16, 17, 31, 40):
            together = packed.apply(x[40 - rows :], out_dtype=torch.float32)
            is_nan = together.isnan()
            assert torch.equal(is_nan, singly[40 - rows :].isnan()), (k, rows)
            bits = (each.masked_fill(is_nan, 0).view(torch.int32) for each in (together, singly[40 - rows :]))
            assert torch.equal(*bits), (k, rows)


@pytest.mark.parametrize("type_name", [*FLOATS, *QUANTISED])
def test_packing_loses_nothing_and_costs_under_five_percent(runtime: Runtime, type_name: str) -> None:
    for gated in (False, True):
        packed, weight = random_weight(type_name, 192, 768, runtime, gated=gated)
        assert torch.equal(packed.unpack(), weight.float())
        stored = 192 * 768 // packed_kind(type_name).block_size * packed_kind(type_name).block_bytes
        assert stored <= packed.nbytes <= 1.05 * stored
    ids = torch.tensor([[3, 191], [0, 3]])
    assert torch.equal(packed.look_up(ids, torch.bfloat16, scale=2.0), (weight.float()[ids] * 2).to(torch.bfloat16))


def packed_kind(type_name: str) -> linear.WeightType:
    return linear.WEIGHT_TYPES[type_name]


def test_every_fp16_value_survives(runtime: Runtime) -> None:
    """All 65,536 patterns, subnormals, infinities and NaN among them, through pack and look-up."""
    every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.float16).view(256, 256)
    back = linear.pack(every, runtime_=runtime).look_up(torch.arange(256), torch.float16)
    assert torch.equal(back.isnan(), every.isnan())
    keep = ~every.isnan()
    assert torch.equal(back.view(torch.int16)[keep], every.view(torch.int16)[keep])


@pytest.mark.parametrize(
    "activation", ["none", "silu", "gelu_tanh", "gelu", "relu", "relu2", "silu_to_7", "silu_below_10", "normal_cdf"]
)
@pytest.mark.parametrize("gated", [False, True])
def test_activation_gate_bias_and_residual_match_the_reference(runtime: Runtime, activation: str, gated: bool) -> None:
    for type_name, n, k in (("BF16", 90, 64), ("Q8_0", 64, 96)):
        packed, weight = random_weight(type_name, n, k, runtime, gated=gated)
        x, bias = random_x(15, k, torch.bfloat16), torch.randn(n)
        seen = x.double() if type_name == "BF16" else as_two_bytes(x)[0]
        residual = random_x(15, packed.columns, torch.bfloat16)
        expected = linear.reference(
            seen, weight.double(), bias, gated=gated, activation=activation, residual=residual, dtype=torch.float64
        )
        got = packed.apply(x, bias, residual=residual, activation=activation, out_dtype=torch.float32)
        torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=2e-5 * float(expected.abs().max()))
        packed.apply(x, bias, out=residual, residual=residual, activation=activation)
        assert torch.equal(residual, got.to(torch.bfloat16))


def test_rows_of_x_and_out_may_be_strided(runtime: Runtime) -> None:
    packed, weight = random_weight("BF16", 33, 64, runtime)
    wide, out = random_x(10, 200, torch.bfloat16), torch.full((10, 50), 7.0)
    packed.apply(wide[:, 3:67], out=out[:, 5:38])
    torch.testing.assert_close(out[:, 5:38], wide[:, 3:67].float() @ weight.float().T, rtol=1e-4, atol=1e-4)
    assert (out[:, :5] == 7).all()
    assert (out[:, 38:] == 7).all()


def test_an_op_takes_its_rows_from_the_step(runtime: Runtime) -> None:
    """As many rows as there are logits are projected, from each thread's own copy of x, into the first rows of out."""
    for type_name in ("BF16", "Q4_1"):
        packed, _ = random_weight(type_name, 40, 64, runtime)
        x = random_x(20, 64, torch.bfloat16)
        copies = x.repeat(runtime.pool.num_threads, 1, 1)
        out = torch.zeros(20, 40)
        runtime.pool.reserve(*packed.scratch(20))
        args = LinearArgs(
            weight=packed.descriptor,
            x=copies.data_ptr(),
            x_stride=64,
            x_thread_stride=20 * 64 * 2,
            out=out.data_ptr(),
            out_stride=40,
            x_dtype=linear.DTYPES[x.dtype],
            rows=linear.ROWS_LOGITS,
        )
        step = Step(num_tokens=20, num_logits=3)
        runtime.pool.run_op("hr_op_linear", args, step)
        assert torch.equal(out[:3], packed.apply(x[:3], out_dtype=torch.float32))
        assert (out[3:] == 0).all()


def test_extreme_values_do_what_fp32_does(runtime: Runtime) -> None:
    packed, _ = random_weight("Q8_0", 8, 64, runtime)
    tiny = torch.full((1, 64), 1e-38)
    assert torch.isfinite(packed.apply(tiny)).all()
    huge = torch.full((1, 64), 3e38)
    assert torch.isfinite(packed.apply(huge / 1e30)).all()
    dense, weight = random_weight("F32", 8, 64, runtime)
    x = torch.zeros(1, 64)
    x[0, 5] = float("inf")
    assert torch.equal(dense.apply(x).isnan(), (x @ weight.T).isnan())


@pytest.mark.parametrize("value", every(2, [float("nan"), float("inf"), -float("inf")]))
@pytest.mark.parametrize("type_name", sorted(linear.WEIGHT_TYPES))
def test_an_input_that_is_not_finite_spoils_its_row_whatever_the_weights_type(
    runtime: Runtime, type_name: str, value: float
) -> None:
    packed, _ = random_weight(type_name, 70, 512, runtime)
    for at in (0, 31, 32, 500):
        x = random_x(3, 512)
        whole = packed.apply(x)
        x[1, at] = value
        got = packed.apply(x)
        assert not got[1].isfinite().any(), at
        assert torch.equal(got[::2], whole[::2])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("group_size", "num_groups"), [(32, 8), (64, 4), (64, 1), (128, 2), (128, 1)])
def test_online_quantisation_rounds_each_weight_to_its_groups_nearest_code(
    bits: int, group_size: int, num_groups: int
) -> None:
    weight = torch.randn(48, group_size * num_groups, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    weight[0, :group_size] = 0
    weight[1, :group_size] = 2.5
    name, rows = linear.quantise(weight, bits, group_size)
    groups = weight.float().view(48, -1, group_size)
    step = groups.abs().amax(-1) / 127 if bits == 8 else (groups.amax(-1) - groups.amin(-1)) / 15
    error = (linear.dequantise(name, rows) - weight.float()).view(48, -1, group_size).abs().amax(-1)
    # Half a step, plus what rounding step and minimum to fp16 costs at the far end of a group.
    assert (error <= step / 2 + 2**-10 * groups.abs().amax(-1)).all()
    assert torch.equal(linear.pack((name, rows)).unpack(), linear.dequantise(name, rows))


def test_the_registry_offers_packed_layers_and_says_why_not() -> None:
    op = ops()["linear"]
    serves = op.choose(device=torch.device("cpu"), dtype=torch.bfloat16, shape=(6, 10))
    assert serves.name == "cpu_packed"
    weight, bias, x = torch.randn(6, 10), torch.randn(6), torch.randn(2, 3, 10)
    layer = serves.function(weight, bias)
    torch.testing.assert_close(layer.apply(x), op.reference(weight, bias).apply(x), rtol=1e-5, atol=1e-5)
    assert layer.nbytes >= weight.nbytes
    refused = op.choose(device=torch.device("meta"), dtype=torch.float64, shape=(6, 10))
    assert refused.name == "reference"
    assert "it runs on a CPU" in dict(refused.refused)["cpu_packed"]


def test_bad_input_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"Q4_K rows are uint8 \[n, multiple of 144\]; here: torch.uint8 \[2, 100\]"):
        linear.pack(("Q4_K", torch.zeros(2, 100, dtype=torch.uint8)))
    with pytest.raises(ValueError, match=r"blocks of type IQ2_S are not supported; there are Q4_0, "):
        linear.pack(("IQ2_S", torch.zeros(2, 100, dtype=torch.uint8)))
    with pytest.raises(ValueError, match=r"5 rows cannot be halved"):
        linear.pack(torch.zeros(5, 8), gated=True)
    with pytest.raises(ValueError, match=r"this one is torch.float64 \[2, 2\]"):
        linear.pack(torch.zeros(2, 2, dtype=torch.float64))
    assert linear.why_not("Q6_K", 4, 576) == (
        "Q6_K stores blocks of 256 weights, and rows of 576 are not a multiple of that."
    )
    packed = linear.pack(torch.zeros(4, 8))
    with pytest.raises(ValueError, match=r"x is torch.float32 \[2, 9\]; it must be fp32, bf16 or fp16 \[..., 8\]"):
        packed.apply(torch.zeros(2, 9))
    with pytest.raises(ValueError, match=r"bias has shape \[3\]; a weight of 4 rows needs \[4\]"):
        packed.apply(torch.zeros(2, 8), torch.zeros(3))
    with pytest.raises(ValueError, match=r"out has 3 rows and x has 2"):
        packed.apply(torch.zeros(2, 8), out=torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"an id is outside \[0, 4\): the ids go from 1 to 4"):
        packed.look_up(torch.tensor([1, 4]))
    with pytest.raises(ValueError, match=r"not a multiple of the group size 64"):
        linear.quantise(torch.zeros(2, 96), 8, 64)


def test_memory_is_given_back_when_the_last_weight_of_a_chunk_goes() -> None:
    def resident_bytes() -> int:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident_bytes()
    arena = linear.Arena(chunk_bytes=4 << 20)
    packed = [linear.pack(torch.ones(1024, 8192), arena=arena) for _ in range(4)]  # 32 MiB each
    assert resident_bytes() - before > 100 << 20
    del packed, arena
    assert resident_bytes() - before < 40 << 20


def test_an_arena_keeps_so_many_spare_chunks_and_hands_them_out_zeroed() -> None:
    arena, size = linear.Arena(linear.HUGE_PAGE_BYTES, most_spare=2), linear.HUGE_PAGE_BYTES
    taken = [arena.take(size) for _ in range(4)]
    left = [chunk.memory for chunk, _ in taken[:3]]  # held, or its addresses could be given to others
    for _, address in taken:
        ctypes.memset(address, 255, size)
    del taken[:3]  # the arena itself holds its last chunk
    again = [arena.take(size) for _ in range(3)]
    assert [any(chunk.memory is each for each in left) for chunk, _ in again] == [True, True, False]
    assert all(ctypes.string_at(address, size) == bytes(size) for _, address in again)


def test_mirrors_are_as_large_as_the_structures(runtime: Runtime) -> None:
    assert ctypes.sizeof(LinearArgs) == runtime.library.dll.hr_sizeof_linear_args()
    assert ctypes.sizeof(linear.EmbedArgs) == runtime.library.dll.hr_sizeof_embed_args()
    assert ctypes.sizeof(linear.PackArgs) == runtime.library.dll.hr_sizeof_pack_args()
    assert ctypes.sizeof(Step) == runtime.library.dll.hr_sizeof_step()


def test_the_limits_of_every_level_are_measured(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    def once(run: Callable[[], object], seconds: float) -> list[float]:
        run()
        return [1.0]

    monkeypatch.setattr(limits, "samples_of", once)
    monkeypatch.setattr(limits, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(limits, "ROUNDS", 1000)
    found = limits.limits(runtime)
    assert found["read_gigabytes_per_s"] > 0
    assert found["fp32 multiply-add gigaflops"] > 0
