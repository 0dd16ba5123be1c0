"""Engines that divide the experts of a model among them: whatever each has to do, tokens are those of one engine."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny_models
from patience import wait_until, within
from tiny_mixtures import FAMILIES as MIXTURES

from headrace import LLM, AsyncLLM, SamplingParams
from headrace.core.engine.engine import load_executor
from headrace.core.options.parsing import parse_options
from headrace.executor.parallel import lock_step
from headrace.executor.parallel.lock_step import STOP, LockStep, meet
from headrace.executor.parallel.rank_place import PeerError, RankCoordinates
from headrace.ipc.failure import PEER_LOST, EngineDeadError, EngineStartError, Failure, HeadraceError, OptionError

LIMIT_S = 20.0
TINY: dict[str, Any] = {
    "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 128, "max_num_seqs": 8, "device": "cpu",
    "num_gpu_blocks_override": 64,
}  # fmt: skip
SHARED = TINY | {"data_parallel_size": 2, "enable_expert_parallel": True}
OF_TWO_RANKS = SHARED | {"tensor_parallel_size": 2}


def join(name: str, rank: int, size: int = 2, *, model: str = "m", limit_s: float = LIMIT_S, **more: Any) -> LockStep:
    return meet(name, rank, size, model=model, shared_bytes=4096, limit_s=limit_s, **more)


def members(size: int = 2) -> list[LockStep]:
    name = secrets.token_hex(8)
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(join, name, rank, size) for rank in reversed(range(size))]
    return [future.result() for future in reversed(futures)]


class Idle:
    """A core's loop without work of its own: takes part in what it is called for."""

    def __init__(self, member: LockStep) -> None:
        self.member, self.seen = member, [()]
        self._called = threading.Event()
        self._is_stopped = False
        member.on_call = self._called.set
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_stopped:
            self._called.wait(LIMIT_S)
            self._called.clear()
            if self.member.is_called:
                self.seen.append(self.member.step(0))

    def stop(self) -> None:
        self._is_stopped = True
        self._called.set()
        self._thread.join(LIMIT_S)


def test_a_step_of_one_calls_those_that_are_idle_and_all_hear_the_same_counts() -> None:
    busy, *idle = members(3)
    idles = [Idle(each) for each in idle]
    try:
        for count in range(1, 200):
            assert busy.step(count) == (count, 0, 0)
        for each in idles:
            wait_until(lambda each=each: len(each.seen) == 200, LIMIT_S, "all steps")  # type: ignore[misc]
            assert each.seen[-1] == (199, 0, 0)
    finally:
        for each in idles:
            each.stop()
        for member in (busy, *idle):
            member.close()


def test_what_all_must_do_together_waits_for_all_and_steps_go_on_meanwhile() -> None:
    first, second = members()
    parts: list[tuple[int, ...]] = []

    def take_part() -> None:
        parts.append(first.step(0))

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.agree, "sleep", True, take_part, LIMIT_S)
        assert second.step(3) == (0, 3)
        assert second.step(4) == (0, 4)
        assert not waiting.done()
        assert second.agree("sleep", False, lambda: None, LIMIT_S) is False
        assert waiting.result(LIMIT_S) is False
        assert parts == [(0, 3), (0, 4)]
        waiting = pool.submit(first.agree, "sleep", True, take_part, 0.05)
        with pytest.raises(HeadraceError, match="not all engines that share experts were ready to sleep"):
            waiting.result(LIMIT_S)
        waiting = pool.submit(first.agree, "wake up", True, take_part, LIMIT_S)  # what was withdrawn counts no more
        assert second.agree("wake up", True, lambda: None, LIMIT_S) is waiting.result(LIMIT_S) is True
    first.close()
    second.close()


def test_the_loss_of_one_fails_all_whether_they_wait_or_are_idle() -> None:
    first, second, third = members(3)
    heard: list[Failure] = []
    third.watch(heard.append)
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(first.step, 5)
        wait_until(lambda: second.is_called, LIMIT_S, "its call")
        second.close()
        with pytest.raises(PeerError, match="data_parallel_rank 1"):
            step.result(LIMIT_S)
    wait_until(lambda: bool(heard), LIMIT_S, "what is lost")
    assert (heard[0].type, "data_parallel_rank 1" in heard[0].message) == (PEER_LOST, True)
    first.close()
    third.close()


def test_those_that_keep_a_step_waiting_are_named_and_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lock_step, "SUSPECT_AFTER_S", 0.05)
    first, second, third = members(3)
    with ThreadPoolExecutor(2) as pool:
        try:
            steps = [pool.submit(first.step, 5), pool.submit(third.step, 0)]
            wait_until(lambda: caplog.text.count("a step waits for") == 2, LIMIT_S, "the warnings")
            assert caplog.text.count(f"a step waits for the engine of data_parallel_rank 1 (pid {os.getpid()})") == 2
            assert second.step(2) == steps[0].result(LIMIT_S) == steps[1].result(LIMIT_S) == (5, 2, 0)
            assert caplog.text.count("all engines have joined the step") == 2
            monkeypatch.setattr(lock_step, "DEADLINE_S", 0.05)
            late = r"data_parallel_rank 0 \(pid \d+\) and .* 2 \(pid \d+\) did not come to a step within 0\.05 s"
            with pytest.raises(PeerError, match=late):
                second.step(1)
        finally:
            second.close()  # which ends what waits for it
    first.close()
    third.close()


def test_leaving_in_agreement_is_no_loss() -> None:
    first, second = members()
    heard: list[Failure] = []
    first.watch(heard.append)
    assert not first.announce(STOP)
    second.announce(STOP)
    wait_until(lambda: first.announce(STOP) and second.announce(STOP), LIMIT_S, "agreement")
    second.close()
    first._thread.join(LIMIT_S)
    assert not heard
    first.close()


def test_those_that_do_not_fit_or_do_not_come_are_named() -> None:
    name = secrets.token_hex(8)
    with ThreadPoolExecutor(1) as pool:
        alone = pool.submit(join, name, 0, limit_s=1.0)
        with pytest.raises(OptionError, match="rank 1 has other, rank 0 m"):
            join(name, 1, model="other")
        with pytest.raises(EngineStartError, match="did not meet within 1 s"):
            alone.result(LIMIT_S)
    with pytest.raises(EngineStartError, match=r"did not meet within 0\.2 s"):
        join(secrets.token_hex(8), 1, limit_s=0.2)
    options = parse_options(model="m", data_parallel_size=2, enable_expert_parallel=True)
    with pytest.raises(OptionError, match="data_parallel_meeting"):
        load_executor(options)


def test_experts_are_divided_among_the_ranks_of_all_engines() -> None:
    places = [
        replace(RankCoordinates(tp_rank=tp_rank, tp_size=2, expert_parallel=True), dp_rank=dp_rank, dp_size=3)
        for dp_rank in range(3)
        for tp_rank in range(2)
    ]
    assert [list(place.experts(12)) for place in places] == [[2 * each, 2 * each + 1] for each in range(6)]
    in_turn = [replace(place, experts_in_turn=True) for place in places]
    assert [list(place.experts(12)) for place in in_turn] == [[each, each + 6] for each in range(6)]
    assert [len(place.experts(7)) for place in places] == [1, 1, 1, 1, 1, 2]
    assert all(place.experts(5) == range(5) for place in places)  # by rows, of each engine's own two ranks


def test_a_step_that_ends_late_names_the_stopped_worker_of_another() -> None:
    name, late = secrets.token_hex(8), Failure(message="worker 0 did not finish", type="Timeout")
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as worker,
        ThreadPoolExecutor(1) as pool,
    ):
        others = pool.submit(join, name, 1, workers=(worker.pid,))
        first, second = join(name, 0), others.result()
        try:
            os.kill(worker.pid, signal.SIGSTOP)
            wait_until(lambda: lock_step.is_stopped(worker.pid), LIMIT_S, "its stop")
            said = rf"the engine of data_parallel_rank 1 \(pid \d+, its worker of pid {worker.pid} stopped by a signal"
            with pytest.raises(PeerError, match=f"rank 0 cannot go on: {said}"), first.computing():
                raise EngineDeadError(failure=late)
            with pytest.raises(EngineDeadError, match="worker 0 did not finish"), second.computing():  # it is its own
                raise EngineDeadError(failure=late)
        finally:
            worker.kill()
            first.close()
            second.close()


def params(count: int) -> list[SamplingParams]:
    """Greedy and random, of unequal lengths, so that ranks become idle at different times."""
    return [
        SamplingParams(
            temperature=index % 2, seed=index, max_tokens=3 + 15 * index, ignore_eos=True, logprobs=1, detokenize=False
        )
        for index in range(count)
    ]


PROMPTS = [[5 + index, *range(9, 12 + 3 * index)] for index in range(6)]


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save("mixtral", tmp_path_factory.mktemp("model") / "mixtral")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    with LLM(str(model), in_process=True, **TINY) as llm:
        return tokens(llm.generate(PROMPTS, params(len(PROMPTS)), use_tqdm=False))


def check_tokens(llm: LLM, expected: list[list[int]]) -> None:
    assert tokens(llm.generate(PROMPTS, params(len(PROMPTS)), use_tqdm=False)) == expected
    for index in (5, 2):  # one is busy, and one is idle
        assert tokens(llm.generate(PROMPTS[index], params(6)[index], use_tqdm=False)) == [expected[index]]


@pytest.mark.system
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(SHARED | {"pipeline_parallel_size": 2}, id="two stages each"),
        pytest.param(OF_TWO_RANKS | {"pipeline_parallel_size": 2}, id="two stages of two ranks"),
        pytest.param(SHARED | {"distributed_executor_backend": "mp"}, id="one worker each"),
    ],
)
def test_tokens_are_those_of_one_engine_however_work_is_spread(
    model: Path, expected: list[list[int]], options: dict[str, Any]
) -> None:
    with LLM(str(model), **options) as llm:
        check_tokens(llm, expected)


@pytest.mark.system
@pytest.mark.parametrize("options", [SHARED, OF_TWO_RANKS], ids=["one rank each", "two ranks each"])
def test_experts_whose_results_wait_for_a_later_layer_are_shared(options: dict[str, Any], tmp_path: Path) -> None:
    """LongCat's, of which those that do nothing are added once; layers without divided experts come between."""
    tiny_models.make(MIXTURES["longcat_flash"], vocab_size=320).save_pretrained(model := tmp_path / "longcat")
    with LLM(str(model), in_process=True, **TINY) as llm:
        expected = tokens(llm.generate(PROMPTS, params(len(PROMPTS)), use_tqdm=False))
    with LLM(str(model), **options) as llm:
        check_tokens(llm, expected)


@pytest.mark.system
def test_requests_that_come_late_and_are_aborted_change_nothing_for_the_others(
    model: Path, expected: list[list[int]]
) -> None:
    async def ask(llm: AsyncLLM, number: int, most_tokens: int) -> list[int]:
        index, found = number % 6, list[int]()
        async for output in llm.generate({"prompt_token_ids": PROMPTS[index]}, params(6)[index], f"r{number}"):
            found = list(output.outputs[0].token_ids)
            if len(found) >= most_tokens:
                break
        return found

    async def run() -> None:
        llm = AsyncLLM(str(model), **SHARED)
        try:
            asked = []
            for number in range(18):
                asked.append(asyncio.ensure_future(ask(llm, number, 4 if number % 3 == 0 else 100)))
                await asyncio.wait(asked, timeout=0.01)
            for number, found in enumerate(await asyncio.gather(*asked)):
                assert found == expected[number % 6][: len(found)]
                assert number % 3 == 0 or len(found) == len(expected[number % 6])
        finally:
            await llm.close()

    asyncio.run(run())


def daemons() -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if "headrace.core.process.daemon" in each.cmdline()]


def workers(engine: psutil.Process) -> list[psutil.Process]:
    return [each for each in engine.children() if "headrace.executor.placement.worker" in each.cmdline()]


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.system), 1])
@pytest.mark.parametrize(
    ("options", "kills_worker"),
    [
        pytest.param(SHARED, False, id="one rank each"),
        pytest.param(OF_TWO_RANKS, True, id="a worker of two", marks=pytest.mark.system),
        pytest.param(OF_TWO_RANKS, False, id="with its workers", marks=pytest.mark.system),
    ],
)
def test_tokens_are_those_of_one_engine_and_when_one_is_killed_all_begin_anew_and_requests_go_on(
    model: Path, expected: list[list[int]], victim: int, options: dict[str, Any], kills_worker: bool
) -> None:
    with LLM(str(model), **options) as llm:
        check_tokens(llm, expected)
        before = daemons()
        llm.enqueue(PROMPTS, params(len(PROMPTS)))
        wait_until(lambda: llm.get_stats().num_generated_tokens > 30, LIMIT_S, "tokens of several")
        (workers(before[victim])[1] if kills_worker else before[victim]).kill()
        assert tokens(llm.wait_for_completion(use_tqdm=False)) == expected
        assert not {each.pid for each in before} & {each.pid for each in daemons()}


@pytest.mark.system
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.system)])
@pytest.mark.parametrize(
    ("options", "stops_worker"),
    [
        pytest.param(SHARED, False, id="one rank each", marks=pytest.mark.system),
        pytest.param(OF_TWO_RANKS, True, id="a worker of two"),
        pytest.param(OF_TWO_RANKS, False, id="the core of two", marks=pytest.mark.system),
    ],
)
def test_one_that_is_stopped_is_named_and_waited_for_and_the_tokens_stay(
    model: Path,
    expected: list[list[int]],
    victim: int,
    options: dict[str, Any],
    stops_worker: bool,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with LLM(str(model), **options) as llm:
        before = daemons()
        llm.enqueue(PROMPTS, params(len(PROMPTS)))
        wait_until(lambda: llm.get_stats().num_generated_tokens > 30, LIMIT_S, "tokens of several")
        engine = before[victim].pid
        pid = workers(before[victim])[0].pid if stops_worker else engine
        who = f"(pid {engine}, its worker of pid {pid} stopped" if stops_worker else f"(pid {pid}, stopped"
        os.kill(pid, signal.SIGSTOP)
        heard = ""

        def names_it() -> bool:
            nonlocal heard
            heard += capfd.readouterr().err
            return f"a step waits for the engine of data_parallel_rank {victim} {who} by a signal" in heard

        try:
            wait_until(names_it, LIMIT_S, "its name")
        finally:
            os.kill(pid, signal.SIGCONT)
        assert tokens(llm.wait_for_completion(use_tqdm=False)) == expected
        assert [each.pid for each in daemons()] == [each.pid for each in before]


@pytest.mark.system
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("options", [SHARED, OF_TWO_RANKS], ids=["one rank each", "two ranks each"])
def test_when_none_is_started_again_all_end_and_their_requests_fail_with_the_cause(
    model: Path, victim: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.frontend.fleet.start.RESTARTS", 0)
    with LLM(str(model), **options) as llm:
        before = daemons()
        llm.enqueue(PROMPTS, params(len(PROMPTS)))
        wait_until(lambda: llm.get_stats().num_generated_tokens > 30, LIMIT_S, "tokens of several")
        (workers(before[victim]) or before[victim:])[0].kill()
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            llm.wait_for_completion(use_tqdm=False)
        assert not psutil.wait_procs(before, within(LIMIT_S))[1]


@pytest.mark.system
@pytest.mark.parametrize("options", [SHARED, OF_TWO_RANKS], ids=["one rank each", "two ranks each"])
def test_all_sleep_and_wake_together(model: Path, expected: list[list[int]], options: dict[str, Any]) -> None:
    with LLM(str(model), **options, enable_sleep_mode=True) as llm:
        for level in (1, 2):
            llm.sleep(level=level)
            llm.wake_up()
            assert tokens(llm.generate(PROMPTS, params(len(PROMPTS)), use_tqdm=False)) == expected
        llm.reload_weights(str(model))
        assert tokens(llm.generate(PROMPTS, params(len(PROMPTS)), use_tqdm=False)) == expected
