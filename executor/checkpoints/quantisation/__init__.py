"""Quantised checkpoints. A format is one file here with a constant `FORMAT`: it reads the config's
`quantization_config`, says which tensors hold a matrix, and makes of them the one form that the kernels know,
`kernels.grouped.GroupedWeight`. What uses the forms knows no format, and a format knows no kernel. A constant
`AS_LOADED` makes the same form of float weights as they are read.
"""

from __future__ import annotations

import functools
import importlib
import math
import pkgutil
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from headrace.core.options.quantization_names import RETIRED, check_name
from headrace.core.options.values import nearest
from headrace.executor.models.blocks import Role
from headrace.ipc.failure import ModelError, OptionError
from headrace.kernels.grouped import SCALE_DTYPES, GroupedWeight, Kind

Config = Mapping[str, Any]
Parts = Mapping[str, str]
"""A format's own word for each tensor of a matrix -> its name in the checkpoint."""
Shapes = Mapping[str, tuple[int, ...]]
Dtypes = Mapping[str, tuple[torch.dtype, ...]]
"""A format's own word for each tensor of a matrix -> what it may be stored as."""
FLOATS = SCALE_DTYPES
WORDS, BYTES, FLOATS_OF_8_BITS = (torch.int32,), (torch.uint8,), (torch.float8_e4m3fn,)
EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
WHOLE = (torch.int8, torch.int16, torch.int32, torch.int64)
"""Of a few numbers, whose type does not matter."""


@dataclass(frozen=True)
class Stored:
    """A way of storing a matrix, for the page of formats."""

    text: str
    kinds: tuple[Kind, ...]
    """What matrices become; none where that is each module's own scheme."""
    tests: tuple[str, ...]
    """In tests/checkpoints: functions, or cases of the comparison with the dequantised model."""
    ordered: bool = False
    """Whether inputs may be in an order of their own."""
    made_by: str = ""
    """Who wrote the checkpoints that tests read, where that is not who wrote the format's others."""


@dataclass(frozen=True)
class AsLoaded:
    """How float weights become packed ones as they are read, one matrix after another, under a name of vLLM's."""

    name: str
    roles: tuple[Role, ...]
    """Of the weights that do; the others stay as they are."""
    group: int | None
    """Neighbours of a row that share a scale; None where a row does."""
    bits: float
    """Of one weight, its share of a group's scale included."""
    quantise: Callable[[Tensor], GroupedWeight]
    """Takes [n, k] float32, where groups divide k."""
    stored: Stored


class Format(ABC):
    """One checkpoint's, made of its `quantization_config`. Methods raise ModelError, naming what disagrees."""

    names: ClassVar[tuple[str, ...]]
    """`quant_method` in configs first, then what vLLM calls it as well."""
    stored: ClassVar[tuple[Stored, ...]]
    """What the page of formats says there is."""
    made_by: ClassVar[str]
    """Who wrote the checkpoints that tests read."""
    marks: ClassVar[tuple[str, ...]]
    """What the names of tensors end in, after the module's, that only a quantised matrix has: any of them marks one, so
    that each of them can be missed."""

    @property
    def rounds_inputs(self) -> bool:
        """Whether it means the inputs of some matrices to be rounded to 8 bits."""
        return False

    @classmethod
    @abstractmethod
    def of(cls, config: Config) -> Self:
        """Raises ModelError for a setting that is missing or not to be had."""

    def scheme(self, module: str) -> str:
        """How a module's matrix is stored, for messages."""
        return self.names[0]

    def marked(self, module: str, held: Container[str]) -> bool:
        """Whether a module's matrix is quantised, by the tensors that the checkpoint holds."""
        return any(f"{module}.{mark}" in held for mark in self.marks)

    @abstractmethod
    def parts(self, module: str, held: Container[str]) -> Parts:
        """The tensors that hold a quantised module's matrix: what it needs, and of what it may have what is held."""

    @abstractmethod
    def dtypes(self, module: str) -> Dtypes:
        """Of each tensor that `parts` names."""

    def entry(self, module: str) -> int | None:
        """Which entry of its tensors' first dimension a module is, where they are of several; else None."""
        return None

    def beside(self, module: str) -> tuple[str, ...]:
        """Tensors that may lie beside and are not needed."""
        return ()

    @abstractmethod
    def shape(self, module: str, shapes: Shapes) -> tuple[int, int] | None:
        """Rows and columns of the matrix, by its tensors' shapes, under the format's words for them; None where those
        do not tell."""

    @abstractmethod
    def group(self, module: str, columns: int) -> int:
        """How many weights of a row of so many share a scale, at least: where ranks may cut it."""

    @abstractmethod
    def read(self, module: str, tensors: Mapping[str, Tensor]) -> GroupedWeight:
        """The matrix, of the tensors that `parts` named."""


@functools.cache
def formats() -> Mapping[str, type[Format]]:
    """Every format by each of its names."""
    return MappingProxyType({name: format_ for format_ in _constants("FORMAT") for name in format_.names})


@functools.cache
def forms_as_loaded() -> Mapping[str, AsLoaded]:
    """Every way for float weights by its name."""
    return MappingProxyType({each.name: each for each in _constants("AS_LOADED")})


def _constants(name: str) -> list[Any]:
    """Of the files here, in the order of their names."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
    found = (getattr(importlib.import_module(f"{__name__}.{each}"), name, None) for each in names)
    return [each for each in found if each is not None]


def format_of(config: Config, asked: str | None) -> Format | None:
    """What the checkpoint's weights are stored in; None for floats. `asked`: the option `quantization`.

    Raises ModelError for a method that is unknown or retired, OptionError where what was asked is another format.
    """
    check_name(asked)
    stored = config.get("quantization_config") or config.get("compression_config")
    if stored is None:
        return None
    if not isinstance(stored, Mapping):
        raise ModelError(f"quantization_config is a {type(stored).__name__}; an object is expected")
    method = str(stored.get("quant_method", "")).lower().replace("-", "_")
    own = formats().get(method) or formats().get(method.replace("_", "-"))
    if own is None:
        close = nearest(method, formats(), cutoff=0.5)  # of four letters, two that changed places
        advice = RETIRED.get(
            method,
            (f"did you mean {close}? " if close else "")
            + f"known are {', '.join(formats())}; an unquantised checkpoint or a GGUF file of it can be used",
        )
        named = f"by the method {stored['quant_method']}" if method else "by a method that it does not name"
        raise ModelError(f"this checkpoint's weights are quantised {named}, which is not supported: {advice}")
    if asked is not None and asked not in own.names:
        raise OptionError(
            f"quantization={asked} does not fit this checkpoint, whose weights are stored as {own.names[0]}; "
            "leave it out"
        )
    return own.of(stored)


def number(config: Config, names: tuple[str, ...], method: str, default: int | None = None) -> int:
    """The whole number under the first of the names. Raises ModelError where there is none."""
    for name in names:
        found = config.get(name)
        if isinstance(found, int) and not isinstance(found, bool):
            return found
        if found is not None:
            raise ModelError(f"the {method} config's {name} is {found!r}; a whole number is expected")
    if default is None:
        raise ModelError(f"the {method} config has no {names[0]}")
    return default


def patterns(listed: object, field: str) -> tuple[str, ...]:
    """A config's list of names of modules, some of them regular expressions after `re:`. `field`: the list's name, for
    messages. Raises ModelError for what is neither."""
    found = [] if listed is None else listed
    if not isinstance(found, list | tuple) or not all(isinstance(each, str) for each in found):
        raise ModelError(f"{field} is {str(listed)[:80]!r}; a list of modules' names is expected")
    for each in found:
        if each.startswith("re:"):
            check_expression(each.removeprefix("re:"), each, field)
    return tuple(found)


def check_expression(expression: str, written: str, field: str) -> None:
    """Raises ModelError for what is no regular expression, as it is `written` in the field."""
    try:
        re.compile(expression)
    except re.error as error:
        raise ModelError(f"{field} has {written!r}, which is no regular expression: {error}") from error


def cut_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """[n, words] int32 -> [n, count] uint8: the numbers of `bits` bits that lie in them one behind the other."""
    each = 32 // math.gcd(32, bits)  # numbers in a whole count of words
    words = each * bits // 32
    packed = torch.nn.functional.pad(packed, (0, -packed.shape[1] % words))
    rows = packed.reshape(packed.shape[0], -1, words).to(torch.int64) & 0xFFFFFFFF
    found = torch.empty(*rows.shape[:2], each, dtype=torch.uint8)
    for index in range(each):
        word, shift = divmod(index * bits, 32)
        value = rows[..., word] >> shift
        if shift + bits > 32:
            value = value | rows[..., word + 1] << (32 - shift)
        found[..., index] = (value & ((1 << bits) - 1)).to(torch.uint8)
    return found.flatten(1)[:, :count]


def lacking(format_: Format, module: str, names: Iterable[str]) -> ModelError:
    """What to raise where a quantised module's tensors are not there."""
    scheme = format_.scheme(module)
    return ModelError(f"the quantised weights of {module} lack {', '.join(names)}; their scheme is {scheme}")


def expect(condition: bool, module: str, sentence: str) -> None:
    """Raises ModelError about a module's tensors."""
    if not condition:
        raise ModelError(f"the quantised weights of {module} do not fit their config: {sentence}")
