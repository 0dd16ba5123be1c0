"""What a user of a long-lived LLM sees: an engine that comes back, one progress bar, and what the LLM is."""

from __future__ import annotations

import asyncio
import contextlib
import io
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, AsyncLLM, EngineDeadError, SamplingParams, connect
from headrace.core.process.child_output import StartLine
from headrace.frontend.api.batch import SharedBar
from headrace.ipc.messages import Progress

BACKEND = "headrace.executor.testing.null:NullExecutor"
NULL: dict[str, Any] = {"distributed_executor_backend": BACKEND, "skip_tokenizer_init": True}
PROMPT = {"prompt_token_ids": [5]}
PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)


@contextlib.contextmanager
def engine_at(address: str) -> Iterator[subprocess.Popen[str]]:
    command = [str(Path(sys.executable).with_name("engine-core")), "null", "--address", address]
    command += ["--distributed-executor-backend", BACKEND, "--skip-tokenizer-init"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("engine-core: ready at ")
            yield process
        finally:
            process.kill()


def test_an_attached_llm_goes_on_with_the_next_engine_at_its_address(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/e.sock"

    async def generate(llm: AsyncLLM) -> list[int]:
        return [list(output.outputs[0].token_ids) async for output in llm.generate(PROMPT, PARAMS, "a")][-1]

    async def both() -> None:
        llm = await AsyncLLM.connect(address, reconnect=True)
        before = await generate(llm)
        first.kill()
        with engine_at(address):
            assert await generate(llm) == before
            (output,) = await asyncio.to_thread(sync.generate, [PROMPT], PARAMS, use_tqdm=False)
            assert list(output.outputs[0].token_ids) == before
        await llm.close()

    with pytest.raises(EngineDeadError, match="no engine-core listens at"):
        connect(address, reconnect=True)
    with engine_at(address) as first:
        plain = connect(address)
        with connect(address, reconnect=True) as sync:
            asyncio.run(both())
        with pytest.raises(EngineDeadError):
            plain.generate([PROMPT], PARAMS, use_tqdm=False)
        plain.close()


def test_an_llm_says_what_it_is() -> None:
    with LLM("null", in_process=True, **NULL) as llm:
        assert repr(llm).startswith("LLM(model='null', dtype=")
        assert "closed" not in repr(llm)
    assert repr(llm).endswith(", closed)")


def test_threads_that_wait_for_one_llm_share_a_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    bars = SharedBar()
    both_wait = threading.Barrier(3)

    def wait(count: int) -> None:
        with bars.open(count, True) as bar:
            both_wait.wait(60)
            for _ in range(count):
                bar.update(1)
            bar.show()

    threads = [threading.Thread(target=wait, args=(count,)) for count in (2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    drawn = shown.getvalue()
    assert "/9 " in drawn
    assert drawn.count("0%|") == 1, "one bar was begun"


def test_a_start_is_shown_to_those_who_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, wanted, is_shown in (
        (Terminal(), None, True),
        (Terminal(), False, False),
        (io.StringIO(), None, False),
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        with StartLine(wanted) as line:
            line.show(Progress(phase="load weights", seconds=0.1))
        assert ("Starting the engine: load weights" in stream.getvalue()) == is_shown
    notebook = io.StringIO()
    monkeypatch.setattr(sys, "stderr", notebook)
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    with StartLine(None) as line:
        line.show(Progress(phase="find model", seconds=0.1))
    assert "find model" in notebook.getvalue()
