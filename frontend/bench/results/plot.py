"""`headrace bench plot`: draws results as PNG, SVG and a self-contained HTML page, with matplotlib (extra `bench`)."""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from headrace.frontend.bench.commands import PLOT_FORMATS
from headrace.frontend.bench.results import record as records
from headrace.frontend.bench.results.compare import compare, measures, token_times_s
from headrace.frontend.bench.results.metrics import number
from headrace.ipc.extras import how_to_install
from headrace.ipc.failure import OptionError

COLOURS = (
    *("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#0891b2", "#be123c", "#65a30d", "#475569"),
    *("#ca8a04", "#db2777", "#0f766e", "#78350f"),
)
"""Distinguishable on a screen and in print. A result has the same colour in every panel."""
NUM_BINS = 60


class Named(NamedTuple):
    """A result with the name to show for it."""

    name: str
    record: dict[str, Any]


def bench_plot(arguments: argparse.Namespace) -> int:
    """Draws one or more results of one benchmark. Raises OptionError, ResultError."""
    plot(arguments.results, arguments.output, arguments.format or PLOT_FORMATS)
    return 0


def plot(paths: Sequence[str], output: str, formats: Sequence[str]) -> None:
    """Writes `output`.FORMAT for each of the formats. Raises OptionError, ResultError."""
    results = load_named(paths)
    figure = draw(results)
    base = Path(output)
    base = base.with_suffix("") if base.suffix.lstrip(".") in PLOT_FORMATS else base
    try:
        base.parent.mkdir(parents=True, exist_ok=True)
        for kind in formats:
            path = base.parent / f"{base.name}.{kind}"
            if kind == "html":
                path.write_text(page(results, as_svg(figure)), encoding="utf-8")
            else:
                figure.savefig(path, dpi=150)
            print(f"wrote {path}")
    except OSError as error:
        raise records.ResultError(f"{output}: {error.strerror or error}") from None


def load_named(paths: Sequence[str]) -> list[Named]:
    """Results named by label, or by file if they have no label of their own. Raises OptionError, ResultError."""
    found = records.read_all(paths)
    labels = [record.get("label") or file.stem for file, record in found]
    names = [label if labels.count(label) == 1 else file.stem for label, (file, _) in zip(labels, found, strict=True)]
    return [Named(name, record) for name, (_, record) in zip(names, found, strict=True)]


def _missing() -> str:
    return f"plots need matplotlib, which is not installed: {how_to_install('bench')}"


def check_drawable() -> None:
    """Raises OptionError without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise OptionError(_missing())


def draw(results: Sequence[Named]) -> Any:
    """A matplotlib Figure of the results. Raises OptionError without matplotlib, or if there is no plot for them."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise OptionError(_missing()) from None
    kind = results[0].record["benchmark"]
    painters: dict[str, tuple[Callable[..., None], tuple[int, int]]] = {
        "serve": (_paint_serve, (2, 2)),
        "latency": (_paint_latency, (1, 2)),
        "throughput": (_paint_throughput, (1, 2)),
        "startup": (_paint_startup, (1, 1)),
        "overhead": (_paint_overhead, (1, 2)),
        "sweep": (_paint_sweep, (1, 2)),
    }
    if kind not in painters:
        raise OptionError(f"there is no plot of a result of {kind}; there are of {', '.join(painters)}")
    painter, (rows, columns) = painters[kind]
    figure = Figure(figsize=(5.6 * columns, 3.6 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis in axes:
        axis.grid(True, color="#e5e7eb", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    painter(axes, results)
    return figure


def as_svg(figure: Any) -> str:
    """The figure as an SVG element for an HTML page."""
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.hashsalt": "headrace", "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _coloured(results: Sequence[Named]) -> Iterable[tuple[Named, str]]:
    return ((result, COLOURS[index % len(COLOURS)]) for index, result in enumerate(results))


def _cdf(axis: Any, values: Sequence[float], label: str, colour: str) -> None:
    """Draws the empirical distribution function of the samples, and marks the median."""
    if not values:
        return
    ordered = sorted(values)
    shares = [(index + 1) / len(ordered) for index in range(len(ordered))]
    axis.step([ordered[0], *ordered], [0.0, *shares], where="post", color=colour, label=label, linewidth=1.6)
    axis.plot([ordered[len(ordered) // 2]], [0.5], "o", color=colour, markersize=5)


def _as_cdf(axis: Any, title: str, unit: str = "ms") -> None:
    axis.set_title(title, loc="left", fontsize=11)
    axis.set_xlabel(unit)
    axis.set_ylabel("share at or below")
    axis.set_ylim(0, 1.02)
    low, high = axis.dataLim.intervalx if axis.has_data() else (1, 1)
    if low > 0 and high / low > 30:
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter("{x:g}")
    _legend(axis, "lower right")


def _legend(axis: Any, where: str = "best") -> None:
    if axis.get_legend_handles_labels()[1]:
        axis.legend(loc=where, fontsize=8, frameon=False)


def _paint_serve(axes: Any, results: Sequence[Named]) -> None:
    for (name, record), colour in _coloured(results):
        requests = record.get("samples", {}).get("requests", [])
        good = [request for request in requests if "cause" not in request]
        duration_s = max(record["results"]["duration"], 1e-9)
        _cdf(axes[0], [1e3 * each["ttft_s"] for each in good if "ttft_s" in each], name, colour)
        _cdf(axes[1], [1e3 * gap for each in good for gap in each.get("gaps_s", [])], name, colour)
        edges = [duration_s * index / NUM_BINS for index in range(NUM_BINS + 1)]
        counts, busy = [0.0] * NUM_BINS, [0.0] * NUM_BINS
        for request in requests:
            times = token_times_s(request)
            for time_s in times:
                counts[_bin(time_s, duration_s)] += request.get("num_output_tokens", 0) / len(times)
            for index, begin_s in enumerate(edges[:-1]):  # counted at the middle of each bin
                busy[index] += request["sent_s"] <= begin_s + duration_s / NUM_BINS / 2 < request["end_s"]
        axes[2].stairs([count * NUM_BINS / duration_s for count in counts], edges, color=colour, label=name)
        axes[3].stairs(busy, edges, color=colour, label=name)
        failed = [request["end_s"] for request in requests if "cause" in request]
        if failed:
            axes[3].plot(failed, [0] * len(failed), "x", color=colour, label=f"{name}: {len(failed)} failed")
    _as_cdf(axes[0], "Time to first token")
    _as_cdf(axes[1], "Inter-token latency")
    for axis, title in ((axes[2], "Output tokens per second"), (axes[3], "Requests in flight")):
        axis.set_title(title, loc="left", fontsize=11)
        axis.set_xlabel("seconds since the start")
        axis.set_ylim(bottom=0)
        _legend(axis)


def _bin(time_s: float, duration_s: float) -> int:
    return max(0, min(NUM_BINS - 1, int(NUM_BINS * time_s / duration_s)))


def _paint_latency(axes: Any, results: Sequence[Named]) -> None:
    for (name, record), colour in _coloured(results):
        samples = record.get("samples", {})
        _cdf(axes[0], [1e3 * each for each in samples.get("latencies", [])], name, colour)
        firsts = [1e3 * each["ttft_s"] for each in samples.get("requests", []) if each.get("ttft_s")]
        _cdf(axes[1], firsts, name, colour)
    _as_cdf(axes[0], "Batch, end to end")
    _as_cdf(axes[1], "Time to first token")


def _paint_throughput(axes: Any, results: Sequence[Named]) -> None:
    names = [result.name for result in results]
    colours = [colour for _, colour in _coloured(results)]
    for axis, key, title in (
        (axes[0], "output_tokens_per_second", "Output tokens per second"),
        (axes[1], "tokens_per_second", "All tokens per second"),
    ):
        bars = axis.barh(names, [result.record["results"][key] for result in results], color=colours, height=0.6)
        axis.bar_label(bars, fmt="{:,.0f}", padding=4)
        axis.margins(x=0.18)
        axis.invert_yaxis()
        axis.set_title(title, loc="left", fontsize=11)


def _paint_startup(axes: Any, results: Sequence[Named]) -> None:
    axis = axes[0]
    rows: list[tuple[str, dict[str, float]]] = []
    for name, record in results:
        for kind in ("cold", "warm"):
            if samples := record.get("samples", {}).get(kind):
                rows.append((f"{name}, {kind}" if len(results) > 1 else kind, _startup_phases(samples)))
    phases = list(dict.fromkeys(phase for _, each in rows for phase in each))
    labels, left = [label for label, _ in rows], [0.0] * len(rows)
    for index, phase in enumerate(phases):
        widths = [each.get(phase, 0.0) for _, each in rows]
        axis.barh(labels, widths, left=left, label=phase, color=COLOURS[index % len(COLOURS)], height=0.6)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    for index, total in enumerate(left):
        axis.text(total, index, f"  {total:.2f} s", va="center", fontsize=9)
    axis.margins(x=0.22)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.set_title("From the program's start to the first token", loc="left", fontsize=11)
    axis.set_xlabel("seconds (median of each phase)")
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)


def _startup_phases(samples: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The median of each phase in seconds. `start the engine` is split into the engine's own phases and the rest."""
    inner = list(dict.fromkeys(phase for sample in samples for phase in sample["engine"]))
    found: dict[str, float] = {}
    for phase in dict.fromkeys(phase for sample in samples for phase in sample["phases"]):
        if phase == "start the engine":
            found |= {
                f"engine: {each}": statistics.median(sample["engine"].get(each, 0.0) for sample in samples)
                for each in inner
            }
            rests = [sample["phases"].get(phase, 0.0) - sum(sample["engine"].values()) for sample in samples]
            found["engine: process, connection"] = max(0.0, statistics.median(rests))
        else:
            found[phase] = statistics.median(sample["phases"].get(phase, 0.0) for sample in samples)
    return found


def _paint_overhead(axes: Any, results: Sequence[Named]) -> None:
    for (name, record), colour in _coloured(results):
        costs = {int(count): cost for count, cost in record["results"]["core_us_per_step"].items()}
        axes[0].plot(sorted(costs), [costs[count] for count in sorted(costs)], "o-", color=colour, label=name)
        for key, style in (("socket_us", "socket"), ("ring_us", "ring")):
            _cdf(axes[1], record["samples"].get(key, []), f"{style}, {name}", colour)
    axes[0].set_title("Core, processor time per step", loc="left", fontsize=11)
    axes[0].set_xlabel("running requests")
    axes[0].set_ylabel("microseconds")
    axes[0].set_ylim(bottom=0)
    _legend(axes[0])
    _as_cdf(axes[1], "Round trips", "microseconds")


def _paint_sweep(axes: Any, results: Sequence[Named]) -> None:
    """Throughput against latency, a point for each combination; the line joins the points of the Pareto front."""
    for axis, key, title in (
        (axes[0], "median_ttft_ms", "Throughput against time to first token"),
        (axes[1], "median_tpot_ms", "Throughput against time per output token"),
    ):
        for (name, record), colour in _coloured(results):
            points = [
                (point[key], point["output_throughput"], point["name"])
                for point in record["results"]["points"]
                if point.get(key) is not None and math.isfinite(point[key])
            ]
            axis.plot([x for x, _, _ in points], [y for _, y, _ in points], "o", color=colour, alpha=0.45)
            front = pareto(points)
            axis.plot([x for x, _, _ in front], [y for _, y, _ in front], "o-", color=colour, label=name)
            for x, y, label in front:
                axis.annotate(label, (x, y), textcoords="offset points", xytext=(6, -9), fontsize=7)
        axis.set_title(title, loc="left", fontsize=11)
        axis.set_xlabel(f"{'time to first token' if 'ttft' in key else 'time per output token'}, median, ms")
        axis.set_ylabel("output tokens per second")
        axis.set_ylim(bottom=0)
        axis.margins(x=0.2)
        axis.set_xlim(left=max(0.0, axis.get_xlim()[0]))
        _legend(axis, "lower right")


def pareto(points: Sequence[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """The points (latency, throughput, name) that no other point beats in both, ordered by latency."""
    front: list[tuple[float, float, str]] = []
    for point in sorted(points, key=lambda each: (each[0], -each[1])):
        if not front or point[1] > front[-1][1]:
            front.append(point)
    return front


_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #111827; margin: 2rem auto; max-width: 70rem; padding: 0 1.5rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p.about { color: #6b7280; margin: .2rem 0 1.5rem; }
table { border-collapse: collapse; }
th, td { padding: .3rem .8rem; text-align: right; border-bottom: 1px solid #e5e7eb; }
th:first-child, td:first-child { text-align: left; padding-left: 0; } th { color: #6b7280; font-weight: 600; }
.cards { display: flex; flex-wrap: wrap; gap: 1rem; } .card { border: 1px solid #e5e7eb; border-radius: 8px;
padding: .7rem 1.1rem; min-width: 9rem; } .card b { display: block; font-size: 1.5rem; } .card span { color: #6b7280; }
.warn { background: #fef3c7; border-left: 4px solid #d97706; padding: .5rem 1rem; margin: 1rem 0; }
.worse { color: #b91c1c; font-weight: 600; } .better { color: #15803d; font-weight: 600; } .noise { color: #6b7280; }
svg { max-width: 100%; height: auto; margin-top: 1.2rem; }
pre { background: #f9fafb; padding: 1rem; overflow-x: auto; font-size: 12px; }
"""
_COMPARABLE = 2


def page(results: Sequence[Named], svg: str) -> str:
    """The whole HTML document."""
    first = results[0].record
    title = f"headrace bench {first['benchmark']}"
    about = f"{first.get('date', '')} · {first.get('machine', {}).get('CPU', 'unknown machine')}"
    commit = first.get("commit")
    if commit:
        about += f" · commit {commit[:12]}" + (" with changes" if first.get("modified") else "")
    parts = [
        f"<h1>{escape(title)}</h1><p class=about>{escape(about)}</p>",
        *(_warning(name, record) for name, record in results),
        _cards(results[0]) if len(results) == 1 else "",
        svg,
        _measures_table(results),
        *(_failures(name, record) for name, record in results),
        *(_about(name, record) for name, record in results),
    ]
    head = f"<meta charset=utf-8><meta name=viewport content='width=device-width'><title>{escape(title)}</title>"
    return (
        f"<!doctype html><html lang=en><head>{head}<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _cards(result: Named) -> str:
    cards = [
        f"<div class=card><b>{number(measure.value)}</b><span>{escape(name)}, {escape(measure.unit)}</span></div>"
        for name, measure in measures(result.record).items()
    ]
    return f"<div class=cards>{''.join(cards)}</div>"


def _measures_table(results: Sequence[Named]) -> str:
    """A table with a row for each measure; for two results also the ratio and whether they can be told apart."""
    if len(results) < _COMPARABLE:
        return ""
    found = [measures(record) for _, record in results]
    names = [name for name in found[0] if all(name in each for each in found)]
    if not names:
        return ""
    heads = ["", *(name for name, _ in results)]
    rows = {name: [f"{name}, {found[0][name].unit}", *(number(each[name].value) for each in found)] for name in names}
    cells = {name: "".join(f"<td>{escape(cell)}</td>" for cell in row) for name, row in rows.items()}
    if len(results) == _COMPARABLE:
        heads += ["ratio", "95% interval", "verdict"]
        for row in compare([results[0].record], [results[1].record]):
            interval = "-" if row.interval is None else f"{row.interval[0]:.3f} - {row.interval[1]:.3f}"
            kind = next((word for word in ("WORSE", "better") if word in row.verdict), "noise").lower()
            cells[row.name] += f"<td>{row.ratio:.3f}</td><td>{interval}</td><td class={kind}>{escape(row.verdict)}</td>"
    body = "".join(f"<tr>{row}</tr>" for row in cells.values())
    return f"<h2>Figures</h2><table><tr>{''.join(f'<th>{escape(head)}</th>' for head in heads)}</tr>{body}</table>"


def _warning(name: str, record: dict[str, Any]) -> str:
    warning = record["results"].get("generator", {}).get("warning")
    return f"<div class=warn>{escape(name)}: {escape(warning)}</div>" if warning else ""


def _failures(name: str, record: dict[str, Any]) -> str:
    errors = record["results"].get("errors") or {}
    if not errors:
        return ""
    rows = "".join(
        f"<tr><td>{escape(cause)}</td><td>{error['count']:,}</td><td>{escape(str(error['example']))}</td></tr>"
        for cause, error in errors.items()
    )
    return f"<h2>Failed requests of {escape(name)}</h2><table><tr><th>cause<th>requests<th>such as</tr>{rows}</table>"


def _about(name: str, record: dict[str, Any]) -> str:
    kept = {key: record[key] for key in ("arguments", "seed", "machine", "versions", "metadata") if record.get(key)}
    text = escape(json.dumps(kept, indent=1))
    return f"<h2>{escape(name)}: what ran, and on what</h2><details><summary>show</summary><pre>{text}</pre></details>"
