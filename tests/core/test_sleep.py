"""Putting an engine to sleep and waking it up: the order of things in the core, and what a CPU gives back."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from dead_mount import hanging
from engine_parts import EOS, VOCAB_SIZE, SteppedCore
from source_tree import PYTHONPATH
from test_control import Driver, ObedientNull

from headrace import LLM, SamplingParams
from headrace.executor.models import kv_cache
from headrace.executor.models.families import spec_from_config
from headrace.executor.testing.null import NullModel
from headrace.ipc.control import PauseGeneration, ReloadWeights, ResumeGeneration, Sleep, WakeUp, WorkerAnswer
from headrace.ipc.failure import EngineAsleepError, EngineDeadError, HeadraceError, InvalidRequestError
from headrace.ipc.messages import FinishReason


class LightSleeper(ObedientNull):
    """Cannot sleep at level 2."""

    def control(self, command: Any) -> tuple[WorkerAnswer, ...]:
        answers = super().control(command)
        if command == Sleep(level=2, mode="keep"):
            raise HeadraceError("there is no room for its dreams")
        return answers


def new_driver(**options: Any) -> Driver:
    model = NullModel(vocab_size=VOCAB_SIZE, eos_token_id=EOS, check=True)
    return Driver(SteppedCore(model, executor_class=LightSleeper, **{"enable_sleep_mode": True, **options}))


def commands_of(driver: Driver) -> list[Any]:
    executor = driver.core.executor
    assert isinstance(executor, LightSleeper)
    return executor.commands


def failure_of(driver: Driver, call: int) -> str:
    reply = driver.reply(call)
    assert reply is not None
    return "" if reply.failure is None else reply.failure.message


# --- the core ---------------------------------------------------------------------------------------------------


def test_requests_that_are_kept_wait_for_the_waking_and_compute_anew() -> None:
    driver = new_driver()
    driver.client.add(0, [5, 6, 7] * 3, max_tokens=20)
    driver.turns(6)
    standing = driver.num_tokens(0)
    call = driver.send(Sleep(mode="keep"))
    driver.turns(4)
    assert failure_of(driver, call) == ""
    stats = driver.core.loop.stats()
    assert (stats.sleep_level, stats.paused, stats.num_cached_blocks) == (1, True, 0)
    driver.turns(6)
    assert standing <= driver.num_tokens(0) <= standing + 2, "of the steps that were in flight"
    call = driver.send(WakeUp())
    driver.core.run_until_idle()
    assert failure_of(driver, call) == ""
    assert not driver.core.loop.stats().sleep_level
    assert driver.num_tokens(0) == 20
    assert driver.core.loop.scheduler.num_preemptions == 1
    assert commands_of(driver) == [Sleep(mode="keep"), WakeUp()]


def test_requests_end_or_finish_first_as_the_mode_says() -> None:
    driver = new_driver()
    driver.client.add(0, [5, 6, 7], max_tokens=20)
    driver.turns(4)
    driver.send(Sleep(level=2))
    driver.turns(3)
    assert [finish.reason for finish in driver.client.finishes()] == [FinishReason.ABORT]
    driver.send(WakeUp())
    driver.client.add(1, [5, 6, 7], max_tokens=6)
    driver.turns(2)
    call = driver.send(Sleep(mode="wait"))
    driver.turns(1)
    assert driver.reply(call) is None
    driver.turns(30)
    assert failure_of(driver, call) == ""
    assert driver.num_tokens(1) == 6


def test_a_sleeping_engine_refuses_requests_instead_of_letting_them_hang() -> None:
    driver = new_driver()
    driver.send(Sleep())
    driver.turns(1)
    for tags in (("weights",), ("kv_cache",)):
        driver.client.add(len(driver.client.finishes()), [5, 6, 7], max_tokens=3)
        driver.turns(2)
        failure = driver.client.finishes()[-1].failure
        assert failure is not None
        assert failure.message == "the engine is sleeping: it accepts no requests before wake_up"
        assert failure.type == "EngineAsleepError"
        driver.send(WakeUp(tags=tags))
        driver.turns(1)
    driver.client.add(2, [5, 6, 7], max_tokens=3)
    driver.core.run_until_idle()
    assert driver.num_tokens(2) == 3


def test_a_request_that_another_engine_began_waits_for_the_waking() -> None:
    """An engine that leaves while all sleep hands over the requests that it kept."""
    whole = new_driver()
    whole.client.add(0, [5, 6, 7], max_tokens=9)
    whole.core.run_until_idle()
    tokens = whole.client.tokens()[0]
    driver = new_driver()
    driver.send(Sleep(mode="keep"))
    driver.turns(1)
    driver.client.add(0, [5, 6, 7, *tokens[:4]], max_tokens=9, num_resumed_tokens=4, seed=1)
    driver.turns(6)
    assert not driver.client.finishes()
    assert not driver.num_tokens(0)
    driver.send(WakeUp())
    driver.core.run_until_idle()
    assert driver.client.tokens()[0] == tokens[4:]


def test_it_wakes_in_parts_and_weights_are_changed_in_between() -> None:
    driver = new_driver()
    calls = [
        driver.send(command)
        for command in (
            *(Sleep(), Sleep(), ResumeGeneration(), ReloadWeights(path="new")),
            *(WakeUp(tags=("weights",)), ResumeGeneration(), ReloadWeights(path="new")),
        )
    ]
    for _ in calls:
        driver.turns(1)
    told = [failure_of(driver, call) for call in calls]
    assert told[0] == told[1] == told[4] == told[6] == "", "asking twice for sleep is no error, as with vLLM"
    assert commands_of(driver).count(Sleep()) == 1
    assert told[2] == told[5] == "the engine is sleeping and cannot compute; wake_up resumes it"
    assert told[3] == "the weights sleep, and cannot be changed; wake them with wake_up(tags=['weights'])"
    assert driver.core.loop.stats().sleep_level
    driver.send(WakeUp(tags=("kv_cache",)))
    driver.turns(1)
    stats = driver.core.loop.stats()
    assert (stats.sleep_level, stats.paused) == (0, False)


def test_a_sleep_that_fails_leaves_the_engine_awake_and_at_work() -> None:
    driver = new_driver()
    driver.client.add(0, [5, 6, 7], max_tokens=20)
    driver.turns(4)
    call = driver.send(Sleep(level=2, mode="keep"))
    driver.core.run_until_idle()
    assert failure_of(driver, call) == "there is no room for its dreams"
    assert commands_of(driver)[-1] == WakeUp(), "for the ranks that slept already"
    assert driver.num_tokens(0) == 20
    refused = new_driver(enable_sleep_mode=False)
    call = refused.send(Sleep())
    refused.turns(2)
    assert failure_of(refused, call).startswith("this engine was started without enable_sleep_mode")
    assert not refused.core.loop.stats().paused


def test_a_pause_of_the_users_own_outlasts_the_sleep_and_one_called_off_ends_it() -> None:
    driver = new_driver()
    for command in (PauseGeneration(), Sleep(), WakeUp()):
        driver.send(command)
        driver.turns(1)
    stats = driver.core.loop.stats()
    assert (stats.sleep_level, stats.paused) == (0, True)
    driver = new_driver()
    driver.client.add(0, [5, 6, 7], max_tokens=20)
    driver.turns(2)
    call = driver.send(Sleep(mode="wait"))
    driver.turns(1)
    driver.send(ResumeGeneration())
    driver.turns(1)
    assert failure_of(driver, call) == "generation was resumed before the engine could sleep"
    assert not driver.core.loop.stats().sleep_level


# --- the CPU's executor -----------------------------------------------------------------------------------------

PROMPTS: list[Any] = [{"prompt_token_ids": [7, 8, 9, 10, 11, 12, 13]}, {"prompt_token_ids": [5]}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def tokens_of(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_slept_answers_as_before(level: int, checkpoint: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    with LLM(
        str(folder), in_process=True, device="cpu", skip_tokenizer_init=True, dtype="float32", max_model_len=64,
        enable_sleep_mode=True,
    ) as llm:  # fmt: skip
        before = tokens_of(llm)
        assert not llm.is_sleeping()
        llm.sleep(level=level)
        assert llm.is_sleeping()
        with pytest.raises(EngineAsleepError, match="the engine is sleeping: it accepts no requests before wake_up"):
            tokens_of(llm)
        moved = folder.rename(tmp_path / "elsewhere")
        if level == 2:
            with pytest.raises(HeadraceError, match="model"):
                llm.wake_up()
            assert llm.is_sleeping(), "as its checkpoint is gone"
            moved.rename(folder)
        llm.wake_up(["weights"])
        assert llm.is_sleeping()
        llm.wake_up(tags=["kv_cache"])
        assert tokens_of(llm) == before
        with pytest.raises(InvalidRequestError, match="level is 3; it must be 1 or 2"):
            llm.sleep(level=3)
        with pytest.raises(InvalidRequestError, match="there is no tag 'dreams'; tags are kv_cache and weights"):
            llm.wake_up(["dreams"])


@pytest.mark.system
def test_waking_up_whose_checkpoint_hangs_is_answered_at_its_deadline_and_the_engine_still_sleeps(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    with LLM(
        str(folder), in_process=True, device="cpu", skip_tokenizer_init=True, dtype="float32", max_model_len=64,
        enable_sleep_mode=True, control_timeout=6,  # enough to fall asleep on a busy machine
    ) as llm:  # fmt: skip
        before = tokens_of(llm)
        llm.sleep(level=2)
        weights, dead = folder / "model.safetensors", tmp_path / "on a dead mount"
        shutil.copy(weights, dead)
        aside = weights.rename(tmp_path / "aside")
        weights.hardlink_to(dead)
        with hanging(dead):
            with pytest.raises(HeadraceError, match=r"reading the weights did not end within 6 s \(control_timeout\)"):
                llm.wake_up()
            assert llm.is_sleeping()
            with pytest.raises(HeadraceError, match="reading the weights of before still hangs"):
                llm.wake_up()
            aside.replace(weights)
        # The mount is back: what hung goes on, for nobody.
        for thread in threading.enumerate():
            if thread.name == "reading the weights":
                thread.join(60)
        llm.wake_up()
        assert tokens_of(llm) == before


@pytest.mark.system
@pytest.mark.parametrize("where", [{"in_process": True}, {}, {"tensor_parallel_size": 2}])
def test_an_engine_that_hangs_on_its_way_to_sleep_says_so_at_its_deadline_and_ends(
    where: dict[str, Any], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), PYTHONPATH]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with LLM(
        str(checkpoint), device="cpu", skip_tokenizer_init=True, dtype="float32", max_model_len=64,
        enable_sleep_mode=True, control_timeout=0.5, worker_extension_cls="worker_extension:Insomniac", **where,
    ) as llm:  # fmt: skip
        assert len(tokens_of(llm)) == 2
        with pytest.raises(HeadraceError, match=r"going to sleep did not end within 0\.5 s \(control_timeout\)"):
            llm.sleep()
        with pytest.raises(EngineDeadError, match="going to sleep did not end within"):
            tokens_of(llm)


def test_a_cache_that_sleeps_takes_no_memory() -> None:
    spec = spec_from_config(tiny_models.build("llama").config.to_dict() | {"architectures": ["LlamaForCausalLM"]})
    for device, is_paged in ((torch.device("cpu"), True), (torch.device("meta"), False)):
        cache = kv_cache.allocate(spec, 4096, 16, torch.int8, device)
        assert bool(cache.pages) is is_paged
        tensors = (*cache.keys, *cache.values, *cache.key_scales, *cache.value_scales)
        for tensor in tensors:
            tensor.fill_(3)
        held_bytes = resident_bytes()
        cache.release()
        if is_paged:
            assert held_bytes - resident_bytes() > 0.9 * cache.nbytes
        else:
            assert not any(tensor.untyped_storage().nbytes() for tensor in tensors)
        cache.restore()
        assert sum(tensor.untyped_storage().nbytes() for tensor in tensors) == cache.nbytes
        if is_paged:
            assert not any(bool(tensor.any()) for tensor in tensors)


def resident_bytes() -> int:
    """Of this process."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) << 10
