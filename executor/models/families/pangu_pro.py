"""openPangu Pro V2: experts as in DeepSeek V3, norms around both blocks, and attention with normed keys, values of
fewer dimensions, and keys and values of the model's own that every token attends to."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from headrace.executor.models.arch import ArchSpec, Fused
from headrace.executor.models.blocks import Attend, Axis, Declared, Norm, SinkTokens
from headrace.executor.models.blocks.attention import Attention, as_kind
from headrace.executor.models.families import Config, Family, NotNativeError
from headrace.executor.models.families._config import (
    Positions,
    corrected_routing,
    flag,
    further_layers,
    integer,
    llama_like,
    mixture_after_dense,
    rope,
)
from headrace.ipc.failure import ModelError

SINK_KEYS, SINK_VALUES = "self_attn.param_sink_key", "self_attn.param_sink_value"
RENAMED = ((r"\.mlp\.e_score_correction_bias$", ".mlp.gate.e_score_correction_bias"),)
"""Names of openPangu's checkpoints."""


@dataclass(frozen=True)
class SinkAttention(Attention):
    """Attention with normed keys, which attends to tokens of the model's own, too."""

    num_sinks: int = 0
    sink_value_dim: int = 0
    """Dimensions of their values in the checkpoint; 0: the values are 0."""

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        found = dict(super().declare(spec))
        attend = found["attend"]
        assert isinstance(attend, Attend)
        norm = Norm.of(spec, spec.names.key_norm, self.head_dim)
        pairs = self.rope.rotary_dim if self.rope is not None and self.rope.interleaved else 0
        sinks = SinkTokens(
            SINK_KEYS,
            SINK_VALUES if self.sink_value_dim else "",
            self.num_sinks,
            Axis(self.num_kv_heads),
            self.head_dim,
            self.sink_value_dim,
            norm,
            pairs,
        )
        return found | {"attend": replace(attend, key_norm=norm, sink_tokens=sinks)}


def build(config: Config) -> ArchSpec:
    turned, values, count = (integer(config, key) for key in ("qk_rope_dim", "v_channels", "param_sink_number"))
    head_dim = turned + integer(config, "qk_nope_dim")
    if not 1 <= values <= head_dim:
        raise ModelError(f"the config's v_channels must be from 1 to {head_dim}, the dimensions of keys, got {values}")
    if count < 1:
        raise ModelError(f"the config's param_sink_number must be at least 1, got {count}")
    rotary = replace(rope(config, turned, 10_000.0), rotary_dim=turned, interleaved=True)
    if rotary.kind != "default":
        raise NotNativeError("a scaled rotation of this model is not supported")
    bias = flag(config, "attention_bias", False) or flag(config, "bias", False)
    corrected = flag(config, "router_enable_expert_bias", False)
    names = replace(further_layers(config), key_norm="self_attn.k_layernorm", renamed=RENAMED)
    if sandwich := flag(config, "sandwich_norm", False):
        names = replace(names, mlp_norm="pre_mlp_layernorm", mlp_post_norm="post_mlp_layernorm")
    spec = llama_like(
        config,
        positions=[Positions(rotary)] * integer(config, "num_hidden_layers"),
        head_dim=head_dim,
        attention={
            "bias": flag(config, "qkv_bias", bias),
            "output_bias": bias,
            "value_dim": values if values < head_dim else None,
        },
        ffn=mixture_after_dense(config, corrected_routing(config), correction=corrected),
        norm_placement="sandwich" if sandwich else "pre",
        names=names,
    )
    given = values if flag(config, "param_sink_with_value", False) else 0
    mixer = as_kind(SinkAttention, spec.layers[0].mixer, num_sinks=count, sink_value_dim=given)
    heads = ((names.query, mixer.num_heads * head_dim), (names.key, mixer.num_kv_heads * head_dim))
    fused = Fused("self_attn.qkv_proj", (*heads, (names.value, mixer.num_kv_heads * values)))
    return replace(spec, layers=tuple(replace(layer, mixer=mixer) for layer in spec.layers), fused=(fused,))


FAMILY = Family(
    ("PanguProMoEV2ForCausalLM",),
    build,
    ignored={"num_mtp_layers": "further layers, for multi-token prediction, which are not run"},
    assumes={
        "n_group": (1,),
        "topk_group": (1,),
        "interleaved_sliding_window": (),
        "param_sink_scalar": (),
        "param_sink_of_head_dim": (False,),
    },
)
