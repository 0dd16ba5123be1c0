"""Tools of an MCP server, which the Responses API calls by the official client library."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import uvicorn
from http_server import Server, serving
from null_with_tokenizer import PARROT
from openai.types.responses import Response, ResponseStreamEvent
from opentelemetry.trace import get_current_span
from patience import wait_until
from pydantic import TypeAdapter

from headrace.frontend.http.apis.responses.tool_servers import approval_of, parse_servers
from headrace.ipc.failure import OptionError

END = "STOPHERE"
TEMPLATE = (
    '{# <tool_call> "arguments" #}{% for m in messages[:-1] %}[{{ m.role }}]{% endfor %}{{ messages[-1].content }}'
    "{% if messages[-1].role == 'tool' %}" + END + "{% endif %}"
)
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
LAB: Any = {"type": "mcp", "server_label": "lab", "require_approval": "never"}
NOW: Any = {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}


def call_of(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}</tool_call>"


@contextlib.contextmanager
def tool_server() -> Iterator[str]:
    """The address of a real MCP server, in a thread."""
    from mcp.server.mcpserver import MCPServer  # half a second, of each process that collects tests

    lab = MCPServer("lab")

    @lab.tool()
    def add(a: int, b: int) -> str:
        """Adds two numbers."""
        return f"ü{a + b}"

    @lab.tool()
    def again() -> str:
        """Says that it is to be called again."""
        return call_of("again")

    @lab.tool()
    def trace() -> str:
        """The trace and the span that the call came with."""
        above = get_current_span().get_span_context()
        return f"{above.trace_id:032x} {above.span_id:016x}"

    @lab.tool()
    def fail() -> str:
        raise ValueError("no such luck")

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        config = uvicorn.Config(lab.streamable_http_app(), log_level="error")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            wait_until(lambda: server.started, 20, "the start of the MCP server")
            yield f"http://127.0.0.1:{sock.getsockname()[1]}/mcp"
        finally:
            server.should_exit = True
            thread.join(60)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Of a model that says its last message, up to the stop string."""
    with tool_server() as url:
        arguments = ("--distributed-executor-backend", PARROT, "--chat-template", TEMPLATE, "--max-model-len", "4096")
        with serving(*arguments, "--tool-server", f"lab={url},gone=http://127.0.0.1:9/mcp") as server:
            yield server


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def asked(said: str, tools: list[Any], **more: Any) -> Any:
    return {"model": "null", "input": said + END, "max_output_tokens": 900, "tools": tools, **more}


def ask(client: openai.OpenAI, said: str, *tools: Any, **more: Any) -> Response:
    response = client.responses.create(**asked(said, list(tools or [LAB]), **more), extra_body={"stop": [END]})
    return Response.model_validate(response.to_dict(), strict=True)


def test_a_call_is_carried_out_and_the_model_answers_with_its_result(client: openai.OpenAI, server: Server) -> None:
    response = ask(client, "Sure." + call_of("add", a=1, b=2))
    server.wait_log("answers are read as hermes")
    assert "HTTP Request" not in server.log, "the library's own lines"
    items: list[Any] = [*response.output]
    listing, said, call, answer = items
    assert (listing.type, listing.server_label) == ("mcp_list_tools", "lab")
    assert {tool.name: tool.description for tool in listing.tools} == {
        "add": "Adds two numbers.",
        "again": "Says that it is to be called again.",
        "trace": "The trace and the span that the call came with.",
        "fail": "",
    }
    assert "a" in listing.tools[0].input_schema["properties"]
    assert said.content[0].text == "Sure."
    assert (call.type, call.server_label, call.name, call.status) == ("mcp_call", "lab", "add", "completed")
    assert (json.loads(call.arguments), call.output, call.error) == ({"a": 1, "b": 2}, "ü3", None)
    assert answer.content[0].text == response.output_text.removeprefix("Sure.") == "[user][assistant]ü3"
    assert response.status == "completed"
    following = ask(client, "more", previous_response_id=response.id)
    assert following.output_text == "[user][assistant][tool][assistant]more"


def test_events_tell_of_listing_and_calls_and_add_up(client: openai.OpenAI) -> None:
    events = list(
        client.responses.create(**asked(call_of("add", a=1, b=2), [LAB]), stream=True, extra_body={"stop": [END]})
    )
    for number, event in enumerate(events):
        EVENT.validate_python(event.to_dict(), strict=True)
        assert event.sequence_number == number
    kinds = [event.type.removeprefix("response.") for event in events]
    listed = ["output_item.added", "mcp_list_tools.in_progress", "mcp_list_tools.completed", "output_item.done"]
    assert kinds[:6] == ["created", "in_progress", *listed]
    own = [kind for kind in kinds[6:] if kind != "mcp_call_arguments.delta"]
    assert own[:5] == [
        *("output_item.added", "mcp_call.in_progress", "mcp_call_arguments.done"),
        *("mcp_call.completed", "output_item.done"),
    ]
    told: Any = events
    deltas = "".join(event.delta for event in told if event.type == "response.mcp_call_arguments.delta")
    assert json.loads(deltas) == {"a": 1, "b": 2}
    final = told[-1].response
    assert [event.item.to_dict() for event in told if event.type == "response.output_item.done"] == [
        item.to_dict() for item in final.output
    ]


def test_a_tool_that_fails_is_told_to_the_model(client: openai.OpenAI) -> None:
    items: list[Any] = ask(client, call_of("fail")).output[1:]
    call, answer = items
    assert (call.status, call.output) == ("failed", None)
    (why,) = call.error.content
    assert (call.error.type, "fail" in why["text"]) == ("mcp_tool_execution_error", True)
    assert answer.content[0].text == f"[user][assistant]error: {why['text']}"
    wrong = ask(client, call_of("add", a="x", b=2)).output[1]
    assert wrong.status == "failed"


def test_a_response_makes_as_many_calls_as_it_may(client: openai.OpenAI) -> None:
    response = ask(client, call_of("again"), max_tool_calls=3)
    calls = [item for item in response.output if item.type == "mcp_call"]
    assert [call.status for call in calls] == ["completed"] * 3
    assert response.output_text.endswith(call_of("again")), "the last is text, as there is nothing to call any more"
    both = ask(client, call_of("again") + call_of("add", a=1, b=1), max_tool_calls=1)
    done, refused = [item for item in both.output if item.type == "mcp_call"]
    assert (done.status, refused.status) == ("completed", "failed")
    why: Any = refused.error
    assert "max_tool_calls" in why.content[0]["text"]


def test_tokens_of_all_turns_count(client: openai.OpenAI) -> None:
    response = ask(client, call_of("again"), max_output_tokens=120)
    assert (response.status, response.usage.output_tokens <= 120) == ("incomplete", True)
    assert response.incomplete_details.reason == "max_output_tokens"
    assert {item.status for item in response.output if item.type == "mcp_call"} <= {"completed", "incomplete"}


def test_a_call_of_the_clients_own_function_ends_the_response(client: openai.OpenAI) -> None:
    response = ask(client, call_of("add", a=1, b=2) + call_of("now"), LAB, NOW)
    assert [item.type for item in response.output] == ["mcp_list_tools", "mcp_call", "function_call"]
    assert response.output[1].output == "ü3"


@pytest.mark.parametrize(
    ("tool", "status", "words"),
    [
        ({**LAB, "server_label": "x"}, 400, "names the tool server 'x'; this server has lab, gone"),
        ({**LAB, "server_url": "http://127.0.0.1:1/mcp"}, 400, "server_url is refused"),
        ({**LAB, "require_approval": "sometimes"}, 400, "require_approval must be always, never, or always and never"),
        ({**LAB, "require_approval": {"never": {}}}, 400, "require_approval must be"),
        ({**LAB, "require_approval": {"never": {"names": ["add"]}}}, 400, "unknown field `names`"),
        ({**LAB, "connector_id": "c"}, 400, "connector_id is refused"),
        ({**LAB, "headers": {"a": "b"}}, 400, "headers is refused"),
        ({**LAB, "allowed_tools": ["add", "sub"]}, 400, "allowed_tools has 'sub'; lab has add, again, trace, fail"),
        ({**LAB, "allowed_tools": {"tool_names": "add"}}, 400, "allowed_tools must be a list of names, or an object"),
        ({**LAB, "allowed_tools": [1]}, 400, "allowed_tools must be a list of names, or an object"),
        ({**LAB, "server_label": "gone"}, 424, "the tools of gone could not be listed"),
        ({"type": "connector"}, 400, "tools of type 'connector' are not known"),
    ],
)
def test_other_tools_are_refused_by_name(client: openai.OpenAI, tool: Any, status: int, words: str) -> None:
    with pytest.raises(openai.APIStatusError) as error:
        ask(client, "x", tool)
    assert (error.value.status_code, words in error.value.message) == (status, True), error.value.message


def test_allowed_tools_are_all_that_the_model_sees(client: openai.OpenAI) -> None:
    response = ask(client, call_of("fail"), {**LAB, "allowed_tools": {"tool_names": ["add"]}})
    assert [tool.name for tool in response.output[0].tools] == ["add"]
    assert [item.type for item in response.output[1:]] == ["function_call"], "of a name that nobody gave"
    with pytest.raises(openai.BadRequestError, match="two tools are called 'add'"):
        ask(client, "x", LAB, {**NOW, "name": "add"})


def asks_again(response: Response, *answers: Any) -> dict[str, Any]:
    """What a client sends to answer approval requests, in their order."""
    requests = [item.id for item in response.output if item.type == "mcp_approval_request"]
    said = [{"type": "mcp_approval_response", "approval_request_id": id} for id in requests]
    return {
        "input": [{**one, **answer} for one, answer in zip(said, answers, strict=True)],
        "previous_response_id": response.id,
    }


ASKING: Any = {"type": "mcp", "server_label": "lab"}
YES: Any = {"approve": True}


def test_a_call_waits_for_the_clients_approval(client: openai.OpenAI) -> None:
    asking = ask(client, "Sure." + call_of("add", a=1, b=2), ASKING)
    items: list[Any] = [*asking.output]
    listing, said, request = items
    assert (listing.type, said.content[0].text, request.type) == ("mcp_list_tools", "Sure.", "mcp_approval_request")
    assert (request.server_label, request.name, json.loads(request.arguments)) == ("lab", "add", {"a": 1, "b": 2})
    assert asking.status == "completed"
    more: Any = {**asked("", [ASKING]), **asks_again(asking, YES)}
    approved = client.responses.create(**more, extra_body={"stop": [END]})
    items = [*approved.output]
    _, call, answer = items
    assert (call.type, call.status, call.output) == ("mcp_call", "completed", "ü3")
    assert call.approval_request_id == request.id
    assert answer.content[0].text == "[user][assistant]ü3"
    following = ask(client, "more", previous_response_id=approved.id)
    assert following.output_text == "[user][assistant][tool][assistant]more"
    # A client that keeps the conversation itself sends all of it, and nothing is carried out twice.
    sent: Any = [item.to_dict() for item in (*asking.output, *approved.output)]
    sent.insert(len(asking.output), more["input"][0])
    whole = client.responses.create(
        **{**asked("", [ASKING]), "input": [*sent, {"role": "user", "content": "end" + END}]},
        extra_body={"stop": [END]},
    )
    assert [item.type for item in whole.output] == ["mcp_list_tools", "message"]


def test_a_call_that_is_not_approved_is_told_to_the_model(client: openai.OpenAI) -> None:
    asking = ask(client, call_of("add", a=1, b=2), ASKING)
    refused = asks_again(asking, {"approve": False, "reason": "too dear"})
    response = client.responses.create(**{**asked("", [ASKING]), **refused}, extra_body={"stop": [END]})
    assert [item.type for item in response.output] == ["mcp_list_tools", "message"]
    assert response.output_text == "[user][assistant]the user did not approve of this call: too dear"


def test_requests_for_approval_are_told_whole_and_only_some_wait(client: openai.OpenAI) -> None:
    some = {**ASKING, "require_approval": {"never": {"tool_names": ["add"]}}}
    both = call_of("add", a=1, b=2) + call_of("again")
    events: Any = list(client.responses.create(**asked(both, [some]), stream=True, extra_body={"stop": [END]}))
    for event in events:
        EVENT.validate_python(event.to_dict(), strict=True)
    final = events[-1].response
    assert [item.type for item in final.output] == ["mcp_list_tools", "mcp_call", "mcp_approval_request"]
    assert (final.output[1].output, final.output[2].name) == ("ü3", "again")
    told = [event.item.to_dict() for event in events if event.type == "response.output_item.done"]
    assert sorted(told, key=lambda item: item["id"]) == sorted(
        (item.to_dict() for item in final.output), key=lambda item: item["id"]
    )
    assert not [event for event in events if "arguments" in event.type and event.item_id == final.output[2].id]
    more: Any = {**asked("", [some]), **asks_again(final, YES)}
    events = list(client.responses.create(**more, stream=True, extra_body={"stop": [END]}))
    for event in events:
        EVENT.validate_python(event.to_dict(), strict=True)
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[6:10] == ["output_item.added", "mcp_call.in_progress", "mcp_call.completed", "output_item.done"]
    final = events[-1].response
    assert [item.type for item in final.output][1:] == ["mcp_call", "message", "mcp_approval_request"]


def test_half_a_call_is_nothing_to_approve_of(client: openai.OpenAI) -> None:
    response = ask(client, call_of("add", a=1, b=2), ASKING, max_output_tokens=40)
    assert response.status == "incomplete"
    assert [item.type for item in response.output] == ["mcp_list_tools"]


def test_answers_to_no_request_are_refused_by_name(client: openai.OpenAI) -> None:
    asking = ask(client, call_of("add", a=1, b=2), ASKING)
    answer: Any = asks_again(asking, YES)
    alone: Any = {**asked("", [ASKING]), "input": answer["input"]}
    with pytest.raises(
        openai.BadRequestError, match=r"input\[0\]\.approval_request_id: no approval request has the id"
    ):
        client.responses.create(**alone)
    with pytest.raises(openai.BadRequestError, match="'add' of 'lab', which is not among this request's tools"):
        client.responses.create(**{**asked("", []), **answer})
    answer["input"][0]["approve"] = "yes"
    with pytest.raises(openai.BadRequestError, match=r"input\[0\]\.approve must be true or false"):
        client.responses.create(**{**asked("", [ASKING]), **answer})


@pytest.mark.parametrize(
    ("given", "waiting"),
    [
        (None, {"read", "write"}),
        ("always", {"read", "write"}),
        ("never", set()),
        ({"never": {"read_only": True}}, {"write"}),
        ({"always": {"tool_names": ["read"]}}, {"read"}),
        ({"always": {"tool_names": ["read"]}, "never": {"tool_names": ["read"]}}, {"read", "write"}),
    ],
)
def test_which_calls_wait(given: Any, waiting: set[str]) -> None:
    approval = approval_of({"require_approval": given}, "tools[0]")
    assert {name for name in ("read", "write") if approval.asks(name, reads_only=name == "read")} == waiting


def test_servers_are_named_by_label_or_address() -> None:
    assert parse_servers(["a=http://h:1/mcp?x=1, h:2", "https://h/x"]) == {
        "a": "http://h:1/mcp?x=1",
        "h:2": "http://h:2/mcp",
        "h": "https://h/x",
    }
    with pytest.raises(OptionError, match="there are no demonstration tools"):
        parse_servers(["demo"])
    with pytest.raises(OptionError, match="names another server already"):
        parse_servers(["a=h:1,a=h:2"])
