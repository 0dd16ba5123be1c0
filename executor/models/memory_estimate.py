"""How much memory a model will take, from its `ArchSpec` alone."""

from __future__ import annotations

from headrace.core.options.plan import Plan
from headrace.executor.models.arch import ArchSpec
from headrace.executor.parallel.rank_place import SINGLE, RankPlace, World, collectives_bytes
from headrace.kernels.reference.attention import MAX_GATHER_ROWS

LOGITS_COPIES = 4
"""float32 logits, what the sampler derives from them (tempered, int64 keys: twice the size), with nothing freed."""


def weight_elements(spec: ArchSpec) -> int:
    """The model's parameters, norms and biases left out (less than a thousandth of any model of use)."""
    width = spec.embedding_width
    embeddings = spec.vocab_size * width * (1 if spec.tied_head else 2)
    if spec.embedding_size:
        embeddings += 2 * width * spec.hidden_size
    if spec.learned_position_offset is not None:
        embeddings += (spec.max_positions + spec.learned_position_offset) * spec.hidden_size
    return embeddings + spec.num_layers * layer_elements(spec)


def layer_elements(spec: ArchSpec) -> int:
    """Of one layer."""
    attention = spec.hidden_size * spec.head_dim * 2 * (spec.num_heads + spec.num_kv_heads)
    return attention + (3 if spec.gated_mlp else 2) * spec.hidden_size * spec.intermediate_size


def activation_bytes(spec: ArchSpec, plan: Plan, itemsize: int, place: RankPlace = SINGLE) -> int:
    """Upper bound of what a step of max_num_batched_tokens needs on one rank at once besides weights and cache.

    One layer's tensors live together (residual, normalised input, queries, keys, values, attention's output, both
    halves of the MLP), the keys and values that attention gathers, the logits of every row, and this rank's part of
    what the ranks share.
    """
    spec = spec.for_ranks(place.tp_size)
    kv_heads = spec.local_kv_heads(place.tp_size)
    heads = 2 * (spec.num_heads // place.tp_size + kv_heads)
    per_token = 3 * spec.hidden_size + heads * spec.head_dim + 3 * spec.intermediate_size // place.tp_size
    layer = plan.max_num_batched_tokens * per_token * itemsize
    most_rows = plan.max_num_seqs * -(-plan.max_model_len // plan.block_size) * kv_heads
    gathered = 2 * min(MAX_GATHER_ROWS, most_rows) * plan.block_size * spec.head_dim * itemsize
    logits = LOGITS_COPIES * plan.max_num_seqs * spec.vocab_size * 4 if place.is_last_stage else 0
    shared = 0
    if place.world_size > 1:
        shared = collectives_bytes(World.of(plan, place.tp_size, place.pp_size)) // place.world_size
    return layer + gathered + logits + shared
