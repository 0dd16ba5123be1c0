"""Mistral's own format, published beside or instead of a Hugging Face model: params.json and consolidated files, with
other names and rotation. `checkpoints/checkpoint.py` gives the config of such a folder this architecture."""

from dataclasses import replace

from headrace.executor.models.arch import ArchSpec, WeightNames
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    Positions,
    experts,
    head_dim_of,
    integer,
    llama_like,
    optional_integer,
    rope,
)
from headrace.ipc.failure import ModelError

ARCHITECTURE = "MistralConsolidated"
NAMES = WeightNames(
    prefixes=("",),
    lm_heads=("output",),
    embedding="tok_embeddings",
    query="attention.wq",
    key="attention.wk",
    value="attention.wv",
    output="attention.wo",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
    router="feed_forward.gate",
    experts="feed_forward.experts",
    expert_gate="w1",
    expert_up="w3",
    expert_down="w2",
    attention_norm="attention_norm",
    mlp_norm="ffn_norm",
    ignorable=(r"^vision_encoder\.", r"^vision_language_adapter\.", r"^patch_merger\.", r"^pre_mm_projector_norm\."),
)
OWN_NAMES = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "intermediate_size": "hidden_dim",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied_embeddings",
    "max_position_embeddings": "max_seq_len",
}
NOT_SUPPORTED = ("quantization", "yarn", "llama_4_scaling", "kv_lora_rank", "ada_rms_norm_t_cond")


def build(config: Config) -> ArchSpec:
    for name in NOT_SUPPORTED:
        if config.get(name):
            raise ModelError(f"the {name} of this params.json is not supported: use the model's Hugging Face files")
    config = config.renamed(**OWN_NAMES)
    head_dim, ffn = head_dim_of(config), None
    if mixture := config.section("moe"):
        ffn = experts(mixture, integer(config, "intermediate_size"), renormalise=True)
    rotary = replace(rope(config, head_dim, 10000.0), interleaved=True)
    layer = Positions(rotary, optional_integer(config, "sliding_window"))
    return llama_like(
        config,
        positions=[layer] * integer(config, "num_hidden_layers"),
        head_dim=head_dim,
        ffn=ffn,
        default_context=32768,
        names=NAMES,
    )


FAMILY = Family((ARCHITECTURE,), build)
