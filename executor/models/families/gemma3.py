"""Gemma 3: norms before and after each block, five sliding-window layers per full one, two rotary bases. Text only.

Of a multimodal checkpoint (Gemma3ForConditionalGeneration) only the language model is read, not the vision tower.
"""

from headrace.executor.models.arch import ArchSpec, NormSpec, WeightNames
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    Positions,
    dense,
    every_nth_full,
    flag,
    integer,
    layer_types,
    llama_like,
    number,
    optional_number,
    rope,
    rope_section,
    text_part,
)

LOCAL_THETA, GLOBAL_THETA = 10_000.0, 1_000_000.0
# Multimodal configs leave out fields with these values.
DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
}
NAMES = WeightNames(
    prefixes=("model.", "language_model.model.", "model.language_model."),
    lm_heads=("lm_head", "language_model.lm_head"),
    mlp_norm="pre_feedforward_layernorm",
    ignorable=(r"rotary_emb\.inv_freq$", r"(^|\.)vision_tower\.", r"(^|\.)multi_modal_projector\."),
)


def build(config: Config) -> ArchSpec:
    text = DEFAULTS | text_part(config)
    both_sides = flag(text, "use_bidirectional_attention", False)  # EmbeddingGemma
    num_layers, head_dim = integer(text, "num_hidden_layers"), integer(text, "head_dim")
    pattern = integer(text, "sliding_window_pattern", integer(text, "_sliding_window_pattern", 6))
    default = every_nth_full(num_layers, pattern, "sliding_window_pattern")
    full = Positions(rope(text, head_dim, GLOBAL_THETA, "full_attention"))
    # The fields before transformers 5 scale the full layers only, and have a separate base for sliding layers.
    local = text if "sliding_attention" in rope_section(text) else Config({})
    theta = number(text, "rope_local_base_freq", LOCAL_THETA)
    window = integer(text, "sliding_window", 4096)
    reach = window // 2 + 1 if both_sides else window  # to each side
    sliding = Positions(rope(local, head_dim, theta, "sliding_attention"), reach)
    types = layer_types(text, num_layers, default)
    bias = flag(text, "attention_bias", False)
    return llama_like(
        text,
        positions=[sliding if kind == "sliding_attention" else full for kind in types],
        head_dim=head_dim,
        tied_head=True,
        max_positions=integer(text, "max_position_embeddings"),
        norm=NormSpec("rms", number(text, "rms_norm_eps", 1e-6), weight_offset=1.0),
        norm_placement="sandwich",
        attention={
            "scale": number(text, "query_pre_attn_scalar", 256) ** -0.5,
            "bias": bias,
            "output_bias": bias,
            "qk_norm": "head",
            "causal": not both_sides,
            "soft_cap": optional_number(text, "attn_logit_softcapping"),
        },
        ffn=dense(text, "hidden_activation", "gelu_pytorch_tanh"),
        final_soft_cap=optional_number(text, "final_logit_softcapping"),
        embedding_scale=integer(text, "hidden_size") ** 0.5,
        names=NAMES,
    )


FAMILY = Family(("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), build)
