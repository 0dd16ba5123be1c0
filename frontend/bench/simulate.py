"""`headrace bench simulate`: many runs of a simulated fleet, and the violations found in them."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from typing import Any

import msgspec

from headrace.core.options.parsing import struct_from_arguments
from headrace.frontend.bench.offline import finish, progress
from headrace.frontend.bench.options import ResultOptions, SimulateOptions
from headrace.frontend.bench.results import record as records
from headrace.frontend.bench.results.metrics import columns, percentile
from headrace.frontend.bench.simulation.engines import EngineShape
from headrace.frontend.bench.simulation.world import Report, Scenario, simulate
from headrace.frontend.client.event_loop import exiting_when_interrupted
from headrace.frontend.fleet.decisions import RouterOptions

_SHOWN_VIOLATIONS = 20


def bench_simulate(arguments: argparse.Namespace) -> int:
    """Returns exit status 1 if any run had a violation."""
    asked, result = struct_from_arguments(arguments, SimulateOptions), struct_from_arguments(arguments, ResultOptions)
    records.check_writable(result)
    scenario = scenario_of(asked)
    record = records.new_record("simulate", result, records.given(asked), asked.seed)
    reports: list[Report] = []
    began_s = time.monotonic()
    with exiting_when_interrupted(), progress(asked.seeds, "run", result) as bar:
        for seed in range(asked.seed, asked.seed + asked.seeds):
            reports.append(simulate(seed, scenario))
            bar.update()
    record["results"] = summary(reports) | {"duration": time.monotonic() - began_s}
    record["samples"] = [msgspec.to_builtins(each) for each in reports]
    print(_table(record["results"]))
    broken = [(report.seed, each) for report in reports for each in report.violations]
    for seed, violation in broken[:_SHOWN_VIOLATIONS]:
        print(f"seed {seed}: {violation}")
    return finish(record, result) or int(bool(broken))


def scenario_of(asked: SimulateOptions) -> Scenario:
    return Scenario(
        num_engines=asked.num_engines,
        num_frontends=asked.num_frontends,
        num_coordinators=asked.num_coordinators,
        num_requests=asked.num_requests,
        arrivals_per_s=asked.arrivals_per_s,
        faults_per_s=asked.faults_per_s,
        poison_share=asked.poison_share,
        max_output_tokens=asked.max_output_tokens,
        mean_prompt_tokens=asked.mean_prompt_tokens,
        num_sessions=asked.num_sessions,
        engine=EngineShape(max_num_seqs=asked.max_num_seqs),
        router=RouterOptions(max_migrations=asked.max_migrations, most_prefixes=asked.most_prefixes),
    )


def summary(reports: list[Report]) -> dict[str, Any]:
    """Sums over all runs, and percentiles of the gaps in seconds."""
    counts: dict[str, Counter[str]] = {
        name: sum((Counter(getattr(each, name)) for each in reports), Counter())
        for name in ("failures", "faults", "migrations")
    }
    figures: dict[str, Any] = {
        "runs": len(reports),
        "requests": sum(each.num_finished + sum(each.failures.values()) for each in reports),
        "finished": sum(each.num_finished for each in reports),
        "tokens": sum(each.num_tokens for each in reports),
        "virtual_s": sum(each.virtual_s for each in reports),
        "violations": sum(len(each.violations) for each in reports),
        **{name: dict(sorted(count.items())) for name, count in counts.items()},
    }
    for kind in ("died", "left"):
        gaps_s = sorted(gap_s for each in reports for gap_s in each.gaps_s[kind])
        for percent in (50, 99) if gaps_s else ():
            figures[f"gap_{kind}_p{percent}_s"] = percentile(gaps_s, percent)
    return figures


def _table(figures: dict[str, Any]) -> str:
    rows = []
    for name, value in figures.items():
        if isinstance(value, dict):
            text = ", ".join(f"{count} {kind}" for kind, count in value.items()) or "none"
        else:
            text = f"{value:.3f}" if isinstance(value, float) else str(value)
        rows.append((name.replace("_", " "), text))
    return columns(rows)
