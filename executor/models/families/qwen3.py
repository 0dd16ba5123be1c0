"""Qwen 3, dense: Llama's shape with a norm of each head's query and key."""

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import flag, head_dim_of, llama_like, qwen_positions, rope


def build(config: Config) -> ArchSpec:
    head_dim = head_dim_of(config, 128)
    bias = flag(config, "attention_bias", False)
    return llama_like(
        config,
        positions=qwen_positions(config, rope(config, head_dim, 10000.0)),
        head_dim=head_dim,
        attention={"bias": bias, "output_bias": bias, "qk_norm": "head"},
        default_context=32768,
    )


FAMILY = Family(("Qwen3ForCausalLM",), build, assumes={"use_qk_norm": (True,)})
