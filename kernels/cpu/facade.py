"""What `executor/` and other packages use of the CPU kernels. Where it lies in this folder is no concern of theirs."""

from __future__ import annotations

from headrace.kernels.cpu import build, units
from headrace.kernels.cpu.attention.cache import (
    CACHE_TYPES,
    why_no_attention,
    why_no_latent_attention,
    why_no_prepared_heads,
)
from headrace.kernels.cpu.attention.latent import NEVER, LatentLayer
from headrace.kernels.cpu.experts.moe import ExpertDeltas, PackedExperts, why_no_experts
from headrace.kernels.cpu.linear.args import DTYPES
from headrace.kernels.cpu.linear.deltas import DeltaTable, EmbeddingTable, PackedDelta, PairedRows
from headrace.kernels.cpu.linear.linear import (
    FLOAT_TYPES,
    GROUPED_TYPES,
    WEIGHT_TYPES,
    Arena,
    PackedLinear,
    Runtime,
    dequantise,
    pack,
    quantise,
    quantise_wide,
    runtime,
    why_not_group,
)
from headrace.kernels.cpu.ops import MOST_ROW_VALUES
from headrace.kernels.cpu.program.parts import AttentionLayer, Buffer, LayerCache, Norm, Rotary
from headrace.kernels.cpu.program.program import ROW_COUNTS, Builder
from headrace.kernels.cpu.program.ranks import rank_gather, rank_meet, rank_sum
from headrace.kernels.cpu.program.rows import (
    write_correct_rows,
    write_like_rows,
    write_mix_rows,
    write_scale_columns,
    write_sparse_gate,
)
from headrace.kernels.cpu.program.run import GIVEN_ROW, Program, StepBuffers
from headrace.kernels.cpu.recurrent.args import StateStepC
from headrace.kernels.cpu.recurrent.states import (
    write_convolve,
    write_gated_lru,
    write_linear_attention,
    write_scan,
    write_selective_scan,
)
from headrace.kernels.cpu.runtime.collectives import OUTCOMES, GroupC, PeerC, declare
from headrace.kernels.cpu.runtime.pointers import pointer
from headrace.kernels.cpu.sampling.sampling import SampleBuffers

__all__ = [
    "CACHE_TYPES",
    "DTYPES",
    "FLOAT_TYPES",
    "GIVEN_ROW",
    "GROUPED_TYPES",
    "MOST_ROW_VALUES",
    "NEVER",
    "OUTCOMES",
    "ROW_COUNTS",
    "WEIGHT_TYPES",
    "Arena",
    "AttentionLayer",
    "Buffer",
    "Builder",
    "DeltaTable",
    "EmbeddingTable",
    "ExpertDeltas",
    "GroupC",
    "LatentLayer",
    "LayerCache",
    "Norm",
    "PackedDelta",
    "PackedExperts",
    "PackedLinear",
    "PairedRows",
    "PeerC",
    "Program",
    "Rotary",
    "Runtime",
    "SampleBuffers",
    "StateStepC",
    "StepBuffers",
    "build",
    "declare",
    "dequantise",
    "pack",
    "pointer",
    "quantise",
    "quantise_wide",
    "rank_gather",
    "rank_meet",
    "rank_sum",
    "runtime",
    "units",
    "why_no_attention",
    "why_no_experts",
    "why_no_latent_attention",
    "why_no_prepared_heads",
    "why_not_group",
    "write_convolve",
    "write_correct_rows",
    "write_gated_lru",
    "write_like_rows",
    "write_linear_attention",
    "write_mix_rows",
    "write_scale_columns",
    "write_scan",
    "write_selective_scan",
    "write_sparse_gate",
]
