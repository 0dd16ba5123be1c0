"""GGUF architectures whose layers keep a state per sequence, by the name in a file's `general.architecture`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from headrace.executor.checkpoints.sources.gguf.architecture import Fields, GGUFArchitecture
from headrace.executor.checkpoints.sources.gguf.dense import Config
from headrace.executor.checkpoints.sources.gguf.mixtures import SIGMOID
from headrace.executor.models.families._config import MOST


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
        "expand": inner / hidden,
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
        "expand": inner / hidden,
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


_QWEN: dict[str, Any] = {"offset_norms": True, "some_attend": True}
_QWEN_EXPERTS: dict[str, Any] = {**_QWEN, "is_mixture": True, "always_renormalises": True}
RECURRENT: Mapping[str, GGUFArchitecture] = MappingProxyType(
    {
        "lfm2": GGUFArchitecture("Lfm2ForCausalLM", "lfm2", extra=_lfm2_dense, some_attend=True),
        "lfm2moe": GGUFArchitecture(
            "Lfm2MoeForCausalLM",
            "lfm2_moe",
            is_mixture=True,
            extra=_lfm2_moe,
            always_renormalises=True,
            gating=(0, SIGMOID),
            some_attend=True,
        ),
        "mamba": GGUFArchitecture("MambaForCausalLM", "mamba", whole=_mamba),
        "mamba2": GGUFArchitecture("Mamba2ForCausalLM", "mamba2", whole=_mamba2),
        "qwen3next": GGUFArchitecture("Qwen3NextForCausalLM", "qwen3_next", extra=_delta, **_QWEN_EXPERTS),
        "qwen35": GGUFArchitecture("Qwen3_5ForCausalLM", "qwen3_5_text", extra=_delta_in_turn, **_QWEN),
        "qwen35moe": GGUFArchitecture(
            "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", extra=_delta_in_turn, **_QWEN_EXPERTS
        ),
    }
)
