"""Parameters, tokens and engines step by step: what vLLM's tests of samplers, engine and tokenising demand."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from http_server import ask

from headrace import LLM, AsyncLLM, InvalidRequestError, LLMEngine, RequestOutputKind, SamplingParams
from headrace.exceptions import VLLMClientError, VLLMError, VLLMValidationError
from headrace.frontend.http.apis.openai.prompts import template_variables
from headrace.ipc.failure import OptionError

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


# tests/samplers/test_non_finite_params.py
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["temperature", "repetition_penalty", "top_p", "min_p", "presence_penalty"])
def test_parameters_are_finite(name: str, value: float) -> None:
    with pytest.raises(VLLMValidationError, match=name):
        SamplingParams(**{name: value})
    assert issubclass(VLLMValidationError, VLLMClientError)
    assert issubclass(VLLMClientError, VLLMError)


# tests/test_request_input_bounds.py, tests/test_sampling_params.py
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"n": 0}, "n"),
        ({"n": 1 << 20}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop": "x", "detokenize": False}, "detokenize=True"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["w"] * 2000}, "at most 1024 words"),
        ({"n": 2, "temperature": 0}, "greedy"),
    ],
)
def test_parameters_are_bounded(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        SamplingParams(**fields)


# the same over HTTP
def test_bodies_are_bounded(client: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    messages = [{"role": "user", "content": "a"}]
    for body, said in (
        ({"prompt": ["a"] * 3000}, "2048"),
        ({"prompt": "a", "n": 1000}, "128"),
        ({"prompt": "a", "stop": ["x"] * 100}, "64"),
        ({"prompt": "a", "logprobs": -2}, "logprobs"),
        ({"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(5000)), 1.0)}, "4096"),
        ({"prompt": "a", "stop_token_ids": list(range(2000))}, "1024"),
        ({"prompt": [[5], [-3]]}, "out of vocabulary"),
        ({"messages": [{"role": "user", "content": ["a"] * 17_000}]}, "16384"),
        ({"messages": messages, "tools": [tool] * 1100}, "1024"),
    ):
        refused = client.post(COMPLETIONS if "prompt" in body else CHAT, json=body)
        assert refused.status_code == 400, refused.text
        assert said in refused.json()["error"]["message"]
    parts = [{"type": "text", "text": "a"}] * 17_000  # five texts and objects each
    refused = client.post(CHAT, json={"messages": [{"role": "user", "content": parts}]})
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "body_too_large")
    assert "65536 texts, lists and objects" in refused.json()["error"]["message"]


# tests/test_request_input_bounds.py: duplicate stop_token_ids and bad_words are deduplicated in order
def test_lists_hold_each_value_once_and_may_be_extended() -> None:
    params = SamplingParams(stop_token_ids=[42, 7, 42, 9], bad_words=["b", "a", "b"], stop="end")
    assert (params.stop_token_ids, params.bad_words, params.stop) == ([42, 7, 9], ["b", "a"], ["end"])
    assert params.all_stop_token_ids == {7, 9, 42}
    assert SamplingParams(stop=["b", "a", "b"]).stop == ["b", "a"]
    plain = SamplingParams()
    plain.stop += ["now"]  # type: ignore[operator]
    plain.stop_token_ids.append(3)  # type: ignore[union-attr]
    plain.verify()
    assert (SamplingParams().stop, SamplingParams().stop_token_ids) == ([], [])


# tests/v1/sample/test_trace_replay_params.py: fields that are not there, which ask for nothing by default
def test_fields_that_are_not_there_are_named() -> None:
    nothing = {
        "trace_decode_token_ids": None,
        "routed_experts_prompt_start": 0,
        "skip_clone": True,
        "watermarking": None,
    }
    assert SamplingParams(**nothing).to_wire(9) == SamplingParams().to_wire(9)
    for name, value in (("trace_decode_token_ids", [5]), ("prompt_logprob_token_ids", [[5]]), ("watermarking", True)):
        with pytest.raises(InvalidRequestError, match=f"SamplingParams.{name} is not supported by this version"):
            SamplingParams(**{name: value})


# tests/v1/sample/test_logprobs.py::test_logprob_token_ids_validate_vocab_bounds, test_max_logprobs
def test_verify_takes_a_models_configuration(llm: LLM) -> None:
    small: Any = SimpleNamespace(get_vocab_size=lambda: 10, max_logprobs=2)
    SamplingParams(logprob_token_ids=[0, 9]).verify(small, None, None, None)
    for fields in ({"logprob_token_ids": [10]}, {"allowed_token_ids": [3, 11]}, {"stop_token_ids": [10]}):
        with pytest.raises(VLLMValidationError, match=next(iter(fields))):
            SamplingParams(**fields).verify(small, speculative_config=None, structured_outputs_config=None)  # type: ignore
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(VLLMValidationError, match=f"{name} = 3: the engine gives at most 2"):
            SamplingParams(**{name: 3}).verify(small)  # type: ignore[arg-type]
    SamplingParams(logprobs=3).verify(llm.model_config)


# tests/test_request_input_bounds.py: update_from_tokenizer
def test_bad_words_become_tokens_by_any_tokenizer() -> None:
    class Letters:
        def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
            assert add_special_tokens is False
            return [ord(letter) for letter in text if letter != "\x16"]

    params = SamplingParams(bad_words=["no"])
    assert params.bad_words_token_ids is None
    params.update_from_tokenizer(Letters())
    assert params.bad_words_token_ids == [[110, 111]]
    params.bad_words = ["other"]
    assert params.bad_words_token_ids is None
    with pytest.raises(VLLMValidationError, match="must tokenize to at least one token"):
        SamplingParams(bad_words=["\x16"]).update_from_tokenizer(Letters())


# tests/entrypoints/openai/completion/test_completion.py::test_completion_truncation_side..., renderers' parameters
def test_tokenization_kwargs_cut_and_change_how_a_prompt_is_read(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=1)

    def prompt(**kwargs: Any) -> list[int]:
        return llm.generate("One Two Three", greedy, use_tqdm=False, tokenization_kwargs=kwargs)[0].prompt_token_ids

    whole = prompt()
    assert prompt(truncate_prompt_tokens=3) == prompt(truncation=True, max_length=3) == whole[-3:]
    assert prompt(truncate_prompt_tokens=3, truncation_side="right") == whole[:3]
    assert prompt(truncate_prompt_tokens=-1, padding=False) == prompt(add_special_tokens=None) == whole
    assert prompt(do_lower_case=True) == llm.get_tokenizer().encode("one two three")
    messages = [{"role": "user", "content": "One Two Three"}]
    (cut,) = llm.chat(messages, greedy, use_tqdm=False, tokenization_kwargs={"truncate_prompt_tokens": 2})
    assert len(cut.prompt_token_ids) == 2
    for wrong, said in (({"paddin": True}, "paddin"), ({"padding": True}, "padding"), ({"max_length": 0}, ">= 1")):
        with pytest.raises(InvalidRequestError, match=f"tokenization_kwargs: .*{said}"):
            llm.generate("x", greedy, tokenization_kwargs=wrong)


# tests/entrypoints/serve/tokenize/test_tokenization.py: completions, chat, chat with tools, strings, detokenize
def test_tokenise_and_detokenise_with_tools(client: httpx.Client, llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    template = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{{ messages[0].content }}"
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    for special in (True, False):
        told = ask(client, "/tokenize", prompt="the mill", add_special_tokens=special, return_token_strs=True)
        assert told["tokens"] == tokenizer.encode("the mill", special)
        assert told["token_strs"] == tokenizer.convert_ids_to_tokens(told["tokens"])
        assert (told["count"], told["max_model_len"]) == (len(told["tokens"]), 256)
        assert ask(client, "/detokenize", tokens=told["tokens"])["prompt"] == "the mill"
    assert ask(client, "/tokenize", prompt="a")["token_strs"] is None
    for tools, text in (([tool], "[weather]hello"), (None, "hello")):
        body = {"messages": [{"role": "user", "content": "hello"}], "tools": tools, "chat_template": template}
        told = ask(client, "/tokenize", **body)
        assert tokenizer.decode(told["tokens"]) == text


# tests/entrypoints/openai/chat_completion/test_serving_chat.py: default_chat_template_kwargs, which requests override
def test_the_servers_template_variables_count_where_a_request_sets_none(client: httpx.Client, llm: LLM) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ mark }}{{ other }}"}
    for given, text in ((None, "!?"), ({"mark": "one"}, "one?")):
        told = ask(client, "/tokenize", chat_template_kwargs=given, **body)
        assert llm.get_tokenizer().decode(told["tokens"]) == text
    with pytest.raises(OptionError, match="default_chat_template_kwargs sets tools"):
        template_variables({"tools": []})


# tests/v1/core/test_reset_prefix_cache_e2e.py, /reset_prefix_cache
def test_a_reset_forgets_cached_prefixes(llm: LLM) -> None:
    prompt, one = {"prompt_token_ids": list(range(5, 69))}, SamplingParams(temperature=0, max_tokens=1)

    def cached() -> int:
        return llm.generate(prompt, one, use_tqdm=False)[0].num_cached_tokens or 0

    llm.reset_prefix_cache()
    assert (cached(), cached() > 0) == (0, True)
    llm.reset_prefix_cache()
    assert cached() == 0


# test_reset_prefix_cache_e2e.py: reset_running_requests; examples/features/reset_kv
def test_a_reset_of_running_requests_computes_them_again_to_the_same_answer(llm: LLM) -> None:
    long = SamplingParams(temperature=0, max_tokens=240, ignore_eos=True)
    (expected,) = llm.generate("the water", long, use_tqdm=False)
    before = llm.get_stats().num_preemptions
    for _ in range(30):  # a request may have ended before the reset comes to the engine
        stream = llm.stream("the water", long)
        pieces = [next(stream)]
        assert llm.reset_prefix_cache(reset_running_requests=True) is True
        pieces += list(stream)
        assert [token for piece in pieces for token in piece.outputs[0].token_ids] == expected.outputs[0].token_ids
        if llm.get_stats().num_preemptions > before:
            break
    else:
        raise AssertionError("no reset met a running request")
    assert not llm.is_paused()
    llm.pause_generation("keep")
    llm.reset_prefix_cache(reset_running_requests=True)
    assert llm.is_paused(), "a pause that somebody asked for stays"
    llm.resume_generation()


# tests/v1/engine/test_parallel_sampling.py, test_async_llm.py::test_finished_flag
@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_parallel_sampling_ends_every_output_and_the_request_once(address: str, kind: RequestOutputKind) -> None:
    params = SamplingParams(n=3, seed=1, max_tokens=5, ignore_eos=True, output_kind=kind)

    async def run() -> None:
        llm = await AsyncLLM.connect(address)
        told: dict[int, list[int]] = {index: [] for index in range(3)}
        finished = []
        async for output in llm.generate("the water", params):
            finished.append(output.finished)
            for each in output.outputs:
                told[each.index] = [*told[each.index], *each.token_ids] if kind.name == "DELTA" else each.token_ids
        await llm.close()
        assert finished == [False] * (len(finished) - 1) + [True]
        assert {len(token_ids) for token_ids in told.values()} == {5}
        assert kind is not RequestOutputKind.FINAL_ONLY or len(finished) == 1

    asyncio.run(asyncio.wait_for(run(), 60))


# tests/v1/engine/test_llm_engine.py: parallel sampling and steps
def test_an_engine_is_driven_by_steps_and_knows_what_is_left(address: str) -> None:
    engine = LLMEngine(LLM.connect(address))
    params = SamplingParams(n=2, seed=3, max_tokens=4, ignore_eos=True)
    for name in ("one", "two", "gone"):
        engine.add_request(name, "hello", params, tokenization_kwargs={"truncate_prompt_tokens": 2})
    engine.abort_request(["gone", "never was"])
    assert engine.get_num_unfinished_requests() == 2
    finished: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        finished |= {output.request_id: output for output in engine.step() if output.finished}
    assert sorted(finished) == ["one", "two"]
    for output in finished.values():
        assert len(output.prompt_token_ids) == 2
        assert [len(each.token_ids) for each in output.outputs] == [4, 4]
    assert engine.step() == []
    engine.close()


@pytest.fixture(scope="module")
def bare(folder: Path) -> Iterator[LLM]:
    """Without a tokenizer, and with logits in the place of log-probabilities."""
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "num_gpu_blocks_override": 32}
    with LLM(str(folder), in_process=True, skip_tokenizer_init=True, logprobs_mode="raw_logits", **options) as llm:
        yield llm


# tests/v1/engine/test_llm_engine.py::test_skip_tokenizer_initialization, test_sampling_params_e2e.py
def test_without_a_tokenizer_tokens_come_and_texts_are_refused(bare: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    (output,) = bare.generate({"prompt_token_ids": [5, 6]}, greedy, use_tqdm=False)
    assert (len(output.outputs[0].token_ids), output.outputs[0].text, output.prompt) == (4, "", None)
    with pytest.raises(InvalidRequestError, match=r"\(`skip_tokenizer_init=True`\): give prompt_token_ids"):
        bare.generate("text", greedy, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="call update_from_tokenizer"):
        bare.generate([5], SamplingParams(bad_words=["x"]), use_tqdm=False)

    class Fixed:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [output.outputs[0].token_ids[0]]

    forbids = SamplingParams(temperature=0, max_tokens=1, bad_words=["x"], detokenize=False)
    forbids.update_from_tokenizer(Fixed())
    (other,) = bare.generate({"prompt_token_ids": [5, 6]}, forbids, use_tqdm=False)
    assert other.outputs[0].token_ids != output.outputs[0].token_ids[:1]


# tests/v1/sample/test_logprobs.py::test_logprobs_mode
def test_log_probabilities_may_be_logits(bare: LLM, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=5, detokenize=False)

    def values(engine: LLM) -> list[float]:
        (output,) = engine.generate({"prompt_token_ids": [5, 6]}, params, use_tqdm=False)
        positions = output.outputs[0].logprobs
        assert positions is not None
        return [each.logprob for position in positions for each in position.values()]

    assert all(value <= 0 for value in values(llm))
    assert any(value > 0 for value in values(bare))
