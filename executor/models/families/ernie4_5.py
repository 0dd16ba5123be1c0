"""ERNIE 4.5, dense: Llama's shape with interleaved rotation (of neighbouring pairs)."""

from collections.abc import Mapping
from typing import Any

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import biases, dense, flag, llama_like


def build(config: Config) -> ArchSpec:
    return llama_like(
        config,
        attention=biases(config, "use_bias", False),
        ffn=dense(config, bias=flag(config, "use_bias", False)),
        default_context=131072,
        tied_head=True,
        interleaved=True,
    )


ASSUMES: Mapping[str, tuple[Any, ...]] = {"compression_ratio": (1.0,), "use_rmsnorm": (True,)}
FAMILY = Family(("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"), build, assumes=ASSUMES)
