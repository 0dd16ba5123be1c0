"""MessagePack (by msgspec) with large tensors in frames of their own: one message is a list of frames.

Frame 0 is the MessagePack header. It encodes a tensor as `[dtype, shape, data]`, where `data` is either the raw
little-endian bytes of a small tensor, or the index (1, 2, ...) of the frame that holds a large one. Frames of tensors
are neither copied nor parsed on the way:

    frame 0: header (MessagePack)   frame 1: raw bytes   frame 2: raw bytes ...

A frame is never empty, except the last frame of a message whose sender could not send it whole.
"""

from __future__ import annotations

import array
import functools
import math
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from headrace.ipc.failure import HeadraceError
from headrace.ipc.struct_types import threadsafe

T = TypeVar("T")

# dtype name -> (memoryview/array format, item size in bytes). bf16 has no format of its own: raw 16-bit words.
DTYPES: dict[str, tuple[str, int]] = {
    "int8": ("b", 1),
    "uint8": ("B", 1),
    "int16": ("h", 2),
    "bfloat16": ("H", 2),
    "float16": ("e", 2),
    "int32": ("i", 4),
    "float32": ("f", 4),
    "int64": ("q", 8),
    "float64": ("d", 8),
    "bool": ("?", 1),
}
INLINE_BYTES = 4096  # up to this size a separate frame costs more than the copy that it saves
MOST_DIMENSIONS = 8  # of a tensor: multiplying a hundred thousand sizes would take minutes


@functools.cache
def _dtype_name(dtype: Any) -> str:
    """Cached, as numpy derives the name at each access, which takes longer than the rest of encoding a small tensor."""
    name: str = dtype.name
    return name


class CodecError(HeadraceError, ValueError):
    """A message could not be decoded: garbage bytes, a message of another program, or one of another version."""


class Tensor:
    """A dense row-major array on the wire. `data` is a flat, read-only byte view; shape [] is one element."""

    __slots__ = ("data", "dtype", "shape")

    def __init__(self, dtype: str, shape: tuple[int, ...], data: memoryview) -> None:
        if dtype not in DTYPES:
            raise CodecError(f"tensor of unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
        expected_bytes = math.prod(shape) * DTYPES[dtype][1]
        if data.nbytes != expected_bytes or (shape and min(shape) < 0):
            raise CodecError(f"tensor {dtype}{list(shape)} needs {expected_bytes} bytes, got {data.nbytes}")
        self.dtype, self.shape, self.data = dtype, shape, data

    @classmethod
    def of(cls, dtype: str, values: Sequence[int] | Sequence[float]) -> Tensor:
        """A one-dimensional tensor of plain Python numbers. Raises OverflowError when one does not fit."""
        packed = array.array(DTYPES[dtype][0], values)
        return cls(dtype, (len(packed),), memoryview(packed).cast("B"))

    @classmethod
    def from_numpy(cls, values: Any) -> Tensor:
        """Shares the memory of a C-contiguous numpy array; copies any other array."""
        import numpy as np

        values = np.ascontiguousarray(values)
        data = memoryview(values).cast("B") if values.size else memoryview(b"")
        return cls(_dtype_name(values.dtype), values.shape, data)

    def numpy(self) -> Any:
        """A read-only numpy view. A bfloat16 tensor is returned as uint16 words."""
        import numpy as np

        dtype = "uint16" if self.dtype == "bfloat16" else self.dtype
        flat = np.frombuffer(self.data, dtype=dtype)
        return flat if len(self.shape) == 1 else flat.reshape(self.shape)

    def tolist(self) -> list[Any]:
        """The elements in row-major order, flat, as Python numbers."""
        return self.data.cast(DTYPES[self.dtype][0]).tolist() if self.data.nbytes else []  # type: ignore[call-overload]

    def __len__(self) -> int:
        return self.shape[0]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tensor):
            return NotImplemented
        return (self.dtype, self.shape, self.data) == (other.dtype, other.shape, other.data)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Tensor({self.dtype}{list(self.shape)})"


Frame = bytes | bytearray | memoryview


class Codec(Generic[T]):
    """Encodes any message; decodes the messages of one union. Not thread-safe: one codec per thread and socket."""

    def __init__(self, union: Any, *, most_header_bytes: int | None = None) -> None:
        """most_header_bytes: a longer header is refused undecoded, as decoding it would block the whole process."""
        self._most_header_bytes = most_header_bytes
        self._out: list[Frame] = []
        self._in: Sequence[Frame] = ()
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode_array)
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(
            threadsafe(union), dec_hook=self._decode_array
        )

    def encode(self, message: Any) -> list[Frame]:
        self._out = [b""]
        self._out[0] = self._encoder.encode(message)
        frames, self._out = self._out, []
        return frames

    def decode(self, frames: Sequence[Frame]) -> T:
        """Raises CodecError for anything that is not exactly one well-formed message of the union."""
        if not frames:
            raise CodecError("an empty message")
        if self._most_header_bytes is not None and len(frames[0]) > self._most_header_bytes:
            raise CodecError(
                f"a message of {len(frames[0])} bytes beside its tensors; at most {self._most_header_bytes} are taken"
            )
        self._in = frames
        try:
            return self._decoder.decode(frames[0])
        except (msgspec.DecodeError, CodecError, ValueError, TypeError, RecursionError, OverflowError) as error:
            if not len(frames[-1]):
                raise CodecError("it was cut short: its sender failed within it, as for want of memory") from error
            raise CodecError(f"not a message of this version: {error}") from error
        finally:
            self._in = ()

    def _encode_array(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            if not hasattr(value, "__array_interface__") or value.ndim == 0:  # a number of numpy's is no array
                raise TypeError(f"{type(value).__name__} has no wire format")
            value = Tensor.from_numpy(value)
        if value.data.nbytes <= INLINE_BYTES:
            return (value.dtype, value.shape, bytes(value.data))
        self._out.append(value.data)
        return (value.dtype, value.shape, len(self._out) - 1)

    def _decode_array(self, kind: type, value: Any) -> Any:
        try:
            dtype, shape, data = value
            if len(shape) > MOST_DIMENSIONS:
                raise CodecError(f"a tensor of {len(shape)} dimensions; at most {MOST_DIMENSIONS} are taken")
            for count in shape:  # without a generator: this runs for each tensor of each step
                if type(count) is not int:
                    raise CodecError(f"a tensor's shape must be integers, not {shape!r:.100}")
            if isinstance(data, int):
                if not 1 <= data < len(self._in):
                    raise CodecError(f"tensor refers to frame {data} of {len(self._in)}")
                data = self._in[data]
            tensor = Tensor(dtype, tuple(shape), memoryview(data).cast("B"))
        except (TypeError, ValueError) as error:
            raise CodecError(f"malformed tensor: {error}") from error
        return tensor if kind is Tensor else tensor.numpy()
