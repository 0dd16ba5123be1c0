"""What a core's memory does under load: it grows while blocks of the cache are written for the first time, and ends."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import tiny_models

from headrace import LLM, SamplingParams

BLOCK_TOKENS, NUM_BLOCKS = 16, 2000
PROMPT_TOKENS, AT_ONCE = 112, 64


def prompts() -> Iterator[list[dict[str, list[int]]]]:
    """Rounds of prompts of which no two begin alike."""
    numbers = itertools.count()
    while True:
        yield [
            {"prompt_token_ids": [3 + number % 300, 3 + number // 300, *range(5, PROMPT_TOKENS + 3)]}
            for number in itertools.islice(numbers, AT_ONCE)
        ]


@pytest.mark.system
def test_memory_grows_by_the_blocks_that_are_written_first_and_no_more(tmp_path: Path) -> None:
    layers, heads, head_dim = 1, 6, 64
    config = {"num_hidden_layers": layers, "num_key_value_heads": heads, "head_dim": head_dim}
    tiny_models.save("llama_gqa_tied", tmp_path, **config)
    token_bytes = 2 * layers * heads * head_dim * 4  # a key and a value
    cache_bytes = NUM_BLOCKS * BLOCK_TOKENS * token_bytes
    rounds_of_cache = -(-NUM_BLOCKS * BLOCK_TOKENS // (AT_ONCE * PROMPT_TOKENS))
    options = {"num_gpu_blocks_override": NUM_BLOCKS, "block_size": BLOCK_TOKENS, "max_model_len": 128}
    before = {child.pid for child in psutil.Process().children()}
    with LLM(str(tmp_path), dtype="float32", skip_tokenizer_init=True, max_num_seqs=AT_ONCE, **options) as llm:
        (core,) = (child for child in psutil.Process().children() if child.pid not in before)
        params, some = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False), prompts()

        def resident_after(rounds: int) -> int:
            for _ in range(rounds):
                llm.generate(next(some), params, use_tqdm=False)
            resident: int = core.memory_info().rss
            return resident

        begun = resident_after(1)
        touched = resident_after(rounds_of_cache + 2)
        assert 0.6 * cache_bytes < touched - begun < 1.2 * cache_bytes, "each block is written once before any is again"
        assert resident_after(2 * rounds_of_cache) - touched < 0.15 * cache_bytes, "and then there are no new pages"
