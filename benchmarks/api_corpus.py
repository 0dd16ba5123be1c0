"""The answers of all routes to some 700 requests: recorded, and compared with another commit's.

    python benchmarks/api_corpus.py --base REV                 # lists every difference between REV and this checkout
    python benchmarks/api_corpus.py --out FILE                 # records this checkout's answers
    python benchmarks/api_corpus.py --against FILE             # compares this checkout with a record
    python benchmarks/api_corpus.py --base REV --only keyed    # one of the servers

Each server of `api_corpus_cases.py` runs its requests one after the other, on connections of their own. A record has
each answer's status, headers and body (JSON decoded; the events of streams one by one), and at the end the server's
metrics. Ids, times, dates, ports and folders are replaced by marks, and log-probabilities are rounded, so that equal
code gives equal records. Routes that no request went to are listed. The exit status is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import re
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from api_corpus_cases import METRICS, SERVERS, Case, ServerCase
from check import ROOT, Side, git, layout, side_of, worktree
from report import write_report

from headrace.executor.checkpoints.demo_model import fetch_demo_model
from headrace.frontend.bench.traffic.child_server import ChildServer

START_S = 240.0
ANSWER_S = 120.0
POLL_S = 0.05
SHOWN_DIFFERENCES = 200
KEYS = ("HEADRACE_API_KEY", "VLLM_API_KEY")
VARYING_HEADERS = frozenset({"date", "content-length"})
VARYING_COUNTS = re.compile(
    r"_seconds|_time|_ms|process_|python_|_memory|_bytes|_ratio|_per_second|_perc|created|iteration_tokens"
    r"|engine_step|:generation_tokens_total|gc_pause"
)
VARYING_SAMPLES = re.compile(
    r"(inter_token_latency|time_per_output_token|gc_pause)_seconds_count|handler=\"(none|/v1/(batches|responses)/[^/]*)\""
)
"""Counts of events, of collections of garbage, and of requests that are repeated until something has happened."""
"""Of metrics: the values of these depend on the machine or on the time. So do the engine's steps, as they go on until
the client has seen a stop string."""
TIMES = re.compile(
    r"(created|sequence_number|_at|_ms|_duration|_s|_second|_seconds|time|timestamp|_bytes|age|uptime|free|port|pid)$"
)
"""Of JSON: the numbers under these keys do."""
GROWING = frozenset({"content", "text", "reasoning", "reasoning_content", "reasoning_text", "thinking", "delta"}) | {
    *("arguments", "partial_json", "input", "token_ids", "tokens", "token_logprobs", "top_logprobs", "text_offset")
}
"""Of a stream's events: what the next event adds to."""
LATEST = frozenset({"done", "finish_reason", "stop_reason", "prompt_tokens", "completion_tokens", "total_tokens"})
"""What it replaces."""
ID = re.compile(r"\b((?:[a-zA-Z]{2,12}[-_])+)(?=[0-9a-zA-Z]*\d)[0-9a-zA-Z]{16,}(?:-[0-9a-f]+)*")
BARE_ID = re.compile(r"\b(?:[0-9a-f]{16,}|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\b")
DATE = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.\d]*(?:Z|[+-]\d\d:?\d\d)?")
DURATION = re.compile(r"\b\d+\.\d+ (?=(?:s|ms|GiB|MiB)\b)")

Record = dict[str, Any]
"""By "server: case", what was answered."""


class Masks:
    """Replaces what differs from run to run. Equal ids of a server get equal marks."""

    def __init__(self, plain: Mapping[str, str]) -> None:
        """plain: texts to replace everywhere, such as folders."""
        self._plain = plain

    def text(self, text: str) -> str:
        for found, mark in self._plain.items():
            text = text.replace(found, mark)
        text = ID.sub(r"\1<id>", text)
        text = BARE_ID.sub("<id>", text)
        return DURATION.sub("<n> ", DATE.sub("<date>", text))

    def value(self, value: Any, key: str = "") -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(each, key) for each in value]
        if isinstance(value, dict):
            is_time = TIMES.search(key)  # of times by name
            return {self.text(name): self.value(each, key if is_time else name) for name, each in value.items()}
        if isinstance(value, int | float) and not isinstance(value, bool) and TIMES.search(key):
            return "<n>"
        return round(value, 3) if isinstance(value, float) else value


class RunningServer:
    """A server of one checkout, and what its requests learnt of each other."""

    def __init__(self, url: str, masks: Masks) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "", parts.port or 0)
        self.masks = masks
        self._kept: dict[str, str] = {}

    def answer(self, case: Case) -> Record:
        """The answer to the case, once its `until` holds."""
        end_s = time.monotonic() + ANSWER_S
        while True:
            status, headers, body = self._send(case)
            decoded = _decoded(headers.get("content-type", ""), body)
            if case.until is None or case.until(decoded):
                break
            if time.monotonic() > end_s:
                raise SystemExit(f"{case.name}: what it waits for did not happen: {body[:500]!r}")
            time.sleep(POLL_S)
        for name, path in case.keep.items():
            self._kept[name] = _at(decoded, path)
        shown = {name: self.masks.text(value) for name, value in sorted(headers.items()) if name not in VARYING_HEADERS}
        if "retry-after" in shown:
            shown["retry-after"] = "<n>"
        masked = self.masks.value(decoded)
        return {"status": status, "headers": shown, "body": joined(masked) if isinstance(masked, list) else masked}

    def _send(self, case: Case) -> tuple[int, dict[str, str], bytes]:
        request = case.raw if case.raw is not None else self._request(case)
        with socket.create_connection(self._address, timeout=ANSWER_S) as connection:
            connection.sendall(request)
            response = http.client.HTTPResponse(connection, method=case.method)
            try:
                response.begin()
                body = response.read()
            except (http.client.HTTPException, OSError) as error:
                return 0, {}, f"no answer: {type(error).__name__}".encode()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, body

    def _request(self, case: Case) -> bytes:
        body = (
            case.body if isinstance(case.body, bytes) else b"" if case.body is None else json.dumps(case.body).encode()
        )
        body = self._filled(body)
        headers = {"Host": f"127.0.0.1:{self._address[1]}", "Connection": "close"}
        if case.body is not None:
            headers |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
        headers |= case.headers
        lines = [f"{case.method} {self._filled(case.path.encode()).decode()} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join([*lines, "", ""]).encode() + body

    def _filled(self, text: bytes) -> bytes:
        """With what earlier answers said in the place of `<<name>>`."""
        return re.sub(rb"<<(\w+)>>", lambda match: self._kept[match.group(1).decode()].encode(), text)


def _decoded(content_type: str, body: bytes) -> Any:
    text = body.decode("utf-8", errors="replace")
    if content_type.startswith("text/event-stream"):
        return [_event(each) for each in text.split("\n\n") if each and not each.startswith(":")]
    if content_type.startswith("text/plain; version="):
        return metrics_of(text)
    if content_type.startswith("application/x-ndjson"):
        return [_json(line) for line in text.splitlines()]
    if content_type.startswith("application/json"):
        return _json(text)
    lines = [_json(line) for line in text.splitlines()]
    return lines if lines and all(isinstance(line, dict) for line in lines) else text  # a batch's file


def joined(events: list[Any]) -> list[Any]:
    """With events that add to the same answer as one: how many tokens an event has depends on the machine."""
    found: list[Any] = []
    for event in events:
        if found and (both := _sum(found[-1], event, "")) is not _DIFFERS:
            found[-1] = both
        else:
            found.append(event)
    return found


_DIFFERS: Any = object()


def _sum(one: Any, other: Any, key: str) -> Any:
    """Two events as one; _DIFFERS if they do so in more than what grows."""
    if isinstance(one, dict) and isinstance(other, dict):
        parts = {name: _sum(one.get(name), other.get(name), name) for name in {**one, **other}}
        return _DIFFERS if _DIFFERS in parts.values() else parts
    if one is None or other is None:
        return one if other is None else other
    if key in LATEST:
        return other
    if key in GROWING and type(one) is type(other) and isinstance(one, str | list):
        return one + other
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        items = [_sum(each, also, key) for each, also in zip(one, other, strict=True)]
        return _DIFFERS if _DIFFERS in items else items
    return other if one == other else _DIFFERS


def _event(text: str) -> Any:
    lines = text.split("\n")
    fields = [line for line in lines if not line.startswith(("data:", ":"))]
    data = "\n".join(line.removeprefix("data:").lstrip() for line in lines if line.startswith("data:"))
    return {"fields": fields, "data": _json(data)} if fields else _json(data)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _at(value: Any, path: str) -> str:
    """The value at a path such as `data.0.id`."""
    for step in path.split("."):
        value = value[int(step)] if isinstance(value, list) else value[step]
    return str(value)


def metrics_of(text: str) -> dict[str, Any]:
    """Names, labels and counts of the metrics; of times only that they are there."""
    found: dict[str, Any] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE") or line.startswith("# HELP"):
            found[line.rsplit(" ", 1)[0] if line.startswith("# TYPE") else line] = line.rsplit(" ", 1)[1]
        elif line:
            name, value = line.rsplit(" ", 1)
            plain = name.split("{")[0]
            is_timed = VARYING_COUNTS.search(plain) and not (plain.endswith("_count") and "iteration" not in plain)
            varies = is_timed or VARYING_SAMPLES.search(name)
            found[name] = "<n>" if varies else value
    return found


@contextlib.contextmanager
def server_of(side: Side, server: ServerCase, folder: Path) -> Iterator[RunningServer]:
    """Starts the checkout's server; files that it keeps lie in the folder."""
    arguments = [each.format(folder=folder, model=fetch_demo_model()) for each in server.arguments]
    command = [sys.executable, "-P", "-m", "headrace", "serve", *arguments, "--host", "127.0.0.1", "--port", "0"]
    log = folder / "log"
    child = ChildServer(["env", "-C", str(folder), *_variables(side), *command], log)
    try:
        line = child.wait_line("/v1 for clients", START_S)
        found = re.search(r"(http://\S+)/v1 for clients", line)
        assert found is not None, line
        url = found.group(1)
        plain = {
            str(folder): "<folder>",
            str(side.tree): "<tree>",
            url: "<url>",
            f":{url.rsplit(':', 1)[1]}": ":<port>",
        }
        yield RunningServer(url, Masks(plain))
    finally:
        child.stop()


def _variables(side: Side) -> list[str]:
    changed = {**side.variables, "HEADRACE_RUNTIME_DIR": ""}
    names = ("PYTHONPATH", "PYTHONHASHSEED", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return [*(["-u", "HEADRACE_API_KEY", "-u", "VLLM_API_KEY"]), *(f"{name}={changed[name]}" for name in names)]


def record(side: Side, only: tuple[str, ...], said: Callable[[str], None]) -> tuple[Record, list[str]]:
    """All servers' answers, and the routes that no request went to."""
    found: Record = {}
    routes: set[str] = set()
    asked: set[str] = set()
    for server in SERVERS:
        if only and server.name not in only:
            continue
        with (
            tempfile.TemporaryDirectory(prefix="headrace-corpus-") as folder,
            server_of(side, server, Path(folder)) as running,
        ):
            for case in server.cases:
                name = f"{server.name}: {case.name}"
                assert name not in found, f"{name}: two cases have this name"
                found[name] = running.answer(case)
                if case.raw is None:
                    asked.add(f"{case.method} {case.path.split('?')[0]}")
            document = running.answer(Case("openapi", "GET", "/openapi.json", headers=server.headers))["body"]
            routes |= {f"{method.upper()} {path}" for path, each in document["paths"].items() for method in each}
            answer = running.answer(Case("metrics", "GET", METRICS, headers=server.headers))
            found[f"{server.name}: metrics"] = answer
        said(f"{server.name}: {len(server.cases)} requests")
    return found, sorted(route for route in routes if not any(_goes_to(each, route) for each in asked))


def _goes_to(asked: str, route: str) -> bool:
    return re.fullmatch(re.sub(r"\\\{[^}]*\\\}", "[^/]+", re.escape(route)), asked) is not None


def differences(before: Any, now: Any, where: str = "") -> Iterator[str]:
    """One line for each value that differs."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted({*before, *now}):
            at = f"{where} | {name}" if where else name
            if name not in now:
                yield f"{at}: gone; was {_short(before[name])}"
            elif name not in before:
                yield f"{at}: new: {_short(now[name])}"
            else:
                yield from differences(before[name], now[name], at)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for index, (each, other) in enumerate(zip(before, now, strict=True)):
            yield from differences(each, other, f"{where}[{index}]")
    elif before != now:
        yield f"{where}: {_short(before)} -> {_short(now)}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 300 else f"{text[:200]} ... {text[-90:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", help="the commit to compare with")
    parser.add_argument("--against", type=Path, help="the record to compare with, as --out writes it")
    parser.add_argument("--only", action="append", choices=[each.name for each in SERVERS], help="repeatable")
    parser.add_argument("--out", type=Path, help="where the record of this checkout goes")
    arguments = parser.parse_args()
    only = tuple(arguments.only or ())
    with tempfile.TemporaryDirectory(prefix="headrace-layout-") as folder:
        now, unasked = record(side_of(ROOT, layout(ROOT, Path(folder) / "now")), only, print)
        statuses = Counter(each["status"] for each in now.values() if "status" in each)
        counts = ", ".join(
            f"{number} x {HTTPStatus(s).value if s else 'none'}" for s, number in sorted(statuses.items())
        )
        print(f"{statuses.total()} requests; statuses: {counts}")
        print("routes without a request: " + (", ".join(unasked) or "none"))
        if arguments.out:
            write_report(arguments.out, "api_corpus", {"unasked": unasked, "answers": now})
        before: Record | None = None
        if arguments.base:
            with worktree(arguments.base) as tree:
                before, _ = record(side_of(tree, layout(tree, Path(folder) / "before")), only, print)
        elif arguments.against:
            before = json.loads(arguments.against.read_text())["results"]["answers"]
            if only:
                before = {name: each for name, each in before.items() if name.split(":")[0] in only}
    if before is None:
        return 0
    lines = list(differences(before, now))
    for line in lines[:SHOWN_DIFFERENCES]:
        print(line)
    named = git("rev-parse", "--short", arguments.base) if arguments.base else arguments.against
    print(f"{len(lines)} differences from {named}")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
