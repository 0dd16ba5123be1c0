"""Options of an engine with little memory, and generation that begins only after all requests have arrived."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from headrace import LLM, RequestOutput

# Little memory and small steps: prompts are computed in chunks, and requests are preempted.
TIGHT: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 8,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 3,
    "max_model_len": 64,
    "skip_tokenizer_init": True,
    "in_process": True,
}


def shared_prefix(vocab_size: int) -> list[list[int]]:
    """Three prompts for TIGHT. The first and the last begin with the same 24 tokens, for the prefix cache."""
    numbers = random.Random(7)
    prompts = [[numbers.randrange(2, vocab_size) for _ in range(length)] for length in (50, 33, 41)]
    prompts[2][:24] = prompts[0][:24]
    return prompts


def generate_all_at_once(llm: LLM, prompts: list[Any], params: Any) -> list[RequestOutput]:
    """As `llm.generate`, but all requests wait in the queue before the first step, so that batches and preemptions do
    not depend on arrival times."""
    llm.pause_generation("keep", clear_cache=False)
    with ThreadPoolExecutor(1) as pool:
        answering = pool.submit(llm.generate, prompts, params, use_tqdm=False)
        while llm.get_stats().num_waiting < len(prompts) and not answering.done():
            time.sleep(0.001)
        llm.resume_generation()
        return answering.result()
