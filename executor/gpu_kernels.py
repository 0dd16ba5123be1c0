"""Which kernels a model on a GPU is built with: quantised to fp8 as it is read, and batch-invariant, where asked for.

Both are a way of choosing kernels, so the decoder knows of neither.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from headrace.executor.layers import ChooseKernel
from headrace.kernels.reference import LARGEST_STORED, LinearWeight, narrow
from headrace.kernels.reference_attention import AttentionParams
from headrace.kernels.registry import choose_reference

FP8 = torch.float8_e4m3fn
ROWS_AT_ONCE = 4096
"""Rows of a weight that are rounded at a time: their float32 copies are what it takes."""


def to_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [out, in] -> float8_e4m3fn of the same shape, and float32 scales [out, 1]: each row's largest over 448."""
    codes = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    largest = weight.abs().amax(1, keepdim=True).float()
    scales = torch.where(largest > 0, largest / LARGEST_STORED[FP8], 1.0)
    for start in range(0, len(weight), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        codes[rows] = narrow(weight[rows].float() / scales[rows], FP8)
    return codes, scales


def quantising(choose: ChooseKernel, vocab_size: int) -> ChooseKernel:
    """`choose`, with the layers' matrices rounded to fp8 as they are packed; embedding and head stay as they are.

    Where the device multiplies fp8 by itself, inputs are rounded too, each token with a scale of its own, as vLLM's
    quantization=fp8 does; elsewhere the weights alone are fp8.
    """

    def chosen(op: str, **facts: Any) -> Callable[..., Any]:
        if op != "linear" or facts["shape"][0] == vocab_size:
            return choose(op, **facts)
        name = "linear_fp8_dynamic"
        pack = choose(name, **facts)
        if pack is choose_reference(name):
            pack = choose("linear_fp8", **facts)

        def packed(weight: Tensor, bias: Tensor | None) -> LinearWeight:
            result: LinearWeight = pack(*to_fp8(weight), bias)
            return result

        return packed

    return chosen


def batch_invariant(choose: ChooseKernel) -> ChooseKernel:
    """`choose`, with sums in an order that does not depend on what else is in a batch, or on how a prompt is cut up."""

    @cache
    def fixed(params: AttentionParams) -> AttentionParams:
        return replace(params, batch_invariant=True)

    def chosen(op: str, **facts: Any) -> Callable[..., Any]:
        kernel = choose(op, **facts, batch_invariant=True)
        if op != "paged_attention":
            return kernel

        def attend(query: Tensor, keys: Tensor, values: Tensor, batch: Any, params: AttentionParams) -> Tensor:
            result: Tensor = kernel(query, keys, values, batch, fixed(params))
            return result

        return attend

    return chosen
