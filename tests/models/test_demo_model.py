"""The demo model's real weights through the engine, against transformers on their exact dequantisation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from all_at_once import generate_all_at_once

from headrace import LLM, RequestOutput, SamplingParams
from headrace.executor.checkpoints.sources.gguf.file import GGUFFile

pytestmark = pytest.mark.demo_model

MANY_TOKENS = 200
NEW_TOKENS = 32
RANKS_TOKENS = 20
PROMPTS = (
    "The capital of France is",
    "Water flows downhill because",
    "Once upon a time, in a village by a river, there lived a miller who",
    "def fibonacci(n):\n    ",
    "To make bread you need flour, water, salt and",
    "The three laws of motion were stated by Isaac Newton. The first law says that",
    "A turbine turns the energy of moving water into",
    "Dear Professor Lindqvist,\n\nI am writing to ask whether",
    "List of planets in order from the sun: Mercury,",
    "In 1969 the first people landed on the moon. They",
)


def answers(max_tokens: int = NEW_TOKENS, **options: Any) -> list[RequestOutput]:
    """All prompts in one batch."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    with LLM(max_model_len=512, **options) as llm:
        return llm.generate(list(PROMPTS), params, use_tqdm=False)


def tokens_of(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


@pytest.fixture(scope="module")
def exact(demo_model_path: Path) -> Any:
    """transformers' model of the dequantised weights, in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    file = GGUFFile(demo_model_path)
    weights = file.weights()
    model = LlamaForCausalLM(LlamaConfig(**file.config)).eval()
    state = {name: weights.get(name) for name in weights.names()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], []), "the head is tied"
    return model


@pytest.fixture(scope="module")
def in_float32(demo_model_path: Path) -> list[RequestOutput]:
    return answers(dtype="float32")


@pytest.mark.system
@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (4, 1), (1, 2), (2, 2)])
def test_ranks_and_stages_answer_as_one_process_does(
    tp_size: int, pp_size: int, in_float32: list[RequestOutput]
) -> None:
    """Nine heads, three for keys and values; prompts read in chunks, found in the cache and given up for others."""
    asked = [*PROMPTS, *PROMPTS[5:7]]
    params = SamplingParams(temperature=0, max_tokens=RANKS_TOKENS, ignore_eos=True)
    with LLM(
        max_model_len=128, dtype="float32", block_size=8, num_gpu_blocks_override=40, max_num_batched_tokens=32,
        tensor_parallel_size=tp_size, pipeline_parallel_size=pp_size,
    ) as llm:  # fmt: skip
        outputs = generate_all_at_once(llm, asked, params)
    expected = [tokens_of(output)[:RANKS_TOKENS] for output in [*in_float32, *in_float32[5:7]]]
    assert [tokens_of(output) for output in outputs] == expected
    assert any(output.num_cached_tokens for output in outputs)
    assert any(output.metrics.num_preemptions for output in outputs if output.metrics)


def assert_is_transformers(exact: Any, outputs: list[RequestOutput], num_tokens: int) -> None:
    for output in outputs:
        prompt, answer = list(output.prompt_token_ids), tokens_of(output)
        assert len(answer) == num_tokens
        # If each token is transformers' choice after the ones before it, its greedy answer is the same.
        with torch.inference_mode():
            logits = exact(torch.tensor([prompt + answer[:-1]]), use_cache=False).logits[0]
        assert answer == logits[len(prompt) - 1 :].argmax(-1).tolist(), output.prompt
    assert len({token for output in outputs for token in tokens_of(output)}) > num_tokens


@pytest.mark.system
def test_greedy_tokens_in_float32_are_those_of_transformers(exact: Any, in_float32: list[RequestOutput]) -> None:
    assert_is_transformers(exact, in_float32, NEW_TOKENS)


@pytest.mark.system
def test_200_greedy_tokens_in_float32_are_those_of_transformers(exact: Any) -> None:
    assert_is_transformers(exact, answers(MANY_TOKENS, dtype="float32"), MANY_TOKENS)


@pytest.mark.system
def test_packed_answers_begin_as_the_exact_ones_do(in_float32: list[RequestOutput]) -> None:
    alike = [tokens_of(a) == tokens_of(b) for a, b in zip(answers(), in_float32, strict=True)]
    assert sum(alike) >= 8, alike
