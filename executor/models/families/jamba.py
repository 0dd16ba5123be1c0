"""Jamba: Mamba's mixers, attention without rotary positions in every eighth layer, and experts in every other one."""

from dataclasses import replace

from headrace.executor.models.arch import ArchSpec, LayerSpec, StackedExperts, WeightNames
from headrace.executor.models.blocks import Ffn
from headrace.executor.models.blocks.selective import Selective
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    Positions,
    dense,
    experts,
    flag,
    integer,
    llama_like,
    number,
)
from headrace.executor.models.families._ssd import require_silu
from headrace.executor.models.families.mamba import rank_of
from headrace.ipc.failure import ModelError

NAMES = WeightNames(
    final_norm="final_layernorm",
    mlp_norm="pre_ff_layernorm",
    gate="feed_forward.gate_proj",
    up="feed_forward.up_proj",
    down="feed_forward.down_proj",
    router="feed_forward.router",
    experts="feed_forward.experts",
)
STACKED = StackedExperts("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj")


def _every(config: Config, kind: str, period: int, offset: int) -> list[bool]:
    """Whether each layer is of a kind that stands once in a period of layers."""
    period, offset = integer(config, f"{kind}_layer_period", period), integer(config, f"{kind}_layer_offset", offset)
    if not 0 <= offset < period:
        raise ModelError(f"the config's {kind}_layer_offset is {offset}; it must be below the period {period}")
    return [index % period == offset for index in range(integer(config, "num_hidden_layers"))]


def build(config: Config) -> ArchSpec:
    require_silu(config, "hidden_act")
    attends, routes = _every(config, "attn", 8, 4), _every(config, "expert", 2, 1)
    mixer = Selective(
        channels=integer(config, "mamba_expand", 2) * integer(config, "hidden_size"),
        state_size=integer(config, "mamba_d_state", 16),
        rank=rank_of(config, "mamba_dt_rank"),
        conv_width=integer(config, "mamba_d_conv", 4),
        bias=flag(config, "mamba_proj_bias", False),
        conv_bias=flag(config, "mamba_conv_bias", True),
        norms="weighted",
        norm_eps=number(config, "rms_norm_eps", 1e-6),
        at="mamba",
    )
    mixture = experts(config, integer(config, "intermediate_size"), renormalise=False)
    several = mixture.num_experts > 1

    def ffn(index: int) -> Ffn:
        return mixture if routes[index] and several else dense(config)

    spec = llama_like(
        config,
        positions=[Positions(None)] * len(attends),
        ffn=ffn,
        default_context=262144,
        names=NAMES,
        fused=mixer.fused(),
        stacked=STACKED,
    )
    layers: list[LayerSpec] = [
        layer if attending else replace(layer, mixer=mixer)
        for attending, layer in zip(attends, spec.layers, strict=True)
    ]
    return replace(spec, layers=tuple(layers))


FAMILY = Family(
    ("JambaForCausalLM",),
    build,
    ignored={
        "use_mamba_kernels": "how the original code runs",
        "num_logits_to_keep": "what transformers' code returns",
        "calc_logits_for_entire_prompt": "what transformers' code returns",
        "use_associative_scan": "how transformers' code runs",
        "use_mambapy": "how transformers' code runs",
        "mamba_inner_layernorms": "the norms are known by their weights",
    },
)
