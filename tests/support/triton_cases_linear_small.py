"""The kernel for few rows, alone and with fused ops, and products whose inputs are divided among programs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from triton_cases_linear import BOUND, assert_close

from headrace.executor.gpu.kernels import to_fp8, to_int4, to_int8
from headrace.kernels import ops
from headrace.kernels.reference.quantised import dequantise
from headrace.kernels.triton import configs, linear, linear_small
from headrace.kernels.triton.configs import SmallTiles

TYPES = ("linear", "linear_int8", "linear_int4", "linear_fp8", "linear_fp8_dynamic")


def rounded_by(op: str, weight: Tensor, group: int) -> tuple[Tensor, ...]:
    """The tensor arguments of the op."""
    if op == "linear":
        return (weight,)
    return to_fp8(weight) if "fp8" in op else (to_int8 if op == "linear_int8" else to_int4)(weight, group)


def wide(arguments: tuple[Tensor, ...]) -> Tensor:
    return arguments[0].float() if len(arguments) == 1 else dequantise(*arguments)


def small(layer: Any, x: Tensor, tiles: SmallTiles, **around: Any) -> Tensor:
    return linear_small.multiply_small(x, layer._packed, tiles, linear_small.Around(**around))


def case_all_types_and_rows_and_ways_to_divide() -> None:
    """Cases of (rows of x, the weight's shape, group, columns of a program, warps)."""
    cases = ((1, (13, 96), 32, 8, 1), (2, (12, 576), 96, 4, 1), (3, (5, 320), 64, 2, 2), (7, (2, 64), 32, 1, 1))
    for op, (num_rows, shape, group, columns, num_warps) in product(TYPES, cases):
        for dtype in BOUND if columns == 8 and op in ("linear", "linear_int4") else (torch.bfloat16,):
            weight, bias = (torch.randn(shape) * 0.1).to(dtype), torch.randn(shape[0]).to(dtype)
            arguments = rounded_by(op, weight, group)
            layer, reference = getattr(linear, op)(*arguments, bias), ops()[op].reference(*arguments, bias)
            x = torch.randn(num_rows, shape[1]).to(dtype)
            found = small(layer, x, SmallTiles(columns, num_warps))
            assert_close(found, reference.apply(x), x, wide(arguments))


def case_inputs_of_any_number() -> None:
    """Rows that are no multiple of a vector, and an x with a larger row stride."""
    for dtype, in_features in ((torch.float32, 37), (torch.bfloat16, 1), (torch.bfloat16, 515)):
        weight, x = torch.randn(5, in_features).to(dtype), torch.randn(3, 2 * in_features).to(dtype)[:, :in_features]
        found = small(linear.linear(weight, None), x, SmallTiles(4, 1))
        assert_close(found, ops()["linear"].reference(weight, None).apply(x), x, weight)


def long_case_norm_activation_and_addition_are_those_of_the_ops_alone() -> None:
    dtype = torch.bfloat16
    for op in TYPES:
        weight, norm_weight = torch.randn(12, 128).to(dtype) * 0.1, torch.rand(128) + 0.5
        arguments = rounded_by(op, weight, 32)
        bias = None if op == "linear_int8" else torch.randn(12).to(dtype)
        layer, reference = getattr(linear, op)(*arguments, bias), ops()[op].reference(*arguments, bias)
        x = (torch.randn(2, 128) * 3).to(dtype)
        normed = ops()["rms_norm"].reference(x, None, norm_weight, 1e-5)[0]
        found = small(layer, x, SmallTiles(8, 1), norm=(norm_weight, 1e-5))
        # An input at the border of two codes may round to either.
        assert_close(found / 4, reference.apply(normed) / 4, normed, wide(arguments))
        residual = torch.randn(2, 12).to(dtype)
        found = small(layer, x, SmallTiles(8, 1), residual=residual)
        assert_close(found, reference.apply(x) + residual, x, wide(arguments))
        for kind in ("silu", "gelu_tanh"):
            found = small(layer, normed, SmallTiles(8, 1), activation=kind, residual=residual[:, :6])
            inner = reference.apply(normed)
            expected = ops()["activate_and_multiply"].reference(inner, kind) + residual[:, :6]
            scale = 1 + inner.float().abs().amax() ** 2 + residual.float().abs().amax()
            assert found.shape == (2, 6)
            assert ((found.float() - expected.float()).abs().max() / scale) < 2 * BOUND[dtype], (op, dtype, kind)


def case_a_row_is_the_same_whatever_is_beside_it() -> None:
    layer, norm = linear.linear(torch.randn(6, 96), None), (torch.ones(96), 1e-6)
    x = torch.randn(4, 96)
    whole = small(layer, x, SmallTiles(4, 1), norm=norm)
    for row in (0, 3):
        assert torch.equal(small(layer, x[row : row + 1], SmallTiles(4, 1), norm=norm), whole[row : row + 1])


def case_e4m3_as_the_hardware_converts_it() -> None:
    weight = torch.randn(8, 64) * 0.1
    arguments, x = to_fp8(weight), torch.randn(2, 64).bfloat16()
    layer: Any = linear.linear_fp8_dynamic(*arguments, None)
    expected = ops()["linear_fp8_dynamic"].reference(*arguments, None).apply(x)
    packed = replace(layer._packed, kind=linear.E4M3_IN_HARDWARE)
    assert_close(linear_small.multiply_small(x, packed, SmallTiles(4, 1)), expected, x, wide(arguments))


def case_layers_choose_it_up_to_the_rows_of_the_table() -> None:
    for op in TYPES:
        arguments = rounded_by(op, torch.randn(32, 64), 32)
        layer = getattr(linear, op)(*arguments, None)
        most = layer.most_fused_rows
        assert most == configs.most_small_rows(layer._packed.bits, op == "linear_fp8_dynamic")
        launched: list[int] = []
        layer._apply_small = lambda x, around=None, launched=launched: (
            launched.append(len(x)) or torch.zeros(len(x), 32)
        )
        for num_rows in (1, most, most + 1):
            layer.apply(torch.randn(num_rows, 64).bfloat16() if "fp8" in op else torch.randn(num_rows, 64))
        assert launched == [1, most]
    grouped: Any = linear.linear_int8(torch.ones(8, 48, dtype=torch.int8), torch.ones(8, 6), None)
    assert grouped.most_fused_rows == 0, "groups of 8 are less than what a thread loads"
    one_group: Any = linear.linear_int8(torch.ones(8, 48, dtype=torch.int8), torch.ones(8, 1), None, True)
    assert one_group.most_fused_rows == 0


def long_case_divided_inputs_add_up() -> None:
    for op, (num_rows, splits) in product(TYPES[1:], ((5, 2), (20, 3))):
        arguments = rounded_by(op, torch.randn(40, 512) * 0.1, 64)
        bias, x = torch.randn(40).bfloat16(), torch.randn(num_rows, 512).bfloat16()
        layer, reference = getattr(linear, op)(*arguments, bias), ops()[op].reference(*arguments, bias)
        tiles = replace(configs.matrix_tiles(layer._device, num_rows, 2, (40, 512)), block_k=64, splits=splits)
        if op == "linear_fp8_dynamic":
            found = layer.apply_tiled(x, tiles)
        else:
            found = linear.multiply(x, layer._packed, tiles)
        assert_close(found, reference.apply(x), x, wide(arguments))
