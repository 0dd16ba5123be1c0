"""Gemma 1: Llama's shape with norm weights stored minus 1, wide heads, scaled embeddings."""

from headrace.executor.models.arch import ArchSpec, NormSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import biases, dense, head_dim_of, integer, llama_like, number
from headrace.ipc.failure import ModelError


def build(config: Config) -> ArchSpec:
    named = [config.get(key) for key in ("hidden_activation", "hidden_act") if config.get(key) is not None]
    # "gelu" is the published files' name of the approximation, which they were trained with.
    meant = ["gelu_pytorch_tanh" if each == "gelu" else each for each in named]
    if any(each != meant[0] for each in meant):
        raise ModelError(f"the config's hidden_activation is {named[0]!r:.80} and its hidden_act {named[1]!r:.80}")
    config = config | {"hidden_activation": next(iter(meant), None)}
    return llama_like(
        config,
        head_dim=head_dim_of(config, 256),
        attention=biases(config, "attention_bias", False),
        ffn=dense(config, "hidden_activation", "gelu_pytorch_tanh"),
        default_context=8192,
        tied_head=True,
        norm=NormSpec("rms", number(config, "rms_norm_eps", 1e-6), weight_offset=1.0),
        embedding_scale=integer(config, "hidden_size") ** 0.5,
    )


FAMILY = Family(("GemmaForCausalLM",), build)
