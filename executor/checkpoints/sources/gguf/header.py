"""The header of a GGUF file: its metadata and its table of tensors, read from a memory map in milliseconds.

    "GGUF" | version u32 | tensor count u64 | key count u64
    key count    x  (key string | value type u32 | value)
    tensor count x  (name string | dimensions u32 | dimension u64 each | type u32 | offset u64)
    padding up to general.alignment | tensor data; offsets count from here

A string is a u64 length and that many bytes of UTF-8; an array is its items' type u32, a u64 count and the items.
All is little-endian. The `gguf` package reads the same, but makes an object of every vocabulary entry, which takes
seconds; here an array of strings is only skipped, and decoded on demand. Layout: the GGUF specification,
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.executor.checkpoints.sources.mapped_pages import MappedFile, MappedPages
from headrace.ipc.failure import ModelError
from headrace.ipc.process.regular_files import require_file

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
_FIXED_SIZE_BYTES = 24

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
# Value type number -> numpy type; 8 is a string and 9 an array.
_SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_FLOAT32, _STRING, _ARRAY = 6, 8, 9


@dataclass(frozen=True)
class TensorRecord:
    """A tensor's entry in the table, with a view of its data."""

    name: str
    shape: tuple[int, ...]
    """Row-major, slowest dimension first, as in Hugging Face checkpoints."""
    type_number: int
    type_name: str
    block_size: int
    """Elements per block; a block never spans two rows."""
    block_bytes: int
    data: np.ndarray
    """[rows, bytes of a row] uint8, a view of the memory map; a vector is one row."""
    pages: MappedPages
    """Pages of the memory map, which are released after reading."""

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes)


class StringArray:
    """An array of strings in the memory map, decoded on iteration."""

    def __init__(self, data: memoryview, start: int, end: int, count: int) -> None:
        self._data, self._start, self._end, self._count = data, start, end, count

    def __len__(self) -> int:
        return self._count

    def raw(self) -> Iterator[bytes]:
        position = self._start
        for _ in range(self._count):
            begin = position + 8
            position = begin + _U64.unpack_from(self._data, position)[0]
            yield bytes(self._data[begin:position])

    def places(self, wanted: Iterable[bytes]) -> dict[bytes, int]:
        """Where each of these is, by its last place; without those that are not there. Reads no further than it must,
        and special tokens are often the first of a hundred thousand."""
        held = bytes(self._data[self._start : self._end])
        left = {text: count for text in wanted if (count := held.count(_U64.pack(len(text)) + text))}
        found: dict[bytes, int] = {}
        for index, item in enumerate(self.raw()) if left else ():
            if item not in left:
                continue
            found[item] = index
            left[item] -= 1
            if not any(left.values()):
                break
        return found

    def __iter__(self) -> Iterator[str]:
        # Some converters cut a token in the middle of a character; errors="replace" still decodes the rest.
        return (item.decode("utf-8", errors="replace") for item in self.raw())


def shown(value: Any) -> str:
    """A metadata value for an error's text."""
    return f"an array of {len(value)}" if isinstance(value, np.ndarray | StringArray) else f"{value!r:.80}"


class GGUFHeader:
    """Metadata by key, and tensors by name. Raises ModelError if the file is not a complete GGUF file."""

    def __init__(self, path: Path, content: np.ndarray | None = None) -> None:
        """content: the file's bytes if they are in memory, [size] uint8; else it is mapped."""
        self.path = path
        self._map, file = _mapped(path, content)
        self._data = memoryview(self._map)
        mapped_bytes = self._map.nbytes if file is not None else 0
        self._pages = MappedPages(self._map.ctypes.data, self._map.ctypes.data + mapped_bytes, file)
        self._position = 0
        tensor_count, key_count = self._read_start()
        self.metadata: dict[str, Any] = {}
        """Scalars as Python values, strings as str, arrays of numbers as numpy arrays, others as StringArray."""
        self.tensors: dict[str, TensorRecord] = {}
        self._spans: dict[str, tuple[int, int]] = {}
        try:
            for _ in range(key_count):
                start = self._position
                key = self._string("a metadata key")
                if key in self.metadata:
                    raise ModelError(f"{path} is not a sound GGUF file: its metadata has the key {key} twice")
                self.metadata[key] = self._value(self._u32(), key)
                self._spans[key] = start, self._position
            self._read_tensors(tensor_count)
        except (struct.error, ValueError, OverflowError) as error:  # reading beyond the end of the map
            raise self._truncated() from error

    def digest(self, prefix: str) -> str:
        """SHA-256, in hexadecimal, of all metadata whose key begins with `prefix`, independent of their order."""
        digest = hashlib.sha256()
        for key in sorted(self._spans):
            if key.startswith(prefix):
                start, end = self._spans[key]
                digest.update(self._data[start:end])
        return digest.hexdigest()

    def _read_start(self) -> tuple[int, int]:
        """Checks the start of the file. Returns the counts of tensors and keys."""
        magic = bytes(self._data[:4])
        if magic != MAGIC:
            found = f"begins with {magic!r}" if magic else "is empty"
            raise ModelError(f"{self.path} is not a GGUF file: it {found} where {MAGIC!r} was expected")
        if len(self._data) < _FIXED_SIZE_BYTES:
            raise self._truncated()
        version = _U32.unpack_from(self._data, 4)[0]
        if version & 0xFFFF == 0:
            raise ModelError(f"{self.path} is a big-endian GGUF file, which is not supported; use a little-endian one")
        if version not in VERSIONS:
            raise ModelError(
                f"{self.path} is of GGUF version {version}; versions {VERSIONS[0]} and {VERSIONS[1]} are supported"
            )
        self._position = _FIXED_SIZE_BYTES
        return _U64.unpack_from(self._data, 8)[0], _U64.unpack_from(self._data, 16)[0]

    def _truncated(self) -> ModelError:
        return ModelError(
            f"{self.path} is truncated or damaged: its header goes on beyond the end of the file at "
            f"{len(self._data)} bytes; fetch the file again"
        )

    def _u32(self) -> int:
        value: int = _U32.unpack_from(self._data, self._position)[0]
        self._position += 4
        return value

    def _u64(self) -> int:
        value: int = _U64.unpack_from(self._data, self._position)[0]
        self._position += 8
        return value

    def _string(self, what: str) -> str:
        length = self._u64()
        end = self._position + length
        if end > len(self._data):
            raise self._truncated()
        raw = bytes(self._data[self._position : end])
        self._position = end
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.path} is damaged: {what} is not text ({raw[:40]!r})") from error

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string(key)
        if kind == _ARRAY:
            return self._array(self._u32(), self._u64(), key)
        value = self._numbers(kind, 1, key)[0]
        # The shortest decimal of the float32, which its writer most likely had: 1e-05, not 9.999999747378752e-06.
        return float(str(value)) if kind == _FLOAT32 else value.item()

    def _array(self, kind: int, count: int, key: str) -> Any:
        if kind == _STRING:
            start = position = self._position
            unpack, data = _U64.unpack_from, self._data
            for _ in range(count):
                position += 8 + unpack(data, position)[0]
            self._position = position
            return StringArray(data, start, position, count)
        if kind == _ARRAY:
            raise ModelError(f"{self.path} has an array of arrays under {key}, which is not supported")
        return self._numbers(kind, count, key)

    def _numbers(self, kind: int, count: int, key: str) -> np.ndarray:
        """[count] numbers of type `kind`, a view of the memory map."""
        if kind not in _SCALARS:
            raise ModelError(f"{self.path} has a value of unknown type {kind} under {key}; types 0 to 12 are known")
        values = np.frombuffer(self._data, _SCALARS[kind], count, self._position)
        self._position += values.nbytes
        return values

    def _read_tensors(self, count: int) -> None:
        listed = [self._tensor_entry() for _ in range(count)]
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ModelError(f"{self.path} has a general.alignment of {alignment}; a power of two is expected")
        data_start = -(-self._position // alignment) * alignment
        expected = 0
        for name, shape, type_number, offset in listed:
            if name in self.tensors:
                raise ModelError(f"{self.path} lists the tensor {name} twice")
            self.tensors[name] = record = self._record(name, shape, type_number, data_start + offset)
            if offset != expected:  # as llama.cpp requires: tensors lie one after the other, in the order of the list
                raise ModelError(
                    f"{self.path} is damaged: tensor {name} is said to lie at {offset} of the tensors' data, and the "
                    f"ones before it end at {expected}; fetch it again"
                )
            expected += -(-record.data.nbytes // alignment) * alignment

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string("a tensor name")
        dimensions = self._u32()
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise ModelError(
                f"{self.path}: tensor {name} has {dimensions} dimensions; 1 to {MAX_DIMENSIONS} are possible"
            )
        shape = tuple(self._u64() for _ in range(dimensions))[::-1]
        if 0 in shape:
            raise ModelError(f"{self.path}: tensor {name} has shape {list(shape)}; every dimension is at least 1")
        return name, shape, self._u32(), self._u64()

    def _record(self, name: str, shape: tuple[int, ...], type_number: int, start: int) -> TensorRecord:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            kind = GGMLQuantizationType(type_number)
        except ValueError as error:
            known = ", ".join(f"{each.value} {each.name}" for each in GGMLQuantizationType)
            raise ModelError(f"{self.path}: tensor {name} is of unknown type {type_number}; known: {known}") from error
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        rows, columns = math.prod(shape[:-1]), shape[-1]
        if columns % block_size:
            raise ModelError(
                f"{self.path}: rows of {columns} in tensor {name}, but {kind.name} packs {block_size} at a time"
            )
        row_bytes = columns // block_size * block_bytes
        end = start + rows * row_bytes
        if end > len(self._data):
            raise ModelError(
                f"{self.path} is truncated or damaged: tensor {name} ({kind.name} {list(shape)}) lies at bytes {start} "
                f"to {end}, but the file ends at {len(self._data)}; fetch it again"
            )
        data = self._map[start:end].view(np.ndarray).reshape(rows, row_bytes)
        return TensorRecord(name, shape, type_number, kind.name, block_size, block_bytes, data, self._pages)


def _mapped(path: Path, content: np.ndarray | None) -> tuple[Any, MappedFile | None]:
    """The file's bytes, [size] uint8, and, unless they are given, the file that they are mapped from. Raises
    ModelError."""
    if content is not None:
        return content, None
    try:
        require_file(path)
        file = MappedFile(path)
        return np.memmap(path, mode="r") if path.stat().st_size else np.zeros(0, np.uint8), file
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
