"""A tokenizer that panics of a text, on every route that makes tokens of one: a 400 that names the prompt, at once, and
the server goes on."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import null_with_tokenizer
import pytest
from fake_tokenizers import byte_level_tokenizer
from served_routes import ROUTES
from server_here import serving_here
from thinned import every
from tokenizers import Regex, pre_tokenizers

PANICS = "a" * 40 + "b"
"""A text at which the expression below passes the library's limit of tries."""
USER = {"role": "user", "content": PANICS}
HELLO = {"role": "user", "content": "Hello"}
TOOL = {"name": "f", "description": PANICS, "parameters": {"type": "object", "properties": {}}}
CASES: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [{"prompt": PANICS}, {"prompt": ["Hello", PANICS]}, {"prompt": PANICS, "echo": True}],
    "/v1/chat/completions": [
        {"messages": [USER]},
        {"messages": [HELLO, {"role": "assistant", "content": PANICS}, HELLO]},
        {"messages": [{"role": "system", "content": [{"type": "text", "text": PANICS}]}, HELLO]},
        {"messages": [HELLO], "bad_words": [PANICS]},
    ],
    "/v1/chat/completions/batch": [{"messages": [[HELLO], [USER]]}],
    "/v1/messages": [{"messages": [USER], "max_tokens": 4}, {"messages": [HELLO], "system": PANICS, "max_tokens": 4}],
    "/v1/messages/count_tokens": [{"messages": [USER]}],
    "/v1/responses": [{"input": PANICS}, {"input": "Hello", "instructions": PANICS}],
    "/v1/responses/input_tokens": [{"input": PANICS}],
    "/invocations": [{"prompt": PANICS}, {"messages": [USER]}],
    "/tokenize": [{"prompt": PANICS}, {"messages": [USER]}],
    "/api/chat": [{"messages": [USER]}, {"messages": [USER], "stream": False}],
    "/api/generate": [{"prompt": PANICS}, {"prompt": "Hello", "system": PANICS}, {"prompt": PANICS, "raw": True}],
}
STREAMED = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/invocations")
POOLED = {
    *("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/classify", "/v1/classify", "/v1/embeddings"),
    *("/embeddings", "/pooling", "/v2/embed", "/embed", "/embed_all", "/embed_sparse", "/predict", "/similarity", "/"),
    *("/api/embed", "/api/embeddings"),
}
"""This model makes no vectors, which is said before tokens are made."""
ADAPTERS = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/lora-adapters", "/adapters"}
WITHOUT_TEXT = {"/detokenize", "/v1/files", "/v1/batches", "/api/show", *POOLED, *ADAPTERS}
"""Routes with a body of which no tokens are made here."""


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    def hostile(vocab_size: int) -> Any:
        library = byte_level_tokenizer(vocab_size)
        split = pre_tokenizers.Split(Regex("(a+)+[cd]"), "isolated")
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        library.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
        return library

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(null_with_tokenizer, "byte_level_tokenizer", hostile)
        with serving_here() as server, server.client() as client:
            yield client


def test_every_route_that_takes_a_body_is_tried() -> None:
    with_body = {route.path for route in ROUTES if route.method == "POST" and route.request is not None}
    assert with_body <= {*CASES, *WITHOUT_TEXT}


@pytest.mark.parametrize(
    ("path", "body"),
    every(
        3,
        [(path, body) for path, bodies in CASES.items() for body in bodies]
        + [(path, {**body, "stream": True}) for path in STREAMED for body in CASES[path]],
    ),
)
def test_a_panic_is_the_requests_fault(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    answer = client.post(path, json={"model": "null", **body})
    assert answer.status_code == 400, answer.text
    assert "cannot be tokenised" in answer.text
    assert "Traceback" not in answer.text
    assert client.post("/v1/completions", json={"model": "null", "prompt": "Hi", "max_tokens": 2}).status_code == 200


def test_a_panic_in_a_batch_file_fails_its_line_alone(client: httpx.Client) -> None:
    bodies = [{"messages": [each], "model": "null", "max_tokens": 2} for each in (HELLO, USER, HELLO)]
    lines = [
        json.dumps({"custom_id": str(at), "method": "POST", "url": "/v1/chat/completions", "body": body})
        for at, body in enumerate(bodies)
    ]
    file = client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", "\n".join(lines))}).json()
    asked = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = client.post("/v1/batches", json=asked).json()
    end_s = time.monotonic() + 60
    while batch["status"] not in ("completed", "failed", "expired"):
        assert time.monotonic() < end_s, batch
        time.sleep(0.05)
        batch = client.get(f"/v1/batches/{batch['id']}").json()
    assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    assert "cannot be tokenised" in client.get(f"/v1/files/{batch['error_file_id']}/content").text
