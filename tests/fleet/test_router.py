"""The router alone, on times that the tests give it: which engine it chooses, and what becomes of requests."""

from __future__ import annotations

import random
from dataclasses import dataclass

import msgspec
import pytest

from headrace.frontend.fleet.decisions import (
    ANYWHERE,
    Affinity,
    AllFullError,
    Decision,
    Fail,
    Move,
    NoEngineError,
    RoutedRequest,
    RouterOptions,
    Wait,
)
from headrace.frontend.fleet.members import EngineFacts
from headrace.frontend.fleet.prefixes import PrefixIndex
from headrace.frontend.fleet.router import Router
from headrace.ipc.codec import Tensor
from headrace.ipc.failure import PEER_LOST, SHUT_DOWN, Failure
from headrace.ipc.prefix_names import PrefixKey, prefix_names

KILLED = Failure(message="killed", type="SIGKILL")


@dataclass
class Progress:
    """What a request has brought."""

    num_tokens: int = 0
    first_token_s: float | None = None
    num_cached_tokens: int | None = None


def make(count: int, *, capacity: int = 4, **options: object) -> Router:
    router = Router(RouterOptions(**options), random.Random(1))  # type: ignore[arg-type]
    for index in range(count):
        router.join(facts(index, capacity=capacity), 0.0)
    return router


def facts(index: int, *, capacity: int = 4, version: str = "v1", max_waiting: int = 4) -> EngineFacts:
    return EngineFacts(
        name=f"engine {index}",
        models=("m",),
        version=version,
        weights=version,
        capacity=capacity,
        max_waiting=max_waiting,
        rank=index,
    )


def request(
    num_tokens: int = 640, *, first: int = 0, affinity: Affinity = ANYWHERE, priority: int = 0
) -> RoutedRequest:
    tokens = Tensor.of("int32", range(first, first + num_tokens)).data
    return RoutedRequest(
        "m", Progress(), num_prompt_tokens=num_tokens, tokens=bytes(tokens), affinity=affinity, priority=priority
    )


def place(router: Router, *requests: RoutedRequest, now_s: float = 0.0) -> list[str]:
    return [router.place(each, now_s).facts.name for each in requests]


def test_of_engines_of_other_hosts_that_end_together_a_request_loses_one() -> None:
    router = make(4)
    stream = request()
    (first,) = place(router, stream)
    others = [f"engine {n}" for n in range(4) if f"engine {n}" != first]
    (waits,) = router.leave(first, KILLED, 1.0, is_elsewhere=True)
    assert isinstance(waits, Wait)
    for nth, name in enumerate(others[:2]):  # their ends are heard of one after the other
        assert router.leave(name, KILLED, 1.01 + nth / 100, is_elsewhere=True) == []
        assert router.tick(1.01 + nth / 100) == []
    (move,) = router.tick(1.25)
    assert isinstance(move, Move)
    assert (move.target.facts.name, stream.deaths_without_token) == (others[2], 1)
    assert (move.reason, dict(router.migrations)) == (waits.reason, {waits.reason: 1})


def test_equal_requests_are_spread_evenly() -> None:
    router = make(8, capacity=64)
    names = place(router, *(request() for _ in range(80)))
    assert {names.count(f"engine {index}") for index in range(8)} == {10}


def test_a_prompt_goes_where_its_prefix_is_unless_that_engine_is_busy() -> None:
    router = make(4, capacity=64)
    held = prefix_names(request(640).tokens, PrefixKey(weights="v1"), 64)
    assert len(held) == 10
    router.stored("engine 2", held)
    assert place(router, request(700)) == ["engine 2"]
    assert router.choices == {"prefix": 1}
    router.load("engine 2", 64, 30, 0.0)
    assert place(router, request(700)) != ["engine 2"]
    router.load("engine 2", 0, 0, 0.0)
    router.evicted("engine 2", held)
    assert router.prefixes.holders(held, router.members["engine 2"].bit) == []


def test_a_conversation_goes_back_to_the_engine_that_has_computed_its_beginning() -> None:
    router = make(8, capacity=64)
    turn = request(640)
    (first,) = place(router, turn)
    router.end(turn, 0.0)
    assert place(router, request(700)) == [first]
    assert router.choices == {"load": 1, "prefix": 1}


def test_prompts_of_different_salts_have_different_names() -> None:
    tokens = request(640).tokens
    assert not set(prefix_names(tokens, PrefixKey(), 64)) & set(prefix_names(tokens, PrefixKey("x"), 64))


def test_the_index_forgets_what_nobody_asks_for() -> None:
    index = PrefixIndex(100)
    index.add([1, 2, 3], 1)
    for key in range(1000, 1200):
        index.holders([1], 1)
        index.add([key], 2)
    assert index.holders([1], 1) == [1]
    assert index.holders([2], 1) == []
    assert len(index) <= 102
    index.forget(1)
    assert index.holders([1], 3) == []


class Decoding:
    """Time goes on: each engine brings tokens of its requests at its own speed."""

    def __init__(self, router: Router) -> None:
        self.router, self.now_s = router, 0.0

    def run(self, token_s: dict[int, float], *, ticks: int = 8) -> None:
        """token_s: by rank, what a token takes; engines that are left out bring none."""
        for _ in range(ticks):
            self.now_s += 0.25
            for member in self.router.members.values():
                self.router.heard(member.facts.name, self.now_s)
                for each in member.requests:
                    if (seconds := token_s.get(member.facts.rank)) is not None:
                        each.work.num_tokens += round(0.25 / seconds)  # type: ignore[misc]
            self.router.tick(self.now_s)

    def with_load(self, rank: int, num_requests: int, token_s: float, *, ticks: int = 8) -> None:
        """So many requests of one engine, which then end."""
        requests = [request(64, affinity=Affinity(rank=rank)) for _ in range(num_requests)]
        place(self.router, *requests, now_s=self.now_s)
        self.run({rank: token_s}, ticks=ticks)
        for each in requests:
            self.router.end(each, self.now_s)


def test_a_slower_engine_gets_less() -> None:
    router = make(2, capacity=64)
    decoding = Decoding(router)
    decoding.with_load(0, 1, 0.1, ticks=50)
    decoding.with_load(1, 1, 0.01, ticks=50)
    names = place(router, *(request(64) for _ in range(22)), now_s=decoding.now_s)
    assert names.count("engine 0") <= 4


@pytest.mark.parametrize("others", [{}, {1: 0.0043}], ids=["which was not measured", "which differs by noise"])
def test_an_idle_engine_gets_its_part_beside_one_that_was_measured(others: dict[int, float]) -> None:
    router = make(2, capacity=256)
    decoding = Decoding(router)
    for rank, token_s in ({0: 0.004} | others).items():
        decoding.with_load(rank, 1, token_s)
    names = place(router, *(request(40) for _ in range(4)), now_s=decoding.now_s)
    assert sorted(names) == ["engine 0", "engine 0", "engine 1", "engine 1"]


def test_an_engine_that_comes_later_is_as_fast_as_the_others_until_it_is_measured() -> None:
    router = make(1, capacity=256)
    decoding = Decoding(router)
    decoding.with_load(0, 1, 0.004)
    router.join(facts(1, capacity=256), decoding.now_s)
    names = place(router, *(request(40) for _ in range(4)), now_s=decoding.now_s)
    assert names.count("engine 1") == 2


@pytest.mark.parametrize(
    ("capacity", "crowded_s", "share"),
    [(256, 0.032, range(2, 5)), (16, 0.004, range(1))],
    ids=["a row costs as much as the first", "rows cost nothing"],
)
def test_what_a_row_costs_is_measured_and_not_assumed(capacity: int, crowded_s: float, share: range) -> None:
    """Which part of nine requests goes to an engine of a third of the speed."""
    router = make(2, capacity=capacity)
    decoding = Decoding(router)
    for _ in range(4):
        decoding.with_load(0, 8, crowded_s)
        decoding.with_load(0, 1, 0.004)
        decoding.with_load(1, 1, 0.012)
    names = place(router, *(request(64) for _ in range(9)), now_s=decoding.now_s)
    assert names.count("engine 1") in share


def test_without_a_prefix_cache_nothing_is_expected_of_one() -> None:
    router = Router(RouterOptions(), random.Random(1))
    for index in range(4):
        router.join(msgspec.structs.replace(facts(index, capacity=256), caches_prefixes=False), 0.0)
    names = place(router, *(request(640, affinity=Affinity(session="s")) for _ in range(8)))
    assert {names.count(f"engine {index}") for index in range(4)} == {2}
    assert len(router.prefixes) == 0


def test_requests_of_a_session_stay_together() -> None:
    router = make(8, capacity=64)
    turn = request(affinity=Affinity(session="s"))
    (first,) = place(router, turn)
    router.end(turn, 0.0)
    for _ in range(3):
        place(router, request(first=5000))
    assert place(router, request(704, affinity=Affinity(session="s"))) == [first]
    assert router.choices["session"] == 1


def test_a_rank_is_kept_to_and_one_that_is_not_there_is_named() -> None:
    router = make(3)
    assert place(router, request(affinity=Affinity(rank=2))) == ["engine 2"]
    with pytest.raises(NoEngineError, match="there are 0, 1, 2"):
        place(router, request(affinity=Affinity(rank=7)))


def test_a_rank_is_found_whatever_version_its_engine_has() -> None:
    """Also where another version has more room, as in the middle of a rolling upgrade."""
    router = make(3)
    router.join(facts(3, version="newer"), 0.0)
    assert place(router, request(affinity=Affinity(rank=3))) == ["engine 3"]
    assert place(router, request(affinity=Affinity(rank=2))) == ["engine 2"]


def test_the_queue_of_the_whole_is_bounded() -> None:
    router = make(2, capacity=4)
    place(router, *(request() for _ in range(16)))
    with pytest.raises(AllFullError) as raised:
        place(router, request())
    assert raised.value.retry_after_s >= 1.0


def test_what_an_engine_tells_of_others_is_for_it_to_refuse_for() -> None:
    """What it last told of may have ended since: aborted requests of this very frontend are among them for a moment."""
    router = make(1, capacity=4)
    router.load("engine 0", 4, 4, 0.0)
    assert place(router, *(request() for _ in range(8))) == ["engine 0"] * 8
    with pytest.raises(AllFullError):
        place(router, request())


def test_a_refused_request_goes_to_one_that_has_not_refused_it() -> None:
    router = make(2)
    asked = request()
    (first,) = place(router, asked)
    full = Failure(message="full", type="QueueFullError", retry_after_s=9.0)
    decision = router.refused(asked, full, 0.0)
    assert isinstance(decision, Move)
    assert decision.target.facts.name != first
    assert isinstance(router.refused(asked, full, 0.0), Fail)


def test_what_waits_for_an_engine_that_comes_back_with_other_weights_fails() -> None:
    router = make(1)
    begun, new = request(), request()
    place(router, begun, new)
    begun.work.num_tokens = 3  # type: ignore[misc]
    assert [type(each) for each in router.leave("engine 0", KILLED, 1.0, is_awaited=True)] == [Wait, Wait]
    failed, moved = router.join(facts(0, version="v2"), 2.0)
    assert isinstance(failed, Fail)
    assert (failed.request, failed.failure) == (begun, KILLED)
    assert isinstance(moved, Move)
    assert moved.request is new


def test_what_an_engine_that_ends_does_not_take_waits_for_one_that_comes_back() -> None:
    router = make(2)
    router.leave("engine 0", KILLED, 0.0, is_awaited=True)
    asked = request(affinity=Affinity(rank=1))
    assert place(router, asked) == ["engine 1"]
    ending = Failure(message="the engine is shutting down", type=SHUT_DOWN)
    assert isinstance(router.refused(asked, ending, 0.0), Wait)
    with pytest.raises(NoEngineError):
        router.place(request(), 0.0)
    assert router.leave("engine 1", KILLED, 1.0, is_awaited=True) == []
    (move,) = router.join(facts(1), 2.0)  # another life of what refused it
    assert isinstance(move, Move)
    assert (move.request, asked.member) == (asked, router.members["engine 1"])


def test_what_an_engine_that_ends_does_not_take_fails_where_none_is_left_or_comes_back() -> None:
    ending = Failure(message="the engine is shutting down", type=SHUT_DOWN)
    alone, asked = make(1), request()
    place(alone, asked)
    assert isinstance(alone.refused(asked, ending, 0.0), Fail)
    router, waiting = make(2), request()
    router.leave("engine 0", KILLED, 0.0, is_awaited=True)
    place(router, waiting)
    assert isinstance(router.refused(waiting, ending, 0.0), Wait)
    assert router.leave("engine 1", KILLED, 1.0) == []
    (failed,) = router.give_up("engine 0", KILLED)
    assert isinstance(failed, Fail)
    assert failed.request is waiting


def test_those_that_were_full_for_a_while_are_asked_again_before_the_next_tick() -> None:
    router = make(2)
    asked = request()
    place(router, asked)
    full = Failure(message="full", type="QueueFullError", retry_after_s=9.0)
    assert isinstance(router.refused(asked, full, 0.0), Move)
    assert isinstance(router.refused(asked, full, 0.0), Fail)
    with pytest.raises(AllFullError):
        router.place(request(), 0.5)
    assert router.place(request(), 1.5).facts.name in router.members


def test_requests_of_a_dead_engine_move_and_two_deaths_without_a_token_quarantine() -> None:
    router = make(3)
    poison, good = request(affinity=Affinity(rank=0)), request(affinity=Affinity(rank=0))
    place(router, poison, good)
    moves = router.leave("engine 0", KILLED, 1.0)
    assert {type(each) for each in moves} == {Move}
    good.work.num_tokens = 5  # type: ignore[misc]
    assert poison.member is not None
    if good.member is not poison.member:
        router._disembark(good, 1.0)
        router._board(good, poison.member, 1.0)
    decisions = {each.request: each for each in router.leave(poison.member.facts.name, KILLED, 2.0)}
    failed = decisions[poison]
    assert isinstance(failed, Fail)
    assert "two engines died while running this request" in failed.failure.message
    assert isinstance(decisions[good], Move)
    assert router.num_quarantined == 1


def test_of_several_that_two_engines_died_with_each_is_tried_alone() -> None:
    router = make(5)
    suspects = [request(affinity=Affinity(rank=0)) for _ in range(4)]
    place(router, *suspects)
    router.leave("engine 0", KILLED, 1.0)
    for each in suspects:
        router._disembark(each, 1.0)
        router._board(each, router.members["engine 1"], 1.0)
    decisions = router.leave("engine 1", KILLED, 2.0)
    assert [type(each) for each in decisions] == [Move, Move, Move, Wait]
    first, second, third, last = suspects
    assert len({each.member for each in (first, second, third)}) == 3

    assert router.tick(2.25) == []
    second.work.num_tokens = 1  # type: ignore[misc]
    (move,) = router.tick(2.5)
    assert (move.request, last.member) == (last, second.member)

    assert first.member is not None
    innocent = request()
    router._board(innocent, first.member, 3.0)
    failed, moved = router.leave(first.member.facts.name, KILLED, 3.0)
    assert isinstance(failed, Fail)
    assert "two engines and then a third died while running this request" in failed.failure.message
    assert isinstance(moved, Move)
    assert (moved.request, router.num_quarantined) == (innocent, 1)


def test_a_request_has_only_so_many_migrations() -> None:
    """Between which it brings no token; those of an engine that is silent count as those of one that died."""
    router = make(5, max_migrations=1)
    asked = request(affinity=Affinity(rank=0))
    place(router, asked)

    def lose(now_s: float, num_tokens: int) -> Decision:
        asked.work.num_tokens = num_tokens  # type: ignore[misc]
        assert asked.member is not None
        (decision,) = router.leave(asked.member.facts.name, KILLED, now_s)
        return decision

    for number in (1, 2):
        assert isinstance(lose(float(number), number), Move)
    asked.work.num_tokens = 3  # type: ignore[misc]
    moves: list[Decision] = []
    for tick in range(8, 24):
        for name in router.members:
            if asked.member is None or name != asked.member.facts.name or moves:
                router.heard(name, 0.25 * tick)
        moves += router.tick(0.25 * tick)
    assert [each.reason for each in moves if isinstance(each, Move)] == ["silent"]
    failed = lose(7.0, 3)
    assert isinstance(failed, Fail)
    assert "lost 2 engines without a token between (max_migrations is 1)" in failed.failure.message
    assert asked.num_migrations == 3


def test_requests_wait_for_an_awaited_engine_the_most_urgent_first() -> None:
    router = make(1)
    late, urgent = request(), request(priority=-1)
    place(router, late, urgent)
    decisions = router.leave("engine 0", KILLED, 1.0, is_awaited=True)
    assert [type(each) for each in decisions] == [Wait, Wait]
    moves = router.join(facts(0), 2.0)
    assert [each.request for each in moves] == [urgent, late]


def test_what_waits_fails_when_the_awaited_engine_does_not_come() -> None:
    router = make(1)
    asked = request()
    place(router, asked)
    router.leave("engine 0", KILLED, 1.0, is_awaited=True)
    (decision,) = router.give_up("engine 0", Failure(message="does not start"))
    assert isinstance(decision, Fail)
    assert decision.failure.message == "does not start"
    assert not router.held


@pytest.mark.parametrize("has_begun", [False, True])
def test_what_waits_for_a_version_that_is_gone_begins_at_another_unless_it_has_tokens(has_begun: bool) -> None:
    router = Router(RouterOptions(), random.Random(1))
    router.join(facts(0, capacity=1, max_waiting=0), 0.0)
    waiting, other = request(), request()
    place(router, waiting)
    router.join(facts(1, version="v2", capacity=1, max_waiting=0), 0.0)
    place(router, other)
    waiting.work.num_tokens = int(has_begun)  # type: ignore[misc]
    (wait,) = router.leave("engine 0", KILLED, 1.0, is_awaited=True)
    assert isinstance(wait, Wait)
    failed = router.give_up("engine 0", Failure(message="it does not come back"))
    assert [each.request for each in failed] == ([waiting] if has_begun else [])
    router.end(other, 1.0)
    assert [each.request for each in router.tick(1.25)] == ([] if has_begun else [waiting])


def test_moves_are_rationed_and_the_rest_follows() -> None:
    router = make(2, capacity=200, migrations_per_capacity_s=0.1)
    requests = [request(affinity=Affinity(rank=0)) for _ in range(190)]
    place(router, *requests)
    decisions = router.leave("engine 0", KILLED, 1.0)
    moved = sum(isinstance(each, Move) for each in decisions)
    assert 0 < moved < 190
    assert len(router.held) == 190 - moved
    for tick in range(40):
        router.heard("engine 1", 1.25 + 0.25 * tick)
        router.tick(1.25 + 0.25 * tick)
    assert not router.held
    assert all(each.member is router.members["engine 1"] for each in requests)


def test_a_silent_engine_is_suspected_and_used_again_once_it_speaks() -> None:
    router = make(2)
    asked = request(affinity=Affinity(rank=0))
    place(router, asked)
    decisions = []
    for tick in range(12):
        router.heard("engine 1", 0.25 * tick)
        decisions += router.tick(0.25 * tick)
    (move,) = decisions
    assert isinstance(move, Move)
    assert move.reason == "silent"
    assert place(router, request(), request()) == ["engine 1", "engine 1"]
    router.heard("engine 0", 3.0)
    router.tick(3.0)
    assert "engine 0" in place(router, request(), request(), now_s=3.0)


def test_an_engine_whose_process_works_may_be_silent_for_longer() -> None:
    router = make(2)
    asked = request(affinity=Affinity(rank=0))
    place(router, asked)
    moves: list[tuple[float, Decision]] = []
    for tick in range(400):
        now_s = 0.25 * tick
        router.heard("engine 1", now_s)
        router.worked("engine 0", now_s)
        moves += ((now_s, each) for each in router.tick(now_s))
    ((moved_s, move),) = moves
    assert isinstance(move, Move)
    assert move.reason == "silent"
    assert 60.0 < moved_s < 61.0, "it may be in an endless loop"


def test_an_engine_whose_process_has_worked_before_and_does_no_more_is_suspected() -> None:
    router = make(2)
    place(router, request(affinity=Affinity(rank=0)))
    moved_s = []
    for tick in range(80):
        now_s = 0.25 * tick
        router.heard("engine 1", now_s)
        if now_s <= 10.0:
            router.worked("engine 0", now_s)
        moved_s += [now_s] * len(router.tick(now_s))
    assert moved_s == [12.25]


def test_each_move_for_silence_that_brings_no_token_needs_more_evidence_than_the_one_before() -> None:
    """All engines say nothing now and then: their host is busy, or this process is."""
    router = make(6, max_migrations=9)
    asked = request(affinity=Affinity(rank=0))
    place(router, asked)
    moved_s: list[float] = []
    for tick in range(800):
        now_s = 0.25 * tick
        for name in router.members:
            if asked.member is None or name != asked.member.facts.name:
                router.heard(name, now_s)
        moved_s += [now_s] * len(router.tick(now_s))
    waits_s = [after - before for before, after in zip([0.0, *moved_s], moved_s, strict=False)]
    assert [round(each) for each in waits_s] == [2, 8, 32, 128]
    asked.work.num_tokens = 1  # type: ignore[misc]
    moved_again_s = []
    for tick in range(800, 820):
        moved_again_s += [0.25 * tick] * len(router.tick(0.25 * tick))
    assert moved_again_s, "a token ends the row of moves"


def test_new_requests_wait_at_a_silent_engine_where_there_is_no_other() -> None:
    router = make(1)
    place(router, asked := request())
    for tick in range(30):
        assert router.tick(0.25 * tick) == []
    assert router.members["engine 0"].unhealthy_reason == "silent"
    assert place(router, request(), now_s=7.5) == ["engine 0"]
    router.join(facts(1), 7.5)
    assert place(router, request(), now_s=7.5) == ["engine 1"]
    (moved, also_moved) = router.tick(7.75)
    assert moved.request is asked
    assert {moved.target.facts.name, also_moved.target.facts.name} == {"engine 1"}
    router.drain("engine 0", 8.0)
    router.leave("engine 1", KILLED, 8.0)
    with pytest.raises(NoEngineError):
        router.place(request(), 8.0)


def test_nobody_is_suspected_for_a_pause_of_this_process() -> None:
    router = make(2)
    place(router, request(), request())
    router.tick(0.25)
    assert router.tick(60.0) == []
    assert router.tick(60.25) == []


def test_an_engine_ten_times_slower_than_its_kind_loses_its_requests() -> None:
    router = make(4, capacity=64)
    requests = [request(affinity=Affinity(rank=index)) for index in range(4)]
    place(router, *requests)
    moves = []
    for tick in range(60):
        for index, each in enumerate(requests):
            if each.member is not None and each.member.facts.rank == 0 and index == 0:
                each.work.num_tokens = 1 + tick // 8  # type: ignore[misc]
            else:
                each.work.num_tokens += 12  # type: ignore[misc]
        for index in range(4):
            router.heard(f"engine {index}", 0.25 * tick)
        moves += router.tick(0.25 * tick)
    assert [each.reason for each in moves if isinstance(each, Move)] == ["slow"]


def test_requests_move_between_engines_of_one_version_alone() -> None:
    router = Router(RouterOptions(), random.Random(1))
    for index, version in enumerate(("v1", "v2", "v1")):
        router.join(facts(index, version=version), 0.0)
    asked = RoutedRequest("m", Progress(), num_prompt_tokens=5, affinity=Affinity())
    member = router.place(asked, 0.0)
    asked.work.num_tokens = 3  # type: ignore[misc]
    version = member.facts.version
    while True:
        assert asked.member is not None
        (decision,) = router.leave(asked.member.facts.name, KILLED, 1.0)
        if isinstance(decision, Fail):
            break
        assert isinstance(decision, Move)
        assert decision.target.facts.version == version
        asked.work.num_tokens += 1  # type: ignore[misc]


def test_of_several_versions_new_requests_go_to_the_less_loaded_whatever_has_come_and_gone() -> None:
    router, chance = Router(RouterOptions(), random.Random(1)), random.Random(2)
    for index in range(6):
        router.join(facts(index, version=f"v{index % 2}", capacity=100), 0.0)
    on_board: list[RoutedRequest] = []

    def loads() -> dict[str, float]:
        active: dict[str, list[int]] = {}
        for member in router.members.values():
            active.setdefault(member.facts.version, []).append(member.num_active)
        return {version: sum(each) / len(each) for version, each in active.items()}

    for now_s in range(300):
        name = chance.choice(list(router.members))
        match chance.randrange(8):
            case 0 | 1 if on_board:
                router.end(on_board.pop(chance.randrange(len(on_board))), now_s)
            case 2:
                router.load(name, chance.randrange(20), 0, now_s)
            case 3:
                again = router.members[name].facts
                router.leave(name, KILLED, now_s, is_awaited=True)
                router.join(again, now_s)
            case 4 if (
                sum(each.facts.version == router.members[name].facts.version for each in router.members.values()) > 1
            ):
                version = chance.choice(("v0", "v1"))
                router.change_version(name, version, version, now_s)
            case _:
                before, asked = loads(), request(first=now_s)
                version = router.place(asked, now_s).facts.version
                assert before[version] == min(before.values())
                on_board.append(asked)
        on_board = [each for each in on_board if each.member is not None]


def test_requests_of_an_engine_that_reads_other_weights_go_on_at_engines_that_have_them_too() -> None:
    router = Router(RouterOptions(), random.Random(1))
    for index, version in enumerate(("v1", "v1", "v2")):
        router.join(facts(index, version=version), 0.0)
    asked = request(affinity=Affinity(rank=0))
    place(router, asked)
    asked.work.num_tokens = 3  # type: ignore[misc]
    keys = prefix_names(asked.tokens, PrefixKey(weights="v1"), 64)
    router.stored("engine 0", keys)
    assert router.prefixes.holders(keys, -1)
    assert router.change_version("engine 0", "v2", "v2", 1.0) == []
    assert not router.prefixes.holders(keys, -1), "its cache is of the old ones"
    (decision,) = router.leave("engine 0", KILLED, 2.0)
    assert isinstance(decision, Move)
    assert decision.target.facts.name == "engine 2"


def test_a_draining_engine_gets_nothing_new_and_keeps_what_it_has() -> None:
    router = make(2)
    asked = request(affinity=Affinity(rank=0))
    place(router, asked)
    router.drain("engine 0", 1.0)
    assert place(router, request(), request()) == ["engine 1", "engine 1"]
    assert asked.member is router.members["engine 0"]


def test_of_engines_that_fail_together_the_first_is_why_their_requests_fail() -> None:
    echo = Failure(message="rank 0 is gone", type=PEER_LOST)
    router = make(2)
    asked = [request(), request()]
    engines = [router.place(each, 0.0).facts.name for each in asked]
    assert sorted(engines) == ["engine 0", "engine 1"]
    (moved,) = router.leave(engines[0], KILLED, 1.0)
    assert isinstance(moved, Move)
    decisions = router.leave(engines[1], echo, 1.0)
    assert {type(each) for each in decisions} == {Fail}
    assert {each.failure.message for each in decisions} == {KILLED.message}
    router.join(facts(0), 2.0)  # what was before is no cause of what comes
    late = request()
    router.place(late, 2.0)
    (decision,) = router.leave("engine 0", echo, 3.0)
    assert decision.failure.message == echo.message
