"""DBRX: layer norms without biases, clipped queries, keys and values, and experts in all layers."""

from headrace.executor.models.arch import ArchSpec, Fused, StackedExperts, WeightNames
from headrace.executor.models.blocks import Routing
from headrace.executor.models.blocks.experts import Experts
from headrace.executor.models.families import Config, Family, NotNativeError
from headrace.executor.models.families._config import (
    activation,
    head_dim_of,
    integer,
    layer_norm,
    llama_like,
    number,
    optional_number,
    rope_section,
)
from headrace.ipc.failure import ModelError

NAMES = WeightNames(
    prefixes=("transformer.", ""),
    layers="blocks",
    embedding="wte",
    final_norm="norm_f",
    attention_norm="norm_attn_norm.norm_1",
    mlp_norm="norm_attn_norm.norm_2",
    query="norm_attn_norm.attn.q_proj",
    key="norm_attn_norm.attn.k_proj",
    value="norm_attn_norm.attn.v_proj",
    output="norm_attn_norm.attn.out_proj",
    router="ffn.router.layer",
    experts="ffn.experts",
)
STACKED = StackedExperts("ffn.experts.mlp.w1", "ffn.experts.mlp.w2", up="ffn.experts.mlp.v1", flat=True)
OWN_NAMES = {
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
    "max_position_embeddings": "max_seq_len",
}

SAVED_THETA = 10000.0
"""The base in the rope_parameters that transformers saves of every published config."""


def build(config: Config) -> ArchSpec:
    config = config.renamed(**OWN_NAMES)
    attention, ffn = config.section("attn_config"), config.section("ffn_config")
    if (power := optional_number(ffn, "moe_normalize_expert_weights")) not in (None, 1.0):
        raise NotNativeError(f"the config's moe_normalize_expert_weights is {power}; supported are 1 and null")
    kv_heads = integer(attention, "kv_n_heads", 1)
    if attention.get("rope_theta") is not None:
        config = _with_base(config, number(attention, "rope_theta"))
    given = "moe_normalize_expert_weights" in ffn
    mixture = Experts(
        integer(ffn, "moe_num_experts", 4),
        Routing(integer(ffn, "moe_top_k", 1), "softmax", renormalise=power is not None or not given),
        integer(ffn, "ffn_hidden_size", 3584),
        activation(ffn.section("ffn_act_fn"), "name", "silu"),
    )
    head_dim = head_dim_of(config)
    rows = {NAMES.query: integer(config, "num_attention_heads"), NAMES.key: kv_heads, NAMES.value: kv_heads}
    return llama_like(
        config | {"num_key_value_heads": kv_heads},
        attention={"clip_qkv": optional_number(attention, "clip_qkv") or None},
        ffn=mixture,
        norm=layer_norm(config, bias=False),
        fused=(Fused("norm_attn_norm.attn.Wqkv", tuple((name, count * head_dim) for name, count in rows.items())),),
        names=NAMES,
        stacked=STACKED,
    )


def _with_base(config: Config, theta: float) -> Config:
    """The config with attn_config's base of the rotation. transformers' class does not read that base, and saves its
    own default beside it. Raises ModelError if another base is given."""
    saved = config.section("rope_parameters")
    if (saved.get("rope_type"), saved.get("rope_theta")) == ("default", SAVED_THETA):
        config = config | {"rope_parameters": None}
    for place in (config, rope_section(config)):
        if (other := optional_number(place, "rope_theta")) not in (None, theta):
            said = f"the config's rope_theta is {other!r}, and {theta!r} in its attn_config"
            raise ModelError(f"{said}; it is one field")
    return config | {"rope_theta": theta}


FAMILY = Family(
    ("DbrxForCausalLM",),
    build,
    ignored={
        "moe_jitter_eps": "training alone",
        "moe_loss_weight": "training alone",
        "uniform_expert_assignment": "training alone",
        "num_key_value_heads": "attn_config has it",
        "hidden_size": "d_model has it",
    },
)
