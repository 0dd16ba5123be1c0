"""Chooses the kernels of a model on a GPU: quantised as weights are read, and batch-invariant, where asked for.

Both only wrap the choice of kernels, so the decoder knows of neither. A matrix is quantised on the device before it is
packed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from headrace.core.options.plan import Plan
from headrace.executor.models.blocks import Role
from headrace.executor.models.eager import ChooseKernel
from headrace.ipc.failure import OptionError
from headrace.kernels.grouped import fit_half
from headrace.kernels.reference.attention import AttentionParams
from headrace.kernels.reference.moe import Biases, ExpertWeights, QuantisedStack
from headrace.kernels.reference.rows import LARGEST_STORED, LinearWeight, narrow
from headrace.kernels.registry import choose_reference

logger = logging.getLogger(__name__)
FP8 = torch.float8_e4m3fn
ROWS_AT_ONCE = 4096
"""Rows of a weight that are quantised at a time, which limits the memory of their float32 copies."""
ROUNDED: tuple[Role, ...] = ("matrix",)
"""Roles of linear layers' weights that are quantised; experts are quantised, too."""


@dataclass(frozen=True)
class Rounding:
    """How the matrices of layers are quantised as they are read."""

    kind: str
    """fp8, int8 or int4."""
    group: int
    """Number of consecutive weights that share a scale; int8 and int4 only."""

    @classmethod
    def of(cls, plan: Plan) -> Rounding | None:
        """The quantisation that the plan asks for, or None."""
        kind = {8: "int8", 4: "int4"}.get(plan.weight_bits or 0, plan.options.quantization)
        if kind in (None, "gguf") or plan.model.stored_as:
            return None
        return cls(str(kind), plan.weight_groups[0] if plan.weight_groups else 0)

    @classmethod
    def bits_of(cls, plan: Plan, itemsize: int) -> float:
        """Bits of a weight of a layer under the plan; itemsize: bytes of a weight that is not quantised."""
        rounding = cls.of(plan)
        return 8 * itemsize if rounding is None else rounding.bits

    @property
    def bits(self) -> float:
        """Bits of a quantised weight, including its share of the scales."""
        return 8.0 if self.kind == "fp8" else 8 + 16 / self.group if self.kind == "int8" else 4 + 32 / self.group


def quantising(choose: ChooseKernel, rounding: Rounding) -> ChooseKernel:
    """Wraps `choose`, so that layers' matrices are quantised as they are packed; embedding and head stay as they are.

    fp8: where the device has fp8 matrix multiplication, inputs are quantised too, with one scale per token, as in
    vLLM's quantization=fp8; elsewhere only the weights are fp8. int8 and int4 quantise only the weights; a matrix whose
    rows are no multiple of the group stays as it is, which is logged once for each length of row.
    """
    whole = set[int]()

    def chosen(op: str, **facts: Any) -> Callable[..., Any]:
        if op == "experts":
            return _quantised_experts(choose, rounding, facts)
        if op != "linear" or facts["role"] not in ROUNDED:
            return choose(op, **facts)
        in_features = facts["shape"][1]
        if rounding.kind != "fp8" and in_features % rounding.group:
            if in_features not in whole:
                whole.add(in_features)
                logger.warning(
                    "matrices with rows of %d weights are not quantised, as groups of %d do not divide them",
                    in_features,
                    rounding.group,
                )
            return choose(op, **facts)
        name = f"linear_{rounding.kind}"
        if rounding.kind == "fp8":
            both = choose("linear_fp8_dynamic", **facts)
            pack = choose(name, **facts) if both is choose_reference("linear_fp8_dynamic") else both
        else:
            pack = choose(name, **facts)

        def packed(weight: Tensor, bias: Tensor | None) -> LinearWeight:
            result: LinearWeight = pack(*_rounded(weight, rounding), bias)
            return result

        return packed

    return chosen


def _quantised_experts(choose: ChooseKernel, rounding: Rounding, facts: dict[str, Any]) -> Callable[..., Any]:
    """The op `experts`, whose stacks are quantised first. Raises OptionError for fp8."""
    if rounding.kind == "fp8":
        raise OptionError("quantization=fp8 is not supported for a mixture of experts on a GPU; int8 and int4 are")
    if facts["hidden"] % rounding.group or facts["inner"] % rounding.group:
        logger.warning(
            "experts between %d and %d values are not quantised, as groups of %d do not divide them",
            facts["hidden"],
            facts["inner"],
            rounding.group,
        )
        return choose("experts", **facts)
    pack = choose("experts", **facts, stored=rounding.kind)

    def packed(gate_up: Tensor, down: Tensor, activation: str, *biases: Biases) -> ExpertWeights:
        stacks = []
        for stack in (gate_up, down):
            parts = _rounded(stack.flatten(0, 1), rounding)
            stacks.append(QuantisedStack(*(part.unflatten(0, stack.shape[:2]) for part in parts)))
        result: ExpertWeights = pack(*stacks, activation, *biases)
        return result

    return packed


def chooser_for(choose: ChooseKernel, plan: Plan) -> ChooseKernel:
    """`choose` with whatever the plan asks for."""
    if plan.options.batch_invariant:
        choose = batch_invariant(choose)
    rounding = Rounding.of(plan)
    return choose if rounding is None else quantising(choose, rounding)


def _rounded(weight: Tensor, rounding: Rounding) -> tuple[Tensor, ...]:
    """The first arguments of the op linear_<kind>: codes and scales, for int4 also zeros."""
    if rounding.kind == "fp8":
        return to_fp8(weight)
    return to_int8(weight, rounding.group) if rounding.kind == "int8" else to_int4(weight, rounding.group)


def batch_invariant(choose: ChooseKernel) -> ChooseKernel:
    """Wraps `choose`, so that the order of sums depends neither on the rest of a batch nor on a prompt's chunks.

    Raises OptionError for latent attention."""

    @cache
    def fixed(params: AttentionParams) -> AttentionParams:
        return replace(params, batch_invariant=True)

    def chosen(op: str, **facts: Any) -> Callable[..., Any]:
        if op == "latent_attention":  # its reference chooses a form of the products by the length of a chunk
            raise OptionError("batch_invariant is not supported with latent attention on a GPU; on a CPU it is")
        kernel = choose(op, **facts, batch_invariant=True)
        if op != "paged_attention":
            return kernel

        def attend(
            query: Tensor, keys: Tensor, values: Tensor, batch: Any, params: AttentionParams, scales: Any = None
        ) -> Tensor:
            result: Tensor = kernel(query, keys, values, batch, fixed(params), scales)
            return result

        return attend

    return chosen


def to_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [out, in] -> float8_e4m3fn of the same shape, float32 scales [out, 1]: a row's largest magnitude / 448."""
    codes = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    largest = weight.abs().amax(1, keepdim=True).float()
    scales = torch.where(largest > 0, largest / LARGEST_STORED[FP8], 1.0)
    for start in range(0, len(weight), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        codes[rows] = narrow(weight[rows].float() / scales[rows], FP8)
    return codes, scales


def to_int8(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """weight [out, in] -> int8 codes of the same shape, and float16 scales [out, in / group], or float32 ones where
    float16 does not hold them.

    A group's scale is its largest magnitude / 127, rounded to float16 before the codes are computed. The CPU's int8
    (`kernels.cpu.linear.quantise`) computes the same.
    """
    out_features, in_features = weight.shape
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(out_features, in_features // group, dtype=_scale_type(weight, 8, group), device=weight.device)
    for start in range(0, out_features, ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        groups = weight[rows].float().unflatten(1, (-1, group))
        scales[rows] = (groups.abs().amax(-1) / 127).to(scales.dtype)
        codes[rows] = _divided(groups, scales[rows]).round().clamp(-127, 127).to(torch.int8).flatten(1)
    return codes, scales


def to_int4(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """weight [out, in] -> codes [out, in / 2] uint8, the low half of a byte before the high one, float16 scales and
    float32 zeros, both [out, in / group]: (code - zero) * scale.

    A group's codes divide the range from its smallest to its largest weight into 15 steps. The step and the smallest
    weight are rounded to float16 before the codes are computed, or not where float16 does not hold them. The CPU's
    int4 computes the same.
    """
    out_features, in_features = weight.shape
    codes = torch.empty(out_features, in_features // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(out_features, in_features // group, dtype=_scale_type(weight, 4, group), device=weight.device)
    zeros = torch.empty(scales.shape, dtype=torch.float32, device=weight.device)
    for start in range(0, out_features, ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        groups = weight[rows].float().unflatten(1, (-1, group))
        least, most = groups.amin(-1), groups.amax(-1)
        step, least = ((most - least) / 15).to(scales.dtype), least.to(scales.dtype).float()
        values = _divided(groups - least[..., None], step).round().clamp(0, 15).to(torch.uint8).flatten(1)
        codes[rows] = values[:, 0::2] | values[:, 1::2] << 4
        scales[rows] = torch.where(step > 0, step, 1.0)  # 1 for a group of equal weights, whose codes are 0
        zeros[rows] = -least / scales[rows].float()
    return codes, scales, zeros


def _scale_type(weight: Tensor, bits: int, group: int) -> torch.dtype:
    """float16 where it holds the scales of all rows, else float32. Of a weight without values, on meta, float16."""
    if weight.is_meta:
        return torch.float16
    parts = (weight[start : start + ROWS_AT_ONCE] for start in range(0, len(weight), ROWS_AT_ONCE))
    return torch.float16 if all(fit_half(part, bits, group) for part in parts) else torch.float32


def _divided(groups: Tensor, scales: Tensor) -> Tensor:
    """groups [rows, num_groups, group] float32 / scales [rows, num_groups]; 0 where the scale is 0."""
    wide = scales.float()[..., None]
    return torch.where(wide > 0, groups / wide, 0.0)
