"""What no model can answer is refused by each API's official client in that API's own shape, by the field's name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ollama
import openai
import pytest
from http_server import serving
from null_with_tokenizer import PARROT
from thinned import every

STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) and m.role != 'system' %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{{ m.content }}{% endfor %}"
    '{# <tool_call> "arguments" #}'
)
"""As templates of Mistral and Gemma."""
NO_SCHEMA = {"type": "object", "properties": {"a": {"type": "nothing"}}}


class Api(NamedTuple):
    ask: Callable[..., Any]
    """Of a conversation, as (role, text), and of the tools and their choice as chat completions have them."""
    error: type[Exception]
    told: Callable[[Any], tuple[int, str, str | None]]
    """Of an error: the status, the message and the field, where the API's errors have one."""


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    arguments = ("--distributed-executor-backend", PARROT, "--chat-template", STRICT, "--max-model-len", "1024")
    with serving(*arguments) as server:
        yield server


@pytest.fixture(scope="module", params=["chat", "responses", "messages", "ollama"])
def api(server: Any, request: pytest.FixtureRequest) -> Iterator[Api]:
    import anthropic

    sdk = openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0)
    claude = anthropic.Anthropic(base_url=server.url, api_key="k", max_retries=0)
    local = ollama.Client(host=server.url)

    def messages(turns: Any) -> Any:
        return [{"role": role, "content": text} for role, text in turns]

    def chat(turns: Any, **more: Any) -> Any:
        return sdk.chat.completions.create(model="null", messages=messages(turns), max_tokens=9, **more)

    def responses(turns: Any, tools: Any = (), **more: Any) -> Any:
        flat: Any = [{"type": "function", **tool["function"]} for tool in tools]
        if isinstance(choice := more.get("tool_choice"), dict):
            more["tool_choice"] = {"type": "function", **choice["function"]}
        return sdk.responses.create(model="null", input=messages(turns), max_output_tokens=16, tools=flat, **more)

    def claude_messages(turns: Any, tools: Any = (), **more: Any) -> Any:
        own: Any = [{**tool["function"], "input_schema": tool["function"].get("parameters", {})} for tool in tools]
        for tool in own:
            tool.pop("parameters", None)
        if isinstance(choice := more.get("tool_choice"), dict):
            more["tool_choice"] = {"type": "tool", **choice["function"]}
        elif choice:
            more["tool_choice"] = {"type": "any"}
        return claude.messages.create(model="null", max_tokens=9, messages=messages(turns), tools=own, **more)

    def ollama_chat(turns: Any, **more: Any) -> Any:
        return local.chat("null", messages(turns), **more)

    with sdk, claude:
        yield {
            "chat": Api(chat, openai.BadRequestError, lambda e: (e.status_code, e.body["message"], e.param)),
            "responses": Api(responses, openai.BadRequestError, lambda e: (e.status_code, e.body["message"], e.param)),
            "messages": Api(
                claude_messages, anthropic.BadRequestError, lambda e: (e.status_code, e.body["error"]["message"], None)
            ),
            "ollama": Api(ollama_chat, ollama.ResponseError, lambda e: (e.status_code, e.error, None)),
        }[request.param]


def refusal(api: Api, *turns: tuple[str, str], **more: Any) -> tuple[str, str | None]:
    with pytest.raises(api.error) as caught:
        api.ask(turns, **more)
    status, message, param = api.told(caught.value)
    assert status == 400
    return message, param


def function(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_a_wrong_order_of_roles_is_refused_in_the_templates_words(api: Api, request: pytest.FixtureRequest) -> None:
    message, param = refusal(api, ("user", "a"), ("user", "b"))
    assert message == "the chat template refused these messages: roles must alternate user/assistant"
    assert param in (("input",) if "responses" in request.node.callspec.id else ("messages", None))


def test_a_choice_of_a_tool_that_is_not_there_names_it(api: Api, request: pytest.FixtureRequest) -> None:
    if "ollama" in request.node.callspec.id:
        pytest.skip("Ollama's API has no choice of tools")
    named = {"type": "function", "function": {"name": "later"}}
    message, param = refusal(api, ("user", "a"), tools=[function("now", {"type": "object"})], tool_choice=named)
    assert message == "tool_choice names the tool 'later'; tools has now"
    assert param in ("tool_choice", None)


def test_two_tools_of_one_name_are_refused_by_it(api: Api) -> None:
    twice = [function("now", {"type": "object"}), function("later", {"type": "object"})]
    message, param = refusal(api, ("user", "a"), tools=[*twice, twice[0]])
    assert message == "two tools are called 'now'"
    assert param in ("tools", None)


def test_a_schema_that_is_none_is_refused_where_a_call_must_follow_it(api: Api, request: pytest.FixtureRequest) -> None:
    if "ollama" in request.node.callspec.id:
        pytest.skip("Ollama's API forces no calls")
    message, param = refusal(api, ("user", "a"), tools=[function("now", NO_SCHEMA)], tool_choice="required")
    assert "nothing" in message
    assert "the tool now" in message or "the tool 'now'" in message
    assert param in ("tools", None)


def test_a_form_of_the_answer_that_is_no_schema_is_refused_by_the_apis_own_field(
    api: Api, request: pytest.FixtureRequest
) -> None:
    kind = request.node.callspec.id
    named: Any = {"name": "answer", "schema": NO_SCHEMA}
    forms: dict[str, Any] = {
        "chat": {"response_format": {"type": "json_schema", "json_schema": named}},
        "responses": {"text": {"format": {"type": "json_schema", **named}}},
        "messages": {"output_config": {"format": {"type": "json_schema", "schema": NO_SCHEMA}}},
        "ollama": {"format": NO_SCHEMA},
    }
    fields = {
        "chat": "response_format",
        "responses": "text.format",
        "messages": "output_config.format",
        "ollama": "format",
    }
    message, param = refusal(api, ("user", "a"), **forms[kind])
    assert "nothing" in message
    assert message.startswith(f"{fields[kind]}")
    assert param in (fields[kind], None)


def test_a_response_that_is_gone_is_a_404_by_name(server: Any) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as sdk:
        made = sdk.responses.create(model="null", input="a", max_output_tokens=16)
        sdk.responses.delete(made.id)
        for call in (
            lambda: sdk.responses.create(model="null", input="b", previous_response_id=made.id),
            lambda: sdk.responses.retrieve(made.id),
            lambda: sdk.responses.cancel(made.id),
            lambda: sdk.responses.input_items.list(made.id),
        ):
            with pytest.raises(openai.NotFoundError, match=made.id) as caught:
                call()
            assert caught.value.param in ("previous_response_id", "response_id")


OF_FUNCTIONS = ("parameters", "inputSchema", "input_schema", "parametersJsonSchema", "parameters_json_schema")
TURN = [{"role": "user", "content": "hi"}]


def in_function(tool: Any) -> Any:
    return {"type": "function", "function": tool}


@pytest.mark.parametrize(
    ("path", "own", "where", "body"),
    every(
        2,
        [
            ("/v1/chat/completions", "parameters", "tools[0].function.", lambda tool: {"tools": [in_function(tool)]}),
            ("/tokenize", "parameters", "tools[0].function.", lambda tool: {"tools": [in_function(tool)]}),
            (
                "/api/chat",
                "parameters",
                "tools[0].function.",
                lambda tool: {"tools": [in_function(tool)], "stream": False},
            ),
            ("/v1/responses", "parameters", "tools[0].", lambda tool: {"tools": [{"type": "function", **tool}]}),
            (
                "/v1/responses",
                "parameters",
                "tools[0].tools[0].",
                lambda tool: {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function", **tool}]}]},
            ),
            ("/v1/messages", "input_schema", "tools[0].", lambda tool: {"tools": [tool], "max_tokens": 9}),
            ("/v1/messages/count_tokens", "input_schema", "tools[0].", lambda tool: {"tools": [tool]}),
        ],
    ),
)
def test_a_schema_under_another_apis_name_is_refused(
    path: str, own: str, where: str, body: Callable[[Any], dict[str, Any]], server: Any
) -> None:
    """Otherwise the model is shown a function without parameters."""
    said = "input" if path == "/v1/responses" else "messages"

    def ask(**schema: Any) -> Any:
        with server.client() as client:
            return client.post(path, json={"model": "null", said: TURN, **body({"name": "f", **schema})})

    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    for name in OF_FUNCTIONS:
        answer = ask(**{name: schema})
        assert answer.status_code == (200 if name == own else 400), answer.text
        if name != own:
            named = own if own == "input_schema" else name
            assert f"{where}{named}" in answer.text
            assert own in answer.text
            also = ask(**{name: schema, own: None})
            assert also.status_code == 400, "null says nothing"
            assert f"{where}{named}" in also.text
            assert ask(**{name: schema, own: schema}).status_code == 200
    assert ask().status_code == (400 if own == "input_schema" else 200), "a function may have no parameters"
