"""Qwen 2 and 2.5, and the first MiMo: Llama's shape with biases on query, key and value."""

from headrace.executor.models.arch import ArchSpec, WeightNames
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import head_dim_of, llama_like, qwen_positions, rope

NAMES = WeightNames(ignorable=(*WeightNames.ignorable, r"^model\.mtp_layers\."))


def build(config: Config) -> ArchSpec:
    head_dim = head_dim_of(config)
    positions = qwen_positions(config, rope(config, head_dim, 10000.0))
    return llama_like(
        config, positions=positions, head_dim=head_dim, attention={"bias": True}, default_context=32768, names=NAMES
    )


FAMILY = Family(
    ("Qwen2ForCausalLM", "MiMoForCausalLM"),
    build,
    ignored={"attention_bias": "which matrices have biases does not differ between its models"},
)
