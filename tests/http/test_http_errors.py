"""Bad requests: the right status, OpenAI's shape, the field named, and nothing else disturbed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from http_server import Server, serving
from thinned import every

from headrace import SamplingParams
from headrace.frontend.request.parameters.sampling_fields import declared_fields

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]
LIMITS = (
    "--max-prompts",
    "4",
    "--max-n",
    "4",
    "--max-stop-strings",
    "4",
    "--max-model-len",
    "256",
    "--max-num-batched-tokens",
    "32",
)
DEEP = json.loads('{"properties":{"a":' * 200 + "{}" + "}}" * 200)
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    # A token that fails its request, by the null executor's order.
    with serving(*LIMITS, null_model={"fail_token_id": 77}) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def check_error(response: httpx.Response, status: int, param: str | None, said: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    (body,) = response.json().values()
    assert response.json().keys() == {"error"}
    assert body.keys() == {"message", "type", "param", "code"}
    assert body["param"] == param
    assert said in body["message"]
    return dict(body)


@pytest.mark.parametrize(
    ("body", "param", "said"),
    every(
        3,
        [
            ({}, "prompt", "prompt is required"),
            ({"prompt": 5}, "prompt", "expected"),
            ({"prompt": []}, "prompt", "empty list"),
            ({"prompt": [[]]}, "prompt", "empty"),
            ({"prompt": ""}, "prompt", "empty"),
            ({"prompt": ["a", [5]]}, "prompt[1]", "either"),
            ({"prompt": ["a", 5]}, "prompt[1]", "either"),
            ({"prompt": [5, 400]}, "prompt", "400"),
            ({"prompt": [-1]}, "prompt", "-1"),
            ({"prompt": [2**70]}, "prompt", str(2**70)),
            ({"prompt": [[5]] * 5}, "prompt", "at most 4"),
            ({"prompt": [5], "temperature": "hot"}, "temperature", "expected float"),
            ({"prompt": [5], "temperature": -1}, "temperature", "at least 0"),
            ({"prompt": [5], "top_p": 0}, "top_p", "over 0"),
            ({"prompt": [5], "top_k": -2}, "top_k", "at least -1"),
            ({"prompt": [5], "max_tokens": 0}, "max_tokens", "at least 1"),
            ({"prompt": [5], "max_tokens": True}, "max_tokens", "expected int"),
            ({"prompt": [5], "min_tokens": 20, "max_tokens": 10}, "min_tokens", "max_tokens"),
            ({"prompt": [5], "presence_penalty": 3}, "presence_penalty", "at most 2"),
            ({"prompt": [5], "seed": 2**64}, "seed", "at most"),
            ({"prompt": [5], "n": 0}, "n", "at least 1"),
            ({"prompt": [5], "n": 5, "temperature": 1}, "n", "at most 4"),
            ({"prompt": [5], "n": 2, "temperature": 0}, "n", "greedy"),
            ({"prompt": [5], "n": 3, "best_of": 2}, "best_of", "less than n"),
            (
                {"prompt": [5], "thinking_token_budget": 2},
                "thinking_token_budget",
                "needs the model's format of reasoning",
            ),
            ({"prompt": [5], "logprobs": 1000}, "logprobs", "at most 20"),
            ({"prompt": [5], "stop": [""]}, "stop", "not empty"),
            ({"prompt": [5], "stop": ["x"] * 5}, "stop", "at most 4"),
            ({"prompt": [5], "stop": ["x" * 5000]}, "stop", "longer than"),
            ({"prompt": [5], "stop_token_ids": [400]}, "stop_token_ids", "0 to 399"),
            ({"prompt": [5], "suffix": "end"}, "suffix", "not supported"),
            ({"prompt": [5], "logit_bias": {"five": 1, "5": 1, "six": 1}}, "logit_bias", "no token ids: 'five', 'six'"),
            ({"prompt": [5], "logit_bias": {f"x{n}": 1 for n in range(9)}}, "logit_bias", "'x7' and 1 more"),
            ({"prompt": [5], "logit_bias": {str(each): 1 for each in range(4097)}}, "logit_bias", "length <= 4096"),
            ({"prompt": [5], "logit_bias": {"400": 1}}, "logit_bias", "0 to 399"),
            ({"prompt": [5], "logit_bias": {"5": "much"}}, "logit_bias[...]", "expected float"),
            ({"prompt": [5], "allowed_token_ids": []}, "allowed_token_ids", "no token at all"),
            ({"prompt": [5], "allowed_token_ids": [5, 400]}, "allowed_token_ids", "0 to 399"),
            ({"prompt": [5], "bad_words": ["x", "\n"]}, "bad_words", "not empty and not blank"),
            (
                {"prompt": [5], "response_format": {"type": "xml"}},
                "response_format",
                "type text, json_object, json_schema",
            ),
            (
                {"prompt": [5], "response_format": {"type": "json_schema"}},
                "response_format.json_schema",
                "json_schema must be an object",
            ),
            ({"prompt": [5], "structured_outputs": {"jsn": {}}}, "structured_outputs", "no field 'jsn'"),
            ({"prompt": [5], "structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "unclosed group"),
            (
                {"prompt": [5], "structured_outputs": {"json": False}},
                "structured_outputs.json",
                "is bool, and must be a",
            ),
            ({"prompt": [5], "guided_json": {"type": "foo"}}, "guided_json", "guided_json: the JSON schema cannot be"),
            (
                {"prompt": [5], "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}},
                "response_format",
                "response_format: the JSON schema cannot be used: Invalid type: foo",
            ),
            (
                {"prompt": [5], "guided_regex": "a", "guided_choice": ["a"]},
                "guided_choice",
                "is given beside guided_regex",
            ),
            (
                {"prompt": [5], "guided_regex": "a", "structured_outputs": {"regex": "a"}},
                "structured_outputs",
                "as structured_outputs and guided_...",
            ),
            ({"prompt": [5], "guided_decoding_backend": "outlines"}, "guided_decoding_backend", "asks for no form"),
            (
                {"prompt": [5], "guided_regex": "a", "guided_decoding_backend": "mine"},
                "guided_decoding_backend",
                "is 'mine'; allowed: auto, llguidance",
            ),
            (
                {"prompt": [5], "guided_regex": "a", "guided_decoding_backend": "xgrammar:no-hope"},
                "guided_decoding_backend",
                "is 'xgrammar:no-hope'",
            ),
            ({"prompt": [5], "guided_json": 5}, "guided_json", "expected"),
            ({"prompt": [5], "guided_json": "{"}, "guided_json", "is not valid JSON"),
            ({"prompt": [5], "guided_regex": ["a"]}, "guided_regex", "expected"),
            ({"prompt": [5], "guided_regex": "(a"}, "guided_regex", "unclosed group"),
            ({"prompt": [5], "guided_choice": "a"}, "guided_choice", "expected"),
            ({"prompt": [5], "guided_choice": []}, "guided_choice", "at least one"),
            ({"prompt": [5], "guided_grammar": {}}, "guided_grammar", "expected"),
            ({"prompt": [5], "guided_grammar": "start: nothing"}, "guided_grammar", "nothing"),
            ({"prompt": [5], "guided_json_object": "yes"}, "guided_json_object", "expected"),
            ({"prompt": [5], "guided_json": {}, "guided_whitespace_pattern": "(a"}, "guided_json", "cannot be used"),
            ({"prompt": [5], "guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "asks for no form"),
            ({"prompt": [5], "max_tokens": "4", "n": "x"}, "n", "n: expected int"),
            (
                {"prompt": [5], "response_format": {"type": "json_object", "schema": DEEP}},
                "response_format",
                "response_format is nested deeper than",
            ),
            ({"prompt": [5], "structural_tag": "{}"}, "structural_tag", "must have a format, or structures"),
            ({"prompt": [5], "structural_tag": {"format": {"type": "x"}}}, "structural_tag", "Invalid value 'x'"),
            (
                {"prompt": [5], "response_format": {"type": "structural_tag"}},
                "response_format",
                "must have a format, or structures",
            ),
            (
                {"prompt": [5], "response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}},
                "response_format.json_schema.strict",
                "strict must be true or false",
            ),
            ({"prompt": [5], "tempratur": 1}, "tempratur", "did you mean temperature"),
            ({"prompt": [5], "mirostat_mode": "x"}, "mirostat_mode", "mirostat_mode: expected int"),
            ({"prompt": [5], "grammar": "start: x", "regex": "a"}, "regex", "is given beside structured_outputs"),
            ({"prompt": [5], "n_predict": -1}, "n_predict", "16 tokens unless a number is given"),
            ({"prompt": [5], "vllm_xargs": {"a": 2**70}}, "vllm_xargs", "vllm_xargs integers must be at least -2**63"),
            ({"prompt": [5], "extra_args": {"a": 1}}, "extra_args", "bodies have vllm_xargs"),
            ({"prompt": [5], "prompt_logprob_start": 1}, "prompt_logprob_start", "in Python alone"),
            ({"prompt": [5], "flat_logprobs": True}, "flat_logprobs", "in Python alone"),
            (
                {"prompt": [5], "prompt_logprob_token_ids": [[5]]},
                "prompt_logprob_token_ids",
                "not supported by this ver",
            ),
            (
                {"prompt": [5], "routed_experts_prompt_start": 1},
                "routed_experts_prompt_start",
                "not supported by this ve",
            ),
            ({"prompt": [5], "trace_decode_token_ids": [5]}, "trace_decode_token_ids", "not supported by this version"),
            ({"prompt": [5], "watermarking": True}, "watermarking", "not supported by this version"),
            (
                {"prompt": [5], "repetition_detection": {"max_pattern_size": 3, "min_count": 1}},
                "repetition_detection.min_count",
                "repetition_detection.min_count = 1: must be an integer of 2 to",
            ),
            ({"prompt": [5], "stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
            ({"prompt": [5], "stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown"),
            ({"prompt": [5], "priority": 2**63}, "priority", "priority"),
            ({"prompt": [5], "cache_salt": ""}, "cache_salt", "empty"),
            ({"prompt": [5], "request_id": "a b"}, "request_id", "printable"),
        ],
    ),
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_a_bad_field_of_a_completion_is_named(client, body, param, said):
    check_error(client.post(COMPLETIONS, json=body), 400, param, said)


@pytest.mark.parametrize(
    ("extra", "param", "words"),
    [
        (
            {"prompt": None, "prompt_embeds": []},
            "prompt_embeds",
            r"Either prompt or prompt_embeds must be provided and non-empty\.",
        ),
        ({"prompt": []}, "prompt", "prompt or prompt_embeds"),
        ({"prompt": [10**6]}, "prompt", "out of vocabulary"),
        ({"prompt": [-1]}, "prompt", "greater than or equal to 0"),
        ({"prompt": [[-1]]}, "prompt", "greater than or equal to 0"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "json_schema.*must be provided"),
        ({"logprob_token_ids": []}, "logprob_token_ids", "must not be an empty list"),
        ({"logprob_token_ids": [], "logprobs": 1}, "logprob_token_ids", "must not be an empty list"),
        ({"logprob_token_ids": [10]}, "logprob_token_ids", "when using `logprob_token_ids`"),
        ({"logprobs": 1000}, "logprobs", "greater than max allowed"),
        ({"prompt_logprobs": 1000}, "prompt_logprobs", "greater than max allowed"),
        (
            {"stream_options": {"include_usage": True}},
            "stream_options",
            "Stream options can only be defined when `stream=True`",
        ),
        ({"thinking_token_budget": -2}, "thinking_token_budget", "thinking_token_budget"),
        ({"cache_salt": ""}, "cache_salt", "cache_salt"),
        ({"logit_bias": {"bad1": 1, "bad2": 2}}, "logit_bias", "bad1.*bad2"),
        ({"stop_token_ids": [401]}, "stop_token_ids", "401"),
        ({"use_beam_search": True, "n": 5}, "n", "at most 4"),
        ({"use_beam_search": True, "best_of": 5}, "best_of", "at most 4"),
        ({"bad_words": ["x"] * 1025}, "bad_words", "length <= 1024"),
        ({"bad_words": ["x" * 20_000]}, "bad_words", "16384 characters together"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_errors_have_the_words_that_vllms_own_tests_look_for(client, extra, param, words):
    answer = client.post(COMPLETIONS, json={"prompt": [5], "max_tokens": 1, **extra})
    error = check_error(answer, 400, param, "")
    assert re.search(words, error["message"]), error


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"messages": []}, "messages", "empty"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "required"),
        ({"messages": [{"role": "user", "contents": "x"}]}, "messages[0].contents", "did you mean content?"),
        ({"messages": [{"role": "user", "content": "x", "tool_call": 1}]}, "messages[0].tool_call", "unknown"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
            "type 'image_url': multimodal",
        ),
        ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs", "logprobs: true"),
        ({"messages": MESSAGES, "max_tokens": 0}, "max_tokens", "max_tokens = 0: must be at least 1"),
        ({"messages": MESSAGES, "max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens = 0: "),
        (
            {"messages": MESSAGES, "max_completion_tokens": 2, "min_tokens": 3},
            "min_tokens",
            "min_tokens = 3: must not exceed max_completion_tokens, 2",
        ),
        ({"messages": MESSAGES, "logprobs": True, "top_logprobs": -2}, "top_logprobs", "at least 0, or -1"),
        ({"messages": MESSAGES, "tool_choice": "required"}, "tool_choice", "`tools` must be set"),
        ({"messages": MESSAGES, "chat_template": "{{ x }}"}, "chat_template", "trust_request_chat_template"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "field of the request"),
        (
            {"messages": MESSAGES, "continue_final_message": True, "add_generation_prompt": True},
            "messages",
            "exclude each other",
        ),
        ({"messages": MESSAGES, "functions": [{}]}, "functions", "use tools"),
        # These only the engine can see.
        ({"messages": MESSAGES, "vllm_xargs": {"any": 1}}, "vllm_xargs", "no logits processors"),
        ({"messages": MESSAGES, "logprobs": True, "top_logprobs": 60}, "top_logprobs", "max_logprobs"),
        (
            {"messages": MESSAGES, "logprobs": True, "top_logprobs": -1},
            "top_logprobs",
            "top_logprobs = -1, the whole vocabulary of 400: the engine gives at most 20",
        ),
    ],
)
def test_a_bad_field_of_a_chat_is_named(client, body, param, said):
    check_error(client.post(CHAT, json=body), 400, param, said)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"nonsense", b"[1]", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b"[" * 60_000, b"NaN"]
)
def test_a_body_that_is_no_json_object(client, body):
    check_error(client.post(COMPLETIONS, content=body, headers=JSON), 400, None, "")


@pytest.mark.parametrize("text", [rb"a\ud83d", rb"\ud83d\u0041", rb"\ud83dx", rb"\\\ud83d", rb"\ude00\ud83d"])
def test_half_a_character_is_named(client, text):
    named = "ude00" if text.startswith(rb"\ude") else "ud83d"
    body = b'{"prompt": "' + text + b'"}'
    check_error(client.post(COMPLETIONS, content=body, headers=JSON), 400, None, rf"\{named} is half of a character")
    whole = b'{"prompt": "\\ud83d\\ude00 \\\\ud83d", "max_tokens": 1}'
    assert client.post(COMPLETIONS, content=whole, headers=JSON).status_code == 200


def test_a_body_of_another_type(client):
    check_error(client.post(COMPLETIONS, content=b'{"prompt":[5]}'), 400, None, "application/json")


EXTRA_FIELDS = [
    {"metadata": {"a": "b"}},
    {"store": True},
    {"user": "me"},
    {"parallel_tool_calls": False},
    {"prompt_cache_retention": "24h"},
    {"enable_thinking": False},
    {"service_tier": "flex"},
    {"stream_options": {"include_obfuscation": False}, "stream": True},
    {"colour": "red"},
    {"messages": [{"role": "user", "content": "x", "id": "msg_1", "cache_control": {"type": "ephemeral"}}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]}]},
]


@pytest.mark.parametrize("extra", EXTRA_FIELDS, ids=json.dumps)
def test_a_field_that_changes_no_answer_is_taken_as_others_take_it(client, extra):
    plain = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "seed": 1, "temperature": 1}
    expected = client.post(CHAT, json=plain)
    answer = client.post(CHAT, json={**plain, **extra})
    assert answer.status_code == 200, answer.text
    if "stream" in extra:
        assert answer.text.endswith("data: [DONE]\n\n")
    else:
        assert answer.json()["choices"] == expected.json()["choices"]


@pytest.mark.parametrize("name", ["web_search_options"])
def test_a_field_that_would_change_the_answer_and_cannot_is_refused_by_name(client, name):
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, name: {"type": "json_object"}}
    check_error(client.post(CHAT, json=body), 400, name, "not supported")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_each_wrong_sampling_field_is_named_and_the_engine_goes_on(client, path):
    asked = {"prompt": "x"} if path == COMPLETIONS else {"messages": MESSAGES}
    fields = [each.name for each in declared_fields(SamplingParams).values() if each.field.in_body]
    fields += ["structured_outputs", "response_format", "guided_choice", "logprobs"]
    assert len(fields) > 40
    for name in fields:
        # An object that no field takes: of no known name, and with a list for a value.
        answer = client.post(path, json={**asked, "max_tokens": 1, name: {"no": [[]]}})
        assert answer.status_code == 400, (name, answer.text)
        error = answer.json()["error"]
        assert (error["param"] or "").startswith(name), (name, error)
        assert name in error["message"], (name, error)
    assert client.post(path, json={**asked, "max_tokens": 1}).status_code == 200


def test_a_strict_server_takes_no_field_without_effect():
    with serving("--strict-requests") as server, server.client() as client:
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        assert client.post(CHAT, json={**body, "user": "me", "store": False}).status_code == 200
        for extra, param in (
            ({"store": True}, "store"),
            ({"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
            ({"colour": "red"}, "colour"),
            ({"messages": [{"role": "user", "content": "x", "id": "1"}]}, "messages[0].id"),
            ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages[0].colour"),
        ):
            assert client.post(CHAT, json={**body, **extra}).json()["error"]["param"] == param


@pytest.mark.parametrize(
    "field",
    [
        *("user", "metadata", "store", "logit_bias", "bad_words", "suffix", "service_tier", "watermarking"),
        *("flat_logprobs", "routed_experts_prompt_start", "extra_args", "guided_json_object"),
    ],
)
def test_a_field_that_asks_for_nothing_is_taken(client, field):
    neutral = {"user": "me", "metadata": {"a": "b"}, "store": False, "logit_bias": {}, "suffix": ""}
    neutral |= {
        "guided_json_object": False,
        "watermarking": False,
        "flat_logprobs": False,
        "routed_experts_prompt_start": 0,
    }
    body = {"prompt": [5], "max_tokens": 1, field: neutral.get(field)}
    assert client.post(COMPLETIONS, json=body).status_code == 200


def test_a_prompt_that_is_too_long_is_answered_in_openais_words(server, client):
    body = check_error(client.post(COMPLETIONS, json={"prompt": [5] * 256}), 400, "prompt", "maximum context length")
    assert body["code"] == "context_length_exceeded"
    check_error(client.post(COMPLETIONS, json={"prompt": [5] * 250, "max_tokens": 7}), 400, "prompt", "257 tokens")
    assert client.post(COMPLETIONS, json={"prompt": [5] * 250}).json()["usage"]["completion_tokens"] == 6
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        with pytest.raises(openai.BadRequestError) as caught:
            sdk.chat.completions.create(model="null", messages=[{"role": "user", "content": "x y z " * 200}])
        assert caught.value.code == "context_length_exceeded"


def test_an_unknown_model_or_route_or_method(server, client):
    assert client.post(COMPLETIONS, json={"model": "", "prompt": [5], "max_tokens": 1}).status_code == 200, (
        "none is named"
    )
    check_error(client.post(COMPLETIONS, json={"prompt": [5], "model": "gpt"}), 404, "model", "does not exist")
    check_error(client.get("/v1/models/gpt"), 404, "model", "does not exist")
    check_error(client.get("/v1/nothing"), 404, None, "there is no /v1/nothing")
    wrong = client.get(COMPLETIONS)
    check_error(wrong, 405, None, "POST")
    assert wrong.headers["allow"] == "POST"
    assert client.put("/ping").headers["allow"] == "GET, HEAD, POST"
    assert client.put("/v1/responses/resp_1").headers["allow"] == "DELETE, GET, HEAD"
    sdk = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with sdk, pytest.raises(openai.NotFoundError):
        sdk.completions.create(model="gpt", prompt="x")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v1/responses/resp_1/nothing", "GET, DELETE"),
        ("/v1/moderations", "neither judge nor train here"),
        ("/v1/audio/transcriptions", "/v1/chat/completions"),
        ("/v1/load_lora_adapter", "--allow-runtime-lora-updating"),
        ("/collective_rpc", "--server-dev-mode"),
        ("/pause", "--server-dev-mode"),
        ("/chat/completions", "did you mean /v1/chat/completions? The base address of OpenAI's clients ends in /v1."),
        ("/v1/v1/completions", "did you mean /v1/completions?"),
        ("/v1/responses/compact", "conversations are not compacted"),
        ("/v1/models/null:generateContent", "Gemini's API is not served"),
        ("/v1beta/models/null:streamGenerateContent", "Gemini's API is not served"),
        ("/infill", "filling in the middle is not supported"),
        ("/apply-template", "POST /tokenize returns the tokens"),
        ("/flush_cache", "POST /reset_prefix_cache"),
        ("/props", "GET /v1/models"),
        ("/v1/engines/null/completions", "/v1/completions generate text"),
        ("/v1/tokenize", "did you mean /tokenize?"),
        ("/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("/engines.js", "GET /docs"),
        ("/elsewhere", "GET /docs"),
    ],
)
def test_a_route_of_others_is_answered_by_name_with_what_there_is(client, path, said):
    error = check_error(client.post(path, json={"input": "x"}), 404, None, said)
    assert error["message"].startswith(f"there is no {path} here")


def test_openais_client_shows_that_sentence(server):
    missing = pytest.raises(openai.NotFoundError, match="neither judge nor train here")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as sdk, missing:
        sdk.moderations.create(input="x")


def test_invocations_are_what_their_body_says(client):
    completion = client.post("/invocations", json={"prompt": [5], "max_tokens": 1}).json()
    chat = client.post("/invocations", json={"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}).json()
    assert (completion["object"], chat["object"]) == ("text_completion", "chat.completion")
    check_error(client.post("/invocations", json={"inputs": "x"}), 400, "messages", "must have messages or prompt")
    check_error(client.post("/invocations", json={"prompt": "x", "max_tokns": 1}), 400, "max_tokns", "unknown field")


def test_a_request_that_fails_in_the_engine(client):
    check_error(client.post(COMPLETIONS, json={"prompt": [5, 77]}), 500, None, "told to fail")
    # Its stream has not begun, so it has a status of its own too.
    check_error(client.post(COMPLETIONS, json={"prompt": [5, 77], "stream": True}), 500, None, "told to fail")


def test_tokenizer_info_is_served_only_where_it_was_asked_for(client):
    response = client.get("/tokenizer_info")
    assert response.status_code == 404
    assert "--enable-tokenizer-info-endpoint" in response.json()["error"]["message"]


def test_tokenize_and_detokenize_name_what_is_wrong(client):
    check_error(client.post("/tokenize", json={}), 400, "prompt", "either")
    check_error(client.post("/detokenize", json={"tokens": [400]}), 400, "tokens[0]", "0 to 399")
    check_error(client.post("/detokenize", json={"tokens": ["x"]}), 400, "tokens[0]", "expected int")


def test_after_all_this_the_server_serves(client):
    assert client.post(COMPLETIONS, json={"prompt": [5], "max_tokens": 2}).status_code == 200
    assert client.get("/load").json() == {"server_load": 0}
