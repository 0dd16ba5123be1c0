"""Quantises float weights while they load, one matrix at a time, so that at most one is in memory in both forms."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import torch
from torch import Tensor

from headrace.executor.checkpoints.formats import AsLoaded
from headrace.executor.checkpoints.weights import Numbers, StoredTensor, Weights, bounds
from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.sizes import model_weights
from headrace.ipc.failure import ModelError, OptionError
from headrace.kernels.grouped import GroupedWeight

logger = logging.getLogger(__name__)
KINDS = {"matrix": "matrices of layers", "expert": "experts"}


def quantised_as_loaded(weights: Weights, as_loaded: AsLoaded, spec: ArchSpec) -> Weights:
    """Weights with the names that the model's blocks declare, whose matrices are quantised when they are read; their
    parts are dequantised values in float32. Raises OptionError if the model has nothing to quantise."""
    made = _matrices(weights.names(), as_loaded, spec)

    def stored(name: str) -> StoredTensor:
        floats = weights.stored(name)

        def read(rows: slice | None = None) -> GroupedWeight:
            return as_loaded.quantise(finite(name, floats.numbers.part(rows, None)))

        def part(rows: slice | None, columns: slice | None) -> Tensor:
            values = read(rows).floats()
            return values[:, slice(*bounds(columns, values.shape[1]))].contiguous()

        return StoredTensor.unpadded(floats.shape, as_loaded.name, as_loaded.group or 1, Numbers(part, read))

    return replace(weights, as_loaded=None).then(f"quantised as they load ({as_loaded.name})", made, stored)


def _matrices(held: frozenset[str], as_loaded: AsLoaded, spec: ArchSpec) -> frozenset[str]:
    """The weights that are quantised. Raises OptionError if there is none."""
    wanted = [
        weight
        for weight in model_weights(spec, spec.names.prefix_in(held))
        if weight.role in as_loaded.roles and weight.name in held
    ]
    own = frozenset(weight.name for weight in wanted if _divides(as_loaded, weight.shape[1]))
    if not own:
        kinds = " and ".join(KINDS[role] for role in as_loaded.roles)
        why = f"groups of {as_loaded.group} divide none of its rows" if wanted else "it has none"
        raise OptionError(f"quantization={as_loaded.name} quantises {kinds} of {spec.architecture}, and {why}")
    if others := sorted({weight.shape[1] for weight in wanted if weight.name not in own}):
        logger.warning(
            "matrices with rows of %s weights are not quantised, as groups of %d do not divide them",
            ", ".join(map(str, others)),
            as_loaded.group,
        )
    return own


def finite(name: str, floats: Tensor) -> Tensor:
    """A weight to quantise, in float32. Raises ModelError if it holds infinities or NaN, which codes would hide."""
    if not floats.is_floating_point():
        raise ModelError(f"the weight {name} is stored as {floats.dtype}; a type of floats is expected")
    wide = floats.to(torch.float32)
    if not bool(torch.isfinite(wide).all()):
        raise ModelError(f"the weight {name} holds infinities or NaN, which cannot be quantised")
    return wide


def bytes_as_loaded(as_loaded: AsLoaded, spec: ArchSpec, itemsize: int) -> int:
    """Memory of a model's weights, in bytes. itemsize: of the elements of weights that stay floats."""
    total = 0.0
    for weight in model_weights(spec):
        own = weight.role in as_loaded.roles and _divides(as_loaded, weight.shape[1])
        total += math.prod(weight.shape) * (as_loaded.bits / 8 if own else itemsize)
    return math.ceil(total)


def _divides(as_loaded: AsLoaded, columns: int) -> bool:
    return as_loaded.group is None or columns % as_loaded.group == 0
