"""An engine that works is not lost because it says nothing for a while: its requests stay where they are."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from busy_executor import BUSY
from null_with_tokenizer import BACKEND
from patience import wait_until
from server_here import serving_here
from source_tree import PYTHONPATH

from headrace import LLM, AsyncLLM, SamplingParams
from headrace.frontend.client import engine_process
from headrace.frontend.client.engine_process import EngineProcess
from headrace.frontend.fleet.engine import Engine
from headrace.frontend.fleet.pool import EnginePool
from headrace.frontend.fleet.router import Router
from headrace.frontend.fleet.sources import Attached
from headrace.frontend.http.options import ServeOptions
from headrace.frontend.http.process import server
from headrace.frontend.http.process.engine_log import log_load
from headrace.frontend.http.server.metrics import Exposition, Pages
from headrace.ipc.failure import HeadraceError, OptionError
from headrace.sampling_params import StructuredOutputsParams

SPIN = "print('begun', flush=True)\nwhile True: pass"
LONG = SamplingParams(max_tokens=300, ignore_eos=True, seed=1)


@contextmanager
def fleet(backend: str, count: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[LLM, EnginePool]]:
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    slow = {"step_delay_s": 0.02}
    with LLM("null", data_parallel_size=count, distributed_executor_backend=backend, hf_overrides=slow) as llm:
        yield llm, llm._client


@contextmanager
def process(code: str, count: int = 1) -> Iterator[list[subprocess.Popen[bytes]]]:
    started = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for each in started:
            assert each.stdout is not None
            assert each.stdout.readline() == b"begun\n"
        yield started
    finally:
        for each in started:
            each.kill()
            each.communicate()


@pytest.mark.parametrize(
    ("code", "prepare", "works"),
    [
        (SPIN, lambda pid: None, True),
        ("import time; print('begun', flush=True); time.sleep(600)", lambda pid: None, False),
        (SPIN, lambda pid: os.kill(pid, signal.SIGSTOP), False),
    ],
    ids=["busy", "asleep", "stopped"],
)
def test_a_process_works_if_it_uses_processor_time(
    code: str, prepare: Callable[[int], None], works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "_PROGRAMS", (b"python",))
    with process(code) as (child,):
        prepare(child.pid)
        found = EngineProcess.find(child.pid)
        assert found is not None
        if works:
            wait_until(found.has_worked, 30, "processor time to be used")
            return
        wait_until(lambda: not found.has_worked(), 30, "the process to halt")
        assert not any(found.has_worked() for _ in range(5))
    assert not found.has_worked(), "it has ended"


def test_a_process_works_if_one_of_its_threads_waits_for_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's first thread sleeps, and beside many others the one that computes gets no processor time for long."""
    code = (
        "import threading\ndef spin():\n    print('begun', flush=True)\n    while True: pass\n"
        "thread = threading.Thread(target=spin)\nthread.start()\nthread.join()"
    )
    monkeypatch.setattr(engine_process, "_PROGRAMS", (b"python",))
    with process(code) as (child,):
        found = EngineProcess.find(child.pid)
        assert found is not None
        status = engine_process.status_of(child.pid)
        monkeypatch.setattr(engine_process, "status_of", lambda pid: status)
        wait_until(found.has_worked, 30, "the thread to be seen")


@pytest.mark.system
def test_an_engine_that_computes_in_one_call_keeps_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    with fleet(BUSY, 2, monkeypatch) as (llm, client):
        outputs = llm.generate(["a", "b"], LONG, use_tqdm=False)
        assert all(output.finished for output in outputs)
        assert dict(client.router.migrations) == {}


@pytest.mark.system
def test_requests_stay_at_their_engines_on_a_host_with_ten_times_more_to_run_than_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    form = StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "integer"}}})
    formed = SamplingParams(max_tokens=8, structured_outputs=form)
    cores = len(os.sched_getaffinity(0))
    with fleet(BACKEND, 3, monkeypatch) as (llm, client), process(SPIN, 10 * cores):
        for params in (formed, LONG, formed, LONG):
            outputs = llm.generate([f"prompt {n}" for n in range(12)], params, use_tqdm=False)
            assert all(output.finished for output in outputs)
        assert dict(client.router.migrations) == {}


def test_the_metrics_and_the_log_ask_all_engines_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that those which say nothing are waited for once, and not one after the other."""
    asked: list[Engine] = []

    async def main() -> None:
        all_asked = asyncio.Event()

        async def stats(engine: Engine, timeout_s: float = 0.0) -> None:
            asked.append(engine)
            if len(asked) == 3:
                all_asked.set()
            await all_asked.wait()

        monkeypatch.setattr(Engine, "stats", stats)
        pool = EnginePool([Attached(f"ipc:///none-{number}") for number in range(3)])
        await asyncio.wait_for(Exposition(Pages(), pool, "vllm").text(""), 30)
        asked.clear()
        all_asked.clear()
        for engine in pool.engines:
            engine.client = SimpleNamespace(describe_engine=never)  # type: ignore[assignment]
        await asyncio.wait_for(next_line(pool), 30)

    async def never() -> None:
        raise HeadraceError("not now")

    async def next_line(pool: EnginePool) -> None:
        logging = asyncio.create_task(log_load(pool, 3600.0))
        while len(asked) < 3:
            await asyncio.sleep(0)
        logging.cancel()

    asyncio.run(main())


def test_the_servers_option_sets_how_long_an_engine_may_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    routers: list[Router] = []

    class Noting(EnginePool):
        def start(self) -> None:
            routers.append(self.router)
            super().start()

    monkeypatch.setattr(server, "EnginePool", Noting)
    with serving_here(ServeOptions(port=0, heartbeat_timeout=7.5, max_migrations=5)):
        (router,) = routers
    assert (router.options.suspect_after_s, router.options.max_migrations) == (7.5, 5)


def test_a_librarys_caller_sets_how_long_an_engine_may_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    null = {"distributed_executor_backend": BACKEND, "data_parallel_size": 2}
    with LLM("null", heartbeat_timeout=7.5, **null) as llm:
        assert llm._client.router.options.suspect_after_s == 7.5
    finding = AsyncLLM(coordinator=["ipc:///none"], heartbeat_timeout=8)  # looks for engines at its first call only
    assert finding._client.router.options.suspect_after_s == 8.0
    for call in (LLM, AsyncLLM):
        with pytest.raises(OptionError, match="heartbeat_timeout=0: out of range"):
            call("null", heartbeat_timeout=0)
