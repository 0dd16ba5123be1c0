"""`WeightSource`, the interface through which weights are read, and sources for PyTorch files and dummy weights."""

from __future__ import annotations

import hashlib
import math
import pickle
import re
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from headrace.ipc.failure import ModelError
from headrace.ipc.process.regular_files import NoFileError, open_file, require_file
from headrace.kernels.grouped import GroupedWeight

if TYPE_CHECKING:
    from headrace.executor.checkpoints.formats import AsLoaded

Packed = tuple[str, np.ndarray] | GroupedWeight
"""A quantised weight as stored: (GGUF type's name, [rows, bytes of a row] uint8), or codes with group scales."""
OnRead = Callable[[int, int], None]
"""Called with (bytes read so far, total bytes)."""
ON_READ_INTERVAL_S = 0.1
LAYER = re.compile(r"\.(\d+)\.")
DUMMY_STANDARD_DEVIATION = 0.02
LFS_POINTER = b"version https://git-lfs"


class WeightSource(Protocol):
    """A checkpoint's tensors under Hugging Face names, each read on request.

    A source of quantised weights also has `packed(name)`, which returns a weight as stored (`Packed`; None for floats),
    and `group_of(name)`, the number of neighbours in a row that share a scale.
    """

    def names(self) -> frozenset[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def get(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """The tensor, or the part of these rows and columns. Slices have no step, and bounds within the shape."""
        ...


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


def dense(tensor: Tensor, name: str) -> Tensor:
    """The tensor, if it is plain numbers in memory, as every weight must be. Raises ModelError for one that is on the
    meta device, sparse, nested, of torch's own quantised types, complex or without its storage."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        reason = f"is stored with the layout {'nested' if tensor.is_nested else tensor.layout}"
    elif tensor.device.type not in ("cpu", "cuda"):
        reason = f"is on the device {tensor.device}, where it has no numbers"
    elif tensor.is_quantized or tensor.is_complex():
        reason = f"is of type {tensor.dtype}"
    elif tensor.numel() and not tensor.data_ptr():
        reason = "has lost its numbers"
    else:
        return tensor.detach().resolve_neg()
    raise ModelError(f"the weight {name} {reason}; dense tensors of real numbers are expected")


class HeldWeights:
    """A `WeightSource` of tensors in memory, by name. Raises ModelError for a tensor that is not dense."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = {name: dense(tensor, name) for name, tensor in tensors.items()}

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype_name(self) -> str:
        largest = max(self._tensors.values(), key=lambda tensor: tensor.numel())
        return str(largest.dtype).removeprefix("torch.")

    def get(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        return take_part(self._tensors[name], self.shape(name), rows, columns)


class TorchWeights(HeldWeights):
    """Tensors of one or more files that torch.save wrote, memory-mapped where their format allows it.

    A pickle can call any function, so only plain tensors are loaded (torch's weights_only). Raises ModelError for a
    pickle that needs more, for a file that is truncated or of another format, and for a weight in two files if the
    index (from names to files) chooses neither.
    """

    def __init__(self, files: Sequence[Path], weight_map: Mapping[str, str] | None = None) -> None:
        found, chosen = dict[str, Tensor](), weight_map or {}
        for file in files:
            loaded = _load_torch(file)
            held = {name: value for name, value in loaded.items() if isinstance(value, Tensor)}
            if not held:
                raise ModelError(
                    f"{file} holds no tensors by name, only {', '.join(map(str, list(loaded)[:5])) or 'nothing'}"
                )
            held = {name: value for name, value in held.items() if chosen.get(name, file.name) == file.name}
            if twice := found.keys() & held.keys():
                raise ModelError(f"{file} and another file beside it both hold the weight {min(twice)}")
            found |= held
        try:
            super().__init__(found)
        except ModelError as error:
            raise ModelError(f"{', '.join(map(str, files[:3]))}: {error}") from None


class DummyWeights:
    """Random weights of given shapes, made on a device: normally distributed, small, and on one kind of device always
    the same for a name and shape. On a CPU an 8-billion-parameter model takes about a minute.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> None:
        self._shapes, self._dtype, self._device = dict(shapes), dtype, device

    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def get(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True)
        generator = torch.Generator(self._device).manual_seed(seed)
        whole = torch.empty(self._shapes[name], dtype=self._dtype, device=self._device)
        whole.normal_(std=DUMMY_STANDARD_DEVIATION, generator=generator)
        return take_part(whole, self._shapes[name], rows, columns)


class WrappedWeights:
    """A `WeightSource` around another one; subclasses change some tensors and pass on the rest. It has `packed` and
    `group_of` if the other one has them."""

    def __init__(
        self, source: WeightSource, replaced: frozenset[str] = frozenset(), given: frozenset[str] = frozenset()
    ) -> None:
        """replaced: names in the other source that this one does not have. given: names that it adds."""
        self.source = source
        self._names = frozenset((source.names() - replaced) | given)
        if hasattr(source, "packed"):
            self.packed = self._packed
        if hasattr(source, "group_of"):
            self.group_of = self._group_of
        self.as_loaded: AsLoaded | None = getattr(source, "as_loaded", None)
        """How floats are to be quantised while they load; None: not at all."""

    def names(self) -> frozenset[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(name)

    def _packed(self, name: str) -> Packed | None:
        stored: Packed | None = self.source.packed(name)  # type: ignore[attr-defined]
        return stored

    def _group_of(self, name: str) -> int | None:
        found: int | None = self.source.group_of(name)  # type: ignore[attr-defined]
        return found


class WatchedWeights(WrappedWeights):
    """Another source whose reading progress is reported to `on_read`, at most every ON_READ_INTERVAL_S."""

    def __init__(self, source: WeightSource, on_read: OnRead, layers: range, total_bytes: int | None = None) -> None:
        """layers: indices of the layers that will be read. total_bytes: size of all weights of the model; by default
        two bytes per element."""
        super().__init__(source)
        self._on_read = on_read
        elements = {name: math.prod(source.shape(name)) for name in source.names()}
        each = 2.0 if total_bytes is None else total_bytes / max(1, sum(elements.values()))
        self._left = {name: int(each * count) for name, count in elements.items() if _is_of(name, layers)}
        self._total_bytes, self._done_bytes = sum(self._left.values()), 0
        self._told_s = 0.0

    def get(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        part = self.source.get(name, rows, columns)
        self._count(name)
        return part

    def _packed(self, name: str) -> Packed | None:
        stored = super()._packed(name)
        self._count(name)
        return stored

    def _count(self, name: str) -> None:
        self._done_bytes += self._left.pop(name, 0)
        now_s = time.monotonic()
        if now_s - self._told_s >= ON_READ_INTERVAL_S or not self._left:
            self._told_s = now_s
            self._on_read(self._done_bytes, self._total_bytes)


def _is_of(name: str, layers: range) -> bool:
    """Whether a weight belongs to one of these layers, or to no layer."""
    layer = LAYER.search(name)
    return layer is None or int(layer[1]) in layers


def _load_torch(file: Path) -> dict[Any, Any]:
    try:
        require_file(file)
        _require_stored(file)
        try:
            loaded = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        except RuntimeError as error:
            if "mmap can only be used" not in str(error):
                raise
            loaded = torch.load(file, map_location="cpu", weights_only=True)  # the format before torch 1.6
    except pickle.UnpicklingError as error:
        wanted = _wanted_global(str(error))
        if wanted:
            raise ModelError(
                f"{file} wants to run Python code ({wanted}) while it is loaded, which is refused; "
                "use a safetensors version of this checkpoint"
            ) from error
        raise unreadable(file, "a whole file of torch.save", _unpickling_reason(str(error))) from error
    except Exception as error:  # torch's reader checks little of what a damaged file says
        raise unreadable(file, "a whole file of torch.save", str(error) or type(error).__name__) from error
    if not isinstance(loaded, dict):
        raise ModelError(f"{file} holds a {type(loaded).__name__}; a mapping of names to tensors is expected")
    return loaded


def _require_stored(file: Path) -> None:
    """Raises ValueError for an archive with compressed parts, which torch.save does not write: a few bytes of them
    could fill the memory."""
    if not zipfile.is_zipfile(file):
        return
    with zipfile.ZipFile(file) as archive:
        for part in archive.infolist():
            if part.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"its part {part.filename!r:.80} is compressed")


def _wanted_global(text: str) -> str:
    """The function in torch's message `Unsupported global: GLOBAL posix.mkdir was not an allowed global`; else ""."""
    match = re.search(r"GLOBAL\s+([A-Za-z_][\w.]*)", text)
    return match[1] if match else ""


def _unpickling_reason(text: str) -> str:
    """The cause in torch's message, without its advice to load the file with weights_only=False."""
    match = re.search(r"WeightsUnpickler error:\s*(.+)", text)
    return match[1] if match else text


def unreadable(file: Path, expected: str, reason: str) -> ModelError:
    """The error to raise for a file that is not what was `expected`: it recognises Git LFS pointers."""
    try:
        with open_file(file) as opened:
            start = opened.read(len(LFS_POINTER))
        size = file.stat().st_size
    except NoFileError as cause:
        return ModelError(str(cause))
    except OSError as cause:
        return ModelError(f"{file} cannot be read: {cause.strerror or cause}")
    if start == LFS_POINTER:
        return ModelError(f"{file} is a Git LFS pointer, not the weights; `git lfs pull` in {file.parent} fetches them")
    first_line, _, _ = reason.strip().partition("\n")
    return ModelError(f"{file} ({size} bytes) is not {expected}: {first_line}", hint="fetch it again")
