"""Zamba 2: Mamba 2's mixers, and in some layers one of a few transformers before them, which these layers share."""

import math
from dataclasses import replace

from headrace.executor.models.arch import ArchSpec, Fused, LayerSpec, WeightNames
from headrace.executor.models.blocks import NoFfn
from headrace.executor.models.blocks.attention import Attention
from headrace.executor.models.blocks.recurrent import Ssd
from headrace.executor.models.blocks.shared_transformer import BesideEmbedding, SharedTransformer
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    Positions,
    activation,
    flag,
    integer,
    llama_like,
    number,
    rope,
)
from headrace.executor.models.families._ssd import IGNORED, RECURRENT
from headrace.ipc.failure import ModelError

NAMES = WeightNames(final_norm="final_layernorm")


def build(config: Config) -> ArchSpec:
    count, hidden = integer(config, "num_hidden_layers"), integer(config, "hidden_size")
    mixer, bias = _mamba(config, hidden), flag(config, "add_bias_linear", False)
    hybrid = [index for index, each in enumerate(_kinds(config, count)) if each == "hybrid"]
    num_heads = integer(config, "num_attention_heads")
    head_dim = integer(config, "attention_head_dim", 2 * hidden // max(1, num_heads))
    rotary = rope(config, head_dim, 10000.0) if flag(config, "use_mem_rope", False) else None
    attention = Attention(
        num_heads=num_heads,
        num_kv_heads=integer(config, "num_key_value_heads", num_heads),
        head_dim=head_dim,
        scale=(head_dim / 2) ** -0.5,
        rope=rotary,
        bias=bias,
    )
    inner = integer(config, "intermediate_size", 4 * hidden)
    spec = llama_like(
        config,
        positions=[Positions(None)] * count,
        head_dim=head_dim,
        ffn=NoFfn(),
        default_context=4096,
        tied_head=True,
        names=NAMES,
        stream=BesideEmbedding(hidden),
        fused=() if mixer.problem() else (*_fused(mixer), *SharedTransformer.fused(inner, len(hybrid))),
    )
    transformers = max(1, integer(config, "num_mem_blocks", 1))
    copies = [rf"\.{index}\.shared_transformer\." for index in hybrid[transformers:]]
    for place, index in enumerate(
        hybrid[:transformers]
    ):  # whose adapters of other layers have these layers' names, too
        others = "|".join(map(str, range(place + transformers, len(hybrid), transformers)))
        copies += [rf"\.{index}\.shared_transformer\..*_adapter_list\.({others})\."] if others else []
    shared = SharedTransformer(
        attention,
        replace(mixer, at="mamba_decoder.mamba"),
        inner,
        activation(config, "hidden_act", "gelu"),
        integer(config, "adapter_rank", 128),
        flag(config, "use_shared_attention_adapter", False),
    )
    layers: list[LayerSpec] = [replace(layer, mixer=mixer) for layer in spec.layers]
    for place, index in enumerate(hybrid):
        own = replace(shared, adapter=place, layer=index, source=hybrid[place % transformers])
        layers[index] = replace(layers[index], mixer=own, mixer_norm=False)
    names = replace(NAMES, ignorable=(*NAMES.ignorable, *copies))  # files may have what is shared several times
    return replace(spec, layers=tuple(layers), names=names)


def _mamba(config: Config, hidden: int) -> Ssd:
    heads, inner = integer(config, "n_mamba_heads", 8), int(number(config, "mamba_expand", 2) * hidden)
    bias = flag(config, "add_bias_linear", False)
    return Ssd(
        heads=heads,
        head_dim=inner // max(1, heads),
        state_size=integer(config, "mamba_d_state", 64),
        groups=integer(config, "mamba_ngroups", 1),
        conv_width=integer(config, "mamba_d_conv", 4),
        bias=bias,
        step_limits=(number(config, "time_step_min", 0.001), math.inf),
        at="mamba",
    )


def _fused(mixer: Ssd) -> tuple[Fused, ...]:
    return (*mixer.fused(), *replace(mixer, at="mamba_decoder.mamba").fused())


def _kinds(config: Config, count: int) -> list[str]:
    """Each layer's kind: hybrid, or one of the names of recurrent layers. Raises ModelError."""
    given = config.get("layers_block_type")
    if given is None:
        spans = (6,) * 7 + (5, 4)  # layers from one with a transformer to the next
        places = {sum(spans[: end + 1]) for end in range(len(spans))}
        given = ["hybrid" if index in places else "mamba" for index in range(54)]
    if not isinstance(given, list) or len(given) < count or set(map(str, given)) - {"hybrid", *RECURRENT}:
        raise ModelError(f"the config's layers_block_type must list hybrid or mamba for each layer, got {given!r:.80}")
    return [str(each) for each in given[:count]]


FAMILY = Family(
    ("Zamba2ForCausalLM",),
    build,
    ignored={
        **IGNORED,
        "chunk_size": "how the original code divides the work",
        "use_mem_eff_path": "how the original code runs",
        "use_conv_bias": "the convolutions of this architecture have one",
        "time_step_max": "training alone",
        "time_step_floor": "training alone",
        "mamba_headdim": "the number of heads says it",
        "attention_hidden_size": "twice the hidden size",
        "kv_channels": "of no use in this architecture",
        "num_query_groups": "of no use in this architecture",
        "hybrid_layer_ids": "layers_block_type says it",
        "lora_rank": "adapter_rank has it",
    },
    assumes={"use_long_context": (False,), "use_shared_mlp_adapter": (True,)},
)
