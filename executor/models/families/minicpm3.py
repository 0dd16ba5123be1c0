"""MiniCPM 3: latent attention and dense FFNs, with multipliers of embeddings, residuals and logits."""

from typing import Any

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import dense, flag, integer, positive
from headrace.executor.models.families._latent import latent_like


def multipliers(config: Config) -> dict[str, Any]:
    """The multipliers, as fields of `ArchSpec`, that all MiniCPM models have."""
    base = config.get("dim_model_base")
    scaling = integer(config, "hidden_size") / positive(config, "dim_model_base") if base is not None else 1.0
    return {
        "embedding_scale": positive(config, "scale_emb", 1.0),
        "residual_scale": positive(config, "scale_depth", 1.0) / integer(config, "num_hidden_layers") ** 0.5,
        "logit_scale": 1 / positive(config, "logits_scaling", scaling),
        "tied_head": flag(config, "tie_word_embeddings", True),
    }


def build(config: Config) -> ArchSpec:
    if "scale_depth" in config and config["scale_depth"] is None:  # residuals are not scaled
        config = config | {"scale_depth": integer(config, "num_hidden_layers") ** 0.5}
    ffn, heads = dense(config, bias=flag(config, "mlp_bias", False)), max(1, integer(config, "num_attention_heads"))
    defaults = {"rope_interleave": False, "v_head_dim": integer(config, "hidden_size") // heads}
    return latent_like(defaults | config, lambda _: ffn, **multipliers(config))


FAMILY = Family(("MiniCPM3ForCausalLM",), build)
