"""GGUF mixtures whose layers with a window have other heads than full attention, and another rotation."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from headrace.executor.checkpoints.sources.gguf.architecture import Fields
from headrace.executor.checkpoints.sources.gguf.dense import Config
from headrace.ipc.failure import ModelError

KINDS = ("full_attention", "sliding_attention")
SWIGLU_LIMITS = MappingProxyType({"swiglu_limits": "exp", "swiglu_limits_shared": "shexp"})


def mimo2(fields: Fields, config: Config) -> dict[str, Any]:
    """MiMo-V2. The file has the published window, the tokens before a token; the token itself comes besides, as in its
    authors' code. Older files lack the factor of values, which is then that of the published model."""
    types, sparse = _kinds_of_layers(fields, config), _sparse_layers(fields, config)
    keys = _of_each_kind(fields, "attention.head_count_kv", types)
    sinks = {kind: _any_holds(fields, types, kind, "attn_sinks.weight") for kind in KINDS}
    rotated = config.get("partial_rotary_factor", 1.0)
    found = {
        **_two_rotations(fields, config, rotated, rotated),
        "layer_types": types,
        "mlp_layer_types": sparse,
        "v_head_dim": fields.count("attention.value_length", config["head_dim"]),
        "num_key_value_heads": keys.get("full_attention", keys.get("sliding_attention")),
        "swa_num_key_value_heads": keys.get("sliding_attention"),
        "sliding_window_size": fields.count("attention.sliding_window"),
        "add_full_attention_sink_bias": sinks["full_attention"],
        "add_swa_attention_sink_bias": sinks["sliding_attention"],
        "attention_bias": fields.holds("blk.0.attn_q.bias"),
    }
    if config.get("rope_scaling") is not None:
        raise _refused(fields, f"the rotation is scaled, and {fields.prefix} is computed without that")
    if fields.has("attention.value_scale"):
        found["attention_value_scale"] = fields.number("attention.value_scale")
    return found


def step35(fields: Fields, config: Config) -> dict[str, Any]:
    """Step 3.5, in whose full attention half the dimensions are rotated, and Llama 3's scaling alone may hold. The
    factors in the file are those of heads that are rotated as a whole, and tell the scaling's parameters."""
    types, head_dim = _kinds_of_layers(fields, config), config["head_dim"]
    heads, keys = (_of_each_kind(fields, f"attention.{each}", types) for each in ("head_count", "head_count_kv"))
    if len(set(keys.values())) > 1:
        raise _refused(fields, f"layers have {sorted(set(keys.values()))} key/value heads; one number is computed")
    scaling = config.get("rope_scaling")
    if scaling is not None and scaling["rope_type"] != "llama3":
        raise _refused(fields, f"the rotation is scaled by {scaling['rope_type']}; Llama 3's factors are computed")
    rotated = fields.integer("rope.dimension_count", head_dim)
    sliding = fields.integer("rope.dimension_count_swa", rotated)
    limits = {key: fields.floats(f"swiglu_clamp_{own}") for key, own in SWIGLU_LIMITS.items()}
    return {
        **_two_rotations(fields, config, rotated // 2 / head_dim, sliding / head_dim),
        **{key: each for key, each in limits.items() if each is not None},
        "layer_types": types,
        "mlp_layer_types": _sparse_layers(fields, config),
        "num_attention_heads": heads.get("full_attention", heads.get("sliding_attention")),
        "num_sliding_attention_heads": heads.get("sliding_attention"),
        "num_key_value_heads": next(iter(keys.values())),
        "sliding_window": fields.count("attention.sliding_window"),
        "share_expert_dim": fields.count("expert_shared_feed_forward_length"),
        "routed_scaling_factor": fields.number("expert_weights_scale", 0.0) or 1.0,
        "attention_bias": fields.any_layer_holds("attn_q.bias"),
        "num_nextn_predict_layers": fields.integer("nextn_predict_layers", 0),
        "use_head_wise_attn_gate": fields.any_layer_holds("attn_gate.weight"),
    }


def _kinds_of_layers(fields: Fields, config: Config) -> list[str]:
    """`layer_types`. Lists have entries of further layers, too, which predict. Raises ModelError."""
    count = config["num_hidden_layers"]
    types = fields.sliding_layers(count).get("layer_types", [])
    if len(types) < count:
        raise _refused(fields, f"{fields.prefix}.attention.sliding_window_pattern has {len(types)} of {count} layers")
    return types[:count]


def _of_each_kind(fields: Fields, key: str, types: list[str]) -> dict[str, int]:
    """A number by kind of layer. Raises ModelError if it differs in layers of one kind."""
    given = fields.integers(key)
    values = given if isinstance(given, list) else [given] * len(types)
    found = dict(zip(types, values, strict=False))
    if any(found[kind] != each for kind, each in zip(types, values, strict=False)):
        raise _refused(fields, f"{fields.prefix}.{key} differs in layers of one kind of attention")
    return found


def _sparse_layers(fields: Fields, config: Config) -> list[str]:
    """`mlp_layer_types`, as the tensors say; the number of the dense ones before must agree."""
    routed = [fields.holds(f"blk.{index}.ffn_gate_inp.weight") for index in range(config["num_hidden_layers"])]
    fields.expect("leading_dense_block_count", routed.index(True) if any(routed) else len(routed))
    fields.expect("moe_every_n_layers", 0, 1)
    return ["sparse" if each else "dense" for each in routed]


def _any_holds(fields: Fields, types: list[str], kind: str, tensor: str) -> bool:
    return any(each == kind and fields.holds(f"blk.{index}.{tensor}") for index, each in enumerate(types))


def _two_rotations(fields: Fields, config: Config, full: float, sliding: float) -> dict[str, Any]:
    """The rotations by kind of layer, of which that of full attention may be scaled. full, sliding: the share of a
    head's dimensions that is rotated."""
    theta = config["rope_theta"]
    scaling = config.get("rope_scaling") or {"rope_type": "default"}
    own = {"rope_type": "default", "rope_theta": fields.number("rope.freq_base_swa", theta)}
    rotations = {
        "full_attention": {**scaling, "rope_theta": theta, "partial_rotary_factor": full},
        "sliding_attention": {**own, "partial_rotary_factor": sliding},
    }
    left_out = dict.fromkeys(("rope_theta", "rope_scaling", "partial_rotary_factor"))
    return {"rope_parameters": rotations, **left_out}


def _refused(fields: Fields, why: str) -> ModelError:
    return ModelError(f"{fields.header.path}: {why}")
