"""A model's weights and memory, derived from its `ArchSpec` alone, that is from what its blocks declare."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from headrace.core.options.plan import AttentionWork, Plan, StepWork
from headrace.executor.models.arch import ArchSpec, LayerSpec
from headrace.executor.models.blocks import (
    Attend,
    AttendLatent,
    Declared,
    ExpertStack,
    LayerDeclaration,
    Linear,
    Norm,
    Weight,
)
from headrace.executor.parallel.rank_place import SINGLE, RankCoordinates, World, collectives_bytes
from headrace.kernels.reference.attention import MAX_GATHER_ROWS

LOGITS_COPIES = 4
"""Peak memory of sampling in units of the float32 logits: the logits, logits divided by the temperature, and int64 sort
keys, which count twice; none is freed before the end."""
LOGITS_PASSES = 2
"""Upper bound of the time to compute and read a prompt token's logits, in units of the time of the head's product.
Measured on a CPU, vocabulary 49,152 and hidden size 576: 1.4 for the token's own log-probability alone, 1.7 with those
of the 20 likeliest tokens."""


def model_weights(spec: ArchSpec, prefix: str | None = None) -> Iterator[Weight]:
    """Every weight of the model under its name in the checkpoint. prefix: by default the first of `WeightNames`."""
    if spec.foreign:
        yield from spec.foreign
        return
    names = spec.names
    prefix = names.prefixes[0] if prefix is None else prefix
    yield from outer_weights(spec, prefix)
    declared = {layer: LayerDeclaration.of(spec, layer) for layer in set(spec.layers)}
    for index, layer in enumerate(spec.layers):
        for weight in declared[layer].weights() if layer.weights_of is None else ():
            yield replace(weight, name=f"{names.layer(prefix, index)}{weight.name}")


def outer_weights(spec: ArchSpec, prefix: str) -> Iterator[Weight]:
    """The weights outside the layers: embeddings, final norm, head."""
    names, hidden, width = spec.names, spec.hidden_size, spec.embedding_width
    yield Weight(f"{prefix}{names.embedding}.weight", (spec.vocab_size, width), "embedding")
    if spec.learned_position_offset is not None:
        rows = spec.max_positions + spec.learned_position_offset
        yield Weight(f"{prefix}{names.positions}.weight", (rows, hidden), "embedding")
    if spec.token_types:
        yield Weight(f"{prefix}{names.token_types}.weight", (spec.token_types, hidden), "embedding")
    if spec.embedding_norm:
        yield from _with_prefix(Norm.of_stream(spec, names.embedding_norm), prefix)
    if width != hidden:
        yield from Linear(((prefix + names.project_in, hidden),), width).weights()
        yield from Linear(((prefix + names.project_out, width),), hidden).weights()
    if spec.ngrams is not None:
        yield from _with_prefix(spec.ngrams, prefix)
    if (stream := spec.stream) is not None:
        if (table := stream.table) is not None:
            yield Weight(f"{prefix}{table.name}.weight", (table.vocab_size, table.width), "embedding")
        for declared in (*stream.declare_beginning(spec).values(), *stream.declare_end(spec).values()):
            yield from _with_prefix(declared, prefix)
    if spec.final_norm:
        yield from _with_prefix(Norm.of_stream(spec, names.final_norm), prefix)
    if not spec.has_head:
        return
    head = Linear(((names.lm_heads[0], spec.vocab_size),), width, spec.head_bias, "head")
    yield from (weight for weight in head.weights() if not spec.tied_head or weight.name.endswith(".bias"))


def _with_prefix(declared: Declared, prefix: str) -> Iterator[Weight]:
    return (replace(weight, name=prefix + weight.name) for weight in declared.weights())


def weight_shapes(spec: ArchSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight, as dummy weights need them."""
    return {weight.name: weight.shape for weight in model_weights(spec)}


def table_names(spec: ArchSpec) -> frozenset[str]:
    """The names of weights that are whole numbers, for dummy weights."""
    return frozenset(weight.name for weight in model_weights(spec) if weight.role == "table")


def weight_elements(spec: ArchSpec) -> int:
    """Number of the model's parameters."""
    if spec.foreign:
        return sum(math.prod(weight.shape) for weight in spec.foreign)
    outer = sum(math.prod(weight.shape) for weight in outer_weights(spec, ""))
    elements = {layer: layer_elements(spec, layer) for layer in set(spec.layers)}
    return outer + sum(elements[layer] for layer in spec.layers if layer.weights_of is None)


def layer_elements(spec: ArchSpec, layer: LayerSpec) -> int:
    """Number of a layer's parameters."""
    return sum(math.prod(weight.shape) for weight in LayerDeclaration.of(spec, layer).weights())


def repeated_elements(spec: ArchSpec) -> int:
    """Number of parameters that a CPU holds in two layouts."""
    found = 0
    for layer in () if spec.foreign else spec.layers:
        for declared in LayerDeclaration.of(spec, layer).mixer.values():
            if declared.held_twice:
                found += sum(math.prod(weight.shape) for weight in declared.weights())
    return found


def redundant_elements(spec: ArchSpec, num_redundant: int) -> int:
    """Number of parameters of `num_redundant` expert replicas in each layer."""
    found = 0
    for layer in () if spec.foreign else spec.layers:
        if (stack := ExpertStack.of(spec, layer)) is not None:
            found += sum(math.prod(weight.shape) for weight in stack.weights()) * num_redundant // len(stack.gates)
    return found


def prompt_logprobs_cost(spec: ArchSpec) -> float:
    """Extra cost of a prompt token whose log-probabilities are reported, in units of an ordinary prompt token's cost.

    That is the head's parameters over the layers' parameters per token, times LOGITS_PASSES, since the logits are also
    read (to check that they are finite, to sum them, to find the likeliest).
    """
    head = spec.vocab_size * spec.embedding_width
    if spec.foreign:
        layers = float(sum(math.prod(each.shape) for each in spec.foreign if each.role not in ("embedding", "head")))
    else:
        of_token = {layer: _elements_of_token(spec, layer) for layer in set(spec.layers)}
        layers = sum(of_token[layer] for layer in spec.layers)
    return LOGITS_PASSES * head / max(1.0, layers)


def _elements_of_token(spec: ArchSpec, layer: LayerSpec) -> float:
    """Number of a layer's parameters that a token is computed with: those of the chosen experts only."""
    weights = LayerDeclaration.of(spec, layer).weights()
    return sum(math.prod(each.shape) * (layer.ffn.chosen_share if each.role == "expert" else 1.0) for each in weights)


def step_work(spec: ArchSpec) -> StepWork | None:
    """What a step computes for each token; None for a model whose layers are not known."""
    if spec.foreign:
        return None
    parts: dict[int | None, list[float]] = {}
    elements = experts = of_token = 0.0
    shares = [1.0]
    by_layer = {layer: _work_of_layer(spec, layer) for layer in set(spec.layers)}
    for layer in spec.layers:
        work = by_layer[layer]
        of_token, elements, experts = of_token + work.of_token, elements + work.elements, experts + work.experts
        if work.experts:
            shares.append(layer.ffn.chosen_share)
        part = parts.setdefault(layer.sliding_window, [0.0, 0.0])
        part[0] += work.pair_flops
        part[1] += work.cached
    outer = sum(math.prod(weight.shape) for weight in outer_weights(spec, ""))
    return StepWork(
        token_flops=2 * of_token,
        output_flops=2.0 * spec.vocab_size * spec.embedding_width if spec.has_head else 0.0,
        attention=tuple(
            AttentionWork(window=window, pair_flops=flops, cached_elements=int(cached))
            for window, (flops, cached) in parts.items()
            if flops or cached
        ),
        expert_share=experts / (elements + outer),
        chosen_share=min(shares),
    )


class _LayerWork(NamedTuple):
    elements: float
    experts: float
    """Parameters, all and those of experts."""
    of_token: float
    """Parameters of matrices that one token meets."""
    pair_flops: float
    cached: int


def _work_of_layer(spec: ArchSpec, layer: LayerSpec) -> _LayerWork:
    declared = LayerDeclaration.of(spec, layer)
    weights = list(declared.weights())
    matrices = [each for each in weights if each.role in ("matrix", "router")]
    experts = sum(math.prod(each.shape) for each in weights if each.role == "expert")
    pair_flops = 0.0
    for each in declared.mixer.values():
        if isinstance(each, Attend):
            pair_flops += 4 * each.num_heads * each.head_dim  # scores and weighted values
        elif isinstance(each, AttendLatent):
            pair_flops += 2 * each.num_heads * (each.nope_dim + each.rope_dim + each.value_dim)
    own_cache = layer.mixer.cache if layer.cache_of is None else None
    return _LayerWork(
        elements=sum(math.prod(each.shape) for each in weights),
        experts=experts,
        of_token=sum(math.prod(each.shape) for each in matrices) + experts * layer.ffn.chosen_share,
        pair_flops=pair_flops,
        cached=0 if own_cache is None else own_cache.elements,
    )


def activation_bytes(
    spec: ArchSpec, plan: Plan, itemsize: int, place: RankCoordinates = SINGLE, *, gathers: bool = True
) -> int:
    """Upper bound, in bytes, of the memory that a step of max_num_batched_tokens needs on one rank besides weights and
    cache.

    It is the sum of one layer's tensors (residual, normed input, contribution, and its blocks' intermediates), the keys
    and values that attention gathers, the logits of every row, and this rank's share of the ranks' shared memory.
    gathers: False: attention reads the cache where it is.
    """
    spec = spec.for_ranks(place.tp_size)
    mixers = max(mixer.values_per_token(place.tp_size) for mixer in spec.mixers)
    ffns = max(ffn.values_per_token(place.tp_size) for ffn in {layer.ffn for layer in spec.layers})
    stream = 3 * spec.hidden_size if spec.stream is None else spec.stream.values_per_token()
    layer = plan.max_num_batched_tokens * (stream + mixers + ffns) * itemsize
    gathered = 0
    if gathers:
        most_blocks = plan.max_num_seqs * -(-plan.max_model_len // plan.block_size)
        rows = [
            min(MAX_GATHER_ROWS, most_blocks * cache.num_heads) * cache.key_size
            for cache in set(spec.own_caches(place.tp_size))
            if cache is not None
        ]
        gathered = 2 * plan.block_size * itemsize * max(rows, default=0)
    logits = LOGITS_COPIES * plan.max_logits * spec.vocab_size * 4 if place.is_last_stage and spec.has_head else 0
    shared = 0
    if place.world_size > 1:
        shared = collectives_bytes(World.of(plan, place.tp_size, place.pp_size)) // place.world_size
    return layer + gathered + logits + shared
