"""A result as one HTML page: figures at a glance, the plot, what failed, and what it ran on. Nothing is loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from headrace.frontend.bench.compare import compare
from headrace.frontend.bench.measures import measures
from headrace.frontend.bench.tables import number

if TYPE_CHECKING:
    from headrace.frontend.bench.plot import Named

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
    """The whole document."""
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
    """A row for each measure; of two results the ratio and whether it is noise."""
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
            kind = next((word for word in ("noise", "WORSE", "better") if word in row.verdict), "noise").lower()
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
