"""Ling 3: Kimi Delta Attention whose decays have a floor, gated latent attention in every sixth layer, and experts."""

from dataclasses import replace

from headrace.executor.models.arch import STACKED, ArchSpec, Fused, LayerSpec, WeightNames
from headrace.executor.models.blocks.latent import LatentAttention
from headrace.executor.models.blocks.linear_attention import DeltaNames, DeltaRule
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import corrected_routing, flag, integer, mixture_after_dense, number
from headrace.executor.models.families._latent import latent_like
from headrace.executor.models.families._ssd import require_silu
from headrace.executor.models.families.kimi_linear import COMMON
from headrace.executor.models.families.qwen3_next import layer_kinds
from headrace.ipc.failure import ModelError

AT = "attention"
NAMES = WeightNames(
    embedding="word_embeddings",
    query=f"{AT}.q_proj",
    query_gate=f"{AT}.g_proj",
    latent_down=f"{AT}.kv_a_proj_with_mqa",
    latent_norm=f"{AT}.kv_a_layernorm",
    latent_up=f"{AT}.kv_b_proj",
    output=f"{AT}.o_proj",
    router_correction="mlp.gate.expert_bias",
    shared_expert="mlp.shared_experts",
    # As transformers' modules are called, whose own files have the publisher's names.
    renamed=(
        (r"\.self_attn\.(forget_gate\.)?", f".{AT}."),
        (r"\.gate\.e_score_correction_bias$", ".gate.expert_bias"),
        (r"(^|\.)embed_tokens\.", r"\1word_embeddings."),
    ),
)
DELTA = DeltaNames(
    query="q_proj",
    key="k_proj",
    value="v_proj",
    rates="b_proj",
    decays="f_proj",
    gate="g_proj",
    convolutions=("q_conv1d", "k_conv1d", "v_conv1d"),
    norm="o_norm",
    output="o_proj",
)


def build(config: Config) -> ArchSpec:
    require_silu(config, "hidden_act")
    own = config.renamed(**COMMON, n_routed_experts="num_experts")
    config = {"rope_interleave": True, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5} | own
    count, period = integer(config, "num_hidden_layers"), integer(config, "layer_group_size", 6)
    if period < 1:
        raise ModelError(f"the config's layer_group_size must be at least 1, got {period}")
    kinds = layer_kinds(config, lambda index: "linear_attention" if (index + 1) % period else "full_attention")
    heads, size = integer(config, "num_attention_heads"), integer(config, "head_dim", 128)
    has_floor = flag(config, "kda_safe_gate", True)
    delta = DeltaRule(
        heads=heads,
        key_heads=heads,
        key_dim=size,
        value_dim=size,
        conv_width=integer(config, "short_conv_kernel_size", 4),
        norm_eps=number(config, "rms_norm_eps", 1e-6),
        decay_floor=number(config, "kda_lower_bound", -5.0) if has_floor else 0.0,
        decay_per_channel=True,
        gate="sigmoid",
        at=AT,
        names=DELTA,
    )
    spec = latent_like(
        config,
        mixture_after_dense(config, corrected_routing(config), default_dense=2),
        names=NAMES,
        stacked=STACKED,
        fused=(delta.fused(), Fused(f"{AT}.dense", ((NAMES.output, integer(config, "hidden_size")),))),
    )
    layers: list[LayerSpec] = []
    for kind, layer in zip(kinds[:count], spec.layers, strict=True):
        assert isinstance(layer.mixer, LatentAttention)
        full = replace(layer.mixer, gate="head")
        layers.append(replace(layer, mixer=full if kind == "full_attention" else delta))
    return replace(spec, layers=tuple(layers))


FAMILY = Family(
    ("BailingHybridForCausalLM", "BailingMoeV3ForCausalLM"),
    build,
    ignored={
        "num_mtp_layers": "further layers, for multi-token prediction, which are not run",
        "mtp_loss_scaling_factor": "training alone",
        "linear_head_dim": "head_dim says it",
        "linear_num_heads": "num_attention_heads says it",
        "linear_conv_kernel_dim": "short_conv_kernel_size says it",
    },
)
