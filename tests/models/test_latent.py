"""Latent attention beyond the tokens that every model is tested for: its two forms, and what its cache takes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tiny_models
import torch
from engine_parts import make_plan
from paged import make_batch
from torch import Tensor
from transformers import DeepseekV2Config

from headrace import LLM, SamplingParams
from headrace.core.options.memory import block_bytes as plan_block_bytes
from headrace.core.options.memory import fit_cache, requests_at_once
from headrace.core.options.plan import MemoryReading
from headrace.executor.model_rank import own_share
from headrace.executor.models.families import spec_from_config
from headrace.executor.models.kv_cache import block_bytes, cache_groups
from headrace.executor.parallel.rank_place import RankCoordinates
from headrace.kernels.reference.attention import AttentionParams, PagedBatch
from headrace.kernels.reference.latent import LatentUp, latent_attention

V2_LITE: dict[str, Any] = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "q_lora_rank": None,
    "hidden_size": 128, "num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1,
    "max_position_embeddings": 1 << 15, "topk_method": "greedy",
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 4096,
        "mscale": 0.707, "mscale_all_dim": 0.707,
    },
}  # fmt: skip
"""DeepSeek-V2-Lite's attention, in a model of one layer and head."""


def plain(query: Tensor, up: LatentUp, cache: Tensor, batch: PagedBatch, scale: float) -> Tensor:
    """Token by token, with every head's keys and values made of its context."""
    latent_dim, out = up.values.shape[1], []
    for seq, length in enumerate(batch.context_lens):
        blocks = batch.block_tables[seq, : -(-length // batch.block_size)].long()
        context = cache[blocks, 0].flatten(0, 1)[:length].double()
        compressed, rotated = context[:, :latent_dim], context[:, latent_dim:]
        shared = rotated.expand(len(up.keys), -1, -1)
        keys = torch.cat([compressed @ up.keys.double().transpose(1, 2), shared], dim=-1)
        values = compressed @ up.values.double()
        for token in range(batch.query_starts[seq], batch.query_starts[seq + 1]):
            end = length - (batch.query_starts[seq + 1] - 1 - token)
            scores = torch.einsum("hd,hnd->hn", query[token].double(), keys[:, :end]) * scale
            out.append(torch.einsum("hn,hnd->hd", scores.softmax(-1), values[:, :end]))
    return torch.stack(out)


@pytest.mark.parametrize("least_expanded", ["all", "long prompts", "none"])
def test_both_forms_of_latent_attention_are_the_attention_of_keys_and_values_made_for_each_head(
    least_expanded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    least = {"all": 1, "long prompts": 20, "none": 1 << 31}[least_expanded]
    monkeypatch.setattr(LatentUp, "least_expanded", least)
    batch, cache, _ = make_batch([(1, 9), (40, 40), (30, 400), (3, 50), (1, 1)], 8, 1, 28, torch.float32)
    up = LatentUp(torch.randn(5, 12, 20) / 4, torch.randn(5, 20, 16) / 4)
    query = torch.randn(75, 5, 12 + 8)
    found = latent_attention(query, up, cache, batch, AttentionParams(0.3))
    torch.testing.assert_close(found.double(), plain(query, up, cache, batch, 0.3), atol=1e-5, rtol=1e-5)


def test_a_published_models_cache_takes_576_values_of_a_token_and_layer_on_every_rank() -> None:
    config = DeepseekV2Config(
        **(V2_LITE | {"num_hidden_layers": 27, "num_attention_heads": 2, "num_experts_per_tok": 6})
    ).to_dict()
    spec = spec_from_config(config | {"architectures": ["DeepseekV2ForCausalLM"]})
    assert block_bytes(spec, 16, torch.bfloat16) == 16 * 27 * 576 * 2
    assert spec.own_caches(2) == spec.own_caches(1)


def test_an_engine_has_the_blocks_that_latent_attention_leaves_room_for(tmp_path: Path) -> None:
    model = tiny_models.save("deepseek_v3_moe", tmp_path / "model")
    options: dict[str, Any] = {"in_process": True, "skip_tokenizer_init": True, "dtype": "float32", "block_size": 8}
    with LLM(str(model), **options, max_model_len=256, kv_cache_memory_bytes=1_000_000) as llm:
        assert llm.get_stats().num_blocks == 1_000_000 // (8 * 3 * (40 + 8) * 4) - 1


def test_deepseek_v2_lites_cache_holds_nine_times_the_requests_of_32k_that_its_heads_would() -> None:
    """Exact numbers for 24 GiB: 27 layers of 16 heads, whose keys have 192 values and whose values 128."""
    config = DeepseekV2Config(
        **(V2_LITE | {"num_hidden_layers": 27, "num_attention_heads": 16, "num_experts_per_tok": 6})
    ).to_dict()
    spec = spec_from_config(config | {"architectures": ["DeepseekV2ForCausalLM"]})
    plan, _ = make_plan(
        block_size=16, max_num_batched_tokens=2048, max_model_len=1 << 15, kv_cache_memory_bytes=24 << 30
    )
    reading = MemoryReading(
        total_bytes=80 << 30, available_bytes=80 << 30, weights_bytes=0, activation_bytes=0, device="a GPU"
    )
    groups = cache_groups(spec, 1 << 15)
    share = own_share(spec, RankCoordinates.of(0, 1, 1), groups)
    rows, elements = share["kv_rows_per_token"], share["kv_elements_per_token"]
    capacity, bytes_per_token = {}, {}
    for kind, of_token in (("latent", elements), ("heads", 27 * 16 * (192 + 128))):
        cache = {"cache_groups": groups, "kv_rows_per_token": rows, "kv_elements_per_token": of_token}
        model = msgspec.structs.replace(plan.model, **cache)
        planned = msgspec.structs.replace(plan, model=model, dtype="bfloat16", max_num_seqs=256)
        facts = fit_cache(planned, reading)
        bytes_per_token[kind] = plan_block_bytes(planned) // 16
        capacity[kind] = int(requests_at_once(facts.num_blocks, 1 << 15, planned) * (1 << 15))
    assert bytes_per_token == {"latent": 27 * 576 * 2, "heads": 27 * 5120 * 2}
    assert capacity == {"latent": 828_480, "heads": 93_184}


@pytest.mark.system
def test_both_forms_of_deepseek_v2_lites_attention_answer_a_context_of_32k_alike(tmp_path: Path) -> None:
    """Read in chunks by the expanded form, then with all but the last block found in the prefix cache by the absorbed
    one."""
    model = tiny_models.save("deepseek_v2_moe", tmp_path / "model", **V2_LITE)
    numbers = random.Random(1)
    prompt = [numbers.randrange(2, tiny_models.VOCAB_SIZE) for _ in range((1 << 15) - 8)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    options: dict[str, Any] = {"in_process": True, "skip_tokenizer_init": True, "dtype": "float32"}
    with LLM(str(model), **options, max_num_batched_tokens=2048) as llm:
        (cold,) = llm.generate([prompt], params, use_tqdm=False)
        (warm,) = llm.generate([prompt], params, use_tqdm=False)
    answer = list(cold.outputs[0].token_ids)
    assert warm.num_cached_tokens == len(prompt) - len(prompt) % 16 - (16 if len(prompt) % 16 == 0 else 0)
    assert list(warm.outputs[0].token_ids) == answer
