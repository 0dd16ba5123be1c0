"""Quantises float weights while they load, one matrix at a time, so that at most one is in memory in both forms."""

from __future__ import annotations

import logging
import math

import torch
from torch import Tensor

from headrace.executor.checkpoints.formats import AsLoaded
from headrace.executor.checkpoints.weights import WeightSource, WrappedWeights, bounds
from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.sizes import model_weights
from headrace.ipc.failure import ModelError, OptionError
from headrace.kernels.grouped import GroupedWeight

logger = logging.getLogger(__name__)
KINDS = {"matrix": "matrices of layers", "expert": "experts"}


class ToQuantise(WrappedWeights):
    """A source marked for quantisation: `declared_weights.as_declared` quantises its matrices once it has mapped them
    to the declared rows."""

    def __init__(self, source: WeightSource, as_loaded: AsLoaded) -> None:
        super().__init__(source)
        self.as_loaded = as_loaded

    def get(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        return self.source.get(name, rows=rows, columns=columns)


class QuantisedAsLoaded(WrappedWeights):
    """A `WeightSource` around one with the names that the model's blocks declare. `packed` returns a quantised matrix,
    `get` its dequantised values in float32. Raises OptionError if the model has nothing to quantise."""

    def __init__(self, source: WeightSource, as_loaded: AsLoaded, spec: ArchSpec) -> None:
        super().__init__(source)
        self.as_loaded = None
        held = source.names()
        wanted = [
            weight
            for weight in model_weights(spec, spec.names.prefix_in(held))
            if weight.role in as_loaded.roles and weight.name in held
        ]
        self._own = frozenset(weight.name for weight in wanted if _divides(as_loaded, weight.shape[1]))
        self._quantise, self._group = as_loaded.quantise, as_loaded.group
        self.packed, self.group_of = self._packed, self._group_of
        if not self._own:
            kinds = " and ".join(KINDS[role] for role in as_loaded.roles)
            why = f"groups of {as_loaded.group} divide none of its rows" if wanted else "it has none"
            raise OptionError(f"quantization={as_loaded.name} quantises {kinds} of {spec.architecture}, and {why}")
        if others := sorted({weight.shape[1] for weight in wanted if weight.name not in self._own}):
            logger.warning(
                "matrices with rows of %s weights are not quantised, as groups of %d do not divide them",
                ", ".join(map(str, others)),
                as_loaded.group,
            )

    def get(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        if name not in self._own:
            return self.source.get(name, rows=rows, columns=columns)
        values = self._read(name, rows).floats()
        return values[:, slice(*bounds(columns, values.shape[1]))].contiguous()

    def _packed(self, name: str) -> GroupedWeight | None:
        """The whole quantised matrix; None for weights that stay floats."""
        return self._read(name) if name in self._own else None

    def _group_of(self, name: str) -> int | None:
        """Number of neighbours in a row that ranks cannot divide; None for weights that stay floats."""
        if name not in self._own:
            return None
        return 1 if self._group is None else self._group

    def _read(self, name: str, rows: slice | None = None) -> GroupedWeight:
        floats = self.source.get(name, rows=rows)
        if not floats.is_floating_point():
            raise ModelError(f"the weight {name} is stored as {floats.dtype}; a type of floats is expected")
        wide = floats.to(torch.float32)
        if not bool(torch.isfinite(wide).all()):
            raise ModelError(f"the weight {name} holds infinities or NaN, which cannot be quantised")
        return self._quantise(wide)


def bytes_as_loaded(as_loaded: AsLoaded, spec: ArchSpec, itemsize: int) -> int:
    """Memory of a model's weights, in bytes. itemsize: of the elements of weights that stay floats."""
    total = 0.0
    for weight in model_weights(spec):
        own = weight.role in as_loaded.roles and _divides(as_loaded, weight.shape[1])
        total += math.prod(weight.shape) * (as_loaded.bits / 8 if own else itemsize)
    return math.ceil(total)


def _divides(as_loaded: AsLoaded, columns: int) -> bool:
    return as_loaded.group is None or columns % as_loaded.group == 0
