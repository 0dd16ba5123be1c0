"""The Grafana dashboard: it is what the declarations say, and each panel asks for metrics that a server has."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from debian_programs import program
from http_server import ask, serving, wait_until
from server_here import serving_here

from headrace.frontend.http.server.dashboard import FILE, dashboard, text

QUERIES = [
    (panel["title"], target["expr"])
    for panel in dashboard()["panels"]
    if panel["type"] != "row"
    for target in panel["targets"]
]
NEEDS_MORE = ("eplb_", "spec_decode_", "admission_")
"""Metrics of engines with options that the tests' server lacks."""


def test_the_file_is_what_the_declarations_make() -> None:
    assert FILE.read_text() == text(), "run make docs"
    panels = json.loads(FILE.read_text())["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(set(ids)) == len(ids)
    for panel in panels:
        if panel["type"] != "row":
            assert panel["description"], panel["title"]


def test_each_panel_asks_for_a_metric_that_a_server_exports() -> None:
    with serving_here() as server, server.client() as client:
        ask(client, "/v1/completions", prompt="x", max_tokens=3)
        exported = set(re.findall(r"^# TYPE (\S+)", client.get("/metrics").text, re.MULTILINE))
    missing = {name for _, query in QUERIES for name in re.findall(r"\$\{prefix\}:(\w+)", query)} - {
        name.removeprefix("headrace:") + end for name in exported for end in ("", "_total", "_bucket")
    }
    assert not missing


@pytest.mark.system
def test_each_panel_draws_something_in_a_real_prometheus(tmp_path: Path) -> None:
    binary = program("prometheus", "usr/bin/prometheus")
    with serving() as server, server.client() as client:
        target = server.url.removeprefix("http://")
        config = {
            "global": {"scrape_interval": "1s"},
            "scrape_configs": [{"job_name": "headrace", "static_configs": [{"targets": [target]}]}],
        }
        (tmp_path / "prometheus.yml").write_text(json.dumps(config))  # YAML has JSON in it
        command = [
            binary,
            f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            "--web.listen-address=127.0.0.1:0",
        ]
        log = tmp_path / "log"
        with log.open("w") as output:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=output)
        try:
            listening = r'"?Listening on"? address="?(127\.0\.0\.1:\d+)'
            wait_until(lambda: re.search(listening, log.read_text()) is not None, 60, "Prometheus' start")
            found = re.search(listening, log.read_text())
            assert found is not None
            draws_something(f"http://{found[1]}", client)
        finally:
            process.terminate()
            process.wait(30)


def draws_something(prometheus: str, client: httpx.Client) -> None:
    def result(query: str) -> list[Any]:
        answer = httpx.get(f"{prometheus}/api/v1/query", params={"query": query}, timeout=30)
        assert answer.status_code == 200, (query, answer.text)
        found: list[Any] = answer.json()["data"]["result"]
        return found

    def is_up() -> bool:
        try:
            return bool(result("headrace:num_requests_running"))
        except httpx.TransportError:
            return False

    wait_until(is_up, 60, "the first scrape")
    filled = {"${prefix}": "headrace", "$model": ".*", "$engine": ".*", "$__rate_interval": "30s"}
    rest = [(title, query) for title, query in QUERIES if not title.startswith(NEEDS_MORE)]
    end_s = time.monotonic() + 120
    while rest and time.monotonic() < end_s:  # a rate needs two scrapes with requests between them
        ask(client, "/v1/completions", prompt="x", max_tokens=3)
        for variable, value in filled.items():
            rest = [(title, query.replace(variable, value)) for title, query in rest]
        rest = [(title, query) for title, query in rest if not result(query)]
    assert not rest
    for title, query in QUERIES:  # those of other engines are at least valid
        for variable, value in filled.items():
            query = query.replace(variable, value)
        if title.startswith(NEEDS_MORE):
            result(query)
