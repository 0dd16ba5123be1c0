"""Checks that forced tool calls are always well-formed, with a small model, many seeds and several kinds of schemas.

    python benchmarks/tool_calls.py [--calls 200] [--out benchmarks/results/tool_calls.json]

The demo model, which was not trained on tools, is asked alternately with `tool_choice: required` and with a function by
name, at temperature 1. The `jsonschema` library validates each call's name and arguments. Exit status 1 when one is
invalid. The result does not depend on the machine's load.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import jsonschema
import openai
from http_overhead import free_port, program, wait_ready
from report import write_report

from headrace.executor.checkpoints.demo_model import fetch_demo_model

RESULTS = Path(__file__).parent / "results" / "tool_calls.json"
TEXT = {"type": "string", "minLength": 1, "maxLength": 24}


def function(name: str, **properties: Any) -> dict[str, Any]:
    required = [each for each, schema in properties.items() if not schema.pop("optional", False)]
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


TOOLS = [
    function(
        "get_weather",
        city=TEXT,
        unit={"enum": ["celsius", "fahrenheit"]},
        days={"type": "integer", "minimum": 0, "maximum": 14},
    ),
    function(
        "send_mail", to={"type": "array", "items": TEXT, "minItems": 1, "maxItems": 3}, urgent={"type": "boolean"}
    ),
    function("now"),
    function(
        "book",
        guest={
            "type": "object",
            "properties": {"name": TEXT, "age": {"type": ["integer", "null"], "minimum": 0, "maximum": 150}},
            "required": ["name", "age"],
            "additionalProperties": False,
        },
        note={**TEXT, "optional": True},
    ),
]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
QUESTIONS = ("How warm is it in Zürich?", "Tell Ann and Bob to come.", 'Book a room for "J. Doe".', "What time is it?")


async def ask(client: openai.AsyncOpenAI, nth: int) -> dict[str, Any]:
    """One answer's calls, and the error in them, if any."""
    named = TOOLS[nth // 2 % len(TOOLS)]["function"]["name"] if nth % 2 else None
    choice: Any = {"type": "function", "function": {"name": named}} if named else "required"
    answer = await client.chat.completions.create(
        model=(await client.models.list()).data[0].id,
        messages=[{"role": "user", "content": QUESTIONS[nth % len(QUESTIONS)]}],
        tools=TOOLS,
        tool_choice=choice,
        parallel_tool_calls=False,
        temperature=1.0,
        seed=nth,
        max_tokens=600,
    )
    (made,) = answer.choices
    calls = [(each.function.name, each.function.arguments) for each in made.message.tool_calls or ()]
    return {
        "asked": named or "required",
        "calls": calls,
        "wrong": why_wrong(calls, named),
        "finish": made.finish_reason,
    }


def why_wrong(calls: list[tuple[str, str]], named: str | None) -> str | None:
    if len(calls) != 1:
        return f"{len(calls)} calls"
    ((name, arguments),) = calls
    if name not in SCHEMAS or named not in (None, name):
        return f"a call of {name}"
    try:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{type(error).__name__}: {error}"[:300]
    return None


async def ask_all(url: str, count: int) -> list[dict[str, Any]]:
    slots = asyncio.Semaphore(16)

    async def one(client: openai.AsyncOpenAI, nth: int) -> dict[str, Any]:
        async with slots:
            return await ask(client, nth)

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=600) as client:
        return await asyncio.gather(*(one(client, nth) for nth in range(count)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headrace-tools-") as folder:
        work, url = Path(folder), f"http://127.0.0.1:{(port := free_port())}"
        command = [sys.executable, "-m", "headrace", "serve", str(fetch_demo_model()), "--max-model-len", "2048"]
        with program([*command, "--port", str(port)], work / "log", {}, work) as process:
            wait_ready(process, url, work / "log")
            answers = asyncio.run(ask_all(url, arguments.calls))
    wrong = [each for each in answers if each["wrong"] is not None]
    names = collections.Counter(name for each in answers for name, _ in each["calls"])
    results = {"calls": len(answers), "valid": len(answers) - len(wrong), "by_name": dict(names), "wrong": wrong[:20]}
    print(json.dumps(results, ensure_ascii=False, indent=1))
    write_report(arguments.out, "tool_calls", {**results, "samples": answers})
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
