"""InternLM and openPangu Embedded: Llama's shape with biases in its attention."""

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import biases, llama_like


def build(config: Config) -> ArchSpec:
    return llama_like(config, attention=biases(config, "bias", True))


FAMILY = Family(
    ("InternLMForCausalLM", "PanguEmbeddedForCausalLM"),
    build,
    ignored={"rotary": "its dynamic scaling changes nothing within the trained length, to which contexts are limited"},
)
