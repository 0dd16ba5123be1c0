"""Tiny random checkpoints of many architectures, made and saved by transformers.

`save(name, folder)` writes config.json, float32 model.safetensors and, if asked, a byte-level tokeniser with a chat
template. `build(name)` returns the transformers model itself. Both depend only on name and seed.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from headrace.core.options.cache_groups import CacheGroup, request_blocks
from headrace.executor.models.families import spec_from_config
from headrace.executor.models.kv_cache import cache_groups

VOCAB_SIZE = 320
BOS, EOS = 0, 1
COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": None,
}
TRAINING_TEXT = (
    "The headrace carries the water to the turbine, and the tailrace carries it away. "
    "What goes in by one must come out by the other, or the mill stands still. "
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass(frozen=True)
class TinyModel:
    """A transformers model class, and the part of its config that differs from COMMON."""

    model_class: str
    config_class: str
    config: dict[str, Any] = field(default_factory=dict)
    embedding_std: float = 0.1
    """Small if the embedding is tied to the head, since answers would otherwise repeat their last token."""


def _llama(**config: Any) -> TinyModel:
    return TinyModel("LlamaForCausalLM", "LlamaConfig", config)


def _opt(embedding_std: float = 0.1, **config: Any) -> TinyModel:
    base = {"ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.0, "pad_token_id": 2}
    return TinyModel("OPTForCausalLM", "OPTConfig", base | config, embedding_std)


def _gemma(version: str, **config: Any) -> TinyModel:
    # Gemma multiplies embeddings by sqrt(hidden_size).
    config_class = {"2": "Gemma2Config", "3": "Gemma3TextConfig"}[version]
    return TinyModel(f"Gemma{version}ForCausalLM", config_class, {"head_dim": 16, "pad_token_id": 2} | config, 0.03)


def _experts(family: str, **config: Any) -> TinyModel:
    """Mixtures whose hidden sizes are whole blocks, so that GGUF types and --quantization apply."""
    base = {"num_experts_per_tok": 2, "num_experts": 5, "moe_intermediate_size": 32, "tie_word_embeddings": False}
    return TinyModel(f"{family}ForCausalLM", f"{family}Config", base | config)


def _latent(family: str, **config: Any) -> TinyModel:
    base = {
        "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 40, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
        "v_head_dim": 20,
    }  # fmt: skip
    return TinyModel(f"{family}ForCausalLM", f"{family}Config", base | config)


def _deepseek(version: str, **config: Any) -> TinyModel:
    """DeepSeek with group-limited routing, and with YaRN scaling that changes the size of queries and keys."""
    base = {
        "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 2,
        "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
        "num_hidden_layers": 3, "tie_word_embeddings": False, "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64,
            "mscale": 0.8, "mscale_all_dim": 1.1,
        },
    }  # fmt: skip
    return _latent(f"Deepseek{version}", **(base | config))


TINY_MODELS: dict[str, TinyModel] = {
    "llama": _llama(num_key_value_heads=4, tie_word_embeddings=False),
    "llama_gqa_tied": _llama(
        hidden_size=60, num_attention_heads=6, num_key_value_heads=2, num_hidden_layers=3, tie_word_embeddings=True
    ),
    "llama_biases": _llama(attention_bias=True, mlp_bias=True, head_dim=24, num_key_value_heads=1),
    "llama3": _llama(
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
    ),
    "llama_linear": _llama(rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
    "llama_yarn": _llama(
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64,
        },
    ),
    "llama_dynamic": _llama(
        max_position_embeddings=96, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    ),
    "mistral": TinyModel("MistralForCausalLM", "MistralConfig", {"sliding_window": None, "head_dim": 24}),
    "mistral_window": TinyModel("MistralForCausalLM", "MistralConfig", {"sliding_window": 20}),
    "qwen2": TinyModel(
        "Qwen2ForCausalLM", "Qwen2Config",
        {"hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "qwen2_window": TinyModel(
        "Qwen2ForCausalLM", "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 33, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen3": TinyModel("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 32, "tie_word_embeddings": False}),
    "gemma3": _gemma(
        "3", num_hidden_layers=4, sliding_window=24, num_key_value_heads=1, query_pre_attn_scalar=24,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    ),
    "gemma3_capped_scaled": _gemma(
        "3", num_hidden_layers=3, sliding_window=40, query_pre_attn_scalar=16, final_logit_softcapping=2.0,
        attention_bias=True, layer_types=["sliding_attention", "full_attention", "full_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "gemma2": _gemma(
        "2", num_hidden_layers=3, sliding_window=24, query_pre_attn_scalar=20, attn_logit_softcapping=2.0,
        final_logit_softcapping=2.0,
    ),
    "smollm3": TinyModel("SmolLM3ForCausalLM", "SmolLM3Config", {"num_hidden_layers": 4}),
    "smollm3_window": TinyModel(
        "SmolLM3ForCausalLM", "SmolLM3Config",
        {"no_rope_layers": [1, 0, 1], "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 30},
    ),
    "opt": _opt(),
    "opt_projected_post_norm": _opt(0.3, word_embed_proj_dim=32, do_layer_norm_before=False),
    "opt_plain": _opt(enable_bias=False, layer_norm_elementwise_affine=False, activation_function="gelu"),
    "mixtral": _experts("Mixtral", num_local_experts=5, num_hidden_layers=3),
    "mixtral_window": _experts("Mixtral", num_local_experts=4, sliding_window=20),
    "qwen2_moe": _experts("Qwen2Moe", shared_expert_intermediate_size=64, num_experts_per_tok=3, head_dim=16),
    "qwen2_moe_some_dense": _experts(
        "Qwen2Moe", shared_expert_intermediate_size=64, num_hidden_layers=5, decoder_sparse_step=2,
        mlp_only_layers=[3], norm_topk_prob=True, head_dim=16,
    ),
    "qwen3_moe": _experts("Qwen3Moe", head_dim=32, norm_topk_prob=True),
    "qwen3_moe_some_dense": _experts("Qwen3Moe", head_dim=16, num_hidden_layers=3, mlp_only_layers=[1]),
    "deepseek_v3_moe": _deepseek("V3"),
    "deepseek_v2_moe": _deepseek("V2", q_lora_rank=None, topk_method="group_limited_greedy", n_shared_experts=1),
    "olmoe": _experts("Olmoe", num_key_value_heads=4, intermediate_size=32),
    "olmoe_gqa": _experts("Olmoe", intermediate_size=64, norm_topk_prob=True),
}  # fmt: skip


def build(name: str, seed: int = 0, **config: Any) -> Any:
    """The transformers model in float32, in eval mode; `config` overrides single fields of its config."""
    from tiny_families import FAMILIES, foreign  # which are made of what is here

    return make(TINY_MODELS.get(name) or FAMILIES.get(name) or foreign(name), seed, **config)


def make(tiny: TinyModel, seed: int = 0, **config: Any) -> Any:
    values = COMMON | tiny.config | config
    model = getattr(transformers, tiny.model_class)(getattr(transformers, tiny.config_class)(**values)).eval()
    _randomise(model, seed, tiny.embedding_std)
    return model


def state_of(model: Any) -> dict[str, Tensor]:
    """The state dict with the names and shapes of a published checkpoint: without the tied copy of the embedding, and
    with experts as separate tensors."""
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        for name in ("lm_head.weight", "output_projection.weight"):
            state.pop(name, None)
    is_mixtral = type(model).__name__.startswith("Mixtral")
    names = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    for name in [name for name in state if name.endswith(".experts.gate_up_proj")]:
        start = name.removesuffix(".gate_up_proj")
        below = start.replace(".mlp.", ".block_sparse_moe.") if is_mixtral else start
        gates, ups = state.pop(name).chunk(2, dim=1)
        for kind, stack in zip(names, (gates, ups, state.pop(f"{start}.down_proj")), strict=True):
            state |= {f"{below}.{index}.{kind}.weight": each for index, each in enumerate(stack)}
    if type(model).__name__.startswith("GraniteMoe"):
        state = {name.replace("moe.router.weight", "moe.router.layer.weight"): each for name, each in state.items()}
    if is_mixtral:
        state = {name.replace(".mlp.gate.", ".block_sparse_moe.gate."): each for name, each in state.items()}
    return state


def save(name: str, folder: Path, seed: int = 0, tokenizer: bool = False, **config: Any) -> Path:
    """Writes the checkpoint into `folder`, which it creates if missing, and returns it."""
    build(name, seed, **config).save_pretrained(folder)
    if tokenizer:
        make_tokenizer().save_pretrained(folder)
    return folder


def make_tokenizer() -> Any:
    """A byte-level BPE of at most VOCAB_SIZE tokens, with `<s>` 0 and `</s>` 1: any text round-trips."""
    from tokenizers import Tokenizer

    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained_tokenizer()),
        bos_token="<s>",
        eos_token="</s>",
        chat_template=CHAT_TEMPLATE,
    )


@functools.cache
def _trained_tokenizer() -> str:
    """Its tokenizer.json: a hundred tests of a process want it, and training takes a while."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TRAINING_TEXT], trainer)
    return str(tokenizer.to_str())


def _randomise(model: Any, seed: int, embedding_std: float) -> None:
    """Draws weights large enough that answers change from token to token, and biases and norms away from 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    centred_at_zero = any(each in type(model).__name__ for each in ("Gemma", "Nemotron"))
    with torch.no_grad():
        for parameter_name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter_name.endswith((".bias", "_bias", ".sinks")):
                parameter.copy_(0.3 * noise)
            elif "norm" in parameter_name or ".ln_" in parameter_name:
                parameter.copy_(0.3 * noise + (0.0 if centred_at_zero else 1.0))
            elif parameter_name.endswith((".A_log", ".D")):
                parameter.copy_(noise)
            elif "embed_positions" in parameter_name or ".wpe." in parameter_name:
                parameter.copy_(0.5 * noise)
            elif parameter_name.endswith((".mlp.gate.weight", ".router.weight", ".feed_forward.gate.weight")):
                parameter.copy_(0.6 * noise)  # logits far enough apart that rounding rarely changes the choice
            else:
                is_embedding = "embed" in parameter_name or ".wte." in parameter_name
                parameter.copy_(noise * (embedding_std if is_embedding else 0.25))
        for name, buffer in model.named_buffers():
            if name.endswith(("correction_bias", "expert_bias")):
                buffer.copy_(0.5 * torch.rand(buffer.shape, generator=generator))
            elif name.endswith("tid2eid"):
                order = torch.rand(len(buffer), model.config.n_routed_experts, generator=generator).argsort(-1)
                buffer.copy_(order[:, : buffer.shape[1]])
            elif name.endswith("layer_scalar"):
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
    model.tie_weights()


def cache_groups_of(folder: Path, max_model_len: int, block_size: int = 16) -> tuple[CacheGroup, ...]:
    """The cache groups of a saved model, as the engine makes them."""
    spec = spec_from_config(json.loads((folder / "config.json").read_text()))
    return cache_groups(spec, max_model_len, block_size=block_size)


def blocks_of_one_request(folder: Path, engine: dict[str, Any]) -> int:
    """The blocks that a request of the engine's max_model_len holds at once."""
    groups = cache_groups_of(folder, engine["max_model_len"], engine["block_size"])
    return request_blocks(groups, engine["max_model_len"], engine["block_size"], engine["max_num_batched_tokens"])
