"""Nemotron-H: layers of one block each, which is Mamba 2's mixer, attention, an FFN or experts. In Puzzle models each
block has sizes of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from headrace.executor.models.arch import ArchSpec, Fused, LayerSpec, NormSpec, WeightNames
from headrace.executor.models.blocks import (
    Axis,
    Declared,
    ExpertStack,
    Ffn,
    Held,
    Linear,
    Mixer,
    NoFfn,
    NoMixer,
    Ops,
)
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
    optional_integer,
)
from headrace.executor.models.families._ssd import ATTENTION, IGNORED, RECURRENT, require_silu, step_limits
from headrace.ipc.failure import ModelError

PUZZLE = "NemotronHPuzzleForCausalLM"
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


BLOCK_FIELDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "mamba": ("ssm_state_size",),
        "attention": ("sliding_window",),
        "mlp": ("intermediate_size",),
        "moe": (
            *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "moe_latent_size", "n_group"),
            *("moe_shared_expert_intermediate_size", "topk_group", "routed_scaling_factor", "norm_topk_prob"),
        ),
    }
)
"""What a block of each type may have in `block_configs`, besides its type."""


@dataclass(frozen=True)
class PlainSharedExperts(Experts):
    """Experts beside a shared one that has no gate; nor have the others, see UNGATED."""

    latent_size: int = 0
    """Columns of the vector that the experts compute in the place of the hidden values; 0: there is none."""

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        found, name = dict(super().declare(spec)), f"{spec.names.shared_expert}.{spec.names.expert_up}"
        if self.shared_inner:
            up = ((name, Axis(self.shared_inner)),)
            found["shared_up"] = Linear(up, spec.hidden_size, activation=self.shared_activation)
        if size := self.latent_size:
            stack = found["experts"]
            assert isinstance(stack, ExpertStack), "as declared"
            found["experts"] = replace(stack, hidden=size)
            found["latent_down"] = Linear((("mixer.fc1_latent_proj", size),), spec.hidden_size)
            found["latent_up"] = Linear((("mixer.fc2_latent_proj", spec.hidden_size),), size)
        return found

    def routed(self, ops: Ops, held: Held, x: Any, logits: Any) -> Any:
        if not self.latent_size:
            return super().routed(ops, held, x, logits)
        found = super().routed(ops, held, ops.linear(held["latent_down"], x), logits)
        return ops.product(held["latent_up"], ops.partial(found))

    def values_per_token(self, tp_size: int) -> int:
        return super().values_per_token(tp_size) + 2 * self.latent_size


def layer_kinds(config: Config) -> list[str]:
    """The kind of each layer, from the config's list or pattern. Raises ModelError."""
    listed = {key: config.get(key) for key in ("layers_block_type", "layer_types") if config.get(key) is not None}
    pattern = config.get("hybrid_override_pattern")
    if pattern is not None:
        if not isinstance(pattern, str) or not set(pattern) <= set(LETTERS):
            known = ", ".join(LETTERS)
            raise ModelError(f"the config's hybrid_override_pattern must have the letters {known}, got {pattern!r:.80}")
        listed.setdefault("hybrid_override_pattern", [LETTERS[each] for each in pattern])
    if config["architectures"] == [PUZZLE]:
        listed["block_configs"] = [block["block_type"] for block in _blocks(config)]
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


def _blocks(config: Config) -> Sequence[Mapping[str, Any]]:
    """The blocks of a Puzzle model. Raises ModelError."""
    given = config.get("block_configs")
    if not isinstance(given, list) or not all(isinstance(each, Mapping) for each in given):
        raise ModelError(f"the config's block_configs must be a list of blocks, got {given!r:.80}")
    for index, block in enumerate(given):
        kind, at = block.get("block_type"), f"the config's block_configs[{index}]"
        if kind not in BLOCK_FIELDS:
            raise ModelError(f"{at} has block_type {kind!r:.80}; known: {', '.join(BLOCK_FIELDS)}")
        others = [key for key, value in block.items() if value is not None and key not in BLOCK_FIELDS[kind]]
        if others := sorted(set(others) - {"block_type"}):
            known = ", ".join(BLOCK_FIELDS[kind])
            raise NotNativeError(f"{at}, of block_type {kind}, has {', '.join(others)}; known: {known}")
    return given


def _layer_configs(config: Config, count: int) -> list[Config]:
    """The config as each layer has it. A field that some block has is a block's alone."""
    if config["architectures"] != [PUZZLE]:
        return [config] * count
    blocks = [{key: value for key, value in block.items() if value is not None} for block in _blocks(config)]
    of_blocks = {key for block in blocks for key in block}
    for key in of_blocks:
        config.get(key)
    shared = config | dict.fromkeys(of_blocks)
    return [shared | block for block in blocks]


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
        sliding_window=optional_integer(config, "sliding_window") if config["architectures"] == [PUZZLE] else None,
        bias=bias,
        output_bias=bias,
    )


def _mixture(config: Config) -> Experts:
    kind = activation(config, "mlp_hidden_act", "relu2")
    if kind not in UNGATED:
        raise NotNativeError(f"experts without a gate are supported with {' and '.join(UNGATED)}, not with {kind}")
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
        latent_size=optional_integer(config, "moe_latent_size") or 0,
    )


def _layer(config: Config, kind: str) -> tuple[Mixer, Ffn]:
    if kind == LETTERS["M"]:
        return _mamba(config), NoFfn()
    if kind == LETTERS["*"]:
        return _attention(config), NoFfn()
    if kind == "moe":
        return NoMixer(), _mixture(config)
    inner, bias = integer(config, "intermediate_size", 21504), flag(config, "mlp_bias", False)
    return NoMixer(), Dense(inner, activation(config, "mlp_hidden_act", "relu2"), gated=False, bias=bias)


def _fused(layers: Sequence[tuple[Mixer, Ffn]]) -> Iterator[Fused]:
    """Of each shape of Mamba's mixers."""
    mixers = [mixer for mixer, _ in layers]
    for mixer in dict.fromkeys(mixers):
        if isinstance(mixer, Ssd) and not mixer.problem():
            own = frozenset(index for index, each in enumerate(mixers) if each == mixer)
            yield from (replace(each, layers=own) for each in mixer.fused())


def build(config: Config) -> ArchSpec:
    config = config.renamed(head_dim="attention_head_dim")
    kinds = layer_kinds(config)
    for those, fields in FIELDS.items():
        if not those.intersection(kinds):
            config.pass_over(*fields)
    layers = [_layer(own, kind) for own, kind in zip(_layer_configs(config, len(kinds)), kinds, strict=True)]
    return ArchSpec(
        architecture=config["architectures"][0],
        hidden_size=integer(config, "hidden_size", 4096),
        vocab_size=integer(config, "vocab_size", 131072),
        max_positions=integer(config, "max_position_embeddings", 4096),
        layers=tuple(LayerSpec(*each) for each in layers),
        norm=NormSpec("rms", number(config, "layer_norm_epsilon", 1e-5)),
        tied_head=flag(config, "tie_word_embeddings", False),
        fused=tuple(_fused(layers)),
        names=NAMES,
    )


FAMILY = Family(
    ("NemotronHForCausalLM", PUZZLE),
    build,
    ignored={
        **IGNORED,
        "blockwise_members": "block_configs says it",
        "mtp_block_configs": "of further layers, for multi-token prediction, which are not run",
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
