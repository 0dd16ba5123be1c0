"""Writes the Grafana dashboard `docs/deploy/grafana.json` from the declarations of metrics:
`python docs_site/dashboard.py` (`make docs`).

A gauge is drawn as it is, a counter as its growth per second, a histogram as three percentiles. Each metric has a panel
whose title is its name and whose description is its help text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from headrace.frontend.client.engine_metrics import ENGINE_HISTOGRAMS, ENGINE_METRICS, METRICS_BY_LABEL
from headrace.frontend.client.request_metrics import REQUEST_HISTOGRAMS, SUCCESS
from headrace.frontend.http.server.metrics import ROUTER_COUNTERS

FILE = Path(__file__).parents[1] / "docs/deploy/grafana.json"
_PREFIX = "${prefix}:"
_SERVER = 'instance=~"$server"'
_FILTER = f'{_SERVER}, model_name=~"$model", engine=~"$engine"'
_SHARES = (0.5, 0.9, 0.99)
_WIDTH, _HEIGHT, _COLUMNS = 8, 7, 3


class Panel(NamedTuple):
    title: str
    text: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    """Expressions of PromQL, and the legend of each."""


def sections() -> Iterator[tuple[str, list[Panel]]]:
    """Rows of the dashboard, with their panels."""
    engine = [_plain(kind, name, text) for kind, name, text, _ in ENGINE_METRICS]
    engine += [_plain(kind, name, text, label) for kind, name, text, label, _ in METRICS_BY_LABEL]
    engine += [_percentiles(name, text) for name, text, _, _ in ENGINE_HISTOGRAMS]
    groups = {
        "kv_block_": "Blocks of the KV cache",
        "estimated_": "Utilisation",
        "spec_decode_": "Speculation",
        "eplb_": "Balance of experts",
        "engine_": "Steps of the engine",
    }
    of_group: dict[str, list[Panel]] = {"Load": [], **{title: [] for title in groups.values()}}
    for panel in engine:
        title = next((group for start, group in groups.items() if panel.title.startswith(start)), "Load")
        of_group[title].append(panel)
    requests = [_percentiles(name, text) for name, (_, text) in REQUEST_HISTOGRAMS.items()]
    yield "Load", of_group.pop("Load")
    yield "Latency of requests", [panel for panel in requests if panel.unit == "s"]
    success = _plain("counter", SUCCESS, "Requests that ended, by how.", "finished_reason")
    yield "Size and end of requests", [success, *(panel for panel in requests if panel.unit != "s")]
    yield from of_group.items()
    yield "Router", [_router(name, text) for name, (text, _) in ROUTER_COUNTERS.items()]


def _plain(kind: str, name: str, text: str, label: str = "") -> Panel:
    legend = "{{instance}} engine {{engine}}" + (f" {{{{{label}}}}}" if label else "")
    if kind == "gauge":
        return Panel(name, text, _unit(name), ((f"{_PREFIX}{name}{{{_FILTER}}}", legend),))
    rate = f"rate({_PREFIX}{name}_total{{{_FILTER}}}[$__rate_interval])"
    return Panel(
        name, f"{text} Per second.", "percentunit" if name.endswith("_seconds") else "short", ((rate, legend),)
    )


def _percentiles(name: str, text: str) -> Panel:
    buckets = f"sum by (le) (rate({_PREFIX}{name}_bucket{{{_FILTER}}}[$__rate_interval]))"
    queries = tuple((f"histogram_quantile({share}, {buckets})", f"p{share * 100:g}") for share in _SHARES)
    return Panel(name, text, _unit(name), queries)


def _router(name: str, text: str) -> Panel:
    rate = f"sum by (reason) (rate({_PREFIX}{name}_total{{{_SERVER}}}[$__rate_interval]))"
    return Panel(name, f"{text} Per second.", "short", ((rate, "{{reason}}"),))


def _unit(name: str) -> str:
    """Grafana's name of a metric's unit."""
    if name.endswith(("_seconds", "_second")):
        return "s"
    return "percentunit" if name.endswith("_perc") or "balancedness" in name else "short"


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for title, members in sections():
        panels.append({"type": "row", "title": title, "collapsed": False, "gridPos": _place(0, y, 24, 1), "panels": []})
        y += 1
        for index, panel in enumerate(members):
            column, row = index % _COLUMNS, index // _COLUMNS
            panels.append(_drawn(panel, _place(column * _WIDTH, y + row * _HEIGHT, _WIDTH, _HEIGHT)))
        y += -(-len(members) // _COLUMNS) * _HEIGHT
    for number, each in enumerate(panels, 1):
        each["id"] = number
    return {
        "title": "Headrace",
        "uid": "headrace",
        "tags": ["headrace", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-15m", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"},
                {
                    **{"name": "prefix", "label": "Prefix", "type": "textbox", "query": "headrace"},
                    "current": {"text": "headrace", "value": "headrace"},
                },
                _of_label("server", "Server", "instance"),
                _of_label("model", "Model", "model_name"),
                _of_label("engine", "Engine", "engine"),
            ]
        },
        "panels": panels,
    }


def _of_label(name: str, title: str, label: str) -> dict[str, Any]:
    """A variable that has a label's values."""
    return {
        **{"name": name, "label": title, "type": "query", "datasource": _SOURCE, "multi": True, "includeAll": True},
        **{"query": f"label_values({_PREFIX}num_requests_running, {label})", "refresh": 2, "allValue": ".*"},
        "current": {"text": "All", "value": "$__all"},
    }


_SOURCE = {"type": "prometheus", "uid": "${source}"}


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _drawn(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": _SOURCE, "expr": query, "legendFormat": legend}
            for number, (query, legend) in enumerate(panel.queries)
        ],
    }


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
