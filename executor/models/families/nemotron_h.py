"""Nemotron-H: layers of one block each, which is Mamba 2's mixer, attention, an FFN or experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from headrace.executor.models.arch import ArchSpec, LayerSpec, NormSpec, WeightNames
from headrace.executor.models.blocks import Axis, Declared, Ffn, Linear, Mixer, NoFfn, NoMixer
from headrace.executor.models.blocks.attention import Attention
from headrace.executor.models.blocks.dense import Dense
from headrace.executor.models.blocks.experts import UNGATED, Experts
from headrace.executor.models.blocks.recurrent import Ssd
from headrace.executor.models.families import Config, Family, NotNativeError
from headrace.executor.models.families._config import (
    activation,
    corrected_routing,
    flag,
    integer,
    number,
)
from headrace.executor.models.families._ssd import ATTENTION, IGNORED, RECURRENT, require_silu, step_limits
from headrace.ipc.failure import ModelError

NAMES = WeightNames(
    prefixes=("backbone.", "model."),
    embedding="embeddings",
    final_norm="norm_f",
    attention_norm="norm",
    mlp_norm="norm",
    query="mixer.q_proj",
    key="mixer.k_proj",
    value="mixer.v_proj",
    output="mixer.o_proj",
    up="mixer.up_proj",
    down="mixer.down_proj",
    router="mixer.gate",
    router_correction="mixer.gate.e_score_correction_bias",
    experts="mixer.experts",
    shared_expert="mixer.shared_experts",
    expert_gate="up_proj",
    ignorable=(*WeightNames.ignorable, r"^(model\.|backbone\.)?mtp"),
)
LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
"""Kinds of layers in `hybrid_override_pattern`."""
FIELDS: Mapping[frozenset[str], tuple[str, ...]] = MappingProxyType(
    {
        frozenset({LETTERS["M"]}): ("mamba_", "ssm_", "time_step_", "n_groups", "conv_kernel", "use_conv_bias"),
        frozenset({LETTERS["*"]}): ("num_attention_heads", "num_key_value_heads", "head_dim", "attention_"),
        frozenset({"moe"}): (
            *("n_routed_experts", "n_shared_experts", "moe_", "num_experts_per_tok", "routed_scaling_factor"),
            *("n_group", "topk_group", "norm_topk_prob"),
        ),
        frozenset({"mlp", "moe"}): ("mlp_",),
    }
)
"""How the fields begin that layers of these kinds alone read."""


@dataclass(frozen=True)
class PlainSharedExperts(Experts):
    """Experts beside a shared one that has no gate; nor have the others, see UNGATED."""

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        found, name = dict(super().declare(spec)), f"{spec.names.shared_expert}.{spec.names.expert_up}"
        if self.shared_inner:
            up = ((name, Axis(self.shared_inner)),)
            found["shared_up"] = Linear(up, spec.hidden_size, activation=self.shared_activation)
        return found


def layer_kinds(config: Config) -> list[str]:
    """The kind of each layer, from the config's list or pattern. Raises ModelError."""
    listed = {key: config.get(key) for key in ("layers_block_type", "layer_types") if config.get(key) is not None}
    pattern = config.get("hybrid_override_pattern")
    if pattern is not None:
        if not isinstance(pattern, str) or not set(pattern) <= set(LETTERS):
            known = ", ".join(LETTERS)
            raise ModelError(f"the config's hybrid_override_pattern must have the letters {known}, got {pattern!r:.80}")
        listed.setdefault("hybrid_override_pattern", [LETTERS[each] for each in pattern])
    if not listed:
        raise ModelError("the config has neither layers_block_type nor hybrid_override_pattern")
    found = []
    for key, given in listed.items():
        if not isinstance(given, list) or set(map(str, given)) - {*RECURRENT, *ATTENTION, "mlp", "moe"}:
            raise ModelError(f"the config's {key} must be a list of mamba, attention, mlp and moe, got {given!r:.200}")
        found.append([_plain(each) for each in given])
    if any(each != found[0] for each in found):
        raise ModelError(f"the config's {' and '.join(listed)} contradict each other")
    if integer(config, "num_hidden_layers", len(found[0])) != len(found[0]):
        raise ModelError(f"the config has {config['num_hidden_layers']} layers, and lists {len(found[0])}")
    return found[0]


def _plain(kind: str) -> str:
    return LETTERS["M"] if kind in RECURRENT else LETTERS["*"] if kind in ATTENTION else kind


def _mamba(config: Config) -> Ssd:
    require_silu(config, "mamba_hidden_act")
    return Ssd(
        heads=integer(config, "mamba_num_heads", 128),
        head_dim=integer(config, "mamba_head_dim", 64),
        state_size=integer(config, "ssm_state_size", 128),
        groups=integer(config, "n_groups", 8),
        conv_width=integer(config, "conv_kernel", 4),
        norm_eps=number(config, "layer_norm_epsilon", 1e-5),
        bias=flag(config, "use_bias", False),
        conv_bias=flag(config, "use_conv_bias", True),
        step_limits=step_limits(config),
    )


def _attention(config: Config) -> Attention:
    heads, head_dim = integer(config, "num_attention_heads", 32), integer(config, "head_dim", 128)
    bias = flag(config, "attention_bias", False)
    return Attention(
        heads,
        integer(config, "num_key_value_heads", heads),
        head_dim,
        head_dim**-0.5,
        rope=None,
        bias=bias,
        output_bias=bias,
    )


def _mixture(config: Config) -> Experts:
    kind = activation(config, "mlp_hidden_act", "relu2")
    if kind not in UNGATED:
        raise NotNativeError(f"experts without a gate are supported with {' and '.join(UNGATED)}, not with {kind}")
    if config.get("moe_latent_size") is not None:
        raise NotNativeError("experts on latent vectors (moe_latent_size) are not supported")
    if flag(config, "mlp_bias", False):
        raise NotNativeError("biases of experts without a gate are not supported")
    shared = (
        integer(config, "moe_shared_expert_intermediate_size", 7688) if integer(config, "n_shared_experts", 1) else 0
    )
    return PlainSharedExperts(
        integer(config, "n_routed_experts", 8),
        corrected_routing(config),
        integer(config, "moe_intermediate_size", 7688),
        UNGATED[kind],
        shared_inner=shared,
        shared_activation=kind,
        shared_gate=False,
        correction="vector",
    )


def build(config: Config) -> ArchSpec:
    config = config.renamed(head_dim="attention_head_dim")
    kinds, blocks = layer_kinds(config), dict[str, tuple[Mixer, Ffn]]()
    for those, fields in FIELDS.items():
        if not those.intersection(kinds):
            config.pass_over(*fields)
    for kind in dict.fromkeys(kinds):
        if kind == LETTERS["M"]:
            blocks[kind] = _mamba(config), NoFfn()
        elif kind == LETTERS["*"]:
            blocks[kind] = _attention(config), NoFfn()
        elif kind == "moe":
            blocks[kind] = NoMixer(), _mixture(config)
        else:
            inner, bias = integer(config, "intermediate_size", 21504), flag(config, "mlp_bias", False)
            plain = Dense(inner, activation(config, "mlp_hidden_act", "relu2"), gated=False, bias=bias)
            blocks[kind] = NoMixer(), plain
    fused = tuple(each for mixer, _ in blocks.values() if isinstance(mixer, Ssd) and not mixer.problem()
                  for each in mixer.fused())  # fmt: skip
    return ArchSpec(
        architecture=config["architectures"][0],
        hidden_size=integer(config, "hidden_size", 4096),
        vocab_size=integer(config, "vocab_size", 131072),
        max_positions=integer(config, "max_position_embeddings", 4096),
        layers=tuple(LayerSpec(*blocks[kind]) for kind in kinds),
        norm=NormSpec("rms", number(config, "layer_norm_epsilon", 1e-5)),
        tied_head=flag(config, "tie_word_embeddings", False),
        fused=fused,
        names=NAMES,
    )


FAMILY = Family(
    ("NemotronHForCausalLM",),
    build,
    ignored={
        **IGNORED,
        "chunk_size": "how the original code divides the work",
        "expand": "the mixer's size is that of its heads",
        "mamba_proj_bias": "transformers ignores it: use_bias says which matrices have biases",
        "moe_shared_expert_overlap": "how the original code runs",
        "mtp_layers_block_type": "further layers, for multi-token prediction, which are not run",
        "mtp_hybrid_override_pattern": "further layers, for multi-token prediction, which are not run",
        "rescale_prenorm_residual": "training alone",
        "residual_in_fp32": "precision of the original code",
        "partial_rotary_factor": "nothing is rotated",
        "rope_theta": "nothing is rotated",
        "sliding_window": "transformers' attention ignores it",
        "time_step_floor": "training alone",
        "time_step_max": "training alone",
        "time_step_min": "training alone",
        "time_step_rank": "of Mamba 1's mixers",
    },
)
