"""Families whose attention depends on how long the context is: windows beside full layers, and keys that an index
chooses; and others. Prompts from one token to many windows, computed at once and in chunks, give the tokens of
transformers."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import tiny_models
import torch
from all_at_once import TIGHT, generate_all_at_once
from tiny_families import FAMILIES as DENSE
from tiny_mixtures import FAMILIES as MIXTURES
from torch import Tensor

from headrace import LLM, HeadraceError, SamplingParams
from headrace.kernels.reference.sparse import choose_keys

FAMILIES = DENSE | MIXTURES
NAMES = (
    "gemma4",
    pytest.param("gemma4_experts", marks=pytest.mark.system),
    "axk1",
    "mistral4",
    "muse_glimmer",
    "mimo_v2",
    "deepseek_v32",
    *(
        pytest.param(name, marks=pytest.mark.system)
        for name in ("deepseek_v4", "hy_v4", "dots3_note", "hrm_text", "glm_moe_dsa")
    ),
    *(
        pytest.param(name, marks=pytest.mark.system)
        for name in ("flex_olmo", "flint", "hy_v3", "mellum", "solar_open", "youtu")
    ),
)
LENGTHS = (1, 3, 11, 12, 13, 15, 16, 17, 64, 65, 257)
LONGER = (*LENGTHS, 63, 700)
"""Those around 12 are just below, at and above the most keys that the tiny DeepSeek V3.2 chooses."""


@cache
def model_of(name: str) -> Any:
    return tiny_models.make(FAMILIES[name])


@torch.inference_mode()
def expected(name: str, prompt: list[int], answer: list[int]) -> list[int]:
    """transformers' likeliest tokens in the place of each token of the answer, without a cache."""
    logits = model_of(name)(torch.tensor([prompt + answer[:-1]]), use_cache=False).logits[0]
    found: list[int] = logits[len(prompt) - 1 :].float().argmax(-1).tolist()
    return found


@pytest.mark.parametrize(("lengths", "most"), [(LENGTHS, 20), pytest.param(LONGER, 64, marks=pytest.mark.system)])
@pytest.mark.parametrize("name", NAMES)
def test_prompts_of_any_length_give_the_tokens_of_transformers(
    name: str, lengths: tuple[int, ...], most: int, tmp_path: Any
) -> None:
    model_of(name).save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, 128, (length,), generator=generator).tolist() for length in lengths]
    for tokens, asked in ((1024, most), (40, 10)):
        params = SamplingParams(max_tokens=asked, temperature=0, ignore_eos=True)
        with LLM(str(tmp_path), **(TIGHT | {"max_model_len": 768, "max_num_batched_tokens": tokens})) as llm:
            outputs = generate_all_at_once(llm, prompts, params)
        for prompt, output in zip(prompts, outputs, strict=True):
            answer = list(output.outputs[0].token_ids)
            assert answer == expected(name, prompt, answer), len(prompt)


def test_a_stage_cannot_begin_with_a_layer_that_uses_what_another_stage_chose(tmp_path: Any) -> None:
    model_of("glm_moe_dsa").save_pretrained(tmp_path)
    with pytest.raises(HeadraceError, match="layer 1 of this GlmMoeDsaForCausalLM attends to the keys that a layer"):
        LLM(str(tmp_path), **TIGHT, pipeline_parallel_size=2, pipeline_layer_partition=(1, 3))


def chosen_one_by_one(queries: Tensor, weights: Tensor, keys: Tensor, most: int) -> Tensor:
    found = torch.zeros(len(queries), len(keys), dtype=torch.bool)
    for row, (query, weight) in enumerate(zip(queries, weights, strict=True)):
        visible = len(keys) - len(queries) + row + 1
        scores = [float((weight * (query @ key).relu()).sum()) for key in keys[:visible]]
        for place in sorted(range(visible), key=lambda place: (-scores[place], place))[:most]:
            found[row, place] = True
    return found


@pytest.mark.parametrize("most", [1, 5, 30, 31, 40])
def test_an_index_chooses_the_keys_with_the_highest_scores_and_of_equal_ones_the_first(most: int) -> None:
    """With whole numbers, so that many scores are equal, and most of those of one key are 0."""
    generator = torch.Generator().manual_seed(most)
    queries, keys = (torch.randint(-1, 2, size, generator=generator).float() for size in ((20, 2, 4), (31, 4)))
    weights = torch.randint(0, 3, (20, 2), generator=generator).float()
    found = choose_keys(queries, weights, keys, most)
    assert torch.equal(found, chosen_one_by_one(queries, weights, keys, most))
    assert found.sum(-1).tolist() == [min(most, 12 + row) for row in range(20)]
