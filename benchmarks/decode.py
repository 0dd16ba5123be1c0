"""The demo model on the workload of `workload.py`, in bf16 and with its weights packed as stored in the file.

    python benchmarks/decode.py [--only gguf] [--case decode_1 ...] [--out FILE.json]

`gap_us` is the mean time from the end of one forward pass to the begin of the next, in which Python runs and the model
is idle; `gap_share` is the gap's share of the whole time. Both are over all cases of a run.

`startup_s` is from the call of `LLM()` to its return, `first_token_s` from there to the first token of a short prompt.
With `--cold` the kernels are compiled anew, in a separate cache folder. Nothing else may run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from report import write_report
from workload import CASES, generator, run_cases

from headrace import LLM, SamplingParams
from headrace.executor.checkpoints.demo_model import fetch_demo_model
from headrace.frontend.bench.startup import empty_cache

KINDS: dict[str, dict[str, Any]] = {"bf16": {"dtype": "bfloat16"}, "gguf": {}}


def measure(path: Path, options: dict[str, Any], only: list[str] | None) -> dict[str, Any]:
    began = time.perf_counter()
    with LLM(str(path), max_model_len=2048, enable_prefix_caching=False, **options) as llm:
        startup_s = time.perf_counter() - began
        llm.generate("The river", SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        first_token_s = time.perf_counter() - began - startup_s

        before = llm.get_stats()
        cases = run_cases(generator(llm), only)
        after = llm.get_stats()
    gap_s, forward_s = after.step_gap_s - before.step_gap_s, after.forward_s - before.forward_s
    return {
        "startup_s": startup_s,
        "first_token_s": first_token_s,
        "gap_us": 1e6 * gap_s / max(1, after.num_step_gaps - before.num_step_gaps),
        "gap_share": gap_s / (gap_s + forward_s),
        "cases": cases,
    }


@contextmanager
def cold_cache() -> Iterator[None]:
    """Sets an empty cache folder for the engines started in the context."""
    before = os.environ.get("HEADRACE_CACHE")
    with empty_cache() as folder:
        os.environ["HEADRACE_CACHE"] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ["HEADRACE_CACHE"]
            else:
                os.environ["HEADRACE_CACHE"] = before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(KINDS), help="one of the two")
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES], help="repeatable")
    parser.add_argument("--cold", action="store_true", help="compile the kernels anew")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    arguments = parser.parse_args()
    path = fetch_demo_model()
    results: dict[str, Any] = {}
    for kind in [arguments.only] if arguments.only else KINDS:
        with cold_cache() if arguments.cold else nullcontext():
            found = measure(path, KINDS[kind], arguments.case)
        results[kind] = {"options": KINDS[kind], "cold": arguments.cold, **found}
        print(f"{kind}: ready in {found['startup_s']:.2f} s, first token {found['first_token_s']:.2f} s later")
        print(f"  {found['gap_us']:.0f} us between forward passes, {found['gap_share']:.1%} of the time")
        for name, row in found["cases"].items():
            print(f"  {name:<14} {row['out_tok_s']:>8.1f} out tok/s {row['in_tok_s']:>9.1f} in tok/s")
    if arguments.out:
        write_report(arguments.out, "decode", results)


if __name__ == "__main__":
    main()
