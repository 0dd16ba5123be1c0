"""MiniMax M3's language model: attention to blocks of keys that an index chooses, after dense layers experts beside a
shared one, all with gpt-oss's clamped activation."""

from dataclasses import replace
from typing import Any, Literal

from headrace.executor.models.arch import STACKED, ArchSpec, Fused, NormSpec, WeightNames
from headrace.executor.models.blocks import Routing
from headrace.executor.models.blocks.attention import Attention
from headrace.executor.models.blocks.dense import Dense
from headrace.executor.models.blocks.experts import Experts
from headrace.executor.models.blocks.sparse_attention import SparseAttention
from headrace.executor.models.families import Config, Family, NotNativeError
from headrace.executor.models.families._config import (
    head_dim_of,
    integer,
    llama_like,
    number,
    text_part,
    with_rotary_dim,
)
from headrace.executor.models.families.text_halves import OTHER_MEDIA
from headrace.ipc.failure import ModelError

AT = "block_sparse_moe"
NAMES = WeightNames(
    prefixes=("model.", "language_model.model.", "model.language_model.", ""),
    lm_heads=("lm_head", "language_model.lm_head"),
    router=f"{AT}.gate",
    router_correction=f"{AT}.e_score_correction_bias",
    experts=f"{AT}.experts",
    expert_gate="w1",
    expert_up="w3",
    expert_down="w2",
    shared_expert=f"{AT}.shared_experts",
    ignorable=(*WeightNames.ignorable, *OTHER_MEDIA, r"^(model\.)?patch_merge_mlp\.", r"(^|\.)mtp\."),
)
CONVERTED = "MiniMaxM3VLForCausalLM"
CONVERTED_NAMES = replace(
    WeightNames(),
    router_correction="mlp.gate.e_score_correction_bias",
    shared_expert="mlp.shared_experts",
)
"""Of the language model that transformers has saved alone."""
CLAMPED: Literal["clamped_silu"] = "clamped_silu"
SPARSE = "minimax_m3_sparse"
OWN_NAMES = {
    "index_n_heads": ("sparse_num_index_heads", 4),
    "index_head_dim": ("sparse_index_dim", 128),
    "index_block_size": ("sparse_block_size", 128),
    "index_topk_blocks": ("sparse_topk_blocks", 16),
    "index_local_blocks": ("sparse_local_block", 1),
}
"""The numbers of the index as transformers writes them, their names in sparse_attention_config, and their defaults."""


def build(config: Config) -> ArchSpec:
    config = text_part(config)
    head_dim, count = head_dim_of(config), integer(config, "num_hidden_layers")
    config = with_rotary_dim(config, head_dim, head_dim // 2)
    listed = config.section("sparse_attention_config")
    sparse = _kinds(config, "layer_types", listed, "sparse_attention_freq", ("full_attention", SPARSE), count)
    mixes = _kinds(config, "mlp_layer_types", config, "moe_layer_freq", ("dense", "sparse"), count, default=True)
    inner, shared = (
        integer(config, "dense_intermediate_size", 12_288),
        integer(config, "shared_intermediate_size", 3072),
    )
    dense = Dense(inner, CLAMPED)
    mixture = Experts(
        integer(config, "num_local_experts"),
        Routing(
            integer(config, "num_experts_per_tok"),
            "sigmoid",
            renormalise=True,
            scale=number(config, "routed_scaling_factor", 1.0),
        ),
        integer(config, "intermediate_size"),
        CLAMPED,
        shared_inner=shared,
        shared_gate=False,
        correction="vector",
    )
    is_converted = config["architectures"][0] == CONVERTED
    names = CONVERTED_NAMES if is_converted else NAMES
    hidden, at = integer(config, "hidden_size"), names.shared_expert
    parts = ((f"{at}.{names.gate.rpartition('.')[2]}", shared), (f"{at}.{names.up.rpartition('.')[2]}", shared))
    own = (("gate_proj", "w1", shared), ("up_proj", "w3", shared), ("down_proj", "w2", hidden))
    fused = [Fused(f"{at}.{stored}", ((f"{at}.{name}", rows),)) for stored, name, rows in own]
    spec = llama_like(
        config,
        head_dim=head_dim,
        attention={"qk_norm": "head"},
        ffn=lambda index: mixture if mixes[index] else dense,
        norm=NormSpec("rms", number(config, "rms_norm_eps", 1e-6), weight_offset=1.0),
        names=names,
        stacked=STACKED,
        fused=(
            Fused("mlp.gate_up_proj", ((NAMES.gate, inner), (NAMES.up, inner))),
            *([Fused(f"{at}.gate_up_proj", parts)] if is_converted else fused),
        ),
    )
    index = {key: integer(config, key, integer(listed, own, default)) for key, (own, default) in OWN_NAMES.items()}
    if any(sparse) and index["index_head_dim"] != head_dim:
        raise NotNativeError(f"the config's index_head_dim differs from its head_dim of {head_dim}: not supported")
    layers = []
    for is_sparse, layer in zip(sparse, spec.layers, strict=True):
        plain: Any = layer.mixer
        assert isinstance(plain, Attention)
        chosen = SparseAttention(
            **vars(plain),
            index_heads=index["index_n_heads"],
            index="self_attn.indexer." if is_converted else "self_attn.index_",
            block_size=index["index_block_size"],
            num_blocks=index["index_topk_blocks"],
            local_blocks=index["index_local_blocks"],
        )
        layers.append(replace(layer, mixer=chosen if is_sparse else plain))
    return replace(spec, layers=tuple(layers))


def _kinds(
    config: Config, key: str, section: Config, own: str, words: tuple[str, str], count: int, *, default: bool = False
) -> list[bool]:
    """Whether each layer is of the second kind: by the words that `key` lists, or by the numbers of `own`. Raises
    ModelError."""
    given, numbers = config.get(key), section.get(own)
    if given is None and numbers is None:
        return [default] * count
    listed: Any = given if given is not None else numbers
    allowed: tuple[Any, ...] = words if given is not None else (0, 1)
    if not isinstance(listed, list) or len(listed) < count or any(each not in allowed for each in listed):
        name = key if given is not None else own
        raise ModelError(f"the config's {name} must list {allowed[0]} or {allowed[1]} per layer, got {listed!r:.80}")
    return [each == allowed[1] for each in listed[:count]]


FAMILY = Family(
    ("MiniMaxM3ForCausalLM", "MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration", CONVERTED),
    build,
    ignored={
        "hidden_act": "the clamped activation takes its place",
        "head_dim": "read with the heads",
        "mtp_num_layers": "of further layers, which are not run",
        "img_token_compression_config": "of images",
        "projector_hidden_size": "of images",
        "sparse_disable_index_value": "the index has no values",
        "sparse_score_type": "the highest score of a block's keys",
    },
    assumes={
        "n_shared_experts": (1,),
        "qk_norm_type": ("per_head",),
        "scoring_func": ("sigmoid",),
        "swiglu_alpha": (1.702,),
        "swiglu_limit": (7.0,),
        "use_gemma_norm": (True,),
        "use_qk_norm": (True,),
        "use_routing_bias": (True,),
        "use_sparse_attention": (True,),
        "sparse_init_block": (0,),
    },
)
