"""Grammars and logits processors on the GPU's path, op by op: answers are the CPU's, and masks are made while the model
of their step runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
import tiny_models
from thinned import every

from headrace import LLM, SamplingParams, StructuredOutputsParams
from headrace.core.structured_output.follower import Masks
from headrace.executor.gpu.runner import GpuRunner

OPTIONS: dict[str, Any] = {
    "in_process": True,
    "device": "cpu",
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_model_len": 160,
    "block_size": 8,
    "num_gpu_blocks_override": 120,
}
ON_A_GPU: dict[str, Any] = {"distributed_executor_backend": "gpu_parts:GpuOnCpuExecutor"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
POINT = {
    "type": "object",
    "properties": {"name": {"enum": ["left", "right"]}, "at": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "at"],
    "additionalProperties": False,
}
PROMPTS = ["the mill and the water", "the water and the mill and the water", "the mill", "the water"]


def drawn(seed: int, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": seed, "max_tokens": 60, **more})


def following(**form: Any) -> dict[str, Any]:
    return {"structured_outputs": StructuredOutputsParams(**form, disable_any_whitespace=True)}


PARAMS = [
    drawn(1, **following(json=POINT)),
    drawn(2, **following(regex="(ab|cd){3,9}"), frequency_penalty=0.5, logprobs=2),
    drawn(3, max_tokens=20, ignore_eos=True),
    drawn(4, **following(choice=["the water carries the mill", "the mill"]), temperature=0),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_models.save("llama", tmp_path_factory.mktemp("model"), tokenizer=True))


def answers(folder: str, params: list[SamplingParams], **options: Any) -> list[tuple[list[int], str | None]]:
    with LLM(folder, **{**OPTIONS, **options}) as llm:
        outputs = [each for _ in range(2) for each in llm.generate(PROMPTS, params, use_tqdm=False)]
        if "speculative_config" in options and "logits_processors" not in options:  # which take a token at a time
            assert llm.get_stats().num_accepted_tokens > 0
    return [(list(each.outputs[0].token_ids), each.outputs[0].finish_reason) for each in outputs]


@pytest.mark.parametrize("more", every(3, [{"speculative_config": NGRAM}, {}, {"async_scheduling": False}]), ids=str)
@pytest.mark.usefixtures("drafts_at_any_cost")
def test_answers_that_have_a_form_are_those_of_the_cpu(folder: str, more: dict[str, Any]) -> None:
    found = answers(folder, PARAMS, **ON_A_GPU, **more)
    assert found == answers(folder, PARAMS)
    assert found[1][1] == "stop"


def test_masks_are_made_while_the_model_of_their_step_runs(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are waited for when the GPU has its model to compute."""
    events = list[str]()

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            result = call(*given, **named)
            events.append(name)
            return result

        return run

    for cls, method, name in (
        (GpuRunner, "_decode", "model"),
        (GpuRunner, "_mixed", "model"),
        (GpuRunner, "submit", "submitted"),
        (Masks, "write", "masks"),
    ):
        monkeypatch.setattr(cls, method, noted(name, getattr(cls, method)))
    with LLM(folder, **OPTIONS, **ON_A_GPU) as llm:
        (output,) = llm.generate(PROMPTS[0], PARAMS[0], use_tqdm=False)
    jsonschema.validate(json.loads(output.outputs[0].text), POINT)
    steps = [each.split() for each in " ".join(events).split("submitted")]
    assert [each for each in steps if "masks" in each] == [["model", "masks"]] * events.count("masks")
    assert events.count("masks") >= 3


PROCESSORS = ["lab_processors:OnlyToken", "lab_processors:NoRepeats"]
PROCESSED = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, extra_args={"only_token": 77}),
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    drawn(3, max_tokens=12, ignore_eos=True, extra_args={"no_repeats": True}),
    drawn(
        4, max_tokens=12, ignore_eos=True, typical_p=0.6, xtc_probability=0.5, xtc_threshold=0.01, dry_multiplier=1.0
    ),
]


@pytest.mark.parametrize("more", every(2, [{"speculative_config": NGRAM}, {}]), ids=["with drafts", ""])
@pytest.mark.usefixtures("drafts_at_any_cost")
def test_logits_processors_change_the_same_on_a_gpu(folder: str, more: dict[str, Any]) -> None:
    found = answers(folder, PROCESSED, logits_processors=PROCESSORS, **ON_A_GPU, **more)
    assert found == answers(folder, PROCESSED, logits_processors=PROCESSORS)
    assert found[0][0] == [77] * 12
    assert len(set(found[2][0])) == 12
    assert found[1] == answers(folder, PROCESSED[1:2] * 4)[1]
