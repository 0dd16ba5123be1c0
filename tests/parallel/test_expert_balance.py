"""Balancing experts by their load: where they should be, who sends what, and what a skewed router gains by it. That
tokens stay those of transformers is in tests/models/test_mixture_families.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from all_at_once import TIGHT, shared_prefix
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_threads import RankThreads, pool_for_each_rank, run_ranks
from test_models import config_of
from tiny_mixtures import FAMILIES

from headrace import LLM, SamplingParams
from headrace.config import EPLBConfig
from headrace.core.options.eplb import Eplb, eplb_of
from headrace.core.options.parsing import parse_options
from headrace.executor.models.families import spec_from_config
from headrace.executor.models.sizes import redundant_elements
from headrace.executor.parallel import collectives
from headrace.executor.parallel.divisibility import check_experts
from headrace.executor.parallel.load_balancing.balancer import BalancedExperts, ExpertBalancer, costs, rounds
from headrace.executor.parallel.load_balancing.placement import Placement, copies_of, packed, rank_loads, rebalanced
from headrace.executor.parallel.rank_place import RankCoordinates, World
from headrace.executor.placement.step_codec import StepCodec
from headrace.frontend.client.engine_metrics import Gauge
from headrace.frontend.fleet.engines import combined
from headrace.ipc.failure import OptionError
from headrace.ipc.messages import EngineStats, ExpertBalance
from headrace.ipc.step import StepResult
from headrace.kernels.expert_places import ExpertPlaces, replica_keys
from headrace.kernels.reference.moe import TorchExperts

__all__ = ["pool_for_each_rank"]  # a fixture for all of these tests
Layer = tuple[Placement, list[float]]


def first_placement(num_experts: int, num_redundant: int, num_ranks: int) -> Placement:
    place = RankCoordinates(0, num_ranks, expert_parallel=True, balances_experts=True, redundant_experts=num_redundant)
    return place.expert_placement(num_experts)


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    """A layer as it is placed at first, and loads of its experts."""
    num_ranks = draw(st.integers(2, 5))
    each = draw(st.integers(1, 6))
    num_places = num_ranks * each
    num_experts = draw(st.integers(max(each, num_ranks), num_places))
    loads = draw(st.lists(st.integers(0, 1000), min_size=num_experts, max_size=num_experts))
    return first_placement(num_experts, num_places - num_experts, num_ranks), [float(load) for load in loads]


def check_placement(placement: Placement, like: Placement, num_experts: int) -> None:
    assert [len(experts) for experts in placement] == [len(experts) for experts in like]
    assert all(len(set(experts)) == len(experts) for experts in placement), "no rank has an expert twice"
    assert {expert for experts in placement for expert in experts} == set(range(num_experts))


@given(layers())
@settings(max_examples=150, deadline=None)
def test_every_expert_is_somewhere_and_no_rank_has_more_to_do_than_at_first(layer: Layer) -> None:
    first, loads = layer
    check_placement(first, first, len(loads))
    placement = rebalanced(first, first, loads)
    check_placement(placement, first, len(loads))
    assert max(rank_loads(placement, loads)) <= max(rank_loads(first, loads))
    assert sum(rank_loads(placement, loads)) == pytest.approx(sum(loads))
    for experts, before in zip(placement, first, strict=True):  # what stays on a rank stays in its place
        assert all(expert == old or expert not in before for expert, old in zip(experts, before, strict=True))
    back = rebalanced(placement, first, loads[::-1])
    assert max(rank_loads(back, loads[::-1])) <= max(rank_loads(first, loads[::-1]))


@given(layers())
@settings(max_examples=100, deadline=None)
def test_copies_are_of_the_experts_that_have_the_most_to_do(layer: Layer) -> None:
    first, loads = layer
    copies = copies_of(loads, first)
    assert sum(copies) == sum(map(len, first))
    assert max(copies) <= len(first)
    highest = max((load / count for load, count in zip(loads, copies, strict=True) if count < len(first)), default=0.0)
    assert all(load / (count - 1) >= highest for load, count in zip(loads, copies, strict=True) if count > 1)
    check_placement(packed(loads, copies, len(first)), first, len(loads))


def test_a_rank_that_is_full_gives_one_of_its_own_where_a_copy_has_no_other_place() -> None:
    placement = packed([100.0, 10.0, 9.0, 8.0, 2.0], [1, 1, 1, 1, 2], 2)
    check_placement(placement, [[0] * 3] * 2, 5)
    assert all(4 in experts for experts in placement)


def test_a_skewed_layer_is_spread() -> None:
    loads = [90.0, 80.0, 70.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    first = first_placement(8, 0, 2)
    assert rank_loads(first, loads) == [240.0, 0.0]
    assert sorted(rank_loads(rebalanced(first, first, loads), loads)) == [90.0, 150.0]
    loads = [0.0, 0.0, 0.0, 90.0, 80.0, 70.0, 0.0, 0.0]
    first = first_placement(8, 4, 2)
    assert [list(experts) for experts in first] == [[0, 1, 2, 3, 4, 5], [6, 7, 0, 1, 2, 3]]
    assert rank_loads(first, loads) == [195.0, 45.0]
    assert rank_loads(rebalanced(first, first, loads), loads) == [120.0, 120.0]


@given(layers(), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_every_rank_is_sent_what_it_lacks_once(layer: Layer, numbers: Any) -> None:
    old, loads = layer
    other = [float(numbers.randrange(1000)) for _ in loads]
    wanted = rebalanced(old, old, other)
    if wanted is old:
        return
    sent = [
        old[rank][place] for senders in rounds(old, wanted) for rank, place in enumerate(senders) if place is not None
    ]
    assert len(set(sent)) == len(sent)
    assert set(sent) == {each for new, had in zip(wanted, old, strict=True) for each in set(new) - set(had)}


@given(layers(), st.lists(st.integers(0, 200_000), min_size=1, max_size=20))
@settings(max_examples=50, deadline=None)
def test_one_rank_computes_each_expert_of_a_token(layer: Layer, token_ids: list[int]) -> None:
    placement, loads = layer
    ids = torch.arange(len(loads)).expand(len(token_ids), -1)
    keys = replica_keys(torch.tensor(token_ids), torch.arange(len(token_ids)))
    found = [ExpertPlaces.of(placement, len(loads), rank).own(ids, keys) for rank in range(len(placement))]
    assert (torch.stack([own >= 0 for own in found]).sum(0) == 1).all()
    for own, experts in zip(found, placement, strict=True):
        assert (torch.tensor(experts)[own[own >= 0].long()] == ids[own >= 0]).all()


def test_the_tokens_of_a_text_and_those_of_one_position_go_to_both_copies() -> None:
    positions = torch.arange(4000)
    for keys in (
        replica_keys(torch.full((4000,), 17), positions), replica_keys(positions, torch.full((4000,), 5)),
        replica_keys(positions, positions),
    ):  # fmt: skip
        for copies in (2, 3, 8):
            counts = torch.bincount(keys % copies, minlength=copies)
            assert counts.min() > 0.9 * len(keys) / copies


WORLD = World(tp_size=3, pp_size=1, max_tokens=8, max_seqs=4, hidden_size=48, vocab_size=96)
LOADS = [[90, 80, 70, 0, 0, 0, 0], [0, 0, 0, 60, 60, 60, 0], [10, 10, 10, 10, 10, 10, 300]]


def balance_on(place: RankCoordinates, dtype: torch.dtype = torch.float32) -> list[Placement]:
    """Where a layer's experts are after each step of LOADS, on one rank. An expert's weights are its number."""
    placed, first = [], first_placement(7, 2, 3)
    own = torch.tensor(first[place.tp_rank], dtype=dtype)
    gate_up, down = (own[:, None, None].expand(-1, *shape).contiguous() for shape in ((6, 8), (8, 3)))
    biases = (own[:, None].expand(-1, 6).float().contiguous(), own[:, None].expand(-1, 8).float().contiguous())
    experts = TorchExperts(gate_up, down, "silu", biases)
    places = ExpertPlaces.of(first, 7, place.tp_rank)
    layer = BalancedExperts(experts, places, torch.zeros(len(own), dtype=torch.int64), first)
    balancer = ExpertBalancer([layer], Eplb(step_interval=1, num_redundant_experts=2), place)
    for loads in LOADS:
        layer.loads += torch.tensor([loads[expert] // int(places.replicas[expert]) for expert in layer.own])
        assert balancer.after_step() is not None
        for number, expert in enumerate(layer.own):
            assert all((part == expert).all() for part in experts.memory(number))
        check_placement(layer.placement, first, 7)
        placed.append(layer.placement)
    return placed


@pytest.mark.parametrize("backend", ["shared", "gloo"])
def test_experts_move_with_all_that_is_theirs(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "gloo":
        monkeypatch.setattr(collectives.build, "load", lambda: None)
    of_ranks = run_ranks(WORLD, balance_on)
    assert of_ranks[0] == of_ranks[1] == of_ranks[2]
    before: Placement = first_placement(7, 2, 3)
    for loads, placement in zip(LOADS, of_ranks[0], strict=True):
        numbers = [float(load) for load in loads]
        assert max(rank_loads(placement, numbers)) < max(rank_loads(before, numbers))
        before = placement


def test_experts_that_ranks_keep_in_unlike_forms_stay(caplog: pytest.LogCaptureFixture) -> None:
    forms = (torch.float32, torch.bfloat16, torch.float32)
    of_ranks = run_ranks(WORLD, lambda place: balance_on(place, forms[place.tp_rank]))
    assert of_ranks == [[first_placement(7, 2, 3)] * len(LOADS)] * 3
    assert caplog.text.count("ranks store them in different forms") == 1


def test_what_copies_cost_is_told_in_bytes() -> None:
    stack = torch.empty(1, 1024, 1024)  # 4 MiB
    experts = TorchExperts(stack, stack, "silu", None)
    placement = first_placement(2, 2, 2)
    layer = BalancedExperts(experts, ExpertPlaces.of(placement, 2, 0), torch.zeros(2, dtype=torch.int64), placement)
    told = costs([layer, layer], 2)
    assert "2 copies in each of 2 layers take 32.0 MiB in all, 16.0 MiB of each rank" in told


EPLB = {"enable_expert_parallel": True, "tensor_parallel_size": 2, "enable_eplb": True}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_eplb": True}, "it needs enable_expert_parallel"),
        ({"eplb_config": {"window_size": 5}}, "eplb_config has window_size, which needs enable_eplb"),
        (EPLB | {"expert_placement_strategy": "round_robin"}, "round_robin beside enable_eplb"),
        (
            EPLB | {"tensor_parallel_size": 1, "data_parallel_size": 2, "data_parallel_meeting": "m"},
            "with data_parallel_size engines share theirs",
        ),
        (EPLB | {"eplb_config": {"use_async": True}}, "use_async=True: experts move between two steps"),
        (EPLB | {"eplb_config": {"policy": "flashlb"}}, "policy='flashlb': there is one policy, default"),
        (EPLB | {"eplb_config": {"communicator": "nixl"}}, "communicator='nixl': experts move by the collectives"),
        (EPLB | {"eplb_config": {"step": 5}}, "eplb_config: unknown keys step; known: window_size"),
        (EPLB | {"eplb_config": {"window_size": 0}}, "window_size=0; it must be a whole number, at least 1"),
        (EPLB | {"eplb_config": {"log_balancedness": 1}}, "log_balancedness=1; it must be true or false"),
        (EPLB | {"eplb_config": {"num_redundant_experts": -1}}, "num_redundant_experts=-1; .* at least 0"),
    ],
)
def test_what_has_no_meaning_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        eplb_of(parse_options(model="m", **options))


def test_copies_that_do_not_divide_are_refused_with_the_numbers_that_do() -> None:
    mixtral = spec_from_config(config_of("mixtral"))  # of five experts
    for config, message in (
        ({}, "5 experts and num_redundant_experts=0 copies .* 2 ranks; with num_redundant_experts 1 in"),
        ({"num_redundant_experts": 2}, "with num_redundant_experts 1 or 3 in eplb_config"),
        ({"num_redundant_experts": 7}, "with 5 each of the 2 ranks has all 5 experts"),
    ):
        with pytest.raises(OptionError, match=message):
            check_experts(mixtral, parse_options(model="m", **EPLB, eplb_config=config))
    with pytest.raises(OptionError, match=r"the 5 experts of a layer .* are fewer than its 6 ranks"):
        check_experts(mixtral, parse_options(model="m", **(EPLB | {"tensor_parallel_size": 6})))
    check_experts(mixtral, parse_options(model="m", **EPLB, eplb_config={"num_redundant_experts": 1}))
    expert = 3 * mixtral.hidden_size * mixtral.layers[0].ffn.inner
    assert redundant_elements(mixtral, 3) == 3 * expert * len(mixtral.layers)


def test_an_object_and_retired_names_are_read_as_vllm_means_them() -> None:
    config = EPLBConfig(window_size=7, use_async=False, policy="default", communicator=None)
    assert eplb_of(parse_options(model="m", **EPLB, eplb_config=config)) == Eplb(window_size=7)
    with pytest.warns(FutureWarning, match="eplb_config"):
        options = parse_options(model="m", **EPLB, num_redundant_experts=2, eplb_step_interval=9)
    assert eplb_of(options) == Eplb(num_redundant_experts=2, step_interval=9)


def test_what_was_measured_crosses_to_the_core() -> None:
    balance = ExpertBalance(min=0.5, p50=0.6, p90=0.5, avg=0.7, rearrangements=3, rearrangement_s=0.25)
    nothing = np.zeros(0, np.int32)
    result = StepResult(step=1, rows=nothing, token_ids=nothing, expert_balance=balance)
    codec = StepCodec(StepResult)
    assert codec.decode(codec.encode(result)).expert_balance == balance


def test_of_several_engines_the_least_even_one_is_told_of() -> None:
    even, uneven = (
        ExpertBalance(min=least, p50=0.9, p90=0.9, avg=least, rearrangements=1, rearrangement_s=0.0)
        for least in (0.9, 0.4)
    )
    counts = dict.fromkeys(EngineStats.__struct_fields__[: EngineStats.__struct_fields__.index("num_step_gaps")], 2)
    stats = [EngineStats(**counts, expert_balance=balance) for balance in (even, uneven, None)]
    assert combined(stats).expert_balance == uneven
    assert combined(stats[2:] * 2) == EngineStats(**dict.fromkeys(counts, 4))


@pytest.mark.parametrize(("num_redundant", "busy", "before", "after"), [(0, 0, 0.5, 0.75), (4, 3, 0.6, 1.0)])
def test_the_experts_of_a_skewed_router_are_spread_over_the_ranks(
    tmp_path: Path, num_redundant: int, busy: int, before: float, after: float
) -> None:
    """All tokens choose three neighbours of eight experts, of which one rank has all, but for one copy."""
    model = tiny_models.make(FAMILIES["glm4_moe"])
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer[busy : busy + 3] += 10.0
    model.save_pretrained(tmp_path)
    config = {"step_interval": 12, "num_redundant_experts": num_redundant}
    threads = {"distributed_executor_backend": f"{RankThreads.__module__}:{RankThreads.__name__}"}
    prompts = shared_prefix(128)
    measured: list[ExpertBalance] = []
    with LLM(str(tmp_path), **TIGHT, **EPLB, **threads, eplb_config=config) as llm:
        assert not [metric for metric in llm.get_metrics() if "eplb" in metric.name]
        while len(measured) < 2:
            llm.generate(prompts, SamplingParams(max_tokens=3, temperature=0, ignore_eos=True), use_tqdm=False)
            balance = llm.get_stats().expert_balance
            if balance is not None and balance not in measured:
                measured.append(balance)
        metrics = {metric.name.partition(":")[2]: metric for metric in llm.get_metrics()}
    assert [each.rearrangements for each in measured] == [1, 1], "the second time there is nothing to gain"
    assert measured[0].avg == pytest.approx(before, abs=0.05)
    assert measured[1].avg == pytest.approx(after, abs=0.05)
    assert metrics["eplb_balancedness_min"] == Gauge(
        name="vllm:eplb_balancedness_min", labels=metrics["eplb_balancedness_min"].labels, value=measured[1].min
    )
    assert "eplb_rearrangements" in metrics
