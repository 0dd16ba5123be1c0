"""Presents a quantised checkpoint under the names and shapes of the unquantised one."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from headrace.executor.checkpoints.declared_weights import parts_of_tables, stored_weights, under_own_names
from headrace.executor.checkpoints.formats import Format, Parts, expect, lacking
from headrace.executor.checkpoints.formats.cache_scales import OF_CACHE
from headrace.executor.checkpoints.stacked_experts import with_scales_of_each_expert
from headrace.executor.checkpoints.weights import (
    Numbers,
    ReadPart,
    StoredTensor,
    Weights,
    WeightSource,
    bounds,
    dtype_name,
)
from headrace.executor.models.arch import ArchSpec
from headrace.ipc.failure import ModelError
from headrace.kernels.grouped import SCALE_DTYPES, GroupedWeight


def quantised(source: WeightSource, format_: Format, spec: ArchSpec) -> Weights:
    """The stored tensors as matrices of the format; their parts are dequantised values in float32.

    Raises ModelError if config and tensors disagree: at once if tensors are missing, otherwise on reading.
    """
    weights = with_scales_of_each_expert(spec, under_own_names(spec, Weights.of(source)))
    made = _Matrices(weights, format_, spec)
    gone = weights.names() - made.names
    return weights.then(f"matrices stored as {format_.names[0]}", made.names, made.stored, gone)


class _Matrices:
    def __init__(self, source: Weights, format_: Format, spec: ArchSpec) -> None:
        self._source, self._format = source, format_
        held = source.names()
        as_floats = held | {f"{name.rpartition('.')[0]}.weight" for name in held}
        self._parts: dict[str, Parts] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        weights = {weight.name: weight for weight in stored_weights(spec, as_floats)}
        declared = {name: weight.role for name, weight in weights.items()}
        vectors = (name for name in held if len(source.shape(name)) == 1)
        self._as_stored = {name for name in vectors if name not in declared}  # whoever reads one checks its type
        self._as_stored |= {name for name, role in declared.items() if role == "table"}
        tables = parts_of_tables(spec, held)
        self._as_stored |= {name for names in tables.values() for name in names}
        stored, entries = set[str](), dict[str, int]()
        for weight in weights.values():
            module = weight.name.removesuffix(".weight")
            if len(weight.dimensions) != 2 or not weight.name.endswith(".weight") or weight.name in tables:
                continue
            if not format_.marked(module, held):
                if weight.name in held and source.shape(weight.name) != weight.shape:
                    self._check_floats(weight.name, source.get(weight.name, rows=slice(0, 0)).dtype)
                continue
            parts = format_.parts(module, held)
            if missing := [name for name in parts.values() if name not in held]:
                raise lacking(format_, module, missing)
            if (entry := format_.entry(module)) is not None:
                entries |= {name: max(entry + 1, entries.get(name, 0)) for name in parts.values()}
            self._parts[weight.name], self._shapes[weight.name] = parts, weight.shape
            stored |= {*parts.values(), *(f"{module}.{name}" for name in format_.beside(module))}
            bias = f"{module}.bias"
            if bias in held and bias not in weights and not source.get(bias).any():
                stored.add(bias)  # some tools write biases of zeros for models without biases
        if not self._parts:
            raise ModelError(
                f"the config says that the weights are quantised ({format_.names[0]}), and none of them is stored so"
            )
        for name, count in entries.items():
            if (found := source.shape(name)[0]) != count:
                raise ModelError(f"{name} holds {found} matrices, but the config needs {count}")
        stored |= {name for name in held if OF_CACHE.search(name)}
        self.names = frozenset(held - stored | self._parts.keys())

    def stored(self, name: str) -> StoredTensor:
        if name in self._as_stored:
            return self._source.stored(name)
        if name not in self._parts:
            found = self._source.stored(name)
            return found.reading(Numbers(partial(self._floats, name, found.numbers.part), found.numbers.packed))
        shape = self._shape(name)
        size = self._format.group(_module(name), shape[1])
        group = size if size < shape[1] else 1  # a scale of a whole row fits any part of it
        numbers = Numbers(partial(self._part, name, shape), partial(self._read, name, shape))
        return StoredTensor.unpadded(shape, self._format.scheme(_module(name)), group, numbers)

    def _shape(self, name: str) -> tuple[int, ...]:
        parts = self._parts[name]
        shapes = {part: self._source.shape(each) for part, each in parts.items()}
        try:
            return self._format.shape(_module(name), shapes) or self._shapes[name]
        except ValueError as error:
            said = ", ".join(f"{parts[part]} is {list(shape)}" for part, shape in shapes.items())
            raise ModelError(f"the quantised weights of {_module(name)} are no matrix: {said}") from error

    def _floats(self, name: str, part: ReadPart, rows: slice | None, columns: slice | None) -> Tensor:
        found = part(rows, columns)
        self._check_floats(name, found.dtype)
        return found

    def _part(self, name: str, shape: tuple[int, ...], rows: slice | None, columns: slice | None) -> Tensor:
        height, width = shape
        whole = self._read(name, shape).part(slice(*bounds(rows, height)), slice(0, width))
        return whole.floats()[:, slice(*bounds(columns, width))].contiguous()

    def _check_floats(self, name: str, dtype: torch.dtype) -> None:
        """Raises ModelError if a tensor that is not marked as quantised is not stored as floats."""
        if dtype in SCALE_DTYPES or dtype == torch.float64:
            return
        module = _module(name)
        if name == module or not self._format.marks or len(self._source.shape(name)) != 2:
            raise ModelError(f"{name} is stored as {dtype_name(dtype)}; a type of floats is expected")
        held = self._source.names()
        missing = [each for each in self._format.parts(module, held).values() if each not in held]
        raise lacking(self._format, module, missing)

    def _read(self, name: str, shape: tuple[int, ...]) -> GroupedWeight:
        """The whole matrix, which must be of this shape."""
        module = _module(name)
        entry = self._format.entry(module)
        own = None if entry is None else slice(entry, entry + 1)
        tensors = {part: self._source.get(each, rows=own) for part, each in self._parts[name].items()}
        if own is not None:
            tensors = {part: each[0] for part, each in tensors.items()}
        dtypes = self._format.dtypes(module)
        for part, tensor in tensors.items():
            if tensor.dtype not in dtypes[part]:
                wanted = " or ".join(dtype_name(each) for each in dtypes[part])
                stored = f"{self._parts[name][part]} is stored as {dtype_name(tensor.dtype)}; {wanted} is expected"
                expect(False, module, stored)
        for other in (f"{module}.{suffix}" for suffix in self._format.unshifted):
            if other in self._source.names() and other not in self._parts[name].values():
                expect(
                    not self._source.get(other).float().any(), module, f"{other} is not zero, and nothing is shifted"
                )
        try:
            found = self._format.read(module, tensors)
        except ValueError as error:
            raise ModelError(f"the quantised weights of {module} do not fit together: {error}") from error
        if found.shape != shape:
            raise ModelError(
                f"the quantised weights of {module} are {list(found.shape)}, but the config needs {list(shape)}"
            )
        if found.kind == "e4m3" and ((found.codes & 0x7F) == 0x7F).any():
            raise ModelError(f"the quantised weights of {module} hold NaN")
        if not bool(torch.isfinite(found.scales).all()):
            raise ModelError(f"the scales of {module} are not all finite numbers")
        if found.zeros is not None and not bool(torch.isfinite(found.zeros).all()):
            raise ModelError(f"the zero points of {module} are not all finite numbers")
        return found


def _module(name: str) -> str:
    return name.removesuffix(".weight")
