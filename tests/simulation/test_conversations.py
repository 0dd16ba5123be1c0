"""Chats of several turns on virtual time: what the router finds in caches, and how even the work is."""

from __future__ import annotations

import pytest
from simulation.conversations import Conversations, converse
from simulation.policies import POLICIES
from thinned import every

SMALL = Conversations(num_engines=4, num_frontends=2, num_users=320, seconds=24.0)


@pytest.mark.system
def test_turns_find_what_was_computed_before_and_the_work_is_even() -> None:
    ours, others = converse("headrace", 0, SMALL), [converse(each, 0, SMALL) for each in POLICIES if each != "headrace"]
    assert ours.share >= 0.95
    assert ours.busiest <= 1.1
    assert all(ours.hit_rate > each.hit_rate for each in others)
    assert ours.mean_answer_s < min(each.mean_answer_s for each in others)


@pytest.mark.parametrize("policy", every(2, POLICIES))
def test_equal_seeds_give_equal_conversations(policy: str) -> None:
    scenario = Conversations(num_engines=2, num_frontends=2, num_users=10, seconds=20.0)
    assert converse(policy, 3, scenario) == converse(policy, 3, scenario)
    assert converse(policy, 3, scenario) != converse(policy, 4, scenario)
