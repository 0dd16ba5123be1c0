"""Runs fleets of simulated engines on virtual time, with faults, and checks that no request suffers.

    python benchmarks/simulate.py --seeds 1000

Routers and clients are the real ones; engines, network and clock are not. Equal seeds give equal runs. The exit status
is 1 when something did not hold that must hold: a token lost, doubled or changed, a request without its one answer, one
that stands still or fails without need.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from simulation.engines import EngineShape
from simulation.world import Report, Scenario, simulate

from headrace.core.options.option import Option
from headrace.core.options.parsing import add_options, struct_from_arguments
from headrace.frontend.bench.offline import finish, progress
from headrace.frontend.bench.options import RUN, ResultOptions
from headrace.frontend.bench.results import record as records
from headrace.frontend.bench.results.metrics import columns, percentile
from headrace.frontend.fleet.decisions import RouterOptions
from headrace.frontend.fleet.prefixes import MOST_PREFIXES

_SHOWN_VIOLATIONS = 20


class SimulateOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The simulated fleets. Rates are per virtual second."""

    seeds: Annotated[int, Option(RUN, "How many runs, each with a seed of its own", "runs", minimum=1)] = 100
    seed: Annotated[int, Option(RUN, "Of the first run; the next has the next")] = 0
    num_engines: Annotated[int, Option(RUN, "Engines", "engines", minimum=1)] = 5
    num_frontends: Annotated[int, Option(RUN, "Frontends, each with a router and clients of its own", minimum=1)] = 3
    num_coordinators: Annotated[
        int, Option(RUN, "Coordinators by which frontends find engines; 0: they know them", minimum=0)
    ] = 0
    num_requests: Annotated[int, Option(RUN, "Requests of a run", "requests", minimum=1)] = 100
    arrivals_per_s: Annotated[float, Option(RUN, "Requests that come to the whole fleet", "1/s", minimum=0.001)] = 20.0
    faults_per_s: Annotated[
        float,
        Option(RUN, "Deaths, freezes, slow engines, cut and late connections, drains, upgrades, crowds", minimum=0),
    ] = 2.0
    poison_share: Annotated[
        float, Option(RUN, "Share of requests that kill the engine that computes them", minimum=0, maximum=1)
    ] = 0.0
    max_migrations: Annotated[int, Option(RUN, "Moves of a request without a token between", "moves", minimum=0)] = 3
    max_output_tokens: Annotated[int, Option(RUN, "Longest answer", "tokens", minimum=1)] = 40
    mean_prompt_tokens: Annotated[int, Option(RUN, "Mean length of prompts", "tokens", minimum=1)] = 96
    max_num_seqs: Annotated[int, Option(RUN, "Requests that an engine runs at once", "requests", minimum=1)] = 8
    num_sessions: Annotated[int, Option(RUN, "Conversations, whose requests begin with the same", minimum=1)] = 12
    most_prefixes: Annotated[
        int, Option(RUN, "Beginnings of prompts of which each router knows who holds them", "prefixes", minimum=2)
    ] = MOST_PREFIXES


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns exit status 1 if any run had a violation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for struct in (SimulateOptions, ResultOptions):
        add_options(parser, struct)
    parsed = parser.parse_args(arguments)
    asked, result = struct_from_arguments(parsed, SimulateOptions), struct_from_arguments(parsed, ResultOptions)
    records.check_writable(result)
    scenario = scenario_of(asked)
    record = records.new_record("simulate", result, records.given(asked), asked.seed)
    reports: list[Report] = []
    began_s = time.monotonic()
    with progress(asked.seeds, "run", result) as bar:
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


if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # otherwise each task of the simulation reports it
    sys.exit(main())
