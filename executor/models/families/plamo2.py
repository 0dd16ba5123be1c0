"""PLaMo 2: Mamba 2's recurrence in most layers and attention in the others, with PLaMo 3's norms."""

from __future__ import annotations

from dataclasses import replace

from headrace.executor.models.arch import ArchSpec, Fused, NormSpec, WeightNames
from headrace.executor.models.blocks.attention import HeadNormedAttention, as_kind
from headrace.executor.models.blocks.projected_ssd import ProjectedSsd
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import dense, integer, llama_like, number
from headrace.executor.models.families.plamo3 import NAMES as PLAMO_3
from headrace.executor.models.families.plamo3 import fused_matrices, offset_norms
from headrace.ipc.failure import ModelError

NAMES: WeightNames = replace(
    PLAMO_3,
    renamed=(
        (r"\.mixer\.(B|C|dt)_norm_weight$", r".mixer.\1_norm.weight"),
        (r"\.mixer\.(q|k)_weight$", r".mixer.\1_norm.weight"),
    ),
)
LEAST_RANK, RANK_SHARE = 64, 16
"""The projection to time steps has one column for every 16 of the hidden values, and at least 64."""


def build(config: Config) -> ArchSpec:
    head_dim, hidden = integer(config, "hidden_size_per_head", 128), integer(config, "hidden_size")
    step = integer(config, "mamba_step", 2)
    if step < 2:
        raise ModelError(f"the config's mamba_step is {step}; it must be at least 2")
    attending = attends(integer(config, "num_hidden_layers"), step)
    norm = NormSpec("rms", number(config, "rms_norm_eps", 1e-6), weight_offset=1.0)
    recurrent = ProjectedSsd(
        heads=integer(config, "mamba_num_heads", 64),
        head_dim=head_dim,
        state_size=integer(config, "mamba_d_state", 64),
        conv_width=integer(config, "mamba_d_conv", 4),
        conv_bias=False,
        norm_eps=norm.eps,
        rank=max(LEAST_RANK, hidden // RANK_SHARE),
    )
    config = {"tie_word_embeddings": True} | config
    spec = llama_like(
        config,
        head_dim=head_dim,
        norm=norm,
        norm_placement="sandwich",
        other_norms=offset_norms(norm),
        ffn=dense(config, "hidden_act", "silu"),
        names=NAMES,
    )
    layers = tuple(replace(layer, mixer=as_kind(HeadNormedAttention, layer.mixer) if attending[i] else recurrent)
                   for i, layer in enumerate(spec.layers))  # fmt: skip
    fused: tuple[Fused, ...] = fused_matrices(config, head_dim)
    if not recurrent.problem() and not all(attending):
        fused += recurrent.fused()
    return replace(spec, layers=layers, fused=fused)


def attends(count: int, step: int) -> list[bool]:
    """Whether each of `count` layers has attention: one in `step` layers, and at least the last."""
    if count <= step // 2:
        return [index == count - 1 for index in range(count)]
    return [index % step == step // 2 for index in range(count)]


FAMILY = Family(
    ("Plamo2ForCausalLM",),
    build,
    ignored={
        "attention_window_size": "vLLM and llama.cpp attend to all tokens",
        "full_attention_idx": "vLLM and llama.cpp attend to all tokens",
        "mamba_chunk_size": "how the original code divides the work",
        "capacity_factor": "of experts, of which there are none",
        "expert_dropout": "training alone",
        "group_size": "of experts, of which there are none",
        "linear_type": "how the original code stores matrices",
        "sparse_intermediate_size": "of experts, of which there are none",
        "shared_intermediate_size": "of experts, of which there are none",
    },
    assumes={
        "mamba_enabled": (True,),
        "sparse_step": (None,),
        "num_experts": (None,),
        "use_predefined_initial_state": (False,),
        "eval_attention_n_bit": (None,),
        "eval_mlp_n_bit": (None,),
    },
)
