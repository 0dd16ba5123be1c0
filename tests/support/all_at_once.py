"""Requests that an engine has all of before it computes the first, however busy the machine is."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from headrace import LLM, RequestOutput


def generate_all_at_once(llm: LLM, prompts: list[Any], params: Any) -> list[RequestOutput]:
    """As `llm.generate`. How they share batches and give way to each other does not depend on when each arrives."""
    llm.pause_generation("keep", clear_cache=False)
    with ThreadPoolExecutor(1) as pool:
        answering = pool.submit(llm.generate, prompts, params, use_tqdm=False)
        while llm.get_stats().num_waiting < len(prompts) and not answering.done():
            time.sleep(0.001)
        llm.resume_generation()
        return answering.result()
