"""Nemotron 3 and 4, Minitron: layer norms whose weights are stored minus 1, squared ReLU, partial rotary positions."""

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import biases, flag, integer, layer_norm, llama_like, plain


def build(config: Config) -> ArchSpec:
    bias = flag(config, "mlp_bias", False)
    return llama_like(
        {"partial_rotary_factor": 0.5} | config,
        attention=biases(config, "attention_bias", False),
        ffn=plain(config, integer(config, "intermediate_size"), "hidden_act", "relu2", bias=bias),
        default_context=4096,
        norm=layer_norm(config, "norm_eps", weight_offset=1.0),
    )


FAMILY = Family(("NemotronForCausalLM",), build)
