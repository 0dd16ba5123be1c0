"""Tool calls and reasoning over HTTP: whole, as deltas, and called for by the request."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from example_tools import FORCED, NOW, weather
from http_server import ask, serving, stream
from null_with_tokenizer import PARROT
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from headrace.frontend.http.apis.openai.tool_choice import tool_choice_of
from headrace.frontend.text.formats.output_formats import ToolChoice

CHAT = "/v1/chat/completions"
TOOLS = [weather(), NOW]
ZURICH = {"city": 'Zü"r</tool_call>ich [x] {', "days": 3}
TWO = [("get_weather", ZURICH), ("now", {})]
CALL = f'{{"name": "get_weather", "arguments": {json.dumps(ZURICH, ensure_ascii=False)}}}'
NOW_CALL = '{"name": "now", "arguments": {}}'
END = "STOPHERE"
TEMPLATE = "{# <tool_call> \"arguments\" #}{{ messages[-1]['content'] }}"


@pytest.fixture(scope="module")
def client():
    """Of a server whose model says what it is told to, up to the stop string."""
    arguments = ("--chat-template", TEMPLATE, "--reasoning-parser", "qwen3", "--max-model-len", "1024")
    with serving("--distributed-executor-backend", PARROT, *arguments) as server, server.client() as client:
        ask(client, CHAT, **body_of("hm", tool_choice="required"))  # the engine's process that tries grammars stays
        yield client


def body_of(said: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": said + END}]
    return {"messages": messages, "max_tokens": 400, "stop": [END], "tools": TOOLS, **more}


SAID = f"Sure.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{NOW_CALL}</tool_call>"


def test_calls_are_answered_whole(client: httpx.Client):
    (choice,) = ask(client, CHAT, **body_of("<think>hm</think>" + SAID))["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert (message["content"], message["reasoning"], message["reasoning_content"]) == ("Sure.", "hm", "hm")
    calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]
    assert calls == TWO
    assert len({call["id"] for call in message["tool_calls"]}) == 2


def test_calls_are_streamed_as_openais_clients_join_them(client: httpx.Client):
    thought = "let me think, " * 5
    said = f"<think>{thought}</think>{SAID}"
    events = stream(client, CHAT, body_of(said, stream_options={"include_usage": True}, stream_interval=1))
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Sure."
    for name in ("reasoning", "reasoning_content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == thought
    hidden = stream(client, CHAT, body_of(said, include_reasoning=False))
    assert not any("reasoning" in choice["delta"] for event in hidden for choice in event["choices"])
    parts = [part for delta in deltas for part in delta.get("tool_calls") or ()]
    names = {part["index"]: part["function"]["name"] for part in parts if "name" in part["function"]}
    assert names == {0: "get_weather", 1: "now"}
    joined = ["".join(p["function"].get("arguments", "") for p in parts if p["index"] == index) for index in (0, 1)]
    assert [json.loads(each) for each in joined] == [ZURICH, {}]
    assert [event["choices"][0]["finish_reason"] for event in events if event["choices"]][-1] == "tool_calls"


def test_beams_beside_a_call_that_must_be_are_refused_by_the_choice(client: httpx.Client):
    body = body_of("x", tool_choice="required", use_beam_search=True, stop=None)
    error = client.post(CHAT, json=body).json()["error"]
    assert (error["param"], error["message"]) == (
        "tool_choice",
        "tool_choice does nothing with use_beam_search; leave it out",
    )


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("streams", [False, True])
def test_a_call_that_a_stop_string_has_cut_is_an_ordinary_stop(client: httpx.Client, choice, streams):
    """Its arguments are not whole, and who sees `tool_calls` would carry it out."""

    def reason(said: str, **more: Any) -> str:
        body = body_of(said, tool_choice=choice, **more)
        choices = stream(client, CHAT, body)[-1]["choices"] if streams else ask(client, CHAT, **body)["choices"]
        return choices[0]["finish_reason"]

    cut = CALL[: CALL.index("ich")]
    assert reason(f"<tool_call>{cut}") == "stop"
    assert reason(f"<tool_call>{CALL}</tool_call><tool_call>{cut}") == "stop"
    assert reason(f"<tool_call>{CALL}</tool_call><tool_call>{cut}", parallel_tool_calls=False) == "tool_calls"
    # The form of several calls that must be does not let this model say where it ends.
    assert reason(f"<tool_call>{CALL}</tool_call>", parallel_tool_calls=choice == "auto") == "tool_calls"
    assert reason(f"<tool_call>{cut}{'x' * 100}", max_tokens=100) == "length"


def test_one_call_alone_is_streamed_where_several_are_not_wanted(client: httpx.Client):
    said = f"<tool_call>{CALL}</tool_call>" * 2
    events = stream(client, CHAT, body_of(said, parallel_tool_calls=False, stream_interval=1))
    parts = [part for event in events for part in event["choices"][0]["delta"].get("tool_calls") or ()]
    assert {part["index"] for part in parts} == {0}
    assert json.loads("".join(part["function"].get("arguments", "") for part in parts)) == ZURICH


def test_answers_and_their_events_are_of_the_clients_own_types(client: httpx.Client):
    thought = "<think>hm</think>" + SAID
    whole = ask(client, CHAT, **body_of(thought, logprobs=True, top_logprobs=1))
    answer = ChatCompletion.model_validate(whole, strict=True)
    assert answer.choices[0].message.tool_calls is not None
    asked = body_of(thought, logprobs=True, stream_options={"include_usage": True})
    chunks = [ChatCompletionChunk.model_validate(each, strict=True) for each in stream(client, CHAT, asked)]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
    error = client.post(CHAT, json=body_of("x", temperature=-1)).json()["error"]
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"type": "nothing"}, "the parameters of the tool 'f' are of type 'nothing'"),
        ({"type": "array", "items": {}}, "the parameters of the tool 'f' are of type 'array'"),
        ({"type": "object", "properties": {"a": 3}}, "the parameters of the tool 'f': properties must be an object of"),
        ({"properties": [1]}, "the parameters of the tool 'f': properties must be an object of schemas"),
        ({"required": "a"}, "the parameters of the tool 'f': required must be a list"),
        (
            {"properties": {"a": {"type": "array", "items": {"type": "strng"}}}},
            "at /properties/a/items of the schema 'parameters of the tool f': Invalid type: strng",
        ),
        (
            {"properties": {"a": {"$ref": "#/nope"}}},
            "at /properties/a of the schema 'parameters of the tool f': Pointer '/nope' does not exist",
        ),
    ],
)
@pytest.mark.parametrize(("choice", "strict"), [("required", False), ("auto", True)])
def test_a_schema_that_is_none_is_refused_by_its_tool_and_its_part(client, parameters, words, choice, strict):
    function = {"name": "f", "parameters": parameters, "strict": strict}
    body = body_of("x", tools=[*TOOLS, {"type": "function", "function": function}], tool_choice=choice)
    answer = client.post(CHAT, json=body)
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "tools"


@pytest.mark.parametrize("said", [{}, {"type": "OBJECT"}, {"type": ["Object", "NULL"]}])
def test_arguments_are_an_object_where_the_schema_does_not_say_so(client: httpx.Client, said):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {**said, "maxProperties": 0}}}]
    (choice,) = ask(client, CHAT, **body_of("7", tools=tools, tool_choice="required", parallel_tool_calls=False))[
        "choices"
    ]
    assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == ["{}"]


def test_a_server_may_hold_every_call_to_its_schema():
    """Where the model writes arguments that are none, the grammar lets it not."""
    arguments = ("--chat-template", TEMPLATE, "--max-model-len", "1024", "--tool-strict-level", "parameter")
    said = '<tool_call>\n{"name": "get_weather", "arguments": {"town": 7}}\n</tool_call>'
    with serving("--distributed-executor-backend", PARROT, *arguments) as server, server.client() as client:
        parameters = {"type": "object", "properties": {"city": {"enum": ["x"]}}, "required": ["city"]}
        tools = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]
        (choice,) = ask(client, CHAT, **body_of(said, tools=tools, parallel_tool_calls=False))["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["city"] == "x"


def test_past_reasoning_and_parts_reach_the_template_in_every_form():
    """By its names, and as a part of the content, as clients of Mistral and Anthropic and LangChain have it."""
    template = "{% for m in messages %}[{{ m.role }}:{{ m.reasoning_content }}:{{ m.content }}]{% endfor %}"
    parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "no"}]
    thoughts: list[dict[str, Any]] = [
        {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
        {"type": "thinking", "thinking": "hm", "signature": "x"},
        {"type": "reasoning", "reasoning": "hm"},
        {"type": "reasoning", "text": "hm"},
    ]
    said = [{name: "hm", "content": parts} for name in ("reasoning", "reasoning_content", "reasoning_text")]
    said += [{"content": [{"type": "redacted_thinking", "data": "x"}, each, *parts]} for each in thoughts]
    backend = ("--distributed-executor-backend", PARROT)
    with serving(*backend, "--chat-template", template) as server, server.client() as client:
        for each in said:
            turns = [
                {"role": "assistant", **each},
                {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "sunny"}]},
                {"role": "user", "content": END},
            ]
            (choice,) = ask(client, CHAT, messages=turns, max_tokens=99, stop=[END])["choices"]
            assert choice["message"]["content"] == "[assistant:hm:a\nno][tool::sunny][user::", each


def test_a_server_may_be_told_in_which_form_its_template_gets_contents():
    template = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
    given = ("--chat-template", template, "--chat-template-content-format", "openai")
    with serving("--distributed-executor-backend", PARROT, *given) as server, server.client() as client:
        (choice,) = ask(client, CHAT, messages=[{"role": "user", "content": f"hi{END}"}], max_tokens=9, stop=[END])[
            "choices"
        ]
    assert choice["message"]["content"] == "[hi"


def test_usage_counts_the_tokens_of_reasoning(client: httpx.Client):
    def count(said: str, **more: Any) -> Any:
        return ask(client, CHAT, **body_of(said, **more))["usage"]["completion_tokens_details"]

    thought = "<think>hm hm</think>" + SAID
    assert count(thought) == count(thought, include_reasoning=False) == {"reasoning_tokens": 5}, "one for each letter"
    streamed = stream(client, CHAT, body_of(thought, stream_options={"include_usage": True}))
    assert streamed[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}
    assert count(thought, n=2) == {"reasoning_tokens": 10}
    assert count(SAID) == {"reasoning_tokens": 0}


def test_requests_say_what_they_want_of_it(client: httpx.Client):
    def message(**more: Any) -> dict[str, Any]:
        return ask(client, CHAT, **body_of("<think>hm</think>" + SAID, **more))["choices"][0]["message"]

    assert len(message(parallel_tool_calls=False)["tool_calls"]) == 1
    assert message(include_reasoning=False)["reasoning"] is None
    assert message(tool_choice="none")["content"] == SAID
    assert "tool_calls" not in message(tools=None)  # as OpenAI has it: a client reads None


def test_a_budget_ends_the_reasoning_and_the_form_begins_after_it(client: httpx.Client):
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"enum": ["yes"]}}}
    wanted = body_of("<think>a long thought", tools=None, thinking_token_budget=3, response_format=form)
    (choice,) = ask(client, CHAT, **wanted)["choices"]
    assert (len(choice["message"]["reasoning"]), choice["message"]["content"]) == (3, '"yes"')


def test_a_budget_ends_the_reasoning_of_a_completion_by_the_format_that_the_server_names(client: httpx.Client):
    body = {"prompt": "<think>a long thought" + END, "stop": [END], "max_tokens": 20, "skip_special_tokens": False}
    assert "</think>" not in ask(client, "/v1/completions", **body)["choices"][0]["text"]
    (choice,) = ask(client, "/v1/completions", **body, thinking_token_budget=3)["choices"]
    assert choice["text"].find("</think>") == 3


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"name": "f"}], "tools[0]"),
        ([NOW, {"type": "function", "function": {}}], "tools[1].function.name"),
        ([{"type": "function", "function": {"name": "f", "parameters": "x"}}], "tools[0].function.parameters"),
        ([{"type": "function", "function": {"name": "f", "paramters": {}}}], "tools[0].function"),
    ],
)
def test_tools_of_another_shape_are_refused_by_name(client: httpx.Client, tools, param):
    response = client.post(CHAT, json=body_of("x", tools=tools))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


# --- calls that a request asks for ---


def test_a_request_that_asks_for_a_call_gets_one(client: httpx.Client):
    body = body_of("hm", tools=FORCED, stop=None, max_tokens=600, temperature=1.0)
    for seed in range(3):
        (choice,) = ask(client, CHAT, **body, tool_choice="required", seed=seed)["choices"]
        if choice["finish_reason"] != "length":
            assert choice["finish_reason"] == "tool_calls"
            assert choice["message"]["tool_calls"]
    named = {"type": "function", "function": {"name": "now"}}
    (choice,) = ask(client, CHAT, **body, tool_choice=named)["choices"]
    assert [call["function"] for call in choice["message"]["tool_calls"]] == [{"name": "now", "arguments": "{}"}]
    assert choice["finish_reason"] == "stop"
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    calls = ask(client, CHAT, **body, tool_choice=allowed, parallel_tool_calls=False)["choices"][0]["message"][
        "tool_calls"
    ]
    assert [call["function"]["name"] for call in calls] == ["now"]


def test_a_choice_as_other_apis_write_it_means_the_same():
    """Mistral's, Anthropic's, and that of responses."""
    required = ToolChoice(TOOLS, TOOLS)
    for choice in ("any", {"type": "any"}, {"type": "required"}):
        assert tool_choice_of(TOOLS, choice) == required
    assert tool_choice_of(TOOLS, {"type": "auto"}) == ToolChoice(TOOLS)
    assert tool_choice_of(TOOLS, {"type": "none"}) == ToolChoice()
    for kind in ("tool", "function"):
        assert tool_choice_of(TOOLS, {"type": kind, "name": "now"}) == ToolChoice(TOOLS, [NOW], is_named=True)


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("required", "`tools` must be set"),
        ({"type": "function", "function": {"name": "later"}}, "names the tool 'later'; tools has get_weather, now"),
        ({"type": "function"}, "tool_choice needs the name of a tool: give {type: function, function: {name: ...}}"),
        ({"type": "function", "function": {"name": 3}}, "tool_choice needs the name of a tool"),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function"}]}},
            "tool_choice.allowed_tools.tools[0] needs the name of a tool",
        ),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, "allowed_tools must be"),
        ("maybe", "tool_choice must be none, auto, required"),
    ],
)
def test_a_choice_that_cannot_be_is_refused_by_name(client: httpx.Client, choice, words):
    tools = None if choice == "required" else TOOLS
    response = client.post(CHAT, json=body_of("x", tools=tools, tool_choice=choice))
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]
    assert response.json()["error"]["param"].startswith("tool_choice")


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "required": ["a"]}}},
    ],
)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_a_call_that_must_come_wins_over_the_form_of_a_text(client: httpx.Client, form, choice):
    """As with OpenAI, whose response_format is about the answer's text."""
    body = body_of("hm", tools=[NOW], stop=None, tool_choice=choice, response_format=form, parallel_tool_calls=False)
    (found,) = ask(client, CHAT, **body)["choices"]
    assert [each["function"] for each in found["message"]["tool_calls"]] == [{"name": "now", "arguments": "{}"}]
    refused = client.post(CHAT, json=body_of("hm", tool_choice=choice, structured_outputs={"regex": "a"}, stop=None))
    assert refused.json()["error"]["param"] == "tool_choice"
