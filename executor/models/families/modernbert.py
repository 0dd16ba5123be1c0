"""ModernBERT (Warner et al. 2024): rotary positions, gated FFNs, norms before the blocks, and windows to both sides in
two of three layers."""

from headrace.executor.models.arch import ArchSpec, Fused, LayerSpec, WeightNames
from headrace.executor.models.blocks.attention import Attention
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    activation,
    dense,
    flag,
    head_dim_of,
    integer,
    layer_norm,
    layer_types,
    number,
    one_of,
    rope,
    rope_section,
)
from headrace.executor.models.families._encoders import IGNORABLE, heads_of
from headrace.executor.models.heads import (
    Classifier,
    HeadActivation,
    HeadLayer,
    HeadLinear,
    HeadNorm,
    HeadVocabulary,
    num_labels,
)
from headrace.ipc.failure import ModelError

GLOBAL_THETA, LOCAL_THETA = 160_000.0, 10_000.0
NAMES = WeightNames(
    prefixes=("model.", ""),
    embedding="embeddings.tok_embeddings",
    embedding_norm="embeddings.norm",
    final_norm="final_norm",
    query="attn.query",
    key="attn.key",
    value="attn.value",
    output="attn.Wo",
    attention_norm="attn_norm",
    gate="mlp.gate",
    up="mlp.up",
    down="mlp.Wo",
    mlp_norm="mlp_norm",
    ignorable=IGNORABLE,
)


def build(config: Config) -> ArchSpec:
    hidden, head_dim, num_heads = (
        integer(config, "hidden_size"),
        head_dim_of(config),
        integer(config, "num_attention_heads"),
    )
    num_layers, every = integer(config, "num_hidden_layers"), integer(config, "global_attn_every_n_layers", 3)
    if every < 1:
        raise ModelError(f"the config's global_attn_every_n_layers must be at least 1, got {every}")
    default = ["sliding_attention" if index % every else "full_attention" for index in range(num_layers)]
    bias = flag(config, "attention_bias", False)
    wide = rope(config, head_dim, number(config, "global_rope_theta", GLOBAL_THETA), "full_attention")
    local = config if "sliding_attention" in rope_section(config) else Config({})
    narrow = rope(local, head_dim, _local_theta(config), "sliding_attention")
    window = integer(config, "local_attention", 128) // 2 + 1
    kinds = {"full_attention": (wide, None), "sliding_attention": (narrow, window)}
    mixers = {
        kind: Attention(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            rope=rotary,
            sliding_window=reach,
            bias=bias,
            output_bias=bias,
            causal=False,
        )
        for kind, (rotary, reach) in kinds.items()
    }
    inner, width = integer(config, "intermediate_size"), num_heads * head_dim
    ffn = dense(config, "hidden_activation", "gelu", bias=flag(config, "mlp_bias", False))
    types = layer_types(config, num_layers, default)
    norm = layer_norm(config, "norm_eps", bias=flag(config, "norm_bias", False))
    return ArchSpec(
        architecture=config["architectures"][0],
        hidden_size=hidden,
        vocab_size=integer(config, "vocab_size"),
        max_positions=integer(config, "max_position_embeddings", 8192),
        # The embeddings' norm is the first layer's.
        layers=tuple(LayerSpec(mixers[kind], ffn, mixer_norm=index > 0) for index, kind in enumerate(types)),
        norm=norm,
        has_head=False,
        embedding_norm=True,
        fused=(
            Fused("attn.Wqkv", tuple((name, width) for name in (NAMES.query, NAMES.key, NAMES.value))),
            Fused("mlp.Wi", ((NAMES.gate, inner), (NAMES.up, inner))),
        ),
        names=NAMES,
        classifier=_classifier(config, hidden, norm.eps, norm_bias=norm.bias),
        vocabulary_layers=_vocabulary_layers(config, hidden, norm.eps, norm_bias=norm.bias),
    )


def _local_theta(config: Config) -> float:
    return (
        GLOBAL_THETA
        if config.get("local_rope_theta", LOCAL_THETA) is None
        else number(config, "local_rope_theta", LOCAL_THETA)
    )


def _classifier(config: Config, hidden: int, eps: float, *, norm_bias: bool) -> Classifier | None:
    """Both kinds of classifiers have the head of masked language models before them."""
    bias, kind = flag(config, "classifier_bias", False), activation(config, "classifier_activation", "gelu")
    pooling = one_of(config, "classifier_pooling", "cls", "mean")
    named = config["architectures"][0]
    if not named.endswith(("ForSequenceClassification", "ForTokenClassification")):
        return None
    if kind == "relu2":
        raise ModelError("the config's classifier_activation is relu2, which heads do not have")
    labels, shown = num_labels(config), HeadLinear("head.dense", hidden, hidden, bias, _head_activation(kind))
    layers: tuple[HeadLayer, ...] = (
        shown,
        HeadNorm("head.norm", hidden, eps, norm_bias),
        HeadLinear("classifier", labels, hidden),
    )
    if named.endswith("ForTokenClassification"):
        return Classifier("ALL", layers, labels)
    return Classifier("CLS" if pooling == "cls" else "MEAN", layers, labels)


def _vocabulary_layers(config: Config, hidden: int, eps: float, *, norm_bias: bool) -> tuple[HeadLayer, ...]:
    kind = activation(config, "classifier_activation", "gelu")
    biases = ("decoder.bias",) if config.get("decoder_bias", True) else ()
    return (
        HeadLinear("head.dense", hidden, hidden, flag(config, "classifier_bias", False), _head_activation(kind)),
        HeadNorm("head.norm", hidden, eps, norm_bias),
        HeadVocabulary(("decoder", NAMES.embedding), biases, integer(config, "vocab_size"), hidden),
    )


def _head_activation(kind: str) -> HeadActivation:
    found: HeadActivation = kind  # type: ignore[assignment]
    return found


FAMILY = Family(
    (*heads_of("ModernBert"), "ColBERTModernBertModel"),
    build,
    ignored={
        **dict.fromkeys(
            ("initializer_cutoff_factor", "mlp_dropout", "embedding_dropout", "classifier_dropout"), "training alone"
        ),
        **dict.fromkeys(
            ("decoder_bias", "tie_word_embeddings", "sparse_prediction", "sparse_pred_ignore_index"),
            "of masked language models",
        ),
        **dict.fromkeys(
            ("deterministic_flash_attn", "reference_compile", "repad_logits_with_grad"), "the original code's kernels"
        ),
        **dict.fromkeys(("cls_token_id", "sep_token_id"), "of the tokenizer"),
        "position_embedding_type": "configs say absolute; the original code reads it nowhere",
    },
)
