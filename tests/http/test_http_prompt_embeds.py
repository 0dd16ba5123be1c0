"""Prompt embeddings over HTTP: what reaches the engine, and what is refused."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save
from server_here import ServerHere, serving_here

from headrace.executor.testing.null import INPUT_WIDTH
from headrace.frontend.http.options import ServeOptions
from headrace.ipc.row_inputs import RowInput

ROWS = torch.randn(5, INPUT_WIDTH, generator=torch.Generator().manual_seed(0))


def file_of(tensor: Any) -> str:
    file = io.BytesIO()
    torch.save(tensor, file)
    return base64.b64encode(file.getvalue()).decode()


@pytest.fixture(scope="module")
def server() -> Iterator[ServerHere]:
    with serving_here(ServeOptions(port=0), enable_prompt_embeds=True) as server:
        yield server


@pytest.fixture
def client(server: ServerHere) -> Iterator[httpx.Client]:
    server.sent.clear()
    with server.client() as client:
        yield client


def values(given: RowInput) -> torch.Tensor:
    (tensor,) = given.tensors
    return torch.frombuffer(bytearray(tensor.data), dtype=getattr(torch, tensor.dtype)).reshape(tensor.shape)


def test_a_completion_continues_embeddings_and_then_prompts(server: ServerHere, client: httpx.Client) -> None:
    safetensors = base64.b64encode(save({"x": ROWS.half()})).decode()
    body = {"max_tokens": 2, "prompt_embeds": [file_of(ROWS.bfloat16()), safetensors], "prompt": [[5, 6, 7]]}
    answer = client.post("/v1/completions", json=body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["prompt_tokens"] == 13
    first, second, third = server.requests()
    assert torch.equal(values(first.inputs[0]), ROWS.bfloat16())
    assert torch.equal(values(second.inputs[0]), ROWS.half())
    assert first.prompt_token_ids.tolist() == [0] * 5
    assert (third.inputs, third.prompt_token_ids.tolist()) == ((), [5, 6, 7])
    server.sent.clear()
    for prompt in ({}, {"prompt": None}, {"prompt": ""}):
        body = {"max_tokens": 1, "prompt_embeds": file_of(ROWS), "n": 2, "temperature": 1.0, **prompt}
        assert len(client.post("/v1/completions", json=body).json()["choices"]) == 2
    assert [len(request.inputs) for request in server.requests()] == [1] * 6


def test_parts_of_messages_stand_where_the_template_writes_them(server: ServerHere, client: httpx.Client) -> None:
    def ask(content: Any) -> Any:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return server.requests()[-1]

    part = {"type": "prompt_embeds", "data": file_of(ROWS)}
    asked = ask([{"type": "text", "text": "before "}, part, {"type": "text", "text": " after "}, part])
    plain = ask([{"type": "text", "text": "before "}, {"type": "text", "text": " after "}])
    ids, (first, second) = asked.prompt_token_ids.tolist(), asked.inputs
    assert [ids[each.start : each.end] for each in (first, second)] == [[0] * 5, [0] * 5]
    assert torch.equal(values(first), ROWS)
    rest = [token for at, token in enumerate(ids) if not any(each.start <= at < each.end for each in (first, second))]
    assert len(rest) >= len(plain.prompt_token_ids.tolist())
    assert first.start > 0
    assert second.start > first.end


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt_embeds": file_of(ROWS), "echo": True}, "Echo is unsupported with prompt embeds."),
        ({"prompt_embeds": file_of(ROWS), "prompt_logprobs": 1}, "prompt_logprobs is not compatible"),
        ({"prompt_embeds": file_of(ROWS[:, :7])}, "hidden_size 7 does not match the model's hidden_size 64"),
        ({"prompt_embeds": file_of(ROWS.long())}, "dtype int64 is not a floating-point type"),
        ({"prompt_embeds": file_of(ROWS[None, None])}, "must be a 2D tensor"),
        ({"prompt_embeds": [file_of(ROWS), file_of({"a": ROWS})]}, "could not be deserialized as a torch tensor"),
        ({"prompt_embeds": "no base64!"}, "is not base64"),
        ({"prompt_embeds": ""}, "Either prompt or prompt_embeds"),
        ({"prompt_embeds": []}, "Either prompt or prompt_embeds"),
        ({"prompt_embeds": file_of(ROWS * torch.inf)}, "is not finite"),
        ({"prompt_embeds": file_of(ROWS.double() * 1e300)}, "is not finite in "),
        ({"prompt_embeds": file_of(ROWS[:0])}, "prompt_embeds has no rows"),
    ],
)
def test_what_cannot_be_taken_is_a_400_that_says_why(client: httpx.Client, body: Any, words: str) -> None:
    answer = client.post("/v1/completions", json={"max_tokens": 1, **body})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    files = body["prompt_embeds"]
    expected = "echo" if "echo" in body else "prompt_logprobs" if "prompt_logprobs" in body else "prompt_embeds"
    assert answer.json()["error"]["param"] == expected + ("[1]" if isinstance(files, list) and files else "")


def test_parts_that_cannot_be_taken_name_their_message(client: httpx.Client) -> None:
    part = {"type": "prompt_embeds", "data": file_of(ROWS)}
    for content, words in (
        ([{"type": "prompt_embeds", "data": ""}], "requires a non-empty `data` field"),
        ([part, {"type": "text", "text": "a <prompt_embeds> b"}], "may not contain the reserved placeholder"),
        ([{"type": "prompt_embeds", "data": "x"}], "is not base64"),
    ):
        answer = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]})
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == "messages[0].content"


def test_what_gives_the_tokens_of_a_conversation_says_that_they_have_none(client: httpx.Client) -> None:
    part = {"type": "prompt_embeds", "data": file_of(ROWS)}
    answer = client.post("/tokenize", json={"messages": [{"role": "user", "content": [part]}]})
    assert answer.status_code == 400
    assert "embeddings have no token ids" in answer.json()["error"]["message"]


def test_without_the_option_they_are_refused() -> None:
    with serving_here(ServeOptions(port=0)) as server, server.client() as client:
        answer = client.post("/v1/completions", json={"prompt_embeds": file_of(ROWS)})
        assert answer.status_code == 400
        assert "You must set `--enable-prompt-embeds` to input `prompt_embeds`" in answer.json()["error"]["message"]
