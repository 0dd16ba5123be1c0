"""The audit of an idle engine's books: in pieces that a request interrupts, once after the last step, and mended."""

from __future__ import annotations

import logging
import os
import platform
import subprocess
import sys
from collections.abc import Iterator

import pytest
from engine_parts import SteppedCore

from headrace.core.engine import loop
from headrace.core.schedule import blocks
from headrace.ipc.control import PauseGeneration
from headrace.ipc.failure import InconsistentError
from headrace.ipc.messages import Control, FinishReason, GetStats


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> SteppedCore:
    monkeypatch.setattr(loop, "IDLE_CHECK_AFTER_S", 0.0)
    monkeypatch.setattr(blocks, "AUDITED_AT_ONCE", 4)
    return SteppedCore()


def serve(core: SteppedCore, max_tokens: int = 5) -> None:
    client = core.open()
    client.add(1, [5, 6, 7, 8, 9], max_tokens=max_tokens, ignore_eos=True)
    core.run_until_idle()
    assert [finish.reason for finish in client.finishes()] == [FinishReason.LENGTH]


def test_books_that_are_right_are_read_once_after_the_last_step(core: SteppedCore, monkeypatch) -> None:
    serve(core)
    core.loop._audit()
    monkeypatch.setattr(core.loop.scheduler, "audit", lambda: pytest.fail("nothing has run since"))
    core.loop._audit()
    monkeypatch.undo()
    serve(core)
    assert core.loop._audited_steps < core.loop.stats().steps


IN_A_PROCESS_OF_ITS_OWN = """
import psutil
from engine_parts import SteppedCore
from headrace.core.engine import loop

loop.IDLE_CHECK_AFTER_S = 0.0
core, process = SteppedCore(), psutil.Process()
everything = [bytes(2000) for _ in range(60_000)]
in_use = everything[499::500]
del everything
freed = process.memory_info().rss
core.open().add(1, [5, 6, 7, 8, 9], max_tokens=5, ignore_eos=True)
core.run_until_idle()
assert process.memory_info().rss > freed - (10 << 20), "glibc has given it back by itself"
core.loop._audit()
assert process.memory_info().rss < freed - (60 << 20)
assert len(in_use) == 120
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc that keeps what is freed")
def test_memory_that_is_free_between_blocks_in_use_goes_back_when_the_engine_is_idle() -> None:
    """Engines of other tests in one process with it may give it back before."""
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    script = [sys.executable, "-c", IN_A_PROCESS_OF_ITS_OWN]
    found = subprocess.run(script, capture_output=True, text=True, check=False, env=os.environ | path)
    assert found.returncode == 0, found.stderr


def test_a_request_does_not_wait_for_the_audit(core: SteppedCore, monkeypatch) -> None:
    serve(core)
    client = core.open()
    pieces: list[None] = []
    audit = core.loop.scheduler.audit

    def counted() -> Iterator[None]:
        for piece in audit():
            pieces.append(piece)
            if len(pieces) == 3:
                client.send(GetStats(call=1))
            yield piece

    monkeypatch.setattr(core.loop.scheduler, "audit", counted)
    core.loop._audit()
    assert len(pieces) == 3
    assert core.loop._audited_steps == 0, "it is made up for"
    core.loop.turn()
    core.loop._audit()
    assert len(pieces) > 10


@pytest.mark.parametrize("spoil", ["lost", "held", "listed twice", "misnamed"])
def test_books_of_blocks_that_are_wrong_are_told_and_begun_anew(core: SteppedCore, spoil: str, caplog) -> None:
    serve(core)
    pool = core.loop.scheduler.pool
    match spoil:
        case "lost":
            pool._free.pop()
        case "held":
            pool._references[3] += 1
        case "listed twice":
            pool._free.append(pool._free[0])
        case "misnamed":
            pool._hash_of[next(iter(pool._block_of.values()))] = b"x"
    with caplog.at_level(logging.ERROR):
        core.loop._audit()
    assert "the audit of the idle engine found: " in caplog.text
    assert pool.num_available == pool.num_blocks - 1
    core.loop.scheduler.check()
    serve(core)


def test_requests_that_a_pause_keeps_compute_anew_where_books_were_wrong(core: SteppedCore) -> None:
    client = core.open()
    client.add(1, [5, 6, 7, 8, 9], max_tokens=20, ignore_eos=True)
    for _ in range(4):
        core.loop.turn()
    client.send(Control(call=1, command=PauseGeneration(mode="keep", clear_cache=False)))
    core.loop.turn()
    core.loop.scheduler.pool._references[1] += 1
    core.loop._audit()
    core.loop._pause.resume()
    core.run_until_idle()
    assert [finish.reason for finish in client.finishes()] == [FinishReason.LENGTH]
    assert len(client.tokens()[1]) == 20
    assert core.loop.scheduler.num_preemptions == 1


def test_rows_that_are_mixed_up_end_the_engine(core: SteppedCore) -> None:
    serve(core)
    core.loop.scheduler.rows.free.pop()
    with pytest.raises(InconsistentError, match="a row is lost"):
        core.loop._audit()


def test_what_guards_data_is_checked_without_assertions_too() -> None:
    """As under `python -O`, which leaves them out."""
    lost = (
        "from headrace.core.schedule.scheduler import Scheduler, SchedulerConfig\n"
        "scheduler = Scheduler(SchedulerConfig(num_blocks=16, block_size=4, max_model_len=32, max_num_seqs=4, "
        "max_num_batched_tokens=32))\n"
        "scheduler.rows.free.pop()\n"
        "scheduler.check()\n"
    )
    found = subprocess.run([sys.executable, "-O", "-c", lost], capture_output=True, text=True, check=False)
    assert found.stderr.splitlines()[-1].endswith("InconsistentError: a row is lost"), found.stderr
