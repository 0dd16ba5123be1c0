"""Instructions in the middle of a conversation, in either role, reach the model by every API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from http_server import ask, serving

ECHO = "null_with_tokenizer:EchoExecutor"
STRICT = (  # a system message is refused elsewhere than at the beginning, and roles that are not known: left out
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('must be first') }}"
    "{% endif %}{% if m.role in ['system', 'user', 'assistant'] %}[{{ m.role[0] }}:{{ m.content }}]{% endif %}"
    "{% endfor %}"
)
TURNS = (("user", "a"), ("assistant", "b"), ("system", "T"), ("user", "c"), ("developer", "D"))
MESSAGES = [{"role": role, "content": text} for role, text in TURNS]
WANTED = "[s:S\n\nT\n\nD][u:a][a:b][u:c]"
SYSTEM = {"role": "system", "content": "S"}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    arguments = ("--distributed-executor-backend", ECHO, "--chat-template", STRICT)
    with serving(*arguments) as server, server.client() as client:
        yield client


def test_of_chat_completions(client: httpx.Client) -> None:
    body = ask(client, "/v1/chat/completions", messages=[SYSTEM, *MESSAGES], max_tokens=99)
    assert body["choices"][0]["message"]["content"] == WANTED
    tokens = ask(client, "/tokenize", messages=[SYSTEM, *MESSAGES])["tokens"]
    assert ask(client, "/detokenize", tokens=tokens)["prompt"] == WANTED


def test_of_responses(client: httpx.Client) -> None:
    body = ask(client, "/v1/responses", instructions="S", input=MESSAGES, max_output_tokens=99)
    assert body["output"][0]["content"][0]["text"] == WANTED
    later: Any = [{"role": "developer", "content": "E"}, {"role": "user", "content": "d"}]
    body = ask(client, "/v1/responses", input=later, previous_response_id=body["id"], max_output_tokens=199)
    assert body["output"][0]["content"][0]["text"] == f"[s:T\n\nD\n\nE][u:a][a:b][u:c][a:{WANTED}][u:d]"


def test_of_anthropics_messages(client: httpx.Client) -> None:
    body = ask(client, "/v1/messages", system="S", messages=MESSAGES, max_tokens=99)
    assert body["content"][0]["text"] == WANTED


def test_of_ollamas_chats(client: httpx.Client) -> None:
    body = ask(client, "/api/chat", model="null", messages=[SYSTEM, *MESSAGES], stream=False)
    assert body["message"]["content"] == WANTED
