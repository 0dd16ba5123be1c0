"""Decoding with and without n-gram speculation, on text that copies from its prompt and on text that does not.

    python benchmarks/speculation.py [--num-speculative-tokens 8] [--out benchmarks/results/speculation.json]

`copy`: passages of the standard library's help pages, with the request to repeat them with one change. `random`:
prompts of random tokens, sampled from at temperature 1, so that hardly any run of tokens occurs twice.

One stream at a time, with the demo model; runs with and without speculation alternate. `ratio` is the speed with
speculation divided by the speed without, of the medians. Both should give the same tokens; differing answers are
counted. Nothing else may run on the machine.
"""

from __future__ import annotations

import argparse
import pydoc
import random
import statistics
import time
from pathlib import Path
from typing import Any

from report import write_report

from headrace import LLM, SamplingParams
from headrace.executor.checkpoints.demo_model import fetch_demo_model

MODULES = ("json", "bisect", "heapq", "textwrap", "string", "random", "colorsys", "calendar")
PASSAGE_CHARACTERS = 1200
PROMPT_TOKENS, VOCAB_SIZE = 256, 49152


def copy_prompts(count: int) -> list[str]:
    """The instruction-tuned demo model's chat format, written out, so that its template is not needed."""
    prompts = []
    for name in MODULES[:count]:
        page = pydoc.plain(pydoc.render_doc(name)).strip()
        passage = page[:PASSAGE_CHARACTERS].rpartition("\n")[0]
        prompts.append(
            f"<|im_start|>user\nRepeat this text word for word, but write NAME in place of {name}:\n\n"
            f"{passage}<|im_end|>\n<|im_start|>assistant\n{passage[:80]}"
        )
    return prompts


def random_prompts(count: int) -> list[dict[str, Any]]:
    numbers = random.Random(0)
    return [
        {"prompt_token_ids": [numbers.randrange(100, VOCAB_SIZE) for _ in range(PROMPT_TOKENS)]} for _ in range(count)
    ]


def measure(llm: LLM, prompts: list[Any], params: SamplingParams) -> tuple[list[list[int]], float]:
    """The tokens of each prompt, one after another, and the seconds of decoding without the first tokens."""
    tokens, seconds = [], 0.0
    for prompt in prompts:
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        tokens.append(list(output.outputs[0].token_ids))
        assert output.metrics is not None
        seconds += output.metrics.decode_s or 0.0
    return tokens, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-speculative-tokens", type=int, default=8)
    parser.add_argument("--prompt-lookup-max", type=int, default=4)
    parser.add_argument("--prompt-lookup-min", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=len(MODULES), help="of each kind")
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="auto", help="of the weights; auto computes the demo's packed ones")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    arguments = parser.parse_args()
    config = {
        "method": "ngram",
        "num_speculative_tokens": arguments.num_speculative_tokens,
        "prompt_lookup_max": arguments.prompt_lookup_max,
        "prompt_lookup_min": arguments.prompt_lookup_min,
    }
    cases: dict[str, tuple[list[Any], SamplingParams]] = {
        "copy": (copy_prompts(arguments.prompts), SamplingParams(temperature=0, max_tokens=arguments.tokens)),
        "random": (
            random_prompts(arguments.prompts),
            SamplingParams(temperature=1.0, seed=1, max_tokens=arguments.tokens, ignore_eos=True),
        ),
    }
    engine: dict[str, Any] = {"model": str(fetch_demo_model()), "max_model_len": 2048, "enable_prefix_caching": False}
    engine["dtype"] = arguments.dtype
    results: dict[str, Any] = {"speculative_config": config, "dtype": arguments.dtype, "cases": {}}
    with LLM(**engine) as plain, LLM(**engine, speculative_config=config) as speculating:
        for name, (prompts, params) in cases.items():
            results["cases"][name] = compare(plain, speculating, prompts, params, arguments.rounds)
            print(f"{name}: {describe(results['cases'][name])}")
    if arguments.out:
        write_report(arguments.out, "speculation", results)


def compare(plain: LLM, speculating: LLM, prompts: list[Any], params: SamplingParams, rounds: int) -> dict[str, Any]:
    speeds: dict[str, list[float]] = {"without": [], "with": []}
    answers: dict[str, list[list[int]]] = {}
    before = speculating.get_stats()
    for _ in range(rounds):
        for kind, llm in (("without", plain), ("with", speculating)):
            answers[kind], seconds = measure(llm, prompts, params)
            speeds[kind].append(sum(len(tokens) - 1 for tokens in answers[kind]) / seconds)
            time.sleep(0.05)
    after = speculating.get_stats()
    return {
        "tokens_per_s": speeds,
        "ratio": statistics.median(speeds["with"]) / statistics.median(speeds["without"]),
        "equal_answers": sum(a == b for a, b in zip(answers["with"], answers["without"], strict=True)),
        "answers": len(prompts),
        "output_tokens": sum(map(len, answers["with"])),
        "draft_tokens": (after.num_draft_tokens - before.num_draft_tokens) // rounds,
        "accepted_tokens": (after.num_accepted_tokens - before.num_accepted_tokens) // rounds,
    }


def describe(case: dict[str, Any]) -> str:
    return (
        f"{case['ratio']:.2f}x without ({statistics.median(case['tokens_per_s']['with']):.0f} beside "
        f"{statistics.median(case['tokens_per_s']['without']):.0f} tok/s); {case['equal_answers']} of "
        f"{case['answers']} answers have the same tokens; {case['accepted_tokens']} of {case['draft_tokens']} draft "
        f"tokens were right, of {case['output_tokens']} tokens"
    )


if __name__ == "__main__":
    main()
