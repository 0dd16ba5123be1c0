"""Triton's linear layers with packed weights against their references, and the batch-invariant one."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.executor.gpu.kernels import to_int4, to_int8
from headrace.kernels import ops
from headrace.kernels.reference.quantised import dequantise
from headrace.kernels.reference.quantised import round_tokens as reference_round_tokens
from headrace.kernels.triton import linear

BOUND = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Bounds of the error relative to the sum of the magnitudes of the addends, for rounded weights and results."""


def assert_close(found: Tensor, expected: Tensor, x: Tensor, weight: Tensor) -> None:
    assert found.dtype == expected.dtype == x.dtype
    magnitude = x.double().abs() @ weight.double().abs().t() + 1.0
    assert ((found.double() - expected.double()).abs() / magnitude).max() < BOUND[x.dtype]


def case_int8_and_fp8_weights() -> None:
    for dtype in BOUND:
        for num_rows, shape, num_groups in ((6, (40, 96), 1), (17, (33, 288), 3), (5, (70, 256), 2), (70, (40, 48), 1)):
            x = torch.randn(num_rows, shape[1]).to(dtype)
            scales, bias = torch.rand(shape[0], num_groups) * 0.02, torch.randn(shape[0]).to(dtype)
            codes = torch.randint(-127, 128, shape, dtype=torch.int8)
            packed = linear.linear_int8(codes, scales, bias)
            expected = ops()["linear_int8"].reference(codes, scales, bias)
            assert_close(packed.apply(x), expected.apply(x), x, dequantise(codes, scales))
            assert torch.equal(packed.look_up(torch.tensor([[3, 0]])), expected.look_up(torch.tensor([[3, 0]])))
        weight = (torch.randn(40, 96) * 50).to(torch.float8_e4m3fn)
        scales, x = torch.rand(40, 1) * 0.02, torch.randn(2, 3, 96).to(dtype)
        found = linear.linear_fp8(weight, scales, None).apply(x)
        assert found.shape == (2, 3, 40)
        expected = ops()["linear_fp8"].reference(weight, scales, None).apply(x)
        assert_close(found, expected, x, dequantise(weight, scales))


def case_weights_rounded_as_they_are_loaded() -> None:
    """With float16 scales, and 4-bit zero points that are not whole numbers."""
    weight, x = torch.randn(40, 192) * 0.02, torch.randn(5, 192)
    for dtype in BOUND:
        for group in (32, 64):
            for op, rounded in (("linear_int8", to_int8(weight, group)), ("linear_int4", to_int4(weight, group))):
                arguments = (*rounded, None)
                found, expected = getattr(linear, op)(*arguments), ops()[op].reference(*arguments)
                assert_close(found.apply(x.to(dtype)), expected.apply(x.to(dtype)), x.to(dtype), dequantise(*rounded))
                bits_of_scales = 16 if op == "linear_int8" else 32
                bits = 8 if op == "linear_int8" else 4
                assert found.nbytes >= 40 * 192 * (bits + bits_of_scales / group) / 8
                ids = torch.tensor([3, 0])
                assert (found.look_up(ids) - expected.look_up(ids)).abs().max() < 1e-6


def case_int4_weights_in_groups() -> None:
    for dtype in BOUND:
        for num_rows, shape, group in ((6, (40, 64), 32), (18, (33, 256), 128), (5, (20, 192), 64), (3, (24, 384), 96)):
            codes = torch.randint(0, 256, (shape[0], shape[1] // 2), dtype=torch.uint8)
            scales = torch.rand(shape[0], shape[1] // group) * 0.1
            zeros = torch.randint(0, 16, scales.shape, dtype=torch.uint8)
            x, bias = torch.randn(num_rows, shape[1]).to(dtype), torch.randn(shape[0]).to(dtype)
            for zero in (None, zeros):
                packed = linear.linear_int4(codes, scales, zero, bias)
                expected = ops()["linear_int4"].reference(codes, scales, zero, bias)
                assert_close(packed.apply(x), expected.apply(x), x, dequantise(codes, scales, zero))
                ids = torch.tensor([3, 0])
                assert torch.allclose(packed.look_up(ids), expected.look_up(ids), atol=1e-6)


def case_inputs_are_rounded_to_e4m3_as_the_reference_does() -> None:
    for dtype in BOUND:
        x = (torch.randn(5, 70) * 3).to(dtype)
        x[2] = 0
        codes, scales = linear.round_tokens(x)
        expected, expected_scales = reference_round_tokens(x)
        assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(scales, expected_scales)


def case_scaled_mm_is_the_reference_where_torch_has_it() -> None:
    weight = (torch.randn(48, 64) * 50).to(torch.float8_e4m3fn)
    scales, bias, x = torch.rand(48, 1) * 0.02, torch.randn(48).bfloat16(), torch.randn(3, 5, 64).bfloat16()
    found = linear.linear_fp8_dynamic(weight, scales, bias).apply(x)
    expected = ops()["linear_fp8_dynamic"].reference(weight, scales, bias).apply(x)
    assert found.shape == (3, 5, 48)
    assert_close(found, expected, x, dequantise(weight, scales))


def case_a_token_is_multiplied_the_same_in_every_batch() -> None:
    weight, bias = torch.randn(70, 100), torch.randn(70)
    for dtype in BOUND:
        layer = linear.linear(weight.to(dtype), bias.to(dtype), batch_invariant=True)
        x = torch.randn(80, 100).to(dtype)
        whole = layer.apply(x)
        assert_close(whole, ops()["linear"].reference(weight.to(dtype), bias.to(dtype)).apply(x), x, weight)
        assert torch.equal(layer.apply(x[37:38]), whole[37:38])
        assert torch.equal(layer.apply(x[3:40]), whole[3:40])
        fixed = linear.TritonLinear(torch.randint(-127, 128, (70, 96), dtype=torch.int8), torch.rand(70, 1), None,
                                    batch_invariant=True)  # fmt: skip
        assert torch.equal(fixed.apply(x[:, :96])[5:6], fixed.apply(x[5:6, :96]))
