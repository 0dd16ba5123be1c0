"""Anthropic's API: the official client's calls, whole and streamed, with tools and thinking; errors in its shape."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest
from http_server import serving
from null_with_tokenizer import PARROT
from pydantic import TypeAdapter
from thinned import every

from headrace.frontend.http.apis.anthropic.messages import NOT_SUPPORTED, MessagesRequest, as_chat

if TYPE_CHECKING:
    import anthropic  # which takes more than a second, of each process that collects tests

END = "STOPHERE"
TEMPLATE = (
    '{# <tool_call> "arguments" #}{% for m in messages %}{% if not loop.last %}[{{ m.role }}:{{ m.content }}'
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}]"
    "{% endif %}{% endfor %}{{ messages[-1]['content'] }}"
)
WEATHER: Any = {
    "name": "get_weather",
    "description": "of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Zürich"}}</tool_call>'
SAID = f"<think>hm</think>Sure.\n{CALL}"


@pytest.fixture(scope="module")
def server():
    """Of a model that says its last message, up to the stop string."""
    arguments = (
        "--chat-template",
        TEMPLATE,
        "--reasoning-parser",
        "qwen3",
        "--max-model-len",
        "1024",
        "--api-key",
        "k",
    )
    with serving("--distributed-executor-backend", PARROT, *arguments) as server:
        with server.client(headers={"x-api-key": "k"}) as client:
            # The engine's process that tries grammars stays.
            body = body_of("hm", tools=[WEATHER], tool_choice={"type": "any"})
            assert client.post("/v1/messages", json=body).status_code == 200
        yield server


@pytest.fixture
def client(server):
    import anthropic

    with anthropic.Anthropic(base_url=server.url, api_key="k", max_retries=0) as client:
        yield client


@contextlib.contextmanager
def parrot(template: str, *more: str) -> Iterator[anthropic.Anthropic]:
    """Of a server of its own."""
    import anthropic

    arguments = ("--distributed-executor-backend", PARROT, "--chat-template", template, "--max-model-len", "1024")
    with serving(*arguments, *more) as server, anthropic.Anthropic(base_url=server.url, api_key="k") as client:
        yield client


def prompt_tokens(usage: Any) -> int:
    """Anthropic counts them by where they come from."""
    return usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens


def body_of(said: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": said + END}]
    return {"model": "null", "messages": messages, "max_tokens": 200, "stop_sequences": [END], **more}


def test_an_answer_is_a_message_of_blocks(client):
    message = client.messages.create(**body_of(SAID, tools=[WEATHER]))
    thinking, text, call = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "hm")
    assert (text.type, text.text) == ("text", "Sure.")
    assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Zürich"})
    assert message.stop_reason == "tool_use"
    assert message.id.startswith("msg_")
    assert prompt_tokens(message.usage) > 10 < message.usage.output_tokens
    plain = client.messages.create(**body_of("hello"))
    assert [block.text for block in plain.content] == ["hello"]
    assert (plain.stop_reason, plain.stop_sequence) == ("stop_sequence", END)
    assert client.messages.create(**body_of("hello") | {"max_tokens": 2}).stop_reason == "max_tokens"


def test_the_clients_stream_helper_joins_the_same_message(client):
    whole = client.messages.create(**body_of(SAID, tools=[WEATHER]))
    with client.messages.stream(**body_of(SAID, tools=[WEATHER])) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
    unique = {"id"}
    assert [block.model_dump(exclude=unique) for block in streamed.content] == [
        block.model_dump(exclude=unique) for block in whole.content
    ]
    assert (streamed.stop_reason, streamed.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_a_budget_ends_the_thinking(client):
    thinking: Any = {"type": "enabled", "budget_tokens": len("<think>a l")}  # a token for each letter
    message = client.messages.create(**body_of("<think>a long thought", thinking=thinking, max_tokens=20))
    thought, text = message.content
    assert (thought.thinking, thought.type, text.type) == ("a l", "thinking", "text")
    assert message.usage.output_tokens_details.thinking_tokens == 3
    for free in ({"type": "adaptive"}, {"type": "disabled", "budget_tokens": 3}):
        message = client.messages.create(**body_of("<think>a long thought</think>x", thinking=free))
        assert message.content[0].thinking == "a long thought"


def test_a_budget_bounds_nothing_where_no_thinking_is_told():
    thinking: Any = {"type": "enabled", "budget_tokens": 3}
    with parrot("{{ messages[-1]['content'] }}") as client:
        message = client.messages.create(**body_of("<think>a long thought</think>x", thinking=thinking))
    assert [block.text for block in message.content] == ["<think>a long thought</think>x"]


@pytest.mark.parametrize("display", every(2, ["summarized", "omitted", "updates"]))
def test_thinking_comes_back_whether_the_client_has_seen_it_or_not(display):
    template = TEMPLATE.replace("{{ m.content }}", "({{ m.reasoning_content }}){{ m.content }}")
    thinking: Any = {"type": "adaptive", "display": display}
    asked = body_of("<think>hm</think>b", thinking=thinking)
    with parrot(template, "--reasoning-parser", "qwen3") as client:
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            kept = {"thinking", "signature", "text"}
            assert [block.model_dump(include=kept) for block in stream.get_final_message().content] == [
                block.model_dump(include=kept) for block in whole.content
            ]
        thought = whole.content[0]
        assert thought.thinking == ("hm" if display == "summarized" else "")
        assert thought.signature
        assert whole.usage.output_tokens_details.thinking_tokens == 2
        turns: Any = [
            {"role": "assistant", "content": [block.model_dump() for block in whole.content]},
            {"role": "user", "content": END},
        ]
        follows = client.messages.create(model="null", max_tokens=99, messages=turns, stop_sequences=[END])
    assert [block.text for block in follows.content] == ["[assistant:(hm)b]"]


def test_a_signature_of_others_is_no_obstacle(server):
    block = {"type": "thinking", "thinking": "", "signature": "EqQBCgIYAhIM1gbcDa9GJwZA2b3hGgxBdjrkzLoky3dl1pk="}
    asked: Any = body_of("x", messages=[{"role": "assistant", "content": [block, {"type": "text", "text": END}]}])
    with server.client(headers={"x-api-key": "k"}) as client:
        assert client.post("/v1/messages", json=asked).status_code == 200
        block["signature"] = "headrace:?"
        assert "signature is not as this server wrote it" in client.post("/v1/messages", json=asked).text


def test_conversations_with_tools_reach_the_template(client):
    """System, earlier calls and their results, thinking that is not repeated, and the count of all that."""
    messages: Any = [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": ""},
                {"type": "text", "text": "b"},
                {"type": "tool_use", "id": "1", "name": "get_weather", "input": {"city": "x"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "text", "text": END},
            ],
        },
    ]
    asked: Any = {"model": "null", "messages": messages, "system": [{"type": "text", "text": "s"}], "tools": [WEATHER]}
    message = client.messages.create(**asked, max_tokens=200, stop_sequences=[END])
    rendered = '[system:s][user:a][assistant:bget_weather{"city": "x"}][tool:sunny]'
    assert [block.text for block in message.content] == [rendered]
    assert client.messages.count_tokens(**asked).input_tokens == prompt_tokens(message.usage)


def test_a_tool_that_must_be_called_is(client):
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        message = client.messages.create(**body_of("hm", tools=[WEATHER], tool_choice=choice, stop_sequences=[]))
        if message.stop_reason != "max_tokens":
            assert message.stop_reason == "tool_use"
            assert [block.name for block in message.content if block.type == "tool_use"]


def test_a_call_that_a_stop_sequence_has_cut_is_no_use_of_a_tool(client):
    message = client.messages.create(**body_of(SAID[: SAID.index("rich")], tools=[WEATHER]))
    assert message.content[-1].type == "tool_use"
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", END)


def test_a_request_as_claude_code_sends_it_is_answered(client):
    """With what Anthropic's own service offers besides, which asks for nothing here."""
    cached = {"type": "ephemeral"}
    said = [{"type": "text", "text": SAID + END, "cache_control": cached}]
    message = client.beta.messages.create(
        model="null",
        max_tokens=300,
        system=[{"type": "text", "text": "You are helpful.", "cache_control": cached}],
        messages=[{"role": "user", "content": said}],
        tools=[{**WEATHER, "cache_control": cached, "eager_input_streaming": True}],
        metadata={"user_id": "u"},
        thinking={"type": "adaptive"},
        output_config={"effort": "high"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        cache_control=cached,
        betas=["context-management-2025-06-27"],
        stop_sequences=[END],
    )
    assert [block.type for block in message.content][1:] == ["thinking", "text", "tool_use"]  # the model says all
    count = client.beta.messages.count_tokens(
        model="null",
        messages=[{"role": "user", "content": "x"}],
        context_management={"edits": []},
        output_config={"effort": "low"},
    )
    assert count.input_tokens > 0


def test_the_answers_form_and_the_effort_are_those_of_chat_completions():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    config = {"effort": "low", "format": {"type": "json_schema", "schema": schema}}
    asked = msgspec.convert(body_of("x", output_config=config), MessagesRequest)
    chat = as_chat(asked)
    assert chat.reasoning_effort == "low"
    assert chat.response_format == {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def test_a_tools_examples_are_shown_with_its_schema():
    tool = {**WEATHER, "input_examples": [{"city": "Oslo"}], "defer_loading": True, "cache_control": None}
    (shown,) = as_chat(msgspec.convert(body_of("x", tools=[tool]), MessagesRequest)).tools or []
    schema = {**WEATHER["input_schema"], "examples": [{"city": "Oslo"}]}
    assert shown["function"] == {"name": "get_weather", "description": "of a city", "parameters": schema}


def test_a_tool_that_the_client_runs_by_its_type_is_shown_with_a_schema():
    """The types that the client's own types name, without those that Anthropic runs and the one that shows images."""
    tools: list[Any] = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 100},
        {"type": "memory_20250818", "name": "memory", "cache_control": {"type": "ephemeral"}},
    ]
    shown: Any = as_chat(msgspec.convert(body_of("x", tools=tools), MessagesRequest)).tools or []
    assert [each["function"]["name"] for each in shown] == [each["name"] for each in tools]
    for each in shown:
        assert each["function"]["description"]
        assert "command" in each["function"]["parameters"]["properties"]


def test_texts_in_blocks_of_other_kinds_reach_the_model():
    text = {"type": "text", "text": "b"}
    blocks: Any = [
        {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "a"}},
        {"type": "document", "context": "C", "source": {"type": "content", "content": [text]}},
        {"type": "search_result", "source": "https://x", "title": "R", "content": [text]},
    ]
    expected = ["T\na", "C\nb", "R\nhttps://x\nb"]
    ((role, content),) = texts_of({"role": "user", "content": blocks})
    assert (role, [each["text"] for each in content]) == ("user", expected)
    searched = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "mcp_tool_use", "id": "m", "name": "look", "server_name": "x", "input": {}},
        {"type": "mcp_tool_result", "tool_use_id": "m", "is_error": False, "content": [{"type": "text", "text": "y"}]},
        {"type": "text", "text": "found"},
    ]
    ((_, content),) = texts_of({"role": "assistant", "content": searched})
    assert [each["text"] for each in content] == ["found"], "Anthropic's servers did the rest"
    result = {"type": "tool_result", "tool_use_id": "1", "content": blocks}
    assert texts_of({"role": "user", "content": [result]}) == [("tool", "\n".join(expected))]


def test_every_field_of_the_clients_is_known():
    """A field that nobody knows is taken and does nothing: none of Anthropic's may be such a one by accident."""
    from anthropic.types import message_create_params as plain_params
    from anthropic.types.beta import message_create_params as beta_params

    kinds: Any = [beta_params.MessageCreateParamsBase, plain_params.MessageCreateParamsBase]
    fields = {name for kind in kinds for name in kind.__annotations__} - {"betas"}  # a header
    assert fields - set(MessagesRequest.__struct_fields__) - set(NOT_SUPPORTED) == set()


def with_result(content: Any) -> dict[str, Any]:
    """A body with what a tool gave."""
    return {
        "messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": content}]}]
    }


def with_change(kind: str, tool: Any) -> dict[str, Any]:
    """A body with a change of the tools."""
    return {"messages": [{"role": "system", "content": [{"type": kind, "tool": tool}]}]}


NESTED: list[Any] = [{"type": "text", "text": "a"}]
for _ in range(2):
    NESTED = [{"type": "document", "source": {"type": "content", "content": NESTED}}]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"tool_choice": {"type": "tool", "name": "x"}, "tools": [WEATHER]}, "names the tool 'x'"),
        ({"tool_choice": {"type": "tool"}, "tools": [WEATHER]}, "needs the name of a tool: give {type: tool, name"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "type 'image' is not supported",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text must be a text"),
        (with_result(2), "messages[0].content[0].content must be a text or a list of"),
        (with_result(0), "messages[0].content[0].content must be a text or a list of"),
        (with_result({}), "messages[0].content[0].content must be a text or a list of"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "Anthropic runs them"),
        ({"tools": [{"type": "computer_20250124", "name": "computer"}]}, "they show images"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]},
            "type 'document' is not supported",
        ),
        (with_result(NESTED), "content[0].content[0].source.content[0]: content of type 'document' is not supported"),
        ({"messages": []}, "messages is empty"),
        ({"container": "c"}, "container is refused: tools are run by the client"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers is refused"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format must be"),
        ({"output_config": {"effort": 3}}, "output_config.effort must be one of none, minimal, low"),
        ({"output_format": {"type": "json_schema"}}, "use output_config.format"),
        ({"thinking": {"type": "often"}}, "thinking.type must be one of enabled, adaptive"),
        ({"thinking": {"type": "enabled", "budget_tokens": "many"}}, "thinking.budget_tokens must be an integer"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens must be an integer"),
        ({"thinking": {"type": "adaptive", "display": "loud"}}, "thinking.display must be"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is required"),
        ({"messages": [{"role": "system"}]}, "messages[0].content is required"),
        ({"messages": [{"role": "user", "content": "x", "clear_at": "never"}]}, "messages[0].clear_at is a field of"),
        ({"messages": [{"role": "system", "content": "x", "clear_at": "soon"}]}, "messages[0].clear_at"),
        (
            {"messages": [{"role": "system", "output_config": {"effort": "some"}}]},
            "messages[0].output_config.effort must be one of",
        ),
        (with_change("tool_addition", {"type": "tool_reference"}), "messages[0].content[0].tool must be {type: tool_r"),
        (with_change("tool_removal", {"type": "tool_definition"}), "messages[0].content[0].tool must be {type: tool_r"),
        (
            with_change("tool_addition", {"type": "tool_definition", "definition": {"type": "custom"}}),
            "messages[0].content[0].tool.definition",
        ),
        (
            {
                "thinking": {"type": "enabled", "budget_tokens": 5},
                "tools": [WEATHER],
                "tool_choice": {"type": "any"},
            },
            "is not supported with a tool_choice that forces a call",
        ),
        ({"tools": [{**WEATHER, "input_schema": {"type": "nothing"}}], "tool_choice": {"type": "any"}}, "nothing"),
        ({"tools": [{**WEATHER, "input_schema": {"type": "nothing"}, "strict": True}]}, "nothing"),
        ({"tools": [{**WEATHER, "allowed_callers": ["code_execution_20260120"]}]}, "allowed_callers lacks direct"),
        ({"temperature": -1.0}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences = ['']"),
        ({"max_tokens": 0}, "max_tokens = 0: must be at least 1"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages: the prompt is empty"),
        (
            {"tools": [{**WEATHER, "input_schema": {"type": "array"}}], "tool_choice": {"type": "any"}},
            "are of type 'array'",
        ),
    ],
)
def test_bad_requests_are_refused_in_the_apis_own_shape(server, changes, words):
    with server.client(headers={"x-api-key": "k"}) as client:
        body = {name: value for name, value in {**body_of("x"), **changes}.items() if value is not None}
        answer = client.post("/v1/messages", json=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["type"] == "error"
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert words in answer.json()["error"]["message"]


def error_of(server: Any, **changes: Any) -> dict[str, Any]:
    from anthropic.types import ErrorResponse

    with server.client(headers={"x-api-key": "k"}) as client:
        answer = client.post("/v1/messages", json={**body_of("x"), **changes})
    assert answer.status_code == 400, answer.text
    ErrorResponse.model_validate(answer.json())
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_what_does_not_fit_the_context_is_told_in_the_words_that_agents_read(server):
    """By Claude Code's own patterns: it asks again with fewer tokens, or shortens the conversation."""
    from anthropic.types import Usage

    exceeds = re.compile(
        r"^input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+), decrease input "
    )
    found = exceeds.search(error_of(server, max_tokens=5000)["message"])
    assert found is not None
    num_prompt, num_new, limit = map(int, found.groups())
    assert (num_new, limit) == (5000, 1024)
    with server.client(headers={"x-api-key": "k"}) as client:
        answer = client.post("/v1/messages", json=body_of("x", max_tokens=limit - num_prompt))
        assert prompt_tokens(Usage.model_validate(answer.json()["usage"])) == num_prompt

    too_long = re.compile(r"^prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+) maximum$")
    for length in (1100, 2_000, 1_000_000):  # counted, and not even tokenised
        turns = [{"role": "user", "content": "ab " * length}]
        found = too_long.search(error_of(server, messages=turns)["message"])
        assert found is not None
        actual, most = map(int, found.groups())
        assert actual > most == 1023


def test_a_thread_is_refused_so_that_the_client_sends_the_whole_conversation(server):
    error = error_of(server, thread={"type": "continue", "previous_message_id": "msg_1"})
    assert error["details"] == {"error_code": "thread_unsupported_request"}
    assert "conversations are not kept" in error["message"]
    with server.client(headers={"x-api-key": "k"}) as client:
        body = {"messages": body_of("x")["messages"], "thread": {"type": "create"}}
        counted = client.post("/v1/messages/count_tokens", json=body)
    assert counted.json()["error"]["details"]["error_code"] == "thread_unsupported_request"


def test_tokens_are_counted_by_what_the_cache_had_and_has_now(client):
    first = client.messages.create(**body_of("a text that nobody has sent before: " + "0123456789 " * 20)).usage
    again = client.messages.create(**body_of("a text that nobody has sent before: " + "0123456789 " * 20)).usage
    longer = client.messages.create(**body_of("a text that nobody has sent before: " + "0123456789 " * 30)).usage
    assert first.cache_creation_input_tokens > 200
    assert 0 < first.input_tokens <= 16
    assert first.cache_read_input_tokens < 16
    whole = first.cache_creation_input_tokens + first.cache_read_input_tokens
    assert (again.cache_creation_input_tokens, again.cache_read_input_tokens) == (0, whole)
    assert again.input_tokens == first.input_tokens
    assert longer.cache_read_input_tokens > 200
    assert longer.cache_creation_input_tokens > 80
    with client.messages.stream(**body_of("a text that nobody has sent before: " + "0123456789 " * 20)) as stream:
        started = next(iter(stream))
    assert started.message.usage.cache_read_input_tokens == whole


def tools_of(*messages: Any, tools: Any = (), **more: Any) -> list[str]:
    """The names of the tools that the model is shown."""
    body = {**body_of("x"), "messages": list(messages), "tools": list(tools), **more}
    return [tool["function"]["name"] for tool in as_chat(msgspec.convert(body, MessagesRequest)).tools or ()]


def named(name: str, **more: Any) -> dict[str, Any]:
    return {**WEATHER, "name": name, **more}


def changed(kind: str, name: str) -> dict[str, Any]:
    return {"role": "system", "content": [{"type": kind, "tool": {"type": "tool_reference", "name": name}}]}


ASKED: Any = {"role": "user", "content": "x"}
FOUND: Any = {
    "role": "user",
    "content": [
        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "tool_reference", "tool_name": "later"}]}
    ],
}


def test_the_tools_in_force_at_the_end_are_shown():
    tools = [named("now"), named("later", defer_loading=True)]
    assert tools_of(ASKED, tools=tools) == ["now"]
    assert tools_of(ASKED, tools=tools[1:]) == ["later"], "nothing could find it"
    assert tools_of(FOUND, ASKED, tools=tools) == ["now", "later"]
    assert tools_of(ASKED, changed("tool_addition", "later"), tools=tools) == ["now", "later"]
    assert tools_of(ASKED, changed("tool_removal", "now"), tools=tools) == []
    both = (changed("tool_removal", "now"), ASKED, changed("tool_addition", "now"))
    assert tools_of(*both, tools=tools) == ["now"]
    definition: Any = {"type": "tool_definition", "definition": named("new")}
    new = {"role": "system", "content": [{"type": "tool_addition", "tool": definition}]}
    assert tools_of(new, ASKED, tools=tools) == ["now", "new"]
    assert tools_of(new, changed("tool_removal", "new"), tools=tools) == ["now"]
    assert tools_of(ASKED, tools=tools, tool_choice={"type": "tool", "name": "later"}) == ["now", "later"]
    assert tools_of(FOUND, ASKED, tools=[tools[1], tools[0]]) == ["now", "later"], "those before are a cached prefix"


@pytest.mark.parametrize(
    "messages", [[FOUND], [ASKED, changed("tool_addition", "later")], [changed("tool_removal", "x")]]
)
def test_a_tool_that_nothing_defines_is_not_resolved(server, messages):
    error = error_of(server, messages=messages, tools=[named("now")])
    assert error["details"] == {"error_code": "tool_reference_unresolved"}
    assert "which is not defined before" in error["message"]


def test_a_tool_that_was_found_is_named_in_the_result():
    chat = as_chat(msgspec.convert({**body_of("x"), "messages": [FOUND], "tools": [named("later")]}, MessagesRequest))
    assert [(each.role, each.content) for each in chat.messages] == [("tool", "The tool later can be called now.")]


def texts_of(*messages: Any, **more: Any) -> list[tuple[str, Any]]:
    chat = as_chat(msgspec.convert({**body_of("x"), "messages": list(messages), **more}, MessagesRequest))
    return [(each.role, each.content) for each in chat.messages]


def test_a_system_message_for_one_turn_is_left_out_of_later_ones():
    once = {"role": "system", "content": "s", "clear_at": "next_user_message"}
    kept = {"role": "system", "content": "t", "clear_at": "never"}
    assert texts_of(ASKED, once) == [("user", "x"), ("system", "s")]
    assert texts_of(ASKED, once, kept, ASKED) == [("user", "x"), ("system", "t"), ("user", "x")]


def test_the_effort_of_a_system_message_holds_for_its_turn():
    low: Any = {"role": "system", "output_config": {"effort": "low"}}
    cases = [([ASKED, low], "low"), ([ASKED, low, FOUND], "low"), ([ASKED, low, ASKED], "high"), ([ASKED], "high")]
    for messages, effort in cases:
        body = {**body_of("x"), "messages": messages, "output_config": {"effort": "high"}, "tools": [named("later")]}
        assert as_chat(msgspec.convert(body, MessagesRequest)).reasoning_effort == effort


def test_what_an_agent_tells_anthropics_service_before_its_system_prompt_defeats_no_cache(client):
    """It changes at each request: the cached prefix would end there."""
    prompt = "You are an agent that nobody has been before. " + "Be brief. " * 20
    reads = []
    for hash in ("fa690", "36ee5"):
        line = f"x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={hash};"
        system: Any = [{"type": "text", "text": line}, {"type": "text", "text": prompt}]
        message = client.messages.create(**body_of("x", system=system, max_tokens=400))
        assert [block.text for block in message.content] == [f"[system:{prompt}]x"]
        reads.append(message.usage.cache_read_input_tokens)
    assert reads[0] < 16
    assert reads[1] > 100


def test_models_are_told_to_anthropics_clients_in_their_own_types(client):
    import anthropic
    from anthropic.types import ErrorResponse, ModelInfo

    (model,) = client.models.list()
    assert ModelInfo.model_validate(model.to_dict(), strict=False) == client.models.retrieve("null")
    assert (model.id, model.display_name, model.type, model.max_input_tokens) == ("null", "null", "model", 1024)
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.models.retrieve("later")
    ErrorResponse.model_validate(caught.value.body)


def test_a_wrong_key_is_an_authentication_error(server):
    import anthropic

    with anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0) as client:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            client.messages.create(**body_of("x"))
        assert caught.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]


def test_events_are_named_and_there_is_no_other_end(server):
    with server.client(headers={"x-api-key": "k"}) as client:
        text = client.post("/v1/messages", json=body_of("hi", stream=True)).text
    events = [part.split("\n", 1) for part in text.strip().split("\n\n")]
    for name, data in events:
        assert json.loads(data.removeprefix("data: "))["type"] == name.removeprefix("event: ")
    assert events[-1][0] == "event: message_stop"


def test_answers_events_and_errors_are_of_the_clients_own_types(server):
    from anthropic.types import ErrorResponse, Message, MessageTokensCount, RawMessageStreamEvent

    event: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    with server.client(headers={"x-api-key": "k"}) as client:
        whole = client.post("/v1/messages", json=body_of(SAID, tools=[WEATHER])).json()
        text = client.post("/v1/messages", json=body_of(SAID, tools=[WEATHER], stream=True)).text
        counted = client.post("/v1/messages/count_tokens", json={"messages": body_of("x")["messages"]}).json()
        refused = client.post("/v1/messages", json=body_of("x", temperature=-1)).json()
    assert [block.type for block in Message.model_validate(whole, strict=True).content] == [
        "thinking",
        "text",
        "tool_use",
    ]
    told = [json.loads(part.split("data: ", 1)[1]) for part in text.strip().split("\n\n")]
    assert {type(event.validate_python(each)).__name__ for each in told} == {
        "RawMessageStartEvent",
        "RawContentBlockStartEvent",
        "RawContentBlockDeltaEvent",
        "RawContentBlockStopEvent",
        "RawMessageDeltaEvent",
        "RawMessageStopEvent",
    }
    MessageTokensCount.model_validate(counted, strict=True)
    ErrorResponse.model_validate(refused)


def test_openais_routes_keep_their_own_errors(server):
    answer = httpx.post(f"{server.url}/v1/chat/completions", json={}, headers={"x-api-key": "k"})
    assert answer.json()["error"]["param"] == "messages"
