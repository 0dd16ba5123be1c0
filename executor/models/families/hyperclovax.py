"""HyperCLOVA X: Granite's shape; with use_post_norm, additional norms after attention and FFN."""

from headrace.executor.models.arch import ArchSpec, WeightNames
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import biases, dense, flag, head_dim_of, llama_like, positive

NAMES = WeightNames(attention_post_norm="post_norm1", mlp_post_norm="post_norm2")


def build(config: Config) -> ArchSpec:
    scale = positive(config, "attention_multiplier", head_dim_of(config) ** -0.5)
    return llama_like(
        config,
        attention={"scale": scale, **biases(config, "attention_bias", False)},
        ffn=dense(config, bias=flag(config, "mlp_bias", False)),
        norm_placement="sandwich" if flag(config, "use_post_norm", False) else "pre",
        embedding_scale=positive(config, "embedding_multiplier", 1.0),
        scales_given=True,
        residual_scale=positive(config, "residual_multiplier", 1.0),
        logit_scale=positive(config, "logits_scaling", 1.0),
        names=NAMES,
    )


FAMILY = Family(("HyperCLOVAXForCausalLM",), build)
