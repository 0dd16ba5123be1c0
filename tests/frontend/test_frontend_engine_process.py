"""A client attached to an engine that is killed is told what this host can tell: the process, its state, its log."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from null_with_tokenizer import BACKEND
from patience import within
from source_tree import PYTHONPATH

from headrace import LLM, AsyncLLM, EngineDeadError, SamplingParams
from headrace.frontend.cli.main import main
from headrace.frontend.client import engine_process
from headrace.frontend.client.engine_process import EngineProcess

TOLD_WITHIN_S = 5.0


class Engine:
    """An engine-core that somebody else started, with its log in a file."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "engine.log"
        self.address = f"ipc://{folder}/core.sock"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "headrace.core.process.daemon", "null", "--address", self.address,
                 "--distributed-executor-backend", BACKEND, "--hf-overrides.step_delay_s", "0.005"],
                stdout=subprocess.PIPE, stderr=log, env={**os.environ, "PYTHONPATH": PYTHONPATH},
            )  # fmt: skip
        assert self.process.stdout is not None
        assert b"ready at" in self.process.stdout.readline()

    def kill_when_busy(self, num_running: int) -> threading.Thread:
        def kill() -> None:
            with LLM.connect(self.address) as llm:
                while llm.get_stats().num_running < num_running:
                    time.sleep(0.01)
                self.process.kill()

        thread = threading.Thread(target=kill)
        thread.start()
        return thread

    def check(self, said: str) -> None:
        """The address, the process and how it ended, what to do, and what it wrote last."""
        pid = self.process.pid
        assert f"the engine-core at {self.address} is gone: the connection was lost; its process {pid} ended" in said
        assert "as one does that is killed" in said
        assert f"Start it anew and attach again; its log is {self.log}." in said
        assert re.search(r"its last log lines:\n +\S", said)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path)
    yield engine
    engine.close()


def test_both_faces_and_a_command_are_told_how_an_engine_ended(engine: Engine, capfd) -> None:
    asked = SamplingParams(max_tokens=20_000, ignore_eos=True)
    said: list[str] = []

    async def ask() -> None:
        llm = await AsyncLLM.connect(engine.address)
        with pytest.raises(EngineDeadError) as caught:
            async for _ in llm.generate("x", asked):
                pass
        said.append(str(caught.value))
        with pytest.raises(EngineDeadError, match="as one does that is killed"):
            await llm.get_stats()
        await llm.close()

    def ask_in_turn() -> None:
        with LLM.connect(engine.address) as llm, pytest.raises(EngineDeadError) as caught:
            llm.generate("x", asked, use_tqdm=False)
        said.append(str(caught.value))

    others = [threading.Thread(target=ask_in_turn), threading.Thread(target=lambda: asyncio.run(ask()))]
    for thread in others:
        thread.start()
    killer = engine.kill_when_busy(3)
    flags = ("--engine", engine.address, "--max-tokens", "20000", "--ignore-eos")
    assert main(["complete", "x", *flags]) == 1
    killed_s = time.monotonic()
    for thread in (*others, killer):
        thread.join(TOLD_WITHIN_S)
    assert time.monotonic() - killed_s < within(TOLD_WITHIN_S)
    for text in (*said, capfd.readouterr().err):
        engine.check(text)
    assert len(said) == 2


def test_one_that_is_stopped_is_told_from_one_that_is_dead(engine: Engine) -> None:
    found = EngineProcess.find(engine.process.pid)
    assert found is not None
    os.kill(engine.process.pid, signal.SIGSTOP)
    end_s = time.monotonic() + 5
    lost = engine_process.Failure(message="the connection was lost")
    while "is stopped, by a signal" not in (failure := found.explain(lost)).message:
        assert time.monotonic() < end_s, failure.message
    assert f"`kill -CONT {engine.process.pid}` lets it go on" in failure.hint
    with pytest.raises(EngineDeadError, match=rf"did not welcome .*; its process {engine.process.pid} is stopped"):
        LLM.connect(engine.address, timeout_s=0.2)
    os.kill(engine.process.pid, signal.SIGCONT)
    while "runs, but does not answer" not in found.explain(lost).message:
        assert time.monotonic() < end_s
    engine.process.kill()
    os.waitid(os.P_PID, engine.process.pid, os.WEXITED | os.WNOWAIT)
    assert found.has_ended, "though nobody has asked yet how it ended"
    assert "ended without a word" in found.explain(lost).message


def test_a_kill_for_memory_is_told(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    found = EngineProcess.find(engine.process.pid)
    assert found is not None
    engine.close()
    before = engine_process.oom_kill_count()
    monkeypatch.setattr(engine_process, "oom_kill_count", lambda: before + 1)
    said = found.explain(engine_process.Failure(message="lost")).message
    assert said.endswith("since this client attached the kernel killed 1 for lack of memory")


def test_a_number_that_is_no_engine_here_is_left_alone() -> None:
    """As one of another container; or of nobody."""
    assert EngineProcess.find(1) is None
    assert EngineProcess.find(2**22 - 1) is None
