"""The control channel and the classes that users bring: the same in this process and in one of its own."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import worker_extension
from dead_mount import hanging
from engine_parts import EOS, VOCAB_SIZE, SteppedCore, make_plan
from patience import within
from source_tree import PYTHONPATH

from headrace import LLM, AsyncLLM, SamplingParams
from headrace.core.engine.control import profile_folder
from headrace.core.engine.loop import scheduler_class
from headrace.core.engine.sessions import ClientGone
from headrace.core.options.engine_options import Options
from headrace.core.schedule.scheduler import Scheduler
from headrace.executor.cpu.rank import CpuRank
from headrace.executor.testing.null import NullExecutor, NullModel
from headrace.ipc.control import (
    CallExtension,
    Commands,
    DescribeEngine,
    DrainEngine,
    EngineReport,
    PauseGeneration,
    PrepareWeights,
    ReloadWeights,
    ResumeGeneration,
    UseWeights,
    WorkerAnswer,
    WorkerCommand,
)
from headrace.ipc.failure import HeadraceError, InvalidRequestError, OptionError
from headrace.ipc.messages import Control, FinishReason, Reply


class ObedientNull(NullExecutor):
    """Notes commands, in a pipeline of two steps."""

    max_steps_in_flight = 2
    async_by_default = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.commands: list[WorkerCommand] = []
        self.can_compute_beside = True
        """Prepared weights leave room for those in use."""

    def control(self, command: WorkerCommand) -> tuple[WorkerAnswer, ...]:
        assert not self._submitted, "a command came while a step was in flight"
        self.commands.append(command)
        if isinstance(command, PrepareWeights) and command.path == "missing":
            raise HeadraceError("there is no checkpoint at missing")
        can_compute = self.can_compute_beside or not isinstance(command, PrepareWeights)
        return (WorkerAnswer(facts={"device": "null"}, payload={"echo": 1}, can_compute=can_compute),)


class NewestFirst(Scheduler):
    """A scheduler of somebody's own."""

    def add(self, request: Any, priority: int = 0) -> None:
        super().add(request, priority)
        self.waiting.remove(request)
        request.order = (self.waiting.era, -request.arrival)
        self.waiting.push(request)


def new_core(**changes: Any) -> SteppedCore:
    return SteppedCore(
        NullModel(vocab_size=VOCAB_SIZE, eos_token_id=EOS, check=True), executor_class=ObedientNull, **changes
    )


class Driver:
    """A client of a stepped core that sends commands."""

    def __init__(self, core: SteppedCore) -> None:
        self.core, self.client = core, core.open()
        self._calls = 0

    def send(self, command: Commands) -> int:
        self._calls += 1
        self.client.send(Control(call=self._calls, command=command))
        return self._calls

    def turns(self, count: int) -> None:
        for _ in range(count):
            if not self.core.inbox.empty() or self.core.loop.has_work:
                self.core.loop.turn()

    def reply(self, call: int) -> Reply | None:
        return next((m for m in self.client.heard if isinstance(m, Reply) and m.call == call), None)

    def num_tokens(self, slot: int) -> int:
        return len(self.client.tokens().get(slot, ()))


def test_a_pause_that_keeps_requests_stops_them_where_they_are_and_resuming_goes_on():
    alone = Driver(new_core())
    alone.client.add(0, [5, 6, 7], max_tokens=20)
    alone.core.run_until_idle()
    driver = Driver(new_core())
    driver.client.add(0, [5, 6, 7], max_tokens=20)
    driver.turns(5)
    call = driver.send(PauseGeneration(mode="keep"))
    driver.turns(10)
    assert driver.reply(call) == Reply(call=call)
    assert driver.core.loop.stats().paused
    standing = driver.num_tokens(0)
    assert 0 < standing < 20
    driver.client.add(1, [5, 6, 7], max_tokens=3)
    driver.turns(10)
    assert (driver.num_tokens(0), driver.num_tokens(1)) == (standing, 0)
    driver.send(ResumeGeneration())
    driver.core.run_until_idle()
    assert driver.client.tokens()[0] == alone.client.tokens()[0]
    assert driver.num_tokens(1) == 3
    assert not driver.core.loop.stats().paused


def test_a_pause_that_aborts_ends_requests_with_what_they_have():
    driver = Driver(new_core())
    for slot in range(3):
        driver.client.add(slot, [5, 6, 7], max_tokens=20)
    driver.turns(5)
    call = driver.send(PauseGeneration())
    driver.turns(3)
    assert driver.reply(call) is not None
    assert [finish.reason for finish in driver.client.finishes()] == [FinishReason.ABORT] * 3
    assert driver.core.loop.stats().num_cached_blocks == 0


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_pause_that_waits_finishes_who_is_here_and_holds_who_comes(policy):
    driver = Driver(new_core(max_num_seqs=1, scheduling_policy=policy))
    driver.client.add(0, [5, 6, 7], max_tokens=6)
    driver.client.add(1, [5, 6, 8], max_tokens=6)  # waits for the row when the pause comes
    driver.turns(2)
    call = driver.send(PauseGeneration(mode="wait"))
    driver.turns(1)
    driver.client.add(2, [5, 6, 9], max_tokens=6, priority=-1)  # sooner than those that are here, but for the pause
    assert driver.reply(call) is None
    driver.turns(40)
    assert driver.reply(call) is not None
    assert [driver.num_tokens(slot) for slot in range(3)] == [6, 6, 0]
    driver.send(ResumeGeneration())
    driver.core.run_until_idle()
    assert driver.num_tokens(2) == 6


def test_a_pause_is_answered_when_it_is_called_off():
    driver = Driver(new_core())
    driver.client.add(0, [5, 6, 7], max_tokens=20)
    call = driver.send(PauseGeneration(mode="wait"))
    driver.turns(2)
    assert driver.reply(call) is None
    driver.send(ResumeGeneration())
    driver.turns(1)
    assert driver.reply(call) is not None


def test_reloading_weights_comes_between_steps_and_what_was_computed_counts_no_more():
    driver = Driver(new_core())
    driver.client.add(0, [5, 6, 7] * 3, max_tokens=20)
    driver.turns(6)
    call = driver.send(ReloadWeights(path="elsewhere"))
    driver.turns(1)
    assert driver.reply(call) == Reply(call=call)
    assert driver.core.loop.scheduler.num_preemptions == 1
    driver.core.run_until_idle()
    assert driver.num_tokens(0) == 20
    executor = driver.core.executor
    assert isinstance(executor, ObedientNull)
    assert executor.commands == [PrepareWeights(path="elsewhere"), UseWeights(prepared=True)]


def test_a_command_that_fails_tells_why_and_disturbs_nobody():
    driver = Driver(new_core())
    driver.client.add(0, [5, 6, 7], max_tokens=20)
    driver.turns(6)
    call = driver.send(ReloadWeights(path="missing"))
    driver.core.run_until_idle()
    reply = driver.reply(call)
    assert reply is not None
    assert reply.failure is not None
    assert reply.failure.message == "there is no checkpoint at missing"
    executor = driver.core.executor
    assert isinstance(executor, ObedientNull)
    assert executor.commands[-1] == UseWeights(prepared=False)
    assert driver.core.loop.scheduler.num_preemptions == 0
    assert driver.num_tokens(0) == 20


def refused(driver: Driver, command: Commands) -> str:
    """Why a command is; "" if it is carried out."""
    call = driver.send(command)
    driver.core.run_until_idle()
    reply = driver.reply(call)
    assert reply is not None
    return reply.failure.message if reply.failure is not None else ""


def test_prepared_weights_are_their_clients_alone_and_go_with_it():
    core = new_core()
    one, other = Driver(core), Driver(core)
    executor = core.executor
    assert isinstance(executor, ObedientNull)
    assert refused(one, ReloadWeights(path="first", part="prepare")) == ""
    for part in ("prepare", ""):
        assert "another client's reload_weights is under way" in refused(other, ReloadWeights(path="other", part=part))
    assert "other weights are prepared here" in refused(other, ReloadWeights(path="other", part="use"))
    assert "other weights are prepared here" in refused(one, ReloadWeights(path="other", part="use"))
    assert refused(other, ReloadWeights(path="other", part="forget")) == ""
    assert executor.commands == [PrepareWeights(path="first")]
    assert refused(one, ReloadWeights(path="first", part="use")) == ""
    assert executor.commands[1:] == [UseWeights(prepared=True)]
    one.send(ReloadWeights(path="second", part="prepare"))
    core.run_until_idle()
    other.client.add(0, [5, 6, 7], max_tokens=20)
    other.turns(2)  # a step is in flight
    core.inbox.put((one.client.number, ClientGone()))
    core.run_until_idle()
    assert other.num_tokens(0) == 20
    assert executor.commands[-1] == UseWeights(prepared=False)
    assert refused(other, ReloadWeights(path="other")) == ""


def test_weights_that_some_worker_could_not_read_are_kept_by_none():
    driver = Driver(new_core())
    assert refused(driver, ReloadWeights(path="missing", part="prepare")) == "there is no checkpoint at missing"
    executor = driver.core.executor
    assert isinstance(executor, ObedientNull)
    assert executor.commands == [PrepareWeights(path="missing"), UseWeights(prepared=False)]


def test_no_step_is_planned_while_new_weights_have_the_memory_of_those_in_use():
    driver = Driver(new_core())
    executor = driver.core.executor
    assert isinstance(executor, ObedientNull)
    executor.can_compute_beside = False
    driver.client.add(0, [5, 6, 7], max_tokens=20)
    driver.turns(6)
    driver.send(ReloadWeights(path="elsewhere", part="prepare"))
    driver.turns(1)
    stood = driver.num_tokens(0)
    paused = driver.send(PauseGeneration(mode="wait"))
    driver.turns(10)
    assert driver.num_tokens(0) == stood < 20
    assert driver.reply(paused) is None, "the request has not finished"
    driver.send(ReloadWeights(path="elsewhere", part="use"))
    driver.core.run_until_idle()
    assert driver.num_tokens(0) == 20
    assert driver.reply(paused) == Reply(call=paused)


@pytest.mark.parametrize("deadline_s", [float("nan"), float("inf"), -1.0])
def test_a_command_with_a_value_out_of_range_is_refused_by_field_and_nothing_happens(deadline_s: float):
    driver = Driver(new_core())
    driver.client.add(0, [5, 6, 7], max_tokens=20)
    driver.turns(2)
    call = driver.send(DrainEngine(deadline_s=deadline_s))
    driver.turns(2)
    reply = driver.reply(call)
    assert reply is not None
    assert reply.failure is not None
    assert "deadline_s" in reply.failure.message
    assert not driver.core.loop.is_stopping
    driver.core.run_until_idle()
    assert driver.num_tokens(0) == 20


def test_an_engine_tells_what_was_asked_decided_and_found():
    driver = Driver(new_core())
    call = driver.send(DescribeEngine())
    driver.turns(1)
    reply = driver.reply(call)
    assert reply is not None
    report = reply.result
    assert isinstance(report, EngineReport)
    assert report.options["max_num_seqs"] == 8
    assert "seed" not in report.options  # as by default
    assert report.facts["num_blocks"] == 64
    assert report.workers == ({"rank": 0, "device": "null"},)


def test_an_executor_without_a_command_says_so():
    plan, _ = make_plan()
    with pytest.raises(HeadraceError, match="NullExecutor does not carry out CallExtension"):
        NullExecutor(plan.options, NullModel()).control(CallExtension(payload={}))


def test_a_scheduler_of_ones_own_decides():
    core = SteppedCore(max_num_seqs=1, scheduler_cls=f"{__name__}:NewestFirst")
    client = core.open()
    for slot in range(3):
        client.add(slot, [5, 6, 7 + slot], max_tokens=2)
    core.run_until_idle()
    assert [finish.slot for finish in client.finishes()] == [2, 1, 0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing", "scheduler_cls is 'nothing'; it must name a class, as module:Class or module.Class"),
        ("no_such_module:Thing", "scheduler_cls=no_such_module:Thing cannot be loaded: ModuleNotFoundError: No module"),
        (
            "no_such_module:Thing",
            "modules are looked for beside your script, in PYTHONPATH and among what is installed",
        ),
        ("json:Nothing", "scheduler_cls=json:Nothing cannot be loaded: AttributeError: module 'json' has no"),
        ("json.dumps", "scheduler_cls=json.dumps is a function; it must be a class"),
        ("json:JSONDecoder", "must be derived from headrace.core.schedule.scheduler.Scheduler"),
    ],
)
def test_a_scheduler_class_that_cannot_be_is_refused_in_a_sentence(name, words):
    with pytest.raises(OptionError) as caught:
        scheduler_class(Options(scheduler_cls=name))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"dir": "x"}, "profiler_config has no dir; it has profiler and torch_profiler_dir"),
        ({"profiler": "cuda"}, "profiler_config.profiler is 'cuda'; it must be torch"),
        ({"torch_profiler_dir": 3}, "profiler_config.torch_profiler_dir is 3; it must be a folder's path"),
    ],
)
def test_profiler_settings_that_mean_nothing_are_refused(config, words):
    with pytest.raises(OptionError) as caught:
        profile_folder(Options(profiler_config=config))
    assert words in str(caught.value)


NULL = {"distributed_executor_backend": f"{__name__}:ObedientNull", "skip_tokenizer_init": True, "max_model_len": 512}


@pytest.fixture(params=["in process", "child"])
def llm(request, tmp_path, monkeypatch) -> Iterator[LLM]:
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    sys.modules.setdefault("test_control", sys.modules[__name__])
    profiler = {"torch_profiler_dir": str(tmp_path)}
    with LLM(in_process=request.param == "in process", profiler_config=profiler, **NULL) as it:
        yield it


def test_the_same_commands_in_this_process_and_in_another(llm, tmp_path):
    assert llm.is_paused() is False
    llm.pause_generation()
    assert llm.is_paused() is True
    answers: list[Any] = []
    waiting = threading.Thread(
        target=lambda: answers.extend(llm.generate([[5, 6]], SamplingParams(max_tokens=4), use_tqdm=False))
    )
    llm.start_profile("try")
    waiting.start()
    while llm.get_stats().num_waiting == 0:
        assert waiting.is_alive()
    assert not answers
    llm.resume_generation()
    waiting.join(60)
    assert len(answers[0].outputs[0].token_ids) == 4
    paths = llm.stop_profile()
    assert Path(paths[0]).name.startswith("try-core-")
    events = json.loads(Path(paths[0]).read_bytes())["traceEvents"]
    assert {"schedule", "submit", "collect", "answer", "forward"} <= {event["name"] for event in events}
    llm.reload_weights()
    with pytest.raises(HeadraceError, match="there is no checkpoint at missing"):
        llm.reload_weights("missing")
    assert llm.call_extension({"a": 1}) == [{"echo": 1}]
    assert llm.describe_engine().workers[0]["device"] == "null"
    stats = llm.get_stats()
    assert stats.num_step_gaps > 0
    assert stats.forward_s > 0


def test_what_cannot_be_done_says_what_can(llm):
    with pytest.raises(InvalidRequestError, match=r"is no method of a worker extension .* Code is not sent"):
        llm.collective_rpc(functools.partial(print))
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value in (object(), 2**64, -(2**63) - 1, "\ud800", deep):
        with pytest.raises(InvalidRequestError, match="plain data"):
            llm.collective_rpc("anything", args=(value,))
    with pytest.raises(HeadraceError, match="was started without enable_sleep_mode"):
        llm.sleep(level=1)
    with pytest.raises(InvalidRequestError, match="mode is 'stop'; it must be abort, wait or keep"):
        llm.pause_generation("stop")
    with pytest.raises(HeadraceError, match="no profile is being recorded; start one first"):
        llm.stop_profile()
    with pytest.raises(HeadraceError, match="begins file names"):
        llm.start_profile("../../x")


def test_the_asynchronous_face_has_the_same_commands(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)

    async def main() -> None:
        async with AsyncLLM(enable_sleep_mode=True, **NULL) as llm:
            await llm.sleep(level=2)
            assert await llm.is_sleeping()
            await llm.wake_up()
            assert not await llm.is_sleeping()
            await llm.pause_generation(mode="keep")
            assert await llm.is_paused()
            await llm.resume_generation()
            assert not await llm.is_paused()
            with pytest.raises(HeadraceError, match="has no folder for profiles"):
                await llm.start_profile()
            await llm.reload_weights()
            assert await llm.call_extension({}) == [{"echo": 1}]
            assert (await llm.describe_engine()).workers[0]["device"] == "null"

    asyncio.run(main())


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, str]:
    import tiny_models

    folder = tmp_path_factory.mktemp("models")
    kinds = {"one": ("llama", 0), "other": ("llama", 1), "foreign": ("qwen3", 0)}
    saved = {name: str(tiny_models.save(kind, folder / name, seed)) for name, (kind, seed) in kinds.items()}
    damaged = shutil.copytree(saved["other"], folder / "damaged")
    (damaged / "config.json").write_text("[" * 100_000)
    return {**saved, "damaged": str(damaged)}


MODEL = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 64}
PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


def test_an_engine_with_dummy_weights_told_to_reload_from_a_path_reads_the_path(checkpoints):
    with LLM(checkpoints["other"], in_process=True, **MODEL) as llm:
        expected = tokens_of(llm)
    with LLM(checkpoints["one"], load_format="dummy", in_process=True, **MODEL) as llm:
        random = tokens_of(llm)
        assert random != expected
        llm.reload_weights(checkpoints["other"])
        assert tokens_of(llm) == expected
        llm.reload_weights()
        assert tokens_of(llm) == random


@pytest.mark.parametrize("level", [1, 2])
def test_the_weights_that_were_in_use_before_a_sleep_are_those_after_it(checkpoints, level):
    with LLM(checkpoints["other"], in_process=True, **MODEL) as llm:
        expected = tokens_of(llm)
    with LLM(checkpoints["one"], in_process=True, enable_sleep_mode=True, **MODEL) as llm:
        own = tokens_of(llm)
        llm.reload_weights(checkpoints["other"])
        for _ in range(2):
            llm.sleep(level=level)
            llm.wake_up()
            assert tokens_of(llm) == expected
        with pytest.raises(HeadraceError):
            llm.reload_weights("/no/such/folder")
        llm.sleep(level=level)
        llm.wake_up()
        assert tokens_of(llm) == expected, "a reload that failed changes nothing"
        llm.reload_weights()
        llm.sleep(level=level)
        llm.wake_up()
        assert tokens_of(llm) == own


def tokens_of(llm: LLM) -> list[int]:
    return llm.generate([[5, 6, 7] * 6], PARAMS, use_tqdm=False)[0].outputs[0].token_ids


class Extension(worker_extension.Obedient):
    """Gives, asked for nothing, what no message can hold."""

    def handle(self, payload: dict[str, Any]) -> dict[str, Any]:
        return super().handle(payload) if payload else {"number": 2**64, "half a character": "\ud800"}

    def add(self, left: int, right: int) -> int:
        return left + right

    def fail(self) -> None:
        raise ValueError("\udcff")


@pytest.fixture(scope="module", params=[{"in_process": True}, {"tensor_parallel_size": 2}], ids=str)
def extended(checkpoints, request) -> Iterator[tuple[LLM, int]]:
    """An engine with an extension, and how many workers it has."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("OMP_NUM_THREADS", "1")
        patched.setenv("PYTHONPATH", PYTHONPATH)
        with LLM(checkpoints["one"], worker_extension_cls="test_control:Extension", **request.param, **MODEL) as llm:
            yield llm, request.param.get("tensor_parallel_size", 1)


def test_weights_are_replaced_whole_or_not_at_all(checkpoints, extended):
    llm, num_workers = extended
    with LLM(checkpoints["other"], in_process=True, **MODEL) as other:
        expected = tokens_of(other)
    before = tokens_of(llm)
    assert before != expected
    with pytest.raises(HeadraceError, match=r"cannot replace those of .*: their configs differ in"):
        llm.reload_weights(checkpoints["foreign"])
    with pytest.raises(HeadraceError):
        llm.reload_weights("/no/such/folder")
    with pytest.raises(HeadraceError, match="File name too long"):
        llm.reload_weights("x" * 5000)
    with pytest.raises(HeadraceError, match=r"config\.json cannot be read as JSON: maximum recursion"):
        llm.reload_weights(checkpoints["damaged"])
    assert tokens_of(llm) == before
    llm.reload_weights(checkpoints["other"])
    assert tokens_of(llm) == expected  # and nothing of it from the cache of the old ones
    llm.reload_weights()
    assert tokens_of(llm) == before
    answer = {"calls": 1, "executor": "CpuRank", "a": 2}
    assert llm.call_extension({"a": 2}) == [answer] * num_workers
    with pytest.raises(HeadraceError, match=r"the worker extension .* failed: ValueError: told to fail"):
        llm.call_extension({"fail": True})
    assert tokens_of(llm) == before


def test_what_an_extension_gives_and_no_message_can_hold_is_an_error_and_the_engine_serves_on(extended):
    llm, _ = extended
    before = tokens_of(llm)
    with pytest.raises(HeadraceError, match=r"the worker extension .* failed: "):
        llm.call_extension({})
    with pytest.raises(HeadraceError, match=r"the worker extension .* failed: OverflowError"):
        llm.collective_rpc("add", args=(2**63, 2**63))
    with pytest.raises(HeadraceError, match=r"the worker extension .* failed: ValueError: \\udcff"):
        llm.collective_rpc("fail")
    assert tokens_of(llm) == before


class MethodsAlone:
    """As vLLM's extensions are: it takes no rank, and has no `handle`."""

    def add(self, left: int, right: int) -> int:
        return left + right


def test_a_worker_extension_may_have_methods_alone(checkpoints):
    with LLM(checkpoints["one"], in_process=True, worker_extension_cls=f"{__name__}.MethodsAlone", **MODEL) as llm:
        assert llm.collective_rpc("add", args=(2, 3)) == [5]
        with pytest.raises(HeadraceError, match=r"has no method handle\(payload: dict\) -> dict: collective_rpc"):
            llm.call_extension({"a": 1})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("json:JSONDecoder", "worker_extension_cls=json:JSONDecoder cannot be made: TypeError"),
        ("nowhere:Thing", "worker_extension_cls=nowhere:Thing cannot be loaded: ModuleNotFoundError"),
    ],
)
def test_a_worker_extension_that_cannot_be_is_refused_in_a_sentence(checkpoints, name, words):
    with pytest.raises(OptionError) as caught:
        LLM(checkpoints["one"], in_process=True, worker_extension_cls=name, **MODEL)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "ranks", [{"in_process": True}, pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.system)]
)
def test_a_reload_that_hangs_is_answered_at_its_deadline_and_the_engine_serves_on(
    checkpoints, tmp_path, monkeypatch, ranks
):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder = shutil.copytree(checkpoints["one"], tmp_path / "on a dead mount")
    with hanging(folder / "model.safetensors"), LLM(checkpoints["one"], control_timeout=0.5, **ranks, **MODEL) as llm:
        before = tokens_of(llm)
        with pytest.raises(HeadraceError, match=r"reading the weights did not end within 0.5 s \(control_timeout\)"):
            llm.reload_weights(str(folder))
        assert tokens_of(llm) == before
        with pytest.raises(HeadraceError, match="reading the weights of before still hangs"):
            llm.reload_weights(checkpoints["other"])
        assert tokens_of(llm) == before


def test_a_reload_that_ends_after_its_deadline_changes_nothing(checkpoints, monkeypatch):
    mount_is_there, ranks, open_again = threading.Event(), list[CpuRank](), CpuRank._open_again

    def open_in_the_end(rank: CpuRank, path: str | None) -> Any:
        ranks.append(rank)
        mount_is_there.wait(60)
        return open_again(rank, path)

    monkeypatch.setattr(CpuRank, "_open_again", open_in_the_end)
    mount_is_there.set()
    with LLM(checkpoints["one"], in_process=True, enable_sleep_mode=True, **MODEL) as llm:
        llm.reload_weights()
        before, rank = tokens_of(llm), ranks[0]
        weights, deadlines = rank._weights, rank._bounded
        mount_is_there.clear()
        with monkeypatch.context() as patch:
            patch.setattr(deadlines, "_timeout_s", 0.5)
            with pytest.raises(HeadraceError, match="reading the weights did not end within"):
                llm.reload_weights(checkpoints["other"])
        mount_is_there.set()
        assert deadlines._hanging is not None
        deadlines._hanging[1].join(60)
        for level in (1, 2):
            llm.sleep(level=level)
            llm.wake_up()
            assert rank._weights == weights, "what it tells of those in use"
            assert tokens_of(llm) == before


@pytest.mark.system
def test_a_profile_whose_folder_hangs_is_answered_at_its_deadline_and_another_can_be_recorded(
    checkpoints, tmp_path, monkeypatch
):
    pipe = tmp_path / f"core-{os.getpid()}.json"
    os.mkfifo(pipe)  # whoever opens it waits until somebody reads
    mount_is_back = threading.Event()
    profiler = {"torch_profiler_dir": str(tmp_path)}
    said = r"writing the profile did not end within \S+ s \(control_timeout\)"
    bound = {"control_timeout": within(0.5)}  # which to begin a profile must not take
    with LLM(checkpoints["one"], in_process=True, profiler_config=profiler, **bound, **MODEL) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(torch.profiler.profile, "export_chrome_trace", lambda *_: mount_is_back.wait(30))
            for whose in ("workers", "core"):
                llm.start_profile()
                with pytest.raises(HeadraceError, match=said):
                    llm.stop_profile()
                mount_is_back.set()
                assert len(tokens_of(llm)) == 12, f"{whose} wrote nothing, and the engine serves on"
        with pipe.open("rb") as reader:
            assert reader.read(1) == b"{"


def test_a_worker_extension_that_hangs_is_answered_at_its_deadline(checkpoints, monkeypatch):
    with LLM(
        checkpoints["one"],
        in_process=True,
        worker_extension_cls="worker_extension:Obedient",
        control_timeout=0.2,
        **MODEL,
    ) as llm:
        with pytest.raises(HeadraceError, match=r"the call of the worker extension did not end within 0\.2 s"):
            llm.call_extension({"hang": True})
        assert len(tokens_of(llm)) == 12


def test_resetting_the_media_cache_succeeds_with_nothing_to_do_for_models_of_text(checkpoints):
    with LLM(checkpoints["one"], in_process=True, **MODEL) as llm:
        assert llm.reset_mm_cache() is None
