"""Inputs of a request besides token ids: what takes the place of a run of its prompt's tokens.

    AddRequest.inputs --> Request --> NewRow.inputs --> rows of values in the place of token embeddings
                             |
                             +--> PrefixKey (prefix_names.py): the names of the blocks that an input overlaps

An input belongs to its request from arrival to end: after a preemption, or on another engine, its positions are
computed again. At its positions prompt_token_ids has PLACEHOLDER, which nothing looks up.

What an input consists of is a kind, registered by name: `PromptEmbeds` here, and those of other packages, whose entry
points are of the group `headrace.row_inputs` and name a class derived from `InputKind`. A kind says which models it is
for. On the wire an input of any kind is the same struct of tensors. So client and engine may know different kinds, and
an engine refuses one by name.
"""

from __future__ import annotations

import functools
import hashlib
import math
import types
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec

from headrace.ipc.codec import DTYPES, Tensor
from headrace.ipc.failure import InconsistentError, OptionError, let_interrupts_pass
from headrace.ipc.plugins import made, row_input_entries
from headrace.ipc.ranges import INT32, Longest, Range

T = TypeVar("T")
PLACEHOLDER = 0
"""The token id at the positions of inputs, as in vLLM."""
HASH_BYTES = 32
MOST_NAME = 64
"""Characters of a kind's name."""
PROMPT_EMBEDS = "prompt_embeds"
FLOATS = ("float32", "float16", "bfloat16", "float64")


class RowInput(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What stands at the positions [start, start + len(hashes)) of a prompt."""

    kind: Annotated[str, Longest(MOST_NAME)]
    start: Annotated[int, Range(0, INT32)]
    hashes: Tensor
    """[num_positions, HASH_BYTES] uint8: equal hashes mean equal content at a position, in any request. The client
    computes them (`hashes_of`)."""
    tensors: Annotated[tuple[Tensor, ...], Longest(64)]
    """The content, as its kind defines it."""

    @property
    def end(self) -> int:
        return self.start + self.hashes.shape[0]

    @property
    def nbytes(self) -> int:
        return sum(each.data.nbytes for each in self.tensors)


def hashes_of(contents: Iterator[bytes | memoryview] | Sequence[bytes | memoryview], about: str) -> Tensor:
    """`RowInput.hashes` from the content at each position. about: what else distinguishes it, such as its type."""
    first = hashlib.sha256(f"{about}\0".encode())
    joined = bytearray()
    for content in contents:
        state = first.copy()
        state.update(content)
        joined += state.digest()
    return Tensor("uint8", (len(joined) // HASH_BYTES, HASH_BYTES), memoryview(bytes(joined)))


class InputKind(ABC):
    """How inputs of one kind are checked, and what a model reads in the place of its tokens' embeddings."""

    name: ClassVar[str]

    def is_for(self, architecture: str, config: Mapping[str, Any]) -> bool:
        """Whether a model takes inputs of this kind that has rows in the place of embeddings at all. config: that of
        its checkpoint, as a config.json has it. Others refuse them by name."""
        return True

    @abstractmethod
    def most_bytes(self, num_positions: int, width: int) -> int:
        """The largest size of an input with so many positions. width: of the model's token embeddings."""

    @abstractmethod
    def problem(self, given: RowInput, width: int) -> str:
        """Why the input cannot be computed, in a sentence; "" if it can. Its size has been checked."""

    def problem_of_type(self, given: RowInput, dtype: str) -> str:
        """Why the input cannot be computed by a model of this type, in a sentence; "" if it can. `problem` had none."""
        return ""

    @abstractmethod
    def values(self, given: RowInput, first: int, last: int) -> Tensor:
        """[last - first, width] of one of FLOATS: what takes the place of the token embeddings at these of the input's
        positions, 0 being `given.start`. Must depend only on what `given.hashes` has of each position. Where it raises,
        or returns something else or values that are not finite, the request fails, and no other."""


_OWN = list[InputKind]()


def _own(kind: type[InputKind]) -> type[InputKind]:
    """Makes it one of the kinds that every engine has."""
    _OWN.append(kind())
    return kind


@_own
class PromptEmbeds(InputKind):
    """Embeddings that the user computed: as a token's row in the model's own table, before any scale of the model's."""

    name = PROMPT_EMBEDS

    def most_bytes(self, num_positions: int, width: int) -> int:
        return num_positions * width * 8

    def problem(self, given: RowInput, width: int) -> str:
        if len(given.tensors) != 1 or given.tensors[0].dtype not in FLOATS:
            return f"its content is {list(given.tensors)}; it must be one tensor of {', '.join(FLOATS)}"
        (values,) = given.tensors
        if values.shape != (expected := (given.hashes.shape[0], width)):
            return f"its shape is {list(values.shape)}, and {list(expected)} is needed"
        return ""

    def problem_of_type(self, given: RowInput, dtype: str) -> str:
        row = first_not_finite(given.tensors[0], dtype)
        return "" if row is None else f"row {row} has a value that is not finite in {dtype}, the model's type"

    def values(self, given: RowInput, first: int, last: int) -> Tensor:
        return rows_of(given.tensors[0], first, last)


def prompt_embeds_input(values: Tensor, start: int = 0) -> RowInput:
    """The input of kind prompt_embeds. values: [num_positions, width] of one of FLOATS."""
    num_bytes = values.shape[1] * DTYPES[values.dtype][1]
    rows = (values.data[at * num_bytes : (at + 1) * num_bytes] for at in range(values.shape[0]))
    return RowInput(kind=PROMPT_EMBEDS, start=start, hashes=hashes_of(rows, values.dtype), tensors=(values,))


def rows_of(values: Tensor, first: int, last: int) -> Tensor:
    """Rows [first, last) of a two-dimensional tensor, in its memory."""
    num_bytes = values.shape[1] * DTYPES[values.dtype][1]
    return Tensor(values.dtype, (last - first, values.shape[1]), values.data[first * num_bytes : last * num_bytes])


def first_not_finite(values: Tensor, dtype: str) -> int | None:
    """The first row of a two-dimensional tensor of FLOATS that has an infinite value or a NaN once it is rounded to
    dtype. None: there is none."""
    import numpy as np

    whole = values.numpy()
    for start in range(0, len(whole), _ROWS_AT_ONCE):
        found = whole[start : start + _ROWS_AT_ONCE]
        if values.dtype == "bfloat16":
            found = (found.astype(np.uint32) << 16).view(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            good = np.abs(found.astype(np.float32)) < _ROUNDED_TO_INFINITY[dtype]
        if not good.all():
            return start + int(np.flatnonzero(~good.all(axis=1))[0])
    return None


_ROWS_AT_ONCE = 256
"""The float32 copies of so many rows are small, whatever the prompt's length."""
_ROUNDED_TO_INFINITY = {"float32": math.inf, "bfloat16": (2 - 2**-8) * 2.0**127, "float16": 65520.0}
"""The smallest float32 that becomes infinite in each type: half a step beyond the largest number."""


@functools.cache
def input_kinds() -> Mapping[str, InputKind]:
    """The kinds by name: ours and those of installed packages. Raises OptionError, naming entry and package."""
    found = dict[str, InputKind]()
    installed = [made(entry, "row input", InputKind) for entry in row_input_entries()]  # type: ignore[type-abstract]
    for kind in (*_OWN, *installed):
        if not isinstance(name := getattr(kind, "name", None), str) or not 1 <= len(name) <= MOST_NAME:
            raise OptionError(
                f"the row input {_class_name(kind)} has no `name`; it must be text, of up to {MOST_NAME} characters"
            )
        if found.setdefault(kind.name, kind) is not kind:
            raise OptionError(f"two kinds of row inputs are called {kind.name}; uninstall one's package")
    return types.MappingProxyType(found)


def kinds_of(architecture: str, config: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the kinds that a model with this config takes."""
    return tuple(sorted(name for name, kind in input_kinds().items() if _is_for(kind, architecture, config)))


def _is_for(kind: InputKind, architecture: str, config: Mapping[str, Any]) -> bool:
    try:
        return bool(kind.is_for(architecture, config))
    except BaseException as error:
        let_interrupts_pass(error)
        raise OptionError(f"{_failed(kind, 'is_for')}: {error!r}") from error


def _failed(kind: InputKind, hook: str) -> str:
    return f"the row input {kind.name}, {_class_name(kind)}, failed in {hook}"


def _class_name(kind: InputKind) -> str:
    return f"{type(kind).__module__}.{type(kind).__qualname__}"


def values_of(given: RowInput, first: int, last: int, width: int, dtype: str) -> Tensor:
    """`InputKind.values` of the input's kind. Raises InconsistentError if it fails or makes other than so many rows of
    this width, which would stand at positions of other requests, or at several of one, or rows that are not finite in
    dtype, the model's type. Ours are checked on admission."""
    kind = input_kinds()[given.kind]
    where = f"{_failed(kind, 'values')} for the positions [{first}, {last})"
    try:
        found: Any = kind.values(given, first, last)
    except BaseException as error:
        let_interrupts_pass(error)
        raise InconsistentError(f"{where}: {error!r:.200}") from error
    if not isinstance(found, Tensor) or found.shape != (last - first, width) or found.dtype not in FLOATS:
        raise InconsistentError(
            f"{where}: it returned {found!r:.100}; expected: [{last - first}, {width}] of one of {', '.join(FLOATS)}"
        )
    if kind not in _OWN and (row := first_not_finite(found, dtype)) is not None:
        raise InconsistentError(f"{where}: row {row} has a value that is not finite in {dtype}, the model's type")
    return found


def problem_of(given: Sequence[RowInput], num_positions: int, reads: Sequence[str], width: int, dtype: str) -> str:
    """Why an engine that reads these kinds and computes in this type cannot take a prompt's inputs, in a sentence; ""
    if it can."""
    end = 0
    for at, each in enumerate(given):
        where = f"inputs[{at}]"
        if each.kind not in reads:
            known = ", ".join(reads) or "none"
            return f"{where} is of the kind {each.kind}, which this engine does not read; it reads: {known}"
        if len(each.hashes.shape) != 2 or each.hashes.shape[1] != HASH_BYTES or each.hashes.dtype != "uint8":
            return f"{where} has hashes {each.hashes!r}; they must be uint8[num_positions, {HASH_BYTES}]"
        if each.start < end or each.end == each.start or each.end > num_positions:
            return (
                f"{where} is at the positions [{each.start}, {each.end}) of a prompt of {num_positions}; inputs must "
                f"be in order, not empty, and not overlap"
            )
        end = each.end
        try:
            problem = _problem_of_kind(each, input_kinds()[each.kind], width, dtype)
        except InconsistentError as error:  # of another package's kind: this request's alone
            problem = str(error)
        if problem:
            return f"{where}, {each.kind}: {problem}"
    return ""


def _problem_of_kind(given: RowInput, kind: InputKind, width: int, dtype: str) -> str:
    most = _answer(kind, "most_bytes", int, given.end - given.start, width)
    if given.nbytes > most:
        return f"it has {given.nbytes} bytes; for its positions at most {most} are taken"
    problem = _answer(kind, "problem", str, given, width) or _answer(kind, "problem_of_type", str, given, dtype)
    if not problem:
        values_of(given, 0, 1, width, dtype)
    return problem


def _answer(kind: InputKind, hook: str, expected: type[T], *given: Any) -> T:
    """Raises InconsistentError if the hook fails or answers in another form."""
    try:
        found: Any = getattr(kind, hook)(*given)
    except BaseException as error:
        let_interrupts_pass(error)
        raise InconsistentError(f"{_failed(kind, hook)}: {error!r:.200}") from error
    if not isinstance(found, expected):
        raise InconsistentError(f"{_failed(kind, hook)}: it returned {found!r:.100}; expected: {expected.__name__}")
    return found
