"""A checkpoint's tensors as explicit records, and the list of transformations that make a model's weights of them.

    source          stored(name) > StoredTensor: shape, format, group, and how its numbers are read
    1. matrices stored as gptq                  makes 168 tensors, removes 504
    2. rows of interleaved rotary pairs         makes 64

A source is a kind of file (`sources/`). A transformation says which tensors it makes and removes, and makes their
records; every other record passes it whole. All fields of a record must be given, and shape, parts and packed forms are
read from records alone, so that nothing can change what is loaded by leaving something out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.grouped import GroupedWeight

if TYPE_CHECKING:
    from headrace.executor.checkpoints.formats import AsLoaded
    from headrace.executor.parallel.padding import GrownAxis

Packed = tuple[str, np.ndarray] | GroupedWeight
"""A quantised weight as stored: (GGUF type's name, [rows, bytes of a row] uint8), or codes with group scales."""
ReadPart = Callable[[slice | None, slice | None], Tensor]
"""(rows, columns) -> the tensor's part of these, all of them for None. Slices have no step, and bounds within the
shape."""


@dataclass(frozen=True)
class Numbers:
    """How a tensor's numbers are read: the two ways give the same numbers, so they are only replaced together."""

    part: ReadPart
    """Reads a part of it and nothing else; quantised weights are dequantised."""
    packed: Callable[[], Packed] | None
    """Reads a quantised weight whole, as it is stored and without padding; None for others."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """What is known of a tensor before it is read."""

    shape: tuple[int, ...]
    format: str
    """How it is stored: float32, bfloat16, Q4_K, gptq, ..."""
    group: int | None
    """Number of neighbours in a row that share a scale, which ranks cannot divide; None for tensors that are not
    quantised."""
    numbers: Numbers
    padding: Mapping[int, GrownAxis]
    """The dimensions that are padded: see executor/parallel/padding.py."""

    @classmethod
    def plain(cls, shape: tuple[int, ...], format_: str, part: ReadPart) -> StoredTensor:
        """A tensor that is not quantised."""
        return cls.unpadded(shape, format_, None, Numbers(part, None))

    @classmethod
    def unpadded(cls, shape: tuple[int, ...], format_: str, group: int | None, numbers: Numbers) -> StoredTensor:
        return cls(shape=shape, format=format_, group=group, numbers=numbers, padding=MappingProxyType({}))

    def reading(self, numbers: Numbers) -> StoredTensor:
        """The tensor, whose numbers are read in another way."""
        return replace(self, numbers=numbers)

    def __str__(self) -> str:
        return self.format if self.group is None else f"{self.format} in groups of {self.group}"


class WeightSource(ABC):
    """Tensors under Hugging Face names, each read on request. A subclass says what it holds and how it is stored."""

    @abstractmethod
    def names(self) -> frozenset[str]: ...

    @abstractmethod
    def stored(self, name: str) -> StoredTensor:
        """A tensor's record. Raises ModelError for one that cannot be what the config says."""

    @final
    def shape(self, name: str) -> tuple[int, ...]:
        return self.stored(name).shape

    @final
    def get(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """The tensor, or the part of these rows and columns."""
        return self.stored(name).numbers.part(rows, columns)

    @final
    def packed(self, name: str) -> Packed | None:
        """A quantised weight as it is stored; None for others."""
        read = self.stored(name).numbers.packed
        return None if read is None else read()

    def __init_subclass__(cls) -> None:
        if derived := {"shape", "get", "packed"} & vars(cls).keys():
            raise TypeError(f"{cls.__name__} defines {', '.join(sorted(derived))}, which follow from `stored`")


@dataclass(frozen=True)
class Transformation:
    """A change of some tensors."""

    what: str
    makes: frozenset[str]
    """The tensors that it makes, or makes anew."""
    stored: Callable[[str], StoredTensor]
    """Makes the record of one of these from the records before the transformation."""
    removes: frozenset[str]
    """The tensors that are gone after it."""

    def __str__(self) -> str:
        return f"{self.what}: makes {len(self.makes)}" + f", removes {len(self.removes)}" * bool(self.removes)


@dataclass(frozen=True, eq=False)
class Weights(WeightSource):
    """A source after a list of transformations."""

    source: WeightSource
    transformations: tuple[Transformation, ...] = ()
    as_loaded: AsLoaded | None = None
    """How floats are to be quantised while they load, once they are those that the model declares; None: not at all."""

    @classmethod
    def of(cls, source: WeightSource) -> Weights:
        if not isinstance(source, WeightSource):
            raise TypeError(f"a {type(source).__name__} is no WeightSource, which has the record of every tensor")
        return source if isinstance(source, Weights) else cls(source)

    def names(self) -> frozenset[str]:
        return self._names

    @cached_property
    def _names(self) -> frozenset[str]:
        found = self.source.names()
        for each in self.transformations:
            found = (found - each.removes) | each.makes
        return found

    def stored(self, name: str) -> StoredTensor:
        for each in reversed(self.transformations):
            if name in each.makes:
                return each.stored(name)
            if name in each.removes:
                raise KeyError(name)
        return self.source.stored(name)

    def then(
        self,
        what: str,
        makes: frozenset[str],
        stored: Callable[[str], StoredTensor],
        removes: frozenset[str] = frozenset(),
    ) -> Weights:
        """These weights after one more transformation."""
        added = Transformation(what, makes, stored, removes - makes)
        return replace(self, transformations=(*self.transformations, added))

    def __str__(self) -> str:
        """The source, the transformations, and the formats of what results."""
        formats = Counter(str(self.stored(name)) for name in self.names())
        lines = [f"{type(self.source).__name__}: {len(self.source.names())} tensors"]
        lines += [f"{number}. {each}" for number, each in enumerate(self.transformations, 1)]
        result = ", ".join(f"{count} of {format_}" for format_, count in formats.most_common())
        return "\n    ".join([*lines, f"= {len(self.names())} tensors: {result}"])


def bounds(part: slice | None, size: int) -> tuple[int, int]:
    """Start and stop of a slice of `size` elements; None is all. Raises ValueError for a step or bounds outside."""
    if part is None:
        return 0, size
    start, stop = 0 if part.start is None else part.start, size if part.stop is None else part.stop
    if part.step not in (None, 1) or not 0 <= start <= stop <= size:
        raise ValueError(f"{part} is not a part of {size}")
    return start, stop


def take_part(tensor: Any, shape: tuple[int, ...], rows: slice | None, columns: slice | None) -> Tensor:
    """The part of a tensor, or of a safetensors slice (get_slice), with the given rows and columns."""
    index = [slice(*bounds(rows, shape[0]))] if shape else []
    if columns is not None:
        index += [slice(None)] * (len(shape) - 2) + [slice(*bounds(columns, shape[-1]))]
    part: Tensor = tensor[tuple(index)] if index else tensor[...]
    return part


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
