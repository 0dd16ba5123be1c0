"""HunYuan v1, dense and with experts: queries and keys are normed after their rotation."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from headrace.executor.models.arch import STACKED, ArchSpec, WeightNames
from headrace.executor.models.blocks import Routing
from headrace.executor.models.blocks.experts import Experts
from headrace.executor.models.families import Config, Family, NotNativeError
from headrace.executor.models.families._config import (
    activation,
    biases,
    dense,
    flag,
    head_dim_of,
    integer,
    llama_like,
    optional_number,
    positive,
    rope_section,
)
from headrace.ipc.failure import ModelError

MIXTURE = "HunYuanMoEV1ForCausalLM"
NAMES = WeightNames(
    query_norm="self_attn.query_layernorm",
    key_norm="self_attn.key_layernorm",
    router="mlp.gate.wg",
    shared_expert="mlp.shared_mlp",
)


def build(config: Config) -> ArchSpec:
    config = config.renamed(head_dim="attention_head_dim")
    head_dim = head_dim_of(config)
    config = _with_stretched_base(config, head_dim)
    is_mixture = config["architectures"][0] == MIXTURE
    normed = flag(config, "use_qk_norm", True)
    return llama_like(
        config,
        head_dim=head_dim,
        attention={
            **biases(config, "attention_bias", False),
            "qk_norm": "head" if normed else "no",
            "norm_after_rotation": normed,
        },
        ffn=_mixture(config) if is_mixture else dense(config, bias=flag(config, "mlp_bias", False)),
        names=NAMES,
        stacked=STACKED if is_mixture else None,
    )


def _with_stretched_base(config: Config, head_dim: int) -> Config:
    """The config with the rotary base that a scaling of type dynamic with an alpha means: for contexts of all lengths
    (NTK-aware scaling), and so not dynamic."""
    given = rope_section(config)
    kind = given.get("rope_type") or given.get("type")
    if kind != "dynamic" or not optional_number(given, "alpha"):
        return config
    if head_dim < 4:
        raise ModelError(f"the rope parameter alpha needs heads of at least 4 dimensions, got {head_dim}")
    for key in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"):  # of YaRN, which published configs have too
        given.get(key)
    base = positive(config if given.get("rope_theta") is None else given, "rope_theta", 10_000.0)
    stretched = base * positive(given, "alpha") ** (head_dim / (head_dim - 2))
    return config | {"rope_scaling": None, "rope_parameters": None, "rope_theta": stretched}


def _mixture(config: Config) -> Experts:
    inner = _of_layers(config, "moe_intermediate_size", integer(config, "intermediate_size"))
    chosen = _of_layers(config.renamed(moe_topk="num_experts_per_tok"), "moe_topk", 1)
    return Experts(
        _of_layers(config.renamed(num_experts="num_local_experts"), "num_experts", 1),
        Routing(chosen, "softmax", renormalise=True),
        inner,
        activation(config, "hidden_act", "silu"),
        shared_inner=integer(config, "intermediate_size") * _of_layers(config, "num_shared_expert", 1),
        shared_gate=False,
    )


def _of_layers(config: Config, key: str, default: int) -> int:
    """A number that the config may also list by layer. Raises NotNativeError if the layers' differ."""
    given = config.get(key)
    if isinstance(given, list) and given:
        if any(each != given[0] for each in given):
            raise NotNativeError(f"the config's {key} differs by layer, which is not supported")
        config = config | {key: given[0]}
    return integer(config, key, default)


_NONE = (None, 0, False)
_ASSUMED: dict[str, tuple[Any, ...]] = {
    "use_rotary_pos_emb": (True,),
    "norm_type": ("rms", "hf_rms", "fused"),
    "norm_topk_prob": (True,),
    "use_cla": (False,),
    "use_mla": (False,),
    "use_mixed_mlp_moe": (True,),
    "position_embedding_xdrope": (False,),
    "moe_layer_num_skipped": (0,),
    "moe_drop_tokens": (False,),
    "group_limited_greedy": (False,),
    "add_classification_head": (False,),
    "routed_scaling_factor": (1.0, 0, False),
    "n_group": (1, *_NONE),
    "topk_group": (1, *_NONE),
}
ASSUMES: Mapping[str, tuple[Any, ...]] = MappingProxyType(_ASSUMED)
_OF_MEDIA = (
    *("anyres_pooling_size", "anyres_vit_max_image_size", "anyres_vit_two_views", "im_end_id", "im_newline_id"),
    *("im_start_id", "max_image_size", "mask_init_id", "num_media_embeds", "skip_cls_token", "text_end_id"),
    *("text_start_id", "video_end_id", "video_start_id", "vit_add_patchemb_bias", "vit_input_resolution"),
    *("vit_mapping_type", "vit_norm_type", "vit_patch", "vit_path", "vit_remove_prenorm", "vit_token", "vit_type"),
    *("vit_used_rms_norm", "xdrope_section"),
)
FAMILY = Family(
    ("HunYuanDenseV1ForCausalLM", MIXTURE),
    build,
    ignored={
        **dict.fromkeys(_OF_MEDIA, "of images"),
        "cla_share_factor": "of layers that share keys and values, which use_cla says",
        "class_num": "of a classification head",
        "dense_list": "of a classification head",
        "pool_type": "of a classification head",
        "eod_token_id": "a token",
        "sep_token_id": "a token",
        "enable_lm_head_fp32": "precision of the original code",
        "moe_random_routing_dropped_token": "of tokens that are dropped in training",
        "capacity_factor": "of tokens that are dropped in training",
        "org_vocab_size": "of its training",
    },
    assumes=ASSUMES,
)
