"""What clients of vLLM's server rely on, asked of ours: answers, errors, headers, streams and limits."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import openai
import pytest
from http_server import Server, ask, joined, metric, stream

from headrace import LLM

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
GREEDY = {"temperature": 0, "max_tokens": 5}


def refused(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


# tests/entrypoints/openai/test_completion_with_prompt_validation: empty, too long, ids that are none, mixed
def test_prompts_are_checked_in_the_words_that_clients_look_for(client: httpx.Client) -> None:
    assert "cannot be empty" in refused(client, COMPLETIONS, prompt=[[]], **GREEDY)["message"]
    assert "cannot be empty" in refused(client, COMPLETIONS, prompt="", **GREEDY)["message"]
    assert "out of vocabulary" in refused(client, COMPLETIONS, prompt=[10**6], **GREEDY)["message"]
    assert "out of vocabulary" in refused(client, COMPLETIONS, prompt=[-1], **GREEDY)["message"]
    assert "maximum context length is 256" in refused(client, COMPLETIONS, prompt=[5] * 300, **GREEDY)["message"]
    assert "maximum context length is 256" in refused(client, COMPLETIONS, prompt="a", max_tokens=999)["message"]
    assert "texts or lists of token ids" in refused(client, COMPLETIONS, prompt=["a", [5]], **GREEDY)["message"]
    assert "at least 1" in refused(client, COMPLETIONS, prompt="a", max_tokens=0)["message"]


# tests/entrypoints/openai/test_completion.py: tokens in and out, with text that needs several tokens a character
@pytest.mark.parametrize("text", ["hello", "héllo 😀", "a\nb"])
def test_token_ids_in_and_out_are_those_of_the_text(client: httpx.Client, text: str) -> None:
    ids = ask(client, "/tokenize", prompt=text)["tokens"]
    by_text = ask(client, COMPLETIONS, prompt=text, return_token_ids=True, **GREEDY)["choices"][0]
    by_ids = ask(client, COMPLETIONS, prompt=ids, return_token_ids=True, **GREEDY)["choices"][0]
    assert by_text == by_ids
    assert by_text["prompt_token_ids"] == ids
    assert ask(client, "/detokenize", tokens=by_text["token_ids"])["prompt"] == by_text["text"]
    events = stream(client, COMPLETIONS, {"prompt": text, "return_token_ids": True, **GREEDY})
    assert events[0]["choices"][0]["prompt_token_ids"] == ids
    assert joined(event["choices"][0]["token_ids"] for event in events) == by_text["token_ids"]


# OpenAI's `bytes`: of a token that is part of a character, that part
def test_bytes_of_log_probabilities_are_the_text_also_inside_a_character(client: httpx.Client) -> None:
    form = {"choice": ["naïve 😀!"]}
    body = {"messages": USER, "temperature": 0, "max_tokens": 30, "logprobs": True, "top_logprobs": 2}
    choice = ask(client, CHAT, structured_outputs=form, **body)["choices"][0]
    told = choice["logprobs"]["content"]
    assert choice["message"]["content"] == form["choice"][0]
    assert bytes(joined(each["bytes"] for each in told)).decode() == form["choice"][0]
    parts = [each for each in told if each["token"] == "\ufffd"]
    assert len(parts) >= 4, "the test's text has a character of several tokens"
    assert all(len(each["bytes"]) == 1 for each in parts)
    tops = [top for each in told for top in each["top_logprobs"]]
    assert all(bytes(top["bytes"]).decode(errors="replace") == top["token"] for top in tops)


# tests/entrypoints/openai/test_return_token_ids.py: whole answers name the fields that were not asked for
def test_whole_answers_have_a_null_for_what_was_not_asked_for(client: httpx.Client) -> None:
    choice = ask(client, COMPLETIONS, prompt="a", **GREEDY)["choices"][0]
    assert [choice[name] for name in ("prompt_token_ids", "token_ids", "prompt_logprobs")] == [None] * 3
    chat = ask(client, CHAT, messages=USER, **GREEDY)
    assert (chat["prompt_token_ids"], chat["prompt_logprobs"], chat["choices"][0]["token_ids"]) == (None, None, None)
    # chat_completion/test_completion_with_function_calling.py: a client's message.reasoning is there, tool_calls None
    message = chat["choices"][0]["message"]
    assert (message["reasoning"], message.get("tool_calls")) == (None, None)
    for event in stream(client, COMPLETIONS, {"prompt": "a", **GREEDY}):
        assert "token_ids" not in event["choices"][0]


# tests/entrypoints/openai/test_completion.py::test_echo_logprob_completion, test_prompt_logprobs_completion
def test_log_probabilities_of_prompt_and_answer_have_as_many_entries_as_vllms(client: httpx.Client) -> None:
    ids = ask(client, "/tokenize", prompt="hello there")["tokens"]
    echoed = ask(client, COMPLETIONS, prompt=ids, echo=True, logprobs=2, **GREEDY)["choices"][0]["logprobs"]
    assert len(echoed["tokens"]) == len(echoed["token_logprobs"]) == len(ids) + 5
    assert echoed["token_logprobs"][0] is None
    assert all(2 <= len(top) <= 3 for top in echoed["top_logprobs"][1:])
    for asked, most in ((0, 1), (1, 2), (3, 4)):
        body = {"messages": USER, "prompt_logprobs": asked, **GREEDY}
        told = ask(client, CHAT, **body)["prompt_logprobs"]
        assert told[0] is None
        assert all(max(asked, 1) <= len(each) <= most for each in told[1:])


# tests/entrypoints/openai/test_chat.py::test_zero_logprobs_chat ... test_choice_logprobs
def test_top_log_probabilities_of_chat_are_as_many_as_asked_for(client: httpx.Client) -> None:
    for asked in (0, 1, 5, 320):
        given = -1 if asked == 320 else asked  # tests/entrypoints/openai/chat_completion/test_chat_echo.py
        body = {"messages": USER, "logprobs": True, "top_logprobs": given, **GREEDY}
        content = ask(client, CHAT, **body)["choices"][0]["logprobs"]["content"]
        assert len(content) == 5
        assert {len(each["top_logprobs"]) for each in content} == {asked}


# tests/entrypoints/openai/test_chat_echo.py
def test_chat_echo_begins_with_the_message_that_is_continued(client: httpx.Client) -> None:
    messages = [*USER, {"role": "assistant", "content": "well, "}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False, **GREEDY}
    plain = ask(client, CHAT, **body)["choices"][0]["message"]["content"]
    assert ask(client, CHAT, echo=True, **body)["choices"][0]["message"]["content"] == "well, " + plain
    events = stream(client, CHAT, {"echo": True, **body})
    said = "".join(each["choices"][0]["delta"].get("content") or "" for each in events)
    assert said == "well, " + plain
    assert ask(client, CHAT, messages=USER, echo=True, **GREEDY)["choices"][0]["message"]["content"] != "hi"


# tests/entrypoints/openai/test_chat.py: custom roles, complex content, extra fields, long seeds
def test_messages_of_every_shape_are_taken(client: httpx.Client) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for message in ({"role": "critic", "content": "x"}, {"role": "user", "content": parts}, {**USER[0], "name": "Ann"}):
        assert ask(client, CHAT, messages=[message], **GREEDY)["usage"]["completion_tokens"] <= 5
    assert ask(client, CHAT, messages=USER, extra_field="0", seed=2**63 - 1, **GREEDY)["choices"]
    assert "seed" in refused(client, CHAT, messages=USER, seed=2**63, **GREEDY)["message"]


# clients that send forms: numbers and truth values as text
def test_numbers_may_be_text_and_other_text_is_refused_by_field(client: httpx.Client) -> None:
    body = {"prompt": "a", "logprobs": "2", "max_tokens": "3", "temperature": "0"}
    told = ask(client, COMPLETIONS, **body)
    assert told["usage"]["completion_tokens"] <= 3
    assert len(told["choices"][0]["logprobs"]["top_logprobs"][0]) >= 2
    assert refused(client, COMPLETIONS, prompt="a", logprobs="many")["param"] == "logprobs"


# tests/entrypoints/openai/completion/test_completion.py::test_completion_truncation_side_controls_prompt_truncation
def test_a_prompt_is_truncated_on_the_side_that_is_named(client: httpx.Client) -> None:
    body: dict[str, Any] = {
        "prompt": list(range(5, 13)),
        "truncate_prompt_tokens": 4,
        "return_token_ids": True,
        **GREEDY,
    }
    for side, kept in (("right", [5, 6, 7, 8]), ("left", [9, 10, 11, 12]), (None, [9, 10, 11, 12])):
        assert ask(client, COMPLETIONS, truncation_side=side, **body)["choices"][0]["prompt_token_ids"] == kept
    assert "must be left or right" in refused(client, COMPLETIONS, truncation_side="top", **body)["message"]


# tests/entrypoints/openai/completion/test_completion.py::test_logprob_token_ids, chat_completion/test_logprob_token_ids
def test_named_tokens_take_the_place_of_the_likeliest(client: httpx.Client) -> None:
    more: dict[str, Any] = {"logprob_token_ids": [50], "allowed_token_ids": [42], "return_tokens_as_token_ids": True}
    body = {"prompt": "a", "logprobs": 5, "max_tokens": 1, **more}
    told = ask(client, COMPLETIONS, **body)["choices"][0]["logprobs"]
    assert told["tokens"] == ["token_id:42"]
    assert set(told["top_logprobs"][0]) == {"token_id:42", "token_id:50"}
    (event,) = [each for each in stream(client, COMPLETIONS, body) if each["choices"][0]["logprobs"]]
    assert event["choices"][0]["logprobs"]["top_logprobs"] == told["top_logprobs"]
    chat = {"messages": USER, "logprobs": True, "top_logprobs": 5, "max_tokens": 1, **more}
    (content,) = ask(client, CHAT, **chat)["choices"][0]["logprobs"]["content"]
    assert {each["token"] for each in content["top_logprobs"]} == {"token_id:42", "token_id:50"}


# tests/entrypoints/openai/test_orca_metrics.py
@pytest.mark.parametrize("form", ["JSON", "TEXT", "json"])
def test_an_answer_tells_the_engines_load_in_the_format_that_was_asked_for(client: httpx.Client, form: str) -> None:
    headers = {"endpoint-load-metrics-format": form}
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": USER})):
        told = client.post(path, json={**body, **GREEDY}, headers=headers).headers["endpoint-load-metrics"]
        if form == "TEXT":
            assert told.startswith("TEXT named_metrics.kv_cache_usage_perc=")
            assert told.endswith("named_metrics.num_requests_waiting=0")
        else:
            metrics = json.loads(told.removeprefix("JSON "))["named_metrics"]
            assert metrics["num_requests_waiting"] == 0
            assert 0 <= metrics["kv_cache_usage_perc"] <= 1
    other = client.post(COMPLETIONS, json={"prompt": "a", **GREEDY}, headers={"endpoint-load-metrics-format": "YAML"})
    assert "endpoint-load-metrics" not in other.headers


# tests/entrypoints/openai/test_optional_middleware.py::test_passed_request_id
def test_answers_carry_the_requests_id(client: httpx.Client) -> None:
    named = client.post(COMPLETIONS, json={"prompt": "a", **GREEDY}, headers={"X-Request-Id": "mine-1"})
    assert (named.headers["x-request-id"], named.json()["id"]) == ("mine-1", "cmpl-mine-1")
    unnamed = client.post(COMPLETIONS, json={"prompt": "a", **GREEDY})
    assert unnamed.json()["id"] == f"cmpl-{unnamed.headers['x-request-id']}"
    assert client.get("/health").headers["x-request-id"]


# tests/entrypoints/openai/test_chat.py::test_response_format..., usage of streams
def test_usage_counts_alike_whole_streamed_and_continuously(client: httpx.Client) -> None:
    body = {"messages": USER, **GREEDY, "ignore_eos": True, "return_token_ids": True}
    whole = ask(client, CHAT, **body)["usage"]
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = stream(client, CHAT, {**body, "stream_options": options})
    last = events[-1]["usage"]
    assert (last["prompt_tokens"], last["completion_tokens"]) == (whole["prompt_tokens"], whole["completion_tokens"])
    counted = [event["usage"]["completion_tokens"] for event in events]
    assert counted == sorted(counted)
    assert "cached_tokens" in whole["prompt_tokens_details"]
    # what an event does not know is left out, as vLLM has it
    assert "prompt_tokens_details" in last
    assert not any("prompt_tokens_details" in event["usage"] for event in events[:-1])
    choices = [event["choices"][0] for event in events[:-1]]
    assert [choice["stop_reason"] for choice in choices if "stop_reason" in choice] == [None]
    assert "stop_reason" in choices[-1]


# tests/entrypoints/serve/instrumentator: models, version, health, ping, load, metrics
def test_the_routes_that_operators_ask_answer(client: httpx.Client) -> None:
    (card,) = ask_get(client, "/v1/models")["data"]
    assert (card["id"], card["max_model_len"]) == ("tiny", 256)
    for path in ("/health", "/ping", "/health/ready", "/version", "/load", "/metrics", "/is_paused"):
        assert client.get(path).status_code == 200, path
    assert ask_get(client, "/load") == {"server_load": 0}
    before = metric(client, "headrace:generation_tokens_total")
    ask(client, COMPLETIONS, prompt="a", ignore_eos=True, **GREEDY)
    assert metric(client, "headrace:generation_tokens_total") == before + 5
    assert metric(client, "headrace:num_requests_waiting_by_reason", reason="capacity") == 0
    sources = [
        metric(client, "headrace:prompt_tokens_by_source_total", source=f"local_{s}") for s in ("compute", "cache_hit")
    ]
    assert sum(sources) == metric(client, "headrace:prompt_tokens_total") > 0
    assert metric(client, "headrace:engine_sleep_state", sleep_state="awake") == 1
    never = metric(client, "headrace:request_num_preemptions_bucket", le="0.0")
    assert never == metric(client, "headrace:request_num_preemptions_count") > 0


def ask_get(client: httpx.Client, path: str) -> Any:
    answer = client.get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()


# tests/entrypoints/openai/test_dev_mode: pause with a mode in the query, reset of the prefix cache, profiling
def test_pause_takes_its_mode_in_the_query_and_resume_ends_it(client: httpx.Client) -> None:
    for mode in ("abort", "wait", "keep"):
        assert client.post("/pause", params={"mode": mode, "clear_cache": "false"}).status_code == 200
        assert ask_get(client, "/is_paused") == {"is_paused": True}
        assert client.post("/resume").status_code == 200
    assert client.post("/reset_prefix_cache").status_code == 200
    assert client.post("/start_profile").status_code == 200
    assert client.post("/stop_profile").json()["files"]


# tests/entrypoints/serve/dev/rpc/test_collective_rpc.py
def test_methods_of_the_worker_extension_are_called_over_http(client: httpx.Client) -> None:
    assert ask(client, "/collective_rpc", method="add", args=[2], kwargs={"right": 3}) == {"results": [5]}
    assert (
        "has no method missing; it has handle, add" in refused(client, "/collective_rpc", method="missing")["message"]
    )
    assert refused(client, "/collective_rpc", args=[2])["param"] == "method"
    late = client.post("/collective_rpc", json={"method": "add", "args": [2], "timeout": 1e-300})
    assert late.status_code == 408, "the caller's own deadline, of an engine that lives"
    assert "the request's timeout of 1e-300 s" in late.json()["error"]["message"]
    assert ask(client, "/collective_rpc", method="add", args=[2]) == {"results": [3]}


# tests/v1/sample/test_sampling_params_e2e.py
def test_sampling_parameters_do_what_they_say(llm: LLM) -> None:
    from headrace import SamplingParams

    def tokens(**params: Any) -> list[int]:
        given = SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **params})
        return llm.generate("hello", given, use_tqdm=False)[0].outputs[0].token_ids

    greedy = tokens(temperature=0)
    assert tokens(top_k=1) == tokens(top_p=1e-9) == tokens(min_p=1.0) == greedy
    assert tokens(seed=3) == tokens(seed=3)
    assert set(tokens(allowed_token_ids=[5, 5, 6])) <= {5, 6}
    assert tokens(temperature=0, logit_bias={7: 100.0}) == [7] * 8
    assert greedy[0] not in tokens(temperature=0, logit_bias={greedy[0]: -math.inf})
    eos = llm.get_tokenizer().eos_token_id
    ends = {"temperature": 0, "ignore_eos": False, "logit_bias": {eos: 100.0}}
    assert (len(tokens(**ends)), len(tokens(**ends, min_tokens=3))) == (1, 4)
    stopped = llm.generate("hello", SamplingParams(temperature=0, stop_token_ids=[greedy[1]]), use_tqdm=False)[0]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", greedy[1])
    silent = llm.generate("hello", SamplingParams(detokenize=False, max_tokens=2, ignore_eos=True), use_tqdm=False)[0]
    assert (silent.outputs[0].text, len(silent.outputs[0].token_ids)) == ("", 2)


# tests/v1/engine/test_async_llm.py, tests/detokenizer/test_stop_strings.py, test_stop_reason.py
def test_what_ended_an_answer_is_told_and_not_in_its_text(client: httpx.Client) -> None:
    body: dict[str, Any] = {"prompt": "hello", "temperature": 0, "max_tokens": 12, "ignore_eos": True}

    def answer(**more: Any) -> dict[str, Any]:
        choice: dict[str, Any] = ask(client, COMPLETIONS, **body, **more)["choices"][0]
        return choice

    whole = answer()
    assert (whole["finish_reason"], whole["stop_reason"]) == ("length", None)
    text: str = whole["text"]
    stop = next(text[at : at + 2] for at in range(2, len(text) - 2) if text.find(text[at : at + 2]) == at)
    stops = ["never said", stop]
    told = answer(stop=stops)
    assert (told["finish_reason"], told["stop_reason"], told["text"]) == ("stop", stop, text.partition(stop)[0])
    assert answer(stop=stops, include_stop_str_in_output=True)["text"] == told["text"] + stop
    events = stream(client, COMPLETIONS, {**body, "stop": stops})
    assert "".join(each["choices"][0]["text"] for each in events) == told["text"]
    assert events[-1]["choices"][0]["stop_reason"] == stop


# tests/samplers/test_seeded_generate.py, parallel sampling
def test_outputs_of_one_prompt_are_n_and_reproducible(client: httpx.Client) -> None:
    body = {"prompt": "a", "n": 3, "seed": 5, "temperature": 1.5, "max_tokens": 6, "ignore_eos": True}
    first, second = (ask(client, COMPLETIONS, **body)["choices"] for _ in range(2))
    assert [each["text"] for each in first] == [each["text"] for each in second]
    assert len({each["text"] for each in first}) > 1
    assert [each["index"] for each in first] == [0, 1, 2]


# non-finite parameters, tests/entrypoints/openai/test_sampling_nan
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_are_none_are_refused(client: httpx.Client, value: str) -> None:
    body = f'{{"prompt": "a", "max_tokens": 1, "temperature": {value}}}'
    answer = client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400


def test_openais_client_reads_errors_and_answers(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            sdk.completions.create(model="other", prompt="a")
        with pytest.raises(openai.BadRequestError, match="maximum context length is"):
            sdk.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x " * 600}])
        answer = sdk.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], max_completion_tokens=4, temperature=0
        )
        assert answer.choices[0].message.role == "assistant"


# OpenAI's and vLLM's servers answer such bodies: what clients send that say nothing, or say it in another way
def test_completions_take_a_flag_for_logprobs_and_the_best_of_greedy_outputs(client: httpx.Client) -> None:
    flagged = ask(client, COMPLETIONS, prompt="a", logprobs=True, **GREEDY)["choices"][0]
    assert flagged["logprobs"] == ask(client, COMPLETIONS, prompt="a", logprobs=1, **GREEDY)["choices"][0]["logprobs"]
    assert ask(client, COMPLETIONS, prompt="a", logprobs=False, **GREEDY)["choices"][0]["logprobs"] is None
    one = ask(client, COMPLETIONS, prompt="a", **GREEDY)
    best = ask(client, COMPLETIONS, prompt="a", best_of=2, **GREEDY)
    assert (best["choices"], best["usage"]["completion_tokens"]) == (one["choices"], one["usage"]["completion_tokens"])
    assert refused(client, COMPLETIONS, prompt="a", best_of=1, n=2, temperature=0)["param"] == "best_of"


def test_messages_may_lack_content_and_have_fields_that_nobody_knows(client: httpx.Client) -> None:
    def prompt_of(*messages: dict[str, Any]) -> list[int]:
        asked = {"messages": [*messages, *USER], "return_token_ids": True, **GREEDY}
        told: list[int] = ask(client, CHAT, **asked)["prompt_token_ids"]
        assert ask(client, "/tokenize", messages=[*messages, *USER])["tokens"] == told
        return told

    for role in ("user", "assistant"):
        empty = prompt_of({"role": role, "content": ""})
        assert prompt_of({"role": role}) == prompt_of({"role": role, "content": None}) == empty
    assert prompt_of({"role": "assistant", "tool_calls": []}) == prompt_of({"role": "assistant", "content": ""})
    said_no = prompt_of({"role": "assistant", "content": None, "refusal": "no"})
    assert said_no == prompt_of({"role": "assistant", "content": "no", "refusal": None})
    assert prompt_of({**USER[0], "timestamp": 5}) == prompt_of(USER[0])
    misspelt = refused(client, CHAT, messages=[*USER, {"role": "user", "contents": "hi"}], **GREEDY)
    assert misspelt["param"] == "messages[1].contents"
    assert "did you mean content?" in misspelt["message"]
    batch = refused(client, f"{CHAT}/batch", messages=[USER, [{"role": "user", "contents": "hi"}]], **GREEDY)
    assert batch["param"] == "messages[1][0].contents"


# tests/entrypoints/openai/test_tool_calls_serialization.py; renderers/chat_utils.py: past calls with broken arguments
@pytest.mark.parametrize("arguments", ["{", "[1]", "", None, '"text"'])
def test_a_conversation_goes_on_after_a_call_whose_arguments_are_no_object(
    client: httpx.Client, llm: LLM, arguments: str | None
) -> None:
    def messages(arguments: object) -> list[dict[str, Any]]:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}]

    calls = "{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}"
    shows = "{% for m in messages %}{{ m.role }}" + calls + "{% endfor %}"
    asked = {"chat_template": shows, "return_token_ids": True, **GREEDY}
    told = ask(client, CHAT, messages=messages(arguments), **asked)["prompt_token_ids"]
    assert told == ask(client, CHAT, messages=messages("{}"), **asked)["prompt_token_ids"]
    assert told != ask(client, CHAT, messages=messages('{"a": 1}'), **asked)["prompt_token_ids"]
    with_calls = llm.chat(messages(arguments), llm.get_default_sampling_params(), chat_template=shows)
    assert list(with_calls[0].prompt_token_ids or []) == told
    bad = [*USER, {"role": "assistant", "tool_calls": [{"id": "1", "type": "custom"}]}]
    assert refused(client, CHAT, messages=bad, **GREEDY)["param"] == "messages[1].tool_calls[0]"


# tests/entrypoints/openai/chat_completion/test_extra_content_fields.py
def test_further_fields_of_a_part_reach_a_template_that_takes_parts(client: httpx.Client) -> None:
    shows = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{{ p.language }}{% endfor %}{% endfor %}"
    part = {"type": "text", "text": "a", "language": "xyz", "cache_control": {"type": "ephemeral"}}
    asked = {"messages": [{"role": "user", "content": [part]}], "return_token_ids": True, **GREEDY}
    told = ask(client, CHAT, chat_template=shows, **asked)["prompt_token_ids"]
    assert told == ask(client, "/tokenize", prompt="axyz", add_special_tokens=False)["tokens"]


# tests/entrypoints/openai/chat_completion/test_chat.py: what both servers refuse of tools and efforts
@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"tools": []}, "tools", "must not be an empty array"),
        ({"tool_choice": "auto"}, "tool_choice", "When using `tool_choice`, `tools` must be set"),
        ({"tool_choice": "required"}, "tool_choice", "`tools` must be set"),
        ({"reasoning_effort": "bad"}, "reasoning_effort", "must be one of none, minimal, low, medium, high"),
        ({"verbosity": "bad"}, "verbosity", "must be one of low, medium, high"),
    ],
)
def test_what_vllm_refuses_of_tools_and_efforts_is_refused(
    client: httpx.Client, body: dict[str, Any], param: str, said: str
) -> None:
    told = refused(client, CHAT, messages=USER, **body, **GREEDY)
    assert told["param"] == param
    assert said in told["message"]
    assert ask(client, CHAT, messages=USER, tool_choice="none", **GREEDY)["choices"]


def test_hints_are_taken_and_the_verbosity_reaches_the_template(client: httpx.Client) -> None:
    shows = {"chat_template": "{{ verbosity }}", "return_token_ids": True, **GREEDY}
    told = ask(client, CHAT, messages=USER, verbosity="high", **shows)["prompt_token_ids"]
    assert told == ask(client, "/tokenize", prompt="high", add_special_tokens=False)["tokens"]
    hint = {"type": "content", "content": "a"}
    assert ask(client, CHAT, messages=USER, prediction=hint, **GREEDY)["choices"]


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("top_p", 2, "must be over 0 and at most 1"),
        ("top_p", 0, "must be over 0 and at most 1"),
        ("temperature", -1, "must be at least 0"),
        ("presence_penalty", 3, "must be at least -2 and at most 2"),
        ("presence_penalty", -3, "must be at least -2 and at most 2"),
        ("max_tokens", 0, "must be at least 1 and at most 2147483647"),
        ("seed", 2**63, "must be at least -9223372036854775808 and at most 9223372036854775807"),
        ("truncate_prompt_tokens", 0, "must be at least 1, or -1 for as many as fit"),
    ],
)
def test_a_number_out_of_range_is_told_its_range_and_nothing_else(
    client: httpx.Client, field: str, value: float, allowed: str
) -> None:
    told = refused(client, COMPLETIONS, prompt="a", **{field: value})
    assert told["param"] == field
    assert told["message"].endswith(allowed)


def test_a_body_of_another_type_is_refused_with_vllms_status(client: httpx.Client) -> None:
    answer = client.post(COMPLETIONS, content=b'{"prompt": "a"}', headers={"content-type": "text/plain"})
    assert answer.status_code == 400
    assert "Unsupported Media Type" in answer.json()["error"]["message"]
