"""What scripts do with parameters, options and outputs before and after an engine is there, as vLLM's have it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import headrace
import headrace.sampling_params as vllm_names
from headrace import LLM, AsyncLLM, CompletionOutput, EngineArgs, RequestOutput, SamplingParams
from headrace.frontend.request.outputs import RequestMetrics
from headrace.frontend.request.parameters.sampling_params import SamplingType
from headrace.ipc.failure import HeadraceError, InvalidRequestError, OptionError
from headrace.sampling_params import StructuredOutputsParams


# tests/v1/engine/test_llm_engine.py::test_skip_tokenizer_initialization gives prompt_logprobs=True
def test_log_probabilities_may_be_asked_for_as_a_flag() -> None:
    asked = SamplingParams(logprobs=True, prompt_logprobs=True)
    assert (asked.logprobs, asked.prompt_logprobs, type(asked.logprobs)) == (1, 1, int)
    assert SamplingParams(logprobs=False, prompt_logprobs=False) == SamplingParams()


def test_parameters_have_vllms_names_and_makers() -> None:
    assert headrace.RepetitionDetectionParams is vllm_names.RepetitionDetectionParams
    assert vllm_names.SamplingType is SamplingType
    assert vllm_names.GuidedDecodingParams.from_optional(backend="xgrammar") is None
    found = vllm_names.GuidedDecodingParams.from_optional(json={"type": "object"}, whitespace_pattern=None)
    assert (found.json, found.regex) == ({"type": "object"}, None)

    class Pydantics:
        @staticmethod
        def model_json_schema() -> dict[str, str]:
            return {"type": "string"}

    assert vllm_names.GuidedDecodingParams.from_optional(json=Pydantics).json == {"type": "string"}


# tests/entrypoints/openai/chat_completion/test_thinking_token_budget_validation.py, responses/test_sampling_params.py
def test_values_that_ask_for_nothing_are_taken() -> None:
    assert SamplingParams(thinking_token_budget=-1).thinking_token_budget is None
    assert not SamplingParams(spaces_between_special_tokens=False).spaces_between_special_tokens


def test_parameters_tell_how_they_sample() -> None:
    kinds = [SamplingParams(temperature=0), SamplingParams(), SamplingParams(seed=3)]
    assert [each.sampling_type for each in kinds] == [
        SamplingType.GREEDY,
        SamplingType.RANDOM,
        SamplingType.RANDOM_SEED,
    ]
    counts = [SamplingParams(), SamplingParams(logprobs=3), SamplingParams(logprob_token_ids=[5, 6])]
    assert [each.num_logprobs for each in counts] == [None, 3, 2]


def test_an_unknown_field_is_a_type_error_as_of_any_constructor() -> None:
    with pytest.raises(TypeError, match="SamplingParams has no field 'temprature'; did you mean 'temperature'"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="has no field"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]


def test_structured_outputs_take_their_form_by_position() -> None:
    assert StructuredOutputsParams('{"type": "object"}').json == '{"type": "object"}'
    assert StructuredOutputsParams(None, "[0-9]+").regex == "[0-9]+"


def test_outputs_have_the_names_of_what_is_not_there() -> None:
    answer = CompletionOutput(index=0, text="a", token_ids=[1])
    output = RequestOutput("r", "p", [1], None, [answer], True)
    assert (answer.lora_request, answer.routed_experts) == (None, None)
    assert (output.encoder_prompt, output.encoder_prompt_token_ids, output.kv_transfer_params) == (None, None, None)
    assert CompletionOutput(index=0, text="a", token_ids=[1], lora_request=None, routed_experts=None) == answer
    names = ("encoder_prompt", "encoder_prompt_token_ids", "multi_modal_placeholders", "kv_transfer_params")
    neutral: dict[str, Any] = dict.fromkeys(("lora_request", "num_cached_tokens", *names))
    assert vars(RequestOutput("r", "p", [1], None, [answer], True, **neutral)) == vars(output)
    # vLLM's order, for those who give them by position
    assert RequestOutput("r", "p", [1], None, [answer], True, None, None, None, None, 3).num_cached_tokens == 3
    with pytest.raises(TypeError, match="unexpected keyword argument 'of_a_later_version'"):
        RequestOutput("r", "p", [1], None, [answer], True, of_a_later_version=1)  # type: ignore[call-arg]


# vllm.v1.metrics.stats.RequestStateStats, and RequestMetrics before it: scripts take differences of its moments
def test_times_of_a_request_are_moments_too() -> None:
    known = RequestMetrics(
        arrival_time=100.0, first_token_latency=4.0, total_s=9.0, queued_s=1.0, prefill_s=2.0, decode_s=5.0
    )
    assert (known.queued_ts, known.scheduled_ts, known.first_token_ts, known.last_token_ts) == (100, 101, 103, 108)
    assert (known.time_in_queue, known.first_token_time, known.finished_time) == (1, 104, 109)
    unknown = RequestMetrics(arrival_time=100.0)
    assert (unknown.scheduled_ts, unknown.first_token_ts, unknown.last_token_ts) == (0, 0, 0)
    assert (unknown.time_in_queue, unknown.first_token_time, unknown.finished_time) == (None, None, None)


def test_engine_args_are_compared_and_shown_by_their_options() -> None:
    args = EngineArgs(model="m", max_model_len=64)
    assert args == EngineArgs(model="m", max_model_len=64, seed=0)
    assert args != EngineArgs(model="m")
    assert args != "m"
    assert repr(args) == "EngineArgs(model='m', max_model_len=64)"


def test_structured_outputs_tell_whether_they_ask_for_a_form() -> None:
    params = StructuredOutputsParams(structural_tag={"format": {"type": "const_string", "value": "a"}})
    assert (params.all_constraints_none(), params.all_non_structural_tag_constraints_none()) == (False, True)
    params = StructuredOutputsParams(regex="a")
    assert (params.all_constraints_none(), params.all_non_structural_tag_constraints_none()) == (False, False)
    params.regex = None
    assert params.all_constraints_none()


def test_config_objects_tell_what_they_lack(llm: LLM) -> None:
    engine = llm.llm_engine
    assert (engine.model_config.runner_type, engine.model_config.is_multimodal_model) == ("generate", False)
    assert engine.cache_config.block_size == engine.vllm_config.cache_config.block_size
    for owner, name, said in (
        (engine.model_config, "hf_config", "config.json"),
        (engine.vllm_config, "lora_config", "describe_engine"),
        (engine.vllm_config, "parallel_config", "describe_engine"),
        (engine, "model_executor", "a program of its own"),
        (llm, "set_tokenizer", "the option tokenizer"),
        (llm, "get_decoding_config", "describe_engine"),
        (EngineArgs(), "create_speculative_config", "describe_engine"),
    ):
        with pytest.raises(AttributeError, match=f"has no '{name}': .*{said}"):
            getattr(owner, name)


# tests/test_version.py
def test_the_version_is_a_tuple_too() -> None:
    from headrace.version import __version__, __version_tuple__

    assert __version_tuple__ == headrace.__version_tuple__
    assert __version__ == headrace.__version__
    assert ".".join(map(str, __version_tuple__)) == __version__.replace("+", ".")
    assert len(__version_tuple__) >= 3


def test_engine_args_read_like_vllms() -> None:
    assert EngineArgs("m").model == "m"
    assert vars(EngineArgs("m", max_model_len=64)) == {"model": "m", "max_model_len": 64}
    assert EngineArgs.max_num_seqs == EngineArgs().max_num_seqs  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="EngineArgs has no 'max_num_sequences'"):
        _ = EngineArgs.max_num_sequences  # type: ignore[attr-defined]
    given = EngineArgs("m")
    assert (given.enable_dbo, given.runner, given.tokenizer_mode) == (False, "auto", "auto")
    given.enable_dbo = True  # type: ignore[attr-defined]
    with pytest.raises(OptionError, match="enable_dbo=True is refused"):
        LLM(**vars(given))


# examples/deployment/async_llm_streaming.py and the serving code of vLLM, which awaited it until 0.11
def test_the_tokenizer_of_an_async_llm_is_awaited_or_used_as_it_is(address: str) -> None:
    async def run() -> None:
        llm = await AsyncLLM.connect(address)
        awaited = await llm.get_tokenizer()
        assert llm.get_tokenizer().encode("hello") == awaited.encode("hello") == llm.tokenizer("hello").input_ids
        assert len(llm.tokenizer) == len(awaited)
        assert (await llm.get_tokenizer(hf=True)).eos_token_id == awaited.eos_token_id
        with pytest.raises(HeadraceError, match=r"await get_tokenizer\(hf=True\)"):
            llm.get_tokenizer(hf=True).encode("hello")
        assert await llm.get_supported_tasks() == ("generate",)
        await llm.reset_encoder_cache()
        assert await llm.list_loras() == set()
        llm.shutdown(timeout=5)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_the_tokenizer_of_an_engine_that_has_not_started_says_so(folder: Path) -> None:
    llm = AsyncLLM(str(folder), dtype="float32", num_gpu_blocks_override=16, max_model_len=64)
    try:
        with pytest.raises(HeadraceError, match="has not started: await"):
            llm.get_tokenizer().encode("hello")
    finally:
        llm.shutdown()


def test_conversations_are_enqueued_like_prompts(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hello there"}]
    greedy = SamplingParams(temperature=0, max_tokens=4)
    ids = llm.enqueue_chat([messages, messages], greedy, use_tqdm=False, priority=[0, 1])
    more = llm.enqueue(["one"], greedy, None, None, False)
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == ids + more
    (answer,) = llm.chat(messages, greedy, use_tqdm=False)
    assert [output.outputs[0].text for output in outputs[:2]] == [answer.outputs[0].text] * 2
    assert llm.wait_for_completion() == []


def test_a_profile_of_so_many_steps_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="delay_iterations and max_iterations are refused"):
        llm.start_profile(max_iterations=2)


def test_an_engine_by_hand_has_what_vllms_has(llm: LLM) -> None:
    engine = llm.llm_engine
    assert engine.get_supported_tasks() == llm.supported_tasks == ("generate",)
    assert engine.tokenizer is llm.get_tokenizer()
    engine.add_request("a", "hi", SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
    engine.abort_request(request_ids=["a"], internal=True)
    assert not engine.has_unfinished_requests()
