"""Block sizes by architecture and shape: one table, so that a start is the same each time and nothing is timed.

What fits was found by compiling (`benchmarks/triton_resources.py` records registers and shared memory); what is fast
must be measured on a GPU.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

LARGE_SHARED_MEMORY = frozenset({(8, 0), (8, 7), (9, 0), (10, 0), (10, 3)})
"""Compute capabilities whose blocks may have 160 KiB of shared memory or more; others have about 99 KiB."""
NO_GPU = (8, 0)
"""The capability that kernels are configured for under the interpreter."""


@dataclass(frozen=True)
class Tiles:
    """Of one attention kernel."""

    block_m: int
    """Rows of queries: tokens times the heads that share a key/value head."""
    block_n: int
    """Keys per iteration."""
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Device:
    """What a launch depends on."""

    capability: tuple[int, int]
    num_multiprocessors: int

    @property
    def has_fp8(self) -> bool:
        """Whether e4m3 converts in hardware."""
        return self.capability >= (8, 9)

    @property
    def has_large_shared_memory(self) -> bool:
        return self.capability in LARGE_SHARED_MEMORY


def device_of(tensor: Tensor) -> Device:
    """Where a tensor is; for the interpreter's CPU tensors a small device."""
    return _cuda_device(tensor.device.index) if tensor.is_cuda else Device(NO_GPU, 4)


@functools.cache
def _cuda_device(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    return Device((properties.major, properties.minor), properties.multi_processor_count)


def power_of_two(count: int) -> int:
    """The smallest one that is not below count."""
    return 1 << max(0, count - 1).bit_length()


def decode_tiles(device: Device, head_dim: int, group: int, itemsize: int) -> Tiles:
    """For sequences of one token. group: query heads per key/value head; itemsize: of the query's dtype.

    The pipeliner spends half of the stages on the block table, which the keys' addresses come from: 5 keep two tiles
    of keys and values in shared memory.
    """
    block_m = max(16, power_of_two(group))
    stages = 5 if device.has_large_shared_memory else 3
    if itemsize == 4 or head_dim > 256:
        return Tiles(block_m, 16 if head_dim > 128 else 32, 4, 3)
    return Tiles(block_m, 32 if head_dim > 128 else 64, 4, stages)


def prefill_tiles(device: Device, head_dim: int, group: int, itemsize: int) -> Tiles:
    """For sequences of several tokens; a tile holds at least one token's group of heads."""
    least = power_of_two(group)
    has_wgmma = device.capability[0] == 9
    stages = 5 if device.has_large_shared_memory else 3
    if itemsize == 4:
        return Tiles(max(32, least), 16, 8, 1)
    if head_dim > 256:
        return Tiles(max(32, least), 16, 8, 3)
    if head_dim > 128:
        return Tiles(max(64, least), 32, 8, stages if has_wgmma else 3)
    if head_dim > 64 and not has_wgmma:
        return Tiles(max(128, least), 32, 8, stages)
    return Tiles(max(128, least), 64, 8, stages)


def invariant_tiles(device: Device, head_dim: int, group: int, itemsize: int) -> Tiles:
    """For both, where a row's arithmetic must not depend on which of the two kernels runs."""
    prefill = prefill_tiles(device, head_dim, group, itemsize)
    block_m = 32 if head_dim > 128 else min(prefill.block_m, 64)
    return Tiles(max(block_m, power_of_two(group)), min(prefill.block_n, 32), 8, min(prefill.num_stages, 3))


@dataclass(frozen=True)
class MatrixTiles:
    """Of x @ weight^T."""

    block_m: int
    """Rows of x."""
    block_n: int
    """Rows of the weight."""
    block_k: int
    num_warps: int
    num_stages: int


def matrix_tiles(device: Device, num_rows: int, itemsize: int, is_int4: bool = False) -> MatrixTiles:
    """Narrow tiles for few tokens, so that all multiprocessors read weights; wide ones for many."""
    if itemsize == 4:
        return MatrixTiles(32, 32, 32, 4, 2)
    stages = 4 if device.has_large_shared_memory else 3
    if num_rows <= 16:
        return MatrixTiles(16, 32, 128, 4, stages)
    if num_rows <= 64:
        return MatrixTiles(64, 64, 64, 4, stages)
    if is_int4 and device.capability[0] != 9:
        return MatrixTiles(64, 64, 64, 8, 3)  # two halves of the inputs are held, and larger tiles spill
    return MatrixTiles(128, 128, 64, 8, 3)


def invariant_matrix_tiles(device: Device, itemsize: int) -> MatrixTiles:
    """One size for every number of tokens."""
    return MatrixTiles(32, 32, 32, 4, 2) if itemsize == 4 else MatrixTiles(64, 64, 64, 4, 3)
