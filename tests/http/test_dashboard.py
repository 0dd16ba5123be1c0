"""The Grafana dashboard: it is what the declarations say, and each panel asks for metrics that a server has."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_server import ask, serving
from patience import wait_until
from prometheus import prometheus
from server_here import serving_here
from source_tree import docs_program

DASHBOARD = docs_program("dashboard")

QUERIES = [
    (panel["title"], target["expr"])
    for panel in DASHBOARD.dashboard()["panels"]
    if panel["type"] != "row"
    for target in panel["targets"]
]
NEEDS_MORE = ("eplb_", "spec_decode_", "admission_", "adapter", "kv_block_", "estimated_")
"""Metrics of engines with options that the tests' server lacks."""


def test_the_file_is_what_the_declarations_make() -> None:
    assert DASHBOARD.FILE.read_text() == DASHBOARD.text(), "run make docs"
    panels = json.loads(DASHBOARD.FILE.read_text())["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(set(ids)) == len(ids)
    for panel in panels:
        if panel["type"] != "row":
            assert panel["description"], panel["title"]


def test_panels_choose_servers_and_tell_their_lines_apart() -> None:
    """Two servers behind one proxy each have an engine 0."""
    for panel in DASHBOARD.dashboard()["panels"]:
        for target in panel.get("targets", ()):
            assert 'instance=~"$server"' in target["expr"], panel["title"]
            assert "{{instance}}" in target["legendFormat"] or "sum by" in target["expr"], panel["title"]


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
    with serving() as server, server.client() as client:
        target = server.url.removeprefix("http://")
        config = {
            "global": {"scrape_interval": "1s"},
            "scrape_configs": [{"job_name": "headrace", "static_configs": [{"targets": [target]}]}],
        }
        with prometheus(tmp_path, json.dumps(config)) as result:  # YAML has JSON in it
            draws_something(result, client)


def draws_something(result: Callable[[str], list[Any]], client: httpx.Client) -> None:
    wait_until(lambda: bool(result("headrace:num_requests_running")), 60, "the first scrape")
    filled = {"${prefix}": "headrace", "$server": ".*", "$model": ".*", "$engine": ".*", "$__rate_interval": "30s"}
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
