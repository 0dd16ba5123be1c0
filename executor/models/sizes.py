"""What a model reads and how much memory it takes, from its `ArchSpec` alone: all of it follows from what the blocks
declare."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from headrace.core.options.plan import Plan
from headrace.executor.models.arch import ArchSpec, LayerSpec
from headrace.executor.models.blocks import AttendLatent, LayerDeclaration, Linear, Norm, Weight
from headrace.executor.models.blocks.experts import Experts
from headrace.executor.parallel.rank_place import SINGLE, RankPlace, World, collectives_bytes
from headrace.kernels.reference.attention import MAX_GATHER_ROWS

LOGITS_COPIES = 4
"""float32 logits, what the sampler derives from them (tempered, int64 keys: twice the size), with nothing freed."""
LOGITS_PASSES = 2
"""The time of a prompt token's logits and of reading them, beside that of their product alone. On a CPU, of
a vocabulary of 49,152 and a hidden size of 576: 1.4 for its own log-probability alone, 1.7 for the 20 likeliest too."""


def model_weights(spec: ArchSpec, prefix: str | None = None) -> Iterator[Weight]:
    """Every weight of the model under its name in the checkpoint; `prefix` is by default the first of the names'."""
    if spec.foreign:
        yield from spec.foreign
        return
    names = spec.names
    prefix = names.prefixes[0] if prefix is None else prefix
    yield from outer_weights(spec, prefix)
    declared = {layer: LayerDeclaration.of(spec, layer) for layer in set(spec.layers)}
    for index, layer in enumerate(spec.layers):
        for weight in declared[layer].weights():
            yield Weight(f"{names.layer(prefix, index)}{weight.name}", weight.dimensions, weight.role)


def outer_weights(spec: ArchSpec, prefix: str) -> Iterator[Weight]:
    """Those that are of no layer."""
    names, hidden, width = spec.names, spec.hidden_size, spec.embedding_width
    yield Weight(f"{prefix}{names.embedding}.weight", (spec.vocab_size, width), "embedding")
    if spec.learned_position_offset is not None:
        rows = spec.max_positions + spec.learned_position_offset
        yield Weight(f"{prefix}{names.positions}.weight", (rows, hidden), "embedding")
    if spec.embedding_norm:
        yield from Norm.of_stream(spec, prefix + names.embedding_norm).weights()
    if width != hidden:
        yield from Linear(((prefix + names.project_in, hidden),), width).weights()
        yield from Linear(((prefix + names.project_out, width),), hidden).weights()
    if (stream := spec.stream) is not None:
        table = stream.table
        yield Weight(f"{prefix}{table.name}.weight", (table.vocab_size, table.width), "embedding")
        for declared in (*stream.declare_beginning(spec).values(), *stream.declare_end(spec).values()):
            yield from (replace(weight, name=prefix + weight.name) for weight in declared.weights())
    if spec.final_norm:
        yield from Norm.of_stream(spec, prefix + names.final_norm).weights()
    if not spec.tied_head:
        yield from Linear(((names.lm_heads[0], spec.vocab_size),), width, spec.head_bias, "head").weights()


def weight_shapes(spec: ArchSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight, so that random ones can stand in."""
    return {weight.name: weight.shape for weight in model_weights(spec)}


def weight_elements(spec: ArchSpec) -> int:
    """The model's parameters."""
    if spec.foreign:
        return sum(math.prod(weight.shape) for weight in spec.foreign)
    outer = sum(math.prod(weight.shape) for weight in outer_weights(spec, ""))
    elements = {layer: layer_elements(spec, layer) for layer in set(spec.layers)}
    return outer + sum(elements[layer] for layer in spec.layers)


def layer_elements(spec: ArchSpec, layer: LayerSpec) -> int:
    """The parameters of one layer."""
    return sum(math.prod(weight.shape) for weight in LayerDeclaration.of(spec, layer).weights())


def repeated_elements(spec: ArchSpec) -> int:
    """Those that a CPU keeps a second time: latent attention's up-projection, by heads and whole."""
    found = 0
    for layer in () if spec.foreign else spec.layers:
        for declared in LayerDeclaration.of(spec, layer).mixer.values():
            if isinstance(declared, AttendLatent):
                found += sum(math.prod(weight.shape) for weight in declared.weights())
    return found


def redundant_elements(spec: ArchSpec, num_redundant: int) -> int:
    """Those of copies that ranks have of so many of each layer's experts."""
    found = 0
    for layer in () if spec.foreign else spec.layers:
        if isinstance(ffn := layer.ffn, Experts):
            stack = ffn.declare(spec)["experts"]
            found += sum(math.prod(weight.shape) for weight in stack.weights()) * num_redundant // ffn.num_experts
    return found


def prompt_logprobs_cost(spec: ArchSpec) -> float:
    """What a prompt token whose log-probabilities are reported costs more than another, in prompt tokens.

    The product with the vocabulary's matrix beside those of the layers, by parameters; and as much again, for what
    reads the logits (whether they are finite, their sum, the likeliest ones).
    """
    head = spec.vocab_size * spec.embedding_width
    if spec.foreign:
        layers = float(sum(math.prod(each.shape) for each in spec.foreign if each.role not in ("embedding", "head")))
    else:
        of_token = {layer: _elements_of_token(spec, layer) for layer in set(spec.layers)}
        layers = sum(of_token[layer] for layer in spec.layers)
    return LOGITS_PASSES * head / max(1.0, layers)


def _elements_of_token(spec: ArchSpec, layer: LayerSpec) -> float:
    """Of a layer's parameters those that compute one token."""
    weights = LayerDeclaration.of(spec, layer).weights()
    return sum(math.prod(each.shape) * (layer.ffn.chosen_share if each.role == "expert" else 1.0) for each in weights)


def activation_bytes(spec: ArchSpec, plan: Plan, itemsize: int, place: RankPlace = SINGLE) -> int:
    """Upper bound of what a step of max_num_batched_tokens needs on one rank at once besides weights and cache.

    One layer's tensors live together (residual, normalised input, contribution, and what its blocks work on), the keys
    and values that attention gathers, the logits of every row, and this rank's part of what the ranks share.
    """
    spec = spec.for_ranks(place.tp_size)
    mixers = max(mixer.values_per_token(place.tp_size) for mixer in spec.mixers)
    ffns = max(ffn.values_per_token(place.tp_size) for ffn in {layer.ffn for layer in spec.layers})
    stream = 3 * spec.hidden_size if spec.stream is None else spec.stream.values_per_token()
    layer = plan.max_num_batched_tokens * (stream + mixers + ffns) * itemsize
    most_blocks = plan.max_num_seqs * -(-plan.max_model_len // plan.block_size)
    gathered = (
        2
        * plan.block_size
        * itemsize
        * max(
            min(MAX_GATHER_ROWS, most_blocks * cache.num_heads) * cache.key_size
            for cache in set(spec.own_caches(place.tp_size))
        )
    )
    logits = LOGITS_COPIES * plan.max_logits * spec.vocab_size * 4 if place.is_last_stage else 0
    shared = 0
    if place.world_size > 1:
        shared = collectives_bytes(World.of(plan, place.tp_size, place.pp_size)) // place.world_size
    return layer + gathered + logits + shared
