"""GTE's `NewModel` (Zhang et al. 2024), also of Arctic Embed 2: BERT with rotary positions and a gated FFN."""

from headrace.executor.models.arch import ArchSpec, Fused, RopeSpec, WeightNames
from headrace.executor.models.blocks.dense import Dense
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import activation, flag, head_dim_of, integer, one_of, positive, rope
from headrace.executor.models.families._encoders import IGNORABLE, classifier, encoder, heads_of, pooler
from headrace.ipc.failure import ModelError

NAMES = WeightNames(
    prefixes=("new.", "gte.", ""),
    embedding="embeddings.word_embeddings",
    token_types="embeddings.token_type_embeddings",
    embedding_norm="embeddings.LayerNorm",
    layers="encoder.layer",
    query="attention.query",
    key="attention.key",
    value="attention.value",
    output="attention.o_proj",
    attention_norm="attn_ln",
    gate="mlp.gate",
    up="mlp.up",
    down="mlp.down_proj",
    mlp_norm="mlp_ln",
    ignorable=IGNORABLE,
)


def build(config: Config) -> ArchSpec:
    one_of(config, "position_embedding_type", "rope")
    one_of(config, "layer_norm_type", "layer_norm")
    if flag(config, "logn_attention_scale", False):
        raise ModelError("the config's logn_attention_scale is true, which is not computed")
    inner, hidden = integer(config, "intermediate_size"), integer(config, "hidden_size")
    names = (NAMES.query, NAMES.key, NAMES.value)
    default_theta = 160_000.0 if config["architectures"][0].startswith("Gte") else 10_000.0
    return encoder(
        config,
        names=NAMES,
        ffn=Dense(inner, activation(config, "hidden_act", "gelu"), down_bias=True),
        rope=_rope(config, head_dim_of(config), default_theta),
        default_positions=8192,
        default_types=1,
        fused=(
            Fused("attention.qkv_proj", tuple((name, hidden) for name in names)),
            Fused("mlp.up_gate_proj", ((NAMES.up, inner), (NAMES.gate, inner))),
        ),
        classifier=classifier(config, pooler(config)),
    )


def _rope(config: Config, head_dim: int, default_theta: float) -> RopeSpec:
    """Scaling of type "ntk" changes the base, and divides all frequencies by a power of its factor."""
    given = config.section("rope_scaling")
    if given.get("type", given.get("rope_type")) != "ntk":
        return rope(config, head_dim, default_theta)
    if given.get("mixed_b") is not None:
        raise ModelError("the config's rope scaling has mixed_b, which is not computed")
    factor, theta = positive(given, "factor"), positive(config, "rope_theta", default_theta)
    return RopeSpec(theta * factor, head_dim, "linear", factor=factor ** (2 / head_dim))


FAMILY = Family(
    (*heads_of("New"), *heads_of("Gte"), "GteNewModel", "GteNewForSequenceClassification"),
    build,
    ignored={
        **dict.fromkeys(("unpad_inputs", "use_memory_efficient_attention", "pack_qkv"), "kernels of the original code"),
        "logn_attention_clip1": "of logn_attention_scale",
    },
)
