"""Clients for structured outputs, as installed from PyPI, against a real server with the demo model.

    python benchmarks/structured_clients.py [--work DIR] [--only NAME ...] [--out FILE]

Like `agents_clients.py`, but the model generates freely: only the server enforces the form of the answers. Exit status
1 when one fails. Needs PyPI and the demo model.
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal

from agents_clients import ROOT, Cases, check, parse, run

RESULTS = ROOT / "benchmarks" / "results" / "structured_clients.json"
CONFIG = {"disable_any_whitespace": True, "disable_additional_properties": True}
"""Otherwise a small model goes on with white space, or with its own properties, until it is cut off."""
SERVE = ("--max-model-len", "2048", "--seed", "1", "--structured-outputs-config", json.dumps(CONFIG))
ASKED = "Describe a person."


def openai_client(url: str) -> tuple[Any, str]:
    """The client, and the name of the model."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    return client, client.models.list().data[0].id


def openai(url: str) -> None:
    """`parse` of pydantic models, by chat and by responses, whole and streamed."""
    from pydantic import BaseModel, Field

    class Pet(BaseModel):
        kind: Literal["cat", "dog"]
        age: int = Field(ge=0, le=30)

    class Person(BaseModel):
        name: str = Field(max_length=20)
        pets: list[Pet] = Field(max_length=3)

    client, model = openai_client(url)
    messages: Any = [{"role": "user", "content": ASKED}]
    asked: Any = {"model": model, "messages": messages, "response_format": Person, "temperature": 1.0}
    for seed in range(5):
        answer = client.chat.completions.parse(**asked, seed=seed)
        check(isinstance(answer.choices[0].message.parsed, Person), True, "chat.completions.parse")
    with client.chat.completions.stream(**asked) as stream:
        check(isinstance(stream.get_final_completion().choices[0].message.parsed, Person), True, "streamed")
    found = client.responses.parse(model=model, input=ASKED, text_format=Person).output_parsed
    check(isinstance(found, Person), True, "responses.parse")


def outlines(url: str) -> None:
    """The adapter for OpenAI's API, and the one for vLLM's server, which also has regular expressions and grammars."""
    import outlines
    from outlines.types import CFG, Regex
    from pydantic import BaseModel, Field

    class Person(BaseModel):
        name: str = Field(max_length=20)
        age: int = Field(ge=0, le=120)

    client, name = openai_client(url)
    drawn: Any = {"max_tokens": 200, "temperature": 1.0}
    for adapter in (outlines.from_openai, outlines.from_vllm):
        model = adapter(client, name)
        Person.model_validate_json(model(ASKED, Person, **drawn))
        Person.model_validate_json("".join(model.stream(ASKED, Person, **drawn)))
    expression, sum_of = r"\d{4}-[a-z]{3,9}", CFG('start: DIGIT ("+" DIGIT)~2\nDIGIT: /[0-9]/')
    for seed in range(5):
        more = {**drawn, "seed": seed}
        check(model("Yes or no?", Literal["Yes", "No"], **more) in ("Yes", "No"), True, "a choice")
        check(bool(re.fullmatch(expression, model("A date.", Regex(expression), **more))), True, "an expression")
        check(bool(re.fullmatch(r"\d\+\d\+\d", model("A sum.", sum_of, **more))), True, "a grammar")


def instructor(url: str) -> None:
    """A forced tool call, and a schema of the answer."""
    import instructor
    from pydantic import BaseModel, ConfigDict, Field

    class Person(BaseModel):
        model_config = ConfigDict(extra="forbid")  # a small model invents properties without end
        name: str = Field(max_length=20)
        age: int = Field(ge=0, le=120)

    client, model = openai_client(url)
    messages: Any = [{"role": "user", "content": ASKED}]
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        asking = instructor.from_openai(client, mode=mode).chat.completions
        for seed in range(5):
            asked: Any = {"model": model, "messages": messages, "max_retries": 0, "temperature": 1.0, "seed": seed}
            check(isinstance(asking.create(**asked, response_model=Person), Person), True, str(mode))


CASES: Cases = {
    "openai": (openai, ("openai",)),
    "outlines": (outlines, ("outlines", "openai")),
    "instructor": (instructor, ("instructor",)),
}

if __name__ == "__main__":
    run(__file__, parse(__doc__, CASES, RESULTS), CASES, SERVE)
