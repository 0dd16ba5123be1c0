"""Phi 3, 3.5 and 4: Llama's shape with fused projections, LongRoPE; the 4 mini has partial rotary positions."""

from headrace.executor.models.arch import ArchSpec, Fused
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    Positions,
    head_dim_of,
    integer,
    llama_like,
    optional_integer,
    rope,
)


def build(config: Config) -> ArchSpec:
    head_dim, inner = head_dim_of(config), integer(config, "intermediate_size")
    queries = integer(config, "num_attention_heads") * head_dim
    keys = integer(config, "num_key_value_heads", integer(config, "num_attention_heads")) * head_dim
    layer = Positions(rope(config, head_dim, 10000.0), optional_integer(config, "sliding_window"))
    projections = (("self_attn.q_proj", queries), ("self_attn.k_proj", keys), ("self_attn.v_proj", keys))
    return llama_like(
        config,
        positions=[layer] * integer(config, "num_hidden_layers"),
        head_dim=head_dim,
        default_context=4096,
        fused=(
            Fused("self_attn.qkv_proj", projections),
            Fused("mlp.gate_up_proj", (("mlp.gate_proj", inner), ("mlp.up_proj", inner))),
        ),
    )


FAMILY = Family(("Phi3ForCausalLM",), build, assumes={"interpolate_factor": (1,), "full_attn_mod": (1,)})
