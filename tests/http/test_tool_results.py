"""Images and files in tools' results: a model that reads text alone is told of them, on every route with tools."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from server_here import ServerHere, serving_here
from thinned import every

from headrace.frontend.http.options import ServeOptions

CALL = {"name": "look", "arguments": "{}"}
INSTEAD = "[The tool gave {} here, which you cannot see: you read text alone.]"
SOURCE = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerHere]:
    with serving_here(ServeOptions(port=0, tool_call_parser="hermes"), {"max_model_len": 512}) as server:
        yield server


def chat(result: list[Any], asked: Any = "look") -> tuple[str, dict[str, Any]]:
    called = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": CALL}]}
    given = {"role": "tool", "tool_call_id": "c", "content": result}
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": asked}, called, given], "max_tokens": 1}


def messages(result: list[Any], asked: Any = "look") -> tuple[str, dict[str, Any]]:
    used = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]}
    given = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": result}]}
    return "/v1/messages", {"messages": [{"role": "user", "content": asked}, used, given], "max_tokens": 1}


def responses(result: list[Any], asked: Any = "look") -> tuple[str, dict[str, Any]]:
    given = {"type": "function_call_output", "call_id": "c", "output": result}
    called = {"type": "function_call", "call_id": "c", **CALL}
    return "/v1/responses", {"input": [{"role": "user", "content": asked}, called, given], "max_output_tokens": 1}


IMAGE_URL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}


@pytest.mark.parametrize(
    ("ask", "text", "part", "what"),
    every(2, [
        (chat, "text", IMAGE_URL, "an image"),
        (chat, "text", {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "a recording"),
        (chat, "text", {"type": "file", "file": {"file_data": "x"}}, "a file"),
        (messages, "text", {"type": "image", "source": SOURCE}, "an image"),
        (messages, "text", {"type": "document", "source": {**SOURCE, "media_type": "application/pdf"}}, "a file"),
        (responses, "input_text", {"type": "input_image", "image_url": "data:,"}, "an image"),
        (responses, "input_text", {"type": "input_file", "file_data": "x"}, "a file"),
    ]),
)  # fmt: skip
def test_an_image_that_a_tool_gave_is_named_to_the_model_and_ends_no_conversation(server, ask, text, part, what):
    """A coding agent that has read a screenshot sends it with every later turn."""
    said = {"type": text, "text": "shot.png:"}
    prompts = []
    with server.client() as client:
        for last in (part, {"type": text, "text": INSTEAD.format(what)}):
            path, body = ask([said, last])
            answer = client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            prompts.append(bytes(server.requests()[-1].prompt_token_ids.data))
        assert prompts[0] == prompts[1]
        path, body = ask([said], [part])  # the user's own: an answer would look as if it had been seen
        assert client.post(path, json=body).status_code == 400


@pytest.mark.parametrize("part", [{"type": "hologram"}, {"type": "text"}, {"type": 3}, {}, 3])
@pytest.mark.parametrize("ask", [chat, messages, responses])
def test_other_parts_of_a_result_are_refused_as_before(server, ask, part):
    with server.client() as client:
        path, body = ask([part])
        assert client.post(path, json=body).status_code == 400
