"""The encoder of T5 (Raffel et al. 2020) and mT5: RMS norms before the blocks, no biases, and a bias by distance that
all layers share; in UMT5 each layer has its own. Decoders are not read."""

from headrace.executor.models.arch import ArchSpec, LayerSpec, NormSpec, WeightNames
from headrace.executor.models.blocks.attention import Attention
from headrace.executor.models.blocks.dense import Dense
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import ACTIVATIONS, integer, number
from headrace.ipc.failure import ModelError

NAMES = WeightNames(
    prefixes=("",),
    embedding="shared",
    layers="encoder.block",
    final_norm="encoder.final_layer_norm",
    query="layer.0.SelfAttention.q",
    key="layer.0.SelfAttention.k",
    value="layer.0.SelfAttention.v",
    output="layer.0.SelfAttention.o",
    distance_bias="layer.0.SelfAttention.relative_attention_bias",
    attention_norm="layer.0.layer_norm",
    gate="layer.1.DenseReluDense.wi_0",
    up="layer.1.DenseReluDense.wi_1",
    down="layer.1.DenseReluDense.wo",
    mlp_norm="layer.1.layer_norm",
    ignorable=(r"^encoder\.embed_tokens\.weight$", r"^decoder\.", r"^lm_head\."),
)


DEFAULT_POSITIONS = 512
"""Those of T5's training. Its code knows no limit, and most configs name none."""


def build(config: Config) -> ArchSpec:
    config = config.renamed(
        hidden_size="d_model", num_attention_heads="num_heads", num_hidden_layers="num_layers", head_dim="d_kv"
    )
    num_heads, head_dim = integer(config, "num_attention_heads"), integer(config, "head_dim")
    reach = integer(config, "n_positions", DEFAULT_POSITIONS)
    kind = str(config.get("feed_forward_proj", "relu"))
    gated, name = kind.startswith("gated-"), kind.removeprefix("gated-")
    if name not in ACTIVATIONS:
        raise ModelError(
            f"the config's feed_forward_proj is {kind!r:.80}; supported: {', '.join(ACTIVATIONS)}, also gated-"
        )
    activation = "gelu_tanh" if kind == "gated-gelu" else ACTIVATIONS[name]
    buckets = (
        integer(config, "relative_attention_num_buckets", 32),
        integer(config, "relative_attention_max_distance", 128),
    )
    mixer = Attention(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        scale=1.0,
        rope=None,
        causal=False,
        distance_bias=(*buckets, reach),
    )
    names = NAMES if gated else WeightNames(**{**vars(NAMES), "up": "layer.1.DenseReluDense.wi"})
    own = config["architectures"][0].startswith("UMT5")
    first = f"{NAMES.layer('', 0)}{NAMES.distance_bias}"
    return ArchSpec(
        architecture=config["architectures"][0],
        hidden_size=integer(config, "hidden_size"),
        vocab_size=integer(config, "vocab_size"),
        max_positions=reach,
        layers=(LayerSpec(mixer, Dense(integer(config, "d_ff"), activation, gated=gated)),)
        * integer(config, "num_hidden_layers"),
        norm=NormSpec("rms", number(config, "layer_norm_epsilon", 1e-6)),
        has_head=False,
        names=names,
        shared=() if own else ((NAMES.distance_bias, first),),
    )


FAMILY = Family(
    ("T5EncoderModel", "MT5EncoderModel", "UMT5EncoderModel"),
    build,
    ignored={
        **dict.fromkeys(
            ("num_decoder_layers", "tie_word_embeddings", "scale_decoder_outputs"), "of the decoder, which is not read"
        ),
        **dict.fromkeys(("dense_act_fn", "is_gated_act"), "says what feed_forward_proj says"),
        "dropout_rate": "training alone",
        "classifier_dropout": "training alone",
    },
    assumes={"is_encoder_decoder": (False, True)},
)
