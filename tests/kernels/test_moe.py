"""The ops of mixtures of experts: the reference against plain formulas, and fast versions against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from headrace.kernels import ops
from headrace.kernels.expert_groups import ExpertGroups
from headrace.kernels.reference.moe import ExpertStack, QuantisedStack, Scoring
from headrace.kernels.reference.quantised import dequantise
from headrace.kernels.reference.rows import ACTIVATIONS, DenseLinear, activate_and_multiply

route = ops()["route_experts"].reference


def experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: ExpertStack, down: ExpertStack, kind: str) -> Tensor:
    return ops()["experts"].reference(gate_up, down, kind).apply(x, ids, weights)


def plain_experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str) -> Tensor:
    """Every expert over every token, in float64, times its weight in the token's sum: [num_tokens, hidden]."""
    share = torch.zeros(len(x), len(gate_up), dtype=torch.float64)
    for slot in range(ids.shape[1]):
        share.scatter_add_(1, ids[:, slot : slot + 1].long(), weights[:, slot : slot + 1].double())
    inner = activate_and_multiply(torch.einsum("nh,eih->eni", x.double(), gate_up.double()), activation)
    every = torch.einsum("eni,ehi->enh", inner, down.double())
    return torch.einsum("enh,ne->nh", every, share)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalise", [False, True])
def test_routing_takes_the_best_scores_and_of_equals_the_lower_index(scoring: Scoring, renormalise: bool) -> None:
    torch.manual_seed(0)
    logits = torch.randn(40, 12).bfloat16()
    logits[3] = 0.5
    logits[4] = torch.tensor([1.0, 2.0, 3.0] * 4)
    ids, weights = route(logits, top_k=5, scoring=scoring, renormalise=renormalise, scale=2.5)
    assert ids.dtype == torch.int32
    assert weights.dtype == torch.float32
    assert ids[3].tolist() == [0, 1, 2, 3, 4]
    assert ids[4].tolist() == [2, 5, 8, 11, 1]
    wide = logits.double()
    scores = wide.softmax(-1) if scoring == "softmax" else wide.sigmoid()
    expected = scores.sort(-1, descending=True).values[:, :5]
    if renormalise:
        expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(weights.double(), 2.5 * expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(scores.gather(1, ids.long()), scores.sort(-1, descending=True).values[:, :5])


@pytest.mark.parametrize("margin", [0.02, 0.8, 3.0])
def test_sparsemixer_is_that_of_transformers(margin: float) -> None:
    torch.manual_seed(1)
    logits = torch.randn(200, 16)
    expected, expected_ids = sparsemixer(logits, jitter_eps=margin / 2, training=False)
    ids, weights = route(logits, top_k=2, scoring="sparsemixer", renormalise=False, margin=margin)
    assert torch.equal(ids.long(), expected_ids)
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=0)
    assert len(weights.unique()) > 100 or margin < 0.1


def test_logits_whose_scores_are_equal_after_rounding_are_still_told_apart() -> None:
    ids, weights = route(torch.tensor([[-200.0, -150.0, 0.0]]), top_k=3, scoring="softmax", renormalise=True)
    assert ids.tolist() == [[2, 1, 0]]
    assert weights.tolist() == [[1.0, 0.0, 0.0]]
    _, weights = route(torch.full((1, 3), -200.0), top_k=2, scoring="sigmoid", renormalise=True)
    assert weights.tolist() == [[0.0, 0.0]]


def test_a_bias_decides_who_is_chosen_and_is_not_in_the_weights() -> None:
    logits, bias = torch.tensor([[2.0, 0.0, -1.0]]), torch.tensor([-1.0, 0.0, 0.5])
    ids, weights = route(logits, top_k=2, scoring="sigmoid", renormalise=False, bias=bias)
    assert ids.tolist() == [[2, 1]]
    assert torch.equal(weights, logits[:, [2, 1]].sigmoid())


def test_experts_come_from_the_best_groups_by_one_or_by_the_sum_of_several_scores() -> None:
    logits = torch.tensor([[3.0, -9.0, 2.0, 2.5, 1.0, 1.0]])
    options = {"top_k": 2, "scoring": "softmax", "renormalise": False}
    assert route(logits, **options, groups=ExpertGroups(3, 1))[0].tolist() == [[0, 1]]
    bias = torch.tensor([0, 0, 0.5, 0, 0, 0])
    ids, weights = route(logits, **options, groups=ExpertGroups(3, 1, best=2), bias=bias)
    assert ids.tolist() == [[2, 3]]
    assert torch.equal(weights, logits.softmax(-1)[:, [2, 3]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_experts_are_added_with_their_weights(dtype: torch.dtype, activation: str) -> None:
    torch.manual_seed(1)
    x, gate_up, down = torch.randn(9, 20).to(dtype), torch.randn(6, 14, 20).to(dtype), torch.randn(6, 20, 7).to(dtype)
    ids, weights = route(torch.randn(9, 6), top_k=3, scoring="softmax", renormalise=True)
    found = experts(x, ids, weights, gate_up, down, activation)
    wanted = plain_experts(x, ids, weights, gate_up, down, activation)
    assert found.dtype == dtype
    bound = 1e-6 if dtype == torch.float32 else 2e-2
    assert ((found.double() - wanted).abs() <= bound * (1 + wanted.abs().max())).all()


def test_experts_that_nobody_chose_are_not_read_and_negative_ids_add_nothing() -> None:
    torch.manual_seed(2)
    x, gate_up, down = torch.randn(4, 8), torch.randn(5, 6, 8), torch.randn(5, 8, 3)
    ids = torch.tensor([[1, 3], [3, 1], [3, -1], [-1, -1]], dtype=torch.int32)
    weights = torch.rand(4, 2)
    wanted = plain_experts(x[:3], ids[:3].clamp(min=0), weights[:3] * (ids[:3] >= 0), gate_up, down, "silu")
    for expert in (0, 2, 4):
        gate_up[expert], down[expert] = float("nan"), float("nan")
    found = experts(x, ids, weights, gate_up, down, "silu")
    torch.testing.assert_close(found[:3].double(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[3], torch.zeros(8))


def test_packed_stacks_are_the_floats_that_they_stand_for() -> None:
    torch.manual_seed(3)
    x, gate_up, down = torch.randn(7, 32), torch.randn(4, 64, 32), torch.randn(4, 32, 32)
    ids, weights = route(torch.randn(7, 4), top_k=2, scoring="sigmoid", renormalise=False)
    gate_ups, downs = ([DenseLinear(weight, None) for weight in stack] for stack in (gate_up, down))
    assert torch.equal(
        experts(x, ids, weights, gate_ups, downs, "silu"), experts(x, ids, weights, gate_up, down, "silu")
    )
    codes = [torch.randint(0, 256, (4, rows, 16), dtype=torch.uint8) for rows in (64, 32)]
    scales = [torch.rand(4, rows, 2) * 0.1 for rows in (64, 32)]
    packed = [QuantisedStack(*parts) for parts in zip(codes, scales, strict=True)]
    floats = [torch.stack([dequantise(*parts) for parts in zip(codes[i], scales[i], strict=True)]) for i in (0, 1)]
    found = experts(x, ids, weights, packed[0], packed[1], "silu")
    wanted = experts(x, ids, weights, floats[0], floats[1], "silu")
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_version_that_serves_here_is_its_reference_within_rounding(dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    facts = {"device": torch.device("cpu"), "dtype": dtype, "hidden": 72, "inner": 40, "activation": "silu"}
    logits = torch.randn(33, 16).to(dtype)
    x, gate_up, down = torch.randn(33, 72).to(dtype), torch.randn(16, 80, 72) / 9, torch.randn(16, 72, 40) / 6
    stacks = gate_up.to(dtype), down.to(dtype)
    for version in ops()["route_experts"].versions:
        if version.why_not(**facts):
            continue
        for margin in (0.02, 0.8):
            mixer = {"scoring": "sparsemixer", "renormalise": False, "scale": 0.5, "margin": margin}
            ids, weights = route(logits, top_k=3, **mixer)
            found_ids, found = version.function(logits, top_k=3, **mixer)
            assert torch.equal(found_ids, ids)
            torch.testing.assert_close(found, weights, rtol=1e-6, atol=1e-7)
        for scoring in ("softmax", "sigmoid"):
            for options in (
                {"renormalise": True},
                {"renormalise": False, "bias": torch.rand(16), "scale": 0.5},
                {"renormalise": False, "groups": ExpertGroups(4, 2)},
                {"renormalise": True, "bias": torch.rand(16), "groups": ExpertGroups(4, 2, best=2)},
            ):
                ids, weights = route(logits, top_k=4, scoring=scoring, **options)
                found_ids, found = version.function(logits, top_k=4, scoring=scoring, **options)
                assert torch.equal(found_ids, ids)
                torch.testing.assert_close(found, weights, rtol=1e-6, atol=1e-7)
    ids, weights = route(logits, top_k=4, scoring="softmax", renormalise=True)
    wanted = plain_experts(x, ids, weights, *stacks, "silu")
    # Roundings of what is between the products, and of the result.
    bound = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype] * (1 + wanted.abs().max())
    for version in ops()["experts"].versions:
        if not version.why_not(**facts):
            found = version.function(*stacks, "silu").apply(x, ids, weights)
            assert found.dtype == dtype
            assert ((found.double() - wanted).abs() <= bound).all(), version.name
