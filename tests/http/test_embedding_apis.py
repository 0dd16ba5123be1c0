"""The APIs of embeddings besides /v1/embeddings: /pooling, Cohere's, text-embeddings-inference's and Ollama's, over an
engine whose vectors depend on a prompt's tokens alone."""

from __future__ import annotations

import array
import base64
import json
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from server_here import ServerHere, serving_here

from headrace.core.options.option import Secret
from headrace.frontend.http.apis.pooling.embeddings import EmbeddingRequest, PoolingRequest
from headrace.frontend.http.apis.pooling.scores import ClassifyRequest
from headrace.frontend.http.apis.sagemaker.routes import kinds_of
from headrace.frontend.http.options import ServeOptions
from headrace.frontend.request.vector_encodings import as_bits, as_bytes, as_int8, as_uint8

WIDTH, LIMIT = 16, 64
LONG = "hello " * 100


@pytest.fixture(scope="module")
def server() -> Iterator[ServerHere]:
    with serving_here(ServeOptions(port=0, max_prompts=40), {"vector_width": WIDTH, "max_model_len": LIMIT}) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerHere) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def answer(client: httpx.Client, path: str, **body: Any) -> Any:
    got = client.post(path, json=body)
    assert got.status_code == 200, got.text
    return got.json()


def vectors(client: httpx.Client, texts: list[Any], **more: Any) -> list[list[float]]:
    return [each["embedding"] for each in answer(client, "/v1/embeddings", input=texts, **more)["data"]]


def test_pooling_gives_the_models_first_task(client: httpx.Client) -> None:
    found = answer(client, "/pooling", input=["hello", "world"])
    assert [each["data"] for each in found["data"]] == vectors(client, ["hello", "world"])
    assert [(each["index"], each["object"]) for each in found["data"]] == [(0, "pooling"), (1, "pooling")]
    assert (found["id"][:5], found["object"], found["model"]) == ("pool-", "list", "null")
    assert answer(client, "/pooling", input="hello", task="embed")["data"] == found["data"][:1]


def test_invocations_are_what_the_model_does_with_their_fields(client: httpx.Client) -> None:
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/embeddings", {"input": ["hello", "world"]}),
        ("/score", {"queries": "hello", "documents": ["world", "hello"]}),
        ("/score", {"text_1": "hello", "text_2": "world"}),
        ("/rerank", {"query": "hello", "documents": ["world", "hello"]}),
    ]
    for path, body in asked:
        wanted, found = answer(client, path, **body), answer(client, "/invocations", **body)
        for each in (wanted, found):
            each["id"] = each["id"].split("-")[0]
            each.pop("created", None)
        assert found == wanted, path
    assert "choices" in answer(client, "/invocations", prompt="hello", max_tokens=1), "it generates too"


@pytest.mark.parametrize(
    ("tasks", "kind"), [("embed", EmbeddingRequest), ("classify", ClassifyRequest), ("token_classify", PoolingRequest)]
)
def test_invocations_of_a_model_that_pools_alone(tasks: str, kind: type[Any]) -> None:
    welcome: Any = SimpleNamespace(generates=False, pooling=SimpleNamespace(kinds=(tasks,)))
    found = kinds_of(welcome)
    assert (found["messages"], found["input"], found.get("prompt")) == (kind, kind, None)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling", "/embeddings"])
def test_numbers_of_fewer_bytes_are_torchs(client: httpx.Client, path: str) -> None:
    (floats,) = vectors(client, ["hello"])
    kinds = {
        "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
        "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2,
    }  # fmt: skip
    for name, dtype in kinds.items():
        got = answer(client, path, input="hello", encoding_format="base64", embed_dtype=name)["data"][0]
        data = base64.b64decode(got["data" if path == "/pooling" else "embedding"])
        assert torch.equal(
            torch.frombuffer(bytearray(data), dtype=dtype).float(), torch.tensor(floats).to(dtype).float()
        ), name


def test_bytes_are_told_of_in_a_header(client: httpx.Client) -> None:
    wanted = vectors(client, ["hello", "world"])
    body = {"input": ["hello", "world"], "encoding_format": "bytes", "embed_dtype": "float16", "endianness": "big"}
    got = client.post("/v1/embeddings", json=body)
    assert got.headers["content-type"] == "application/octet-stream"
    told = json.loads(got.headers["metadata"])
    fields = {"index", "embed_dtype", "endianness", "start", "end", "shape"}
    assert all(each.keys() == fields for each in told["data"]), "vLLM's clients make an object of these"
    for item, vector in zip(told["data"], wanted, strict=True):
        found = struct.unpack(f">{WIDTH}e", got.content[item["start"] : item["end"]])
        assert found == pytest.approx(vector, rel=1e-3)
        assert (item["shape"], item["embed_dtype"], item["endianness"]) == ([WIDTH], "float16", "big")
    assert (told["object"], told["model"], told["usage"]["prompt_tokens"]) == (
        "list",
        "null",
        told["usage"]["total_tokens"],
    )
    plain = client.post("/v1/embeddings", json={"input": ["hello", "world"], "encoding_format": "bytes_only"})
    assert "metadata" not in plain.headers
    assert array.array("f", plain.content).tolist() == [value for vector in wanted for value in vector]


@pytest.mark.parametrize("seed", range(3))
def test_conversions_are_those_of_torch_and_numpy(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    spread = 10.0 ** torch.randint(-9, 6, (4096,), generator=generator)
    values = torch.randn(4096, generator=generator) * spread
    values[:4] = torch.tensor([0.0, -0.0, 448.0, 65519.0])
    view = memoryview(array.array("f", values.tolist()))
    kinds: dict[Any, torch.dtype] = {
        "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
        "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2,
    }  # fmt: skip
    for name, dtype in kinds.items():
        wanted = values.to(dtype).view(torch.uint8).numpy().tobytes()
        found = as_bytes(view, name)
        same = torch.frombuffer(bytearray(found), dtype=dtype).float() == values.to(dtype).float()
        is_nan = values.to(dtype).float().isnan() & torch.frombuffer(bytearray(found), dtype=dtype).float().isnan()
        assert len(found) == len(wanted)
        assert bool((same | is_nan).all()), name


def test_vectors_of_few_bits() -> None:
    values = [0.5, -0.25, 0.0, -1.0, 0.125, 0.0, 0.75, -0.5]
    assert as_int8(values) == [64, -32, 0, -127, 16, 0, 95, -64]
    assert as_uint8(values) == [each + 128 for each in as_int8(values)]
    assert as_bits(values, signed=False) == [0b10101110]
    assert as_bits(values, signed=True) == [0b10101110 - 128]
    assert as_int8([0.0, 0.0]) == [0, 0]


def test_coheres_embeddings(client: httpx.Client) -> None:
    types = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    got = answer(
        client, "/v2/embed", model="null", texts=["hello", "world"], input_type="search_query", embedding_types=types
    )
    wanted, found = vectors(client, ["hello", "world"]), got["embeddings"]
    assert list(found) == types
    assert found["float"] == wanted
    assert [array.array("f", base64.b64decode(each)).tolist() for each in found["base64"]] == wanted
    assert found["int8"] == [as_int8(each) for each in wanted]
    assert found["uint8"] == [as_uint8(each) for each in wanted]
    assert found["ubinary"] == [as_bits(each, signed=False) for each in wanted]
    assert found["binary"] == [as_bits(each, signed=True) for each in wanted]
    assert (got["texts"], got["response_type"]) == (["hello", "world"], "embeddings_by_type")
    assert got["meta"]["api_version"] == {"version": "2"}
    billed = got["meta"]["billed_units"]
    assert (billed["input_tokens"] > 0, billed["image_tokens"]) == (True, 0)
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    of_parts = answer(client, "/v2/embed", inputs=[{"content": parts}])
    assert of_parts["embeddings"] == {"float": wanted[:1]}


def test_each_api_cuts_long_texts_by_its_own_default(client: httpx.Client) -> None:
    (cut,), (last,) = (vectors(client, [LONG], truncate_prompt_tokens=-1, truncation_side=s) for s in ("right", "left"))
    assert answer(client, "/v2/embed", texts=[LONG])["embeddings"]["float"] == [cut]
    assert answer(client, "/v2/embed", texts=[LONG], truncate="START")["embeddings"]["float"] == [last]
    assert answer(client, "/embed", inputs=LONG, normalize=False) == answer(client, "/embed", inputs=[LONG])
    assert answer(client, "/embed", inputs=LONG) == [cut]
    assert answer(client, "/embed", inputs=LONG, truncation_direction="Left") == [last]
    assert answer(client, "/api/embed", model="null", input=LONG)["embeddings"] == [cut]
    assert answer(client, "/api/embeddings", model="null", prompt=LONG)["embedding"] == cut
    for path, body in (
        ("/v1/embeddings", {"input": LONG}),
        ("/pooling", {"input": LONG}),
        ("/v2/embed", {"texts": [LONG], "truncate": "NONE"}),
        ("/embed", {"inputs": LONG, "truncate": False}),
        ("/api/embed", {"model": "null", "input": LONG, "truncate": False}),
    ):
        refused = client.post(path, json=body)
        assert refused.status_code == (422 if path == "/embed" else 400), path
        assert str(LIMIT) in refused.text, path


def test_a_cut_text_is_that_of_the_whole_however_long(client: httpx.Client) -> None:
    text = " ".join(f"word{n}" for n in range(60_000))
    for side in ("right", "left"):
        (whole,) = vectors(
            client, [text[:2000] if side == "right" else text[-2000:]], truncate_prompt_tokens=9, truncation_side=side
        )
        (found,) = vectors(client, [text], truncate_prompt_tokens=9, truncation_side=side)
        assert found == whole, side


def test_tei(client: httpx.Client) -> None:
    wanted = vectors(client, ["hello", "world"])
    assert answer(client, "/embed", inputs=["hello", "world"]) == wanted
    assert answer(client, "/embed", inputs="hello") == wanted[:1]
    assert answer(client, "/embed", inputs=[[5, 6], [7]]) == vectors(client, [[5, 6], [7]])
    assert answer(client, "/", inputs=["hello"]) == wanted[:1]
    inputs = {"source_sentence": "hello", "sentences": ["hello", "world"]}
    same, other = answer(client, "/similarity", inputs=inputs, parameters={"truncate": True})
    assert same == pytest.approx(1.0)
    assert other == pytest.approx(torch.cosine_similarity(*torch.tensor(wanted), dim=0).item(), abs=1e-5)
    best, worst = answer(client, "/rerank", query="hello", texts=["world", "hello"], return_text=True)
    assert (best["index"], best["text"], worst["index"], worst["text"]) == (1, "hello", 0, "world")
    assert answer(client, "/rerank", query="hello", texts=["world", "hello"]) == [
        {"index": each["index"], "score": each["score"]} for each in (best, worst)
    ]
    info = client.get("/info").json()
    assert (info["model_id"], info["max_input_length"], info["max_client_batch_size"]) == ("null", LIMIT, 40)
    assert info["model_type"] == {"embedding": {"pooling": "last"}}


def test_ollamas_embeddings(client: httpx.Client) -> None:
    wanted = vectors(client, ["hello", "world"])
    got = answer(client, "/api/embed", model="null:latest", input=["hello", "world"], options={"num_ctx": 32})
    assert (got["embeddings"], got["model"]) == (wanted, "null:latest")
    assert got["prompt_eval_count"] > 0
    assert got["total_duration"] > 0
    assert answer(client, "/api/embed", model="null", input="hello")["embeddings"] == wanted[:1]
    assert answer(client, "/api/embeddings", model="null", prompt="hello") == {"embedding": wanted[0]}
    assert answer(client, "/api/embed", model="null", input=[])["embeddings"] == []
    assert answer(client, "/api/embeddings", model="null", prompt="") == {"embedding": []}
    shown = answer(client, "/api/show", model="null")
    assert "embedding" in shown["capabilities"]


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/pooling", {"input": "x", "task": "score"}, "score"),
    ("/pooling", {"input": "x", "task": "classify"}, "classify"),
    ("/pooling", {"input": "x", "step_tag_id": 5}, "step_tag_id"),
    ("/pooling", {"input": "x", "data": {}}, "data"),
    ("/pooling", {"input": "x", "task": "plugin"}, "No IOProcessor plugin installed"),
    ("/pooling", {"input": "x", "truncate_prompt_tokens": LIMIT + 1}, "smaller truncation size: at most 64"),
    ("/v1/embeddings", {"input": "x", "truncate_prompt_tokens": LIMIT + 1}, "smaller truncation size: at most 64"),
    ("/score", {"queries": "x", "documents": "y", "truncate_prompt_tokens": LIMIT + 1}, "smaller truncation size"),
    ("/pooling", {"input": []}, "input is an empty list"),
    ("/pooling", {"input": "x", "prompt_name": "query"}, "no prompt with the name 'query'"),
    ("/v1/embeddings", {"input": "x", "input_type": "nonsense"}, "known: search_query, search_document"),
    ("/v1/embeddings", {"input": "x", "embed_dtype": "int4"}, "float32, float16, bfloat16, fp8_e4m3, fp8_e5m2"),
    ("/v1/embeddings", {"input": "x", "endianness": "middle"}, "native, big, little"),
    ("/v1/embeddings", {"input": "x", "encoding_format": "hex"}, "float, base64, bytes, bytes_only"),
    ("/v2/embed", {}, "texts or inputs"),
    ("/v2/embed", {"texts": ["x"], "inputs": []}, "texts or inputs"),
    ("/v2/embed", {"texts": []}, "texts is an empty list"),
    ("/v2/embed", {"texts": ["x", ""]}, "an input is empty"),
    ("/v2/embed", {"texts": ["x"] * 41}, "at most 40 at once"),
    ("/v2/embed", {"texts": ["x"], "input_type": "image"}, "Unsupported input_type 'image'; known: search_query"),
    (
        "/v2/embed",
        {"texts": ["x"], "embedding_types": ["int4"]},
        "embedding_types[0]: invalid enum value 'int4'; it must be one of float,",
    ),
    ("/v2/embed", {"texts": ["x"], "output_dimension": 4}, "does not support Matryoshka"),
    ("/v2/embed", {"texts": ["x"], "images": ["data:"]}, "models read text alone"),
    ("/v2/embed", {"inputs": [{"content": [{"type": "image_url"}]}]}, "inputs[0].content"),
    ("/v2/embed", {"texts": ["x"], "truncate": "MIDDLE"}, "NONE, START, END"),
    ("/embed", {"inputs": []}, "inputs is an empty list"),
    ("/embed", {"inputs": ["a", ""]}, "an input is empty"),
    ("/embed", {}, "inputs"),
    ("/embed", {"inputs": "x", "dimensions": 0}, "dimensions must be an integer of at least 1"),
    ("/embed", {"inputs": "x", "prompt_name": "query"}, "no prompt with the name 'query'"),
    ("/embed", {"inputs": [[10**6]]}, "1000000"),
    ("/embed_all", {"inputs": "x"}, "token_embed"),
    ("/embed_sparse", {"inputs": "x"}, "embed_sparse"),
    ("/predict", {"inputs": "x"}, "classify"),
    ("/similarity", {"inputs": {"source_sentence": "x", "sentences": []}}, "inputs.sentences is an empty list"),
    ("/similarity", {"inputs": "x"}, "inputs"),
    ("/rerank", {"query": "x", "texts": []}, "texts is an empty list"),
    ("/api/embed", {"input": "x"}, "model"),
    ("/api/embed", {"model": "null", "input": ["x", ""]}, "an input is empty"),
    ("/api/embed", {"model": "null", "input": "x", "options": {"temperature": 1}}, "options.temperature"),
    ("/api/embed", {"model": "null", "input": "x", "options": {"num_ctx": 10**6}}, "num_ctx is 1000000"),
    ("/api/embed", {"model": "null", "input": "x", "dimensions": 4}, "does not support Matryoshka"),
    ("/api/embeddings", {"model": "null"}, "prompt"),
]


@pytest.mark.parametrize(("path", "body", "said"), BAD)
def test_bad_input_is_named(client: httpx.Client, path: str, body: dict[str, Any], said: str) -> None:
    got = client.post(path, json=body)
    error = got.json()["error"]
    assert said in (error if isinstance(error, str) else error["message"])
    is_tei, is_empty = path in TEI or ("texts" in body and path == "/rerank"), "empty list" in said
    assert got.status_code == (422 if is_tei and not is_empty else 400), got.text
    if is_tei:
        assert got.json()["error_type"] == ("Empty" if is_empty else "Validation")


TEI = ("/embed", "/embed_all", "/embed_sparse", "/predict", "/similarity")


def test_other_errors_have_teis_statuses(client: httpx.Client) -> None:
    """As the routes of text-embeddings-inference 1.9 tell them apart (router/src/http/server.rs)."""
    for content in (b"{", b"[1]"):
        got = client.post("/embed", content=content, headers={"content-type": "application/json"})
        assert (got.status_code, got.json()["error_type"]) == (400, "Validation")
    many = client.post("/embed", json={"inputs": ["x"] * 41})
    assert (many.status_code, many.json()["error_type"]) == (422, "Validation")
    unknown = client.post("/embed", json={"inputs": "x", "model": "other"})
    assert (unknown.status_code, unknown.json()["error_type"]) == (404, "Validation")


PATHS = sorted({path for path, _, _ in BAD} | {"/", "/rerank", "/embeddings", "/score", "/classify"})


def test_every_route_wants_the_key() -> None:
    with (
        serving_here(ServeOptions(port=0, api_key=(Secret("secret"),)), {"vector_width": 8}) as server,
        server.client() as client,
    ):
        for path in PATHS:
            assert client.post(path, json={"input": "x", "inputs": "x"}).status_code == 401, path
        assert client.get("/info").status_code == 401
        key = {"authorization": "Bearer secret"}
        assert client.post("/embed", json={"inputs": "hello"}, headers=key).status_code == 200


def test_a_model_that_generates_says_what_it_is() -> None:
    with serving_here() as server, server.client() as client:
        for path, body in (
            ("/pooling", {"input": "x"}),
            ("/v2/embed", {"texts": ["x"]}),
            ("/embed", {"inputs": "x"}),
            ("/predict", {"inputs": "x"}),
            ("/api/embed", {"model": "null", "input": "x"}),
        ):
            got = client.post(path, json=body)
            assert (got.status_code, "--runner pooling" in got.text) == (404, True), path
