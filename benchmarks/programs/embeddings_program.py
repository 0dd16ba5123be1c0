"""Embeddings and rerankings by the clients that people use: OpenAI's, Cohere's, LangChain's, LlamaIndex's, Haystack's,
Hugging Face's (text-embeddings-inference) and infinity's. All must have the same vectors and orders as the routes."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

from web_program import free_port

MODEL, _ = sys.argv[1:]
TEXTS = ["the sky is blue", "hello", "a word and another one"]
NAME, QUERY = "tiny", "what colour has the sky"


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}{path}", data, headers)) as answer:
        return json.load(answer)


def check_close(what: str, found: Sequence[Sequence[float]], wanted: Sequence[Sequence[float]]) -> None:
    assert len(found) == len(wanted), what
    for ours, theirs in zip(found, wanted, strict=True):
        assert len(ours) == len(theirs), what
        assert math.dist(ours, theirs) < 1e-5, what


def openai(url: str, wanted: list[list[float]], order: list[int]) -> None:
    """It asks for base64 by itself."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    found = client.embeddings.create(model=NAME, input=TEXTS)
    check_close("openai", [item.embedding for item in found.data], wanted)


def cohere(url: str, wanted: list[list[float]], order: list[int]) -> None:
    import cohere as library

    client = library.ClientV2(api_key="none", base_url=url)
    kinds = ["float", "int8", "uint8", "binary", "ubinary"]
    found = client.embed(model=NAME, texts=TEXTS, input_type="search_document", embedding_types=kinds)
    assert found.embeddings.float_ is not None
    check_close("cohere", found.embeddings.float_, wanted)
    assert found.embeddings.binary is not None
    assert len(found.embeddings.binary[0]) == len(wanted[0]) // 8
    ranked = client.rerank(model=NAME, query=QUERY, documents=TEXTS, top_n=2)
    assert [each.index for each in ranked.results] == order[:2]


def langchain(url: str, wanted: list[list[float]], order: list[int]) -> None:
    from langchain_openai import OpenAIEmbeddings

    embeddings = OpenAIEmbeddings(base_url=f"{url}/v1", api_key="none", model=NAME, check_embedding_ctx_length=False)
    check_close("langchain", embeddings.embed_documents(TEXTS), wanted)
    check_close("langchain", [embeddings.embed_query(TEXTS[0])], wanted[:1])


def llama_index(url: str, wanted: list[list[float]], order: list[int]) -> None:
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding
    from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference

    client = OpenAILikeEmbedding(model_name=NAME, api_base=f"{url}/v1", api_key="none")
    check_close("llama-index", client.get_text_embedding_batch(TEXTS), wanted)
    of_tei = TextEmbeddingsInference(model_name=NAME, base_url=url, text_instruction=" ", query_instruction=" ")
    (found,) = of_tei.get_text_embedding_batch(TEXTS[1:2])
    assert len(found) == len(wanted[0])


def haystack(url: str, wanted: list[list[float]], order: list[int]) -> None:
    from haystack import Document
    from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
    from haystack.utils import Secret

    given: dict[str, Any] = {"api_key": Secret.from_token("none"), "api_base_url": f"{url}/v1", "model": NAME}
    check_close("haystack", [OpenAITextEmbedder(**given).run(TEXTS[0])["embedding"]], wanted[:1])
    embedder = OpenAIDocumentEmbedder(**given, progress_bar=False)
    documents = embedder.run([Document(content=text) for text in TEXTS])["documents"]
    check_close("haystack", [document.embedding for document in documents], wanted)


def hugging_face(url: str, wanted: list[list[float]], order: list[int]) -> None:
    """The client of text-embeddings-inference."""
    from huggingface_hub import InferenceClient

    client = InferenceClient(base_url=url)
    found = client.feature_extraction(TEXTS[0])
    check_close("huggingface_hub", [found.reshape(-1).tolist()], wanted[:1])
    scores = client.sentence_similarity(TEXTS[0], other_sentences=TEXTS, model=f"{url}/similarity")
    assert abs(scores[0] - 1) < 1e-4


def infinity(url: str, wanted: list[list[float]], order: list[int]) -> None:
    """The shapes of its API."""
    found = post(url, "/embeddings", {"model": NAME, "input": TEXTS, "encoding_format": "float"})
    check_close("infinity", [item["embedding"] for item in found["data"]], wanted)
    assert {"object", "data", "model", "usage", "id", "created"} <= found.keys()
    ranked = post(url, "/rerank", {"model": NAME, "query": QUERY, "documents": TEXTS, "return_documents": False})
    assert [each["index"] for each in ranked["results"]] == order
    assert {"results", "model", "usage", "id"} <= ranked.keys()


CLIENTS: tuple[Callable[[str, list[list[float]], list[int]], None], ...] = (
    openai,
    cohere,
    langchain,
    llama_index,
    haystack,
    hugging_face,
    infinity,
)


def main() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "headrace", "serve", MODEL, "--runner", "pooling", "--port", str(port)]
    server = subprocess.Popen([*command, "--served-model-name", NAME, "--dtype", "float32", "--max-model-len", "256"])
    failed = list[str]()
    try:
        for _ in range(1200):
            try:
                urllib.request.urlopen(f"{url}/health/ready")
                break
            except (urllib.error.URLError, ConnectionError):
                assert server.poll() is None, "the server ended"
                time.sleep(0.1)
        wanted = [item["embedding"] for item in post(url, "/v1/embeddings", {"input": TEXTS})["data"]]
        ranked = post(url, "/rerank", {"query": QUERY, "documents": TEXTS})["results"]
        order = [each["index"] for each in ranked]
        for client in CLIENTS:
            try:
                client(url, wanted, order)
                print(f"{client.__name__}: as the routes have it")
            except Exception as error:  # each client is told
                failed.append(f"{client.__name__}: {type(error).__name__}: {error}")
    finally:
        server.terminate()
        server.wait(60)
    print("\n".join(failed))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
