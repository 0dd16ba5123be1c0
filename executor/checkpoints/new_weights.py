"""Weights read while others serve: beside the old ones first, on every rank, and only then in their place."""

from __future__ import annotations

import msgspec

from headrace.core.options.engine_options import Options
from headrace.core.options.plan import Plan
from headrace.executor.checkpoints.checkpoint import Checkpoint, open_checkpoint
from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.implementations import find_model
from headrace.ipc.failure import ModelError


def open_again(path: str, options: Options, plan: Plan, spec: ArchSpec) -> Checkpoint:
    """The checkpoint at `path`, or the model's own where that is empty, to be read in place of the one that is served.

    Raises ModelError when it is missing, or another model: one whose config differs.
    """
    if path:
        # Random weights were for want of a checkpoint; whoever names one wants what is in it.
        load_format = "auto" if options.load_format == "dummy" else options.load_format
        options = msgspec.structs.replace(options, model=path, load_format=load_format)
    checkpoint = open_checkpoint(options)
    other = find_model(checkpoint, options).spec
    if other != spec:
        differing = [name for name in spec.__dataclass_fields__ if getattr(spec, name) != getattr(other, name)]
        raise ModelError(
            f"the weights of {checkpoint.name} cannot replace those of {plan.model.name}: their configs differ in "
            f"{', '.join(differing)}"
        )
    if checkpoint.dtype_name != plan.model.checkpoint_dtype:
        raise ModelError(
            f"the weights of {checkpoint.name} are {checkpoint.dtype_name}, and those of {plan.model.name} "
            f"{plan.model.checkpoint_dtype}: they must be of one type"
        )
    return checkpoint
