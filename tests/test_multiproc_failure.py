"""The kill matrix of workers: each rank, each phase, each way to go; the cause reaches the caller, nothing stays."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import psutil
import pytest
from multiproc_parts import HERE, Ranks, options, wait_until
from wire_client import WireClient

from headrace.core.supervisor import Child, start_engine
from headrace.ipc.failure import EngineDeadError, EngineStartError, Failure
from headrace.ipc.messages import Draining, EngineFailed, StepOutputs

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


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", ["sigkill", "sigterm", "exception", "exit"])
@pytest.mark.parametrize(
    ("where", "phase"), [("describe", "read config"), ("load", "load weights"), ("allocate", "allocate")]
)
def test_a_worker_that_ends_while_it_starts(where: str, phase: str, how: str, rank: int) -> None:
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


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", ["sigkill", "sigterm", "exception", "exit", "hang"])
def test_a_worker_that_ends_or_hangs_in_a_step(how: str, rank: int) -> None:
    with Ranks(options(rank=rank, phase="step", how=how, step_timeout=STEP_TIMEOUT_S)) as ranks:
        ranks.bring_up()
        began_s = time.monotonic()
        with pytest.raises(EngineDeadError) as caught:
            run_steps(ranks)
        assert time.monotonic() - began_s < WITHIN_S
        check(ranks, caught.value, rank, how, "step")
        tail = "\n".join(caught.value.failure.log_tail)  # type: ignore[union-attr]
        assert f"rank {rank} is about to {how}" in tail
        if how == "hang":
            assert "in _perhaps" in tail  # where it hangs
        with pytest.raises(EngineDeadError):
            ranks.submit()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", ["sigkill", "sigterm"])
def test_a_worker_that_is_killed_while_nothing_runs(how: str, rank: int) -> None:
    with Ranks(options()) as ranks:
        ranks.bring_up()
        ranks.step()
        wait_until(lambda: not ranks.executor._unfinished(), 5, "the step's end on every rank")
        os.kill(ranks.pid(rank), signal.SIGKILL if how == "sigkill" else signal.SIGTERM)
        wait_until(lambda: bool(ranks.failures), WITHIN_S, "the failure's report")
        with pytest.raises(EngineDeadError) as caught:
            ranks.submit()
        check(ranks, caught.value, rank, how, "idle")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_is_stopped_while_nothing_runs_is_missed_in_the_next_steps(rank: int) -> None:
    with Ranks(options(step_timeout=STEP_TIMEOUT_S)) as ranks:
        ranks.bring_up()
        os.kill(ranks.pid(rank), signal.SIGSTOP)
        with pytest.raises(EngineDeadError, match=f"worker {rank} is stopped by a signal or a debugger") as caught:
            run_steps(ranks)
        check(ranks, caught.value, rank, "hang", "step")


def test_both_ranks_killed_at_once_is_one_failure_and_a_new_executor_starts() -> None:
    with Ranks(options()) as ranks:
        ranks.bring_up()
        for rank in (0, 1):
            os.kill(ranks.pid(rank), signal.SIGKILL)
        wait_until(lambda: bool(ranks.failures), WITHIN_S, "the failure's report")
    assert len(ranks.failures) == 1
    with Ranks(options()) as ranks:
        assert ranks.bring_up().step().step == 0


# --- with an engine core around it ----------------------------------------------------------------------------------


@contextmanager
def engine(**overrides: Any) -> Iterator[tuple[Child, str, list[psutil.Process], list[Failure]]]:
    """A core as a program, its address, its workers by rank, and what its end is reported with."""
    child = start_engine(options(step_timeout=STEP_TIMEOUT_S, **overrides))
    reported: list[Failure] = []
    child.on_exit(reported.append)
    try:
        address = child.wait_ready(30).address
        workers = [p for p in psutil.Process(child.pid).children() if "headrace.executor.worker" in p.cmdline()]
        yield child, address, sorted(workers, key=lambda p: p.pid), reported
        _, alive = psutil.wait_procs(workers, timeout=WITHIN_S)
        assert not alive or child.alive
    finally:
        child.stop(0.0)
        assert not child.alive


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("when", ["idle", "decode", "drain"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_the_caller_hears_which_worker_is_gone(how: signal.Signals, when: str, rank: int) -> None:
    with engine(step_delay_s=0.01) as (child, address, workers, reported), WireClient(address) as client:
        client.add(1, [5, 6], max_tokens=30_000 if when != "idle" else 3, ignore_eos=True)
        client.receive(StepOutputs)
        if when == "idle":
            client.finish(1)
        if when == "drain":
            os.kill(child.pid, signal.SIGTERM)
            client.receive(Draining)
        workers[rank].send_signal(how)
        if when == "idle" and how == signal.SIGSTOP:
            client.add(2, [5, 6], max_tokens=30_000, ignore_eos=True)
        failure = client.receive(EngineFailed, timeout_s=WITHIN_S).failure
        assert (failure.process, failure.rank, failure.pid) == ("worker", rank, workers[rank].pid)
        assert ("step_timeout" if how == signal.SIGSTOP else f"signal {how.value} ({how.name})") in failure.message
        wait_until(lambda: not child.alive, WITHIN_S, "the core's end")
        assert child.status == 70
        assert len(reported) == 1


def test_workers_end_with_a_killed_core() -> None:
    with engine() as (child, _, workers, _reported):
        assert len(workers) == 2
        os.kill(child.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(workers, timeout=WITHIN_S)
        assert not alive


def test_a_worker_that_hangs_while_the_engine_starts_is_named_with_its_phase_and_its_stacks() -> None:
    child = start_engine(msgspec.structs.replace(options(rank=1, phase="load", how="hang"), startup_timeout=3.0))
    words = r"worker 1 \(pid \d+\) did not become ready within 3 s \(startup_timeout\)"
    with pytest.raises(EngineStartError, match=words) as caught:
        child.wait_ready()
    failure = caught.value.failure
    assert failure is not None
    assert (failure.process, failure.rank, failure.phase) == ("worker", 1, "load weights")
    assert "in _perhaps" in "\n".join(failure.log_tail)
    wait_until(lambda: not child.alive, WITHIN_S, "the engine's end")


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
