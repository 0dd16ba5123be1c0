"""The cost of hostile requests to others: a stream's longest pause, the server's memory, and the statuses returned.

    python benchmarks/abuse.py [--rounds 3] [--key] [--demo] [--only TEXT]

During the whole run one client, in its own process, streams from an engine that computes nothing, a token every 5 ms.
Each case is sent `rounds` times, one request at a time. Reported per case: the longest time between two events of the
stream, beside that of a quiet time before; the peak of resident memory, and what of it remains 10 s later; and the
statuses. With --demo the engine is the demo model, with a real vocabulary and real step times. Then the time before is
one in which an ordinary client's prompts fill the steps, and the abuser abandons a request that the model still
computes after --patience seconds ("left"). Exit status 1: a stall of over 50 ms more than the one before, over 150 MB
that remain, a 5xx, or a server that does not exit with 0 at SIGTERM.

Meaningful only on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import psutil
from report import Report

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "abuse.json"
MAX_STALL_S, MAX_GROWTH_BYTES, SETTLE_S, QUIET_S = 0.05, 150 << 20, 10.0, 5.0
ANSWER_S = 600.0
LEFT = "left"
"""The status of a request whose client left before its answer."""
KEY = "secret"
LIMIT = 8 << 20
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

ORDINARY = {"prompt": [[5 + each] * 400 for each in range(32)], "max_tokens": 1}
ORDINARY_LONG = {"prompt": [6] * 4000, "max_tokens": 1}
ECHO = {"prompt": [5] * 4000, "echo": True, "logprobs": 1, "max_tokens": 1}


def cases() -> Iterator[tuple[str, str, Callable[[], bytes]]]:
    """Name, path and body of each case; bodies of up to max_body_bytes are made only when needed."""

    def body(**fields: Any) -> Callable[[], bytes]:
        return lambda: json.dumps(fields).encode()

    def filled(head: bytes, piece: bytes, tail: bytes, separator: bytes = b",") -> Callable[[], bytes]:
        count = (LIMIT - len(head) - len(tail)) // (len(piece) + len(separator)) - 1
        return lambda: head + separator.join([piece] * count) + tail

    name = " - at `$" * 900_000
    for path in (COMPLETIONS, CHAT):
        yield f"{path}: a long unknown field", path, body(**{"prompt": "x", name: 1})
        yield f"{path}: a long nested field", path, body(prompt="x", messages=[], stream_options={name: 1})
        yield f"{path}: a long model name", path, body(prompt="x", messages=[], model="m" * (7 << 20))
        for count in (60_000, 100_000):  # about as many as the server reads, and more
            body_of = partial(_unknown_fields, count)
            yield f"{path}: {count} unknown fields", path, body_of
        yield (
            f"{path}: a large logit_bias",
            path,
            lambda: json.dumps(
                {
                    "prompt": [5],
                    "messages": [{"role": "user", "content": "x"}],
                    "logit_bias": {str(i): 1 for i in range(120_000)},
                }
            ).encode(),
        )
    for text in ("x", " ", "ab ", "\u00e9", "\n", "\\"):
        yield f"a prompt of {text!r}", COMPLETIONS, body(prompt=text * (LIMIT // (len(json.dumps(text)) - 2) - 100))
    yield "prompts of one token", COMPLETIONS, filled(b'{"max_tokens":1,"prompt":[', b"[5]", b"]}")
    yield "2,048 prompts of 2,000 characters", COMPLETIONS, body(prompt=["word " * 400] * 2048, max_tokens=1)
    yield "2,048 prompts of 400 tokens", COMPLETIONS, body(prompt=[[5] * 400] * 2048, max_tokens=1)
    yield "bad words", COMPLETIONS, body(prompt=["x"] * 32, bad_words=["ab " * 5000], max_tokens=1)
    for name, form in _forms():
        yield f"a form: {name}", COMPLETIONS, body(prompt=[5], max_tokens=1, structured_outputs=form)
    yield (
        "2,048 outputs of a form",
        COMPLETIONS,
        body(prompt=[[5]] * 2048, max_tokens=1, structured_outputs={"json": {"enum": ["a" * 15_000]}}),
    )
    yield "empty lists", COMPLETIONS, filled(b'{"prompt":[', b"[]", b"]}")
    yield "empty objects", COMPLETIONS, filled(b'{"prompt":"x","stop":[', b"{}", b"]}")
    yield "one prompt of a million tokens", COMPLETIONS, body(prompt=[5] * 1_000_000)
    yield "stop_token_ids", COMPLETIONS, body(prompt=[5], stop_token_ids=[5] * 1_000_000)
    yield "messages", CHAT, filled(b'{"messages":[', b'{"role":"user","content":"x"}', b"]}")
    yield "12,000 messages", CHAT, body(messages=[{"role": "user", "content": "x"}] * 12_000, max_tokens=1)
    yield (
        "content parts",
        CHAT,
        filled(b'{"messages":[{"role":"user","content":[', b'{"type":"text","text":"x"}', b"]}]}"),
    )
    yield "tools", CHAT, filled(b'{"messages":[{"role":"user","content":"x"}],"tools":[', b'{"a":{"b":[1,2]}}', b"]}")
    for depth in (500, 5000, 1_000_000):
        deep = b'{"messages":[{"role":"user","content":"x"}],"tools":[' + b'{"a":' * depth + b"1" + b"}" * depth + b"]}"
        yield f"tools nested {depth} deep", CHAT, lambda deep=deep: deep  # type: ignore[misc]
    yield "tokens to text", "/detokenize", body(tokens=[300] * 1_000_000)
    yield "text to tokens", "/tokenize", body(prompt="word " * 1_600, return_token_strs=True)
    yield "a text of 8 MB to tokens", "/tokenize", body(prompt="word " * 1_600_000)
    yield "128 answers with a long prompt's log-probabilities", COMPLETIONS, body(**ECHO, n=128)
    yield "the same as events", COMPLETIONS, body(**ECHO, n=128, stream=True)
    yield (
        "log-probabilities of a longer prompt",
        COMPLETIONS,
        body(prompt=[5] * 30_000, prompt_logprobs=20, max_tokens=1),
    )
    yield "2,048 answers with log-probabilities", COMPLETIONS, body(prompt=[[5]] * 2048, logprobs=20, max_tokens=16)
    yield "no JSON", COMPLETIONS, lambda: b"\x00" * LIMIT
    yield "brackets", COMPLETIONS, lambda: b"[" * LIMIT


def _forms() -> Iterator[tuple[str, dict[str, Any]]]:
    """Forms beyond the limits, and patterns that are slow on regular expressions over them."""
    yield "a schema", {"json": {"enum": ["a" * 1_000_000] * 8}}
    yield "a schema as text", {"json": json.dumps({"enum": ["a" * 1_000_000] * 8})}
    yield "an expression", {"regex": "a" * (LIMIT - 100)}
    yield "empty lines", {"grammar": "\n" * 500_000 + 'root ::= "a"'}
    yield "an open text", {"grammar": 'start: "a"\n"' + '\\"' * 250_000, "disable_additional_properties": True}


def _unknown_fields(count: int) -> bytes:
    return json.dumps({f"k{index}": 1 for index in range(count)}).encode()


def watch(url: str, headers: dict[str, str], pipe: Connection) -> None:
    """Runs in its own process: streams forever, and answers each query with the longest gap since the previous query,
    even one that has not ended yet."""
    longest, last_event = [0.0], [0.0]

    def answer() -> None:
        while pipe.recv():
            began_s = last_event[0]
            pipe.send(max(longest[0], time.perf_counter() - began_s if began_s else 0.0))
            longest[0] = 0.0

    threading.Thread(target=answer, daemon=True).start()
    body = {"prompt": [5], "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=url, headers=headers, timeout=60, verify=False) as client:
        while True:
            with client.stream("POST", COMPLETIONS, json=body) as response:
                last_event[0] = 0.0
                for piece in response.iter_raw():
                    if not piece.startswith(b"data:"):
                        continue  # a keep-alive, while a new stream waits for its first token
                    now_s = time.perf_counter()
                    longest[0] = max(longest[0], now_s - last_event[0] if last_event[0] else 0.0)
                    last_event[0] = now_s
                last_event[0] = 0.0


class Watcher:
    def __init__(self, url: str, headers: dict[str, str]) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=watch, args=(url, headers, theirs), daemon=True)
        self._process.start()

    def longest_gap_s(self) -> float:
        self._pipe.send(True)
        gap_s: float = self._pipe.recv()
        return gap_s

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def server_processes(pid: int) -> list[psutil.Process]:
    """The server's processes except its engine's."""
    process = psutil.Process(pid)
    return [process, *(each for each in process.children() if "daemon" not in str(each.cmdline()))]


def memory_bytes(processes: list[psutil.Process]) -> int:
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total


def send(client: httpx.Client, path: str, data: bytes, patience_s: float) -> int | str:
    """The status of an answer that was read to its end; LEFT if it did not end in time; or the error's name."""
    end_s = time.perf_counter() + patience_s
    json_of = {"content-type": "application/json"}
    try:
        with client.stream("POST", path, content=data, headers=json_of, timeout=patience_s) as answer:
            for _ in answer.iter_raw():
                if time.perf_counter() > end_s:
                    return LEFT
            return answer.status_code
    except httpx.ReadTimeout:
        return LEFT
    except httpx.HTTPError as error:
        return type(error).__name__


def run_case(
    client: httpx.Client, path: str, data: bytes, pid: int, watcher: Watcher, rounds: int, patience_s: float
) -> dict[str, Any]:
    before_bytes = peak_bytes = memory_bytes(server_processes(pid))
    done = threading.Event()

    def look() -> None:
        nonlocal peak_bytes
        for count in itertools.count():
            if count % 25 == 0:  # finding processes costs the server as much time as many samples of them
                processes = server_processes(pid)
            peak_bytes = max(peak_bytes, memory_bytes(processes))
            if done.wait(0.02):
                return

    looker = threading.Thread(target=look)
    looker.start()
    statuses: list[int | str] = []
    times_s = []
    watcher.longest_gap_s()
    for _ in range(rounds):
        began_s = time.perf_counter()
        statuses.append(send(client, path, data, patience_s))
        times_s.append(time.perf_counter() - began_s)
    gap_s = watcher.longest_gap_s()
    done.set()
    looker.join()
    end_s = time.monotonic() + SETTLE_S
    while memory_bytes(server_processes(pid)) - before_bytes > MAX_GROWTH_BYTES and time.monotonic() < end_s:
        time.sleep(0.1)
    return {
        "body_bytes": len(data),
        "statuses": statuses,
        "seconds": times_s,
        "longest_gap_s": gap_s,
        "peak_growth_bytes": peak_bytes - before_bytes,
        "growth_that_stays_bytes": memory_bytes(server_processes(pid)) - before_bytes,
    }


def trailers(url: str) -> bytes:
    """Sends 64 MB of trailers at once."""
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port or 80), timeout=10) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n0\r\n")
        try:
            for _ in range(1024):
                sock.sendall(b"a: %b\r\n" % (b"b" * 1000) * 64)
        except OSError:
            return b"refused"
    return b"taken"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--key", action="store_true", help="the server has a key, and the abuser knows it")
    parser.add_argument("--demo", action="store_true", help="the demo model's tokenizer and engine")
    parser.add_argument(
        "--patience", type=float, default=10.0, help="with --demo: seconds, after which a client leaves"
    )
    parser.add_argument("--only", default="", help="the cases whose names hold this text alone; nothing is written")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from http_server import serving

    options = ["--api-key", KEY] if arguments.key else []
    headers = {"authorization": f"Bearer {KEY}"} if arguments.key else {}
    model: dict[str, Any] = {"attached": True} if arguments.demo else {"null_model": {"step_delay_s": 0.005}}
    report = Report(
        None if arguments.only else arguments.out, "abuse", {"rounds": arguments.rounds, "key": arguments.key}
    )
    problems = []
    patience_s = arguments.patience if arguments.demo else ANSWER_S
    with serving(*options, **model) as server:
        watcher = Watcher(server.url, headers)
        time.sleep(QUIET_S)
        watcher.longest_gap_s()
        time.sleep(QUIET_S)
        quiet_s = report.results["quiet_gap_s"] = watcher.longest_gap_s()
        print(f"quiet: longest gap {1e3 * quiet_s:.1f} ms")
        with httpx.Client(base_url=server.url, headers=headers, timeout=ANSWER_S, verify=False) as client:
            if arguments.demo:
                for ordinary in (ORDINARY, ORDINARY_LONG):
                    client.post(COMPLETIONS, json=ordinary).raise_for_status()
                quiet_s = report.results["quiet_gap_s"] = max(quiet_s, watcher.longest_gap_s())
                print(f"beside ordinary prompts: longest gap {1e3 * quiet_s:.1f} ms")
            for name, path, make in cases():
                if arguments.only not in name:
                    continue
                case = run_case(client, path, make(), server.process.pid, watcher, arguments.rounds, patience_s)
                report.add_case({"name": name, **case})
                print(
                    f"{name:45} {case['statuses']!s:18} gap {1e3 * case['longest_gap_s']:7.1f} ms, peak "
                    f"{case['peak_growth_bytes'] >> 20:5} MB, stays {case['growth_that_stays_bytes'] >> 20:4} MB"
                )
                if case["longest_gap_s"] > quiet_s + MAX_STALL_S:
                    problems.append(f"{name}: a stall of {case['longest_gap_s']:.3f} s")
                if case["growth_that_stays_bytes"] > MAX_GROWTH_BYTES:
                    problems.append(f"{name}: {case['growth_that_stays_bytes'] >> 20} MB stay")
                expected = {LEFT} if arguments.demo else set()
                if any(isinstance(status, str) or status >= 500 for status in {*case["statuses"]} - expected):
                    problems.append(f"{name}: {case['statuses']}")
        before_bytes = memory_bytes(server_processes(server.process.pid))
        trailers(server.url)
        if memory_bytes(server_processes(server.process.pid)) - before_bytes > MAX_GROWTH_BYTES:
            problems.append("trailers are kept")
        watcher.close()
        server.signal()
        if (status := server.wait_exit(60)) != 0:
            problems.append(f"SIGTERM ends it with {status}")
    report.results["problems"] = problems
    report.save()
    print("\n".join(problems) or "nothing found")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
