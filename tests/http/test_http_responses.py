"""OpenAI's Responses API by its official client: whole, streamed, stored, followed, in the background; and every
response and event is what the client's own types say."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from http_server import Server, serving
from null_with_tokenizer import PARROT
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from patience import wait_until
from pydantic import BaseModel, TypeAdapter
from thinned import every

from headrace.frontend.http.apis.openai.bodies import TokenLogprob
from headrace.frontend.http.apis.responses.conversation import as_chat
from headrace.frontend.http.apis.responses.requests import ResponsesRequest
from headrace.frontend.http.apis.responses.run import TurnAnswer
from headrace.frontend.http.server.decoding.decoder import RequestDecoder

END = "STOPHERE"
TEMPLATE = (
    '{# <tool_call> "arguments" #}{% for m in messages %}{% if not loop.last %}[{{ m.role }}:'
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}]"
    "{% endif %}{% endfor %}{{ messages[-1]['content'] }}"
)
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "of a city",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Zürich"}}</tool_call>'
SAID = f"<think>hm</think>Sure.\n{CALL}"
ARGUMENTS = (
    *("--distributed-executor-backend", PARROT, "--chat-template", TEMPLATE),
    *("--reasoning-parser", "qwen3", "--max-model-len", "1024"),
)
ALLOWED: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_weather"}]}
ASKED: Any = [{"role": "user", "content": END}]
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def server():
    """Of a model that says its last message, up to the stop string."""
    with serving(*ARGUMENTS, "--api-key", "k", "--api-key", "other", "--response-store-bytes", "30000") as server:
        with server.client(headers={"authorization": "Bearer k"}) as client:
            # The engine's process that tries grammars stays.
            tried = client.post("/v1/responses", json=body_of("hm", tools=[WEATHER], tool_choice="required"))
            assert tried.status_code == 200, tried.text
        yield server


@pytest.fixture
def client(server):
    with client_of(server) as client:
        yield client


def client_of(server: Server, key: str = "k") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def body_of(said: str, **more: Any) -> dict[str, Any]:
    extra = {"extra_body": {"stop": [END]}} if "extra" in more else {"stop": [END]}
    more.pop("extra", None)
    return {"model": "null", "input": said + END, "max_output_tokens": 200, **extra, **more}


def ask(client: openai.OpenAI, said: str, **more: Any) -> Response:
    response = client.responses.create(**body_of(said, extra=True, **more))
    return Response.model_validate(response.to_dict(), strict=True)


def raw_events(server: Server, **body: Any) -> list[dict[str, Any]]:
    with httpx.Client(base_url=server.url, headers={"authorization": "Bearer k"}, timeout=30) as client:
        answer = client.post("/v1/responses", json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    return events_in(answer.text)


def events_in(text: str) -> list[dict[str, Any]]:
    """Checked against the client's types, with the names and numbers that they come under."""
    events = []
    for part in text.strip().split("\n\n"):
        name, data = part.split("\n", 1)
        events.append(json.loads(data.removeprefix("data: ")))
        assert events[-1]["type"] == name.removeprefix("event: ")
        EVENT.validate_python(events[-1])
    numbers = [event["sequence_number"] for event in events]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    return events


def test_a_response_has_items_of_reasoning_text_and_calls(client):
    response = ask(client, SAID, tools=[WEATHER], metadata={"a": "b"}, user="me")
    reasoning, message, call = response.output
    assert [part.text for part in reasoning.content] == ["hm"]
    assert [part.text for part in message.content] == [response.output_text]
    assert response.output_text == "Sure."
    assert (call.name, json.loads(call.arguments), call.status) == ("get_weather", {"city": "Zürich"}, "completed")
    assert call.call_id.startswith("call_")
    assert (response.status, response.user, response.metadata) == ("completed", "me", {"a": "b"})
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    assert ask(client, "hello").output_text == "hello"


def test_the_reasoning_is_left_out_where_a_request_says_so(server, client):
    hidden: Any = {"include_reasoning": False}
    response = ask(client, SAID, tools=[WEATHER], extra_body={"stop": [END], **hidden})
    assert [item.type for item in response.output] == ["message", "function_call"]
    assert response.output_text == "Sure."
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens > 0, "it was written all the same"
    logged = {"include": ["message.output_text.logprobs"], "stop": [END]}
    events = raw_events(server, model="null", input=SAID + END, tools=[WEATHER], **logged, **hidden)
    assert not any("reasoning" in event["type"] for event in events)
    shown = raw_events(server, model="null", input=SAID + END, tools=[WEATHER], **logged, include_reasoning=True)
    assert any("reasoning" in event["type"] for event in shown)
    last = [[each for each in told if each["type"] == "response.output_text.done"][-1] for told in (events, shown)]
    assert [each["token"] for each in last[0]["logprobs"]] == [each["token"] for each in last[1]["logprobs"]]
    cut = client.responses.create(**body_of("<think>hm", extra_body={"stop": [END], **hidden}, extra=True))
    assert not any(item.type == "reasoning" for item in cut.output)


def test_an_answer_that_was_cut_off_is_incomplete_and_one_without_text_is_an_empty_message(client):
    response = ask(client, SAID, max_output_tokens=4)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert [item.status for item in response.output] == ["incomplete"]
    empty = ask(client, "")
    assert (empty.output_text, [item.type for item in empty.output]) == ("", ["message"])


def test_events_add_up_to_the_response(server):
    events = raw_events(server, **body_of(SAID, tools=[WEATHER]))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"]
    assert kinds[-1] == "completed"
    assert kinds.count("output_item.added") == kinds.count("output_item.done") == 3
    assert kinds.count("content_part.added") == kinds.count("content_part.done") == 2
    final = events[-1]["response"]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == final["output"]
    for kind, item in (("reasoning_text", 0), ("output_text", 1), ("function_call_arguments", 2)):
        own = [event for event in events if event["type"].startswith(f"response.{kind}.")]
        assert {(event["item_id"], event["output_index"]) for event in own} == {(final["output"][item]["id"], item)}
        told = "".join(event["delta"] for event in own[:-1])
        assert told == own[-1]["arguments" if kind == "function_call_arguments" else "text"]
        assert own[-1]["type"].endswith(".done")
    assert "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta") == "Sure."


def test_the_clients_stream_helper_gives_the_same_as_the_whole(client):
    ask(client, SAID, tools=[WEATHER])  # so that both find the same of their prompt cached
    whole = ask(client, SAID, tools=[WEATHER])
    with client.responses.stream(**body_of(SAID, extra=True, tools=[WEATHER])) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds
    unique = {"id", "call_id", "parsed_arguments", "parsed"}
    assert [without(item.to_dict(), unique) for item in streamed.output] == [
        without(item.to_dict(), unique) for item in whole.output
    ]
    assert streamed.usage == whole.usage


def without(value: Any, names: set[str]) -> Any:
    if isinstance(value, dict):
        return {name: without(each, names) for name, each in value.items() if name not in names}
    return [without(each, names) for each in value] if isinstance(value, list) else value


def test_tokens_are_counted_without_an_answer(client):
    asked: Any = {"model": "null", "input": "how long", "tools": [WEATHER], "instructions": "be brief"}
    response = client.responses.create(**asked, max_output_tokens=1)
    assert client.responses.input_tokens.count(**asked).input_tokens == response.usage.input_tokens
    longer = client.responses.input_tokens.count(model="null", input="and " * 9, previous_response_id=response.id)
    assert longer.input_tokens > response.usage.input_tokens


def test_a_response_follows_another(server, client):
    first = ask(client, "one", instructions="never repeated")
    second = ask(client, "two", previous_response_id=first.id)
    third = ask(client, "", previous_response_id=second.id, instructions="now")
    assert second.output_text == "[user:one"  # it says its prompt up to the stop string
    assert third.output_text == "[system:now][user:one"
    assert second.previous_response_id == first.id
    assert third.usage is not None
    said = f"[system:now][user:one{END}][assistant:{first.output_text}][user:two{END}][assistant:[user:one]{END}"
    tokens = httpx.post(f"{server.url}/tokenize", json={"prompt": said}, headers={"authorization": "Bearer k"}).json()
    assert third.usage.input_tokens == tokens["count"], "all turns, and the instructions of none but the last"


def test_items_of_an_earlier_turn_reach_the_template(client):
    items: Any = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}]},
        {"type": "function_call", "call_id": "1", "name": "get_weather", "arguments": '{"city": "x"}'},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "sunny"}]},
        {"role": "user", "content": END},
    ]
    response = ask(client, "", input=items, instructions="i", tools=[WEATHER])
    assert response.output_text == '[system:i\n\nd][user:a][assistant:(t)bget_weather{"city": "x"}][tool:sunny]'
    stored = client.responses.input_items.list(response.id, order="asc", limit=3)
    assert [item.type for item in stored.data] == ["message", "message", "reasoning"]
    assert stored.has_more
    rest = client.responses.input_items.list(response.id, order="asc", after=stored.data[-1].id)
    assert [item.type for item in rest.data] == ["message", "function_call", "function_call_output", "message"]
    ResponseItemList.model_validate(stored.model_dump(), strict=True)


def test_a_choice_of_a_tool_as_chats_write_it_means_the_same():
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice, expected in ((named, named), ({"type": "auto"}, "auto"), ({"type": "required"}, "required")):
        body = {"input": "x", "tools": [WEATHER], "tool_choice": choice}
        request = RequestDecoder(strict=True).decode(json.dumps(body).encode(), ResponsesRequest)
        assert as_chat(request, [], [WEATHER]).tool_choice == expected


def test_a_conversation_that_another_model_began_is_read(client):
    """With calls of tools that OpenAI's models know, which clients run, and with what OpenAI's servers did."""
    run = {"type": "exec", "command": ["ls"], "env": {}}
    items: Any = [
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"type": "local_shell_call", "id": "l", "call_id": "1", "status": "completed", "action": run},
        {"type": "local_shell_call_output", "id": "o", "call_id": "1", "output": "a.txt"},
        {"type": "shell_call", "call_id": "2", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "call_id": "2", "output": [{"stdout": "b", "stderr": ""}]},
        {"type": "apply_patch_call", "call_id": "3", "operation": {"type": "delete_file", "path": "c"}},
        {"type": "apply_patch_call_output", "call_id": "3", "status": "completed"},
        {"role": "user", "content": END},
    ]
    said = ask(client, "", input=items, max_output_tokens=400).output_text
    assert said.startswith('[assistant:local_shell{"type": "exec", "command": ["ls"], "env": {}}][tool:a.txt]')
    assert '[assistant:shell{"commands": ["ls"]}][tool:[{"stdout":"b","stderr":""}]]' in said
    assert said.endswith('apply_patch{"type": "delete_file", "path": "c"}][tool:completed]')


def test_a_call_that_a_stop_string_has_cut_is_incomplete(client):
    (call,) = ask(client, CALL[: CALL.index("rich")], tools=[WEATHER]).output
    assert (call.type, call.status, call.arguments) == ("function_call", "incomplete", '{"city": "Zü')
    tools = [{**WEATHER, "strict": False}]
    hidden = ask(client, CALL + CALL[: CALL.index("rich")], tools=tools, parallel_tool_calls=False)
    assert [(call.type, call.status) for call in hidden.output] == [("function_call", "completed")]


def test_the_output_of_a_call_that_nobody_made_is_refused(client):
    """Also of one that a response has made which this one does not follow."""
    first = ask(client, CALL, tools=[WEATHER])
    (call,) = first.output
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    custom: Any = {**output, "type": "custom_tool_call_output"}
    assert ask(client, "", input=[output, *ASKED], previous_response_id=first.id).status == "completed"
    assert ask(client, "", input=[call.to_dict(), output, *ASKED]).output_text.endswith("[tool:sunny]")
    for each, kind in ((output, "function call"), (custom, "custom tool call")):
        with pytest.raises(openai.BadRequestError, match=f"No tool call found for {kind} output with call_id call_"):
            ask(client, "", input=[each])
        with pytest.raises(openai.BadRequestError, match="No tool call found"):
            client.responses.input_tokens.count(input=[each], model="null")


def refer(id: str) -> Any:
    return {"type": "item_reference", "id": id}


def test_a_tool_loop_refers_to_its_stored_items(server, client):
    """As the AI SDK's default provider does: what the server has stored is not sent again."""
    said = {"role": "user", "content": [{"type": "input_text", "text": SAID + END}]}
    first = ask(client, "", input=[said], tools=[WEATHER])
    thought, message, call = first.output
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    turns: Any = [said, refer(thought.id), refer(message.id), refer(call.id), result, *ASKED]
    second = ask(client, "", input=turns, tools=[WEATHER])
    told = f'[user:{SAID}{END}][assistant:(hm)Sure.get_weather{{"city": "Zürich"}}][tool:sunny]'
    tokens = client.responses.input_tokens.count(model="null", input=turns, tools=[WEATHER])
    assert second.usage is not None
    assert tokens.input_tokens == second.usage.input_tokens
    body, key = {"prompt": told + END, "add_special_tokens": False}, {"authorization": "Bearer k"}
    assert httpx.post(f"{server.url}/tokenize", json=body, headers=key).json()["count"] == second.usage.input_tokens
    kept = client.responses.input_items.list(second.id, order="asc").data
    assert [item.type for item in kept] == [
        *("message", "reasoning", "message", "function_call", "function_call_output", "message")
    ]
    # An item of an input, by its id alone; one that the conversation has already is not told twice.
    twice = ask(client, "", input=[{"id": kept[0].id}, refer(kept[0].id), *ASKED])
    assert twice.output_text.startswith("[user:Sure.")
    assert len(client.responses.input_items.list(twice.id).data) == 2
    follows = ask(client, "", input=[refer(thought.id), refer(call.id), result, *ASKED], previous_response_id=first.id)
    assert follows.usage is not None
    assert follows.usage.input_tokens == second.usage.input_tokens


def test_a_reference_to_an_item_that_is_not_stored_is_refused(server, client):
    unstored = ask(client, "<think>hm</think>yes", store=False).output[0]
    stored = ask(client, "<think>hm</think>yes")
    with client_of(server, "other") as other:
        for asker, id in ((client, unstored.id), (other, stored.output[0].id), (client, "rs_nowhere")):
            with pytest.raises(openai.NotFoundError, match=f"Item with id '{id}' not found. Items are not persisted"):
                ask(asker, "", input=[refer(id), *ASKED])
            with pytest.raises(openai.NotFoundError, match="not found"):
                asker.responses.input_tokens.count(model="null", input=[refer(id)])
    client.responses.delete(stored.id)
    with pytest.raises(openai.NotFoundError, match="not found"):
        ask(client, "", input=[refer(stored.output[0].id), *ASKED])
    with pytest.raises(openai.BadRequestError, match=r"input\[0\].id must be a text"):
        ask(client, "", input=[{"type": "item_reference"}])


def test_reasoning_without_an_answer_reaches_the_template(client):
    """tests/entrypoints/openai/responses/test_simple.py of vLLM: an earlier turn that was cut off within it."""
    thought = {"type": "reasoning", "id": "lol", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]}
    response = ask(client, "", input=[{"role": "user", "content": "a"}, thought, {"role": "user", "content": END}])
    assert response.output_text == "[user:a][assistant:(t)]"


def test_reasoning_comes_back_as_its_encrypted_content(client):
    response = ask(client, "<think>hm</think>yes", include=["reasoning.encrypted_content"], store=False)
    reasoning = response.output[0].to_dict()
    del reasoning["content"]
    again_asked = [{"role": "assistant", "content": "x"}, {"role": "user", "content": END}]
    assert ask(client, "", input=[reasoning, *again_asked]).output_text == "[assistant:(hm)x]"
    for others in ("?", "gAAAAABoISQ24OyVRYbkYfukdJoqdzWT-3uiErKInHDC-lgAaXeky44N77j7aibc2elHISjAvX7OmUwM"):
        turns = [{**reasoning, "encrypted_content": others}, *again_asked]
        assert ask(client, "", input=turns).output_text == "[assistant:x]", "another server's cannot be read"
    with pytest.raises(openai.BadRequestError, match="encrypted_content must be a text"):
        ask(client, "", input=[{**reasoning, "encrypted_content": 5}])


def test_what_a_stored_response_is_to_include_is_read_as_at_its_creation(client):
    include: Any = ["reasoning.encrypted_content", "message.output_text.logprobs"]
    response = ask(client, "<think>hm</think>yes")
    assert response.output[0].encrypted_content is None
    read = client.responses.retrieve(response.id, include=include)
    again = ask(client, "", input=[read.output[0].to_dict(exclude_unset=True) | {"content": []}, *ASKED])
    assert again.output_text == "[assistant:(hm)]"
    items = client.responses.input_items.list(again.id, include=include, order="asc").data
    assert items[0].encrypted_content == read.output[0].encrypted_content
    for refuse in (client.responses.retrieve, client.responses.input_items.list):
        with pytest.raises(openai.BadRequestError, match=r"include\[0\] is 'all'; known:"):
            refuse(response.id, include=["all"])


class Weather(BaseModel):
    city: str
    days: int


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}</tool_call>"


PATCH: Any = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
WIKI: Any = {
    "type": "namespace",
    "name": "mcp__wiki",
    "description": "of a wiki",
    "tools": [{"type": "function", "name": "read", "strict": False, "parameters": {"type": "object"}}],
}


def test_tools_as_coding_agents_send_them(server, client):
    """Free texts, namespaces of functions, and tools that OpenAI runs, which no model here is told of."""
    tools = [WEATHER, PATCH, WIKI, {"type": "web_search", "external_web_access": False}, {"type": "image_generation"}]
    patch = '*** Begin "Patch"\n+ü'
    response = ask(client, called("apply_patch", input=patch) + called("mcp__wiki__read", page="x"), tools=tools)
    custom, function = response.output
    assert (custom.type, custom.name, custom.input) == ("custom_tool_call", "apply_patch", patch)
    assert (function.type, function.namespace, function.name) == ("function_call", "mcp__wiki", "read")
    assert json.loads(function.arguments) == {"page": "x"}
    assert [tool.type for tool in response.tools] == ["function", "custom", "namespace"]
    outputs: Any = [
        {"type": "custom_tool_call_output", "call_id": custom.call_id, "output": "done"},
        {"type": "function_call_output", "call_id": function.call_id, "output": [{"type": "input_text", "text": "y"}]},
    ]
    given = [*(item.to_dict() for item in response.output), *outputs, {"role": "user", "content": "so" + END}]
    following = client.responses.create(
        **{**body_of("", extra=True, tools=tools, max_output_tokens=400), "input": given}
    )
    arguments = json.dumps({"input": patch}, ensure_ascii=False)
    assert f"apply_patch{arguments}" in following.output_text
    assert "mcp__wiki__read" in following.output_text
    assert "[tool:done][tool:y]so" in following.output_text
    events = raw_events(server, **body_of(called("apply_patch", input=patch), tools=tools))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[2:-1] == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
    ]
    assert (events[3]["delta"], events[4]["input"]) == (patch, patch)
    half = ask(client, called("apply_patch", input=patch), tools=tools, max_output_tokens=70)
    assert (half.status, half.output[0].type) == ("incomplete", "custom_tool_call")


def test_a_free_text_may_be_forced(client):
    response = ask(client, "x", tools=[PATCH], tool_choice={"type": "custom", "name": "apply_patch"})
    if response.status == "completed":
        assert [item.type for item in response.output] == ["custom_tool_call"]


def test_an_answer_has_the_form_that_was_asked_for(client):
    text = '{"city": "Zürich", "days": 3}'
    response = client.responses.parse(**body_of(text, extra=True), text_format=Weather)
    if response.status == "completed":
        assert isinstance(response.output_parsed, Weather)
    forced = ask(client, "hm", tools=[WEATHER], tool_choice={"type": "function", "name": "get_weather"}, temperature=1)
    if forced.status == "completed":
        assert [item.name for item in forced.output if item.type == "function_call"] == ["get_weather"]


def test_log_probabilities_are_of_the_texts_own_tokens(server, client):
    more = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    (part,) = ask(client, "<think>hm</think>yes", **more).output[1].content
    assert "".join(each.token for each in part.logprobs) == part.text == "yes"
    events = raw_events(server, **body_of("yes", **more))
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [each["token"] for event in deltas for each in event["logprobs"]] == ["y", "e", "s"]


def test_stored_responses_are_read_and_deleted_by_their_owner_alone(server, client):
    response = ask(client, "hello")
    again = client.responses.retrieve(response.id)
    assert again.to_dict() == response.to_dict()
    with client_of(server, "other") as other:
        for forbidden in (other.responses.retrieve, other.responses.delete, other.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                forbidden(response.id)
        with pytest.raises(openai.NotFoundError, match=r"Response with id '.*' not found: it was deleted"):
            ask(other, "x", previous_response_id=response.id)
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError, match="was deleted, was not stored, or had to make room"):
        client.responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError) as gone:
        ask(client, "x", previous_response_id=response.id)
    assert gone.value.param == "previous_response_id"
    unstored = ask(client, "hello", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)


def test_the_least_recently_used_make_room(client):
    first, second = ask(client, "first"), ask(client, "second")
    for _ in range(40):
        ask(client, "x" * 100)
        client.responses.retrieve(first.id)
    assert client.responses.retrieve(first.id).output_text == "first"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)


def test_a_conversation_that_is_too_long_loses_its_oldest_turns_where_it_may(client):
    turns: Any = [{"role": "user", "content": f"{number}:" + "x" * 300} for number in range(5)]
    items = [{"role": "system", "content": "s"}, *turns, {"role": "user", "content": END}]
    with pytest.raises(openai.BadRequestError, match="maximum context length is 1024"):
        ask(client, "", input=items)
    response = ask(client, "", input=items, truncation="auto", max_output_tokens=20)
    assert response.output_text.startswith("[system:s][user:2:x")
    assert response.truncation == "auto"


def test_a_background_response_is_read_until_it_is_there(client):
    response = ask(client, "hello", background=True)
    assert response.status == "queued"
    wait_until(lambda: client.responses.retrieve(response.id).status == "completed", 20, "the end")
    done = client.responses.retrieve(response.id)
    assert (done.output_text, done.background) == ("hello", True)
    assert client.responses.cancel(response.id).status == "completed"


def test_the_events_of_a_background_response_wait_for_their_reader(server, client):
    with client.responses.create(**body_of("hello", extra=True, background=True, stream=True)) as stream:
        first = next(iter(stream))
    assert first.type == "response.created"
    wait_until(lambda: client.responses.retrieve(first.response.id).status == "completed", 20, "the end")
    rest = httpx.get(
        f"{server.url}/v1/responses/{first.response.id}?stream=true&starting_after=0",
        headers={"authorization": "Bearer k"},
    )
    events = events_in(rest.text)
    assert [event["type"] for event in events][:2] == ["response.queued", "response.in_progress"]
    assert events[-1]["type"] == "response.completed"
    assert "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta") == "hello"
    plain = ask(client, "hello", background=True)
    with pytest.raises(openai.BadRequestError, match="not created with background and stream"):
        client.responses.retrieve(plain.id, stream=True)


def test_a_background_response_is_cancelled(client):
    endless: Any = {"extra_body": {"ignore_eos": True}, "background": True, "max_output_tokens": 1000}
    response = client.responses.create(model="null", input="on and on", **endless)
    cancelled = client.responses.cancel(response.id)
    if cancelled.status == "incomplete":  # it had ended already
        assert cancelled.incomplete_details.reason == "max_output_tokens"
    else:
        assert cancelled.status == client.responses.retrieve(response.id).status == "cancelled"
        with pytest.raises(openai.BadRequestError, match="is not complete, and nothing can follow it"):
            ask(client, "x", previous_response_id=response.id)
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(ask(client, "x").id)


@pytest.mark.parametrize(
    ("changes", "words", "param"),
    every(
        2,
        [
            (
                {"input": [{"type": "computer_call"}]},
                "items of type 'computer_call' are not supported",
                "input[0].type",
            ),
            (
                {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
                "'input_image'",
                "input[0].content[0]",
            ),
            ({"input": [{"role": "king", "content": "x"}]}, "role must be user", "input[0].role"),
            ({"input": [{"type": "function_call", "name": "f"}]}, "must be a text", "input[0].call_id"),
            ({"input": []}, "input is empty", "input"),
            ({"input": ""}, "input: the prompt is empty", "input"),
            ({"max_output_tokens": 0}, "max_output_tokens = 0: must be at least 1", "max_output_tokens"),
            ({"input": "x" * 5000}, "Please reduce the length of the messages", "input"),
            ({"tools": [{"type": "telepathy"}]}, "tools of type 'telepathy' are not known", "tools[0].type"),
            ({"tools": [{"type": "namespace", "name": "a"}]}, "must have a name and tools", "tools[0]"),
            (
                {"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "mcp"}]}]},
                "function or custom",
                "tools[0].tools[0].type",
            ),
            ({"tools": [WEATHER, WEATHER]}, "two tools are called 'get_weather'", "tools"),
            ({"tools": [{"type": "custom", "name": "a", "format": "x"}]}, "format must be", "tools[0].format"),
            ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "`tools` must be set", "tool_choice"),
            (
                {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}},
                "names the tool 'x'",
                "tool_choice",
            ),
            ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "needs the name of a tool", "tool_choice.name"),
            (
                {"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
                "mode: ..., tools: [...]}, with one tool at least",
                "tool_choice",
            ),
            (
                {"tools": [WEATHER], "tool_choice": {**ALLOWED, "tools": [{"type": "function"}]}},
                "tool_choice.tools[0] needs the name of a tool",
                "tool_choice.tools[0].name",
            ),
            ({"tools": [WEATHER], "tool_choice": {**ALLOWED, "mode": "all"}}, "auto or required", "tool_choice.mode"),
            ({"tool_choice": ALLOWED}, "`tools` must be set", "tool_choice"),
            (
                {"input": [{"type": "function_call_output", "call_id": "call_1", "output": "x"}]},
                "No tool call found for function call output with call_id call_1.",
                "input",
            ),
            ({"top_logprobs": 2**40}, "top_logprobs = 1099511627776: must be", "top_logprobs"),
            ({"min_tokens": 500}, "min_tokens = 500: must not exceed max_output_tokens, 200", "min_tokens"),
            ({"text": {"format": {"type": "xml"}}}, "text.format must be", "text.format"),
            ({"text": {"verbosity": "endless"}}, "one of low, medium, high", "text.verbosity"),
            ({"reasoning": {"effort": "endless"}}, "one of none, minimal", "reasoning.effort"),
            ({"include": ["all"]}, "include[0] is 'all'; known:", "include[0]"),
            ({"background": True, "store": False}, "background can only be used when `store` is true", "background"),
            ({"conversation": "c"}, "use previous_response_id", "conversation"),
            ({"max_tokens": 3}, "responses have max_output_tokens", "max_tokens"),
            ({"messages": []}, "responses have input", "messages"),
            ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "beside its type here", "tools[0].name"),
            ({"temperature": -1}, "temperature", "temperature"),
            ({"model": "x"}, "does not exist", "model"),
        ],
    ),
)
def test_bad_requests_are_refused_by_name(server, changes, words, param):
    with httpx.Client(base_url=server.url, headers={"authorization": "Bearer k"}) as client:
        answer = client.post("/v1/responses", json={**body_of("x"), **changes})
    assert answer.status_code in (400, 404), answer.text
    assert words in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == param


def test_processes_of_a_server_share_what_is_stored():
    """Each connection comes to one of two processes; and a file of one's own outlives the server."""
    with serving(*ARGUMENTS, "--api-server-count", "2") as server:
        with client_of(server) as client:
            response = ask(client, "hello")
        for _ in range(16):
            with client_of(server) as client:
                assert client.responses.retrieve(response.id).output_text == "hello"


def test_errors_of_counting_a_prompt_name_the_fields_of_a_response(client):
    with pytest.raises(openai.BadRequestError, match="input is empty") as refused:
        client.responses.input_tokens.count(model="null", input=[])
    assert refused.value.param == "input"


@pytest.mark.system
def test_a_file_keeps_responses_beyond_the_servers_end(tmp_path):
    path = str(tmp_path / "responses.sqlite")
    with serving(*ARGUMENTS, "--response-store", path) as server, client_of(server) as client:
        response = ask(client, "hello")
    with serving(*ARGUMENTS, "--response-store", path) as server, client_of(server) as client:
        assert client.responses.retrieve(response.id).output_text == "hello"
        assert ask(client, "", previous_response_id=response.id).output_text == "[user:hello"


def test_text_that_is_read_together_with_reasoning_keeps_its_log_probabilities():
    """As on a busy machine, where both come at once."""
    turn = object.__new__(TurnAnswer)
    turn._untold = [TokenLogprob(each, -1.0, None, []) for each in ("<think>", "h", "m", "</think>", "ye", "s", " pen")]
    assert turn._take_logprobs("hm")
    assert [each.token for each in turn._take_logprobs("yes")] == ["ye", "s"]
    assert [each.token for each in turn._untold] == [" pen"]


def test_enable_thinking_reaches_the_template_as_in_a_chat() -> None:
    asked = RequestDecoder(strict=True).decode(b'{"input": "x", "enable_thinking": false}', ResponsesRequest)
    assert as_chat(asked, [], None).enable_thinking is False
