"""Tiny random checkpoints, in their published layouts, of architectures that transformers does not implement.

Each is equivalent to a model of transformers, its twin: `save` writes the twin's weights under the architecture's own
names, with its own config.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import loop_twin
import ngram_twin
import plamo2_twin
import tiny_models
import torch
from lightning_twin import Ling
from safetensors.torch import save_file
from tiny_models import COMMON, TinyModel
from torch import Tensor
from written_parts import (
    EarlyExpertsLayer,
    GatedFfn,
    GrokFfn,
    GroupedNorm,
    Scores,
    SinkAttention,
    ValueAttention,
    randomise,
)

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
    alibi_root: bool = False
    """Whether it is of the distance's root."""
    unit_head: bool = False
    prepare: Callable[[Any], None] | None = None
    """Changes the twin's weights to those with which it computes the same."""
    logits: Callable[[Tensor], Tensor] | None = None
    """What becomes of the products with the head; None: they are the logits."""


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
CHATGLM_NAMES = {
    "model.layers": "transformer.encoder.layers", "model.embed_tokens": "transformer.embedding.word_embeddings",
    "model.norm": "transformer.encoder.final_layernorm", "lm_head": "transformer.output_layer",
    "self_attn.o_proj": "self_attention.dense", "mlp.gate_up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}  # fmt: skip


def _chatglm(config: dict[str, Any]) -> dict[str, Any]:
    return {
        **{name: config[name] for name in ("hidden_size", "num_attention_heads", "tie_word_embeddings")},
        "num_layers": config["num_hidden_layers"], "ffn_hidden_size": config["intermediate_size"],
        "layernorm_epsilon": config["rms_norm_eps"], "padded_vocab_size": config["vocab_size"],
        "kv_channels": config["head_dim"], "seq_length": config["max_position_embeddings"], "add_qkv_bias": True,
        "add_bias_linear": False, "multi_query_attention": True, "rope_ratio": 2.0, "original_rope": True,
        "multi_query_group_num": config["num_key_value_heads"], "rmsnorm": True, "post_layer_norm": True,
        "apply_residual_connection_post_layernorm": False, "apply_query_key_layer_scaling": True,
    }  # fmt: skip


STEP_TEXT: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_sliding_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 32,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "share_expert_dim": 24, "sliding_window": 20,
    "max_position_embeddings": 512, "moe_router_scaling_factor": 1.5, "tie_word_embeddings": False,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "mlp_layer_types": ["dense", "dense", "sparse", "sparse"], "swiglu_limits": [0.0, 0.0, None, 7.0],
    "swiglu_limits_shared": [0.0, 16.0, 0.0, 16.0],
    "rope_parameters": {
        "full_attention": {
            "rope_type": "llama3", "rope_theta": 500000.0, "partial_rotary_factor": 0.5, "factor": 2.0,
            "low_freq_factor": 1.0, "high_freq_factor": 32.0, "original_max_position_embeddings": 256,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    },
}  # fmt: skip
STEP = {
    "text_config": STEP_TEXT,
    "vision_config": {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14
    },
}  # fmt: skip


def _step(_: dict[str, Any]) -> dict[str, Any]:
    """As Step 3.5's files have it: with values per layer, and of layers that predict further tokens."""
    text = dict(STEP_TEXT)
    rotations, scaled = text.pop("rope_parameters"), {}
    own = [rotations[kind] for kind in text["layer_types"]]
    scaled = {key: value for key, value in own[0].items() if key not in ("rope_theta", "partial_rotary_factor")}
    sparse = [str(i) for i, kind in enumerate(text.pop("mlp_layer_types")) if kind == "sparse"]
    others = {"attention_type": "sliding_attention", "num_attention_groups": 2, "head_dim": 16, "true_head_dim": 16}
    renamed = {
        "num_attention_groups": "num_key_value_heads", "moe_num_experts": "n_routed_experts",
        "moe_top_k": "num_experts_per_tok",
    }  # fmt: skip
    return {
        **{name: text.pop(theirs) for name, theirs in renamed.items()},
        "attention_other_setting": {"num_attention_heads": text.pop("num_sliding_attention_heads"), **others},
        **text,
        "layer_types": [*text["layer_types"], "full_attention"],
        "rope_theta": [each["rope_theta"] for each in own] + [10000.0],
        "partial_rotary_factors": [each["partial_rotary_factor"] for each in own] + [1.0],
        "rope_scaling": scaled, "yarn_only_types": ["full_attention"], "moe_layers_enum": ",".join(sparse),
        "num_nextn_predict_layers": 1, "use_head_wise_attn_gate": True, "use_moe_router_bias": True,
        "norm_expert_weight": True, "need_fp32_gate": True, "att_impl_type": "GQA", "zero_centered": True,
    }  # fmt: skip


def _of_step(state: State) -> State:
    """The language model's weights, with the experts' gates and ups apart."""
    found = State()
    for name, tensor in state.items():
        if "vision" in name or "multi_modal" in name:
            continue
        if name.endswith("mlp.experts.gate_up_proj"):
            start = name.removesuffix("mlp.experts.gate_up_proj")
            parts = zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True)
            found |= {f"{start}moe.{each}_proj.weight": part for each, part in parts}
        else:
            found[name] = tensor
    return found


STEP_NAMES = {
    "model.language_model.": "model.", "mlp.gate.e_score_correction_bias": "moe.router_bias", "mlp.gate.": "moe.gate.",
    "mlp.shared_experts": "share_expert",
    "mlp.experts.down_proj": "moe.down_proj.weight",
}  # fmt: skip
FACTORS = {
    "q_proj.0": "q_proj", "q_proj.1": "inter_norm", "q_proj.2": "wq", "mlp.gate.": "moe.gate.",
    "mlp.shared_expert.": "share_expert.", "mlp.experts.down_proj": "moe.down_proj.weight",
}  # fmt: skip
SHARE_Q_DIM = 24
STEP_3_MEDIA = (
    "vision_model.transformer.resblocks.0.mlp.c_fc",
    "vit_downsampler",
    "vit_downsampler2",
    "vit_large_projector",
)


def _factorise(model: Any) -> None:
    """Queries through a vector of few columns, which is normed."""
    _halve_gates(model)
    generator = torch.Generator().manual_seed(0)
    for layer in model.model.layers:
        whole = layer.self_attn.q_proj
        norm = type(layer.input_layernorm)(SHARE_Q_DIM, model.config.rms_norm_eps)
        down, up = (torch.nn.Linear(*sizes, bias=False) for sizes in (
            (whole.in_features, SHARE_Q_DIM), (SHARE_Q_DIM, whole.out_features)))  # fmt: skip
        for parameter, mean in ((down.weight, 0.0), (up.weight, 0.0), (norm.weight, 1.0)):
            parameter.data.normal_(mean, 0.3, generator=generator)
        layer.self_attn.q_proj = torch.nn.Sequential(down, norm, up)


def _step_3(config: dict[str, Any], **more: Any) -> dict[str, Any]:
    own = {
        "moe_num_experts": "num_experts", "moe_top_k": "num_experts_per_tok", "max_seq_len": "max_position_embeddings",
        "share_expert_dim": "shared_expert_intermediate_size", "norm_expert_weight": "norm_topk_prob",
        "max_position_embedding": "max_position_embeddings", "num_attention_groups": "num_key_value_heads",
    }  # fmt: skip
    found = _plain(config, share_q_dim=SHARE_Q_DIM, head_dim=config["head_dim"], moe_intermediate_size=32)
    found |= {name: config[theirs] for name, theirs in own.items()}
    for name in ("max_position_embeddings", "num_key_value_heads", "hidden_act"):
        del found[name]
    sparse = set(range(config["num_hidden_layers"])) - set(config["mlp_only_layers"])
    return found | {"moe_layers_enum": ",".join(map(str, sorted(sparse))), "model_type": "step3_text"} | more


def _of_step_3(state: State) -> State:
    halved = {
        name: tensor / 2 if name.endswith("shared_expert.down_proj.weight") else tensor
        for name, tensor in state.items() if ".shared_expert_gate." not in name
    }  # fmt: skip
    return _of_step(halved)


SHARED = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
    "qkv_bias": False, "use_sliding_window": False,
}  # fmt: skip
SHARED_NAMES = {"mlp.shared_expert.": "mlp.shared_experts."}
LING_NAMES = {"embed_tokens": "word_embeddings", "self_attn.o_proj": "attention.dense"}


def _shared(config: dict[str, Any], **more: Any) -> dict[str, Any]:
    return _plain(config, num_experts_per_tok=3, moe_intermediate_size=32, **more)


def _experts_apart(state: State) -> State:
    """With the matrices of each expert by themselves."""
    found = State()
    for name, tensor in state.items():
        start, stacked, which = name.partition("mlp.experts.")
        for index in range(len(tensor) if stacked else 0):
            at = f"{start}{stacked}{index}"
            if which == "gate_up_proj":
                gate, up = tensor[index].chunk(2)
                found |= {f"{at}.gate_proj.weight": gate, f"{at}.up_proj.weight": up}
            else:
                found[f"{at}.down_proj.weight"] = tensor[index]
        if not stacked:
            found[name] = tensor
    return found


def _with_plain_shared_experts(state: State) -> State:
    """Without the shared experts' gates, which halve their results in the twin."""
    kept = {name: tensor for name, tensor in state.items() if ".shared_expert_gate." not in name}
    return _experts_apart({
        name: tensor / 2 if name.endswith("shared_expert.down_proj.weight") else tensor for name, tensor in kept.items()
    })  # fmt: skip


def _halve_gates(model: Any) -> None:
    """Gates of shared experts that are 0, and so factors of one half."""
    for stem, parameter in model.named_parameters():
        if ".shared_expert_gate." in stem:
            parameter.data.zero_()


# Key/value heads and inner sizes; 0 where a layer has no attention or no FFN.
DECI_LAYERS = ((4, 512), (0, 256), (2, 0), (0, 0), (1, 256))
DECI_FACTORS = {256: 1.0, 512: 12.5}


def _as_deci(model: Any) -> None:
    """What DeciLM's layers lack is 0 here, and heads of keys that it has once are the same."""
    for layer, (heads, inner) in zip(model.model.layers, DECI_LAYERS, strict=True):
        layer.mlp.down_proj.weight.data[:, inner:] = 0
        if heads == 0:
            layer.self_attn.o_proj.weight.data.zero_()
            continue
        for each in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            own = each.weight.data.unflatten(0, (4, -1))[: 4 // heads * heads : 4 // heads]
            each.weight.data = own.repeat_interleave(4 // heads, dim=0).flatten(0, 1)


def _of_deci(state: State) -> State:
    """Without what its layers lack."""
    found = State()
    for name, tensor in state.items():
        _, _, rest = name.partition("model.layers.")
        index, _, what = rest.partition(".")
        heads, inner = DECI_LAYERS[int(index)] if rest else (4, 512)
        if heads == 0 and what.startswith(("self_attn.", "input_layernorm.")):
            continue
        if inner == 0 and what.startswith(("mlp.", "post_attention_layernorm.")):
            continue
        if what.startswith(("self_attn.k_proj", "self_attn.v_proj")):
            found[name] = tensor.unflatten(0, (heads, -1, tensor.shape[0] // 4))[:, 0].flatten(0, 1)
        elif what.startswith("mlp.down_proj"):
            found[name] = tensor[:, :inner]
        else:
            found[name] = tensor[:inner] if what.startswith("mlp.") else tensor
    return found


def _deci(config: dict[str, Any]) -> dict[str, Any]:
    blocks = [
        {
            "attention": {
                "no_op": heads == 0, "n_heads_in_group": 4 // heads if heads else None, "replace_with_linear": False,
                "sparsify": None, "window_length": None, "num_sink_tokens": None, "unshifted_sink": False,
                "use_prefill_window_in_sink_attention": False,
            },
            "ffn": {
                "no_op": inner == 0, "ffn_mult": DECI_FACTORS.get(inner), "replace_with_linear": False,
                "sparsify": None,
            },
        }
        for heads, inner in DECI_LAYERS
    ]  # fmt: skip
    return _plain(config, block_configs=blocks, intermediate_size=None, num_key_value_heads=None, attention_bias=False)


PLAMO3_OFFSETS = {"post_attention_layernorm": 1 / 5, "post_feedforward_layernorm": 5**-1.5}
PLAMO3_NAMES = {
    "model.layers.": "model.layers.layers.", "self_attn.": "mixer.", "input_layernorm": "pre_mixer_norm",
    "post_attention_layernorm": "post_mixer_norm", "pre_feedforward_layernorm": "pre_mlp_norm",
    "post_feedforward_layernorm": "post_mlp_norm",
}  # fmt: skip


def _scale_down_embeddings(model: Any) -> None:
    """By what Gemma multiplies them with."""
    model.model.embed_tokens.weight.data /= model.config.hidden_size**0.5


def _of_plamo3(state: State) -> State:
    found = _fused("mixer.qkv_proj", 1)(state)
    embedding = state["model.embed_tokens.weight"]
    found["model.embed_tokens.weight"] = embedding * embedding.shape[1] ** 0.5
    for gate in [name for name in state if ".gate_proj." in name]:
        up = gate.replace(".gate_proj.", ".up_proj.")
        found[gate.replace(".gate_proj.", ".gate_up_proj.")] = torch.cat([found.pop(gate), found.pop(up)])
    for name, tensor in state.items():
        for norm, offset in PLAMO3_OFFSETS.items():
            if norm in name:
                found[name] = tensor + 1 - offset
    return found


def _plamo3(config: dict[str, Any]) -> dict[str, Any]:
    window = config["sliding_window"]
    kinds = config["layer_types"]
    return {
        **{name: config[name] for name in (*COMMON, "rms_norm_eps", "head_dim") if name in config},
        "tie_word_embeddings": False, "sliding_window_pattern": 2, "rope_theta": 1_000_000, "rope_local_theta": 10_000,
        "interleaved_sliding_window": [window if kind == "sliding_attention" else None for kind in kinds],
        "sliding_window": window,
    }  # fmt: skip


PLAMO2_NAMES = {
    **{f"self_attn.{each}_norm.weight": f"self_attn.{each}_weight" for each in "qk"},
    **{f"self_attn.{each}": f"self_attn.{each}.weight" for each in (
        "in_proj", "conv1d", "bcdt_proj", "dt_proj", "out_proj")},
    **PLAMO3_NAMES,
}  # fmt: skip


def _plamo2(config: dict[str, Any]) -> dict[str, Any]:
    found = {name: config[name] for name in (*COMMON, "rms_norm_eps") if name in config}
    return found | {
        "hidden_size_per_head": config["head_dim"], "mamba_num_heads": plamo2_twin.HEADS, "mamba_enabled": True,
        "mamba_d_state": plamo2_twin.STATE, "mamba_d_conv": plamo2_twin.WIDTH, "mamba_step": plamo2_twin.STEP,
        "mamba_chunk_size": 256, "tie_word_embeddings": False, "rope_theta": 1_000_000, "model_type": "plamo2",
        "attention_window_size": 2048, "full_attention_idx": None, "sparse_step": None, "num_experts": None,
        "use_predefined_initial_state": False, "linear_type": "normal", "eval_attention_n_bit": None,
    }  # fmt: skip


def _as_plamo2(model: Any) -> None:
    _scale_down_embeddings(model)
    plamo2_twin.with_mixers(model)


TELECHAT2_NAMES = {
    "model.layers": "transformer.h", "model.embed_tokens": "transformer.word_embeddings",
    "model.norm": "transformer.ln_f", "self_attn.q_proj": "self_attention.query",
    "self_attn.o_proj": "self_attention.dense", "self_attn": "self_attention",
}  # fmt: skip


def _drop_inner_biases(model: Any) -> None:
    """Biases of 0 where TeleChat 2 has none."""
    for name, parameter in model.named_parameters():
        if name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias", "gate_proj.bias", "up_proj.bias")):
            parameter.data.zero_()


def _of_telechat2(state: State) -> State:
    inner = tuple(f"{each}_proj.bias" for each in ("q", "k", "v", "gate", "up"))
    found = {name: tensor for name, tensor in state.items() if not name.endswith(inner)}
    for key in [name for name in found if "k_proj" in name]:
        heads = [found.pop(name).unflatten(0, (2, -1)) for name in (key, key.replace("k_proj", "v_proj"))]
        found[key.replace("k_proj", "key_value")] = torch.cat(heads, dim=1).flatten(0, 1)
    return found


def _telechat2(config: dict[str, Any]) -> dict[str, Any]:
    own = {
        "n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "ffn_hidden_size": "intermediate_size",
        "layer_norm_epsilon": "rms_norm_eps", "training_seqlen": "max_position_embeddings",
    }  # fmt: skip
    kept = ("vocab_size", "hidden_size", "num_key_value_heads", "tie_word_embeddings")
    return {
        **{name: config[theirs] for name, theirs in own.items()}, **{name: config[name] for name in kept},
        "apply_residual_connection_post_layernorm": False, "attention_softmax_in_fp32": True, "base_seqlen": 128,
        "embed_layernorm": False, "logn": False, "rotary_use_xpos": False, "skip_bias_add": True,
        "skip_bias_add_qkv": False, "use_RMSNorm": True,
    }  # fmt: skip


def _telechat3(config: dict[str, Any]) -> dict[str, Any]:
    scaling = {key: config["rope_parameters"][key] for key in ("factor", "original_max_position_embeddings")}
    scaling |= {"type": "telechat3-yarn", "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0}
    return _plain(config, rope_scaling=scaling, head_dim=config["head_dim"], attention_bias=False, mlp_bias=False)


def _as_ling(config: dict[str, Any], **more: Any) -> dict[str, Any]:
    kept = (
        "head_dim", "moe_intermediate_size", "n_group", "topk_group", "first_k_dense_replace", "num_experts_per_tok",
        "routed_scaling_factor", "use_qk_norm",
    )  # fmt: skip
    return _plain(
        config, **{name: config[name] for name in kept}, num_experts=config["n_routed_experts"],
        num_shared_experts=config["n_shared_experts"], score_function="sigmoid", use_qkv_bias=False, use_bias=False,
        moe_router_enable_expert_bias=True, **more,
    )  # fmt: skip


def _sarvam_mla(config: dict[str, Any]) -> dict[str, Any]:
    kept = (
        "moe_intermediate_size", "n_group", "topk_group", "first_k_dense_replace", "num_experts_per_tok",
        "routed_scaling_factor", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank",
    )  # fmt: skip
    scaling = {key: value for key, value in config["rope_parameters"].items() if key not in ("rope_type", "rope_theta")}
    return _plain(
        config, **{name: config[name] for name in kept}, num_experts=config["n_routed_experts"],
        num_shared_experts=config["n_shared_experts"], score_function="sigmoid", head_dim=40, q_head_dim=24,
        rope_scaling={"type": "deepseek_yarn", **scaling}, moe_shared_expert_intermediate_size=32,
        moe_router_enable_expert_bias=True,
    )  # fmt: skip


def _ling_linear(ling: Ling, config: dict[str, Any]) -> dict[str, Any]:
    kept = (
        "moe_intermediate_size", "n_group", "topk_group", "first_k_dense_replace", "num_experts_per_tok",
        "norm_topk_prob", "routed_scaling_factor", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
        "q_lora_rank", "rope_interleave",
    )  # fmt: skip
    return _plain(
        config, **{name: config[name] for name in kept}, num_experts=config["n_routed_experts"],
        num_shared_experts=config["n_shared_experts"], score_function="sigmoid", scoring_func="sigmoid",
        topk_method="noaux_tc", seq_aux=True, router_dtype="fp32", moe_router_enable_expert_bias=True, use_rmsnorm=True,
        num_nextn_predict_layers=0, mtp_loss_scaling_factor=0, embedding_dropout=0.0, output_dropout=0.0,
        max_window_layers=20, **ling.config(),
    )  # fmt: skip


def _ling_2_5(ling: Ling, **config: Any) -> Published:
    base = {
        "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 20, "n_routed_experts": 8,
        "moe_intermediate_size": 32, "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3,
        "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "default", "rope_theta": 6e5},
    }  # fmt: skip
    return Published(
        "BailingMoeV2_5ForCausalLM", _twin("DeepseekV3", **base | config), LING_LINEAR_NAMES,
        partial(_ling_linear, ling), _experts_apart, prepare=ling.put_into,
    )  # fmt: skip


def _mimo_v2_5(config: dict[str, Any]) -> dict[str, Any]:
    kept = (
        "head_dim", "v_head_dim", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "norm_topk_prob",
        "n_group", "topk_group", "attention_bias", "attention_value_scale",
    )  # fmt: skip
    full, slides = (config["rope_parameters"][f"{kind}_attention"] for kind in ("full", "sliding"))
    found = {
        **_plain(config | {"rope_parameters": full}), **{name: config[name] for name in kept},
        "layernorm_epsilon": config["rms_norm_eps"], "swa_rope_theta": slides["rope_theta"],
        "partial_rotary_factor": full["partial_rotary_factor"], "sliding_window_size": config["sliding_window"] - 1,
        "hybrid_layer_pattern": [int(each == "sliding_attention") for each in config["layer_types"]],
        "moe_layer_freq": [int(each == "sparse") for each in config["mlp_layer_types"]],
        "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False, "moe_router_dtype": "float32",
        "swa_num_key_value_heads": 2 * config["num_key_value_heads"], "scoring_func": "sigmoid",
        "n_shared_experts": None, "topk_method": "noaux_tc", "routed_scaling_factor": None, "model_type": "mimo_v2",
        **{f"swa_{name}": config[name] for name in ("num_attention_heads", "head_dim", "v_head_dim")},
    }  # fmt: skip
    del found["rms_norm_eps"]
    return found


MIMO_V2_NAMES = {"self_attn.sinks": "self_attn.attention_sink_bias"}
MIMO_MEDIA = ("visual.patch_embed.proj", "audio_encoder.layers.0.q_proj", "speech_embeddings.0", "model.mtp.layers.0.e")
MIMO_V2_5 = {
    "layer_types": ["full_attention", "sliding_attention"], "head_dim": 24, "v_head_dim": 8,
    "num_key_value_heads": 2, "sliding_window_size": 19, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 32, "max_position_embeddings": 1024, "vocab_size": 320,
}  # fmt: skip
LING_LINEAR_NAMES = {
    **LING_NAMES, "self_attn.": "attention.", "mlp.gate.e_score_correction_bias": "mlp.gate.expert_bias"
}  # fmt: skip
PANGU_NAMES = {
    "post_attention_layernorm": "pre_mlp_layernorm", "attention_end": "post_attention_layernorm",
    "mlp_end": "post_mlp_layernorm",
}  # fmt: skip


def _add_norms_after_blocks(model: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    for layer in model.model.layers:
        for name, block in (("attention_end", layer.self_attn), ("mlp_end", layer.mlp)):
            norm = type(layer.input_layernorm)(model.config.hidden_size, model.config.rms_norm_eps)
            norm.weight.data.normal_(1.0, 0.3, generator=generator)
            setattr(layer, name, norm)
            block.register_forward_hook(
                lambda _, __, out, norm=norm: (norm(out[0]), *out[1:]) if isinstance(out, tuple) else norm(out)
            )


PANGU_PRO = {
    "num_key_value_heads": 2, "moe_intermediate_size": 32, "n_routed_experts": 8, "n_shared_experts": 2, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 3, "first_k_dense_replace": 1,
}  # fmt: skip
PANGU_PRO_NAMES = {**PANGU_NAMES, "mlp.gate.e_score_correction_bias": "mlp.e_score_correction_bias"}
NUM_SINKS = 150


def _as_pangu_pro(model: Any) -> None:
    """Gives a DeepSeek V3 of transformers the attention of openPangu Pro V2, and norms behind both blocks."""
    for index, layer in enumerate(model.model.layers):
        layer.self_attn = SinkAttention(model.config, turned=8, head_dim=24, value_dim=16, num_sinks=NUM_SINKS)
        randomise(layer.self_attn, index)
    _add_norms_after_blocks(model)


def _pangu_pro(config: dict[str, Any]) -> dict[str, Any]:
    kept = (
        "moe_intermediate_size", "n_routed_experts", "n_shared_experts", "first_k_dense_replace", "num_experts_per_tok",
        "norm_topk_prob", "routed_scaling_factor",
    )  # fmt: skip
    return _plain(
        config, **{name: config[name] for name in kept}, sandwich_norm=True, router_enable_expert_bias=True,
        qk_rope_dim=8, qk_nope_dim=16, v_channels=16, param_sink_number=NUM_SINKS, param_sink_with_value=True,
        num_mtp_layers=0, model_type="PanguProMoE", attention_dropout=0.0,
    )  # fmt: skip


def _pangu(config: dict[str, Any]) -> dict[str, Any]:
    kept = (
        "moe_intermediate_size", "n_routed_experts", "n_shared_experts", "first_k_dense_replace", "num_experts_per_tok",
        "norm_topk_prob", "routed_scaling_factor", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
        "q_lora_rank",
    )  # fmt: skip
    own = {name: config[name] for name in kept}
    return _plain(config, **own, sandwich_norm=True, router_enable_expert_bias=True)


def _step_1(config: dict[str, Any]) -> dict[str, Any]:
    own = {"num_attention_groups": "num_key_value_heads", "max_seq_len": "max_position_embeddings"}
    kept = {name: config[name] for name in COMMON if name in config}
    for name, theirs in own.items():
        kept[name] = config[theirs]
        kept.pop(theirs, None)
    return kept | {"rms_norm_eps": config["rms_norm_eps"], "tie_word_embeddings": False}


GROK_NAMES = {
    "input_layernorm": "pre_attn_norm", "post_attention_layernorm": "post_attn_norm",
    "pre_feedforward_layernorm": "pre_moe_norm", "post_feedforward_layernorm": "post_moe_norm",
}  # fmt: skip
GROK_1_NAMES = GROK_NAMES | {
    "mlp.": "moe_block.", "self_attn.": "attn.", "norm.weight": "norm.scale", "gate_proj": "linear",
    "up_proj": "linear_v", "down_proj": "linear_1",
}  # fmt: skip
GROK_2_NAMES = GROK_NAMES | {
    "mlp.gate.": "block_sparse_moe.gate.", "mlp.experts.": "block_sparse_moe.experts.", "mlp.mlp.": "mlp.",
}  # fmt: skip
GROK_EXPERTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def _as_grok(scores: Scores, cap: float, dense: int, model: Any) -> None:
    """A Gemma 2 of transformers with experts, whose norms' weights are 1 more than what they store."""
    scores.put_into(model)
    for index, layer in enumerate(model.model.layers):
        layer.mlp = GrokFfn(SMALL["hidden_size"], 24, num_experts=4, num_chosen=2, cap=cap, dense=dense)
        randomise(layer.mlp, index)


def _of_grok(dense: bool, state: State) -> State:
    found = State()
    for name, tensor in state.items():
        stem, own = name, tensor
        if "norm" in name:
            own = tensor + 1
        elif name == "model.embed_tokens.weight":
            own = tensor * SMALL["hidden_size"] ** 0.5 / 3.0
        if dense and ".experts." in name:
            for old, new in GROK_EXPERTS.items():
                stem = stem.replace(old, new)
        found[stem] = own
    return found


def _grok(config: dict[str, Any], **more: Any) -> dict[str, Any]:
    return _plain(
        config, num_experts_per_tok=2, embedding_multiplier_scale=3.0, output_multiplier_scale=0.7,
        tie_word_embeddings=False, **more,
    )  # fmt: skip


GROK_TWIN = {
    "num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 4, "pad_token_id": 2,
    "layer_types": ["full_attention"] * 2, "attn_logit_softcapping": None, "final_logit_softcapping": None,
}  # fmt: skip


ARCTIC_NAMES = {"mlp.gate.": "block_sparse_moe.gate.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def _as_arctic(model: Any) -> None:
    """A Mixtral of transformers with a dense FFN in the first layer, and experts beside another in the second."""
    dense = GatedFfn(SMALL["hidden_size"], SMALL["intermediate_size"], torch.nn.functional.silu)
    randomise(dense, 0)
    model.model.layers[0].mlp = dense
    model.model.layers[1] = EarlyExpertsLayer(model.model.layers[1], SMALL["hidden_size"])


def _of_arctic(state: State) -> State:
    return {
        name.replace("mlp.experts.", "block_sparse_moe.experts.").replace(".0.mlp.", ".0.block_sparse_moe.mlp."): each
        for name, each in _experts_apart(state).items()
    }


def _arctic(config: dict[str, Any]) -> dict[str, Any]:
    return _plain(
        config, num_local_experts=4, num_experts_per_tok=2, moe_layer_frequency=2, parallel_attn_mlp_res=True,
        use_residual=True, moe_train_capacity_factor=1, moe_eval_capacity_factor=1, moe_min_capacity=0,
        moe_token_dropping=True, enable_expert_tensor_parallelism=False, router_aux_loss_coef=0.001,
        sliding_window=None, quantization=None, model_type="arctic",
    )  # fmt: skip


RNJ = {
    "num_hidden_layers": 3, "sliding_window": 32, "num_key_value_heads": 2, "head_dim": 16,
    "query_pre_attn_scalar": 20, "tie_word_embeddings": False, "pad_token_id": 2, "final_logit_softcapping": 3.0,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    },
}  # fmt: skip


def _rnj(config: dict[str, Any]) -> dict[str, Any]:
    kept = (
        "rms_norm_eps", "head_dim", "query_pre_attn_scalar", "sliding_window", "hidden_activation", "attention_bias",
        "final_logit_softcapping", "attn_logit_softcapping", "tie_word_embeddings",
    )  # fmt: skip
    chunked = {"sliding_attention": "chunked_attention"}
    return {
        **{name: config[name] for name in (*COMMON, *kept) if name in config}, "model_type": "rnj1",
        "layer_types": [chunked.get(each, each) for each in config["layer_types"]],
        "rope_parameters": {chunked.get(key, key): each for key, each in config["rope_parameters"].items()},
    }  # fmt: skip


HORIZON_TWIN = {
    "num_key_value_heads": 2, "head_dim": 16, "use_qk_norm": False, "moe_intermediate_size": 32, "n_routed_experts": 8,
    "first_k_dense_replace": 1, "num_experts_per_tok": 3, "norm_topk_prob": True, "n_shared_experts": 2, "n_group": 1,
    "topk_group": 1, "routed_scaling_factor": 2.5, "num_hidden_layers": 3, "attention_bias": False,
}  # fmt: skip
WHOLE_ROTATION = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 1.0}
HORIZON_NAMES = {"mlp.gate.e_score_correction_bias": "mlp.gate.bias"}


def _horizon(config: dict[str, Any], **more: Any) -> dict[str, Any]:
    """As the files of K2 Horizon have it, with what its largest model has not."""
    rotation = {key: config["rope_parameters"][key] for key in ("rope_theta", "rope_type")}
    found = _plain(
        config, head_dim=config["head_dim"], moe_intermediate_size=32, num_experts=8, num_experts_per_tok=3,
        num_shared_experts=2, norm_topk_prob=True, router_scaling_factor=2.5, router_score_func="sigmoid",
        moe_gate_bias=True, mlp_only_layers=[0], decoder_sparse_step=1, attention_bias=False, query_key_norm=False,
        attention_gate_func=None, layernorm_num_groups=1, mova_num_experts=0, mova_num_experts_per_tok=0,
        rope_head_dim=config["head_dim"], rope_parameters=rotation, sliding_window=None, use_sliding_window=False,
        attention_dropout=0.0, router_aux_loss_coef=0.0001, model_type="k2_horizon", **more,
    )  # fmt: skip
    del found["rope_theta"]
    return found


def _rotated_in_halves(state: State) -> State:
    """With the first half of a head's rotated dimensions at the start of each half of the head."""
    found = _experts_apart(state)
    turned, whole = 8, 16
    stored = [*range(turned // 2), *range(whole // 2, (whole + turned) // 2)]
    stored += [each for each in range(whole) if each not in stored]
    for name in state:
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = state[name].unflatten(0, (-1, whole))
            found[name] = heads[:, torch.tensor(stored).argsort()].flatten(0, 1)
    return found


def _as_horizon(groups: int, gate: str | None, norms: bool, num_experts: int, model: Any) -> None:
    """Gives a GLM 4 with experts norms of groups, and attention as a MoVA model of K2 Horizon has it."""
    eps, layers = model.config.rms_norm_eps, model.model.layers
    model.model.norm = GroupedNorm(model.model.norm, groups, eps)
    for index, layer in enumerate(layers):
        for name in ("input_layernorm", "post_attention_layernorm"):
            setattr(layer, name, GroupedNorm(getattr(layer, name), groups, eps))
        if gate is not None:
            experts = num_experts if index else 0
            layer.self_attn = ValueAttention(model.config, experts, num_chosen=2, scale=2.5, gate=gate, norms=norms)
            randomise(layer.self_attn, index)


SOLAR: dict[str, list[Any]] = {
    "bskcn_1": [1, 2], "bskcn_2": [9, 1], "bskcn_3": [4], "bskcn_4": [2, 4, 5], "bskcn_tv": [0.9, 0.7]
}  # fmt: skip
"""Layer 2 keeps its input in the place of layer 1's, before it is changed itself; both streams are kept in the first
half of 6 layers and taken in the second; there is no layer 9."""


def _skip_layers(model: Any) -> None:
    kept: dict[int, Tensor] = {}

    def before(index: int, hidden: Tensor) -> Tensor:
        kept.update({stream: hidden for stream in (1, 2) if index in SOLAR[f"bskcn_{stream}"]})
        for stream in (1, 2):
            if index in SOLAR[f"bskcn_{stream + 2}"]:
                hidden = torch.lerp(hidden, kept[stream], SOLAR["bskcn_tv"][1])
        return hidden

    for index, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(lambda _, given, index=index: (before(index, given[0]), *given[1:]))


LING_NORMS = {
    "self_attn.q_norm": "attention.query_layernorm", "self_attn.k_norm": "attention.key_layernorm",
    "e_score_correction_bias": "expert_bias",
}  # fmt: skip
LING_TWIN = {
    "num_key_value_heads": 2, "head_dim": 16, "use_qk_norm": True, "moe_intermediate_size": 32, "n_routed_experts": 8,
    "first_k_dense_replace": 1, "num_experts_per_tok": 3, "norm_topk_prob": True,
}  # fmt: skip
WHOLE_HEADS = {"rope_theta": 8e6, "rope_type": "default", "partial_rotary_factor": 1.0}


def _of_ling(state: State) -> State:
    return _experts_apart(_fused("attention.query_key_value", 1)(state))


PUZZLE = {
    "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 16, "head_dim": 16,
    "layers_block_type": ["mamba", "moe", "attention", "mlp", "moe", "mamba", "attention"], "n_routed_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 40,
    "moe_latent_size": 24, "routed_scaling_factor": 1.5, "num_key_value_heads": 2,
}  # fmt: skip
MIXTURE: dict[str, Any] = {name: PUZZLE[name] for name in (
    "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "moe_shared_expert_intermediate_size",
    "moe_latent_size")}  # fmt: skip
BLOCKS: list[dict[str, Any]] = [
    {"block_type": "mamba", "ssm_state_size": 16},
    {"block_type": "moe", **MIXTURE},
    {"block_type": "attention", "sliding_window": 20},
    {"block_type": "mlp", "intermediate_size": 40},
    {"block_type": "moe", **MIXTURE, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
     "moe_latent_size": None},
    {"block_type": "mamba", "ssm_state_size": 8},
    {"block_type": "attention"},
]  # fmt: skip


def _of_blocks(model: Any) -> None:
    """With blocks of sizes of their own, and windows."""
    generator = torch.Generator().manual_seed(4)
    for layer, block in zip(model.model.layers, BLOCKS, strict=True):
        if layer.block_type != "full_attention":
            own = {"num_local_experts" if name == "n_routed_experts" else name: each for name, each in block.items()}
            config = type(model.config)(**model.config.to_dict() | own)
            layer.mixer = type(layer.mixer)(config, layer_idx=layer.layer_idx).eval()
            for name, tensor in (*layer.mixer.named_parameters(), *layer.mixer.named_buffers()):
                tensor.data.normal_(0, 0.5 if "bias" in name else tensor.shape[-1] ** -0.5, generator=generator)
        if window := block.get("sliding_window"):
            layer.register_forward_pre_hook(partial(_hide_far, window), with_kwargs=True)


def _hide_far(window: int, _: Any, given: tuple[Tensor], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    count = given[0].shape[1]
    seen = torch.ones(count, count, dtype=torch.bool).tril().triu(1 - window)
    mask = torch.zeros(count, count).masked_fill(~seen, float("-inf"))
    return given, named | {"attention_mask": mask[None, None]}


def _puzzle(config: dict[str, Any]) -> dict[str, Any]:
    kept = (
        "vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "mamba_num_heads",
        "mamba_head_dim", "n_groups", "chunk_size", "conv_kernel", "layer_norm_epsilon", "use_bias",
        "use_conv_bias", "mlp_bias", "mlp_hidden_act", "attention_bias", "max_position_embeddings", "n_shared_experts",
        "routed_scaling_factor", "norm_topk_prob", "tie_word_embeddings",
    )  # fmt: skip
    return {name: config[name] for name in kept} | {
        "block_configs": BLOCKS, "num_hidden_layers": len(BLOCKS), "hybrid_override_pattern": "ME*-EM*",
        "mtp_block_configs": [BLOCKS[2], BLOCKS[1]], "mtp_hybrid_override_pattern": "*E",
        "model_type": "nemotron_h_puzzle", "num_nextn_predict_layers": 1,
        "blockwise_members": ["block_type", "ssm_state_size", "sliding_window", "intermediate_size", *MIXTURE],
    }  # fmt: skip


def _of_puzzle(state: State) -> State:
    found = State()
    for name, tensor in state.items():
        start, stacked, which = name.partition("mixer.experts.")
        if stacked:
            found |= {f"{start}{stacked}{index}.{which}.weight": each for index, each in enumerate(tensor)}
        else:
            found[name] = tensor
    return found | {"mtp.layers.0.norm.weight": torch.ones(8)}


LONGCAT = {
    "num_layers": 2, "num_hidden_layers": 4, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 32, "moe_topk": 3,
    "zero_expert_num": 4, "routed_scaling_factor": 1.5, "head_dim": 8, "q_lora_rank": 24, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 8,
    "eos_token_id": ngram_twin.END,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e6, "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                        "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1},
}  # fmt: skip


def _longcat_lite(config: dict[str, Any]) -> dict[str, Any]:
    theirs = (
        "num_layers", "ffn_hidden_size", "expert_ffn_hidden_size", "moe_topk", "zero_expert_num", "q_lora_rank",
        "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_routed_experts",
        "routed_scaling_factor",
    )  # fmt: skip
    found = _plain(config, **{name: config[name] for name in theirs}, model_type="longcat_flash_ngram")
    for name in ("intermediate_size", "num_hidden_layers", "num_key_value_heads", "hidden_act"):
        found.pop(name, None)
    rope = {name: each for name, each in config["rope_parameters"].items() if name != "rope_theta"}
    return found | {
        "rope_scaling": rope, "attention_method": "MLA", "mla_scale_q_lora": True, "mla_scale_kv_lora": True,
        "zero_expert_type": "identity", "emb_neighbor_num": ngram_twin.NEIGHBOURS, "emb_split_num": ngram_twin.SPLITS,
        "ngram_vocab_size_ratio": ngram_twin.RATIO, "router_bias": False,
    }  # fmt: skip


def _of_longcat_lite(state: State) -> State:
    return _experts_apart(state) | {"model.mtp.layers.0.eh_proj.weight": torch.ones(8)}


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
    "chatglm": Published(
        "ChatGLMModel",
        _twin("Glm", num_key_value_heads=2, head_dim=8, attention_bias=True, rope_parameters={
            "rope_type": "default", "rope_theta": 20_000.0, "partial_rotary_factor": 0.5}),
        CHATGLM_NAMES, _chatglm, _fused("self_attention.query_key_value", 1),
    ),
    "orion": Published(
        "OrionForCausalLM",
        _twin("StableLm", num_key_value_heads=2, rope_parameters={
            "rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0}),
        {}, lambda config: _plain(config, rms_norm_eps=config["layer_norm_eps"]),
    ),
    "pangu_embedded": Published(
        "PanguEmbeddedForCausalLM", _twin("Llama", num_key_value_heads=2, attention_bias=True), {},
        lambda config: _plain(config, bias=True),
    ),
    "teleflm": Published(
        "TeleFLMForCausalLM",
        _twin("Granite", **(GRANITE | {"residual_multiplier": 1.0})), {},
        lambda config: _plain(config, use_mup=True, input_mult=3.0, output_mult=2.0, mup_scale_factor=8.0),
    ),
    "step3p5": Published(
        "Step3p5ForCausalLM", TinyModel("Step3p7ForConditionalGeneration", "Step3p7Config", STEP, 0.2), STEP_NAMES,
        _step, _of_step,
    ),
    "step3": Published(
        "Step3TextForCausalLM",
        _twin("Qwen2Moe", **SHARED, num_key_value_heads=1, head_dim=16, num_hidden_layers=3, norm_topk_prob=False,
              mlp_only_layers=[0], rms_norm_eps=1e-5),
        FACTORS, _step_3, _of_step_3, prepare=_factorise,
    ),
    "step3_vl": Published(
        "Step3VLForConditionalGeneration",
        _twin("Qwen2Moe", **SHARED, num_key_value_heads=1, head_dim=16, num_hidden_layers=2, norm_topk_prob=True,
              mlp_only_layers=[1], rms_norm_eps=1e-5, rope_parameters={
                  "rope_type": "llama3", "rope_theta": 5e5, "factor": 2.0, "low_freq_factor": 1.0,
                  "high_freq_factor": 32.0, "original_max_position_embeddings": 64}),
        FACTORS,
        lambda config: {
            "text_config": _step_3(config, rope_scaling=dict(config["rope_parameters"])), "model_type": "step3_vl",
            "image_token_id": 128001, "understand_projector_stride": 2, "projector_bias": False,
            "vision_config": {"num_hidden_layers": 63},
        },
        lambda state: _of_step_3(state) | {f"{name}.weight": torch.ones(8) for name in STEP_3_MEDIA},
        prepare=_factorise,
    ),
    "nemotron_h_puzzle": Published(
        "NemotronHPuzzleForCausalLM", _twin("NemotronH", **PUZZLE), {"model.": "backbone."}, _puzzle, _of_puzzle,
        prepare=_of_blocks,
    ),
    "iquest_loopcoder": Published(
        "IQuestLoopCoderForCausalLM",
        _twin("Llama", num_key_value_heads=2, num_hidden_layers=2, hidden_size=64, rms_norm_eps=1e-5), {},
        lambda config: _plain(config, loop_num=loop_twin.LOOPS, loop_window_size=loop_twin.WINDOW, head_dim=16,
                              attention_bias=False, mlp_bias=False, model_type="iquestloopcoder"),
        prepare=loop_twin.loop,
    ),
    "longcat_flash_ngram": Published(
        "LongcatFlashNgramForCausalLM", _twin("LongcatFlash", **LONGCAT), {}, _longcat_lite, _of_longcat_lite,
        prepare=ngram_twin.embed_ngrams,
    ),
    "exaone": Published("ExaoneForCausalLM", _twin("Llama", num_key_value_heads=2), EXAONE_NAMES, _exaone),
    "deepseek": Published(
        "DeepseekForCausalLM", _twin("Qwen2Moe", **SHARED, norm_topk_prob=False, mlp_only_layers=[0]), SHARED_NAMES,
        lambda config: _shared(config, n_routed_experts=8, n_shared_experts=2, first_k_dense_replace=1,
                               norm_topk_prob=False, moe_layer_freq=1, scoring_func="softmax"),
        _with_plain_shared_experts, prepare=_halve_gates,
    ),
    "bailing_moe": Published(
        "BailingMoeForCausalLM", _twin("Qwen2Moe", **SHARED, norm_topk_prob=True, num_key_value_heads=2),
        SHARED_NAMES | LING_NAMES,
        lambda config: _shared(config, num_experts=8, num_shared_experts=2, norm_topk_prob=True, norm_head=False,
                               first_k_dense_replace=0),
        lambda state: _with_plain_shared_experts(_fused("attention.query_key_value", 1)(state)), prepare=_halve_gates,
    ),
    "bailing_moe_v2": Published(
        "BailingMoeV2ForCausalLM",
        _twin("Glm4Moe", **LING_TWIN, n_shared_experts=1, n_group=4, topk_group=2, routed_scaling_factor=1.5),
        LING_NAMES | LING_NORMS, lambda config: _as_ling(config, partial_rotary_factor=0.5, rotary_dim=8), _of_ling,
    ),
    "bailing_moe_v2_5": _ling_2_5(Ling(period=2), num_hidden_layers=5, q_lora_rank=16),
    "bailing_moe_v2_5_plain": _ling_2_5(  # all that the other has not, and no power of two of heads
        Ling(period=3, rotated=0, groups=1, silu=True, norms=False, qkv_bias=True, bias=True), num_hidden_layers=3,
        num_attention_heads=6, num_key_value_heads=6, q_lora_rank=None, attention_bias=True,
    ),
    "mimo_v2_5": Published(
        "MiMoV2ForCausalLM", _twin("MiMoV2Flash", **MIMO_V2_5), MIMO_V2_NAMES, _mimo_v2_5,
        lambda state: _experts_apart(_fused("self_attn.qkv_proj", 1)(state)),
    ),
    "mimo_v2_5_apart": Published(
        "MiMoV2ForCausalLM", _twin("MiMoV2Flash", **MIMO_V2_5), MIMO_V2_NAMES,
        lambda config: _mimo_v2_5(config) | {"vision_config": {"depth": 1}, "audio_config": {}},
        lambda state: _experts_apart(state) | {f"{name}.weight": torch.ones(8) for name in MIMO_MEDIA},
    ),
    "sarvam_moe": Published(
        "SarvamMoEForCausalLM",
        _twin("Glm4Moe", **LING_TWIN, n_shared_experts=1, n_group=1, topk_group=1, routed_scaling_factor=2.5,
              rope_parameters=WHOLE_HEADS),
        LING_NAMES | LING_NORMS, lambda config: _as_ling(config, moe_shared_expert_intermediate_size=32), _of_ling,
    ),
    "param2_moe": Published(
        "Param2MoEForCausalLM",
        _twin("Glm4Moe", **LING_TWIN, n_shared_experts=2, n_group=4, topk_group=2, routed_scaling_factor=1.5,
              rope_parameters=WHOLE_HEADS),
        LING_NAMES | LING_NORMS, lambda config: _as_ling(config, moe_shared_expert_intermediate_size=64), _of_ling,
    ),
    "sarvam_mla": Published(
        "SarvamMLAForCausalLM",
        _twin("DeepseekV3", q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
              moe_intermediate_size=32, n_routed_experts=8, n_shared_experts=1, n_group=1, topk_group=1,
              num_experts_per_tok=3, first_k_dense_replace=1,
              rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 0.7,
                               "mscale_all_dim": 1.0, "original_max_position_embeddings": 32, "beta_fast": 32,
                               "beta_slow": 1}),
        {}, _sarvam_mla, _experts_apart,
    ),
    "pangu_ultra": Published(
        "PanguUltraMoEForCausalLM",
        _twin("DeepseekV3", q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
              moe_intermediate_size=32, n_routed_experts=8, n_shared_experts=1, n_group=1, topk_group=1,
              num_experts_per_tok=3, first_k_dense_replace=1),
        PANGU_PRO_NAMES, _pangu, _experts_apart, prepare=_add_norms_after_blocks,
    ),
    "pangu_pro": Published(
        "PanguProMoEV2ForCausalLM", _twin("DeepseekV3", **PANGU_PRO), PANGU_PRO_NAMES, _pangu_pro, _experts_apart,
        prepare=_as_pangu_pro,
    ),
    "solar": Published(
        "SolarForCausalLM", _twin("Mistral", num_key_value_heads=2, num_hidden_layers=6, sliding_window=40), {},
        lambda config: _plain(config, **SOLAR, sliding_window=40, attention_bias=False, mlp_bias=False),
        prepare=_skip_layers,
    ),
    "grok_1": Published(
        "Grok1ModelForCausalLM", _twin("Gemma2", **GROK_TWIN), GROK_1_NAMES,
        lambda config: _grok(config, num_experts=4, intermediate_size=24, attn_output_multiplier=0.5,
                             max_attn_value=3.0),
        partial(_of_grok, False), prepare=partial(_as_grok, Scores(cap=3.0), 30.0, 0), logits=lambda x: 0.7 * x,
    ),
    "grok_2": Published(
        "Grok1ForCausalLM", _twin("Gemma2", **GROK_TWIN | {"head_dim": 16, "query_pre_attn_scalar": 16}), GROK_2_NAMES,
        lambda config: _grok(config, num_local_experts=4, moe_intermediate_size=24, residual_moe=True, head_dim=16,
                             attn_logit_softcapping=2.0, router_logit_softcapping=1.5, final_logit_softcapping=5.0,
                             attn_temperature_len=16, sliding_window_size=-1, global_attn_every_n=1, model_type="git",
                             rope_type="original", original_max_position_embeddings=64, scaling_factor=2.0,
                             extrapolation_factor=1.0, attn_factor=1.0, beta_fast=8, beta_slow=1),
        partial(_of_grok, True), prepare=partial(_as_grok, Scores(cap=2.0, grow_after=16), 1.5, 48),
        logits=lambda x: 5.0 * torch.tanh(0.7 * x / 5.0),
    ),
    "arctic": Published(
        "ArcticForCausalLM", _twin("Mixtral", num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
                                   sliding_window=None),
        ARCTIC_NAMES, _arctic, _of_arctic, prepare=_as_arctic,
    ),
    "rnj1": Published(
        "Rnj1ForCausalLM", TinyModel("Gemma3ForCausalLM", "Gemma3TextConfig", SMALL | RNJ, 0.2), {}, _rnj,
        prepare=partial(Scores(chunk=16).put_into, chunked="sliding_attention"),
        logits=lambda x: 3.0 * torch.tanh(x / 3.0),
    ),
    "k2_horizon": Published(
        "K2HorizonForCausalLM",
        _twin("Glm4Moe", **HORIZON_TWIN, rope_parameters=WHOLE_ROTATION | {"partial_rotary_factor": 0.5}),
        HORIZON_NAMES, lambda config: _horizon(config) | {"rope_head_dim": 8}, _rotated_in_halves,
    ),
    "k2_horizon_dense": Published(
        "K2HorizonForCausalLM",
        _twin("Glm4Moe", **HORIZON_TWIN | {"first_k_dense_replace": 3}, rope_parameters=WHOLE_ROTATION), {},
        lambda config: _horizon(config) | {"num_experts": 0, "layernorm_num_groups": 4,
                                           "attention_gate_func": "softplus"},
        prepare=partial(_as_horizon, 4, "softplus", False, 0),
    ),
    "step1": Published(
        "Step1ForCausalLM", _twin("Llama", hidden_size=48, num_attention_heads=6, num_key_value_heads=2),
        {}, _step_1, has_alibi=True, alibi_root=True,
    ),
    "telechat2": Published(
        "TeleChat2ForCausalLM", _twin("Llama", num_key_value_heads=2, attention_bias=True, mlp_bias=True),
        TELECHAT2_NAMES, _telechat2, _of_telechat2, prepare=_drop_inner_biases,
    ),
    "telechat3": Published(
        "TeleChat3ForCausalLM",
        _twin("Llama", num_key_value_heads=2,
              rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0,
                               "original_max_position_embeddings": 32, "attention_factor": 0.07 * math.log(4) + 1}),
        {}, _telechat3,
    ),
    "plamo3": Published(
        "Plamo3ForCausalLM",
        TinyModel(
            "Gemma3ForCausalLM", "Gemma3TextConfig",
            SMALL | {"num_hidden_layers": 4, "sliding_window": 24, "num_key_value_heads": 2, "head_dim": 16,
                     "query_pre_attn_scalar": 16, "hidden_activation": "silu", "tie_word_embeddings": False,
                     "layer_types": ["sliding_attention", "full_attention"] * 2, "pad_token_id": 2},
            0.2,
        ),
        PLAMO3_NAMES, _plamo3, _of_plamo3, prepare=_scale_down_embeddings,
    ),
    "plamo2": Published(
        "Plamo2ForCausalLM",
        TinyModel(
            "Gemma3ForCausalLM", "Gemma3TextConfig",
            SMALL | {"num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 16,
                     "hidden_activation": "silu", "tie_word_embeddings": False, "pad_token_id": 2, "hidden_size": 64,
                     "layer_types": ["full_attention"] * 4},
            0.2,
        ),
        PLAMO2_NAMES, _plamo2, _of_plamo3, prepare=_as_plamo2,
    ),
    "yi": Published(
        "YiForCausalLM", _twin("Llama", num_key_value_heads=2),
        {"input_layernorm": "ln1", "post_attention_layernorm": "ln2"}, _plain,
    ),
    "deci": Published(
        "DeciLMForCausalLM",
        _twin("Llama", num_hidden_layers=5, intermediate_size=512), {}, _deci, _of_deci, prepare=_as_deci,
    ),
    "deci_heads": Published(
        "DeciLMForCausalLM", _twin("Llama", num_key_value_heads=2), {},
        lambda config: _plain(config, num_key_value_heads_per_layer=[2, 2], num_key_value_heads=None),
    ),
    "minicpm": Published("MiniCPMForCausalLM", _twin("Granite", num_key_value_heads=2, **GRANITE), {}, _minicpm),
}  # fmt: skip


OP_BY_OP: dict[str, Published] = {
    "k2_horizon_mova": Published(
        "K2HorizonForCausalLM", _twin("Glm4Moe", **HORIZON_TWIN, rope_parameters=WHOLE_ROTATION), HORIZON_NAMES,
        lambda config: _horizon(config) | {"layernorm_num_groups": 2, "attention_gate_func": "silu",
                                           "mova_num_experts": 6, "mova_num_experts_per_tok": 2,
                                           "query_key_norm": True},
        _experts_apart, prepare=partial(_as_horizon, 2, "silu", True, 6),
    ),
}  # fmt: skip
"""Those that run op by op."""
PUBLISHED |= OP_BY_OP


def twin_of(name: str) -> Any:
    """The twin, a model of transformers."""
    model = tiny_models.make(PUBLISHED[name].twin)
    if (prepare := PUBLISHED[name].prepare) is not None:
        prepare(model)
    return model


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


def _slopes(num_heads: int) -> Tensor:
    """ALiBi's, [num_heads]: powers of 2^(-8/n) for the power of two n below, then odd powers of 2^(-4/n)."""
    whole = 1 << (num_heads.bit_length() - 1)
    between = torch.arange(1, 2 * (num_heads - whole) + 1, 2)
    return 2.0 ** (-torch.cat([8 * torch.arange(1, whole + 1), 4 * between]) / whole)


@torch.inference_mode()
def expected_logits(name: str, model: Any, prompt: list[int], answer: list[int]) -> Tensor:
    """The twin's logits after the prompt and after each token of the answer but the last."""
    ids, published = torch.tensor([prompt + answer[:-1]]), PUBLISHED[name]
    changed: dict[str, Tensor] = {}
    if published.has_alibi:  # at position 0 nothing is rotated
        distances = torch.arange(ids.shape[1]) - torch.arange(ids.shape[1])[:, None]
        lengths = distances.abs().sqrt() if published.alibi_root else distances.abs()
        bias = -_slopes(model.config.num_attention_heads)[:, None, None] * lengths
        causal = bias.masked_fill(distances > 0, float("-inf"))[None]
        changed = {"attention_mask": causal, "position_ids": torch.zeros_like(ids)}
    hidden = model.model(ids, use_cache=False, **changed).last_hidden_state[0, len(prompt) - 1 :]
    head = model.lm_head.weight
    if published.unit_head:
        head = head / head.norm(dim=1, keepdim=True)
    products = hidden @ head.T
    return products if published.logits is None else published.logits(products)
