"""Seed-OSS: Llama's shape with query, key and value biases."""

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import dense, flag, head_dim_of, llama_like


def build(config: Config) -> ArchSpec:
    return llama_like(
        config,
        head_dim=head_dim_of(config, 128),
        attention={
            "bias": flag(config, "attention_bias", True),
            "output_bias": flag(config, "attention_out_bias", False),
        },
        ffn=dense(config, bias=flag(config, "mlp_bias", False)),
        default_context=524288,
    )


FAMILY = Family(("SeedOssForCausalLM",), build)
