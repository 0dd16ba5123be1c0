"""The workload that every engine runs: random token ids, greedy, fixed lengths, no early stop.

    python benchmarks/workload.py MODEL [--dtype bfloat16] [--case decode_1 ...]

runs Headrace on it and prints one JSON line in the same format as the peers' scripts.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from headrace import LLM

Generate = Callable[[list[list[int]], int], float]
"""(prompts, tokens to generate for each) -> seconds"""


class Case(NamedTuple):
    name: str
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    repeats: int


CASES = (
    Case("decode_1", 1, 16, 128, 3),
    Case("decode_8", 8, 16, 64, 2),
    Case("mixed_64", 64, 128, 128, 1),
    Case("prefill_1024", 1, 1024, 1, 3),
)


def prompts(case: Case, seed: int) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[numbers.randrange(100, 40_000) for _ in range(case.prompt_tokens)] for _ in range(case.num_requests)]


def run_cases(generate: Generate, only: list[str] | None = None, cases: Sequence[Case] = CASES) -> dict[str, Any]:
    """Median seconds and rates of each case, with the raw seconds."""
    generate(prompts(Case("warm-up", 2, 16, 8, 1), 99), 8)
    generate(prompts(Case("warm-up", 1, 600, 2, 1), 98), 2)
    rows: dict[str, Any] = {}
    for case in cases:
        if only and case.name not in only:
            continue
        raw_s = [generate(prompts(case, seed), case.output_tokens) for seed in range(case.repeats)]
        seconds = statistics.median(raw_s)
        rows[case.name] = {
            "seconds": round(seconds, 4),
            "out_tok_s": round(case.num_requests * case.output_tokens / seconds, 1),
            "in_tok_s": round(case.num_requests * case.prompt_tokens / seconds, 1),
            "raw_s": raw_s,
        }
    return rows


def generator(llm: LLM) -> Generate:
    """The `Generate` function of our engine."""
    from headrace import SamplingParams

    def generate(batch: list[list[int]], output_tokens: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)
        began = time.perf_counter()
        outputs = llm.generate(batch, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        assert all(len(output.outputs[0].token_ids) == output_tokens for output in outputs)
        return seconds

    return generate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--case", action="append", help="run only this case; repeatable")
    arguments = parser.parse_args()
    from headrace import LLM

    began = time.perf_counter()
    with LLM(
        arguments.model,
        dtype=arguments.dtype,
        max_model_len=2048,
        enable_prefix_caching=False,
        max_num_batched_tokens=2048,
        skip_tokenizer_init=True,
    ) as llm:
        ready_s = time.perf_counter() - began

        rows = run_cases(generator(llm), arguments.case)
    print("startup_s", round(ready_s, 2), file=sys.stderr)
    print(json.dumps({"headrace": rows}))


if __name__ == "__main__":
    main()
