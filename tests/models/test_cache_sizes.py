"""Models whose layers keep unequal amounts of a token: their pages, and their answers beside those of transformers."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from all_at_once import generate_all_at_once
from hypothesis import given
from hypothesis import strategies as st
from test_cache_groups import ENGINE, LONG
from test_end_to_end import prompts_of, tokens_of
from test_models import reference_logits
from thinned import every, pairs
from transformers.models.gemma3.modeling_gemma3 import Gemma3DecoderLayer

from headrace import LLM, ModelRegistry
from headrace.core.options.cache_groups import group_layers
from headrace.executor.cpu import rank as cpu_rank
from headrace.executor.models import kv_cache, registry
from headrace.executor.models.families import spec_from_config
from headrace.executor.models.kv_cache import Layout, cache_groups
from headrace.executor.parallel.rank_place import SINGLE, RankCoordinates
from headrace.ipc.process.program import FOR_PROGRAMS

FAMILY = '''
from dataclasses import replace

from headrace.executor.models.families import Family, gemma3


def build(config):
    """Gemma 3 whose full layers have other key/value heads."""
    spec = gemma3.build(config)
    heads, size = config["full_kv_heads"], config["full_head_dim"]

    def resized(mixer):
        if mixer.sliding_window is not None:
            return mixer
        return replace(mixer, num_kv_heads=heads, head_dim=size, rope=replace(mixer.rope, rotary_dim=size))

    return replace(spec, layers=tuple(replace(layer, mixer=resized(layer.mixer)) for layer in spec.layers))


FAMILY = Family(("TwoSizesForCausalLM",), build)
'''
TYPES = ["sliding_attention", "sliding_attention", "full_attention"] * 2
# Windows have 2 heads of 16: the full layers keep half of that, as much in another shape, and 3/2 of it.
SIZES = {"half": (1, 16), "as much": (1, 32), "three halves": (1, 48)}
SHARING = {"half": (2, 1), "as much": (1, 1), "three halves": (2, 3)}  # layers in a place: full ones, windows


def reference(full_kv_heads: int, full_head_dim: int) -> Any:
    """Of Gemma 3's own modules, with a config of their own for the full layers."""
    config = {"num_hidden_layers": len(TYPES), "layer_types": TYPES, "num_key_value_heads": 2, "sliding_window": 24}
    model = tiny_models.build("gemma3", **config)
    other = deepcopy(model.config)
    other.num_key_value_heads, other.head_dim = full_kv_heads, full_head_dim
    torch.manual_seed(1)
    for index, kind in enumerate(TYPES):
        if kind == "full_attention":
            layer = Gemma3DecoderLayer(other, index).eval()
            for weight in layer.parameters():
                torch.nn.init.normal_(weight, std=0.3 if weight.dim() > 1 else 0.1)
            model.model.layers[index] = layer
    exponents = torch.arange(0, full_head_dim, 2).float() / full_head_dim
    theta = model.config.rope_parameters["full_attention"]["rope_theta"]
    model.model.rotary_emb.full_attention_inv_freq = theta**-exponents
    return model


@pytest.fixture(name="saved")
def saved_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: str) -> tuple[str, Any]:
    """The checkpoint's folder, and transformers' model of it."""
    (tmp_path / "two_sizes_family.py").write_text(FAMILY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(FOR_PROGRAMS, registry.VARIABLE, "{}")
    ModelRegistry.register_model("TwoSizesForCausalLM", "two_sizes_family:FAMILY")
    heads, head_dim = SIZES[size]
    model = reference(heads, head_dim)
    model.save_pretrained(tmp_path / "model")
    path = tmp_path / "model/config.json"
    config = json.loads(path.read_text())
    config |= {"architectures": ["TwoSizesForCausalLM"], "full_kv_heads": heads, "full_head_dim": head_dim}
    path.write_text(json.dumps(config))
    return str(tmp_path / "model"), model


@pytest.mark.parametrize(("size", "computed_as"), pairs(tuple(SIZES), ("program", "op by op")))
def test_tokens_are_those_of_transformers_and_groups_share_one_pool(size, computed_as, saved, monkeypatch) -> None:
    """Past many windows, cold and with a prefix found, while blocks go from group to group."""
    if computed_as == "op by op":
        monkeypatch.setattr(cpu_rank, "why_not", lambda spec, dtype, place: "the test says so.")
    folder, model = saved
    spec = spec_from_config(json.loads(Path(folder, "config.json").read_text()))
    groups = cache_groups(spec)
    assert {group.kind: group.layers_in_place for group in groups} == dict(
        zip(("full", "sliding_window"), SHARING[size], strict=True)
    )
    prompts = prompts_of((300, 30, 100))
    prompts.append(prompts[0][:64] + prompts[1])
    with LLM(folder, **{**ENGINE, "max_model_len": 400}, num_gpu_blocks_override=50 * len(groups)) as llm:
        cold = tokens_of(llm.generate(prompts[:1], LONG, use_tqdm=False))
        warm = llm.generate(prompts[:1], LONG, use_tqdm=False)
        assert warm[0].num_cached_tokens == 296
        assert tokens_of(warm) == cold
        many = tokens_of(generate_all_at_once(llm, prompts, LONG))
    assert many[0] == cold[0]
    for prompt, answer in zip(prompts, many, strict=True):
        assert answer == reference_logits(model, prompt, answer).argmax(-1).tolist()


@pytest.mark.parametrize("size", ["half"])
@pytest.mark.parametrize("options", [{"disable_hybrid_kv_cache_manager": True}, {"kv_cache_dtype": "int8"}])
def test_a_pool_without_groups_and_a_quantised_one_hold_layers_of_two_sizes(size, options, saved) -> None:
    folder, model = saved
    prompts = prompts_of((90, 30))
    with LLM(folder, **ENGINE, **options) as llm:
        answers = tokens_of(generate_all_at_once(llm, prompts, LONG))
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = reference_logits(model, prompt, answer)
        chosen = expected.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert (expected.amax(1) - chosen).max() <= (0.5 if "kv_cache_dtype" in options else 0)


@pytest.mark.parametrize("size", every(2, SIZES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("place", [SINGLE, RankCoordinates.of(1, 1, 2), RankCoordinates.of(0, 2, 1)])
def test_a_blocks_bytes_are_its_own_in_every_layer_and_what_the_plan_says(size, dtype, place, saved) -> None:
    """Each layer's part of a block is written with the block's number; nothing of another block changes."""
    folder, _ = saved
    spec = spec_from_config(json.loads(Path(folder, "config.json").read_text()))
    groups = cache_groups(spec, tp_size=place.tp_size)
    cache = kv_cache.allocate(spec, 7, 8, dtype, "cpu", place, groups)
    layout = Layout.of(spec, place, groups)
    assert cache.nbytes == 7 * kv_cache.block_bytes(spec, 8, dtype, place, groups)
    tensors = [each for each in (cache.keys, cache.values, cache.key_scales, cache.value_scales) if each]
    parts = [
        (block + 10 * index, tensor[index][block * layer.sharing])
        for block in range(7)
        for index, layer in enumerate(layout.layers)
        if layer.group == block % len(groups)
        for tensor in tensors
    ]
    for number, part in parts:
        part.fill_(number)
    for number, part in parts:
        assert (part == number).all()


@given(st.lists(st.tuples(st.sampled_from([None, 3, 7]), st.sampled_from([32, 48, 64])), min_size=1, max_size=40))
def test_every_layer_is_in_a_group_of_its_kind_and_all_pages_are_equal(kinds: list[tuple[int | None, int]]) -> None:
    windows, sizes = [window for window, _ in kinds], [size for _, size in kinds]
    groups = group_layers(windows, sizes)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(kinds)))
    for group in groups:
        assert {windows[layer] for layer in group.layers} == {group.window or None}
        assert len({sizes[layer] for layer in group.layers}) == 1
    assert len({group.layers_in_place * sizes[group.layers[0]] for group in groups}) == 1
