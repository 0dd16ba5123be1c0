"""Objects of the API are of the kind that vLLM's are: structs of msgspec, dataclasses, or plain objects."""

from __future__ import annotations

import copy
import dataclasses
import enum
import json
import pickle
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace import (
    LLM,
    BeamSearchOutput,
    BeamSearchParams,
    BeamSearchSequence,
    CompletionOutput,
    EngineArgs,
    Logprob,
    RepetitionDetectionParams,
    RequestOutput,
    SamplingParams,
)
from headrace.config import CompilationConfig
from headrace.engine.protocol import StreamingInput
from headrace.ipc.failure import InvalidRequestError
from headrace.outputs import RequestMetrics
from headrace.sampling_params import RequestOutputKind, StructuredOutputsParams
from headrace.usage.usage_lib import UsageContext
from headrace.v1.engine import FinishReason
from headrace.v1.metrics.reader import Counter, Gauge, Histogram, Metric, Vector

GIVEN: dict[str, Any] = {
    "temperature": 0.5,
    "stop": ["a"],
    "stop_token_ids": [3],
    "logit_bias": {3: 1.0},
    "bad_words": ["x"],
    "structured_outputs": StructuredOutputsParams(regex="a"),
    "repetition_detection": RepetitionDetectionParams(3, 1, 4),
    "extra_args": {"a": [1]},
    "output_kind": RequestOutputKind.DELTA,
}
PARAMS = (
    SamplingParams(),
    SamplingParams(**GIVEN),
    BeamSearchParams(beam_width=2, max_tokens=3),
    BeamSearchParams(2, 3, length_penalty=2.0),
    RepetitionDetectionParams(),
    RepetitionDetectionParams(3, 0, 4),
)


@pytest.mark.parametrize("params", PARAMS, ids=lambda params: type(params).__name__)
def test_functions_of_msgspec_and_copy_work_on_parameters(params: Any) -> None:
    kind = type(params)
    fields = msgspec.structs.asdict(params)
    assert list(fields) == list(kind.__struct_fields__) == [each.name for each in msgspec.structs.fields(kind)]
    twins = [
        kind(**{name: getattr(params, name) for name in params.__struct_fields__}),  # as outlines copies them
        msgspec.structs.replace(params),
        msgspec.json.decode(msgspec.json.encode(params), type=kind),
        msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=kind),
        msgspec.convert(msgspec.to_builtins(params, str_keys=True), kind, strict=False),
        copy.copy(params),
        copy.deepcopy(params),
        pickle.loads(pickle.dumps(params)),
    ]
    assert twins == [params] * len(twins)
    with pytest.raises(TypeError, match="unhashable"):
        hash(params)
    params.a_script_s_own = 1
    assert vars(params)["a_script_s_own"] == 1


def test_parameters_are_changed_by_replace_and_checked_again() -> None:
    params = msgspec.structs.replace(SamplingParams(**GIVEN), n=2, max_tokens=5)
    assert (params.n, params.max_tokens, params.stop) == (2, 5, ["a"])
    with pytest.raises(InvalidRequestError, match=r"SamplingParams\.n = 0"):
        msgspec.structs.replace(params, n=0)
    with pytest.raises(msgspec.ValidationError, match=r"SamplingParams\.n = 0"):
        msgspec.json.decode(b'{"n":0}', type=SamplingParams)
    with pytest.raises(msgspec.ValidationError, match="temprature"):
        msgspec.json.decode(b'{"temprature":0}', type=SamplingParams)
    asked = msgspec.to_builtins(SamplingParams(temperature=0.0, stop="a"))
    assert {name: value for name, value in asked.items() if value != []} == {"temperature": 0.0, "stop": ["a"]}


def test_vllms_fields_without_effect_can_be_read_but_not_asked_for() -> None:
    params = SamplingParams()
    assert (params.watermarking, params.skip_clone, params.routed_experts_prompt_start) == (None, False, 0)
    params.watermarking = True
    with pytest.raises(InvalidRequestError, match="watermarking is not supported"):
        params.verify()
    with pytest.raises(InvalidRequestError, match="prompt_logprob_token_ids is not supported"):
        SamplingParams(prompt_logprob_token_ids=np.array([[1, 2], [3, 4]]))


def test_copies_keep_what_the_tokenizer_told_and_what_a_script_set() -> None:
    class Words:
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [len(text)]

    params = SamplingParams(bad_words=["abc"])
    params.update_from_tokenizer(Words())
    params.tag = "mine"  # type: ignore[attr-defined]
    for twin in (params.clone(), copy.copy(params), copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
        assert twin.bad_words_token_ids == params.bad_words_token_ids == [[3], [4]]
    assert params.clone().tag == "mine"  # type: ignore[attr-defined]


POSITION = {5: Logprob(-0.5, 1, "a")}
ANSWER = CompletionOutput(0, "a", [5], -0.5, [POSITION], finish_reason="stop")
DATACLASSES = (
    POSITION[5],
    ANSWER,
    RequestMetrics(arrival_time=1.0, queued_s=2.0),
    BeamSearchSequence({"type": "token", "prompt_token_ids": [1]}, [1, 5], [POSITION]),
    BeamSearchOutput([]),
    Metric("a", {}),
    Counter("a", {}, 1),
    Gauge("a", {}, 1.0),
    Vector("a", {}, [1]),
    Histogram("a", {}, 1, 1.0, {"+Inf": 1}),
    StreamingInput("a", SamplingParams()),
    StructuredOutputsParams(regex="a"),
)


@pytest.mark.parametrize("given", DATACLASSES, ids=lambda given: type(given).__name__)
def test_dataclasses_of_vllms_are_dataclasses(given: Any) -> None:
    named = {each.name: getattr(given, each.name) for each in dataclasses.fields(given)}
    assert named.items() <= vars(given).items()
    assert dataclasses.asdict(given).keys() == named.keys()
    for twin in (dataclasses.replace(given), copy.copy(given), copy.deepcopy(given), pickle.loads(pickle.dumps(given))):
        assert twin == given
        assert twin is not given
    given.a_script_s_own = 1
    assert given.a_script_s_own == 1
    with pytest.raises(TypeError, match="unhashable"):
        hash(given)


def test_outputs_become_plain_data() -> None:
    found = dataclasses.asdict(ANSWER)
    assert json.loads(json.dumps(found))["logprobs"] == [{"5": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}}]
    assert list(found)[:8] == [
        *("index", "text", "token_ids", "cumulative_logprob", "logprobs", "routed_experts", "finish_reason"),
        "stop_reason",
    ]


def test_outputs_of_requests_are_plain_objects(llm: LLM) -> None:
    (output,) = llm.generate("hello", SamplingParams(max_tokens=2, temperature=0, logprobs=1), use_tqdm=False)
    assert vars(output)["outputs"] is output.outputs
    assert {output: 1}[output] == len({output, output}) == 1
    assert output != copy.copy(output)
    output.reward = 0.5  # type: ignore[attr-defined]
    output.outputs[0].reward = 0.5  # type: ignore[attr-defined]
    assert (vars(output)["reward"], vars(output.outputs[0])["reward"]) == (0.5, 0.5)
    assert json.loads(json.dumps(dataclasses.asdict(output.outputs[0])))["text"] == output.outputs[0].text
    told = vars(output.metrics)
    assert told["queued_ts"] == told["arrival_time"] <= told["scheduled_ts"] <= told["first_token_ts"]
    assert told["first_token_ts"] <= told["last_token_ts"]
    assert isinstance(pickle.loads(pickle.dumps(output)), RequestOutput)


def test_beams_are_prompts_to_go_on_with(llm: LLM) -> None:
    (found,) = llm.beam_search(["hello"], BeamSearchParams(beam_width=2, max_tokens=2))
    best = found.sequences[0]
    asked = best.get_prompt()
    assert asked == {"type": "token", "prompt": "hello", "prompt_token_ids": best.tokens}
    assert best.orig_prompt["prompt_token_ids"] == best.tokens[:-2]
    (answer,) = llm.generate(asked, SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
    assert answer.prompt_token_ids == best.tokens


def test_configs_are_dataclasses_and_engine_args_too(llm: LLM) -> None:
    config = llm.llm_engine.vllm_config
    for each in (config, config.model_config, config.cache_config, config.scheduler_config):
        assert dataclasses.is_dataclass(each)
        assert copy.deepcopy(each) == pickle.loads(pickle.dumps(each)) == each
    assert dataclasses.asdict(config)["cache_config"] == vars(config.cache_config)
    assert dataclasses.is_dataclass(EngineArgs("m"))


def test_attributes_of_config_dicts_are_their_fields() -> None:
    config = CompilationConfig(mode=0)
    config.cudagraph_capture_sizes = [1, 2]
    assert config == {"mode": 0, "cudagraph_capture_sizes": [1, 2]}
    del config.mode
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == {"cudagraph_capture_sizes": [1, 2]}


def test_enums_are_of_vllms_kinds() -> None:
    assert issubclass(UsageContext, str)
    assert issubclass(UsageContext, enum.Enum)
    assert UsageContext.LLM_CLASS == "LLM_CLASS"
    assert [int(each) for each in FinishReason] == [0, 1, 2, 3, 4]
    assert (str(FinishReason.LENGTH), FinishReason("length"), FinishReason(1)) == ("length", *[FinishReason.LENGTH] * 2)
