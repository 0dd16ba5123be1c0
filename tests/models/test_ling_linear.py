"""Ling 2.5, whose heads of lightning attention are normed and rotated, against plain torch: prompts of any length,
drafts, and GPU ranks with the CPU in the GPU's place."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import published_models
import pytest
import torch
from all_at_once import TIGHT, generate_all_at_once, shared_prefix
from gpu_rank_threads import GpuRankThreads
from lightning_twin import slopes as slopes_of_twin
from rank_threads import pool_for_each_rank

from headrace import LLM, SamplingParams
from headrace.executor.cpu.decoder import why_not
from headrace.executor.models.blocks.latent import LatentAttention
from headrace.executor.models.blocks.linear_attention import Lightning
from headrace.executor.models.families import spec_from_config
from headrace.executor.models.families.bailing_moe_linear import slopes
from headrace.ipc.failure import ModelError

__all__ = ["pool_for_each_rank"]  # a fixture for all of these tests

NAMES = ("bailing_moe_v2_5", "bailing_moe_v2_5_plain")
LENGTHS = (1, 3, 15, 16, 17, 63, 64, 65, 257, 700)
PARAMS = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
ONE_GPU = {"device": "cpu", "enforce_eager": True, "distributed_executor_backend": "gpu_parts:GpuOnCpuExecutor"}
TWO_GPUS = ONE_GPU | {
    "distributed_executor_backend": f"{GpuRankThreads.__module__}:{GpuRankThreads.__name__}",
    "tensor_parallel_size": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@cache
def saved(folder: Path, name: str) -> Path:
    return published_models.save(name, folder / name)


@cache
def twin_of(name: str) -> Any:
    return published_models.twin_of(name)


def expect_answers(name: str, prompts: list[list[int]], outputs: list[Any]) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = list(output.outputs[0].token_ids)
        expected = published_models.expected_logits(name, twin_of(name), prompt, answer)
        assert answer == expected.argmax(-1).tolist()
    assert len({token for output in outputs for token in output.outputs[0].token_ids}) > 10


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(pytest.param(name, {}, id=f"{name}-program") for name in NAMES),
        *(
            pytest.param(name, ONE_GPU, id=f"{name}-GPU rank", marks=() if name == NAMES[0] else pytest.mark.system)
            for name in NAMES
        ),
    ],
)
def test_prompts_of_any_length(folder: Path, name: str, options: dict[str, Any]) -> None:
    """Computed in one step or in chunks that end anywhere."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, 128, (length,), generator=generator).tolist() for length in LENGTHS]
    for tokens in (1024, 40):
        engine = TIGHT | {"max_model_len": 768, "max_num_batched_tokens": tokens}
        with LLM(str(saved(folder, name)), **engine, **options) as llm:
            expect_answers(name, prompts, generate_all_at_once(llm, prompts, PARAMS))


@pytest.mark.parametrize("options", [{}, ONE_GPU], ids=["program", "GPU rank"])
@pytest.mark.parametrize("name", NAMES)
def test_requests_start_from_the_states_of_prefixes(folder: Path, name: str, options: dict[str, Any]) -> None:
    prompts = [*shared_prefix(128), shared_prefix(128)[0]]
    with LLM(str(saved(folder, name)), **TIGHT, **options) as llm:  # one after another
        outputs = [llm.generate([prompt], PARAMS, use_tqdm=False)[0] for prompt in prompts]
    expect_answers(name, prompts, outputs)
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 0, 48], "the whole blocks of the prompt"


@pytest.mark.parametrize("name", NAMES)
def test_two_gpu_ranks(folder: Path, name: str) -> None:
    with LLM(str(saved(folder, name)), **TIGHT, **TWO_GPUS) as llm:
        expect_answers(name, shared_prefix(128), generate_all_at_once(llm, shared_prefix(128), PARAMS))


@pytest.mark.parametrize("options", [{}, ONE_GPU], ids=["program", "GPU rank"])
@pytest.mark.usefixtures("drafts_at_any_cost")
def test_drafts_change_no_token(folder: Path, options: dict[str, Any]) -> None:
    prompts = [[20, 21, 22, 23] * 6, [20, 21, 22] * 14, [21] * 20, list(range(20, 60))]
    config = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, allowed_token_ids=[20, 21, 22])
    engine = TIGHT | {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    answers = []
    for more in ({}, options | {"speculative_config": config}):
        with LLM(str(saved(folder, NAMES[0])), **engine, **more) as llm:
            outputs = generate_all_at_once(llm, prompts, params)
            answers.append([list(output.outputs[0].token_ids) for output in outputs])
            drafted = llm.get_stats()
    assert answers[0] == answers[1]
    assert 0 < drafted.num_accepted_tokens < drafted.num_draft_tokens


def test_rates_of_decay_fall_from_layer_to_layer() -> None:
    for heads in (1, 4, 6, 64):
        assert slopes(heads, 3, 9) == pytest.approx((slopes_of_twin(heads) * (1 - 3 / 8 + 1e-5)).tolist())
    assert slopes(2, 0, 1) == pytest.approx(((1 + 1e-5) / 16, (1 + 1e-5) / 256))


def test_layers_after_the_last_whole_group_have_latent_attention() -> None:
    config = published_models.config_of(NAMES[0]) | {"num_hidden_layers": 8, "layer_group_size": 3}
    kinds = [type(layer.mixer) for layer in spec_from_config(config).layers]
    assert kinds == [Lightning, Lightning, LatentAttention] * 2 + [LatentAttention] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_group_size": 0}, "layer_group_size must be at least 1, got 0"),
        ({"group_norm_size": 0}, "lightning attention's groups must be at least 1, got 0"),
        ({"group_norm_size": 3}, "4 heads of 16 values cannot be normed in 3 equal groups"),
        ({"partial_rotary_factor": 2.0}, "32 rotary dimensions must be even and fit a head of 16"),
        ({"score_function": "softmax"}, "score_function is 'softmax' where 'sigmoid' is computed"),
        ({"moe_router_enable_expert_bias": False}, "moe_router_enable_expert_bias is False where True is computed"),
        ({"linear_silu": "yes"}, "linear_silu must be true or false, got 'yes'"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        spec_from_config(published_models.config_of(NAMES[0]) | changes)


def test_the_silu_of_either_name() -> None:
    config = {key: value for key, value in published_models.config_of(NAMES[0]).items() if key != "linear_silu"}
    silent, either = spec_from_config(config), spec_from_config(config | {"linear_silu": True})
    assert spec_from_config(config | {"use_linear_silu": True}) == either != silent
    assert spec_from_config(config | {"use_linear_silu": False, "linear_silu": True}) == silent


def test_ranks_have_whole_groups_of_normed_heads() -> None:
    config = published_models.config_of(NAMES[0])
    with pytest.raises(ModelError, match="2 groups of heads that are normed together cannot be divided among 4 ranks"):
        spec_from_config(config).for_ranks(4)


def test_heads_larger_than_the_programs_run_op_by_op() -> None:
    spec = spec_from_config(published_models.config_of(NAMES[0]) | {"head_dim": 520})
    assert why_not(spec, torch.float32) == "heads of 520 are not rotated on the CPU, 512 are."
