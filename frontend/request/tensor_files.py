"""Reads one tensor from the bytes of a file that torch.save or safetensors wrote, without either library.

A torch file is a zip archive of a pickle, which describes the tensor, and of the tensor's storage. A pickle is a
program that may call any function. Here nothing of it runs: only the few instructions that a tensor needs are known,
and of the functions that torch.save names only the arguments are noted. A file needs memory for its tensor alone: its
parts must not be compressed, and the tensor's shape is checked before its rows are gathered.
"""

from __future__ import annotations

import io
import json
import math
import pickletools
import zipfile
from collections.abc import Callable
from typing import Any, NamedTuple

from headrace.ipc.codec import DTYPES, Tensor
from headrace.ipc.failure import InvalidRequestError

CheckShape = Callable[[tuple[int, ...], str], None]
"""Called with a tensor's shape and dtype before its values are read; raises InvalidRequestError."""
_MOST_PICKLE_BYTES = 1 << 16
_MOST_PARTS = 256
_ZIP, _ZIP_PART = b"PK\x03\x04", b"PK\x01\x02"
_STORAGES = {
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "DoubleStorage": "float64",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}
_SAFETENSORS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
_WORDS = {1: "B", 2: "H", 4: "I", 8: "Q"}


class TensorFileError(InvalidRequestError):
    """A file that holds no tensor, or none that is read."""


def read_tensor(data: bytes, check: CheckShape) -> Tensor:
    """The only tensor of the file. Raises TensorFileError, with the reason, if there is not exactly one, and what
    `check` raises."""
    if data.startswith(_ZIP):
        return _of_torch(data, check)
    if data[8:9] == b"{":
        return _of_safetensors(data, check)
    if data[:1] == b"\x80":
        raise _refused("it is a pickle, or of torch's format before 1.6, and neither is read: save it with torch.save")
    raise _refused("it is neither a file of torch.save nor of safetensors")


def _refused(why: str) -> TensorFileError:
    return TensorFileError(f"the tensor cannot be read: {why}")


# --- torch.save -------------------------------------------------------------------------------------------------


class _Named(NamedTuple):
    """A global that the pickle names; it is never imported."""

    name: str


class _Storage(NamedTuple):
    dtype: str
    key: str
    num_elements: int


class _Described(NamedTuple):
    """A tensor as the pickle describes it. Sizes and strides are in elements."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _of_torch(data: bytes, check: CheckShape) -> Tensor:
    if data.count(_ZIP_PART) > _MOST_PARTS:
        raise _refused(f"its zip archive has more than {_MOST_PARTS} parts")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            parts = {part.filename: part for part in archive.infolist()}
            (pickled,) = [name for name in parts if name.endswith("/data.pkl")]
            folder = pickled.removesuffix("data.pkl")
            if parts[pickled].file_size > _MOST_PICKLE_BYTES:
                raise _refused(
                    f"its description has {parts[pickled].file_size} bytes, and a tensor needs a few hundred"
                )
            if any(part.compress_type != zipfile.ZIP_STORED for part in parts.values()):
                raise _refused("its zip archive is compressed, and torch.save compresses nothing")
            order = f"{folder}byteorder"
            if order in parts and archive.read(parts[order])[:8] != b"little":
                raise _refused("it was saved on a machine with big-endian numbers")
            found = _described(archive.read(parts[pickled]))
            check(found.shape, found.storage.dtype)
            stored = archive.read(parts[f"{folder}data/{found.storage.key}"])
    except (zipfile.BadZipFile, KeyError, ValueError, NotImplementedError, RuntimeError, EOFError, OSError) as error:
        if isinstance(error, InvalidRequestError):
            raise
        raise _refused(f"its zip archive is damaged or has not the parts of torch.save ({error})") from None
    return _gathered(found, stored)


def _described(pickled: bytes) -> _Described:
    """What the pickle says of its tensor. Raises InvalidRequestError for anything but one dense tensor."""
    try:
        found = _Reader().read(pickled)
    except InvalidRequestError:
        raise
    except Exception as error:  # bytes that are no pickle raise anything
        raise _refused(f"its description is damaged ({type(error).__name__})") from None
    if not isinstance(found, _Described):
        raise _refused(f"it holds {_shown(found)}, and one tensor is expected")
    return found


def _shown(value: Any) -> str:
    return f"{value.name}" if isinstance(value, _Named) else f"a {type(value).__name__.lstrip('_')}"


_MARK = object()


class _Reader:
    """Carries out the instructions that torch.save writes for a tensor, and refuses all others."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def read(self, pickled: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(pickled):
            if opcode.name == "STOP":
                return self._stack.pop()
            if opcode.name in _CONSTANTS:
                self._stack.append(_CONSTANTS[opcode.name])
            elif opcode.name in _ARGUMENTS:
                self._stack.append(argument)
            elif opcode.name in _INSTRUCTIONS:
                _INSTRUCTIONS[opcode.name](self, argument)
            elif opcode.name not in ("PROTO", "FRAME"):
                raise _refused(f"it is no file of a single tensor (its pickle has the instruction {opcode.name})")
        raise _refused("its description ends early")

    def _tuple(self, _: Any) -> None:
        at = len(self._stack) - 1 - self._stack[::-1].index(_MARK)
        self._stack[at:] = [tuple(self._stack[at + 1 :])]

    def _tuple_of(self, count: int) -> None:
        self._stack[-count:] = [tuple(self._stack[-count:])]

    def _global(self, argument: str) -> None:
        self._stack.append(_Named(argument.replace(" ", ".")))

    def _global_of_stack(self, _: Any) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._stack.append(_Named(f"{module}.{name}"))

    def _put(self, index: int | None) -> None:
        self._memo[len(self._memo) if index is None else index] = self._stack[-1]

    def _get(self, index: int) -> None:
        self._stack.append(self._memo[index])

    def _storage(self, _: Any) -> None:
        self._stack.append(_storage_of(self._stack.pop()))

    def _call(self, _: Any) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        self._stack.append(_noted(function, arguments))

    def _attributes(self, _: Any) -> None:
        """Those that the user has set on the tensor."""
        self._stack.pop()


_CONSTANTS = {"MARK": _MARK, "NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": (), "EMPTY_DICT": {}}
_ARGUMENTS = frozenset(("BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE"))
_INSTRUCTIONS: dict[str, Callable[[_Reader, Any], None]] = {
    "TUPLE": _Reader._tuple,
    "TUPLE1": lambda reader, _: reader._tuple_of(1),
    "TUPLE2": lambda reader, _: reader._tuple_of(2),
    "TUPLE3": lambda reader, _: reader._tuple_of(3),
    "GLOBAL": _Reader._global,
    "STACK_GLOBAL": _Reader._global_of_stack,
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), _Reader._put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Reader._get),
    "BINPERSID": _Reader._storage,
    "REDUCE": _Reader._call,
    "BUILD": _Reader._attributes,
}


def _storage_of(named: Any) -> _Storage:
    _, kind, key, _, num_elements = named
    name = kind.name.removeprefix("torch.").removeprefix("storage.")
    if name not in _STORAGES:
        raise _refused(f"it has values of {kind.name}; {', '.join(_STORAGES)} are read")
    if not isinstance(key, str) or type(num_elements) is not int:
        raise _refused("its description names no storage")
    return _Storage(_STORAGES[name], key, num_elements)


def _noted(function: Any, arguments: Any) -> Any:
    name = function.name if isinstance(function, _Named) else type(function).__name__
    match name:
        case "collections.OrderedDict" if arguments == ():
            return {}
        case "torch._utils._rebuild_parameter":
            return arguments[0]
        case "torch._utils._rebuild_tensor_v2":
            storage, offset, shape, strides = arguments[:4]
            numbers = (offset, *shape, *strides)
            if not isinstance(storage, _Storage) or len(shape) != len(strides):
                raise _refused("its description is of no dense tensor")
            if not all(type(each) is int and 0 <= each < 1 << 48 for each in numbers):
                raise _refused("its shape or strides are no sizes")
            return _Described(storage, offset, tuple(shape), tuple(strides))
    raise _refused(f"it would call {name}; a plain dense tensor needs no such call")


def _gathered(found: _Described, stored: bytes) -> Tensor:
    """The tensor's values in row-major order. Its shape has been checked."""
    dtype, item_bytes = found.storage.dtype, DTYPES[found.storage.dtype][1]
    pairs = [(size, stride) for size, stride in zip(found.shape, found.strides, strict=True) if size != 1]
    shape, count = found.shape, math.prod(found.shape)
    end = found.offset + sum((size - 1) * stride for size, stride in pairs) + 1 if count else 0
    if len(stored) != found.storage.num_elements * item_bytes or end * item_bytes > len(stored):
        raise _refused(f"its storage has {len(stored)} bytes, and its shape {list(shape)} needs others")
    if not count:
        return Tensor(dtype, shape, memoryview(b""))
    values = memoryview(stored).cast(_WORDS[item_bytes])  # type: ignore[call-overload]  # one of its formats
    columns, step = pairs.pop() if pairs else (1, 1)
    if _is_row_major([*pairs, (columns, step)]):
        return Tensor(dtype, shape, values[found.offset : found.offset + count].cast("B"))
    rows = [0]
    for size, stride in pairs:
        rows = [start + at * stride for start in rows for at in range(size)]
    joined = bytearray()
    for start in (found.offset + row for row in rows):
        if step:
            joined += values[start : start + (columns - 1) * step + 1 : step].tobytes()
        else:
            joined += values[start : start + 1].tobytes() * columns
    return Tensor(dtype, shape, memoryview(bytes(joined)))


def _is_row_major(pairs: list[tuple[int, int]]) -> bool:
    expected = 1
    for size, stride in reversed(pairs):
        if stride != expected:
            return False
        expected *= size
    return True


# --- safetensors ------------------------------------------------------------------------------------------------


def _of_safetensors(data: bytes, check: CheckShape) -> Tensor:
    length = int.from_bytes(data[:8], "little")
    if length > min(_MOST_PICKLE_BYTES, len(data) - 8):
        raise _refused(f"its header would have {length} bytes")
    try:
        header: Any = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError):
        raise _refused("its header is no JSON") from None
    named = [each for name, each in header.items() if name != "__metadata__"]
    if len(named) != 1 or not isinstance(named[0], dict):
        raise _refused(f"it has {len(named)} tensors, and one is expected")
    kind, shape, offsets = [named[0].get(key) or [] for key in ("dtype", "shape", "data_offsets")]
    is_sizes = all(isinstance(each, list) and all(type(n) is int and n >= 0 for n in each) for each in (shape, offsets))
    if not isinstance(kind, str) or not is_sizes or len(offsets) != 2:
        raise _refused("its header describes no tensor")
    check(tuple(shape), dtype := _SAFETENSORS.get(kind, kind))
    values = memoryview(data)[8 + length :]
    if offsets != [0, len(values)] or math.prod(shape) * DTYPES[dtype][1] != len(values):
        raise _refused(f"it has {len(values)} bytes of values, and its shape {shape} of {kind} needs others")
    return Tensor(dtype, tuple(shape), memoryview(bytes(values)))
