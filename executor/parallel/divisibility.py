"""Checks by the model's config, before any rank starts, that the requested ranks can share the model. No torch.

A config that is not on this machine yet is checked by each rank itself, with the same messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.core.options.engine_options import Options
from headrace.core.options.eplb import eplb_of
from headrace.executor.checkpoints.checkpoint import config_at_hand
from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.blocks import ExpertStack
from headrace.executor.models.families import NotNativeError, UnknownArchitectureError, spec_from_config
from headrace.executor.parallel.rank_place import RankCoordinates
from headrace.ipc.failure import OptionError


def check_world(options: Options) -> None:
    """Raises ModelError or OptionError, with the numbers, where the ranks cannot share the model.

    Does not check for a user's own `worker_cls`, which may divide a model in any way, nor for transformers' code, which
    runs on one rank.
    """
    if options.worker_cls != "auto" or options.model_impl == "transformers":
        return
    config: Mapping[str, Any] | None = config_at_hand(options)
    if config is None:
        return
    try:
        spec = spec_from_config(config)
    except (NotNativeError, UnknownArchitectureError):
        return  # each rank asks transformers for this model
    check_experts(spec, options)
    for rank in range(options.tensor_parallel_size * options.pipeline_parallel_size):
        check_shares(spec, RankCoordinates.of_options(rank, options))


def check_experts(spec: ArchSpec, options: Options) -> None:
    """Raises OptionError where expert parallelism or its options would have nothing to divide."""
    eplb = eplb_of(options)
    if not options.enable_expert_parallel:
        if options.expert_placement_strategy != Options().expert_placement_strategy:
            raise OptionError(
                f"expert_placement_strategy={options.expert_placement_strategy} is of experts that are divided whole: "
                "it needs enable_expert_parallel"
            )
        return
    if options.tensor_parallel_size == 1 and not options.shares_experts:
        raise OptionError(
            "enable_expert_parallel divides experts among ranks: it needs tensor_parallel_size=2 or more, or "
            "data_parallel_size=2 or more on one machine"
        )
    stacks = [stack for layer in spec.layers if (stack := ExpertStack.of(spec, layer)) is not None]
    if not stacks:
        raise OptionError(f"enable_expert_parallel: a {spec.architecture} has no experts to divide")
    if eplb is not None:
        for count in sorted({len(stack.gates) for stack in stacks}):
            _check_copies(spec, count, eplb.num_redundant_experts, options.tensor_parallel_size)


def _check_copies(spec: ArchSpec, count: int, num_redundant: int, num_ranks: int) -> None:
    """Raises OptionError unless every rank gets equally many of a layer's experts and none of them twice."""
    if count < num_ranks:
        raise OptionError(
            f"enable_eplb: the {count} experts of a layer of this {spec.architecture} are fewer than its {num_ranks} "
            "ranks, which share each of them by rows: there is nothing to move"
        )
    most = count * (num_ranks - 1)
    if num_redundant > most:
        raise OptionError(
            f"eplb_config has num_redundant_experts={num_redundant}: with {most} each of the {num_ranks} ranks has all "
            f"{count} experts of a layer of this {spec.architecture}"
        )
    if rest := (count + num_redundant) % num_ranks:
        down, up = num_redundant - rest, num_redundant + num_ranks - rest
        right = " or ".join(str(each) for each in (down, up) if 0 <= each <= most)
        raise OptionError(
            f"enable_eplb: {count} experts and num_redundant_experts={num_redundant} copies do not divide evenly among "
            f"{num_ranks} ranks; with num_redundant_experts {right} in eplb_config they do"
        )


def check_shares(spec: ArchSpec, place: RankCoordinates) -> None:
    """Raises ModelError or OptionError, with the numbers, where the rank of this place cannot have its own part."""
    spec.own_caches(place.tp_size)
    place.vocabulary(spec.vocab_size)
    if spec.stream is not None and spec.stream.table is not None:
        place.vocabulary(spec.stream.table.vocab_size)
    own = place.layers(spec.num_layers)
    if any((0 in own) != (layer in own) for layer, each in enumerate(spec.layers) if each.cache_of == 0):
        raise OptionError(
            f"later layers of this {spec.architecture} read the cache of its first layer, and stages do not share "
            "caches: pipeline_parallel_size must be 1"
        )
    sources = [source for layer in own if (source := spec.layers[layer].cache_of) is not None]
    if sources and min(sources) not in own:
        first = min(source for layer in spec.layers if (source := layer.cache_of) is not None)
        raise OptionError(
            f"layers {own.start} to {own.stop - 1} of this {spec.architecture} read the cache of layer {min(sources)}, "
            f"which another stage keeps: pipeline_layer_partition must give the last stage those from {first} on"
        )
    if own and spec.layers[own.start].mixer.follows:
        raise OptionError(
            f"layer {own.start} of this {spec.architecture} attends to the keys that a layer of another stage chose: "
            "pipeline_layer_partition must begin each stage with a layer that chooses"
        )
