"""Tiny models whose GGUF files are tested, one or more for each GGUF architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import published_models
import rwkv_models
import tiny_models
import torch
from gguf.constants import GGMLQuantizationType as Kind
from published_models import PUBLISHED
from safetensors.torch import load_file
from tiny_families import FAMILIES, LONGROPE
from tiny_gguf import convert, saved_state
from tiny_mixtures import FAMILIES as MIXTURES
from tiny_mixtures import MISTRAL_4, PHIMOE_LONGROPE
from tiny_models import TINY_MODELS
from tiny_recurrent import FAMILIES as RECURRENT
from torch import Tensor

from headrace.executor.checkpoints.sources.gguf.mixtures import MISTRAL_4_GROWTH, PHIMOE_ATTENTION_FACTOR

LLAMA3_WIDE = {
    "hidden_size": 256,
    "head_dim": 64,
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
LLAMA3_OTHER = {
    "hidden_size": 256,
    "head_dim": 64,
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 8.0,
        "original_max_position_embeddings": 4096,
    },
}  # fmt: skip
GEMMA3 = {
    "num_hidden_layers": 7,
    "query_pre_attn_scalar": 16,
    "layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"],
}
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64, "mscale": 0.8,
    "mscale_all_dim": 0.8,
}  # fmt: skip
THREE_TO_ONE = {
    "num_hidden_layers": 5,
    "layer_types": [*["sliding_attention"] * 3, "full_attention", "sliding_attention"],
}
FALCON = {"max_position_embeddings": 2048}  # which the converter writes of all
MAMBA2 = LONG = {"max_position_embeddings": 2**20}  # likewise
MSCALES = {"short_mscale": PHIMOE_ATTENTION_FACTOR, "long_mscale": PHIMOE_ATTENTION_FACTOR}


@dataclass(frozen=True)
class Case:
    """A model in its published layout, and its expected logits."""

    architecture: str
    config: Mapping[str, Any]
    state: Mapping[str, Tensor]
    logits: Callable[[list[int], list[int]], Tensor]
    """(prompt, answer) -> [tokens of the answer, vocab_size]"""

    def save(self, path: Path, kind: Kind = Kind.F32) -> Path:
        return convert(self.architecture, self.config, self.state, path, kind)


def _of(model: Any) -> Case:
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    return Case(type(model).__name__, config, saved_state(model), partial(_logits, model))


@torch.inference_mode()
def _logits(model: Any, prompt: list[int], answer: list[int]) -> Tensor:
    logits: Tensor = model(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
    return logits


class Source(NamedTuple):
    """Makes a case when it is needed."""

    architecture: str
    make: Callable[[], Case]


def plain(name: str, **changes: Any) -> Source:
    tiny = TINY_MODELS.get(name) or FAMILIES[name]
    return Source(tiny.model_class, lambda: _of(tiny_models.make(tiny, **changes)))


def mixture(name: str, **changes: Any) -> Source:
    return Source(MIXTURES[name].model_class, lambda: _of(tiny_models.make(MIXTURES[name], **changes)))


def recurrent(name: str, **changes: Any) -> Source:
    return Source(RECURRENT[name].model_class, lambda: _of(tiny_models.make(RECURRENT[name], **changes)))


def in_another(architecture: str, source: Source) -> Source:
    """The model as the converter writes a checkpoint of another architecture, whose language model it is."""
    return Source(source.architecture, lambda: replace(source.make(), architecture=architecture))


def published(name: str) -> Source:
    return Source(PUBLISHED[name].architecture, lambda: _as_published(name))


def _as_published(name: str) -> Case:
    with TemporaryDirectory() as folder:
        state = load_file(published_models.save(name, Path(folder) / "model") / "model.safetensors")
    logits = partial(published_models.expected_logits, name, published_models.twin_of(name))
    return Case(PUBLISHED[name].architecture, published_models.config_of(name), state, logits)


def _rwkv7() -> Case:
    def logits(prompt: list[int], answer: list[int]) -> Tensor:
        return rwkv_models.logits(prompt + answer[:-1])[len(prompt) - 1 :]

    return Case("RWKV7ForCausalLM", rwkv_models.CONFIG | LONG, rwkv_models.weights(), logits)


CASES: dict[str, Source] = {
    "llama": plain("llama"),
    "llama, shared heads, tied": plain("llama_gqa_tied"),
    "llama, biases, wide heads": plain("llama_biases"),
    "llama 3": plain("llama", **LLAMA3_WIDE),
    "llama 3, other thresholds": plain("llama", **LLAMA3_OTHER),
    "llama, linear scaling": plain("llama_linear"),
    "llama, yarn": plain("llama_yarn"),
    "qwen2": plain("qwen2"),
    "qwen3": plain("qwen3"),
    "gemma3": plain("gemma3", **GEMMA3),
    "gemma3n": plain("gemma3n", vocab_size_per_layer_input=tiny_models.VOCAB_SIZE),
    "gemma4": plain("gemma4"),
    "gemma4, experts": plain("gemma4_experts"),
    "gemma2": plain("gemma2", query_pre_attn_scalar=16),
    "smollm3": plain("smollm3"),
    "mixtral": plain("mixtral", num_key_value_heads=2),
    "qwen2moe": plain("qwen2_moe"),
    "qwen3moe": plain("qwen3_moe"),
    "qwen3moe, not renormalised": plain("qwen3_moe", norm_topk_prob=False),
    "olmoe": plain("olmoe"),
    "apertus": plain("apertus"),
    "arcee": plain("arcee"),
    "bloom": plain("bloom"),
    "bloom, 6 heads": plain("bloom_6_heads"),
    "cohere2": plain("cohere2", **THREE_TO_ONE),
    "command-r": plain("cohere"),
    "exaone": published("exaone"),
    "exaone4": plain("exaone4"),
    "exaone4, full": plain("exaone4_full"),
    "falcon": plain("falcon", **FALCON),
    "falcon, two norms": plain("falcon_new", **FALCON),
    "falcon, one norm": plain("falcon_new", **FALCON, num_ln_in_parallel_attn=1),
    "gemma": plain("gemma"),
    "gpt2": plain("gpt2"),
    "gptneox": plain("gpt_neox"),
    "gptneox, serial": plain("gpt_neox_serial"),
    "hunyuan-dense": plain("hunyuan"),
    "hunyuan-dense, alpha": plain("hunyuan_alpha", max_position_embeddings=256 * 1024),
    "hunyuan-moe": mixture("hunyuan_moe"),
    "mistral3": plain("ministral3"),
    "mistral3, mistral": in_another("Mistral3ForConditionalGeneration", plain("mistral")),
    "qwen2vl": in_another("Qwen2VLForConditionalGeneration", plain("qwen2")),
    "qwen3vl": in_another("Qwen3VLForConditionalGeneration", plain("qwen3")),
    "qwen3vlmoe": in_another("Qwen3VLMoeForConditionalGeneration", plain("qwen3_moe")),
    "xverse": Source(
        "XverseForCausalLM", lambda: replace(_of(tiny_models.build("llama")), architecture="XverseForCausalLM")
    ),
    "granite": plain("granite"),
    "granite, biases": plain("granite_biases"),
    "jais2": plain("jais2"),
    "deci": published("deci"),
    "deci, heads": published("deci_heads"),
    "mpt": plain("mpt"),
    "nemotron": plain("nemotron"),
    "olmo": plain("olmo"),
    "phi2": plain("phi"),
    "olmo2": plain("olmo2"),
    "olmo2, windows": plain("olmo3"),
    "phi3": plain("phi3"),
    "phi3, long": plain("phi3_longrope", rope_parameters=LONGROPE),
    "seed_oss": plain("seed_oss"),
    "stablelm": plain("stablelm"),
    "stablelm, parallel": plain("stablelm_parallel"),
    "starcoder": plain("gpt_bigcode"),
    "starcoder2": plain("starcoder2", sliding_window=None),
    "ernie4_5": plain("ernie4_5_plain"),
    "chatglm, glm4": plain("glm"),
    "glm4": plain("glm4"),
    "deepseek2, version 2": plain("deepseek_v2_moe", rope_parameters=YARN),
    "deepseek2, version 3": plain("deepseek_v3_moe", rope_parameters=YARN),
    "deepseek2, kimi": mixture("kimi_k2"),
    "deepseek2, glm": mixture("glm4_moe_lite"),
    "dbrx": mixture("dbrx"),
    "exaone-moe": mixture("exaone_moe"),
    "dots1": mixture("dots1", sliding_window=None, layer_types=None),
    "ernie4_5-moe": mixture("ernie4_5_moe"),
    "glm-dsa": mixture("glm_moe_dsa"),
    "glm4moe": mixture("glm4_moe"),
    "gpt-oss": mixture("gpt_oss"),
    "granitemoe": mixture("granitemoe"),
    "granitehybrid": recurrent("granite_hybrid", **LONG),
    "granitehybrid, dense": recurrent("granite_hybrid_dense", **LONG, position_embedding_type="nope"),
    "granitehybrid, bamba": recurrent("bamba", time_step_limit=[0.0, float("inf")]),
    "falcon-h1": recurrent("falcon_h1", tie_word_embeddings=False),
    "falcon-h1, normed": recurrent(
        "falcon_h1_normed", projectors_bias=False, attention_bias=False, tie_word_embeddings=False
    ),
    "nemotron_h": recurrent("nemotron_h", **LONG, layers_block_type=["mamba", "mlp", "attention", "mlp", "mamba"]),
    "nemotron_h_moe": recurrent("nemotron_h", **LONG, layers_block_type=["mamba", "moe", "attention", "moe"]),
    "nemotron_h_moe, latent": recurrent(
        "nemotron_h_latent", **LONG, layers_block_type=["mamba", "moe", "attention", "moe"]
    ),
    "jamba": recurrent("jamba"),
    "kimi-linear": recurrent("kimi_linear"),
    "lfm2": recurrent("lfm2"),
    "lfm2moe": recurrent("lfm2_moe", routed_scaling_factor=1.0),
    "mamba": recurrent("mamba", **MAMBA2),
    "mamba, falcon": recurrent(
        "falcon_mamba", **MAMBA2, use_bias=False, use_conv_bias=True, mixer_rms_eps=1e-6, tie_word_embeddings=False
    ),
    "mamba2": recurrent("mamba2", **MAMBA2, time_step_limit=[0.0, float("inf")]),
    "mamba2, one group, tied": recurrent("mamba2_one_group", **MAMBA2, use_bias=False, use_conv_bias=True),
    "qwen3next": recurrent("qwen3_next", attention_bias=False, mlp_only_layers=[]),
    "qwen35": recurrent("qwen3_5"),
    "qwen35moe": recurrent("qwen3_5_moe"),
    "llama4": mixture("llama4", attention_chunk_size=8192, floor_scale=8192, attn_scale=0.1),
    "minicpm3": mixture("minicpm3", scale_emb=12, dim_model_base=256),
    "mimo2": mixture("mimo_v2"),
    "minimax-m2": mixture("minimax_m2"),
    "mistral4": mixture("mistral4", rope_parameters=MISTRAL_4 | {"llama_4_scaling_beta": MISTRAL_4_GROWTH}),
    "deepseek2, mistral": in_another("MistralLarge3ForCausalLM", mixture("mistral4")),
    "phimoe": mixture("phimoe", router_jitter_noise=0.01),
    "phimoe, long": mixture("phimoe_longrope", rope_parameters=PHIMOE_LONGROPE | MSCALES),
    "baichuan": published("baichuan_7b"),
    "baichuan, 13B": published("baichuan_13b"),
    "chatglm": published("chatglm"),
    "internlm2": published("internlm2"),
    "bailingmoe": published("bailing_moe"),
    "bailingmoe2": published("bailing_moe_v2"),
    "deepseek": published("deepseek"),
    "minicpm": published("minicpm"),
    "orion": published("orion"),
    "pangu-embedded": published("pangu_embedded"),
    "plamo2": published("plamo2"),
    "plamo3": published("plamo3"),
    "qwen": published("qwen"),
    "rwkv7": Source("RWKV7ForCausalLM", _rwkv7),
    "step35": published("step3p5"),
}
