"""StarCoder 2: layer norms, biases, sliding windows, an FFN without a gate."""

from headrace.executor.models.arch import ArchSpec, WeightNames
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    Positions,
    biases,
    flag,
    head_dim_of,
    integer,
    layer_norm,
    llama_like,
    optional_integer,
    plain,
    rope,
)

NAMES = WeightNames(up="mlp.c_fc", down="mlp.c_proj")


def build(config: Config) -> ArchSpec:
    head_dim = head_dim_of(config)
    layer = Positions(rope(config, head_dim, 10000.0), optional_integer(config, "sliding_window"))
    bias = flag(config, "use_bias", True)
    return llama_like(
        config,
        positions=[layer] * integer(config, "num_hidden_layers"),
        head_dim=head_dim,
        attention=biases(config, "use_bias", True),
        ffn=plain(config, integer(config, "intermediate_size"), "hidden_act", "gelu_pytorch_tanh", bias=bias),
        default_context=4096,
        tied_head=True,
        norm=layer_norm(config, "norm_epsilon"),
        names=NAMES,
    )


FAMILY = Family(
    ("Starcoder2ForCausalLM",),
    build,
    ignored={"activation_function": "hidden_act is what the model's code reads"},
    assumes={"mlp_type": ("default",), "norm_type": ("layer_norm",)},
)
