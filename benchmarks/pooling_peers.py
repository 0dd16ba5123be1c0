"""Embeddings and rerankings compared with other engines, alternately in one run.

    python benchmarks/pooling_peers.py --peers PEERS/bin/python [--infinity INFINITY/bin/python]
        [--llama-cpp LLAMA/bin/python] [--vllm VLLM/bin/python] [--only MiniLM-L6 ...] [--rounds 3] [--out FILE.json]

Models have their true dimensions and random weights; texts have 16, 128 or 512 tokens, or a log-normal mix. PEERS is an
environment with sentence-transformers, onnxruntime, onnx, fastembed, openvino and nncf (torch as here), INFINITY one
with infinity-emb, LLAMA one with llama-cpp-python and gguf, VLLM one with vLLM; those without an environment are left
out. A peer that fails is listed with its error. Figures are medians over the rounds,
in tokens per second; a single text's are milliseconds over HTTP (Headrace) or of a call (peers). A case has no further
rounds after 30 seconds; --share 0.05 with --rounds 1 is enough for Qwen3-Embedding-0.6B. Nothing else may run on the
machine meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import vllm_peer
from pooling_child import measured
from pooling_folders import SHAPES, make_folder, num_tokens, pairs_of, texts_of
from report import write_report

from headrace import LLM

HERE = Path(__file__).parent
PEERS = (
    *("sentence-transformers float32", "sentence-transformers bfloat16"),
    *("onnxruntime float32", "onnxruntime int8", "fastembed float32"),
    *("openvino float32", "openvino bfloat16", "openvino int8"),
)
OTHER_PEERS = {
    "infinity": ("infinity-emb float32", "infinity-emb bfloat16"),
    "llama_cpp": ("llama-cpp-python float32", "llama-cpp-python bfloat16", "llama-cpp-python q8_0"),
    "vllm": ("vllm bfloat16",),
}
"""By the option with their Python."""
OURS: dict[str, dict[str, Any]] = {
    "headrace float32": {"dtype": "float32"},
    "headrace bfloat16": {"dtype": "bfloat16"},
    "headrace int8": {"dtype": "bfloat16", "quantization": "int8"},
}
RERANKERS = ("sentence-transformers", "vllm")
COUNTS = {"16": 1000, "128": 200, "512": 50, "mix": 200, "one": 1}
RERANKER = "XLM-R-base reranker"


def cases_of(shape: str, rounds: int, share: float) -> list[dict[str, Any]]:
    """share: of the usual number of texts."""
    if shape == RERANKER:
        return [{"name": "rerank", "kind": "rerank", "count": max(1, round(100 * share)), "rounds": rounds}]
    found = []
    for name, count in COUNTS.items():
        kind = "16" if name == "one" else name
        more = max(5, round(50 * share)) if name == "one" else 1
        found.append({"name": name, "kind": kind, "count": max(1, round(count * share)), "rounds": rounds * more})
    return found


def ours(folder: Path, options: dict[str, Any], cases: list[dict[str, Any]]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    with LLM(str(folder), use_tqdm_on_load=False, max_model_len=512, **options) as llm:
        for case in cases:
            if case["kind"] == "rerank":
                pairs = pairs_of()[: case["count"]]
                tokens = num_tokens([" ".join(pair) for pair in pairs])
                query, documents = pairs[0][0], [document for _, document in pairs]
                run: Any = lambda query=query, documents=documents: llm.score(query, documents, use_tqdm=False)  # noqa: E731
            else:
                texts = texts_of(case["kind"], case["count"])
                tokens = num_tokens(texts)
                run = lambda texts=texts: llm.embed(texts, use_tqdm=False)  # noqa: E731
            results[case["name"]] = measured(run, tokens, case["rounds"])
    return results


def over_http(folder: Path, rounds: int, share: float) -> dict[str, Any]:
    """One text of 16 tokens at a time, and 1,000 (or their share) in one request."""
    with tempfile.TemporaryDirectory() as where:
        path = f"{where}/http.sock"
        command = [sys.executable, "-m", "headrace", "serve", str(folder), "--uds", path, "--max-model-len", "512"]
        server = subprocess.Popen(
            [*command, "--max-prompts", "1000"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            until_ready(path, server)
            (one,), many = texts_of("16", 1), texts_of("16", max(1, round(1000 * share)))
            connection = UnixConnection(path)

            def post(given: Any) -> None:
                body = json.dumps({"input": given, "encoding_format": "base64"})
                connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                told = answer.read()
                if answer.status != 200:
                    raise RuntimeError(f"the server answered {answer.status}: {told[:300]!r}")

            single = measured(lambda: post(one), 16, 100 * rounds)
            return {"one": single, f"{len(many)} of 16": measured(lambda: post(many), num_tokens(many), rounds)}
        finally:
            server.terminate()
            server.wait(60)


class UnixConnection(http.client.HTTPConnection):
    """One that is kept, over a Unix socket: httpx takes a millisecond of processor time for each request."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=600)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def until_ready(path: str, server: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + 300
    while time.monotonic() < deadline_s and server.poll() is None:
        connection = UnixConnection(path)
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/health/ready")
            if connection.getresponse().status == 200:
                return
        connection.close()
        time.sleep(0.1)
    raise RuntimeError(f"the server did not become ready: {server.poll()}")


def peer(python: Path, name: str, folder: Path, cases: list[dict[str, Any]]) -> dict[str, Any]:
    command = [str(python), str(HERE / "pooling_child.py"), name, str(folder), json.dumps(cases)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if name in OTHER_PEERS["vllm"]:
        environment |= vllm_peer.settings(python.parents[1])
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else str(done.returncode)}
    lines = done.stdout.splitlines()  # vLLM logs there, too
    found: dict[str, Any] = json.loads(next(line for line in reversed(lines) if line.startswith("{")))
    return found


def takes(name: str, shape: str) -> bool:
    """Whether a peer can be measured with a model: onnxruntime's and OpenVINO's vectors are means here, and GGUF files
    are written of BERT alone."""
    if shape == RERANKER:
        return name.startswith(RERANKERS)
    return SHAPES[shape][0] == "BertModel" or name.startswith(("sentence-transformers", "infinity-emb", "vllm"))


def table(results: dict[str, Any]) -> str:
    lines = ["| model | engine | case | tokens/s | p50, ms |", "|---|---|---|---|---|"]
    for shape, engines in results.items():
        for engine, cases in engines.items():
            for name, case in cases.items():
                if name == "error":
                    lines.append(f"| {shape} | {engine} | {case} | | |")
                    continue
                milliseconds = 1e3 * statistics.median(case["seconds"])
                lines.append(f"| {shape} | {engine} | {name} | {case['tok_s']:,.0f} | {milliseconds:,.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="a Python with the peers' packages")
    parser.add_argument("--infinity", type=Path, help="a Python with infinity-emb")
    parser.add_argument("--llama-cpp", type=Path, help="a Python with llama-cpp-python")
    parser.add_argument("--vllm", type=Path, help="a Python with vLLM")
    parser.add_argument("--only", nargs="*", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", type=float, default=1.0, help="of the usual number of texts")
    parser.add_argument("--folders", type=Path, help="where the models are made and kept; default: a temporary folder")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for shape in arguments.only:
            folder = make_folder(shape, (arguments.folders or Path(temporary)) / shape.replace(" ", "-"))
            cases, found = cases_of(shape, arguments.rounds, arguments.share), dict[str, Any]()
            for name, options in OURS.items():
                found[name] = ours(folder, options, cases)
            if shape != RERANKER:
                found["headrace bfloat16, HTTP"] = over_http(folder, arguments.rounds, arguments.share)
            for option, names in {"peers": PEERS, **OTHER_PEERS}.items():
                python = getattr(arguments, option)
                for name in names if python is not None else ():
                    if takes(name, shape):
                        found[name] = peer(python, name, folder, cases)
            results[shape] = found
            print(table({shape: found}), flush=True)
    if arguments.out is not None:
        write_report(arguments.out, "pooling_peers", results)


if __name__ == "__main__":
    main()
