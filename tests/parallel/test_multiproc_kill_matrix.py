"""The kill matrix: each process of an engine, in each phase of its life, ended in each way.

              start    loading   idle     prefill   decode   drain        each of SIGKILL, SIGTERM,
    client      x         x        x         x         x        x         exception and hang
    core        x         x        x         x         x        x
    rank 0      x         x        x         x         x        x
    rank 1      x         x        x         x         x        x

After each the caller has the right error within 5 s of the event (of the deadline, where a hang is what happened), no
process is left, no file in /dev/shm and no socket, and the next engine starts in the same place. (Where the process
that started an engine is dead too, it is the next start that removes the socket.) The engines compute nothing. Several
run at once, before the first test: a cell mostly waits.

    a client's end     takes its engine along: nobody is left to be told. One that only hangs is given up by the core
                       within 5 s, and other clients are served meanwhile.
    SIGTERM            is left to the parent by core and ranks, as all processes of a service get it at once: nothing
                       ends, and what runs is finished.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil
import pytest
from multiproc_parts import HERE, options, shared_files
from patience import wait_until, within
from wire_client import WireClient

from headrace import LLM, SamplingParams
from headrace.core.options.engine_options import Options
from headrace.core.process.child import START_GRACE_S, Child, start_engine
from headrace.frontend.fleet.pool import EnginePool
from headrace.frontend.fleet.sources import Owned
from headrace.ipc.failure import Failure, HeadraceError
from headrace.ipc.messages import Progress
from headrace.ipc.transport.sockets import sweep_sockets

pytestmark = pytest.mark.system

PROCESSES = ("client", "core", "rank 0", "rank 1")
PHASES = ("start", "loading", "idle", "prefill", "decode", "drain")
WAYS = ("sigkill", "sigterm", "exception", "hang")
SIGNALS = {"sigkill": signal.SIGKILL, "sigterm": signal.SIGTERM, "hang": signal.SIGSTOP}
AT_ONCE = 6
WITHIN_S = 5.0
STEP_TIMEOUT_S = 1.5
STARTUP_TIMEOUT_S = 6.0
LONG = SamplingParams(max_tokens=20_000, ignore_eos=True)
SHORT = SamplingParams(max_tokens=40, ignore_eos=True)
PROMPT = [5] * 3000
"""Computed in two steps."""
KILLED = r"killed by signal 9 \(SIGKILL\)"


class Cell(NamedTuple):
    process: str
    phase: str
    how: str

    @property
    def starts(self) -> bool:
        return self.phase in ("start", "loading")

    @property
    def rank(self) -> int:
        return int(self.process.removeprefix("rank "))

    @property
    def is_rank(self) -> bool:
        return self.process.startswith("rank")


Runs = dict[Cell, "Future[None]"]
CELLS = [Cell(*cell) for cell in itertools.product(PROCESSES, PHASES, WAYS)]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """How the cells that are asked for went; all have ended."""
    ours = [item for item in request.session.items if item.path == request.path]
    asked: list[Cell] = [item.callspec.params["cell"] for item in ours]  # type: ignore[attr-defined]
    folder = tmp_path_factory.mktemp("matrix")
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(AT_ONCE) as pool:
        patch.setenv("PYTHONPATH", HERE)
        patch.setenv("TRIGGERS", str(folder))
        patch.setenv("HEADRACE_PEER_TIMEOUT", "4")
        patch.setenv("HEADRACE_RUNTIME_DIR", str(folder / "r"))
        # Those that wait longest begin first.
        in_turn = sorted(asked, key=lambda cell: (not (cell.how == "hang" and cell.starts), cell.how != "hang"))
        futures = {cell: pool.submit(run, cell, folder) for cell in in_turn}
        for future in futures.values():
            future.exception()
        assert not list(sweep_sockets().iterdir()), "a socket is left"
        yield futures


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(cell).replace(" ", ""))
def test_what_a_death_leaves(cell: Cell, runs: Runs) -> None:
    runs[cell].result()


def asked_for(cell: Cell) -> Options:
    told: dict[str, Any] = {"step_delay_s": 0.02}
    changes: dict[str, Any] = {}
    if cell.starts and cell.how == "hang":  # other starts take as long as a busy machine needs
        changes["startup_timeout"] = STARTUP_TIMEOUT_S
    if cell.is_rank and cell.starts:
        told |= {"rank": cell.rank, "phase": {"start": "describe", "loading": "load"}[cell.phase], "how": cell.how}
    if cell.process in ("core", "client"):
        changes["scheduler_cls"] = "bad_core:BadScheduler"
        if cell.starts and cell.how == "exception" and cell.process == "core":
            changes["scheduler_cls"] = {"start": "bad_core:BadImport", "loading": "bad_core:BadLoad"}[cell.phase]
        elif cell.phase == "loading" and (cell.process, cell.how) != ("core", "sigterm"):
            told["load_delay_s"] = 30.0
    return msgspec.structs.replace(options(step_timeout=STEP_TIMEOUT_S, **told), **changes)


def run(cell: Cell, folder: Path) -> None:
    if cell.process == "client":
        run_client(cell)
        return
    child = start_engine(asked_for(cell))
    seen: list[psutil.Process] = [psutil.Process(child.pid)]
    try:
        if cell.starts and cell.how == "sigterm":
            start_all_the_same(cell, child, seen)
        elif cell.starts:
            fail_at_start(cell, child, seen)
        else:
            fail_serving(cell, child, seen, folder)
        if cell.how != "hang" or cell.is_rank:
            wait_until(lambda: not child.alive, WITHIN_S, "the core's end")
            assert not cell.is_rank or child.status == (0 if cell.how == "sigterm" else 1 if cell.starts else 70)
    finally:
        child.kill()
    check_nothing_is_left(seen)
    assert not list(Path(os.environ["HEADRACE_RUNTIME_DIR"]).glob(f"*-{child.pid}-*"))


def check_nothing_is_left(seen: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(seen, timeout=within(WITHIN_S))
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    assert not shared_files()


def workers_of(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        found = [p for p in psutil.Process(pid).children() if "headrace.executor.placement.worker" in p.cmdline()]
        return sorted(found, key=lambda process: (process.create_time(), process.pid))  # numbers begin anew at times
    return []


# --- while it starts ------------------------------------------------------------------------------------------------


def fail_at_start(cell: Cell, child: Child, seen: list[psutil.Process]) -> None:
    reached = {"start": "import", "loading": "load weights"}[cell.phase]
    event_s = [time.monotonic()]  # the death's, or of the last thing that was heard before it

    def on_progress(progress: Progress) -> None:
        seen.extend(process for process in workers_of(child.pid) if process not in seen)
        event_s[0] = time.monotonic()
        if progress.phase == reached and cell.process == "core" and cell.how in SIGNALS:
            os.kill(child.pid, SIGNALS[cell.how])

    # A rank that hangs is for its core to notice, however late that could begin on a busy machine.
    patience_s = 10 * STARTUP_TIMEOUT_S if cell.is_rank and cell.how == "hang" else None
    try:
        child.wait_ready(patience_s, on_progress)
    except HeadraceError as error:
        took_s, failure, text = time.monotonic() - event_s[0], error.failure, str(error)
    else:
        raise AssertionError("it became ready")
    assert took_s < (STARTUP_TIMEOUT_S + START_GRACE_S if cell.how == "hang" else 0.0) + within(WITHIN_S)
    assert failure is not None
    check_cause(cell, failure, text, child.pid)


def check_cause(cell: Cell, failure: Failure, text: str, core_pid: int) -> None:
    """That the caller is told which process it was, how it went, and in which phase."""
    if cell.is_rank:
        assert (failure.process, failure.rank) == ("worker", cell.rank), text
        how = {
            "sigkill": KILLED,
            "exception": rf"rank {cell.rank} was told to fail in",
            "hang": rf"worker {cell.rank} \(pid \d+\) did not .* within "
            + (r"6 s \(startup_timeout\)" if cell.starts else r"1.5 s \(step_timeout\)"),
        }[cell.how]
        phases = {"start": {"read config"}, "loading": {"load weights"}, "idle": {"idle", "step"}}
        assert failure.phase in phases.get(cell.phase, {"step"}), text
    else:
        assert failure.pid in (core_pid, 0), text
        how = {
            "sigkill": KILLED,
            "exception": "the core was told to fail in",
            "hang": r"not ready within 6 s \(startup_timeout\)[\s\S]*is stopped by a signal|is gone|did not answer",
        }[cell.how]
    assert re.search(how, text), text


def start_all_the_same(cell: Cell, child: Child, seen: list[psutil.Process]) -> None:
    reached = {"start": "import", "loading": "load weights"}[cell.phase]

    def on_progress(progress: Progress) -> None:
        seen.extend(process for process in workers_of(child.pid) if process not in seen)
        if progress.phase == reached and cell.process == "core":  # a rank sends it to itself
            os.kill(child.pid, signal.SIGTERM)

    child.wait_ready(on_progress=on_progress)
    child.stop(WITHIN_S)


# --- while it serves ------------------------------------------------------------------------------------------------


def fail_serving(cell: Cell, child: Child, seen: list[psutil.Process], folder: Path) -> None:
    llm = LLM.__new__(LLM)  # as LLM() does with a child that it has started
    llm._open(EnginePool([Owned(lambda path: child, child, restarts=0)]))
    try:
        workers = workers_of(child.pid)
        seen += workers
        victim = child.pid if cell.process == "core" else workers[cell.rank].pid
        if cell.how == "sigterm":
            go_on(cell, llm, child, victim)
            return
        call = bring_to(cell, llm, child)
        event_s = time.monotonic()
        if cell.how == "exception" or (cell.phase == "prefill" and not (cell.process == "core" and cell.how == "hang")):
            (folder / str(victim)).write_text(cell.how)
        else:
            os.kill(victim, SIGNALS[cell.how])
        try:
            call()
        except HeadraceError as error:
            took_s, text, failure = time.monotonic() - event_s, str(error), error.failure
        else:
            raise AssertionError("nothing was told")
        assert took_s < within(WITHIN_S) + (STEP_TIMEOUT_S if cell.how == "hang" else 0.0), f"{took_s} s: {text}"
        assert failure is not None, text
        check_cause(cell, failure, text, child.pid)
    finally:
        llm.close()


def bring_to(cell: Cell, llm: LLM, child: Child) -> Callable[[], object]:
    """The engine is in the phase; what the caller then does."""
    if cell.phase == "idle":
        list(llm.stream([5, 6], SamplingParams(max_tokens=2)))
        if cell.is_rank and cell.how == "exception":
            return llm.describe_engine
        if cell.how == "exception":
            return lambda: ask_again_and_again(llm)
        return lambda: list(llm.stream([5, 6], LONG))
    if cell.phase == "prefill":
        return lambda: list(llm.stream(PROMPT, LONG))
    stream = llm.stream([5, 6], LONG)
    next(stream)
    if cell.phase == "drain":
        child.ask_to_stop(30.0)
        wait_until(lambda: "a second signal ends them now" in "".join(child.log_tail), WITHIN_S, "the drain")
    return lambda: list(stream)


def ask_again_and_again(llm: LLM) -> None:
    """The core answers first, and fails in the next turn."""
    end_s = time.monotonic() + WITHIN_S
    while time.monotonic() < end_s:
        llm.get_stats()


def go_on(cell: Cell, llm: LLM, child: Child, victim: int) -> None:
    """The signal changes nothing; the parent's order ends the core, once what runs is finished."""
    stream = None
    if cell.phase != "idle":
        stream = llm.stream(PROMPT if cell.phase == "prefill" else [5, 6], SHORT)
    first = [next(stream)] if stream is not None and cell.phase in ("decode", "drain") else []
    if cell.phase == "drain":
        child.ask_to_stop(30.0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        os.kill(victim, number)
    if stream is None:
        stream = llm.stream([5, 6], SHORT)
    assert sum(len(output.outputs[0].token_ids) for output in (*first, *stream)) == SHORT.max_tokens
    child.ask_to_stop(30.0)
    wait_until(lambda: not child.alive, WITHIN_S, "the core's end")
    assert child.status == 0


# --- the client -----------------------------------------------------------------------------------------------------

CLIENT = """
import os, signal, sys, threading, time
import msgspec
from headrace.core.options.engine_options import Options
from headrace.core.process.child import start_engine
from headrace import LLM, SamplingParams

phase, how = sys.argv[1:3]
def reach(name):
    if name != phase:
        return
    print(name, flush=True)
    if how == "exception":
        raise RuntimeError("the client was told to fail")
    threading.Event().wait()

child = start_engine(msgspec.json.decode(sys.argv[3], type=Options))
print(child.pid, flush=True)
at = {"import": "start", "load weights": "loading"}
ready = child.wait_ready(on_progress=lambda progress: reach(at.get(progress.phase)))
print(ready.address, flush=True)
llm = LLM.connect(ready.address)
reach("idle")
stream = llm.stream([5] * 3000 if phase == "prefill" else [5, 6], SamplingParams(max_tokens=20000, ignore_eos=True))
if phase == "prefill":
    threading.Thread(target=lambda: list(stream), daemon=True).start()
    while not llm.get_stats().num_running:
        pass
else:
    next(stream)
reach("prefill"), reach("decode")
child.ask_to_stop(30.0)
while not any("a second signal" in line for line in child.log_tail):
    time.sleep(0.01)
reach("drain")
"""


def run_client(cell: Cell) -> None:
    command = [sys.executable, "-c", CLIENT, cell.phase, cell.how, msgspec.json.encode(asked_for(cell)).decode()]
    client = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert client.stdout is not None
    core_pid = int(client.stdout.readline())
    seen = [psutil.Process(core_pid)]
    try:
        address = "" if cell.starts else client.stdout.readline().strip()
        assert client.stdout.readline().strip() == cell.phase
        seen += workers_of(core_pid)
        if cell.how in SIGNALS:
            client.send_signal(SIGNALS[cell.how])
        if cell.how == "hang":
            check_others_are_served(cell, address)
            client.kill()
    finally:
        if cell.how == "hang":
            client.kill()
        _, errors = client.communicate(timeout=30)
    assert client.returncode == {"sigkill": -9, "sigterm": -15, "exception": 1, "hang": -9}[cell.how]
    assert ("the client was told to fail" in errors) == (cell.how == "exception")
    check_nothing_is_left(seen)


def check_others_are_served(cell: Cell, address: str) -> None:
    """While one client hangs; and that it is given up in time."""
    if cell.phase not in ("idle", "prefill", "decode"):
        return
    with WireClient(address) as other:
        other.add(1, [5, 6], max_tokens=5)
        other.finish(1)
        wait_until(lambda: other.stats().num_running == 0, WITHIN_S + 1.0, "freeing what the client had")
