"""Safetensors files, read in one of three ways: `--safetensors-load-strategy`.

    lazy        the file is memory-mapped; a tensor's pages are read when it is copied
    eager       the whole file is read sequentially when its first tensor is requested
    prefetch    as lazy, while a thread reads all files sequentially into the page cache

Format: https://github.com/safetensors/safetensors#format: a u64 length, that many bytes of JSON, then the tensors.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from headrace.executor.checkpoints.sources.mapped_pages import MappedFile, MappedPages
from headrace.executor.checkpoints.sources.unreadable_files import unreadable
from headrace.executor.checkpoints.weights import StoredTensor, WeightSource, bounds, take_part
from headrace.executor.parallel.rank_place import SINGLE, RankCoordinates
from headrace.ipc.failure import ModelError
from headrace.ipc.process.regular_files import open_file

Strategy = Literal["lazy", "eager", "prefetch"]
BLOCK_BYTES = 16 << 20
"""Size of a read of the prefetching thread."""
PROBES = 16
"""Bytes that are probed to find out whether a block is in the page cache."""
FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
MOST_BUFFERS = 2
"""With eager, files kept in memory at once: a layer may begin in one and end in the next."""

logger = logging.getLogger(__name__)


class SafetensorsWeights(WeightSource):
    """Tensors of one or more safetensors files. Raises ModelError for a file that is truncated or of another format,
    and for a weight that two files hold or that the index has but its file does not."""

    def __init__(
        self,
        files: Sequence[Path],
        weight_map: Mapping[str, str] | None = None,
        strategy: Strategy = "lazy",
        place: RankCoordinates = SINGLE,
    ) -> None:
        """weight_map: from a tensor's name to its file's, as in an index. No two files may have a tensor of one name
        that it does not have."""
        self._file_of: dict[str, SafetensorsFile] = {}
        for file in open_sound_files(files, strategy):
            for name in file.names:
                if weight_map is not None and weight_map.get(name, file.path.name) != file.path.name:
                    continue
                if name in self._file_of:
                    raise ModelError(
                        f"both {self._file_of[name].path.name} and {file.path.name} in {file.path.parent} hold the "
                        f"weight {name}"
                    )
                self._file_of[name] = file
        for name, owner in (weight_map or {}).items():
            if name not in self._file_of:
                raise ModelError(f"the index says that {owner} holds the weight {name}, but it does not")
        if strategy == "prefetch":
            prefetch(self, files, place.rank, place.world_size)

    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def stored(self, name: str) -> StoredTensor:
        return self._file_of[name].stored(name)


def open_sound_files(paths: Sequence[Path], strategy: Strategy) -> list[SafetensorsFile]:
    """Opens files. Raises ModelError, naming the first file that is truncated or of another format."""
    from safetensors import SafetensorError

    opened: list[SafetensorsFile] = []
    try:
        for file in open_files(paths, strategy):
            opened.append(file)
    except (SafetensorError, OSError) as error:
        raise unreadable(paths[len(opened)], "a whole safetensors file", str(error)) from error
    return opened


class SafetensorsFile:
    """One memory-mapped file. Raises SafetensorError or OSError if it is not a complete safetensors file."""

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        self.path = path
        with open_file(path) as file:  # a hanging mount blocks here, where the GIL is released; safe_open holds it
            file.read(1)
        self._mapped = MappedFile(path)
        self._file = safe_open(path, framework="pt")
        self.names = frozenset(self._file.keys())
        self._pages: MappedPages | None = None

    def metadata(self) -> dict[str, str]:
        return dict(self._file.metadata() or {})

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(name).get_shape())

    def stored(self, name: str) -> StoredTensor:
        found = self._file.get_slice(name)
        kind = str(found.get_dtype())
        return StoredTensor.plain(tuple(found.get_shape()), FLOATS.get(kind, kind), partial(self.get, name))

    def get(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """The tensor or a part of it; nothing else is read. It is a view of the mapped file and must not be written.
        Raises ModelError if the file has become shorter."""
        self._mapped.require_whole()
        shape = self.shape(name)
        if not shape:
            scalar: Tensor = self._file.get_tensor(name)
            return scalar
        part = take_part(self._file.get_slice(name), shape, rows, columns)
        if self._pages is None and part.numel():
            self._pages = MappedPages.of(self.path, part.data_ptr())
        if self._pages is not None:
            # A part of the columns is a view of whole rows.
            num_bytes = int(part.untyped_storage().nbytes() - part.storage_offset() * part.itemsize)
            self._pages.read(part.data_ptr(), num_bytes)
        return part


class Buffers:
    """The MOST_BUFFERS files that were last used, whole in memory."""

    def __init__(self) -> None:
        self._read: OrderedDict[Path, Tensor] = OrderedDict()

    def of(self, path: Path) -> Tensor:
        """The file's bytes, [size of the file] uint8, read if needed. Raises OSError."""
        if path not in self._read:
            while len(self._read) >= MOST_BUFFERS:
                self._read.popitem(last=False)
            self._read[path] = _read_whole(path)
        self._read.move_to_end(path)
        return self._read[path]


class EagerFile(SafetensorsFile):
    """One file, read whole when it is first needed. The tensors that it returns are copies."""

    def __init__(self, path: Path, buffers: Buffers) -> None:
        super().__init__(path)
        self._buffers = buffers
        with open_file(path) as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            self._header: dict[str, Any] = json.loads(file.read(header_bytes))
        self._data_start = 8 + header_bytes

    def get(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        first, last = self._header[name]["data_offsets"]
        shape = self.shape(name)
        raw = self._buffers.of(self.path)[self._data_start + first : self._data_start + last]
        # A tensor may begin at any byte, where a view of a wider dtype cannot, so the bytes are cloned first.
        dtype = super().get(name, rows=slice(0, 0) if shape else None).dtype
        if columns is None and len(shape) > 1 and raw.numel():
            start, stop = bounds(rows, shape[0])
            return raw.view(shape[0], -1)[start:stop].clone().view(-1).view(dtype).view(stop - start, *shape[1:])
        whole = raw.clone().view(dtype).view(shape)
        return take_part(whole, shape, rows, columns).clone() if shape else whole


def open_files(paths: Sequence[Path], strategy: Strategy) -> Iterator[SafetensorsFile]:
    """Opens the files one by one. Raises SafetensorError or OSError for the first that is not a complete one."""
    buffers = Buffers()
    for path in paths:
        yield EagerFile(path, buffers) if strategy == "eager" else SafetensorsFile(path)


def prefetch(owner: object, paths: Sequence[Path], rank: int, num_ranks: int) -> threading.Thread:
    """Starts a thread that reads the files into the page cache. It stops when `owner` is garbage-collected.

    Each rank begins with its own share of the files, continues with the others', and skips blocks that are already in
    the page cache. So the ranks of a host together read each file once, whichever ranks these are.
    """
    first = len(paths) * rank // num_ranks
    stop = threading.Event()
    weakref.finalize(owner, stop.set)
    in_turn = (*paths[first:], *paths[:first])
    thread = threading.Thread(target=_read_ahead, args=(in_turn, stop), name="prefetch", daemon=True)
    thread.start()
    return thread


def _read_ahead(paths: Sequence[Path], stop: threading.Event) -> None:
    block = bytearray(BLOCK_BYTES)
    for path in paths:
        try:
            with path.open("rb", buffering=0) as file, path.open("rb", buffering=0) as probed:
                # Probing a byte that is not cached makes the system read it ahead, with what follows it, and later
                # probes would find that. With POSIX_FADV_RANDOM it reads the probed page alone.
                os.posix_fadvise(probed.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
                size = os.fstat(file.fileno()).st_size
                for start in range(0, size, BLOCK_BYTES):
                    if stop.is_set():
                        return
                    if not _is_cached(probed.fileno(), start, min(start + BLOCK_BYTES, size)):
                        os.preadv(file.fileno(), [block], start)
        except OSError as error:  # the rank that needs the file reports the error
            logger.info("%s is not read ahead: %s", path, error)


def _is_cached(fd: int, start: int, end: int) -> bool:
    """Whether these bytes are in the page cache; False if the file system cannot tell.

    Several bytes are probed. One is not enough: its page may be the only one left in the cache, or have been read
    because of an earlier probe.
    """
    probes = [*range(start, end, BLOCK_BYTES // PROBES or 1), end - 1]
    with contextlib.suppress(OSError):
        return all(os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1 for offset in probes)
    return False


def _read_whole(path: Path) -> Tensor:
    """The file's bytes, [size] uint8, read sequentially in large pieces. Raises OSError."""
    with path.open("rb", buffering=0) as file:
        data = torch.empty(os.fstat(file.fileno()).st_size, dtype=torch.uint8)
        into, done = data.numpy(), 0
        while done < len(into):
            count = file.readinto(into[done : done + BLOCK_BYTES].data)
            if not count:
                raise OSError(f"{path} ends after {done} of {len(into)} bytes")
            done += count
    return data
