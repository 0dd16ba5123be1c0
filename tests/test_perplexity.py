"""The demo model on English text: what packing and quantising cost, as perplexity."""

from __future__ import annotations

import math
from typing import Any

import pytest

from headrace import LLM, SamplingParams

pytestmark = pytest.mark.demo_model

PASSAGES, PASSAGE_TOKENS = 6, 250


def perplexity(**options: Any) -> float:
    """exp of the mean negative log-probability of each token after the first of its passage."""
    from pydoc_data.topics import topics

    with LLM(max_model_len=512, **options) as llm:
        token_ids = llm.get_tokenizer().encode("\n".join(topics[name] for name in sorted(topics)))
        stride = len(token_ids) // PASSAGES  # passages from all over the text
        prompts = [
            {"prompt_token_ids": token_ids[index * stride : index * stride + PASSAGE_TOKENS]}
            for index in range(PASSAGES)
        ]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    logprobs = []
    for output in outputs:
        assert output.prompt_logprobs is not None
        for token_id, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
            assert entry is not None, "only a text's first token has none"
            logprobs.append(entry[token_id].logprob)
    assert len(logprobs) == PASSAGES * (PASSAGE_TOKENS - 1)
    return math.exp(-sum(logprobs) / len(logprobs))


@pytest.fixture(scope="module")
def exact() -> float:
    """Of the dequantised weights in float32."""
    return perplexity(dtype="float32")


@pytest.mark.parametrize(
    "options",
    [
        {},  # packed, as the file stores them; keys and values in bf16
        {"kv_cache_dtype": "int8"},
        {"kv_cache_dtype": "fp8"},
    ],
)
def test_perplexity_stays_near_that_of_the_dequantised_float32_model(exact: float, options: dict[str, Any]) -> None:
    assert 1 < exact < 60, "the model understands the text"
    change = perplexity(**options) / exact - 1
    print(f"perplexity {exact:.3f} in float32, {change:+.3%} with {options}")
    assert abs(change) < 0.005
