"""Triton's routing and experts against their references."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from headrace.executor.gpu.kernels import to_int4, to_int8
from headrace.kernels import ops
from headrace.kernels.expert_groups import ExpertGroups
from headrace.kernels.reference.moe import QuantisedStack
from headrace.kernels.triton import moe

BOUND = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
"""Bounds of the error relative to the largest result, for rounded activations between the products and results."""
route = ops()["route_experts"].reference


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    bound = BOUND[expected.dtype] * (1 + float(expected.abs().max()))
    assert (found.double() - expected.double()).abs().max() < bound


def case_routing_chooses_the_same_experts_and_weights() -> None:
    kinds = itertools.product(("softmax", "sigmoid"), (False, True))
    sizes = ((12, 5), (8, 8), (128, 8), (1, 1))
    for dtype, (num_experts, top_k), (scoring, renormalise) in zip((*BOUND, torch.float32), sizes, kinds, strict=True):
        logits = (torch.randn(3, num_experts) * 3).to(dtype)
        logits[1] = 0.5
        for bias in (None, torch.rand(num_experts)):
            options = {"top_k": top_k, "scoring": scoring, "renormalise": renormalise, "scale": 2.5, "bias": bias}
            ids, weights = route(logits, **options)
            found_ids, found = moe.route_experts(logits, **options)
            assert torch.equal(found_ids, ids)
            torch.testing.assert_close(found, weights, rtol=1e-5, atol=1e-6)


def case_routing_by_sparsemixer_gives_the_same_weights() -> None:
    for dtype, num_experts, top_k, margin in ((torch.float32, 16, 2, 0.8), (torch.bfloat16, 12, 3, 0.02)):
        logits = torch.randn(40, num_experts).to(dtype)
        options = {"top_k": top_k, "scoring": "sparsemixer", "renormalise": False, "margin": margin, "scale": 0.5}
        ids, weights = route(logits, **options)
        found_ids, found = moe.route_experts(logits, **options)
        assert torch.equal(found_ids, ids)
        torch.testing.assert_close(found, weights, rtol=1e-5, atol=1e-6)


def case_routing_within_groups_chooses_the_same_experts() -> None:
    logits, bias = torch.randn(5, 24) * 3, torch.rand(24)
    for scoring, correction, best in (("softmax", None, 1), ("sigmoid", bias, 2), ("sqrtsoftplus", bias, 1)):
        options = {"top_k": 4, "scoring": scoring, "renormalise": True, "bias": correction}
        options["groups"] = ExpertGroups(4, 2, best)
        ids, weights = route(logits, **options)
        found_ids, found = moe.route_experts(logits, **options)
        assert torch.equal(found_ids, ids)
        torch.testing.assert_close(found, weights, rtol=1e-5, atol=1e-6)


def case_experts_of_floats() -> None:
    """Rows that choose all experts, experts with several blocks, and fewer rows than experts."""
    sizes = ((1, 4, 4, 33, 20), (70, 3, 2, 64, 48), (5, 20, 2, 80, 7))
    for dtype, (num_rows, num_experts, top_k, hidden, inner) in zip(BOUND, sizes, strict=True):
        x = torch.randn(num_rows, hidden).to(dtype)
        gate_up = (torch.randn(num_experts, 2 * inner, hidden) * hidden**-0.5).to(dtype)
        down = (torch.randn(num_experts, hidden, inner) * inner**-0.5).to(dtype)
        ids, weights = route(torch.randn(num_rows, num_experts), top_k=top_k, scoring="softmax", renormalise=True)
        expected = ops()["experts"].reference(gate_up, down, "silu").apply(x, ids, weights)
        assert_close(moe.experts(gate_up, down, "silu").apply(x, ids, weights), expected)


def case_experts_with_biases_and_a_clamped_gate() -> None:
    for dtype, invariant in ((torch.float32, False), (torch.float32, True), (torch.bfloat16, False)):
        x = torch.randn(21, 48).to(dtype)
        gate_up, down = torch.randn(4, 40, 48).to(dtype), (torch.randn(4, 48, 20) / 4).to(dtype)
        biases = torch.randn(4, 40) * 3, torch.randn(4, 48)
        ids, weights = route(torch.randn(21, 4), top_k=2, scoring="softmax", renormalise=True)
        expected = ops()["experts"].reference(gate_up, down, "clamped_silu", biases)
        found = moe.experts(gate_up, down, "clamped_silu", biases, batch_invariant=invariant)
        assert_close(found.apply(x, ids, weights), expected.apply(x, ids, weights))


def case_experts_that_nobody_chose_are_not_read_and_others_numbers_add_nothing() -> None:
    x, gate_up, down = torch.randn(37, 32), torch.randn(5, 24, 32), torch.randn(5, 32, 12)
    ids = torch.tensor([[3, 1]] * 20 + [[1, -1]] * 16 + [[-1, -1]], dtype=torch.int32)
    weights = torch.rand(37, 2)
    expected = ops()["experts"].reference(gate_up, down, "gelu").apply(x, ids, weights)
    for expert in (0, 2, 4):
        gate_up[expert], down[expert] = torch.nan, torch.nan
    found = moe.experts(gate_up, down, "gelu").apply(x, ids, weights)
    assert_close(found, expected)
    assert not found[36].any()


def long_case_experts_of_8_and_4_bits() -> None:
    gate_up, down = torch.randn(3, 64, 96) * 0.1, torch.randn(3, 96, 32) * 0.2
    ids, weights = route(torch.randn(7, 3), top_k=2, scoring="sigmoid", renormalise=False)
    for dtype, rounding in itertools.product((torch.float32, torch.bfloat16), (to_int8, to_int4)):
        stacks = []
        for stack in (gate_up, down):
            parts = zip(*(rounding(weight, 32) for weight in stack), strict=True)
            stacks.append(QuantisedStack(*(torch.stack(part) for part in parts)))
        x = torch.randn(7, 96).to(dtype)
        expected = ops()["experts"].reference(stacks[0], stacks[1], "silu").apply(x, ids, weights)
        assert_close(moe.experts(stacks[0], stacks[1], "silu").apply(x, ids, weights), expected)


def case_a_token_goes_through_experts_the_same_in_every_batch_and_part() -> None:
    x, gate_up, down = torch.randn(40, 32), torch.randn(4, 48, 32), torch.randn(4, 32, 24)
    ids, weights = route(torch.randn(40, 4), top_k=2, scoring="softmax", renormalise=True)
    packed = moe.experts(gate_up, down, "silu", batch_invariant=True)
    whole = packed.apply(x, ids, weights)
    assert torch.equal(packed.apply(x[7:9], ids[7:9], weights[7:9]), whole[7:9])
    most, moe.MOST_PARTS_BYTES = moe.MOST_PARTS_BYTES, 4 * 32 * 2 * 15
    try:
        assert torch.equal(packed.apply(x, ids, weights), whole)
    finally:
        moe.MOST_PARTS_BYTES = most
