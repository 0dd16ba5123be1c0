"""Ollama's API: the official client's calls, whole and in lines, with tools and thinking; errors in its shape."""

from __future__ import annotations

import datetime
import json
from typing import Any

import httpx
import ollama
import pytest
from http_server import serving
from null_with_tokenizer import PARROT
from thinned import every

END = "STOPHERE"
TEMPLATE = (
    '{# <tool_call> "arguments" </think> #}{% for m in messages %}{% if not loop.last %}[{{ m.role }}:{{ m.content }}'
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}]"
    "{% endif %}{% endfor %}{{ messages[-1]['content'] }}"
)
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Zürich"}}</tool_call>'
SAID = f"<think>hm</think>Sure.\n{CALL}\n{CALL}"


@pytest.fixture(scope="module")
def server():
    """Of a model that says its last message, up to the stop string."""
    arguments = ("--chat-template", TEMPLATE, "--reasoning-parser", "auto", "--max-model-len", "1024")
    with serving("--distributed-executor-backend", PARROT, *arguments) as server:
        yield server


@pytest.fixture
def client(server):
    return ollama.Client(host=server.url)


def chat_of(said: str, **more: Any) -> dict[str, Any]:
    options = {"stop": [END], "num_predict": 400, **more.pop("options", {})}
    return {"model": "null", "messages": [{"role": "user", "content": said + END}], "options": options, **more}


def test_an_answer_is_one_message_with_counts(client):
    answer = client.chat(**chat_of(SAID, tools=[WEATHER]))
    assert (answer.message.role, answer.message.content, answer.message.thinking) == ("assistant", "Sure.", "hm")
    calls = answer.message.tool_calls
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("get_weather", {"city": "Zürich"})
    ] * 2
    assert (answer.model, answer.done, answer.done_reason) == ("null", True, "stop")
    assert answer.prompt_eval_count > 10 < answer.eval_count
    assert answer.total_duration >= answer.eval_duration > 0
    cut = client.chat(**chat_of("hello", options={"num_predict": 2}))
    assert (cut.done_reason, cut.eval_count, cut.message.content) == ("length", 2, "hel")


def test_lines_join_to_the_same_message(client):
    whole = client.chat(**chat_of(SAID, tools=[WEATHER]))
    lines = list(client.chat(**chat_of(SAID, tools=[WEATHER]), stream=True))
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    assert "".join(line.message.content for line in lines) == whole.message.content
    assert "".join(line.message.thinking or "" for line in lines) == whole.message.thinking
    calls = [call for line in lines for call in line.message.tool_calls or ()]
    assert [call.function for call in calls] == [call.function for call in whole.message.tool_calls]
    assert (lines[-1].eval_count, lines[-1].prompt_eval_count) == (whole.eval_count, whole.prompt_eval_count)
    assert len(lines) >= 5, "a line for each kind of text, each call, and the end"


def test_lines_are_json_and_nothing_else(server):
    with server.client() as client:
        answer = client.post("/api/chat", json=chat_of("hello"))
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert lines[0]["message"]["role"] == "assistant"
    assert "eval_count" not in lines[0]
    assert lines[-1]["done_reason"] == "stop"


def test_conversations_with_tools_reach_the_template(client):
    messages: Any = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
        {"role": "tool", "tool_name": "f", "content": "sunny"},
        {"role": "user", "content": END},
    ]
    answer = client.chat("null", messages, tools=[WEATHER], options={"stop": [END]})
    assert answer.message.content == '[system:s][user:a][assistant:bf{"x": 1}][tool:sunny]'


def test_a_prompt_is_answered_with_the_template_or_raw(client):
    options = {"stop": [END], "num_predict": 100}
    assert client.generate("null", "hi" + END, system="s", options=options).response == "[system:s]hi"
    raw = client.generate("null", "hi" + END, raw=True, options=options)
    assert raw.response == "hi"
    assert raw.prompt_eval_count <= len("hi" + END)
    lines = list(client.generate("null", "<think>so</think>yes" + END, stream=True, options=options))
    assert "".join(line.thinking or "" for line in lines) == "so"
    assert "".join(line.response for line in lines) == "yes"
    long = client.generate("null", "hi", raw=True, options={"stop": [END]})
    assert long.done_reason == "length", "as long as the context where nothing else is said"
    assert long.eval_count > 500


def test_the_answers_form_and_its_tokens_chances_are_given(client):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    answer = client.chat(**chat_of("<think>so</think>", format=schema, options={"stop": []}))
    assert json.loads(answer.message.content)["a"] in (1, 2)
    told = client.chat(**chat_of("hey", logprobs=True, top_logprobs=2))
    assert "".join(each.token for each in told.logprobs).startswith("hey")
    assert len(told.logprobs) == told.eval_count
    assert all(len(each.top_logprobs) == 2 for each in told.logprobs)
    lines = list(client.chat(**chat_of("hey", logprobs=True), stream=True))
    assert [each.token for line in lines for each in line.logprobs or ()] == [each.token for each in told.logprobs]


def test_models_are_listed_and_shown(client, server):
    assert [(model.model, str(model.modified_at.tzinfo)) for model in client.list().models] == [("null", "UTC")]
    shown = client.show("null:latest")
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.modelinfo[f"{shown.modelinfo['general.architecture']}.context_length"] == 1024
    assert client.chat("null:latest", [], keep_alive="5m").done_reason == "load"
    with server.client() as plain:
        numbers = plain.get("/api/version").json()["version"].split(".")
    assert [int(each) for each in numbers] >= [0, 12, 11]


def test_loaded_models_are_listed(client, server):
    (model,) = client.ps().models
    assert (model.name, model.context_length) == ("null", 1024)
    assert model.expires_at - datetime.datetime.now(datetime.UTC) > datetime.timedelta(days=365 * 99)
    assert len(model.digest) == 64, "Ollama's command shows the beginning"
    assert client.list().models[0].digest == model.digest
    with server.client() as plain:
        assert plain.head("/").status_code == plain.get("/").status_code == 200, "that command asks first"


@pytest.mark.parametrize("headers", [{"content-type": ""}, {"content-type": "application/x-www-form-urlencoded"}, {}])
@pytest.mark.parametrize(
    ("path", "body"),
    [("/api/chat", chat_of("hi", stream=False)), ("/api/generate", {"model": "null", "stream": False})],
)
def test_json_needs_no_content_type_but_from_web_pages(server, path, body, headers):
    """As in Ollama's own examples, in which curl says that it sends a form."""
    with server.client() as client:
        request = client.build_request("POST", path, content=json.dumps(body), headers=headers)
        if not headers:
            request.headers.pop("content-type", None)
        assert client.send(request).json()["done"] is True
        for name, value, status in (
            ("origin", "http://evil.example", 403),
            ("origin", "null", 403),
            ("sec-fetch-site", "cross-site", 403),
            ("origin", server.url, 400),
            ("referer", "http://evil.example/page", 400),
            ("sec-fetch-mode", "no-cors", 400),
        ):
            refused = client.post(path, content=json.dumps(body), headers={**headers, name: value})
            assert refused.status_code == status
            assert ("Content-Type: application/json" in refused.json()["error"]) is (status == 400)
        allowed = client.post(path, json=body, headers={"origin": server.url, "sec-fetch-site": "same-origin"})
        assert allowed.json()["done"] is True
        assert client.post("/v1/chat/completions", content=b"{}", headers=headers).status_code == 400


@pytest.mark.parametrize(
    ("call", "status", "words"),
    every(
        2,
        [
            (lambda client: client.chat("other", [{"role": "user", "content": "x"}]), 404, "'other' does not exist"),
            (lambda client: client.show("other"), 404, "'other' does not exist"),
            (lambda client: client.chat(**chat_of("x", options={"tfs_z": 0.5})), 400, "options.tfs_z is not supported"),
            (
                lambda client: client.chat(**chat_of("x", options={"repeat_last_n": 64, "presence_penalty": 1})),
                400,
                "options.repeat_last_n is 64, and options.presence_penalty counts every token here",
            ),
            (lambda client: client.chat(**chat_of("x", options={"num_predict": 0})), 400, "options.num_predict is 0"),
            (lambda client: client.chat(**chat_of("x", options={"num_ctx": 4096})), 400, "context is 1024 tokens"),
            (
                lambda client: client.chat(**chat_of("x", options={"temperature": "hot"})),
                400,
                "options.temperature: expected float",
            ),
            (
                lambda client: client.chat(**chat_of("x", options={"temperature": -1.0})),
                400,
                "options.temperature = -1.0:",
            ),
            (lambda client: client.generate("null", "x", raw=True, options={"top_k": -2}), 400, "options.top_k = -2:"),
            (
                lambda client: client.generate("null", "x", raw=True, logprobs=True, top_logprobs=99),
                400,
                "top_logprobs = 99",
            ),
            (
                lambda client: client.chat(**chat_of("x", options={"repeat_penalty": -1})),
                400,
                "options.repeat_penalty = -1",
            ),
            (lambda client: client.chat(**chat_of("x", options={"num_predict": 2**40})), 400, "options.num_predict = "),
            (
                lambda client: client.chat(**chat_of("x", think="very")),
                400,
                "think: invalid enum value 'very'; it must be",
            ),
            (lambda client: client.generate("null", "a", suffix="b"), 400, "suffix is not supported"),
            (lambda client: client.generate("null", keep_alive=0), 400, "stays loaded"),
            (
                lambda client: client.chat("null", [{"role": "user", "content": "x", "images": [b"x"]}]),
                400,
                "reads text",
            ),
            (
                lambda client: client.embed("null", "x"),
                404,
                "--runner pooling",
            ),
            (
                lambda client: client.embeddings("null", "x"),
                404,
                "--runner pooling",
            ),
            (lambda client: client.pull("null"), 404, "/api/pull"),
            (lambda client: client.delete("null"), 404, "/api/delete"),
            (lambda client: client.generate("null", "x", format={"type": "nothing"}), 400, "format"),
        ],
    ),
)
def test_what_cannot_be_is_refused_by_name(client, call, status, words):
    with pytest.raises(ollama.ResponseError) as refused:
        call(client)
    assert refused.value.status_code == status
    assert isinstance(refused.value.error, str)
    assert words in refused.value.error


def test_options_of_loading_are_taken_and_a_context_within_the_models(client):
    options = {"num_ctx": 512, "num_gpu": 1, "num_thread": 4, "repeat_penalty": 1.1, "repeat_last_n": 0, "seed": -1}
    options["penalize_newline"] = True
    assert client.chat(**chat_of("hello", options=options)).message.content == "hello"


def test_every_option_of_ollamas_at_its_default_is_taken(client):
    """As clients send them that fill in all they know."""
    defaults: Any = {
        **{"numa": False, "num_ctx": 512, "num_batch": 512, "num_gpu": -1, "main_gpu": 0, "low_vram": False},
        **{"f16_kv": True, "logits_all": False, "vocab_only": False, "use_mmap": True, "use_mlock": False},
        **{"embedding_only": False, "num_thread": 0, "num_keep": 4, "seed": -1, "num_predict": -1, "top_k": 40},
        **{"top_p": 0.9, "tfs_z": 1.0, "typical_p": 1.0, "repeat_last_n": 64, "temperature": 0.8, "repeat_penalty": 1},
        **{"presence_penalty": 0.0, "frequency_penalty": 0.0, "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1},
        **{"penalize_newline": True, "stop": [END]},
    }
    assert defaults.keys() == ollama.Options.model_fields.keys()
    assert client.chat(**chat_of("hello", options=defaults)).message.content == "hello"


def test_no_last_tokens_are_no_penalties(client):
    """A penalty that is out of range shows whether it reaches the engine."""
    for penalty in ("repeat_penalty", "presence_penalty", "frequency_penalty"):
        with pytest.raises(ollama.ResponseError, match="must be"):
            client.chat(**chat_of("hello", options={penalty: -9}))
        answer = client.chat(**chat_of("hello", options={penalty: -9, "repeat_last_n": 0}))
        assert answer.message.content == "hello"


@pytest.mark.system
def test_a_wrong_key_is_told_in_ollamas_shape():
    with serving("--api-key", "k") as server, httpx.Client(base_url=server.url) as client:
        answer = client.post("/api/chat", json=chat_of("x"))
        assert (answer.status_code, type(answer.json()["error"])) == (401, str)
        assert client.get("/api/tags").status_code == 401
