"""Prefix-cache hits and load balance of engines with multi-turn chats, in the simulation: the router compared with
round robin, least requests, and the cache-aware rule of SGLang's router.

    python benchmarks/router_policies.py [--engines 16] [--frontends 4] [--users 1600] [--seconds 100] [--out FILE]

Each user has one conversation after another, and each turn goes to any of the frontends. Deterministic: equal arguments
give equal figures, on any machine. Targets: 95% of the hits of a single unbounded cache, and the busiest engine within
10% of the mean.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import msgspec
from simulation.conversations import Conversations, converse
from simulation.policies import POLICIES

from headrace.frontend.bench.results.metrics import columns
from headrace.frontend.bench.results.record import surroundings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=16)
    parser.add_argument("--frontends", type=int, default=4)
    parser.add_argument("--users", type=int, default=1600)
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    scenario = Conversations(
        num_engines=arguments.engines,
        num_frontends=arguments.frontends,
        num_users=arguments.users,
        seconds=arguments.seconds,
    )
    outcomes = [converse(policy, arguments.seed, scenario) for policy in arguments.policies]
    rows = [("", "requests", "hits", "of infinite", "busiest", "answer, s")]
    rows += [
        (
            each.policy,
            str(each.num_requests),
            f"{each.hit_rate:.1%}",
            f"{each.share:.1%}",
            f"{each.busiest:.3f}",
            f"{each.mean_answer_s:.2f}",
        )
        for each in outcomes
    ]
    print(columns(rows))
    if arguments.out:
        results = {"scenario": msgspec.to_builtins(scenario), "outcomes": msgspec.to_builtins(outcomes)}
        arguments.out.write_text(json.dumps({**surroundings(probe=False), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
