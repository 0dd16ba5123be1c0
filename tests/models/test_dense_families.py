"""Every dense family against transformers, token by token: chunked prefill, preemption and the prefix cache at once."""

from __future__ import annotations

import copy
import itertools
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from all_at_once import TIGHT, generate_all_at_once, shared_prefix
from model_driver import DictSource, Driver
from rank_threads import RankThreads, pool_for_each_rank
from test_models import config_of, reference, reference_logits
from thinned import every
from tiny_families import FAMILIES
from tiny_models import state_of

from headrace import LLM, HeadraceError, SamplingParams, kernels
from headrace.executor.checkpoints.formats.cache_scales import cache_scales
from headrace.executor.cpu.decoder import why_not
from headrace.executor.models.decoder import Decoder
from headrace.executor.models.families import spec_from_config
from headrace.executor.models.kv_cache import allocate, cache_groups
from headrace.executor.models.sizes import weight_elements

__all__ = ["pool_for_each_rank"]  # a fixture for all of these tests

THREADS = f"{RankThreads.__module__}:{RankThreads.__name__}"
NEW_TOKENS = 10
OP_BY_OP = {"hrm_text", "hrm_text_biases"}
"""What the CPU program cannot compute."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@cache
def saved(folder: Path, name: str) -> Path:
    return tiny_models.save(name, folder / name)


def prompts_of(name: str) -> list[list[int]]:
    return shared_prefix(reference(name).config.vocab_size)


def expect_answers_of_transformers(folder: Path, name: str, **options: Any) -> None:
    path = saved(folder, name)
    slides = any(group.window for group in tiny_models.cache_groups_of(path, TIGHT["max_model_len"]))
    blocks = tiny_models.blocks_of_one_request(path, TIGHT) + (60 if slides else 4)
    expect_answers(path, name, slides, num_gpu_blocks_override=blocks, **options)


def expect_answers(path: Path, name: str, slides: bool, **options: Any) -> None:
    """slides: whether some layers have a window."""
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    with LLM(str(path), **(TIGHT | options)) as llm:
        outputs = generate_all_at_once(llm, prompts_of(name), params)
        again = llm.generate(prompts_of(name)[2:], params, use_tqdm=False)
    for output, prompt in zip([*outputs, *again], [*prompts_of(name), prompts_of(name)[2]], strict=True):
        answer = list(output.outputs[0].token_ids)
        assert answer == reference_logits(reference(name), prompt, answer).argmax(-1).tolist()
    if not slides:  # else blocks are given back, and few requests give way
        assert sum(output.metrics.num_preemptions for output in outputs if output.metrics) > 0
    assert again[0].num_cached_tokens


@pytest.mark.parametrize("name", every(3, FAMILIES))
def test_an_engine_gives_the_tokens_of_transformers(folder: Path, name: str) -> None:
    assert bool(why_not(spec_from_config(config_of(name)), torch.float32)) == (name in OP_BY_OP)
    expect_answers_of_transformers(folder, name)


def test_queries_that_grow_at_later_positions_alone_are_not_scaled() -> None:
    spec = spec_from_config(config_of("ministral3"))
    grown = [{vars(mixer)["query_growth"] for mixer in spec.for_context(most).mixers} for most in (17, 16)]
    assert None not in grown[0]
    assert grown[1] == {None}


@pytest.mark.system
@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_give_the_tokens_of_transformers(folder: Path, name: str) -> None:
    expect_answers_of_transformers(folder, name, tensor_parallel_size=2, distributed_executor_backend=THREADS)


@pytest.mark.system
@pytest.mark.parametrize("name", FAMILIES)
def test_two_stages_give_the_tokens_of_transformers(folder: Path, name: str) -> None:
    # Layers that read the cache of others are in one stage with them.
    partition = (1, 4) if name == "gemma3n" else ()
    expect_answers_of_transformers(
        folder,
        name,
        pipeline_parallel_size=2,
        pipeline_layer_partition=partition,
        distributed_executor_backend=THREADS,
    )


@pytest.mark.system
def test_ranks_of_both_kinds_share_a_stream_of_several_rows(folder: Path) -> None:
    """Three that do not divide the heads and inner columns, and two stages."""
    expect_answers_of_transformers(
        folder,
        "gemma3n",
        tensor_parallel_size=3,
        pipeline_parallel_size=2,
        pipeline_layer_partition=(1, 4),
        distributed_executor_backend=THREADS,
    )


def test_layers_that_run_several_times_are_read_once_and_cache_each_run() -> None:
    """As the published model has them: with fused matrices, and a first low state that is not zero."""
    spec, state = spec_from_config(config_of("hrm_text")), state_of(reference("hrm_text"))
    sources = [index if layer.weights_of is None else layer.weights_of for index, layer in enumerate(spec.layers)]
    low, high = [0, 1], [6, 7]
    assert sources == [*low * 3, *high] * 2
    assert len(spec.own_caches(1)) == 16
    assert weight_elements(spec) == sum(each.numel() for each in state.values())
    published = {name: each for name, each in state.items() if not re.search(r"\.(q|k|v|up|gate)_proj", name)}
    for stack, index in itertools.product("LH", range(2)):
        start = f"model.{stack}_module.layers.{index}"
        gqkv, gate_up = (
            torch.cat([state[f"{start}.{block}.{name}_proj.weight"] for name in names])
            for block, names in (("self_attn", ("gate", "q", "k", "v")), ("mlp", ("gate", "up")))
        )
        output = published.pop(f"{start}.self_attn.o_proj.weight")
        published |= {f"{start}.attn.gqkv_proj.weight": gqkv, f"{start}.attn.o_proj.weight": output}
        published[f"{start}.mlp.gate_up_proj.weight"] = gate_up
    assert len(published) < len(state)
    model = copy.deepcopy(reference("hrm_text"))
    published["model.z_L_init"] = model.model.z_L_init.data = torch.linspace(-2, 2, spec.hidden_size)
    decoder = Decoder(spec, DictSource(published), torch.float32, choose=kernels.choose_reference)
    assert len({id(vars(layer)["_held"]) for layer in decoder._layers}) == 4
    prompt = prompts_of("hrm_text")[0]
    (answer,), (rows,) = Driver(decoder).greedy([prompt], 3, 16, 40)
    torch.testing.assert_close(rows, reference_logits(model, prompt, answer), atol=1e-4, rtol=1e-4)


def test_a_prompt_whose_tokens_read_later_ones_is_refused() -> None:
    for config in ({"prefix_lm": True}, {"prefix_lm": None}):
        with pytest.raises(HeadraceError, match="the config's prefix_lm is true: the tokens of a prompt attend to"):
            spec_from_config(config_of("hrm_text") | config)


def test_layers_that_read_anothers_cache_are_of_the_same_stage(folder: Path) -> None:
    with pytest.raises(HeadraceError, match=r"layers 3 to 4 .* read the cache of layer 1, .* those from 1 on"):
        LLM(str(saved(folder, "gemma3n")), **TIGHT, pipeline_parallel_size=2)


def test_layers_that_read_anothers_cache_keep_none_and_their_own_matrices_are_not_read() -> None:
    spec = spec_from_config(config_of("gemma3n"))
    assert [layer.cache_of for layer in spec.layers] == [None, None, None, 1, 2]
    groups = cache_groups(spec, 64)
    assert sorted(layer for group in groups for layer in group.layers) == [0, 1, 2]
    cache = allocate(spec, 4, 8, torch.float32, groups=groups)
    assert [cache.keys[layer].data_ptr() for layer in (3, 4)] == [cache.keys[layer].data_ptr() for layer in (1, 2)]
    assert cache.groups[3:] == cache.groups[1:3]
    stored = {f"model.layers.{i}.self_attn.{kind}_scale": torch.tensor(i + 1.0) for i in range(3) for kind in "kv"}
    embedding = {"model.embed_tokens.weight": torch.zeros(1)}
    scales = cache_scales(DictSource(stored | embedding), spec, {})
    assert [keys for keys, _ in scales] == [(1.0,), (2.0,), (3.0,), (2.0,), (3.0,)]
    state = state_of(reference("gemma3n"))
    needless = {"model.layers.3.self_attn.k_proj.weight": torch.zeros(8, 32)}
    Decoder(spec, DictSource(state | needless), torch.float32, choose=kernels.choose_reference)
    needed = {name.replace(".3.", ".2."): each for name, each in needless.items()}
    assert needed.keys() <= state.keys()


@pytest.mark.system
@pytest.mark.parametrize("name", FAMILIES)
def test_op_by_op_the_logits_are_those_of_transformers(name: str) -> None:
    spec = spec_from_config(config_of(name)).for_context(64)
    decoder = Decoder(spec, DictSource(state_of(reference(name))), torch.float32, choose=kernels.choose_reference)
    prompts = prompts_of(name)
    answers, logits = Driver(decoder).greedy(prompts, 3, 16, 40)
    for prompt, answer, rows in zip(prompts, answers, logits, strict=True):
        expected = reference_logits(reference(name), prompt, answer)
        torch.testing.assert_close(rows, expected, atol=1e-4, rtol=1e-4)
    assert len({token for answer in answers for token in answer}) > 3, "the model answers one thing"
