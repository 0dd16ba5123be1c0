"""Routing and experts on the CPU kernels: products are linear layers' to the bit, whatever else is in the batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from cpu_pools import ManyThreads
from test_cpu_linear import random_rows
from thinned import every
from torch import Tensor

from headrace.kernels import ops
from headrace.kernels.cpu import build
from headrace.kernels.cpu.experts import moe
from headrace.kernels.cpu.experts.moe import PackedExperts, pack_experts, route_experts, why_no_experts
from headrace.kernels.cpu.linear.linear import WEIGHT_TYPES, PackedLinear, Runtime, pack, runtime
from headrace.kernels.cpu.program.parts import Norm
from headrace.kernels.cpu.program.program import Builder
from headrace.kernels.cpu.program.run import ProgramStep

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))

FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@pytest.fixture(
    scope="module",
    params=[
        *("native", "avx2", "portable"),
        *(pytest.param(level, marks=pytest.mark.system) for level in ("avx512_bf16", "avx512")),  # as in linear layers
    ],
)
def used(request: pytest.FixtureRequest) -> Runtime:
    if request.param != "native":
        try:
            build._level(request.param)
        except build.BuildError as error:
            pytest.skip(str(error))
    return runtime(request.param, 2)


@pytest.fixture(scope="module")
def other_threads() -> Iterator[list[Runtime]]:
    """The native library on one thread, three and five."""
    runtime()
    library = build.build()
    pools = [ManyThreads(library, count) for count in (1, 3, 5)]
    yield [Runtime(library, pool) for pool in pools]
    for pool in pools:
        library.dll.hr_pool_destroy(pool.handle)


def packed_matrix(
    type_name: str, rows: int, columns: int, seed: int, used: Runtime, gated: bool = False
) -> PackedLinear:
    if type_name in FLOATS:
        generator = torch.Generator().manual_seed(seed)
        weight = (torch.randn(rows, columns, generator=generator) * columns**-0.5).to(FLOATS[type_name])
        return pack(weight, gated=gated, runtime_=used)
    return pack((type_name, random_rows(type_name, rows, columns, seed)), gated=gated, runtime_=used)


def make_experts(types: tuple[str, str], count: int, hidden: int, inner: int, used: Runtime) -> PackedExperts:
    return PackedExperts(
        tuple(packed_matrix(types[0], 2 * inner, hidden, i, used, gated=True) for i in range(count)),
        tuple(packed_matrix(types[1], hidden, inner, 100 + i, used) for i in range(count)),
        "silu",
    )


def routed(num_rows: int, num_experts: int, top_k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    logits = torch.randn(num_rows, num_experts, generator=torch.Generator().manual_seed(seed))
    ids, weights = ops()["route_experts"].reference(logits, top_k=top_k, scoring="softmax", renormalise=True)
    return ids, weights


def by_linear_layers(experts: PackedExperts, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of single linear layers' results in float64, and the sum of their magnitudes: [num_rows, hidden]."""
    total, size = torch.zeros(2, *x.shape, dtype=torch.float64).unbind(0)
    for row, (chosen, shares) in enumerate(zip(ids.tolist(), weights.double().tolist(), strict=True)):
        for expert, share in zip(chosen, shares, strict=True):
            if expert >= 0:
                inner = experts.gate_up[expert].apply(
                    x[row : row + 1], activation=experts.activation, out_dtype=experts.inner_dtype
                )
                part = experts.down[expert].apply(inner, out_dtype=torch.float32)[0].double() * share
                total[row] += part
                size[row] += part.abs()
    return total, size


def assert_linear_layers(experts: PackedExperts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    found = experts.apply(x, ids, weights)
    wanted, size = by_linear_layers(experts, x, ids, weights)
    assert found.dtype == x.dtype
    rounding = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}[x.dtype]
    assert ((found.double() - wanted).abs() <= 2**-22 * size + rounding * 1.01 * wanted.abs()).all()
    return found


@pytest.mark.parametrize(
    "types",
    every(3, [((name, name),) for name in WEIGHT_TYPES] + [(("Q4_K", "Q6_K"),), (("F16", "Q8_0"),)]),
    ids=str,
)
def test_every_type_multiplies_as_its_linear_layers_do(used: Runtime, types: tuple[str, str]) -> None:
    experts = make_experts(types, 5, 256, 256, used)
    for dtype, num_rows in ((torch.float32, 1), (torch.bfloat16, 7), (torch.float32, 41)):
        x = torch.randn(num_rows, 256, generator=torch.Generator().manual_seed(num_rows)).to(dtype)
        whole = assert_linear_layers(experts, x, *routed(num_rows, 5, 2))
        ids, weights = routed(num_rows, 5, 2)
        for row in (0, num_rows // 2, num_rows - 1):
            one = slice(row, row + 1)
            assert torch.equal(experts.apply(x[one], ids[one], weights[one]), whole[one]), "alone it is another result"


@pytest.mark.parametrize("type_name", every(2, list(FLOATS)))
@pytest.mark.parametrize(
    ("num_experts", "top_k", "hidden", "inner"), [(4, 4, 20, 7), (3, 1, 33, 17), (128, 8, 32, 40), (1, 1, 5, 3)]
)
def test_odd_sizes_all_experts_and_many_experts(
    used: Runtime, type_name: str, num_experts: int, top_k: int, hidden: int, inner: int
) -> None:
    experts = make_experts((type_name, type_name), num_experts, hidden, inner, used)
    for num_rows in (1, 16, 17, 30):
        x = torch.randn(num_rows, hidden, generator=torch.Generator().manual_seed(num_rows))
        assert_linear_layers(experts, x, *routed(num_rows, num_experts, top_k))


@pytest.mark.parametrize(("hidden", "inner"), [(64, 96), (33, 17)])
def test_biases_and_clamped_gates_are_the_references(used: Runtime, hidden: int, inner: int) -> None:
    """gpt-oss's experts. Values of some tens meet the clamps."""
    generator = torch.Generator().manual_seed(hidden)
    gate_up, down = (
        torch.randn(5, 2 * inner, hidden, generator=generator),
        torch.randn(5, hidden, inner, generator=generator),
    )
    biases = torch.randn(5, 2 * inner, generator=generator), torch.randn(5, hidden, generator=generator)
    x = torch.randn(19, hidden, generator=generator)
    ids, weights = routed(19, 5, 2)
    wanted = ops()["experts"].reference(gate_up, down, "clamped_silu", biases).apply(x, ids, weights)
    found = pack_experts(gate_up, down, "clamped_silu", biases, used=used).apply(x, ids, weights)
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-5)
    with pytest.raises(ValueError, match=rf"biases of experts are contiguous float32 \[5, {2 * inner}\]"):
        pack_experts(gate_up, down, "clamped_silu", (biases[1], biases[0]), used=used)


@pytest.mark.parametrize("types", [("BF16", "BF16"), ("F32", "F32"), ("Q4_0", "Q8_0")], ids=str)
def test_results_do_not_depend_on_batch_threads_or_passes(
    types: tuple[str, str], other_threads: list[Runtime], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many rows of one expert, too, which are taken in several blocks and passes."""
    ids, weights = routed(150, 6, 3)
    ids[:110] = torch.tensor([4, 1, -1], dtype=torch.int32)
    x = torch.randn(150, 64, generator=torch.Generator().manual_seed(5))
    whole = assert_linear_layers(make_experts(types, 6, 64, 96, runtime(num_threads=2)), x, ids, weights)
    for used in other_threads:
        experts = make_experts(types, 6, 64, 96, used)
        assert torch.equal(experts.apply(x, ids, weights), whole)
        for some in (slice(3, 4), slice(100, 112), slice(90, 150)):
            assert torch.equal(experts.apply(x[some], ids[some], weights[some]), whole[some])
    monkeypatch.setattr(moe, "PASS_BYTES", 0)
    for used, least in zip(other_threads, (1, 7, 100), strict=True):
        monkeypatch.setattr(moe, "LEAST_PASS_ROWS", least)
        assert torch.equal(make_experts(types, 6, 64, 96, used).apply(x, ids, weights), whole)


def test_a_block_longer_than_the_cache_and_a_k_that_is_cut(other_threads: list[Runtime]) -> None:
    experts = make_experts(("F32", "F32"), 2, 2304, 36, other_threads[1])
    ids, weights = routed(90, 2, 2)
    ids[::3, 1] = -1
    x = torch.randn(90, 2304, generator=torch.Generator().manual_seed(5))
    assert_linear_layers(experts, x, ids, weights)


def test_experts_that_nobody_chose_are_not_read() -> None:
    nothing = torch.full((8, 16), torch.nan)
    stacks = torch.randn(4, 8, 16), torch.randn(4, 16, 4)
    stacks[0][1], stacks[1][1] = nothing, torch.nan
    stacks[0][3], stacks[1][3] = nothing, torch.nan
    experts = pack_experts(*stacks, "gelu_tanh")
    assert isinstance(experts, PackedExperts)
    x, weights = torch.randn(30, 16), torch.rand(30, 2)
    ids = torch.tensor([[2, 0]] * 29 + [[-1, 9]], dtype=torch.int32)
    assert_linear_layers(experts, x[:29], ids[:29], weights[:29])
    experts.experts_read.zero_()
    found = experts.apply(x, ids, weights)
    assert found.isfinite().all()
    assert not found[29].any(), "numbers of no expert add nothing"
    assert experts.experts_read.item() == 2
    assert experts.apply(x[:0], ids[:0], weights[:0]).shape == (0, 16)


def arrays_of(token_ids: list[int]) -> ProgramStep:
    count = len(token_ids)
    return ProgramStep(
        token_ids=np.array(token_ids, np.int32),
        positions=np.zeros(count, np.int32),
        slot_mapping=np.full(count, -1, np.int64),
        query_start=np.arange(count + 1, dtype=np.int32),
        seq_lens=np.ones(count, np.int32),
        block_tables=np.zeros((count, 1), np.int32),
        logits_rows=np.zeros(0, np.int32),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_program_routes_and_adds_experts_and_a_gated_shared_one(dtype: torch.dtype) -> None:
    """In steps of few rows, where threads norm for themselves, and of many."""
    torch.manual_seed(0)
    used, hidden, inner = runtime(num_threads=2), 48, 32
    name = "BF16" if dtype == torch.bfloat16 else "F32"
    experts = make_experts((name, name), 7, hidden, inner, used)
    table, norm_weight, bias = torch.randn(50, hidden), torch.rand(hidden), torch.rand(7) * 0.1
    factors = 0.5 + torch.rand(7)
    router = packed_matrix(name, 7, hidden, 1, used)
    shared, shared_router = make_experts((name, name), 1, hidden, 24, used), packed_matrix(name, 1, hidden, 3, used)

    builder = Builder(used, max_tokens=40, max_logits=1)
    stream, normed = builder.buffer(hidden, torch.float32), builder.buffer(hidden, dtype, own=True)
    logits, ids = builder.buffer(7, torch.float32), builder.buffer(3, torch.int32)
    weights, delta = builder.buffer(3, torch.float32), builder.buffer(hidden, torch.float32)
    gate, only, share = (builder.buffer(1, each) for each in (torch.float32, torch.int32, torch.float32))
    builder.embedding(table, stream)
    builder.norm(stream, normed, Norm("rms", 1e-6, norm_weight))
    builder.linear(router, normed, logits)
    builder.route(logits, ids, weights, scoring="sigmoid", renormalise=True, scale=1.5, bias=bias, factors=factors)
    builder.experts(experts, normed, ids, weights, stream, add=True)
    builder.linear(shared_router, normed, gate)
    builder.route(gate, only, share, scoring="sigmoid", renormalise=False)
    builder.experts(shared, normed, only, share, stream, add=True)
    builder.norm(stream, normed, Norm("rms", 1e-6, norm_weight))
    builder.experts(experts, normed, ids, weights, delta)
    builder.add(delta, stream)
    program = builder.build(stream)

    whole = None
    for token_ids in ([(7 * i) % 50 for i in range(40)], [0, 7, 14], [0]):
        experts.experts_read.zero_()
        found = program.run(arrays_of(token_ids)).clone()
        x = table[token_ids]
        normal = ops()["rms_norm"].reference(x, None, norm_weight, 1e-6)[0].to(dtype)
        chosen, shares = route_experts(
            router.apply(normal, out_dtype=torch.float32), top_k=3, scoring="sigmoid", renormalise=True, scale=1.5,
            bias=bias,
        )  # fmt: skip
        assert torch.equal(ids.tensor[: len(x)], chosen)
        shares = shares * factors[chosen]
        assert experts.experts_read.item() == 2 * len(chosen.unique())
        expected = x + by_linear_layers(experts, normal, chosen, shares)[0].float()
        own = shared_router.apply(normal, out_dtype=torch.float32).sigmoid()
        expected += by_linear_layers(shared, normal, torch.zeros_like(own, dtype=torch.int32), own)[0].float()
        again = ops()["rms_norm"].reference(expected, None, norm_weight, 1e-6)[0].to(dtype)
        expected += by_linear_layers(experts, again, chosen, shares)[0].float()
        bound = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(found, expected, rtol=bound, atol=bound)
        whole = found if whole is None else whole
        assert torch.equal(found, whole[: len(found)]), "a row alone is another result"


def test_experts_may_be_scored_by_the_root_of_softplus() -> None:
    logits, bias = torch.linspace(-30, 40, 60).view(5, 12), torch.rand(12)
    given: Any = {"top_k": 3, "scoring": "sqrtsoftplus", "renormalise": True, "scale": 1.5, "bias": bias}
    ids, weights = route_experts(logits, **given)
    wanted_ids, wanted = ops()["route_experts"].reference(logits, **given)
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, wanted)
    scores = torch.log1p(logits.double().exp()).sqrt().gather(1, ids.long())
    torch.testing.assert_close(weights.double(), 1.5 * scores / scores.sum(1, keepdim=True), rtol=1e-5, atol=1e-6)


def test_what_does_not_fit_is_refused_in_a_sentence() -> None:
    assert why_no_experts(["Q4_K", "Q4_K", "Q6_K"], 512, 256, "silu") == ""
    assert "Q4_K and Q5_K" in why_no_experts(["Q4_K", "Q5_K", "Q6_K"], 512, 256, "silu")
    assert "rows of 200 are not a multiple" in why_no_experts(["Q8_0", "Q8_0", "Q8_0"], 256, 200, "silu")
    assert "swish" in why_no_experts(["F32", "F32", "F32"], 256, 200, "swish")
    used = runtime()
    experts = make_experts(("F32", "F32"), 2, 16, 8, used)
    with pytest.raises(ValueError, match="no set of experts"):
        PackedExperts(experts.gate_up, experts.down[:1], "silu")
    with pytest.raises(ValueError, match="one type and shape"):
        PackedExperts(experts.down, experts.down, "silu")
    with pytest.raises(ValueError, match="come back"):
        PackedExperts(experts.gate_up, tuple(packed_matrix("F32", 16, 9, i, used) for i in range(2)), "silu")
    with pytest.raises(ValueError, match="5 of 4 experts"):
        route_experts(torch.zeros(2, 4), top_k=5, scoring="softmax", renormalise=True)
    with pytest.raises(ValueError, match="16 values"):
        experts.apply(torch.zeros(3, 17), torch.zeros(3, 1, dtype=torch.int32), torch.zeros(3, 1))
    builder = Builder(used, max_tokens=4, max_logits=1)
    x, ids = builder.buffer(16, torch.float32), builder.buffer(1, torch.int32)
    with pytest.raises(ValueError, match="elsewhere than in their input"):
        builder.experts(experts, x, ids, builder.buffer(1, torch.float32), x)
