"""Answers that a model was talked into: huge, deep or full of half markers. Every format reads them in bounded time."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import pytest
from http_server import ask, events_of, serving
from null_with_tokenizer import PARROT
from processor_time import is_linear, least_processor_s
from read_answers import parser_of
from thinned import every

from headrace.frontend.http.apis.anthropic.answer import call_input
from headrace.frontend.text.formats.declaration import known_formats, load_format
from headrace.frontend.text.formats.values import NoCallError, as_json, nest_as_json, python_as_json

SIZE = 1 << 18
MOST_S = 1.0
"""Of a quarter of a megabyte, where what takes quadratic time needs many."""
PIECE = 7
"""Characters of a token, about."""
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}]


def hostile_texts(name: str, size: int) -> dict[str, str]:
    """Beginnings of what the format reads, and what has no end: so many characters of each."""
    declared, texts = load_format(name), dict[str, str]()
    openers = {""}
    if declared.calls is not None:
        calls = declared.calls
        named = calls.name[0] + "f" + calls.name[1]
        whole = (calls.section or ("",))[0] + calls.call[0]
        arguments = calls.parameter[0] + "a" + calls.parameter[1] + calls.parameter[2]
        openers |= {calls.opener, whole, whole + named, whole + named + arguments}
        openers |= {whole + '{"name": "f", "arguments": ', whole + "[f(a=", whole + named + "{a:" + calls.escape}
        texts["calls"] = (calls.opener + '{"name": "f", "arguments": {}}' + calls.call[1] + "\n") * 40
    if declared.reasoning is not None:
        openers.add(declared.reasoning.begin)
        texts["thoughts"] = declared.reasoning.begin + "x" + declared.reasoning.end
    if declared.channels is not None:
        openers |= {declared.channels.channel, f"{declared.channels.channel}commentary to=functions.f"}
    longest = max(openers, key=len)
    repeated = ("[", '{"a":', '{"a":[', "(", "'", '"', "\\", "1", "x", " ", "\n", ",", "<", "{", "a=1,", "[f(", "<|")
    texts |= {f"{opener!r:.60} then {each!r}": opener + each * size for opener in openers for each in repeated}
    for cut in range(1, len(longest), 3):
        texts[f"half of a marker {cut}"] = longest[:cut]
    return {what: (text * (size // len(text) + 1))[:size] for what, text in texts.items()}


@pytest.mark.parametrize("share", [9, pytest.param(1, marks=pytest.mark.system)])
@pytest.mark.parametrize("name", every(3, sorted(known_formats())))
def test_any_beginning_that_goes_on_for_ever_is_read_in_bounded_time(name: str, share: int) -> None:
    """Of one in so many beginnings, others for each format: most formats are read by the same lines. What takes long
    must not take much more than its length of what an eighth takes: a busy machine computes several times slower."""
    texts, eighths = hostile_texts(name, SIZE // 16), hostile_texts(name, SIZE // 128)
    for what in random.Random(name).sample(sorted(texts), len(texts) // share):
        assert is_linear(reading(name, texts[what]), reading(name, eighths[what]), MOST_S / 4), what


def reading(name: str, text: str, piece: int = SIZE) -> Callable[[], None]:
    def read() -> None:
        parser = parser_of(name, tools=TOOLS)
        for start in range(0, len(text), piece):
            parser.feed(text[start : start + piece])
        parser.finish()

    return read


@pytest.mark.parametrize(
    ("name", "beginning", "endless"),
    every(
        2,
        [
            ("hermes", '<tool_call>{"name": "f", "arguments": ', "1"),
            ("hermes", '<tool_call>{"arguments": ', "["),
            ("hermes", "content", " "),
            ("hermes", "", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
            ("pythonic", "[f(a=", "["),
            ("pythonic", "[f(a='", "x"),
            ("pythonic", "[f(a='", "\\"),
            ("functiongemma", "<start_function_call>call:f{a:", "1"),
            ("functiongemma", "<start_function_call>call:f{a:", "{"),
            ("qwen3_xml", "<tool_call>\n<function=f>\n<parameter=b>\n", "\n"),
            ("glm45", "<tool_call>f\n<arg_key>b</arg_key>\n<arg_value>", "["),
            ("openai", "<|channel|>", "analysis "),
        ],
    ),
)
@pytest.mark.parametrize("piece", [PIECE, SIZE])
def test_a_long_text_without_an_end_is_read_in_bounded_time_in_pieces_and_whole(
    name: str, beginning: str, endless: str, piece: int
) -> None:
    eighth, whole = (reading(name, beginning + endless * (size // len(endless)), piece) for size in (SIZE // 8, SIZE))
    assert is_linear(whole, eighth, MOST_S)


@pytest.mark.parametrize("size", every(2, [900, 5_000, 250_000]))
@pytest.mark.parametrize("nest", ["[", '{"a":', "(", "-", "not ", "a.", "1+"])
def test_values_of_any_depth_are_arguments_or_none(nest: str, size: int) -> None:
    closed = {"[": "]", '{"a":': "}", "(": ")"}.get(nest, "")
    text = nest * size + "1" + closed * size

    def read_in_all_ways() -> None:
        assert isinstance(as_json(text), str)
        for read in (nest_as_json, python_as_json):
            with contextlib.suppress(NoCallError):
                json.dumps(read(text))

    assert least_processor_s(read_in_all_ways, MOST_S) < MOST_S


@pytest.mark.parametrize("text", ["[" * 100_000 + "]" * 100_000, '{"a":' * 3000 + "1" + "}" * 3000])
def test_deep_arguments_are_an_input_of_anthropics_api(text: str) -> None:
    assert json.loads(msgspec.json.encode(call_input(text))) == {"": text}


@pytest.mark.parametrize("number", ["9" * 300, "-1e-999", str(2**64)])
def test_numbers_of_any_size_stay_as_the_model_wrote_them(number: str) -> None:
    assert msgspec.json.encode(call_input(f'{{"a": {number}}}')) == f'{{"a": {number}}}'.encode()


SAID: dict[str, str] = {
    "deep arguments": '<tool_call>{"name": "f", "arguments": ' + "[" * 1100 + "]" * 1100 + "}</tool_call>",
    "deep and open": '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 1100,
    "half a surrogate pair for a name": '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
    "half a surrogate pair for arguments": '<tool_call>{"name": "f", "arguments": {"a": "\\udfff"}}</tool_call>',
    "half markers": "<tool_cal<think<tool_call><tool_call></tool" * 50,
    "large numbers": '<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 4400 + "}}</tool_call>",
    "arguments as text": '<tool_call>{"name": "f", "arguments": "' + '\\"' * 700 + '"}</tool_call>',
    "many calls": '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 40,
}
"""Deeper than Python's recursion, and more digits than it reads, by little: each character is a token."""


PARROT_ENGINE = ("null", "--distributed-executor-backend", PARROT, "--hf-overrides", '{"vocab_size": 400}')


@pytest.fixture(scope="module")
def parrot() -> Iterator[httpx.Client]:
    arguments = ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3", "--enable-auto-tool-choice")
    with serving(*PARROT_ENGINE, *arguments, attached=True) as server, server.client() as client:
        yield client


@pytest.mark.parametrize("what", every(3, SAID))
def test_no_answer_of_a_model_is_an_error_of_the_server(what: str, parrot: httpx.Client) -> None:
    """Whole, as events, and in the three APIs."""
    said = SAID[what]
    most_tokens = min(7000, len(said) + 200)  # all that is said, and the beginning again
    body: Any = {"messages": [{"role": "user", "content": said}], "max_tokens": most_tokens}
    tool = {"name": "f", "input_schema": {"type": "object"}}
    whole = ask(parrot, "/v1/chat/completions", **body, tools=TOOLS)
    assert whole["choices"][0]["finish_reason"]
    with parrot.stream("POST", "/v1/chat/completions", json={**body, "tools": TOOLS, "stream": True}) as response:
        assert not [each for each in events_of(response) if "error" in each]
    assert ask(parrot, "/v1/messages", **body, tools=[tool])["stop_reason"]
    function = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    answer = ask(parrot, "/v1/responses", input=said, max_output_tokens=most_tokens, tools=[function])
    assert answer["status"] in ("completed", "incomplete")


@pytest.mark.parametrize(
    "text", every(2, ["[" * 3000, "[" * 3000 + "]" * 3000, '{"a":' * 900 + "1" + "}" * 900, "none", '"'])
)
def test_a_calls_arguments_in_a_conversation_may_be_anything(text: str, client: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
    asked = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    result = {"role": "tool", "tool_call_id": "c", "content": "y"}
    bodies = {
        "/v1/chat/completions": {"messages": [*asked, result], "max_tokens": 1},
        "/v1/responses": {
            "input": [
                {"type": "message", "role": "user", "content": "x"},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": text},
                {"type": "function_call_output", "call_id": "c", "output": "y"},
            ],
            "max_output_tokens": 1,
        },
    }
    for path, body in bodies.items():
        assert client.post(path, json=body).status_code in (200, 400), path
    uses = '{"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": %s}]}'
    answers = '{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "y"}]}'
    content = f'{{"max_tokens": 1, "messages": [{{"role": "user", "content": "x"}}, {uses % text}, {answers}]}}'
    answer = client.post("/v1/messages", content=content, headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400)


@pytest.fixture(scope="module")
def client() -> Any:
    with serving() as server, server.client() as client:
        yield client
