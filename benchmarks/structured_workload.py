"""Eight streams that follow a JSON schema, in Headrace or in vLLM, through the Python interface that both share.

    python benchmarks/structured_workload.py MODEL [--engine vllm] [--backend guidance]

prints one JSON line like `workload.py`, with a case named by the grammar library. `peers.py` runs it with each peer's
Python, so it imports only that engine and the standard library.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from typing import Any

from structured_schema import schema_of

NUM_STREAMS, OUTPUT_TOKENS, REPEATS = 8, 64, 3
PROMPT = "Describe a person as JSON."
MODULES = {"headrace": ("headrace", "headrace"), "vllm": ("vllm", "vllm.sampling_params")}
"""For each engine, the modules with LLM and SamplingParams, and with StructuredOutputsParams."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--engine", choices=list(MODULES), default="headrace")
    parser.add_argument("--backend", choices=["guidance", "xgrammar"], default="guidance")
    arguments = parser.parse_args()
    api, params_of = (importlib.import_module(name) for name in MODULES[arguments.engine])
    began = time.perf_counter()
    llm = api.LLM(
        model=arguments.model,
        dtype="bfloat16",
        max_model_len=2048,
        enable_prefix_caching=False,
        max_num_batched_tokens=2048,
        structured_outputs_config={"backend": arguments.backend},
    )
    print("startup_s", round(time.perf_counter() - began, 2), file=sys.stderr)

    def generate(seed: int) -> float:
        form = params_of.StructuredOutputsParams(json=schema_of(), disable_any_whitespace=True)
        params = [
            api.SamplingParams(temperature=0.7, seed=seed + n, max_tokens=OUTPUT_TOKENS, structured_outputs=form)
            for n in range(NUM_STREAMS)
        ]
        began = time.perf_counter()
        outputs = llm.generate([PROMPT] * NUM_STREAMS, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        assert all(len(output.outputs[0].token_ids) == OUTPUT_TOKENS for output in outputs), "an answer ended early"
        return seconds

    generate(99)
    raw_s = [generate(100 * repeat) for repeat in range(REPEATS)]
    seconds = statistics.median(raw_s)
    row: dict[str, Any] = {"seconds": round(seconds, 4), "raw_s": raw_s}
    row["out_tok_s"] = round(NUM_STREAMS * OUTPUT_TOKENS / seconds, 1)
    print(json.dumps({arguments.engine: {f"schema_8 {arguments.backend}": row}}))


if __name__ == "__main__":
    main()
