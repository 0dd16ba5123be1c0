"""InternLM 3: Llama's shape with a head_dim independent of the hidden size, and biases if the config has them."""

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import dense, flag, llama_like


def build(config: Config) -> ArchSpec:
    bias = flag(config, "bias", False)
    return llama_like(
        config,
        attention={"bias": flag(config, "qkv_bias", False), "output_bias": bias},
        ffn=dense(config, bias=bias),
        default_context=32768,
    )


FAMILY = Family(("InternLM3ForCausalLM",), build)
