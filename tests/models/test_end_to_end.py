"""The whole path with real (tiny, random) models: a caller's prompts to tokens, against transformers."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from all_at_once import generate_all_at_once
from test_models import AS_ANOTHER, reference_greedy, reference_logits

from headrace import LLM, RequestOutput, SamplingParams

LENGTHS = (300, 1, 17, 64, 33, 130)
NEW_TOKENS = 14
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "block_size": 8,
    "max_num_seqs": 8,
    "max_model_len": 320,
    "num_gpu_blocks_override": 200,
    "in_process": True,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "chunked": {"max_num_batched_tokens": 50},
    "whole": {"enable_chunked_prefill": False, "enable_prefix_caching": False},
    "few blocks": {"max_num_batched_tokens": 64},
}


EVERY_VARIANT = {"llama", "llama_dynamic", "gemma3", "deepseek_v3_moe"}
"""What differs in how batches are read: as a program or op by op, with windows, by latent attention."""
FEW_BLOCKS = {*EVERY_VARIANT, "llama_gqa_tied", "mistral_window", "opt_projected_post_norm", "mixtral_window"}
"""What differs in what the cache holds. `make test` has all others with few blocks alone, or in test_models.py."""


@cache
def reference(name: str) -> Any:
    return tiny_models.build(name)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def checkpoint(folders: Path, name: str) -> str:
    folder = folders / name
    if not folder.exists():
        tiny_models.save(name, folder)
    return str(folder)


def prompts_of(lengths: tuple[int, ...], seed: int = 3) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[numbers.randrange(2, tiny_models.VOCAB_SIZE) for _ in range(length)] for length in lengths]


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def expect_greedy(name: str, prompts: list[list[int]], answers: list[list[int]]) -> None:
    """Each answer token is what transformers would choose after the prompt and the tokens before it."""
    model = reference(name)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer) == NEW_TOKENS
        if "dynamic" in name:
            assert answer == reference_greedy(model, prompt, NEW_TOKENS)
        else:
            assert answer == reference_logits(model, prompt, answer).argmax(-1).tolist()


def marked(name: str, variant: str) -> Any:
    in_decoder = [*tiny_models.TINY_MODELS].index(name) % 2 == 0  # where test_models.py has it
    if variant == "few blocks":
        is_long = name not in FEW_BLOCKS and (name in AS_ANOTHER or in_decoder)
    else:
        is_long = name not in EVERY_VARIANT
    return pytest.param(name, variant, marks=[pytest.mark.system] if is_long else [])


@pytest.mark.parametrize(
    ("name", "variant"), [marked(name, variant) for name in tiny_models.TINY_MODELS for variant in VARIANTS]
)
def test_greedy_tokens_equal_transformers(folders: Path, name: str, variant: str) -> None:
    prompts = prompts_of(LENGTHS)
    folder, engine = checkpoint(folders, name), {**ENGINE, **VARIANTS[variant]}
    groups = tiny_models.cache_groups_of(Path(folder), ENGINE["max_model_len"])
    blocks = ENGINE["num_gpu_blocks_override"] * len(groups)
    if variant == "few blocks":
        blocks = tiny_models.blocks_of_one_request(Path(folder), engine) + 6
    with LLM(folder, **{**engine, "num_gpu_blocks_override": blocks}) as llm:
        cold = generate_all_at_once(llm, prompts, GREEDY)
        expect_greedy(name, prompts, tokens_of(cold))
        # With windows alone, a request enters when there are all the blocks that it will ever hold.
        if variant == "few blocks" and not groups[0].window:
            assert llm.get_stats().num_preemptions > 0
        if variant == "chunked" and "dynamic" not in name:
            warm = llm.generate(prompts, GREEDY, use_tqdm=False)
            assert [output.num_cached_tokens for output in cold] == [0] * len(prompts)
            assert [output.num_cached_tokens for output in warm] == [(n - 1) // 8 * 8 for n in LENGTHS]
            assert tokens_of(warm) == tokens_of(cold)


def test_a_seeded_sample_is_the_same_alone_in_company_preempted_and_elsewhere(folders: Path) -> None:
    folder = checkpoint(folders, "llama")
    prompts = prompts_of((40, 7, 90, 1) * 8, seed=5)
    params = [
        SamplingParams(temperature=0.8 + index % 3 * 0.2, top_p=0.95, top_k=index % 4 * 20, seed=index, max_tokens=40)
        for index in range(len(prompts))
    ]
    engine = {**ENGINE, "max_num_seqs": 32, "num_gpu_blocks_override": 800}
    with LLM(folder, **engine) as llm:
        alone = [tokens_of(llm.generate([p], s, use_tqdm=False))[0] for p, s in zip(prompts, params, strict=True)]
        llm.reset_prefix_cache()
        assert tokens_of(llm.generate(prompts, params, use_tqdm=False)) == alone
    with LLM(folder, **{**engine, "num_gpu_blocks_override": 60, "max_num_batched_tokens": 64}) as tight:
        assert tokens_of(generate_all_at_once(tight, prompts, params)) == alone
        assert tight.get_stats().num_preemptions > 0
    with LLM(folder, **{**engine, "in_process": False, "seed": 99}) as elsewhere:
        assert tokens_of(elsewhere.generate(prompts, params, use_tqdm=False)) == alone
    assert len({tuple(answer) for answer in alone}) == len(alone)


def test_unseeded_samples_differ_from_each_other_and_repeat_with_the_engines_seed(folders: Path) -> None:
    folder, params = checkpoint(folders, "llama"), SamplingParams(max_tokens=20, ignore_eos=True)
    runs = []
    for seed in (0, 0, 1):
        with LLM(folder, **ENGINE, seed=seed) as llm:
            runs.append(tokens_of(llm.generate([[5, 6, 7]] * 4, params, use_tqdm=False)))
    assert len({tuple(answer) for answer in runs[0]}) == 4
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_n_outputs_share_the_prompt_and_differ(folders: Path) -> None:
    with LLM(checkpoint(folders, "llama"), **ENGINE) as llm:
        params = SamplingParams(n=4, seed=7, max_tokens=12, ignore_eos=True)
        (output,) = llm.generate([prompts_of((100,))[0]], params, use_tqdm=False)
        assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
        assert len({tuple(completion.token_ids) for completion in output.outputs}) == 4
        stats = llm.get_stats()
        assert stats.num_cached_prompt_tokens == 3 * 96


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_logprobs_equal_transformers(folders: Path, name: str) -> None:
    prompts = prompts_of((60, 9))
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=5, prompt_logprobs=3, ignore_eos=True)
    with LLM(checkpoint(folders, name), **{**ENGINE, "max_num_batched_tokens": 32}) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = list(output.outputs[0].token_ids)
        with torch.inference_mode():
            logits = reference(name)(torch.tensor([prompt + answer])).logits[0].float()
        expected = logits.log_softmax(-1)
        for step, position in enumerate(output.outputs[0].logprobs):
            row = expected[len(prompt) - 1 + step]
            assert set(row.topk(5).indices.tolist()) <= set(position)
            for token, entry in position.items():
                assert entry.logprob == pytest.approx(row[token].item(), abs=1e-3)
            assert position[answer[step]].rank == 1
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        for index, told in enumerate(output.prompt_logprobs[1:], start=1):
            row = expected[index - 1]
            assert told is not None
            entry = told[prompt[index]]
            assert entry.logprob == pytest.approx(row[prompt[index]].item(), abs=1e-3)
            assert entry.rank == 1 + int((row > row[prompt[index]]).sum())


def test_text_in_and_text_out_with_a_tokeniser_of_its_own(tmp_path: Path) -> None:
    folder = tiny_models.save("llama", tmp_path / "model", tokenizer=True)
    engine = {key: value for key, value in ENGINE.items() if key != "skip_tokenizer_init"}
    with LLM(str(folder), **engine) as llm:
        (output,) = llm.generate("The mill stands still.", GREEDY, use_tqdm=False)
        tokenizer = llm.get_tokenizer()
        assert output.prompt_token_ids == tokenizer.encode("The mill stands still.")
        assert output.outputs[0].text == tokenizer.decode(output.outputs[0].token_ids)
        pieces = [piece.outputs[0].text for piece in llm.stream("The mill stands still.", GREEDY)]
        assert "".join(pieces) == output.outputs[0].text
        stop = output.outputs[0].text[3:6]
        stopped = llm.generate(
            "The mill stands still.", SamplingParams(temperature=0, max_tokens=NEW_TOKENS, stop=stop)
        )
        assert stop not in stopped[0].outputs[0].text
        assert stopped[0].outputs[0].stop_reason == stop
