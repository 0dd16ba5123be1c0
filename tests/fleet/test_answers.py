"""What several engines answer to one command, in one answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft_adapters
import pytest
import tiny_models

from headrace import LLM, LoRARequest, SamplingParams
from headrace.frontend.fleet.engines import combined
from headrace.ipc.adapters import AdapterStats
from headrace.ipc.messages import EngineStats, EngineTimes

COUNTS = EngineStats.__struct_fields__[: EngineStats.__struct_fields__.index("num_step_gaps")]


def stats(**of: Any) -> EngineStats:
    return EngineStats(**{**dict.fromkeys(COUNTS, 1), **of})


def test_engines_of_which_some_have_computed_nothing_are_summed() -> None:
    busy = stats(times=EngineTimes(step_tokens=(1, 2)), num_accepted_tokens_per_pos=(3, 2))
    idle = stats()
    for both in ([busy, idle], [idle, busy]):
        found = combined(both)
        assert found.times.step_tokens == (1, 2)
        assert found.num_accepted_tokens_per_pos == (3, 2)
        assert found.steps == 2


def test_names_are_joined_and_levels_and_limits_are_not_summed() -> None:
    one = stats(sleep_level=1, adapters=AdapterStats(max_loras=2, running=("a", "b"), num_loads=1))
    two = stats(sleep_level=1, adapters=AdapterStats(max_loras=2, running=("b",), waiting=("c",), num_loads=2))
    found = combined([one, two, stats(adapters=AdapterStats(max_loras=2))])
    assert found.sleep_level == 1
    assert found.adapters == AdapterStats(max_loras=2, running=("a", "b"), waiting=("c",), num_loads=3)


@pytest.mark.system
def test_two_engines_that_sleep_with_adapters_say_so(tmp_path: Path) -> None:
    folder = str(tiny_models.save("llama", tmp_path / "model", tokenizer=True))
    adapter = LoRARequest("one", 1, str(peft_adapters.PeftModels(tiny_models.build("llama"), tmp_path).make("one")))
    with LLM(
        folder, data_parallel_size=2, dtype="float32", max_model_len=64, num_gpu_blocks_override=40,
        enable_lora=True, max_lora_rank=8, enable_sleep_mode=True,
    ) as llm:  # fmt: skip
        (asked,) = llm.enqueue(["the mill"], SamplingParams(max_tokens=40, ignore_eos=True), lora_request=adapter)
        assert not llm.is_paused()
        assert not llm.is_sleeping()
        assert llm.reset_prefix_cache(reset_running_requests=True)
        assert [output.request_id for output in llm.wait_for_completion(use_tqdm=False)] == [asked]
        llm.sleep()
        assert llm.is_sleeping()
        assert llm.get_stats().sleep_level == 1
        llm.wake_up()
        assert not llm.is_sleeping()
