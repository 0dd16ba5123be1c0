"""Children that die are replaced within their restarts, and their owner hears of each end and of its cause."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from headrace.core.process import supervisor
from headrace.core.process.child import Child
from headrace.core.process.supervisor import STABLE_AFTER_S, Restarts, Supervised, in_thread
from headrace.ipc.failure import Failure, ModelError
from headrace.ipc.messages import SCHEMA_HASH, Ready, Start

DIES = "import sys; sys.exit(3)"
SERVES = """
import sys
from headrace.ipc.messages import Ready, Start, Stop
from headrace.ipc.transport.channel import Channel
from headrace.ipc.wait import Deadline
channel = Channel.inherited(int(sys.argv[1]), Start | Stop)
channel.receive(Deadline(30.0))
channel.send(Ready(address="ipc:///nowhere", startup_s={}))
channel.receive(Deadline(None))
"""
LIMIT_S = 120.0


def child_of(program: str) -> Child:
    return Child("doomed", ["-c", program], Start(schema_hash=SCHEMA_HASH, options={}, bind=""))


def kept(supervised: Supervised[Child], on_ready: Callable[[Ready], None] = lambda ready: None) -> list[Failure]:
    """The ends until it is not to come back."""
    ends: list[Failure] = []

    def on_end(failure: Failure) -> bool:
        ends.append(failure)
        return supervised.comes_back

    asyncio.run(asyncio.wait_for(supervised.keep(on_ready, on_end), LIMIT_S))
    return ends


def test_a_child_that_dies_again_and_again_is_replaced_as_often_as_it_may_be() -> None:
    starts: list[Child] = []

    def launch(weights_path: str) -> Child:
        starts.append(child_of(DIES))
        return starts[-1]

    ends = kept(Supervised("doomed", launch, Restarts(most=2, first_pause_s=0.01)))
    assert len(starts) == len(ends) == 3
    for child, end in zip(starts, ends, strict=True):
        assert f"(pid {child.pid}) ended with exit status 3" in end.message


def test_only_a_child_that_has_served_for_long_is_replaced_as_if_it_were_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not one whose start took as long."""
    now_s = [0.0]
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    supervised = Supervised("doomed", lambda path: child_of(SERVES), Restarts(most=1, first_pause_s=0.01))
    lives_s = [STABLE_AFTER_S + 1, STABLE_AFTER_S + 1, STABLE_AFTER_S - 1]
    replaced: list[bool] = []

    async def serve() -> None:
        for life_s in lives_s:
            now_s[0] += 10 * STABLE_AFTER_S
            await supervised.start()
            now_s[0] += life_s
            assert supervised.child is not None
            supervised.child.kill()
            replaced.append(supervised.comes_back)
            supervised.pause_s()

    asyncio.run(serve())
    assert replaced == [True, True, False]


def test_the_long_life_of_one_child_counts_for_none_of_those_that_follow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    programs = iter([SERVES, *[DIES] * 3])
    restarts = Restarts(most=2, first_pause_s=0.01)
    supervised = Supervised("doomed", lambda path: child_of(next(programs)), restarts)

    def on_ready(ready: Ready) -> None:
        now_s[0] += STABLE_AFTER_S + 1
        assert supervised.child is not None
        os.kill(supervised.child.pid, signal.SIGKILL)

    assert [failure.type for failure in kept(supervised, on_ready)] == ["SIGKILL", "exit status 3", "exit status 3"]


def test_it_comes_back_as_long_as_its_last_replacement_starts() -> None:
    supervised = Supervised("doomed", lambda path: child_of(DIES), Restarts(most=1), child_of(DIES))
    seen: list[bool] = []

    async def die_twice() -> None:
        for _ in range(2):
            with pytest.raises(Exception, match="exit status 3"):
                await supervised.start()
            seen.append(supervised.comes_back)
            supervised.pause_s()
            seen.append(supervised.comes_back)

    asyncio.run(die_twice())
    assert seen[:3] == [True, True, False]


def test_pauses_double_up_to_the_longest() -> None:
    supervised = Supervised("doomed", lambda path: child_of(DIES), Restarts(9, first_pause_s=0.5, longest_pause_s=3.0))
    assert [supervised.pause_s() for _ in range(9)] == [0.5, 1.0, 2.0, *[3.0] * 6]
    supervised.num_replaced = 5000
    assert supervised.pause_s() == 3.0


def test_a_child_that_cannot_be_started_has_ended_with_the_reason_and_its_name() -> None:
    def missing(weights_path: str) -> Child:
        raise ModelError("the model's folder is away")

    (end, again) = kept(Supervised("engine-core", missing, Restarts(most=1, first_pause_s=0.01)))
    assert (end.process, end.message) == (again.process, again.message) == ("engine-core", "the model's folder is away")


def test_a_replacement_gets_the_weights_of_the_one_before() -> None:
    paths: list[str] = []

    def launch(weights_path: str) -> Child:
        paths.append(weights_path)
        start = Start(schema_hash=SCHEMA_HASH, options={}, bind="", weights_path=f"{weights_path}'")
        return Child("doomed", ["-c", DIES], start)

    kept(Supervised("doomed", launch, Restarts(most=2, first_pause_s=0.01), weights_path="/a"))
    assert paths == ["/a", "/a'", "/a''"]


def test_a_start_that_is_cancelled_leaves_its_child_to_who_stops_it() -> None:
    async def cancelled() -> Supervised[Child]:
        launched = asyncio.Event()
        loop = asyncio.get_running_loop()

        def launch(weights_path: str) -> Child:
            loop.call_soon_threadsafe(launched.set)
            return child_of(SERVES)

        supervised = Supervised("doomed", launch, Restarts(most=0))
        starting = asyncio.create_task(supervised.start())
        await asyncio.wait_for(launched.wait(), LIMIT_S)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        return supervised

    supervised = asyncio.run(cancelled())
    assert supervised.child is not None
    supervised.stop(0.0)
    assert not supervised.child.alive


def test_what_waits_in_threads_neither_waits_for_others_nor_keeps_a_loop_from_its_end() -> None:
    many, over = 3 * (os.cpu_count() or 1) + 40, threading.Event()

    async def wait() -> None:
        forever = [in_thread(over.wait) for _ in range(many)]
        assert await asyncio.wait_for(in_thread(lambda: 5), LIMIT_S) == 5
        assert not any(each.done() for each in forever)
        with pytest.raises(ZeroDivisionError):
            await in_thread(lambda: 1 // 0)

    asyncio.run(wait())
    over.set()
