"""Which kernels a model on a GPU is built with: quantised as it is read, and batch-invariant, where asked for.

Both are a way of choosing kernels, so the decoder knows of neither.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from torch import Tensor

from headrace.core.options.plan import Plan
from headrace.executor.gpu.quantise import to_fp8, to_int4, to_int8
from headrace.executor.models.layers import ChooseKernel
from headrace.executor.parallel.rank_place import RankPlace
from headrace.kernels.reference.attention import AttentionParams
from headrace.kernels.reference.rows import LinearWeight
from headrace.kernels.registry import choose_reference

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rounding:
    """How the layers' matrices are rounded as they are read."""

    kind: str
    """fp8, int8 or int4."""
    group: int
    """Neighbouring weights that share a scale, under int8 and int4."""

    @classmethod
    def of(cls, plan: Plan) -> Rounding | None:
        """What the plan asks for, if it asks for any."""
        kind = {8: "int8", 4: "int4"}.get(plan.weight_bits or 0, plan.options.quantization)
        return None if kind in (None, "gguf") else cls(str(kind), plan.options.quantization_group_size)

    @classmethod
    def bits_of(cls, plan: Plan, itemsize: int) -> float:
        """Of one weight of the layers as the plan has them; itemsize: of those that stay as they are."""
        rounding = cls.of(plan)
        return 8 * itemsize if rounding is None else rounding.bits

    @property
    def bits(self) -> float:
        """Of one weight, its share of the scales included."""
        return 8.0 if self.kind == "fp8" else 8 + 16 / self.group if self.kind == "int8" else 4 + 32 / self.group


def quantising(choose: ChooseKernel, vocab_size: int, rounding: Rounding) -> ChooseKernel:
    """`choose`, with the layers' matrices rounded as they are packed; embedding and head stay as they are.

    fp8: where the device multiplies fp8 by itself, inputs are rounded too, each token with a scale of its own, as
    vLLM's quantization=fp8 does; elsewhere the weights alone are fp8. int8 and int4 round the weights alone; a matrix
    whose rows the groups do not divide stays as it is, which is said once for each length of row.
    """
    whole = set[int]()

    def chosen(op: str, **facts: Any) -> Callable[..., Any]:
        if op != "linear" or facts["shape"][0] == vocab_size:
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


def chooser_for(choose: ChooseKernel, plan: Plan, place: RankPlace) -> ChooseKernel:
    """`choose` as the plan asks for, on one rank."""
    if plan.options.batch_invariant:
        choose = batch_invariant(choose)
    rounding, head = Rounding.of(plan), place.vocabulary(plan.model.vocab_size)
    return choose if rounding is None else quantising(choose, head.stop - head.start, rounding)


def _rounded(weight: Tensor, rounding: Rounding) -> tuple[Tensor, ...]:
    """The first arguments of the op linear_<kind>."""
    if rounding.kind == "fp8":
        return to_fp8(weight)
    return to_int8(weight, rounding.group) if rounding.kind == "int8" else to_int4(weight, rounding.group)


def batch_invariant(choose: ChooseKernel) -> ChooseKernel:
    """`choose`, with sums in an order that does not depend on what else is in a batch, or on how a prompt is cut up."""

    @cache
    def fixed(params: AttentionParams) -> AttentionParams:
        return replace(params, batch_invariant=True)

    def chosen(op: str, **facts: Any) -> Callable[..., Any]:
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
