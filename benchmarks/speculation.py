"""Decoding with and without speculation, on text that copies from its prompt and on text that does not.

    python benchmarks/speculation.py [--methods ngram suffix] [--streams 1 4] [--out FILE.json]

`copy`: passages of the standard library's help pages, with the request to repeat them with one change. `agent`: files
of code that are edited step by step: each prompt has the file as the last edit left it, and asks for the whole file
with one more change. `again`: questions asked before in other words, whose answers stand only in past outputs.
`random`: prompts of random tokens, sampled from at temperature 1, so that hardly any run of tokens occurs twice.

With the demo model; runs without speculation and with each method alternate. `ratio` is the speed with speculation
divided by the speed without, of the medians. All should give the same tokens; differing answers are counted. Nothing
else may run on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import pydoc
import random
import re
import statistics
import time
from pathlib import Path
from typing import Any

from report import write_report

from headrace import LLM, SamplingParams
from headrace.executor.checkpoints.demo_model import fetch_demo_model

MODULES = ("json", "bisect", "heapq", "textwrap", "string", "random", "colorsys", "calendar")
PASSAGE_CHARACTERS = 1200
EDITS = 4
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


def agent_prompts(count: int) -> list[str]:
    """EDITS edits of each of a few modules, one after another."""
    prompts = []
    for name in MODULES[: -(-count // EDITS)]:
        source = inspect.getsource(importlib.import_module(name))[:PASSAGE_CHARACTERS].rpartition("\n")[0]
        words = sorted(set(re.findall(r"[a-z_]{5,}", source)), key=lambda word: (-source.count(word), word))
        for word in words[:EDITS]:
            prompts.append(
                f"<|im_start|>user\nThis is a file:\n\n{source}\n\nRename {word} to {word}_new and write the whole "
                f"file.<|im_end|>\n<|im_start|>assistant\n{source[:80]}"
            )
            source = re.sub(rf"\b{word}\b", f"{word}_new", source)
    return prompts[:count]


def again_prompts(count: int) -> list[str]:
    """Each question in two wordings."""
    prompts = []
    for name in MODULES[: -(-count // 2)]:
        for ask in ("Explain what the Python module {} is for.", "Tell me: what is the Python module {} for?"):
            question, beginning = ask.format(name), f"The `{name}` module in Python is"
            prompts.append(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{beginning}")
    return prompts[:count]


def random_prompts(count: int) -> list[dict[str, Any]]:
    numbers = random.Random(0)
    return [
        {"prompt_token_ids": [numbers.randrange(100, VOCAB_SIZE) for _ in range(PROMPT_TOKENS)]} for _ in range(count)
    ]


def measure(llm: LLM, prompts: list[Any], params: SamplingParams, streams: int) -> tuple[list[list[int]], float]:
    """The tokens of each prompt, `streams` at once, and the seconds of decoding without the first tokens."""
    tokens, seconds = [], 0.0
    for nth in range(0, len(prompts), streams):
        outputs = llm.generate(prompts[nth : nth + streams], params, use_tqdm=False)
        tokens += [list(output.outputs[0].token_ids) for output in outputs]
        seconds += max(output.metrics.decode_s or 0.0 for output in outputs if output.metrics is not None)
    return tokens, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=["ngram", "suffix"], default=["ngram", "suffix"])
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 4], help="answers at once")
    parser.add_argument("--num-speculative-tokens", type=int, default=8, help="of ngram")
    parser.add_argument("--prompt-lookup-max", type=int, default=4)
    parser.add_argument("--prompt-lookup-min", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=len(MODULES), help="of each kind")
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="auto", help="of the weights; auto computes the demo's packed ones")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    arguments = parser.parse_args()
    ngram = {
        "method": "ngram",
        "num_speculative_tokens": arguments.num_speculative_tokens,
        "prompt_lookup_max": arguments.prompt_lookup_max,
        "prompt_lookup_min": arguments.prompt_lookup_min,
    }
    configs = {name: {"ngram": ngram, "suffix": {"method": "suffix"}}[name] for name in arguments.methods}
    greedy = SamplingParams(temperature=0, max_tokens=arguments.tokens)
    cases: dict[str, tuple[list[Any], SamplingParams]] = {
        "copy": (copy_prompts(arguments.prompts), greedy),
        "agent": (agent_prompts(arguments.prompts), greedy),
        "again": (again_prompts(arguments.prompts), greedy),
        "random": (
            random_prompts(arguments.prompts),
            SamplingParams(temperature=1.0, seed=1, max_tokens=arguments.tokens, ignore_eos=True),
        ),
    }
    engine: dict[str, Any] = {"model": str(fetch_demo_model()), "max_model_len": 2048, "enable_prefix_caching": False}
    engine["dtype"] = arguments.dtype
    results: dict[str, Any] = {"speculative_configs": configs, "dtype": arguments.dtype, "cases": {}}
    with contextlib.ExitStack() as stack:
        engines = {"without": stack.enter_context(LLM(**engine))}
        for method, config in configs.items():
            engines[method] = stack.enter_context(LLM(**engine, speculative_config=config))
        for name, (prompts, params) in cases.items():
            for streams in arguments.streams:
                found = compare(engines, prompts, params, streams, arguments.rounds)
                results["cases"][f"{name}, {streams} at once"] = found
                for method in configs:
                    print(f"{name}, {streams} at once, {method}: {describe(found[method])}", flush=True)
    if arguments.out:
        write_report(arguments.out, "speculation", results)


def compare(
    engines: dict[str, LLM], prompts: list[Any], params: SamplingParams, streams: int, rounds: int
) -> dict[str, Any]:
    """By method. `engines`: by method, and "without"."""
    speeds: dict[str, list[float]] = {kind: [] for kind in engines}
    answers: dict[str, list[list[int]]] = {}
    before = {kind: llm.get_stats() for kind, llm in engines.items()}
    for number in range(rounds):
        salt = f"{streams} at once, round {number}"  # no round finds past outputs of another
        salted = [{"cache_salt": salt} | (each if isinstance(each, dict) else {"prompt": each}) for each in prompts]
        for kind, llm in engines.items():
            answers[kind], seconds = measure(llm, salted, params, streams)
            speeds[kind].append(sum(len(tokens) - 1 for tokens in answers[kind]) / seconds)
            time.sleep(0.05)
    found = {}
    for kind, llm in engines.items():
        if kind == "without":
            continue
        after = llm.get_stats()
        found[kind] = {
            "tokens_per_s": {"with": speeds[kind], "without": speeds["without"]},
            "ratio": statistics.median(speeds[kind]) / statistics.median(speeds["without"]),
            "equal_answers": sum(a == b for a, b in zip(answers[kind], answers["without"], strict=True)),
            "answers": len(prompts),
            "output_tokens": sum(map(len, answers[kind])),
            "draft_tokens": (after.num_draft_tokens - before[kind].num_draft_tokens) // rounds,
            "accepted_tokens": (after.num_accepted_tokens - before[kind].num_accepted_tokens) // rounds,
        }
    return found


def describe(case: dict[str, Any]) -> str:
    return (
        f"{case['ratio']:.2f}x without ({statistics.median(case['tokens_per_s']['with']):.0f} beside "
        f"{statistics.median(case['tokens_per_s']['without']):.0f} tok/s); {case['equal_answers']} of "
        f"{case['answers']} answers have the same tokens; {case['accepted_tokens']} of {case['draft_tokens']} draft "
        f"tokens were right, of {case['output_tokens']} tokens"
    )


if __name__ == "__main__":
    main()
