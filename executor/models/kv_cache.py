"""The paged key/value cache's memory. Which block holds what is the core's business."""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from headrace.executor.models.arch import ArchSpec
from headrace.executor.parallel.rank_place import SINGLE, RankPlace
from headrace.ipc.failure import ModelError
from headrace.kernels.reference.attention import CacheScales
from headrace.kernels.reference.rotary_cache import LayerCache

SCALED = (torch.int8, torch.float8_e4m3fn)
"""What a cache can keep only with a scale for each row."""


@dataclass(frozen=True, eq=False)
class KVCache:
    """One key and one value tensor per layer, each [num_blocks, num_kv_heads, block_size, head_dim].

    In int8 and fp8 (float8_e4m3fn) each row of head_dim elements is stored divided by its scale.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    key_scales: tuple[Tensor, ...] = ()  # per layer, where scaled: [num_blocks, num_kv_heads, block_size] float32
    value_scales: tuple[Tensor, ...] = ()
    pages: tuple[mmap.mmap, ...] = ()
    """A CPU's memory of all of them, from which pages can be given back."""

    @cached_property
    def layers(self) -> tuple[LayerCache, ...]:
        """As a layer's kernels take them."""
        if not self.key_scales:
            return tuple(LayerCache(k, v) for k, v in zip(self.keys, self.values, strict=True))
        scales = [CacheScales(keys=k, values=v) for k, v in zip(self.key_scales, self.value_scales, strict=True)]
        return tuple(LayerCache(k, v, s) for k, v, s in zip(self.keys, self.values, scales, strict=True))

    def release(self) -> None:
        """Gives its memory back, with what it held, until `restore`. The tensors stay the same objects; on a device
        they then have no memory, and new addresses afterwards."""
        for page in self.pages:
            page.madvise(mmap.MADV_DONTNEED)
        if not self.pages:
            for tensor in self._tensors:
                tensor.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Zeroed memory again."""
        if not self.pages:
            for tensor in self._tensors:
                tensor.untyped_storage().resize_(tensor.nbytes)
                tensor.zero_()

    @property
    def num_blocks(self) -> int:
        return self.keys[0].shape[0]

    @property
    def block_size(self) -> int:
        return self.keys[0].shape[2]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)

    @property
    def _tensors(self) -> tuple[Tensor, ...]:
        return (*self.keys, *self.values, *self.key_scales, *self.value_scales)


def block_bytes(spec: ArchSpec, block_size: int, dtype: torch.dtype, place: RankPlace = SINGLE) -> int:
    """Memory of one block over all of a rank's layers, keys and values."""
    row_bytes = spec.head_dim * dtype.itemsize + (torch.float32.itemsize if dtype in SCALED else 0)
    num_layers = len(place.layers(spec.num_layers))
    return 2 * num_layers * spec.local_kv_heads(place.tp_size) * block_size * row_bytes


def allocate(
    spec: ArchSpec,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    place: RankPlace = SINGLE,
) -> KVCache:
    """A rank's zeroed cache; on a CPU its pages take memory once they are written. Raises ModelError if it cannot."""
    if num_blocks < 1 or block_size < 1:
        raise ModelError(f"a cache needs at least one block of one token, got {num_blocks} blocks of {block_size}")
    shape = (num_blocks, spec.local_kv_heads(place.tp_size), block_size, spec.head_dim)
    num_layers = len(place.layers(spec.num_layers))
    pages: list[mmap.mmap] = []

    def make(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if torch.device(device).type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        # torch.zeros would write every page; fresh anonymous memory reads as zeros and costs nothing until written.
        pages.append(mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Blocks lie in any order, and each short one would cost a walk of the page tables.
            with suppress(OSError):  # of a kernel without them
                pages[-1].madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(pages[-1], dtype=dtype).view(shape)

    try:
        keys = tuple(make(shape, dtype) for _ in range(num_layers))
        values = tuple(make(shape, dtype) for _ in range(num_layers))
        num_scales = num_layers if dtype in SCALED else 0
        key_scales = tuple(make(shape[:-1], torch.float32) for _ in range(num_scales))
        value_scales = tuple(make(shape[:-1], torch.float32) for _ in range(num_scales))
    except (OSError, OverflowError, RuntimeError) as error:
        total = num_blocks * block_bytes(spec, block_size, dtype, place)
        raise ModelError(f"a cache of {num_blocks} blocks needs {total:,} bytes on {device}: {error}") from error
    return KVCache(keys, values, key_scales, value_scales, tuple(pages))
