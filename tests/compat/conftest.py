"""One engine and one server on a tiny model, shared by every test of this folder (that one process of pytest runs).

The tests follow from what vLLM's own demand; the file of vLLM's and the name stand above each.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import tiny_models
from http_server import Server, address_of_engine, serving

from headrace import LLM

MODEL = "tiny"
MAX_MODEL_LEN = 256


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save("llama", tmp_path_factory.mktemp("model"), tokenizer=True)


@pytest.fixture(scope="session")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    profiles = tmp_path_factory.mktemp("profiles")
    arguments = ["--served-model-name", MODEL, "--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN)]
    arguments += ["--max-num-seqs", "16", "--max-num-batched-tokens", "256", "--num-gpu-blocks-override", "512"]
    arguments += ["--server-dev-mode", "--profiler-config.torch_profiler_dir", str(profiles), "--scheduling-policy"]
    arguments += ["priority", "--enable-request-id-headers", "--trust-request-chat-template"]
    arguments += ["--worker-extension-cls", "worker_extension:Extension"]
    arguments += ["--max-logprobs", "-1"]
    arguments += ["--default-chat-template-kwargs", '{"mark": "!", "other": "?"}']
    with serving(str(folder), *arguments, attached=True) as server:
        yield server


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="session")
def address(server: Server) -> str:
    return address_of_engine(server)


@pytest.fixture(scope="session")
def llm(address: str) -> Iterator[LLM]:
    with LLM.connect(address) as llm:
        yield llm
