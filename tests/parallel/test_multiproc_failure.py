"""How workers fail, as their executor sees it: in each phase and way the cause is told, and nothing stays."""

from __future__ import annotations

import os
import re
import signal
import time

import msgspec
import pytest
from multiproc_parts import HERE, Ranks, options
from patience import wait_until, within
from thinned import every, pairs

from headrace.core.process.child import start_engine
from headrace.executor.placement import worker_group
from headrace.ipc.control import DescribeEngine
from headrace.ipc.failure import EngineDeadError, EngineStartError

WITHIN_S = 5.0
"""What the design promises, from a death to the caller's error."""
STEP_TIMEOUT_S = 0.4
HOW_TOLD = {
    "sigkill": r"worker {rank} \(pid {pid}\) was killed by signal 9 \(SIGKILL\)",
    "sigterm": r"worker {rank} \(pid {pid}\) was killed by signal 15 \(SIGTERM\)",
    "exit": r"worker {rank} \(pid {pid}\) ended with exit status 3",
    "exception": r"rank {rank} was told to fail in .*\n.*worker {rank} of 2 \(pid {pid}\) ended with exit status \d+",
    "hang": r"worker {rank} \(pid {pid}\) did not finish its part of a step within 0.4 s \(step_timeout\)",
}
NUM_STEPS = 12
"""More than the ring has slots: by then a rank that nobody listens to is missed too."""


@pytest.fixture(autouse=True)
def workers_find_the_null_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", HERE)


def check(ranks: Ranks, error: BaseException, rank: int, how: str, phase: str) -> None:
    """That the error tells what happened to the rank, and that it was told once, whatever other ranks met after it."""
    failure = error.failure  # type: ignore[attr-defined]
    assert re.search(HOW_TOLD[how].format(rank=rank, pid=ranks.pid(rank)), str(error)), str(error)
    assert (failure.process, failure.rank, failure.pid, failure.phase) == ("worker", rank, ranks.pid(rank), phase)
    wait_until(lambda: bool(ranks.failures), 1, "the failure's report")
    assert ranks.failures == [failure]


def run_steps(ranks: Ranks) -> None:
    for _ in range(NUM_STEPS):
        ranks.step()


@pytest.mark.parametrize(
    ("begun", "how"),
    pairs(
        (("describe", "read config"), ("load", "load weights"), ("allocate", "allocate")),
        ("sigkill", "exception", "exit"),
    ),
    ids=str,
)
def test_a_worker_that_ends_while_it_starts(begun: tuple[str, str], how: str) -> None:
    (where, phase), rank = begun, 1
    with Ranks(options(rank=rank, phase=where, how=how)) as ranks:
        with pytest.raises(EngineStartError) as caught:
            ranks.bring_up()
        check(ranks, caught.value, rank, how, phase)
        assert f"rank {rank} is about to {how}" in "".join(caught.value.failure.log_tail)  # type: ignore[union-attr]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", ["sigkill", "sigterm"])
def test_a_worker_that_is_killed_before_it_has_said_anything(how: str, rank: int) -> None:
    with Ranks(options()) as ranks:
        os.kill(ranks.pid(rank), signal.SIGKILL if how == "sigkill" else signal.SIGTERM)
        with pytest.raises(EngineStartError) as caught:
            ranks.bring_up()
        check(ranks, caught.value, rank, how, "start")


@pytest.mark.parametrize(("how", "rank"), pairs(("sigkill", "exception", "exit", "hang"), (0, 1)))
def test_a_worker_that_ends_or_hangs_in_a_step(how: str, rank: int) -> None:
    with Ranks(options(rank=rank, phase="step", how=how, step_timeout=STEP_TIMEOUT_S)) as ranks:
        ranks.bring_up()
        began_s = time.monotonic()
        with pytest.raises(EngineDeadError) as caught:
            run_steps(ranks)
        assert time.monotonic() - began_s < within(WITHIN_S)
        check(ranks, caught.value, rank, how, "step")
        tail = "\n".join(caught.value.failure.log_tail)  # type: ignore[union-attr]
        assert f"rank {rank} is about to {how}" in tail
        if how == "hang":
            assert "in _perhaps" in tail  # where it hangs
        with pytest.raises(EngineDeadError):
            ranks.submit()


@pytest.mark.parametrize("number", every(3, [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]))
def test_a_signal_to_all_processes_is_left_to_the_parent_by_workers(number: signal.Signals) -> None:
    with Ranks(options(step_delay_s=0.01)) as ranks:
        ranks.bring_up()
        for rank in (0, 1):
            os.kill(ranks.pid(rank), number)
        for _ in range(3):
            ranks.step()
        assert not ranks.failures


@pytest.mark.parametrize("rank", every(2, [0, 1]))
@pytest.mark.parametrize("how", ["sigkill"])
def test_a_worker_that_is_killed_while_nothing_runs(how: str, rank: int) -> None:
    with Ranks(options()) as ranks:
        ranks.bring_up()
        ranks.step()
        wait_until(lambda: not ranks.executor._unfinished(), 30, "the step's end on every rank")
        os.kill(ranks.pid(rank), signal.SIGKILL)
        wait_until(lambda: bool(ranks.failures), WITHIN_S, "the failure's report")
        with pytest.raises(EngineDeadError) as caught:
            ranks.submit()
        check(ranks, caught.value, rank, how, "idle")


def test_a_worker_that_does_not_answer_a_command_is_named_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    with Ranks(msgspec.structs.replace(options(), control_timeout=0.2)) as ranks:
        monkeypatch.setattr(worker_group, "COMMAND_GRACE_S", 60.0)  # a busy machine takes a while
        ranks.bring_up()
        ranks.step()
        assert len(ranks.executor.control(DescribeEngine())) == 2
        monkeypatch.setattr(worker_group, "COMMAND_GRACE_S", 0.2)
        os.kill(ranks.pid(1), signal.SIGSTOP)
        with pytest.raises(EngineDeadError, match=r"worker 1 .* did not answer a command within 0\.2 s") as caught:
            ranks.executor.control(DescribeEngine())
        assert "worker 1 is stopped" in str(caught.value)


@pytest.mark.parametrize("rank", every(2, [1, 0]))
def test_a_worker_that_is_stopped_while_nothing_runs_is_missed_in_the_next_steps(rank: int) -> None:
    with Ranks(options(step_timeout=STEP_TIMEOUT_S)) as ranks:
        ranks.bring_up()
        os.kill(ranks.pid(rank), signal.SIGSTOP)
        with pytest.raises(EngineDeadError, match=f"worker {rank} is stopped by a signal or a debugger") as caught:
            run_steps(ranks)
        check(ranks, caught.value, rank, "hang", "step")


@pytest.mark.system
def test_both_ranks_killed_at_once_is_one_failure_and_a_new_executor_starts() -> None:
    with Ranks(options()) as ranks:
        ranks.bring_up()
        for rank in (0, 1):
            os.kill(ranks.pid(rank), signal.SIGKILL)
        wait_until(lambda: bool(ranks.failures), WITHIN_S, "the failure's report")
    assert len(ranks.failures) == 1
    with Ranks(options()) as ranks:
        assert ranks.bring_up().step().step == 0


# --- with an engine core around it; all of its deaths are in test_multiproc_kill_matrix.py ---------------------------


def test_an_engine_whose_worker_cannot_start_gives_the_cause_whole() -> None:
    child = start_engine(options(rank=1, phase="load", how="exception"))
    with pytest.raises(EngineStartError, match="rank 1 was told to fail in load") as caught:
        child.wait_ready(30)
    child.stop()
    failure = caught.value.failure
    assert failure is not None
    assert (failure.process, failure.rank) == ("worker", 1)
    assert "rank 1 is about to exception" in failure.log_tail
    assert "in _perhaps" in failure.traceback
