"""Yi as first published: Llama's shape, with other names of the norms."""

from headrace.executor.models.arch import ArchSpec, WeightNames
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import llama_like

NAMES = WeightNames(attention_norm="ln1", mlp_norm="ln2")


def build(config: Config) -> ArchSpec:
    return llama_like({"rms_norm_eps": 1e-5, "rope_theta": 5_000_000.0} | config, names=NAMES)


FAMILY = Family(("YiForCausalLM",), build)
