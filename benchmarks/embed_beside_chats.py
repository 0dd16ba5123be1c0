"""Chats that stream from one server while another one on the machine embeds many texts: memory and streams' gaps.

    python benchmarks/embed_beside_chats.py [--texts 100000] [--chats 8] [--out FILE.json]

The embedding model has MiniLM's shape, the chat model 20 million parameters, both with random weights. Reported: texts
per second; the embedding server's memory (of all its processes, proportional) each second, with the growth from the end
of the first quarter to the end; and the gaps between a stream's pieces alone and beside the texts. Both share the
cores, so that gaps grow: what is shown is by how much.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from pooling_folders import WORDS, make_folder, texts_of, word
from pooling_peers import UnixConnection, until_ready
from report import write_report

AT_ONCE = 500
CHAT_TOKENS = 64


def chat_folder(folder: Path) -> Path:
    """A tiny Llama with the words of the embedding model's texts."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word(n): n for n in range(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1")
    made.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    made.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6,
        tie_word_embeddings=True,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


@contextlib.contextmanager
def serving(folder: Path, socket: str, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "headrace", "serve", str(folder), "--uds", socket, *options]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until_ready(socket, server)
        yield server
    finally:
        server.terminate()
        server.wait(60)


def memory_mb(server: subprocess.Popen[bytes]) -> float:
    process, total = psutil.Process(server.pid), 0.0
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            total += each.memory_full_info().pss
    return total / 1e6


class Chats:
    """Streams that follow one another on some connections until they are stopped."""

    def __init__(self, socket: str, count: int) -> None:
        self.gaps_s: list[float] = []
        self.errors: list[str] = []
        self._socket, self._stop = socket, threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(count)]

    def __enter__(self) -> Chats:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        connection = UnixConnection(self._socket)
        said = {"messages": [{"role": "user", "content": f"w{number + 5} w7 w8"}], "stream": True}
        body = json.dumps({**said, "max_tokens": CHAT_TOKENS, "ignore_eos": True})
        while not self._stop.is_set():
            try:
                self._stream(connection, body)
            except (OSError, http.client.HTTPException) as error:
                self.errors.append(repr(error))
                return

    def _stream(self, connection: http.client.HTTPConnection, body: str) -> None:
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        answer, before_s = connection.getresponse(), None
        if answer.status != 200:
            raise http.client.HTTPException(answer.read()[:200])
        while line := answer.readline():
            if line.startswith(b"data: {"):
                now_s = time.perf_counter()
                if before_s is not None:
                    self.gaps_s.append(now_s - before_s)
                before_s = now_s


def gaps_of(chats: Chats) -> dict[str, float]:
    ordered = sorted(chats.gaps_s)
    at = {name: 1e3 * ordered[int(share * (len(ordered) - 1))] for name, share in (("p50", 0.5), ("p99", 0.99))}
    return {**at, "max": 1e3 * ordered[-1], "pieces": len(ordered), "errors": len(chats.errors)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=100_000)
    parser.add_argument("--chats", type=int, default=8)
    parser.add_argument("--alone", type=float, default=10.0, help="seconds of chats alone")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    texts, results = texts_of("16", AT_ONCE), dict[str, Any]()
    body = json.dumps({"input": texts, "encoding_format": "base64"})
    with tempfile.TemporaryDirectory() as temporary:
        where = Path(temporary)
        embedder, chatter = make_folder("MiniLM-L6", where / "embed"), chat_folder(where / "chat")
        sockets = [str(where / f"{name}.sock") for name in ("embed", "chat")]
        with (
            serving(embedder, sockets[0], "--max-prompts", str(AT_ONCE)) as server,
            serving(chatter, sockets[1], "--max-model-len", "512"),
        ):
            with Chats(sockets[1], asked.chats) as alone:
                time.sleep(asked.alone)
            results["alone"] = gaps_of(alone)
            connection, sizes_mb, began_s = UnixConnection(sockets[0]), list[float](), time.perf_counter()
            with Chats(sockets[1], asked.chats) as beside:
                sampled_s = 0.0
                for _ in range(-(-asked.texts // AT_ONCE)):
                    connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
                    answer = connection.getresponse()
                    told = answer.read()
                    if answer.status != 200:
                        raise RuntimeError(f"{answer.status}: {told[:300]!r}")
                    if (now_s := time.perf_counter()) - sampled_s > 1.0:
                        sampled_s = now_s
                        sizes_mb.append(memory_mb(server))
            seconds = time.perf_counter() - began_s
            results["beside"] = gaps_of(beside)
    quarter = len(sizes_mb) // 4
    results |= {
        "texts_s": asked.texts / seconds,
        "memory_mb": sizes_mb,
        "growth_mb": statistics.median(sizes_mb[-3:]) - statistics.median(sizes_mb[quarter : quarter + 3]),
    }
    print(json.dumps({name: each for name, each in results.items() if name != "memory_mb"}, indent=2))
    if asked.out is not None:
        write_report(asked.out, "embed_beside_chats", results)


if __name__ == "__main__":
    main()
