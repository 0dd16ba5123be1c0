"""StepPlan and StepResult as bytes, in a fifth of the time that the general codec takes for so many small arrays.

    count of bytes in the rest   u32
    per array field              dtype character, u32 number of elements
    rest                         msgspec MessagePack of all other fields, in order, in one piece: separate frames
                                 for its large tensors would cost more than they save here
    per array field              its elements, each array at a multiple of 8 bytes

An array field is one that is declared `np.ndarray`; such arrays have one dimension.
"""

from __future__ import annotations

import functools
import struct
import typing
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from headrace.ipc.codec import CodecError
from headrace.ipc.plugins import load_plugin, step_feature_entries
from headrace.ipc.step import KINDS, StepPlan, StepResult, attachments_type, decode_array, encode_array
from headrace.ipc.struct_types import threadsafe

T = TypeVar("T", StepPlan, StepResult)
_DTYPES = {kind.char.encode(): kind for kind in map(np.dtype, ("bool", "int8", "int32", "int64", "uint64", "float32"))}


class StepCodec(Generic[T]):
    """Encodes and decodes StepPlan or StepResult. Thread-safe."""

    def __init__(self, kind: type[T]) -> None:
        hints = typing.get_type_hints(kind)
        self._kind: type[T] = kind
        self._arrays = [name for name in kind.__struct_fields__ if hints[name] is np.ndarray]
        self._others = [name for name in kind.__struct_fields__ if hints[name] is not np.ndarray]
        self._header = struct.Struct("<I" + "cI" * len(self._arrays))
        self._encoder = msgspec.msgpack.Encoder(enc_hook=encode_array)
        self._hints = hints

    @functools.cached_property
    def _decoder(self) -> msgspec.msgpack.Decoder[Any]:
        """Made for the first message, when every kind of attachments that may come is registered."""
        for entry in step_feature_entries():  # a process without the features themselves learns their kinds here
            load_plugin(entry)
        hints = {**self._hints, "attachments": attachments_type()}
        rest_type: Any = tuple[tuple(hints[name] for name in self._others)]  # type: ignore[misc]
        return msgspec.msgpack.Decoder(threadsafe(rest_type), dec_hook=decode_array)

    def encode(self, message: T) -> bytes:
        arrays = [getattr(message, name) for name in self._arrays]
        rest = self._encoder.encode([getattr(message, name) for name in self._others])
        fields: list[Any] = [len(rest)]
        parts = [b"", rest, bytes(-(self._header.size + len(rest)) % 8)]
        for array in arrays:
            fields += (array.dtype.char.encode(), array.size)
            data = array.tobytes()
            parts.append(data)
            if len(data) % 8:
                parts.append(bytes(-len(data) % 8))
        parts[0] = self._header.pack(*fields)
        return b"".join(parts)

    def decode(self, data: bytes | bytearray) -> T:
        """The arrays share the memory of `data` and can be written, since torch warns of others: bytes, as a step comes
        that is too large for its ring, are copied. Raises CodecError for bytes that `encode` did not produce."""
        decoder, data = self._decoder, data if isinstance(data, bytearray) else bytearray(data)
        try:
            rest_bytes, *fields = self._header.unpack_from(data)
            at = self._header.size
            rest = decoder.decode(memoryview(data)[at : at + rest_bytes])
            values = dict(zip(self._others, rest, strict=True))
            at += rest_bytes
            at += -at % 8
            for name, char, size in zip(self._arrays, fields[::2], fields[1::2], strict=True):
                values[name] = array = np.frombuffer(data, _DTYPES[char], size, at)
                at += array.nbytes + -array.nbytes % 8
        except msgspec.ValidationError as error:
            known = ", ".join(sorted(KINDS))
            raise CodecError(
                f"not a {self._kind.__name__} of this version, or one with an attachment of a kind that this process "
                f"does not know (it knows {known}): {error}"
            ) from error
        except (struct.error, msgspec.DecodeError, ValueError, KeyError) as error:
            raise CodecError(f"not a {self._kind.__name__} of this version: {error!r}") from error
        return self._kind(**values)
