"""SmolLM 3: Llama's shape with layers that have no rotary positions, by default every fourth."""

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    Positions,
    biases,
    dense,
    flag,
    head_dim_of,
    integer,
    layer_types,
    llama_like,
    rope,
    rotated_layers,
    used_window,
)


def build(config: Config) -> ArchSpec:
    num_layers = integer(config, "num_hidden_layers")
    head_dim = head_dim_of(config)
    rotary = rope(config, head_dim, 2_000_000.0)
    interval = integer(config, "no_rope_layer_interval", 4)
    has_rope = rotated_layers(config, [(i + 1) % max(1, interval) != 0 for i in range(num_layers)])
    window = used_window(config)
    default = ["sliding_attention" if window and not rotates else "full_attention" for rotates in has_rope]
    positions = [
        Positions(rotary if rotates else None, window if window and kind == "sliding_attention" else None)
        for rotates, kind in zip(has_rope, layer_types(config, num_layers, default), strict=False)
    ]
    return llama_like(
        config,
        positions=positions,
        head_dim=head_dim,
        default_context=32768,
        tied_head=True,
        attention=biases(config, "attention_bias", False),
        ffn=dense(config, bias=flag(config, "mlp_bias", False)),
    )


FAMILY = Family(("SmolLM3ForCausalLM",), build)
