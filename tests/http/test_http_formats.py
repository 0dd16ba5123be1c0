"""A real server answers in every format, as the families write them: whole, and as deltas that join to the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from family_answers import CALLS, PLAIN, TOOLS, WAYS, Way
from http_server import ask, serving, stream
from thinned import every, thinned

from headrace.frontend.text.formats.declaration import format_of_template, load_format

CHAT = "/v1/chat/completions"
SAYS_ITS_PROMPT = ("--distributed-executor-backend", "null_with_tokenizer:EchoExecutor", "--max-model-len", "4096")
SAID = [PLAIN, *CALLS["quotes and lines"], *CALLS["nested"]]
THOUGHT = "First I think.\nThen {act}."
MARKED = [way for way in WAYS if load_format(way.format).template_marks]
"""A chat template speaks for these."""
OTHERS = {way.format: way for way in WAYS if way not in MARKED}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    """Of a server that looks for the format in each request's own template."""
    finds = ("--trust-request-chat-template", "--reasoning-parser", "auto")
    with serving(*SAYS_ITS_PROMPT, *finds) as server, server.client() as client:
        yield client


def check(client: httpx.Client, way: Way, thinks: tuple[str, str] | None, **more: Any) -> None:
    calls = SAID[:1] if way.format == "gigachat3" else SAID
    begin, end = thinks or ("", "")
    said = way.write(calls) if thinks is None else f"{begin}{THOUGHT}{end}{way.write(calls)}"
    body = {"messages": [{"role": "user", "content": said}], "tools": TOOLS, "max_tokens": 2500, **more}
    (choice,) = ask(client, CHAT, **body)["choices"]
    whole = choice["message"]
    made = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in whole["tool_calls"]]
    assert (made, (whole["reasoning"] or "").strip()) == (calls, THOUGHT if thinks else "")
    assert not (whole["content"] or "").strip()

    events = [event["choices"][0] for event in stream(client, CHAT, {**body, "stream_interval": 1}) if event["choices"]]
    deltas = [event["delta"] for event in events]
    for name in ("content", "reasoning"):
        assert "".join(delta.get(name) or "" for delta in deltas) == (whole[name] or ""), name
    parts = [part for delta in deltas for part in delta.get("tool_calls") or ()]
    for index, call in enumerate(whole["tool_calls"]):
        own = [part["function"].get("arguments", "") for part in parts if part["index"] == index]
        assert "".join(own) == call["function"]["arguments"]
    assert (events[-1]["finish_reason"], choice["finish_reason"]) == ("tool_calls", "tool_calls")


@pytest.mark.parametrize("way", every(4, MARKED), ids=[f"{way.format}-{place}" for place, way in enumerate(MARKED)])
def test_the_format_that_a_template_speaks_for_is_answered(client, way):
    marks = " ".join(load_format(way.format).template_marks)
    if load_format(way.format).reasoning is None and way.thinks:
        marks += "".join(load_format(way.reasoning).template_marks)
    template = "{# " + marks + " #}{{ messages[-1]['content'] }}"
    found = format_of_template(template)
    assert found is not None
    assert load_format(found) == load_format(way.format)
    check(client, way, way.thinks if load_format(way.format).reasoning else None, chat_template=template)


def test_a_strict_tool_needs_a_format_to_be_held_to(client):
    """Where the model decides; nothing could keep the promise that its calls fit the schema."""
    function = {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {}}}
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    tools = [{"type": "function", "function": function}]
    template = "{{ messages[-1]['content'] }}"
    for markers in ("", "<|channel|> <|message|> analysis"):  # which this tokenizer lacks as tokens
        given = {**body, "chat_template": f"{{# {markers} #}}{template}", "tools": tools}
        answer = client.post(CHAT, json=given)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools"), answer.text
        assert "a tool has `strict`, and nothing can hold calls to its schema" in answer.json()["error"]["message"]
        for free in ({"tool_choice": "none"}, {"tools": [{"type": "function", "function": {"name": "f"}}]}):
            ask(client, CHAT, **{**given, **free})


@pytest.mark.parametrize("name", thinned(OTHERS, ("pythonic", "hunyuan_a13b").__contains__))
def test_a_format_that_no_template_speaks_for_is_answered_where_it_is_named(name):
    template = "{{ messages[-1]['content'] }}"
    thinks = OTHERS[name].thinks if load_format(name).reasoning else None
    parsers = ("--tool-call-parser", name, *(("--reasoning-parser", name) if thinks else ()))
    with serving(*SAYS_ITS_PROMPT, "--chat-template", template, *parsers) as server, server.client() as client:
        check(client, OTHERS[name], thinks)
