"""Weights with group scales on the CPU kernels: products within their bounds, nothing lost in packing, and results that
do not depend on the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_cpu_linear import UNIT, as_two_bytes, random_x
from thinned import every
from torch import Tensor

from headrace.kernels.cpu import build, units
from headrace.kernels.cpu.linear import linear
from headrace.kernels.cpu.linear.linear import Runtime
from headrace.kernels.grouped import FP4_E2M1, GroupedWeight, InputRounding, Kind, joined

LEVELS = [
    "native",
    *(pytest.param(level, marks=pytest.mark.system) for level in ("avx512_bf16", "avx512", "avx2", "portable")),
]
SHAPES = [
    (1, 1, 32, 32),
    (3, 17, 96, 96),
    (17, 192, 512, 128),
    (9, 70, 256, 64),
    (41, 33, 192, 192),
    (70, 64, 320, 160),
]
"""Rows of x, n, k and group."""


@pytest.fixture(scope="module", params=LEVELS)
def runtime(request: pytest.FixtureRequest) -> Runtime:
    if reason := build.why_not(request.param, units.GROUPED):
        pytest.skip(reason)
    return linear.runtime(request.param, 2)


def random_weight(
    kind: Kind,
    n: int,
    k: int,
    group: int,
    *,
    dtype: torch.dtype = torch.float16,
    zeros: bool = False,
    ordered: bool = False,
) -> GroupedWeight:
    random = torch.Generator().manual_seed(n * 7919 + k)
    bits = 4 if kind in ("int4", "float4") else 8
    codes = torch.randint(0, 256, (n, k * bits // 8), dtype=torch.uint8, generator=random)
    if kind == "e4m3":
        codes = torch.where((codes & 0x7F) == 0x7F, codes - 1, codes)  # those two are NaN
    scales = (torch.randn(n, k // group, generator=random) * 0.1).to(dtype)
    zero = torch.randint(0, 1 << bits, (n, k // group), generator=random).to(torch.float16)
    order = torch.randperm(k, generator=random).to(torch.int32)
    table = FP4_E2M1 if kind == "float4" else ()
    return GroupedWeight(kind, codes, scales, group, zero if zeros else None, order if ordered else None, table)


def shift_of(weight: GroupedWeight) -> Tensor:
    """[n, k] float64: what a zero point stands for."""
    if weight.zeros is None:
        return torch.zeros(weight.shape).double()
    shift = (weight.scales.double() * weight.zeros.double()).abs().repeat_interleave(weight.group, 1)
    return shift if weight.order is None else shift[:, torch.argsort(weight.order)]


CASES = [("int4", False), ("int4", True), ("int8", False), ("int8", True), ("float4", False), ("e4m3", False)]


@pytest.mark.parametrize(("kind", "zeros"), CASES)
def test_products_are_within_the_stated_bounds(runtime: Runtime, kind: Kind, zeros: bool) -> None:
    for index, (rows, n, k, group) in enumerate(SHAPES):
        dtype = (torch.float32, torch.float16, torch.bfloat16)[index % 3]
        weight = random_weight(kind, n, k, group, dtype=dtype, zeros=zeros, ordered=index % 2 == 1)
        packed, exact_weight, x = linear.pack(weight, runtime_=runtime), weight.floats().double(), random_x(rows, k)
        exact = x.double() @ exact_weight.T
        got = packed.apply(x).double()
        if kind in ("float4", "e4m3"):
            bound = (k + 4) * UNIT * (x.double().abs() @ exact_weight.abs().T)
        else:
            in_order = x if weight.order is None else x[:, weight.order.long()]
            _, step = as_two_bytes(in_order)
            values = exact_weight if weight.order is None else exact_weight[:, weight.order.long()]
            shift = shift_of(weight) if weight.order is None else shift_of(weight)[:, weight.order.long()]
            bound = step @ values.abs().T
            bound += (k / 8 + 8) * UNIT * ((in_order.double().abs() + step) @ (values.abs() + shift).T)
        assert ((got - exact).abs() <= bound + 1e-30).all(), (kind, rows, n, k, group)


ROUNDINGS = [InputRounding(), InputRounding(shifted=True), InputRounding(0.02), InputRounding(0.03, -17)]
ROUNDINGS.append(InputRounding(group=64))
INTEGERS = [case for case in CASES if case[0] in ("int4", "int8")]


@pytest.mark.parametrize("inputs", ROUNDINGS)
@pytest.mark.parametrize(("kind", "zeros"), INTEGERS)
def test_inputs_that_become_int8_are_multiplied_exactly(
    runtime: Runtime, kind: Kind, zeros: bool, inputs: InputRounding
) -> None:
    for index, (rows, n, k, group) in enumerate(SHAPES):
        weight = random_weight(
            kind, n, k, group, dtype=torch.float32, zeros=zeros, ordered=index % 2 == 1 and not inputs.group
        )
        x = random_x(rows, k) + 0.3
        inputs = replace(inputs, group=group) if inputs.group else inputs
        got = linear.pack(replace(weight, inputs=inputs), runtime_=runtime).apply(x).double()
        q, scale, zero = (each.double() for each in inputs.of(x))
        exact_weight, met = weight.floats().double(), (q - zero) * scale
        bound = (k / group + 6) * UNIT * (met.abs() + zero.abs() * scale) @ (exact_weight.abs() + shift_of(weight)).T
        assert ((got - met @ exact_weight.T).abs() <= bound + 1e-30).all(), (rows, n, k, group)


@pytest.mark.parametrize("value", every(2, [float("nan"), float("inf"), -float("inf")]))
@pytest.mark.parametrize("inputs", [None, *ROUNDINGS])
@pytest.mark.parametrize(("kind", "zeros"), CASES)
def test_no_code_hides_an_input_that_is_not_finite(
    runtime: Runtime, kind: Kind, zeros: bool, inputs: InputRounding | None, value: float
) -> None:
    for index, at in enumerate((0, 31, 32, 127)):
        weight = random_weight(kind, 70, 128, 64, dtype=torch.float32, zeros=zeros, ordered=index == 1 and not inputs)
        rounds = inputs if kind in ("int4", "int8") else None
        x = random_x(3, 128)
        whole = linear.pack(replace(weight, inputs=rounds), runtime_=runtime).apply(x)
        x[1, at] = value
        got = linear.pack(replace(weight, inputs=rounds), runtime_=runtime).apply(x)
        assert not got[1].isfinite().any(), at
        assert torch.equal(got[::2], whole[::2])
        if rounds is not None:
            met = rounds.rounded(x)
            assert met[1, at].isnan()
            assert met[::2].isfinite().all()


def test_groups_of_inputs_are_those_of_weights_in_order() -> None:
    for group, is_ordered in ((32, False), (64, True)):
        with pytest.raises(ValueError, match=f"groups of {group} inputs, and of 64 weights in their order"):
            replace(random_weight("int8", 32, 128, 64, ordered=is_ordered), inputs=InputRounding(group=group))
    with pytest.raises(ValueError, match="scales of their own, and no zero points"):
        InputRounding(group=64, shifted=True)


@pytest.mark.parametrize(("kind", "zeros"), INTEGERS)
def test_a_row_of_rounded_inputs_gets_the_same_bits_whatever_the_batch(
    runtime: Runtime, kind: Kind, zeros: bool
) -> None:
    for inputs in (*ROUNDINGS[:2], ROUNDINGS[-1]):
        weight = replace(random_weight(kind, 96, 256, 64, zeros=zeros), inputs=inputs)
        packed, x = linear.pack(weight, runtime_=runtime), random_x(40, 256)
        singly = torch.cat([packed.apply(x[row : row + 1]) for row in range(40)])
        for rows in (2, 5, 13, 17, 40):
            assert torch.equal(packed.apply(x[40 - rows :]), singly[40 - rows :]), rows
        assert not packed.apply(torch.zeros(1, 256)).any(), "no step can be had of zeros"


@pytest.mark.parametrize("group", [16, 32])
def test_groups_of_half_a_block_are_for_floats(runtime: Runtime, group: int) -> None:
    weight = random_weight("float4", 40, 96, group, dtype=torch.float32)
    assert torch.equal(linear.pack(weight, runtime_=runtime).unpack(), weight.floats())
    x = random_x(5, 96)
    exact = x.double() @ weight.floats().double().T
    assert (linear.pack(weight, runtime_=runtime).apply(x).double() - exact).abs().max() < 1e-4
    with pytest.raises(ValueError, match="the kernels take int4 in groups of multiples of 32 weights, not of 16"):
        linear.pack(random_weight("int4", 40, 96, 16), runtime_=runtime)


@pytest.mark.parametrize(("kind", "zeros"), CASES)
def test_packing_loses_nothing_and_takes_little_more_than_the_codes(runtime: Runtime, kind: Kind, zeros: bool) -> None:
    for gated in (False, True):
        weight = random_weight(kind, 192, 768, 128, zeros=zeros, ordered=gated)
        packed = linear.pack(weight, gated=gated, runtime_=runtime)
        assert torch.equal(packed.unpack(), weight.floats())
        assert weight.codes.nbytes <= packed.nbytes <= 1.08 * weight.codes.nbytes


@pytest.mark.parametrize(("kind", "zeros"), CASES)
def test_a_row_gets_the_same_bits_whatever_the_batch(runtime: Runtime, kind: Kind, zeros: bool) -> None:
    packed = linear.pack(random_weight(kind, 96, 256, 64, zeros=zeros), runtime_=runtime)
    x = random_x(40, 256)
    singly = torch.cat([packed.apply(x[row : row + 1]) for row in range(40)])
    for rows in (2, 7, 8, 9, 17, 40):
        assert torch.equal(packed.apply(x[40 - rows :]), singly[40 - rows :]), rows


def test_a_gated_pair_multiplies_its_halves(runtime: Runtime) -> None:
    weight, x = random_weight("int4", 64, 128, 32, zeros=True), random_x(3, 128)
    packed = linear.pack(weight, gated=True, runtime_=runtime)
    exact = linear.reference(x, weight.floats(), gated=True, activation="silu", dtype=torch.float64)
    assert (packed.apply(x, activation="silu").double() - exact).abs().max() < 1e-3 * exact.abs().max()


def test_parts_and_joined_parts_are_those_of_the_whole() -> None:
    whole = random_weight("int4", 48, 256, 64, zeros=True)
    floats = whole.floats()
    upper, lower = (whole.part(slice(first, first + 24), slice(0, 256)) for first in (0, 24))
    assert torch.equal(joined([upper, lower]).floats(), floats)
    assert torch.equal(whole.part(slice(8, 16), slice(64, 192)).floats(), floats[8:16, 64:192])
    assert whole.columns_divide(64, 192)
    assert not whole.columns_divide(32, 64)
    assert not random_weight("int4", 48, 256, 64, ordered=True).columns_divide(64, 192)
    assert not upper.goes_with(random_weight("int4", 48, 256, 64))


@pytest.mark.parametrize(("kind", "zeros"), CASES)
def test_a_part_of_a_row_with_one_scale_keeps_it(kind: Kind, zeros: bool) -> None:
    whole = random_weight(kind, 48, 256, 256, zeros=zeros)
    assert whole.columns_divide(34, 130)
    part = whole.part(slice(8, 16), slice(34, 130))
    assert part.group == 96
    assert torch.equal(part.floats(), whole.floats()[8:16, 34:130])
    padded = whole.blank(48, 320)
    padded.part(slice(0, 48), slice(0, 256)).write(whole)
    assert padded.group == 320
    assert torch.equal(padded.floats()[:, :256], whole.floats())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group": 48}, "groups of 48 do not divide rows of 64"),
        ({"scales": torch.ones(4, 3)}, r"scales are torch.float32 \[4, 3\]; \[4, 64\] in groups of 32 needs \[4, 2\]"),
        ({"order": torch.arange(32)}, r"an order of \[32\] inputs; there are 64"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change: dict[str, object], message: str) -> None:
    parts = {"kind": "int8", "codes": torch.zeros(4, 64, dtype=torch.uint8), "scales": torch.ones(4, 2), "group": 32}
    with pytest.raises(ValueError, match=message):
        GroupedWeight(**(parts | change))  # type: ignore[arg-type]
