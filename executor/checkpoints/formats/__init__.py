"""Quantised checkpoints. A format is one file here with a constant `FORMAT`: it reads the config's
`quantization_config`, determines which tensors store a matrix, and converts them to the form that all kernels take,
`kernels.grouped.GroupedWeight`. Readers of that form know no formats, and formats know no kernels. A constant
`AS_LOADED` quantises float weights to the same form while they load.
"""

from __future__ import annotations

import functools
import importlib
import math
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from headrace.core.options.quantization_names import RETIRED, check_name
from headrace.core.options.values import nearest
from headrace.executor.checkpoints.expressions import check_expression
from headrace.executor.checkpoints.formats._keys import Keys, check_keys
from headrace.executor.models.blocks import Role
from headrace.ipc.failure import ModelError, OptionError
from headrace.kernels.grouped import SCALE_DTYPES, GroupedWeight, Kind

Config = Mapping[str, Any]
Parts = Mapping[str, str]
"""The tensors that store a matrix: from the format's key for a part (weight, scales, ...) to the tensor's name."""
Shapes = Mapping[str, tuple[int, ...]]
"""Shape of each part."""
Dtypes = Mapping[str, tuple[torch.dtype, ...]]
"""Dtypes allowed for each part."""
FLOATS = SCALE_DTYPES
WORDS, BYTES, FLOATS_OF_8_BITS = (torch.int32,), (torch.uint8,), (torch.float8_e4m3fn,)
EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
WHOLE = (torch.int8, torch.int16, torch.int32, torch.int64)
"""Integer dtypes allowed for small tensors, such as indices and zero points."""


@dataclass(frozen=True)
class Stored:
    """A way in which a format stores matrices: a row of docs/quantization.md."""

    text: str
    kinds: tuple[Kind, ...]
    """Kinds of `GroupedWeight` that matrices become; empty: it depends on each module's scheme."""
    tests: tuple[str, ...]
    """Its tests in tests/checkpoints: functions, or cases of the comparison with the dequantised model."""
    ordered: bool = False
    """Whether inputs may be reordered (activation order)."""
    made_by: str = ""
    """Tools that wrote the checkpoints in its tests, if they differ from `Format.made_by`."""


@dataclass(frozen=True)
class AsLoaded:
    """How float weights are quantised while they load, matrix by matrix (vLLM's --quantization NAME)."""

    name: str
    roles: tuple[Role, ...]
    """Roles of the weights that are quantised; others stay floats."""
    group: int | None
    """Number of neighbours in a row that share a scale; None: the whole row."""
    bits: float
    """Bits per weight, including its share of the group's scale."""
    quantise: Callable[[Tensor], GroupedWeight]
    """Quantises [n, k] float32, where `group` divides k."""
    stored: Stored


class Format(ABC):
    """The format of one checkpoint, made from its `quantization_config`. Methods raise ModelError, naming the
    disagreement, if config and tensors do not fit.

    A module is a tensor's name without `.weight` and the like.
    """

    names: ClassVar[tuple[str, ...]]
    """The `quant_method` of configs, then vLLM's other names for it."""
    stored: ClassVar[tuple[Stored, ...]]
    """The format's rows in docs/quantization.md."""
    made_by: ClassVar[str]
    """Tools that wrote the checkpoints in its tests."""
    keys: ClassVar[Keys]
    """What each key of its configs means."""
    outside: ClassVar[tuple[str, ...]] = ()
    """Keys of its configs that checkpoints may have beside them, in the model's config."""
    marks: ClassVar[tuple[str, ...]]
    """Suffixes of tensors, after the module's name, that only quantised matrices have. One of them suffices to mark a
    matrix as quantised, so that the absence of any other is an error."""

    unshifted: ClassVar[tuple[str, ...]] = ()
    """Suffixes of tensors that hold zeros alone where they are no part of a module's matrix."""

    @property
    def rounds_inputs(self) -> bool:
        """Whether the inputs of some matrices are to be rounded to int8."""
        return False

    @classmethod
    @abstractmethod
    def of(cls, config: Config) -> Self:
        """Builds the format from a quantization_config. Raises ModelError for a setting that is missing or not
        supported."""

    @classmethod
    def is_of_cache(cls, config: Config) -> bool:
        """Whether a quantization_config is of the KV cache alone, and weights are stored as floats."""
        return False

    def scheme(self, module: str) -> str:
        """Name of the way in which a module's matrix is stored, for messages."""
        return self.names[0]

    def marked(self, module: str, held: Container[str]) -> bool:
        """Whether a module's matrix is quantised, judged by the checkpoint's tensors."""
        return any(f"{module}.{mark}" in held for mark in self.marks)

    @abstractmethod
    def parts(self, module: str, held: Container[str]) -> Parts:
        """The tensors that store a quantised module's matrix: all required ones, and the optional ones that exist."""

    @abstractmethod
    def dtypes(self, module: str) -> Dtypes:
        """The dtypes allowed for each part."""

    def entry(self, module: str) -> int | None:
        """The module's index in the first dimension of its tensors, if they stack several modules; else None."""
        return None

    def beside(self, module: str) -> tuple[str, ...]:
        """Suffixes of further tensors that the module may have and that are not read."""
        return ()

    @abstractmethod
    def shape(self, module: str, shapes: Shapes) -> tuple[int, int] | None:
        """(rows, columns) of the matrix by its parts' shapes; None if these do not determine them."""

    @abstractmethod
    def group(self, module: str, columns: int) -> int:
        """Number of neighbours in a row of `columns` weights that share a scale, at least; ranks divide rows at its
        multiples."""

    @abstractmethod
    def read(self, module: str, tensors: Mapping[str, Tensor]) -> GroupedWeight:
        """Converts the tensors of the parts to the matrix."""


@functools.cache
def formats() -> Mapping[str, type[Format]]:
    """All formats, by each of their names."""
    return MappingProxyType({name: format_ for format_ in _constants("FORMAT") for name in format_.names})


@functools.cache
def forms_as_loaded() -> Mapping[str, AsLoaded]:
    """All ways to quantise float weights while they load, by name."""
    return MappingProxyType({each.name: each for each in _constants("AS_LOADED")})


def _constants(name: str) -> list[Any]:
    """The constants with this name in the files here, in the order of the files' names."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
    found = (getattr(importlib.import_module(f"{__name__}.{each}"), name, None) for each in names)
    return [each for each in found if each is not None]


def format_of(config: Config, asked: str | None) -> Format | None:
    """The format of a checkpoint's quantised weights; None for floats, of which the config may quantise the KV cache.
    asked: the option `quantization`.

    Raises ModelError for a method that is unknown or retired, OptionError if `asked` is another format.
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
        close = nearest(method, formats(), cutoff=0.5)  # 0.5 matches four letters of which two are swapped
        advice = RETIRED.get(
            method,
            (f"did you mean {close}? " if close else "")
            + f"known: {', '.join(formats())}; an unquantised checkpoint or a GGUF file of it can be used",
        )
        named = f"by the method {stored['quant_method']}" if method else "by a method that it does not name"
        raise ModelError(f"this checkpoint's weights are quantised {named}, which is not supported: {advice}")
    text = config.get("text_config")
    around = {**(text if isinstance(text, Mapping) else {}), **config}
    stored = {**{key: around[key] for key in own.outside if around.get(key) is not None}, **stored}
    check_keys(stored, own.keys, f"the {own.names[0]} config")
    if own.is_of_cache(stored):
        return None
    if asked is not None and asked not in own.names:
        raise OptionError(
            f"quantization={asked} does not fit this checkpoint, whose weights are stored as {own.names[0]}; "
            "leave it out"
        )
    return own.of(stored)


def number(config: Config, names: tuple[str, ...], method: str, default: int | None = None) -> int:
    """The integer under the first of the names that the config has. Raises ModelError for other types, and if there is
    none and no default."""
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
    """A config's list of module names and of regular expressions with the prefix `re:`. field: the list's name, for
    messages. Raises ModelError if it is no such list."""
    found = [] if listed is None else listed
    if not isinstance(found, list | tuple) or not all(isinstance(each, str) for each in found):
        raise ModelError(f"{field} is {str(listed)[:80]!r}; a list of modules' names is expected")
    for each in found:
        if each.startswith("re:"):
            check_expression(each.removeprefix("re:"), each, field)
    return tuple(found)


def cut_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """Unpacks numbers of `bits` bits, which follow each other without gaps: [n, words] int32 -> [n, count] uint8."""
    each = 32 // math.gcd(32, bits)  # numbers in the fewest whole words
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
    """The error to raise if tensors of a quantised module are missing."""
    scheme = format_.scheme(module)
    return ModelError(f"the quantised weights of {module} lack {', '.join(names)}; their scheme is {scheme}")


def expect(condition: bool, module: str, sentence: str) -> None:
    """Raises ModelError about a module's tensors, with `sentence` as the reason, if the condition is false."""
    if not condition:
        raise ModelError(f"the quantised weights of {module} do not fit their config: {sentence}")
