"""GGUF architectures whose layers keep a state per sequence, by the name in a file's `general.architecture`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from headrace.executor.checkpoints.sources.gguf.architecture import Fields, GGUFArchitecture
from headrace.executor.checkpoints.sources.gguf.dense import Config
from headrace.executor.checkpoints.sources.gguf.mixtures import SIGMOID
from headrace.executor.models.families import plamo2
from headrace.executor.models.families._config import MOST
from headrace.executor.models.families._ssd import quotient
from headrace.ipc.failure import ModelError


def _lfm2(fields: Fields, config: Config) -> dict[str, Any]:
    """Layers without key/value heads are convolutions. The file has the FFN's inner size as it is."""
    heads = fields.integers("attention.head_count_kv", config["num_key_value_heads"])
    fields.expect("attention.layer_norm_epsilon")
    counts = heads if isinstance(heads, list) else [heads] * config["num_hidden_layers"]
    return {
        "layer_types": ["full_attention" if each else "conv" for each in counts],
        "conv_L_cache": fields.count("shortconv.l_cache"),
        "conv_bias": fields.any_layer_holds("shortconv.conv.bias"),
        "norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
    }


def _lfm2_dense(fields: Fields, config: Config) -> dict[str, Any]:
    return {**_lfm2(fields, config), "block_auto_adjust_ff_dim": False}


def _lfm2_moe(fields: Fields, config: Config) -> dict[str, Any]:
    return {
        **_lfm2(fields, config),
        "num_dense_layers": fields.integer("leading_dense_block_count", 0),
        "use_expert_bias": fields.any_layer_holds("exp_probs_b.bias"),
    }


def _mamba2(fields: Fields) -> dict[str, Any]:
    """The whole config: there are no heads of attention and no FFN, of which files have the size 0."""
    fields.expect("attention.head_count", 0)
    fields.expect("attention.head_count_kv", 0)
    fields.expect("feed_forward_length", 0)
    hidden, inner = fields.count("embedding_length"), fields.count("ssm.inner_size")
    heads = fields.count("ssm.time_step_rank", most=MOST["num_attention_heads"])
    return {
        "hidden_size": hidden,
        "num_hidden_layers": fields.count("block_count", most=MOST["num_hidden_layers"]),
        "max_position_embeddings": fields.integer("context_length"),
        "expand": quotient(inner, hidden),
        "num_heads": heads,
        "head_dim": inner // heads,
        "state_size": fields.count("ssm.state_size"),
        "n_groups": fields.count("ssm.group_count", 1),
        "conv_kernel": fields.count("ssm.conv_kernel"),
        "layer_norm_epsilon": fields.number("attention.layer_norm_rms_epsilon"),
        "use_bias": fields.holds("blk.0.ssm_in.bias"),
        "use_conv_bias": fields.holds("blk.0.ssm_conv1d.bias"),
    }


def _mamba(fields: Fields) -> dict[str, Any]:
    """As `_mamba2`. Falcon's are files of the same architecture, whose time steps, B and C are normed."""
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        fields.expect(key, 0)
    hidden, inner = fields.count("embedding_length"), fields.count("ssm.inner_size")
    config: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "expand": quotient(inner, hidden),
        "num_hidden_layers": fields.count("block_count", most=MOST["num_hidden_layers"]),
        "max_position_embeddings": fields.integer("context_length"),
        "state_size": fields.count("ssm.state_size"),
        "time_step_rank": fields.count("ssm.time_step_rank"),
        "conv_kernel": fields.count("ssm.conv_kernel"),
        "layer_norm_epsilon": fields.number("attention.layer_norm_rms_epsilon"),
        "use_bias": fields.holds("blk.0.ssm_in.bias"),
        "use_conv_bias": fields.holds("blk.0.ssm_conv1d.bias"),
    }
    if fields.flag("ssm.dt_b_c_rms", False):
        config |= {"architectures": ["FalconMambaForCausalLM"], "model_type": "falcon_mamba"}
    return config


def _delta(fields: Fields, config: Config) -> dict[str, Any]:
    """Qwen 3 Next's linear attention."""
    heads, inner = fields.count("ssm.time_step_rank", most=MOST["num_attention_heads"]), fields.count("ssm.inner_size")
    return {
        "linear_num_value_heads": heads,
        "linear_value_head_dim": inner // heads,
        "linear_num_key_heads": fields.count("ssm.group_count", most=MOST["num_attention_heads"]),
        "linear_key_head_dim": fields.count("ssm.state_size"),
        "linear_conv_kernel_dim": fields.count("ssm.conv_kernel"),
        "full_attention_interval": fields.count("full_attention_interval", 4),
        "shared_expert_intermediate_size": fields.integer("expert_shared_feed_forward_length", 0),
    }


def _delta_in_turn(fields: Fields, config: Config) -> dict[str, Any]:
    """Qwen 3.5's, whose heads of values the converter reorders."""
    return {**_delta(fields, config), "value_heads_in_turn": True}


def _ssd(fields: Fields) -> dict[str, Any]:
    """Sizes of Mamba 2's mixers that stand beside attention."""
    heads, inner = fields.count("ssm.time_step_rank", most=MOST["num_attention_heads"]), fields.count("ssm.inner_size")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_expand": quotient(inner, fields.count("embedding_length")),
        "mamba_d_state": fields.count("ssm.state_size"),
        "mamba_n_groups": fields.count("ssm.group_count", 1),
        "mamba_d_conv": fields.count("ssm.conv_kernel"),
        "mamba_proj_bias": fields.any_layer_holds("ssm_in.bias"),
        "mamba_conv_bias": fields.any_layer_holds("ssm_conv1d.bias"),
    }


def _granite_hybrid(fields: Fields, config: Config) -> dict[str, Any]:
    """Granite 4, or Bamba, which alone rotates."""
    rotates = fields.flag("rope.scaling.finetuned", True)
    recurrent = [fields.holds(f"blk.{layer}.ssm_in.weight") for layer in range(config["num_hidden_layers"])]
    found = _ssd(fields) | {"attention_bias": fields.any_layer_holds("attn_q.bias")}
    if fields.any_layer_holds("ffn_gate_inp.weight"):
        fields.expect("expert_weights_norm", True)
    elif not fields.has("attention.scale"):
        attending = [layer for layer, each in enumerate(recurrent) if not each]
        own = {"attn_layer_indices": attending, "mlp_bias": fields.any_layer_holds("ffn_down.bias")}
        return found | own | {"architectures": ["BambaForCausalLM"], "model_type": "bamba"}
    return found | {
        "layer_types": ["linear_attention" if each else "full_attention" for each in recurrent],
        "position_embedding_type": "rope" if rotates else "nope",
        "attention_multiplier": fields.number("attention.scale", 0.0) or config["head_dim"] ** -0.5,
        "embedding_multiplier": fields.number("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": fields.number("residual_scale", 0.0) or 1.0,
        "logits_scaling": fields.number("logit_scale", 0.0) or 1.0,
        "num_local_experts": fields.integer("expert_count", 0),
        "num_experts_per_tok": fields.integer("expert_used_count", 0),
        "shared_intermediate_size": fields.integer("expert_shared_feed_forward_length", config["intermediate_size"]),
    }


def _falcon_h1(fields: Fields, config: Config) -> dict[str, Any]:
    """Multipliers are part of the weights, and nothing says what they are. Raises ModelError for files with biases of
    what reads a multiplied input."""
    if fields.any_layer_holds("attn_q.bias"):
        raise ModelError(
            f"{fields.header.path}: attn_q.bias of a Falcon-H1 is not supported: the converter multiplies it, as it "
            "does the matrix, the model adds it as it is, and the file does not have the multiplier"
        )
    return _ssd(fields) | {
        "multipliers_in_weights": True,
        "mamba_d_ssm": fields.count("ssm.inner_size"),
        "mamba_rms_norm": fields.any_layer_holds("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": fields.any_layer_holds("ssm_out.bias"),
        "mlp_bias": fields.any_layer_holds("ffn_down.bias"),
    }


def _nemotron_h(fields: Fields, config: Config) -> dict[str, Any]:
    """What a layer is, its tensors tell."""
    fields.has("attention.layer_norm_epsilon")  # of layers that only predict, which are not run
    fields.expect("rope.scaling.finetuned", False)  # nothing is rotated
    recurrent, inner = _ssd(fields), config["intermediate_size"]
    kinds = []
    for layer in range(config["num_hidden_layers"]):
        held = {kind: fields.holds(f"blk.{layer}.{name}.weight") for kind, name in NEMOTRON_LAYERS.items()}
        kinds.append(next((kind for kind, holds in held.items() if holds), "mlp"))
    return {
        "layers_block_type": kinds,
        "rope_theta": None,
        "intermediate_size": max(inner) if isinstance(inner, list) else inner,
        "layer_norm_epsilon": fields.number("attention.layer_norm_rms_epsilon"),
        "mamba_num_heads": recurrent["mamba_n_heads"],
        "mamba_head_dim": recurrent["mamba_d_head"],
        "ssm_state_size": recurrent["mamba_d_state"],
        "n_groups": recurrent["mamba_n_groups"],
        "conv_kernel": recurrent["mamba_d_conv"],
        "use_bias": recurrent["mamba_proj_bias"],
        "use_conv_bias": recurrent["mamba_conv_bias"],
        "attention_bias": fields.any_layer_holds("attn_q.bias"),
        "mlp_bias": fields.any_layer_holds("ffn_down.bias"),
        "moe_shared_expert_intermediate_size": fields.integer("expert_shared_feed_forward_length", 0),
        "moe_latent_size": fields.integer("moe_latent_size", 0) or None,
    }


def _rwkv7(fields: Fields) -> dict[str, Any]:
    """The whole config, as `_mamba2`. Each token is mixed with the one before it, in both parts of a layer."""
    fields.expect("attention.head_count", 0)
    fields.expect("token_shift_count", 2)
    ranks = {
        "decay_low_rank_dim": "decay",
        "a_low_rank_dim": "iclr",
        "v_low_rank_dim": "value_residual_mix",
        "gate_low_rank_dim": "gate",
    }
    return {
        "hidden_size": fields.count("embedding_length"),
        "num_hidden_layers": fields.count("block_count", most=MOST["num_hidden_layers"]),
        "max_position_embeddings": fields.integer("context_length"),
        "head_dim": fields.count("wkv.head_size"),
        "intermediate_size": fields.count("feed_forward_length"),
        "norm_eps": fields.number("attention.layer_norm_epsilon"),
        "norm_bias": fields.holds("output_norm.bias"),
        **{key: fields.count(f"attention.{own}_lora_rank") for key, own in ranks.items()},
    }


def _period(fields: Fields, layers: list[int], count: int) -> tuple[int, int]:
    """(period, offset) of these layers among `count`. Raises ModelError if they do not recur."""
    if not layers:
        return count + 1, count
    offset = layers[0]
    period = layers[1] - offset if len(layers) > 1 else max(count, offset + 1)
    if layers != list(range(offset, count, period)) or offset >= period:
        raise ModelError(f"{fields.header.path}: layers {layers} of {count} are of another kind, which does not recur")
    return period, offset


def _jamba(fields: Fields, config: Config) -> dict[str, Any]:
    count = config["num_hidden_layers"]
    found: dict[str, Any] = {}
    for kind, tensor in (("attn", "attn_q"), ("expert", "ffn_gate_inp")):
        layers = [layer for layer in range(count) if fields.holds(f"blk.{layer}.{tensor}.weight")]
        found[f"{kind}_layer_period"], found[f"{kind}_layer_offset"] = _period(fields, layers, count)
    hidden, inner = fields.count("embedding_length"), fields.count("ssm.inner_size")
    if inner % hidden:
        raise ModelError(f"{fields.header.path}: ssm.inner_size {inner} is no multiple of embedding_length {hidden}")
    return found | {
        "mamba_expand": inner // hidden,
        "mamba_d_state": fields.count("ssm.state_size"),
        "mamba_dt_rank": fields.count("ssm.time_step_rank"),
        "mamba_d_conv": fields.count("ssm.conv_kernel"),
        "mamba_proj_bias": fields.any_layer_holds("ssm_in.bias"),
        "mamba_conv_bias": fields.any_layer_holds("ssm_conv1d.bias"),
    }


def _kimi_linear(fields: Fields, config: Config) -> dict[str, Any]:
    """Layers without attention's tensors are Kimi Delta Attention, with as many heads."""
    count, rope_dim = config["num_hidden_layers"], fields.integer("rope.dimension_count")
    delta = [layer + 1 for layer in range(count) if fields.holds(f"blk.{layer}.ssm_conv1d_q.weight")]
    full = [layer + 1 for layer in range(count) if layer + 1 not in delta]
    return {
        "linear_attn_config": {
            "kda_layers": delta,
            "full_attn_layers": full,
            "num_heads": config["num_attention_heads"],
            "head_dim": fields.count("kda.head_dim"),
            "short_conv_kernel_size": fields.count("ssm.conv_kernel"),
        },
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": fields.integer("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": (rank := fields.integer("attention.kv_lora_rank")),
        "qk_nope_head_dim": fields.integer("attention.key_length_mla") - rope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": fields.integer("attention.value_length_mla"),
        "head_dim": rank + rope_dim,
    }


def _plamo2(fields: Fields, config: Config) -> dict[str, Any]:
    """Layers without key/value heads are recurrent; one of every `mamba_step` layers attends. Raises ModelError."""
    count, path = config["num_hidden_layers"], fields.header.path
    heads, inner = fields.count("ssm.time_step_rank", most=MOST["num_attention_heads"]), fields.count("ssm.inner_size")
    fields.expect("ssm.group_count", 0, 1)  # all heads share B and C
    if inner != heads * config["head_dim"]:
        raise ModelError(
            f"{path}: ssm.inner_size is {inner}, and {heads} heads (ssm.time_step_rank) of {config['head_dim']} "
            f"(attention.key_length) are {heads * config['head_dim']}"
        )
    found = fields.integers("attention.head_count_kv", config["num_key_value_heads"])
    attends = [bool(each) for each in found] if isinstance(found, list) else [bool(found)] * count
    steps = (step for step in range(2, 2 * count + 1) if plamo2.attends(count, step) == attends)
    if (step := next(steps, None)) is None:
        layers = [index for index, each in enumerate(attends) if each]
        raise ModelError(f"{path}: layers {layers} of {count} attend (attention.head_count_kv), which do not recur")
    return {
        "hidden_size_per_head": config["head_dim"],
        "mamba_num_heads": heads,
        "mamba_d_state": fields.count("ssm.state_size"),
        "mamba_d_conv": fields.count("ssm.conv_kernel"),
        "mamba_step": step,
    }


NEMOTRON_LAYERS = {"mamba": "ssm_in", "attention": "attn_q", "moe": "ffn_gate_inp"}
"""Kinds of Nemotron-H's layers with a tensor that each alone has."""
GRANITE_SHARED = {
    f"ffn_{part}{kind}": f"shared_mlp.{part}_proj" for part in ("gate", "up", "down") for kind in ("", "_shexp")
}
"""Names of Granite's shared expert, which is its FFN where it has no others."""
RWKV_LOW = {"w": True, "a": True, "v": True, "g": False}
"""The products of two matrices of RWKV-7, and whether a bias is added."""
RWKV_NAMES = {
    "attn_norm": "attn_norm",
    "attn_norm_2": "ffn_norm",
    "time_mix_receptance": "attn.r_proj",
    "time_mix_key": "attn.k_proj",
    "time_mix_value": "attn.v_proj",
    "time_mix_output": "attn.o_proj",
    "time_mix_ln": "attn.g_norm",
    **{f"time_mix_{each}.weight": f"attn.{each}" for each in ("k_k", "k_a", "r_k")},
    **{f"time_mix_{each}1": f"attn.{each}_lora.lora.0" for each in RWKV_LOW},
    **{f"time_mix_{each}2": f"attn.{each}_lora.lora.2" for each in RWKV_LOW},
    **{f"time_mix_{each}0.weight": f"attn.{each}_lora.lora.2.bias" for each, biased in RWKV_LOW.items() if biased},
    "channel_mix_key": "ffn.key",
    "channel_mix_value": "ffn.value",
    "channel_mix_lerp_k.weight": "ffn.x_k",
}
_hybrid = functools.partial(GGUFArchitecture, some_attend=True)
_hybrid_mixture = functools.partial(_hybrid, is_mixture=True)
RECURRENT: Mapping[str, GGUFArchitecture] = MappingProxyType(
    {
        "falcon-h1": GGUFArchitecture("FalconH1ForCausalLM", "falcon_h1", extra=_falcon_h1),
        "granitehybrid": _hybrid_mixture(
            "GraniteMoeHybridForCausalLM",
            "granitemoehybrid",
            permuted=True,
            extra=_granite_hybrid,
            may_be_dense=True,
            always_renormalises=True,
            names=GRANITE_SHARED,
        ),
        "jamba": _hybrid_mixture("JambaForCausalLM", "jamba", extra=_jamba, always_renormalises=False),
        "kimi-linear": _hybrid_mixture(
            "KimiLinearForCausalLM",
            "kimi_linear",
            extra=_kimi_linear,
            routes_in_groups=True,
            renormalised=True,
            gating=(0, SIGMOID),
        ),
        "lfm2": _hybrid("Lfm2ForCausalLM", "lfm2", extra=_lfm2_dense),
        "lfm2moe": _hybrid_mixture(
            "Lfm2MoeForCausalLM", "lfm2_moe", extra=_lfm2_moe, always_renormalises=True, gating=(0, SIGMOID)
        ),
        "mamba": GGUFArchitecture("MambaForCausalLM", "mamba", whole=_mamba),
        "mamba2": GGUFArchitecture("Mamba2ForCausalLM", "mamba2", whole=_mamba2),
        "nemotron_h": _hybrid("NemotronHForCausalLM", "nemotron_h", permuted=True, extra=_nemotron_h),
        "nemotron_h_moe": _hybrid_mixture(
            "NemotronHForCausalLM",
            "nemotron_h",
            permuted=True,
            extra=_nemotron_h,
            routes_in_groups=True,
            gating=(0, SIGMOID),
        ),
        "plamo2": _hybrid("Plamo2ForCausalLM", "plamo2", key_heads_differ=True, extra=_plamo2, offset_norms=True),
        "qwen3next": _hybrid_mixture(
            "Qwen3NextForCausalLM", "qwen3_next", extra=_delta, offset_norms=True, always_renormalises=True
        ),
        "qwen35": _hybrid("Qwen3_5ForCausalLM", "qwen3_5_text", extra=_delta_in_turn, offset_norms=True),
        "qwen35moe": _hybrid_mixture(
            "Qwen3_5MoeForCausalLM",
            "qwen3_5_moe_text",
            extra=_delta_in_turn,
            offset_norms=True,
            always_renormalises=True,
        ),
        "rwkv7": GGUFArchitecture(
            "RWKV7ForCausalLM",
            "rwkv7",
            whole=_rwkv7,
            names=RWKV_NAMES,
            stacks={"time_mix_lerp_fused.weight": tuple(f"attn.x_{each}" for each in "rwkvag")},
        ),
    }
)
