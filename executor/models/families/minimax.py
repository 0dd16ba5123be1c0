"""MiniMax-Text-01 and M1: lightning attention, softmax attention in some layers, and experts in all."""

from dataclasses import replace

from headrace.executor.models.arch import ArchSpec, LayerSpec, NormSpec, StackedExperts, WeightNames
from headrace.executor.models.blocks.linear_attention import Lightning
from headrace.executor.models.families import Config, Family, NotNativeError
from headrace.executor.models.families._config import (
    Positions,
    experts,
    head_dim_of,
    integer,
    llama_like,
    number,
    positive,
    results_times,
    rope,
    with_rotary_dim,
)
from headrace.executor.models.families._ssd import require_silu
from headrace.executor.models.families.qwen3_next import layer_kinds
from headrace.ipc.failure import ModelError

NAMES = WeightNames(
    router="block_sparse_moe.gate",
    experts="block_sparse_moe.experts",
    expert_gate="w1",
    expert_up="w3",
    expert_down="w2",
    renamed=((r"\.mlp\.gate\.", ".block_sparse_moe.gate."),),  # transformers' module
    ignorable=(*WeightNames.ignorable, r"self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)$"),
)
PUBLISHED = {
    f"{part}_{factor}_factor": f"layernorm_{name}_{factor}"
    for part, name in (("full_attn", "full_attention"), ("linear_attn", "linear_attention"), ("mlp", "mlp"))
    for factor in ("alpha", "beta")
}
"""From the names that transformers gives the factors to those of the published configs."""


def slopes(heads: int, layer: int, num_layers: int) -> tuple[float, ...]:
    """Each head's rate of decay in a layer: ALiBi's slopes, which fall from layer to layer."""
    factor = 1 - layer / (num_layers - 1 + 1e-5) + 1e-5
    return tuple(2 ** (-8 * (head + 1) / heads) * factor for head in range(heads))


def build(config: Config) -> ArchSpec:
    require_silu(config, "hidden_act")
    config = config.renamed(**PUBLISHED)
    count, head_dim, heads = (
        integer(config, "num_hidden_layers"),
        head_dim_of(config),
        integer(config, "num_attention_heads"),
    )
    eps, kinds = number(config, "rms_norm_eps", 1e-5), _kinds(config)
    alphas = {each: positive(config, f"{each}_alpha_factor", 1.0) for each in ("full_attn", "linear_attn", "mlp")}
    betas = {each: positive(config, f"{each}_beta_factor", 1.0) for each in alphas}
    if len(set(alphas.values())) > 1:
        raise NotNativeError(f"layers whose residual factors differ are not supported: {alphas}")
    alpha = alphas["mlp"]
    rotary = rope(with_rotary_dim(config, head_dim), head_dim, 1e6)
    # A block's stream is norm(x) * alpha + y * beta. It is kept divided by alpha, which the next norm sees only in its
    # eps, and beta / alpha is a factor of the block's last matrices.
    spec = llama_like(
        config,
        positions=[Positions(rotary)] * count,
        head_dim=head_dim,
        ffn=experts(config, integer(config, "intermediate_size"), renormalise=True),
        default_context=4096 * 32,
        norm=NormSpec("rms", eps / alpha**2),
        norm_placement="normed",
        embedding_scale=1 / alpha,
        scales_given=True,
        names=NAMES,
        stacked=StackedExperts("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"),
    )
    lightning = [
        Lightning(heads=heads, head_dim=head_dim, rates=slopes(heads, index, count), norm_eps=1e-6)
        for index in range(count)
    ]
    downs = (f"{NAMES.experts}.{index}.w2" for index in range(_experts_of(config)))
    scaled = (
        *results_times(betas["linear_attn"] / alpha, "self_attn.out_proj"),
        *results_times(betas["full_attn"] / alpha, "self_attn.o_proj"),
        *results_times(betas["mlp"] / alpha, *downs),
    )
    layers = [
        layer if kind == "full_attention" else LayerSpec(mixer, layer.ffn)
        for kind, layer, mixer in zip(kinds, spec.layers, lightning, strict=True)
    ]
    return replace(
        spec,
        layers=tuple(layers),
        fused=(lightning[0].fused(),) if lightning else (),
        scaled=scaled,
    )


def _experts_of(config: Config) -> int:
    return integer(config, "num_local_experts", 8)


def _kinds(config: Config) -> list[str]:
    """Each layer's kind: `layer_types`, or the published `attn_type_list`, which has 1 for softmax attention."""
    given = config.get("attn_type_list")
    default = layer_kinds(config, lambda index: "linear_attention" if index % 2 else "full_attention")
    if given is None:
        return default
    if not isinstance(given, list) or len(given) < len(default) or not all(each in (0, 1) for each in given):
        raise ModelError(f"the config's attn_type_list must have 0 or 1 for each layer, got {given!r:.80}")
    listed = ["full_attention" if each else "linear_attention" for each in given[: len(default)]]
    if config.get("layer_types") is not None and listed != default:
        raise ModelError("the config's layer_types and attn_type_list contradict each other")
    return listed


FAMILY = Family(
    ("MiniMaxForCausalLM", "MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM"),
    build,
    ignored={
        "block_size": "how the original code divides the work",
        "shared_intermediate_size": "there is no shared expert",
    },
    assumes={"postnorm": (True,), "shared_moe_mode": ("sigmoid",), "sliding_window": ()},
)
