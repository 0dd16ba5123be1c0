"""Tiny random checkpoints, in their published layouts, of architectures that transformers does not implement.

Each is equivalent to a model of transformers, its twin: `save` writes the twin's weights under the architecture's own
names, with its own config.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny_models
import torch
from safetensors.torch import save_file
from tiny_models import COMMON, TinyModel
from torch import Tensor

from headrace.executor.models.families._config import alibi_slopes
from headrace.executor.models.families.mistral_consolidated import ARCHITECTURE

State = dict[str, Tensor]
SMALL = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 128}
BAICHUAN_2_VOCAB = 125_696


@dataclass(frozen=True)
class Published:
    architecture: str
    twin: TinyModel
    rename: dict[str, str]
    """Replacements in the names of the twin's weights."""
    config: Callable[[dict[str, Any]], dict[str, Any]]
    """Converts the twin's config to that of the architecture."""
    stored: Callable[[State], State] = dict
    """Converts the twin's weights to the form that the architecture stores, before they are renamed."""
    has_alibi: bool = False
    """Whether ALiBi replaces the twin's rotary embedding."""
    unit_head: bool = False


def _twin(name: str, **config: Any) -> TinyModel:
    base = {"num_key_value_heads": 4, "tie_word_embeddings": False}
    return TinyModel(f"{name}ForCausalLM", f"{name}Config", SMALL | base | config, 0.2)


def _plain(config: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A config under the names that most configs use, as before transformers 5."""
    kept = (*COMMON, "rms_norm_eps", "hidden_act", "tie_word_embeddings")
    theta = config["rope_parameters"]["rope_theta"]
    return {name: config[name] for name in kept if name in config} | {"rope_theta": theta} | more


def _fused(name: str, groups: int) -> Callable[[State], State]:
    """Fuses queries, keys and values into one matrix, with their rows in `groups` groups."""

    def fuse(state: State) -> State:
        found = dict(state)
        for query in [each for each in state if ".q_proj." in each]:
            parts = [found.pop(query.replace(".q_proj.", f".{each}_proj.")) for each in "qkv"]
            grouped = [part.unflatten(0, (groups, -1)) for part in parts]
            found[query.replace("self_attn.q_proj", name)] = torch.cat(grouped, dim=1).flatten(0, 1)
        return found

    return fuse


def _qwen(config: dict[str, Any]) -> dict[str, Any]:
    return {
        **{name: config[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")},
        "intermediate_size": 2 * config["intermediate_size"],
        "kv_channels": config["hidden_size"] // config["num_attention_heads"],
        "seq_length": config["max_position_embeddings"],
        "layer_norm_epsilon": config["rms_norm_eps"],
        "rotary_emb_base": config["rope_parameters"]["rope_theta"],
        "rotary_pct": 1.0, "no_bias": True, "use_dynamic_ntk": True, "use_logn_attn": True,
        "tie_word_embeddings": False,
    }  # fmt: skip


def _exaone(config: dict[str, Any]) -> dict[str, Any]:
    names = {
        "num_layers": "num_hidden_layers", "layer_norm_epsilon": "rms_norm_eps", "activation_function": "hidden_act"
    }  # fmt: skip
    found = _plain(config, embed_dropout=0.0, head_dim=config["head_dim"])
    return {**found, **{own: found.pop(theirs) for own, theirs in names.items()}}


def _minicpm(config: dict[str, Any]) -> dict[str, Any]:
    return _plain(
        config,
        scale_emb=config["embedding_multiplier"],
        dim_model_base=config["hidden_size"] / config["logits_scaling"],
        scale_depth=config["residual_multiplier"] * config["num_hidden_layers"] ** 0.5,
    )


def _baichuan(config: dict[str, Any]) -> dict[str, Any]:
    return _plain(config, model_max_length=config["max_position_embeddings"])


def mistral_params(config: dict[str, Any]) -> dict[str, Any]:
    """The content of a params.json."""
    own = {
        "dim": "hidden_size", "n_layers": "num_hidden_layers", "head_dim": "head_dim", "norm_eps": "rms_norm_eps",
        "hidden_dim": "intermediate_size", "n_heads": "num_attention_heads", "n_kv_heads": "num_key_value_heads",
        "vocab_size": "vocab_size", "max_seq_len": "max_position_embeddings",
    }  # fmt: skip
    params = {name: config[theirs] for name, theirs in own.items() if theirs in config}
    return params | {"rope_theta": config["rope_parameters"]["rope_theta"]}


def with_neighbouring_pairs(state: State, head_dim: int) -> State:
    """Reorders queries and keys so that rotated pairs, half a head apart, become neighbours."""
    found = dict(state)
    for name, tensor in state.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            found[name] = tensor.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)
    return found


MISTRAL_NAMES = {
    "model.": "", "embed_tokens": "tok_embeddings", "lm_head": "output", "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn": "attention", "q_proj": "wq", "k_proj": "wk", "v_proj": "wv",
    "o_proj": "wo", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2", "block_sparse_moe": "feed_forward",
}  # fmt: skip
INTERNLM2_NAMES = {
    "lm_head": "output", "embed_tokens": "tok_embeddings", "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
QWEN_NAMES = {
    "model.layers": "transformer.h", "model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f",
    "self_attn.o_proj": "attn.c_proj", "mlp.gate_proj": "mlp.w2", "mlp.up_proj": "mlp.w1",
    "mlp.down_proj": "mlp.c_proj", "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2",
}  # fmt: skip
EXAONE_NAMES = {
    "model.layers": "transformer.h", "model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f",
    "self_attn.o_proj": "attn.attention.out_proj", "self_attn": "attn.attention", "mlp.gate_proj": "mlp.c_fc_0",
    "mlp.up_proj": "mlp.c_fc_1", "mlp.down_proj": "mlp.c_proj", "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
}  # fmt: skip
GRANITE = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 8**-0.5, "logits_scaling": 4.0
}  # fmt: skip
EIGHT_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 64}

PUBLISHED: dict[str, Published] = {
    "internlm": Published(
        "InternLMForCausalLM", _twin("Llama", attention_bias=True), {}, lambda config: _plain(config, bias=True)
    ),
    "internlm2": Published(
        "InternLM2ForCausalLM", _twin("Llama", num_key_value_heads=2), INTERNLM2_NAMES,
        lambda config: _plain(config, bias=False), _fused("attention.wqkv", 2),
    ),
    "internlm3": Published(
        "InternLM3ForCausalLM", _twin("Llama", num_key_value_heads=2, head_dim=16), {},
        lambda config: _plain(config, head_dim=16, qkv_bias=False, bias=False),
    ),
    "internlm3_biases": Published(
        "InternLM3ForCausalLM", _twin("Qwen2"), {}, lambda config: _plain(config, qkv_bias=True, bias=False)
    ),
    "mimo": Published(
        "MiMoForCausalLM", _twin("Qwen2"), {},
        lambda config: _plain(config, attention_bias=True, num_nextn_predict_layers=1),
        lambda state: {**state, "model.mtp_layers.0.token_layernorm.weight": torch.ones(8)},
    ),
    "baichuan_7b": Published(
        "BaiChuanForCausalLM", _twin("Llama"), {}, _baichuan, _fused("self_attn.W_pack", 1)
    ),
    "baichuan_13b": Published(
        "BaichuanForCausalLM", _twin("Llama", num_hidden_layers=40, **EIGHT_HEADS), {}, _baichuan,
        _fused("self_attn.W_pack", 1), has_alibi=True,
    ),
    "baichuan_2": Published(
        "BaichuanForCausalLM", _twin("Llama", vocab_size=BAICHUAN_2_VOCAB, **EIGHT_HEADS),
        {}, _baichuan, _fused("self_attn.W_pack", 1), has_alibi=True, unit_head=True,
    ),
    "mistral_consolidated": Published(
        ARCHITECTURE, _twin("Mistral", num_key_value_heads=2, head_dim=8, sliding_window=None), MISTRAL_NAMES,
        mistral_params, lambda state: with_neighbouring_pairs(state, 8),
    ),
    "qwen": Published("QWenLMHeadModel", _twin("Qwen2"), QWEN_NAMES, _qwen, _fused("attn.c_attn", 1)),
    "exaone": Published("ExaoneForCausalLM", _twin("Llama", num_key_value_heads=2), EXAONE_NAMES, _exaone),
    "minicpm": Published("MiniCPMForCausalLM", _twin("Granite", num_key_value_heads=2, **GRANITE), {}, _minicpm),
}  # fmt: skip


def twin_of(name: str) -> Any:
    """The twin, a model of transformers."""
    return tiny_models.make(PUBLISHED[name].twin)


def config_of(name: str) -> dict[str, Any]:
    published = PUBLISHED[name]
    return published.config(twin_of(name).config.to_dict()) | {"architectures": [published.architecture]}


def save(name: str, folder: Path) -> Path:
    """Writes the checkpoint into a new folder `folder` and returns it."""
    published, folder_state = PUBLISHED[name], State()
    for stem, tensor in published.stored(dict(twin_of(name).state_dict())).items():
        for old, new in published.rename.items():
            stem = stem.replace(old, new)
        folder_state[stem] = tensor.contiguous()
    folder.mkdir(parents=True)
    save_file(folder_state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_of(name)))
    return folder


@torch.inference_mode()
def expected_logits(name: str, model: Any, prompt: list[int], answer: list[int]) -> Tensor:
    """The twin's logits after the prompt and after each token of the answer but the last."""
    ids, published = torch.tensor([prompt + answer[:-1]]), PUBLISHED[name]
    changed: dict[str, Tensor] = {}
    if published.has_alibi:  # at position 0 nothing is rotated
        distances = torch.arange(ids.shape[1]) - torch.arange(ids.shape[1])[:, None]
        bias = torch.tensor(alibi_slopes(model.config.num_attention_heads))[:, None, None] * distances
        causal = bias.masked_fill(distances > 0, float("-inf"))[None]
        changed = {"attention_mask": causal, "position_ids": torch.zeros_like(ids)}
    hidden = model.model(ids, use_cache=False, **changed).last_hidden_state[0, len(prompt) - 1 :]
    head = model.lm_head.weight
    if published.unit_head:
        return hidden @ (head / head.norm(dim=1, keepdim=True)).T
    return hidden @ head.T
