"""Orion: Llama's shape with layer norms."""

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import layer_norm, llama_like


def build(config: Config) -> ArchSpec:
    return llama_like(config, norm=layer_norm(config, "rms_norm_eps"))


FAMILY = Family(("OrionForCausalLM",), build)
