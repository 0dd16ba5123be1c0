"""DeepSeek V3, R1 and Kimi K2: DeepSeek V2's shape; experts have sigmoid scores and are chosen by corrected scores."""

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import corrected_routing
from headrace.executor.models.families._latent import deepseek


def build(config: Config) -> ArchSpec:
    return deepseek(config, corrected_routing(config), correction=True)


FAMILY = Family(
    ("DeepseekV3ForCausalLM", "KimiK2ForCausalLM"),
    build,
    assumes={"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid", "noaux_tc")},
)
