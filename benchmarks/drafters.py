"""What drafting costs the loop's thread in a step: rows of long contexts, all of which are searched in every step.

    python benchmarks/drafters.py [--rows 64] [--context 131072] [--out benchmarks/results/drafters.json]

For each method: the milliseconds of processor time of the steps in which the prompts' tokens enter the index (at most
MOST_ADDED a step), and of those after, in which each row got two more tokens. No model runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from report import write_report

from headrace.core.options.speculation import NgramSpeculation, Speculation, SuffixSpeculation
from headrace.core.schedule.drafters import drafter_of
from headrace.core.schedule.requests import Request, RowTable
from headrace.ipc.messages import Generate, Sampling

METHODS: dict[str, Speculation] = {
    "ngram": NgramSpeculation(num_speculative_tokens=8, prompt_lookup_max=4, prompt_lookup_min=2),
    "suffix": SuffixSpeculation(num_speculative_tokens=24),
}
VOCAB_SIZE = 150_000
PERIOD = 3000
"""The text repeats after so many tokens, so that each search finds something."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--context", type=int, default=131_072, help="tokens of each row")
    parser.add_argument("--steps", type=int, default=200, help="measured after the prompts are in the index")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    arguments = parser.parse_args()
    results = {
        name: measure(each, arguments.rows, arguments.context, arguments.steps) for name, each in METHODS.items()
    }
    for name, found in results.items():
        print(f"{name}: {found}")
    if arguments.out:
        write_report(arguments.out, "drafters", results)


def measure(speculation: Speculation, num_rows: int, context: int, steps: int) -> dict[str, Any]:
    table, drafter = RowTable(num_rows, context + 2 * steps + 100), drafter_of(speculation)
    drafter.bind(table)
    dice = np.random.default_rng(0)
    texts = [dice.integers(0, VOCAB_SIZE, PERIOD).astype(np.int32) for _ in range(num_rows)]
    for text in texts:
        tokens = np.resize(text, context)
        request = Request(
            client=0,
            slot=0,
            request_id="",
            token_ids=tokens,
            task=Generate(sampling=Sampling(max_tokens=2 * steps + 99)),
            seed=0,
        )
        row = table.enter(request, context + 2 * steps + 100, 0)
        texts[row] = text
    rows, entering, after = np.flatnonzero(table.active), list[float](), list[float]()
    num_found = 0
    while len(after) < steps:
        began_s = time.thread_time()
        drafter.look_up(rows)
        drafts = [drafter.propose(row, 4) for row in rows.tolist()]
        took_ms = (time.thread_time() - began_s) * 1e3
        if drafter._texts._added[rows].sum() < (table.num_known_tokens[rows] - 1).sum() - 64 * num_rows:  # type: ignore[attr-defined]
            entering.append(took_ms)
            continue
        after.append(took_ms)
        num_found += sum(map(bool, map(len, drafts)))
        for row in rows.tolist():
            known = int(table.num_known_tokens[row])
            table.token_ids[row, known : known + 2] = texts[row][np.arange(known, known + 2) % PERIOD]
        table.num_tokens[rows] += 2
        table.num_known_tokens[rows] += 2
    return {
        "rows": num_rows,
        "context": context,
        "steps_entering": len(entering),
        "ms_entering": {"median": statistics.median(entering), "max": max(entering)} if entering else None,
        "ms_after": {"median": statistics.median(after), "max": max(after)},
        "drafts_per_step": num_found / len(after),
    }


if __name__ == "__main__":
    main()
