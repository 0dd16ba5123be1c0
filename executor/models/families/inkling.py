"""Inkling's language model: biases that tokens compute for distances in the place of rotary positions, short
convolutions of keys, values and both blocks' results, and experts of which some are chosen for every token."""

from __future__ import annotations

from headrace.executor.models.arch import STACKED, ArchSpec, Fused, LayerSpec, NormSpec, StackedExperts, WeightNames
from headrace.executor.models.blocks import Ffn, Routing
from headrace.executor.models.blocks.dense import Dense
from headrace.executor.models.blocks.relative_attention import ConvolvedResults, RelativeAttention
from headrace.executor.models.blocks.sink_experts import ScaledDense, SinkExperts
from headrace.executor.models.families import Config, Family, NotNativeError
from headrace.executor.models.families._config import (
    activation,
    flag,
    integer,
    listed_layers,
    number,
    optional_integer,
    positive,
    routed_layers,
    text_part,
)
from headrace.executor.models.families.text_halves import OTHER_MEDIA
from headrace.ipc.failure import ModelError

FULL, SLIDING = "hybrid", "hybrid_sliding"
NAMES = WeightNames(
    prefixes=("model.",),
    embedding_norm="embed_norm",
    ignorable=(*WeightNames.ignorable, *OTHER_MEDIA, r"^model\.mtp\.", r"^model\.audio\."),
    renamed=(
        (r"^model\.llm\.unembed\.", "lm_head."),
        (r"^model\.llm\.embed\.", "model.embed_tokens."),
        (r"^model\.(llm|language_model)\.", "model."),
        (r"\.embed_tokens\.embed_norm\.", ".embed_norm."),
        (r"\.attn\.wq_du\.", ".self_attn.q_proj."),
        (r"\.attn\.wk_dv\.", ".self_attn.k_proj."),
        (r"\.attn\.wv_dv\.", ".self_attn.v_proj."),
        (r"\.attn\.wr_du\.", ".self_attn.r_proj."),
        (r"\.attn\.wo_ud\.", ".self_attn.o_proj."),
        (r"\.attn\.", ".self_attn."),
        (r"sconv\.conv1d\.", "sconv."),
        (r"\.attn_norm\.", ".input_layernorm."),
        (r"\.mlp_norm\.", ".post_attention_layernorm."),
        (r"\.mlp\.w2_md\.", ".mlp.down_proj."),
        (r"\.mlp\.gate\.bias$", ".mlp.gate.e_score_correction_bias"),
    ),
)
"""The published names become transformers'."""


def build(config: Config) -> ArchSpec:
    config = text_part(config).renamed(
        conv_kernel_size="sconv_kernel_size",
        max_position_embeddings="model_max_length",
        sliding_window_size="sliding_window",
    )
    hidden, kinds = integer(config, "hidden_size"), _kinds(config, integer(config, "num_hidden_layers"))
    mixers = {kind: _mixer(config, kind == SLIDING, hidden) for kind in dict.fromkeys(kinds)}
    ffns, num_routed = _ffns(config, len(kinds)), integer(config, "n_routed_experts", 256)
    vocab, stored = integer(config, "vocab_size"), integer(config, "padded_vocab_size", integer(config, "vocab_size"))
    vocab = min(vocab, integer(config, "unpadded_vocab_size", vocab))
    return ArchSpec(
        architecture=config["architectures"][0],
        hidden_size=hidden,
        vocab_size=vocab,
        stored_vocab=stored,
        max_positions=integer(config, "max_position_embeddings", 131_072),
        layers=tuple(LayerSpec(mixers[kind], ffn) for kind, ffn in zip(kinds, ffns, strict=True)),
        norm=NormSpec("rms", number(config, "rms_norm_eps", 1e-6)),
        logit_scale=1 / positive(config, "logits_mup_width_multiplier", 24.0),
        embedding_norm=flag(config, "use_embed_norm", True),
        norms_given=False,
        stream=ConvolvedResults(hidden, integer(config, "conv_kernel_size", 4)),
        stacked=STACKED,
        also_stacked=(
            StackedExperts("mlp.experts.w13_weight", "mlp.experts.w2_weight", alternating=True),
            StackedExperts(
                "mlp.shared_experts.gate_proj",
                "mlp.shared_experts.down_proj",
                up="mlp.shared_experts.up_proj",
                first=num_routed,
            ),
            StackedExperts(
                "mlp.shared_experts.shared_w13_weight",
                "mlp.shared_experts.shared_w2_weight",
                alternating=True,
                first=num_routed,
            ),
        ),
        fused=(Fused("mlp.w13_dn", (("mlp.gate_proj", 1), ("mlp.up_proj", 1)), groups=_sizes(config)[1]),),
        names=NAMES,
    )


def _kinds(config: Config, count: int) -> list[str]:
    """Each layer's kind: `layer_types`, else a window in the layers of `local_layer_ids`, else in all but each sixth.
    Raises ModelError."""
    windows = listed_layers(config, "local_layer_ids", (index for index in range(count) if (index + 1) % 6))
    given = config.get("layer_types")
    if given is None:
        return [SLIDING if index in windows else FULL for index in range(count)]
    if not isinstance(given, list) or len(given) < count or set(map(str, given)) - {FULL, SLIDING}:
        raise ModelError(
            f"the config's layer_types must be {FULL} or {SLIDING} for each of {count} layers, got {given!r:.80}"
        )
    return [str(each) for each in given[:count]]


def _mixer(config: Config, is_sliding: bool, hidden: int) -> RelativeAttention:
    start, window = ("swa_", integer(config, "sliding_window_size", 512)) if is_sliding else ("", None)
    heads, kv_heads = integer(config, f"{start}num_attention_heads", 64), (16 if is_sliding else 8)
    head_dim, floor = integer(config, f"{start}head_dim", 128), optional_integer(config, "log_scaling_n_floor")
    share = number(config, "log_scaling_alpha", 0.1)
    if (value_dim := integer(config, f"{start}v_head_dim", head_dim)) != head_dim:
        raise NotNativeError(f"values of {value_dim} dimensions beside keys of {head_dim} are not supported")
    return RelativeAttention(
        num_heads=heads,
        num_kv_heads=integer(config, f"{start}num_key_value_heads", kv_heads),
        head_dim=head_dim,
        scale=1 / max(1, head_dim),
        rope=None,
        sliding_window=window,
        qk_norm="head",
        num_profiles=integer(config, "d_rel", 16),
        reach=integer(config, "rel_extent", 1024) if window is None else window,
        growth=None if floor is None or is_sliding else (floor, share),
        width=integer(config, "conv_kernel_size", 4),
        hidden=hidden,
    )


def _ffns(config: Config, count: int) -> list[Ffn]:
    (inner, dense_inner), kind = _sizes(config), activation(config, "hidden_act", "silu")
    scaled, num_sinks = flag(config, "use_global_scale", True), integer(config, "n_shared_experts", 2)
    dense = ScaledDense(dense_inner, kind) if scaled else Dense(dense_inner, kind)
    routes = routed_layers(config | {"first_k_dense_replace": config.get("dense_mlp_idx")}, 0)
    routing = Routing(
        integer(config, "num_experts_per_tok", 6) + num_sinks,
        "sigmoid",
        renormalise=True,
        scale=positive(config, "route_scale", 8.0),
    )
    mixture = SinkExperts(
        integer(config, "n_routed_experts", 256) + num_sinks,
        routing,
        inner,
        kind,
        num_sinks=num_sinks,
        corrects=flag(config, "use_gate_bias", True),
        scaled=scaled,
    )
    return [mixture if routed else dense for routed in routes]


def _sizes(config: Config) -> tuple[int, int]:
    """Inner sizes of an expert and of a dense FFN: where `dense_intermediate_size` is given, `intermediate_size` is an
    expert's."""
    inner, dense_inner = integer(config, "intermediate_size"), optional_integer(config, "dense_intermediate_size")
    if dense_inner is not None:
        return inner, dense_inner
    return integer(config, "moe_intermediate_size", inner), inner


FAMILY = Family(
    ("InklingForCausalLM", "InklingForConditionalGeneration"),
    build,
    ignored={
        "rms_norm_eps_moe_gate": "no code norms what a router reads",
        "shared_experts_size": "the sinks' number and size have keys of their own",
        "tie_word_embeddings": "the head is never that of the embedding",
        "number_of_conv_states": "of caches of transformers",
        "num_mtp_layers": "further layers, for multi-token prediction, which are not run",
        "mtp_local_layer_ids": "of these layers",
        "mtp_hidden_states_first": "of these layers",
        "chain_hidden_post_norm": "of these layers",
        "mtp_config": "of these layers",
        **dict.fromkeys(("audio_bos_token_id", "image_bos_token_id"), "other media than text, which are not served"),
    },
    assumes={
        "use_sconv": (True,),
        "norm_after_topk": (True,),
        "gate_activation": ("sigmoid",),
        "shared_expert_sink": (True,),
        "inference_moe_w13_interleaved": (True,),
        "q_bias": (False,),
        "o_bias": (False,),
    },
)
