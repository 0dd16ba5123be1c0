"""The CPU's row ops against torch in float64, to stated bounds."""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

import pytest
import test_cpu_attention
import torch
import torch.nn.functional as F
from cpu_pools import many_threads_ops, two_threads_ops  # noqa: F401
from test_cpu_attention import EPSILON, FLOAT_TYPES
from thinned import every

from headrace import kernels
from headrace.kernels.cpu import build
from headrace.kernels.cpu.linear.linear import Runtime
from headrace.kernels.cpu.ops import CpuOps
from headrace.kernels.cpu.runtime.threads import Step, ThreadPool
from headrace.kernels.reference import rows as reference
from headrace.kernels.reference.attention import PagedBatch

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))
KINDS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "silu_to_7", "silu_to_16", "silu_below_10", "normal_cdf")


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("size", [1, 7, 64, 577])
@pytest.mark.parametrize("with_residual", [False, True])
def test_norms(ops: CpuOps, dtype: torch.dtype, size: int, with_residual: bool) -> None:
    generator = torch.Generator().manual_seed(size)
    x, residual = (torch.randn(5, 3, size, generator=generator) * 3 + 1).to(dtype), None
    if with_residual:
        residual = torch.randn(5, 3, size, generator=generator).to(dtype)
    weight, bias = torch.randn(2, size, generator=generator).unbind(0)
    total = x if residual is None else x + residual
    for found, wanted in (
        (ops.rms_norm(x, residual, weight, 1e-5), F.rms_norm(total.double(), (size,), weight.double(), 1e-5)),
        (
            ops.layer_norm(x, residual, weight, bias, 1e-5),
            F.layer_norm(total.double(), (size,), weight.double(), bias.double(), 1e-5),
        ),
        (ops.layer_norm(x, residual, None, None, 1e-5), F.layer_norm(total.double(), (size,), None, None, 1e-5)),
    ):
        normed, summed = found
        assert torch.equal(summed, total)
        bound = EPSILON[dtype] * 1.01 * wanted.abs() + 3e-6 * (1 + wanted.abs().max())
        assert ((normed.double() - wanted).abs() <= bound).all()


@pytest.mark.parametrize("dtype", every(2, FLOAT_TYPES))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [3, 16, 101])
def test_activations(ops: CpuOps, dtype: torch.dtype, kind: str, size: int) -> None:
    x = torch.cat((torch.linspace(-100, 100, 2 * size), torch.linspace(-6, 6, 2 * size))).view(2, 2 * size).to(dtype)
    # 1 + erf and the like lose what is small beside one, so the error goes by the size of x.
    up = x[:, size:].double().abs()
    for found, wanted, size_of in (
        (ops.activate(x, kind), reference.activate(x.double(), kind), x.double().abs()),
        (
            ops.activate_and_multiply(x, kind),
            reference.activate_and_multiply(x.double(), kind),
            x[:, :size].double().abs() * up,
        ),
    ):
        bound = EPSILON[dtype] * 1.01 * wanted.abs() + 4e-7 * (1 + size_of)
        assert ((found.double() - wanted).abs() <= bound).all()


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("half", [8, 5])
def test_rotary_leaves_the_rest_of_a_head_alone(ops: CpuOps, dtype: torch.dtype, half: int) -> None:
    generator = torch.Generator().manual_seed(3)
    query, key = (
        torch.randn(6, 5, 24, generator=generator).to(dtype),
        torch.randn(6, 2, 24, generator=generator).to(dtype),
    )
    angles = torch.rand(6, half, generator=generator) * 7
    found = ops.rotary(query, key, angles.cos(), angles.sin())
    wanted = reference.rotary(query.double(), key.double(), angles.cos(), angles.sin())
    for a, b, before in zip(found, wanted, (query, key), strict=True):
        assert ((a.double() - b).abs() <= EPSILON[dtype] * 1.01 * b.abs() + 1e-6).all()
        assert torch.equal(a[..., 2 * half :], before[..., 2 * half :])


@pytest.mark.parametrize("cache_dtype", FLOAT_TYPES)
def test_write_cache_touches_its_slots_alone(ops: CpuOps, cache_dtype: torch.dtype) -> None:
    key, value = torch.randn(4, 2, 2, 16).unbind(1)
    caches = torch.full((2, 5, 2, 8, 16), 7.0, dtype=cache_dtype)
    wanted = caches.clone()
    slots = torch.tensor([3, 39, 8, 16])
    batch = PagedBatch(torch.tensor([0, 4]), torch.tensor([4]), torch.zeros(1, 1), slots, 8)
    reference.write_cache(key.to(cache_dtype), value.to(cache_dtype), wanted[0], wanted[1], batch)
    ops.write_cache(key, value, caches[0], caches[1], batch)
    assert torch.equal(caches, wanted)


@pytest.mark.parametrize(
    "level", ["avx2", *(pytest.param(level, marks=pytest.mark.system) for level in ("avx512", "portable"))]
)
def test_every_instruction_set_level_computes_the_same_things(level: str) -> None:
    try:
        library = build.build(level)
    except build.BuildError as error:
        pytest.skip(str(error))
    ops = CpuOps(Runtime(library, ThreadPool(library, 2)))
    for heads in ((9, 3, 64), (5, 1, 72), (7, 7, 8)):
        for params in test_cpu_attention.PARAMS.values():
            test_cpu_attention.test_fp32_attention_is_exact_to_rounding(ops, heads, params)
    for params in test_cpu_attention.PARAMS.values():
        test_cpu_attention.test_bf16_attention_is_within_its_roundings(ops, torch.bfloat16, params)
    test_cpu_attention.test_fp16_cache(ops)
    test_cpu_attention.test_quantised_caches(ops, torch.int8, per="row")
    for one_byte, count in ((torch.float8_e4m3fn, 127), (torch.float8_e5m2, 124)):
        test_cpu_attention.test_quantised_caches(ops, one_byte, per="head")
        test_cpu_attention.test_writes_in_floats_of_8_bits_round_as_torch_does_and_saturate(ops, one_byte, count)
    for one_byte in test_cpu_attention.SCALED:
        test_cpu_attention.test_every_number_of_one_byte_is_read_exactly(ops, one_byte)
    for dtype in FLOAT_TYPES:
        test_norms(ops, dtype, 577, with_residual=True)
        test_rotary_leaves_the_rest_of_a_head_alone(ops, dtype, 5)
        test_write_cache_touches_its_slots_alone(ops, dtype)
        test_cpu_attention.test_a_cache_in_groups_has_the_rows_in_another_order(ops, dtype)
        for kind in KINDS:
            test_activations(ops, dtype, kind, 101)


def test_support_records_say_why_not() -> None:
    cpu: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.bfloat16}
    attention = kernels.ops()["paged_attention"]
    assert attention.choose(**cpu, head_dim=64).name == "cpu_native"
    assert "steps of 8, not 20" in attention.choose(**cpu, head_dim=20).refused[0][1]
    assert "not 520" in attention.choose(**cpu, head_dim=520).refused[0][1]
    norm = kernels.ops()["rms_norm"]
    assert norm.choose(**cpu, size=576).name == "cpu_native"
    assert "up to 32768 values, not 40000" in norm.choose(**cpu, size=40000).refused[0][1]
    with pytest.raises(ValueError, match="not 40000"):
        norm.versions[0].function(torch.zeros(1, 40000), None, torch.ones(40000), 1e-6)
    assert "not on meta" in norm.choose(device=torch.device("meta"), dtype=torch.float32).refused[0][1]
    assert "not in torch.float64" in norm.choose(device=torch.device("cpu"), dtype=torch.float64).refused[0][1]


def test_mirrors_have_the_size_of_the_structures(ops: CpuOps) -> None:
    names = ("attention", "elementwise", "experts", "program", "recurrent", "sampling")
    rooms = [importlib.import_module(f"headrace.kernels.cpu.{room}.args") for room in names]
    mirrors = {each for room in rooms for each in vars(room).values() if isinstance(each, type(ctypes.Structure))}
    assert len(mirrors) >= 22
    for mirror in (*mirrors, Step):
        assert ctypes.sizeof(mirror) == ops.runtime.library.dll.hr_size_of(mirror.__name__.encode()), mirror.__name__
