"""POST /v1/embeddings, over an engine whose vectors depend on a prompt's tokens alone."""

from __future__ import annotations

import array
import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from patience import wait_until
from server_here import ServerHere, serving_here

from headrace.frontend.http.options import ServeOptions
from headrace.ipc.messages import AddPrompts, AddRequest

WIDTH = 6
PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerHere]:
    with serving_here(ServeOptions(port=0, max_prompts=40), {"vector_width": WIDTH, "max_model_len": 64}) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerHere) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def embed(client: httpx.Client, given: Any, **more: Any) -> list[list[float]]:
    answer = client.post(PATH, json={"input": given, **more})
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [(item["index"], item["object"]) for item in data] == [(n, "embedding") for n in range(len(data))]
    return [item["embedding"] for item in data]


def refusal(client: httpx.Client, status: int, **body: Any) -> tuple[str | None, str]:
    answer = client.post(PATH, json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    return error["param"], error["message"]


def test_every_form_of_input(client: httpx.Client) -> None:
    (one,) = embed(client, [5, 6, 7])
    assert len(one) == WIDTH
    assert embed(client, [[5, 6, 7], [8]])[0] == one
    text, other = embed(client, ["hello", "world"])
    assert [text] == embed(client, "hello")
    assert text != other


def test_a_list_of_inputs_goes_to_the_engine_as_one_message(server: ServerHere, client: httpx.Client) -> None:
    alone = [embed(client, f"text {number}")[0] for number in range(12)]
    before = len(server.sent)
    assert embed(client, [f"text {number}" for number in range(12)]) == alone
    sent = [each for each in server.sent[before:] if isinstance(each, AddPrompts | AddRequest)]
    assert isinstance(sent[0], AddPrompts)
    assert sum(each.count if isinstance(each, AddPrompts) else 1 for each in sent) == 12
    assert server.requests()[-12].request_id.endswith("-0")


def test_the_response_is_openais(client: httpx.Client) -> None:
    answer = client.post(PATH, json={"input": [[5, 6], [7]], "model": "null", "user": "u"}).json()
    assert (answer["object"], answer["model"]) == ("list", "null")
    assert answer["id"].startswith("embd-")
    assert answer["usage"] == {"prompt_tokens": 3, "total_tokens": 3}


def test_base64_is_little_endian_float32(client: httpx.Client) -> None:
    (floats,) = embed(client, [5, 6, 7])
    (text,) = embed(client, [5, 6, 7], encoding_format="base64")
    assert array.array("f", base64.b64decode(str(text))).tolist() == floats


def test_openais_client_which_asks_for_base64_by_itself(server: ServerHere, client: httpx.Client) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        response = sdk.embeddings.create(model="null", input=["hello", "world"])
        assert [item.embedding for item in response.data] == embed(client, ["hello", "world"])
        with pytest.raises(openai.BadRequestError, match="does not support Matryoshka"):
            sdk.embeddings.create(model="null", input="hello", dimensions=2)


def test_texts_are_truncated_where_that_is_asked(client: httpx.Client) -> None:
    long = list(range(5, 75))
    assert embed(client, long, truncate_prompt_tokens=-1) == embed(client, long[:64])
    assert embed(client, long, truncate_prompt_tokens=3) == embed(client, long[:3])
    assert embed(client, long, truncate_prompt_tokens=3, truncation_side="left") == embed(client, long[-3:])
    param, said = refusal(client, 400, input=["x", "hello " * 100])
    assert "maximum context length is 64 tokens" in said
    assert (param or "").startswith("input")


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"input": []}, "input", "empty list"),
        ({"input": ""}, "input", "an input is empty"),
        ({"input": ["a", ""]}, "input[1]", "an input is empty"),
        ({"input": ["a", 5]}, "input[1]", "either texts or lists of token ids"),
        ({"input": [[5], "a"]}, "input[1]", "either texts or lists of token ids"),
        ({"input": [5, "a"]}, "input[1]", "integers alone"),
        ({"input": [[5], [5, "a"]]}, "input[1][1]", "int"),
        ({"input": [[5], [10**6]]}, "input[1]", "input[1][0] is 1000000"),
        ({"input": [-1]}, "input", "input[0] is -1"),
        ({"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "no token"),
        ({}, "input", "input"),
        ({"input": None}, "input", ""),
        ({"input": [[1]] * 41}, "input", "at most 40 at once"),
        ({"input": "x", "dimensions": 0}, "dimensions", "at least 1"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format", ""),
        ({"input": "x", "messages": [{"role": "user", "content": "x"}]}, "messages", "give one of them"),
        ({"messages": []}, "messages", "at least one"),
        ({"messages": [[{"role": "user", "content": "x"}], {"role": "user", "content": "x"}]}, "messages", "or lists"),
        ({"messages": [{"role": "user", "contents": "x"}]}, None, "contents"),
        ({"messages": [{"role": "user", "content": "x"}], "chat_template": "x"}, "chat_template", ""),
        ({"input": "x", "temperature": 0.5}, "temperature", ""),
        ({"input": "x", "dimension": 4}, "dimension", "dimensions"),
    ],
)
def test_bad_input_is_named(client: httpx.Client, body: dict[str, Any], param: str | None, said: str) -> None:
    found, message = refusal(client, 400, **body)
    assert param is None or found == param
    assert said in message


def test_a_conversation_is_embedded_as_the_text_that_the_template_makes_of_it(client: httpx.Client) -> None:
    """Special tokens are the template's own, as in vLLM."""
    said: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {"role": "assistant", "content": "world"},
    ]
    for more in ({}, {"add_generation_prompt": True}):
        asked = {"messages": said, "add_generation_prompt": False, **more}
        tokens = client.post("/tokenize", json=asked).json()["tokens"]
        got = client.post(PATH, json={"messages": said, **more})
        assert got.status_code == 200, got.text
        assert [item["embedding"] for item in got.json()["data"]] == embed(client, [tokens])
    two = client.post("/pooling", json={"messages": [said, said[:1]]}).json()["data"]
    assert [item["index"] for item in two] == [0, 1]
    assert two[0]["data"] != two[1]["data"]


@pytest.mark.system
def test_six_thousand_inputs_at_once_and_several_such_requests() -> None:
    """vLLM's issues 25568 and 25991, where the server died."""
    count = 6_000
    null = {"vector_width": 2, "max_model_len": 16}
    with serving_here(ServeOptions(port=0, max_prompts=count), null) as server, server.client() as client:
        inputs = [[5 + n % 50, 6] for n in range(count)]
        found = embed(client, inputs)
        assert found == [found[n % 50] for n in range(count)], "each its own, in order"
        with ThreadPoolExecutor(4) as threads:
            others = [threads.submit(embed, client, inputs[:1500]) for _ in range(4)]
            assert all(each.result() == found[:1500] for each in others)


def test_a_batch_of_embeddings(server: ServerHere, client: httpx.Client) -> None:
    body = '{"custom_id": "1", "method": "POST", "url": "/v1/embeddings", "body": {"input": [5, 6, 7]}}'
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        file = sdk.files.create(file=("in.jsonl", body.encode()), purpose="batch")
        batch = sdk.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
        wait_until(lambda: sdk.batches.retrieve(batch.id).status == "completed", 30, "the batch")
        output = sdk.files.content(sdk.batches.retrieve(batch.id).output_file_id or "").text
    assert json.loads(output)["response"]["body"]["data"][0]["embedding"] == embed(client, [5, 6, 7])[0]


@pytest.mark.parametrize(
    ("url", "body", "result"),
    [
        ("/score", {"queries": "hello", "documents": ["hello", "world"]}, "data"),
        ("/v2/rerank", {"query": "hello", "documents": ["world", "hello"]}, "results"),
    ],
)
def test_a_batch_of_scores(
    server: ServerHere, client: httpx.Client, url: str, body: dict[str, Any], result: str
) -> None:
    line = json.dumps({"custom_id": "1", "method": "POST", "url": url, "body": body})
    uploaded = client.post("/v1/files", files={"file": ("in.jsonl", line)}, data={"purpose": "batch"}).json()
    given = {"input_file_id": uploaded["id"], "endpoint": url, "completion_window": "24h"}
    batch = client.post("/v1/batches", json=given).json()
    place = f"/v1/batches/{batch['id']}"
    wait_until(lambda: client.get(place).json()["status"] == "completed", 30, "the batch")
    output = client.get(f"/v1/files/{client.get(place).json()['output_file_id']}/content").text
    assert json.loads(output)["response"]["body"][result] == client.post(url, json=body).json()[result]


def test_a_batch_has_no_bytes(server: ServerHere, client: httpx.Client) -> None:
    body = {"input": "x", "encoding_format": "bytes"}
    line = json.dumps({"custom_id": "1", "method": "POST", "url": PATH, "body": body})
    uploaded = client.post("/v1/files", files={"file": ("in.jsonl", line)}, data={"purpose": "batch"}).json()
    given = {"input_file_id": uploaded["id"], "endpoint": PATH, "completion_window": "24h"}
    place = f"/v1/batches/{client.post('/v1/batches', json=given).json()['id']}"
    wait_until(lambda: client.get(place).json()["status"] == "completed", 30, "the batch")
    errors = client.get(f"/v1/files/{client.get(place).json()['error_file_id']}/content").text
    assert "a batch gives JSON: ask for float or base64" in errors


def test_a_model_that_does_not_pool_says_how_it_could() -> None:
    with serving_here() as server, server.client() as client:
        _, said = refusal(client, 404, input="x")
        assert "--runner pooling" in said


def test_an_engine_that_pools_alone_does_not_generate() -> None:
    with serving_here(null_model={"vector_width": 4, "generates": False}) as server, server.client() as client:
        assert len(embed(client, "x")[0]) == 4
        for path, body in {
            "/v1/completions": {"prompt": "x"},
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
        }.items():
            answer = client.post(path, json=body)
            assert answer.status_code == 400
            assert "--runner generate" in answer.json()["error"]["message"]
