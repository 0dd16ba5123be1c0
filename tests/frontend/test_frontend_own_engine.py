"""Ring 1: an engine-core child of one's own, as a real process that computes nothing. Starts, deaths and ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import psutil
import pytest
from patience import within
from thinned import every

from headrace import (
    LLM,
    AsyncLLM,
    EngineDeadError,
    EngineStartError,
    Failure,
    HeadraceError,
    ModelError,
    OptionError,
    SamplingParams,
)
from headrace.core.process import child

OPTIONS: dict[str, Any] = {
    "distributed_executor_backend": "headrace.executor.testing.null:NullExecutor",
    "hf_overrides": {"step_delay_s": 0.01},
    "skip_tokenizer_init": True,
}
LONG = SamplingParams(max_tokens=20_000)
NOTICED_WITHIN_S = 5.0
"""What the design promises after a death."""


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (
            {"reasoning_config": {"reasoning_parser": "quen3"}},
            "reasoning_config has reasoning_parser='quen3': no output",
        ),
        ({"structured_outputs_config": {"reasoning_parser": "hermes"}}, "that format has no reasoning"),
    ],
)
def test_a_format_of_reasoning_that_is_none_is_refused_before_an_engine_starts(
    asked: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "start_engine", lambda *_: pytest.fail("it was started"))
    with pytest.raises(OptionError, match=words):
        LLM("null", **OPTIONS, **asked)


def wait_until_gone(pid: int) -> float:
    """Seconds until the process was gone."""
    start_s = time.monotonic()
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() - start_s < within(NOTICED_WITHIN_S), f"process {pid} is still there"
        time.sleep(0.01)
    return time.monotonic() - start_s


def test_it_starts_answers_and_leaves_nothing_behind() -> None:
    with LLM("null", **OPTIONS) as llm:
        pid = llm.engine.pid
        assert pid != os.getpid()
        (output,) = llm.generate([5, 6, 7], SamplingParams(max_tokens=4), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 4
    wait_until_gone(pid)


def test_closing_does_not_wait_for_running_requests() -> None:
    llm = LLM("null", **OPTIONS)
    stream = llm.stream([5, 6, 7], LONG)
    next(stream)
    start_s = time.monotonic()
    llm.close()
    assert time.monotonic() - start_s < within(NOTICED_WITHIN_S)
    assert list(stream)[-1].outputs[0].finish_reason == "abort"


def test_a_killed_engine_ends_every_call_with_how_it_died() -> None:
    with LLM("null", **OPTIONS) as llm:
        next(llm.stream([5], LONG))
        killed_s: list[float] = []

        def kill() -> None:
            while llm.get_stats().num_running < 1:
                pass
            killed_s.append(time.monotonic())
            os.kill(llm.engine.pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.raises(EngineDeadError, match="killed by signal 9"):
            llm.generate([[5], [6]], LONG, use_tqdm=False)
        assert time.monotonic() - killed_s[0] < within(NOTICED_WITHIN_S)
        killer.join()
        with pytest.raises(EngineDeadError, match="killed by signal 9"):
            llm.generate([5], use_tqdm=False)


def test_a_bad_option_starts_nothing() -> None:
    with pytest.raises(OptionError, match="max_modle_len; did you mean max_model_len"):
        LLM("null", **{"max_modle_len": 5})
    with pytest.raises(OptionError, match="max_modle_len; did you mean max_model_len"):
        AsyncLLM("null", **{"max_modle_len": 5})


def test_a_path_without_a_model_is_told_before_a_process_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("headrace.core.process.child.Child")
    with pytest.raises(ModelError, match="there is no model at /nonexistent/model"):
        LLM("/nonexistent/model")


SCRIPT = f"""
import os, sys
from headrace import LLM, SamplingParams
llm = LLM("null", **{OPTIONS!r})
print(llm.engine.pid, flush=True)
"""


def run_script(rest: str) -> tuple[subprocess.Popen[str], int]:
    """The script, fed on standard input, and its engine's pid."""
    process = subprocess.Popen(
        [sys.executable, "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(SCRIPT + rest)
    process.stdin.close()
    return process, int(process.stdout.readline())


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    assert process.stdout is not None
    assert process.stderr is not None
    status = process.wait(within(20))
    errors = process.stderr.read()
    process.stdout.close()
    process.stderr.close()
    return status, errors


@pytest.mark.parametrize(
    "rest",
    every(3, ["", "next(llm.stream([5], SamplingParams(max_tokens=9999)))\n", "del llm\n"]),
)
def test_a_script_that_never_closes_leaves_no_engine(rest: str) -> None:
    process, engine_pid = run_script(rest)
    assert finish(process)[0] == 0
    wait_until_gone(engine_pid)


@pytest.mark.parametrize("number", every(3, [signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
def test_a_user_process_that_is_killed_takes_its_engine_along(number: signal.Signals) -> None:
    process, engine_pid = run_script(
        "s = llm.stream([5], SamplingParams(max_tokens=20000)); next(s); print('runs', flush=True); list(s)\n"
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "runs\n"
    process.send_signal(number)
    wait_until_gone(engine_pid)
    status, errors = finish(process)
    assert status == -number
    assert (number is signal.SIGINT) == ("KeyboardInterrupt" in errors)


def test_the_asynchronous_face_starts_answers_and_leaves_nothing_behind() -> None:
    async def test() -> int:
        async with AsyncLLM("null", **OPTIONS) as llm:
            outputs = [output async for output in llm.generate([5, 6], SamplingParams(max_tokens=3))]
            assert len(outputs[-1].outputs[0].token_ids) == 3
            await llm.check_health()
            return (await llm.engine()).pid

    wait_until_gone(asyncio.run(asyncio.wait_for(test(), 30)))


def test_closing_the_asynchronous_face_while_it_starts_says_so() -> None:
    async def test() -> None:
        llm = AsyncLLM("null", **OPTIONS)
        starting = asyncio.create_task(llm.start())
        await asyncio.sleep(0)
        await llm.close()
        with pytest.raises(HeadraceError, match="closed while it started"):
            await starting

    asyncio.run(asyncio.wait_for(test(), 30))


def test_the_asynchronous_face_says_why_its_engine_did_not_start() -> None:
    async def test() -> None:
        async with AsyncLLM("/nonexistent/model"):
            pass

    with pytest.raises(EngineStartError, match="there is no model at /nonexistent/model"):
        asyncio.run(asyncio.wait_for(test(), 30))


def test_an_option_that_the_engine_finds_wrong_is_caught_as_one() -> None:
    """As a ValueError, as with vLLM; the sentence is the failure's, as ever."""
    with pytest.raises(EngineStartError, match="quantization_group_size=5") as caught:
        LLM("null", **OPTIONS, quantization="int8", quantization_group_size=5)
    assert issubclass(OptionError, ValueError)
    assert isinstance(caught.value, OptionError)
    assert caught.value.failure is not None
    assert str(caught.value) == caught.value.failure.describe()
    for kind in (ModelError, OptionError, EngineDeadError):
        error = EngineStartError.from_failure(Failure(message="x", type=kind.__name__))
        assert [isinstance(error, each) for each in (ModelError, OptionError)] == [
            kind is ModelError,
            kind is OptionError,
        ]
