"""Qwen 3.5, dense and with experts: Qwen 3 Next's layers with projections of their own."""

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import dense
from headrace.executor.models.families.qwen3_next import by_part, hybrid, mixture


def build(config: Config) -> ArchSpec:
    has_experts = "Moe" in config["architectures"][0]
    return hybrid(config, mixture(config, renormalise=True) if has_experts else dense(config), by_part)


_EQUAL = "of text, an image's time, height and width are one position"
FAMILY = Family(
    ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
    build,
    ignored={
        "mrope_section": _EQUAL,
        "mrope_interleaved": _EQUAL,
        "mamba_ssm_dtype": "the engine's option mamba_ssm_cache_dtype says it",
    },
    assumes={"attn_output_gate": (True,), "output_gate_type": ("swish",)},
)
