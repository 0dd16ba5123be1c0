"""What the router keeps of a thousand engines: the cheapest of them, their common pace, who holds which prefix."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from headrace.frontend.fleet.members import EngineFacts, Group, Member
from headrace.frontend.fleet.prefixes import PrefixIndex
from headrace.frontend.fleet.speeds import Speed
from headrace.ipc.prefix_names import tell_every_s


def member(number: int) -> Member:
    return Member(EngineFacts(name=f"engine {number}", models=("m",), version="v"), number, 0.0)


@pytest.mark.parametrize("seed", range(5))
def test_the_cheapest_engine_is_the_one_that_a_look_at_all_finds(seed: int) -> None:
    """Of equal ones the one that was weighed first."""
    chance, group, weighed = random.Random(seed), Group("v"), dict[Member, int]()
    for number in range(12):
        group.add(member(number))
    for turn in range(3_000):
        each = chance.choice(list(group.members))
        event = chance.random()
        if event < 0.01 and len(group.members) > 2:
            group.remove(each)
            each.is_gone = True
            weighed.pop(each, None)
            group.add(member(100 + turn))
            continue
        if event < 0.1:
            each.is_draining = not each.is_draining
        each.cost_s = float(chance.randrange(5))
        group.update(each, 0.0)
        weighed.pop(each, None)
        if not each.is_draining:
            weighed[each] = turn
        assert group.usable == sum(one.bit for one in weighed)
        if chance.random() < 0.7:  # or entries pile up unread
            refused_by = {one for one in group.members if chance.random() < 0.3} if turn % 2 else set()
            taking = [one for one in weighed if one not in refused_by]
            best = min(taking, key=lambda one: (one.cost_s, weighed[one]), default=None)
            assert group.least_loaded(0.0, refused_by) is best
        assert len(group._heap) <= 4 * len(group.members) + 64


def test_a_group_where_few_engines_work_does_not_learn_from_all_at_each_look(monkeypatch: pytest.MonkeyPatch) -> None:
    group, learnt = Group("v"), list[int]()
    members = [member(number) for number in range(64)]
    for each in members:
        group.add(each)

    def learn(speeds: Iterable[Speed]) -> bool:
        learnt.append(len(list(speeds)))
        return False

    monkeypatch.setattr(group.pace, "learn", learn)
    group.learn(members, 0.0)
    for _ in range(7):
        assert group.learn(members[:1], 0.0) == members[:1]
    assert learnt == [64, 64], "of all, and once more when a sixteenth of them was measured again"


def test_a_pace_that_always_changes_weighs_all_of_a_thousand_engines_once_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few, many = Group("v"), Group("v")
    for group, size in ((few, 8), (many, 1_000)):
        monkeypatch.setattr(group.pace, "learn", lambda speeds: True)
        for number in range(size):
            group.add(member(number))
    times_s = [0.25 * tick for tick in range(9)]
    for group, seconds in ((few, times_s), (many, [0.0, 1.0, 2.0])):
        news = list(group.members)[:2]
        assert [now_s for now_s in times_s if group.learn(news, now_s) == group.members] == seconds


def test_what_left_engines_held_is_removed_for_many_at_once_and_never_told() -> None:
    index = PrefixIndex()
    index.add(range(4_000), 1 << 0 | 1 << 5)
    for number in range(1, 4):
        index.add(range(4_000), 1 << number)
    assert index.retire(1 << 1) == [], "a walk through 4,000 prefixes for one engine"
    assert index.retire(1 << 2) == []
    assert index.retire(1 << 3) == []
    assert index.holders([7], alive=1 << 0 | 1 << 5) == [1 << 0 | 1 << 5]
    assert sorted(index.retire(1 << 5)) == [1 << 1, 1 << 2, 1 << 3, 1 << 5]
    assert index.holders([7], alive=-1) == [1 << 0]
    index.forget(1 << 0)
    assert len(index) == 0


def test_a_small_index_gives_an_engine_s_bit_back_at_once() -> None:
    index = PrefixIndex()
    index.add(range(10), 1 << 4)
    assert index.retire(1 << 4) == [1 << 4]
    assert len(index) == 0


def test_an_engine_sends_no_more_news_of_its_cache_to_a_thousand_followers_than_to_a_hundred() -> None:
    assert tell_every_s(2) == tell_every_s(100) == 0.25
    assert 1_000 / tell_every_s(1_000) == 100 / tell_every_s(100)
