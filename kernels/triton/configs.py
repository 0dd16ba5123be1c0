"""Block sizes by architecture and shape: one table, so that a start is the same each time and nothing is timed.

What fits was found by compiling (`benchmarks/triton_resources.py` records registers and shared memory); what is fast
must be measured on a GPU.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, replace

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
    part_registers: int = 0
    """The most of a thread where keys are divided into parts and stored in the query's type; 0 leaves it to Triton."""


PART_REGISTERS = 168
"""Three programs of 128 threads have as many, and their shared memory allows no more. Triton 3.6's assembler stops at
128 otherwise, and spills four."""


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

    @property
    def launches_early(self) -> bool:
        """Whether a kernel that knows how is launched while the one before it ends (programmatic dependent launch).
        Only where HEADRACE_PDL=1 asks for it, until a GPU has shown what it brings."""
        return self.capability >= (9, 0) and os.environ.get("HEADRACE_PDL") == "1"


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
    if head_dim > 128:
        return Tiles(block_m, 32, 4, stages)
    return Tiles(block_m, 64, 4, stages, PART_REGISTERS if block_m == 16 else 0)


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


def latent_tiles(device: Device, latent_dim: int, itemsize: int, *, decode: bool) -> Tiles:
    """Of latent attention: a row's sums are as wide as the compressed vector, so tiles have few rows and keys."""
    if itemsize == 4:
        return Tiles(16, 16, 4, 1)
    keys = 16 if latent_dim > 256 and not device.has_large_shared_memory else 32
    return Tiles(16 if decode else 32, keys, 8, 2)


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
    splits: int = 1
    """Parts of the inputs that are summed by programs of their own."""


SPLIT_ROWS = 64
"""The most rows of x whose products are waiting for weights rather than for the tensor cores."""
LEAST_SPLIT_BLOCKS = 8
"""Blocks of inputs in a part, so that its pipeline fills."""


def matrix_tiles(
    device: Device, num_rows: int, itemsize: int, shape: tuple[int, int], is_int4: bool = False
) -> MatrixTiles:
    """Narrow tiles for few tokens, so that all multiprocessors read weights; wide ones for many.

    shape: the weight's, out and in. A pipeline of 4 stages has 3 tiles of weights on their way: 12 KB of 8 bits, of the
    33 KB that a multiprocessor needs (`small_tiles`). Where tiles are fewer than 2.5 for each, inputs are divided.
    """
    tiles = _matrix_tiles(device, num_rows, itemsize, is_int4)
    num_tiles = -(-num_rows // tiles.block_m) * -(-shape[0] // tiles.block_n)
    most, splits = shape[1] // (LEAST_SPLIT_BLOCKS * tiles.block_k), 1
    while num_rows <= SPLIT_ROWS and 2 * splits <= most and 2 * splits * num_tiles < 5 * device.num_multiprocessors:
        splits *= 2
    return replace(tiles, splits=splits)


def _matrix_tiles(device: Device, num_rows: int, itemsize: int, is_int4: bool) -> MatrixTiles:
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


def least_scaled_mm_rows(device: Device, out_features: int) -> int:
    """Rows of x from which torch's fp8 product is called: its tiles are 128 wide, and do not divide the inputs."""
    return 17 if -(-out_features // 128) >= device.num_multiprocessors else SPLIT_ROWS + 1


def invariant_matrix_tiles(device: Device, itemsize: int) -> MatrixTiles:
    """One size for every number of tokens."""
    return MatrixTiles(32, 32, 32, 4, 2) if itemsize == 4 else MatrixTiles(64, 64, 64, 4, 3)


def experts_tiles(
    device: Device, num_pairs: int, num_experts: int, itemsize: int, is_int4: bool, *, invariant: bool
) -> MatrixTiles:
    """For the rows that choose the same expert: on average num_pairs / num_experts."""
    if invariant:
        return invariant_matrix_tiles(device, itemsize)
    tiles = _matrix_tiles(device, min(64, num_pairs // num_experts), itemsize, is_int4)
    # Without wgmma, which reads its operands from shared memory, two halves of the inputs and two sums spill.
    spills = is_int4 and tiles.block_m == 64 and device.capability[0] != 9
    return MatrixTiles(32, 64, 64, 4, 3) if spills else tiles


@dataclass(frozen=True)
class SmallTiles:
    """Of `small_linear_kernel`."""

    columns: int
    """Rows of the weight that a program owns; 2 at the least where an activation pairs them."""
    num_warps: int
    launches_early: bool = False
    """`Device.launches_early`"""


MOST_SMALL_ROWS = {32: 4, 16: 4, 8: 2, 4: 1}
"""Bits of a weight -> the most rows of x that are multiplied without the tensor cores.

At 4.3 TB/s each of an H200's 132 multiprocessors receives 18 bytes a clock: 9 weights of 16 bits, 18 of 8, 36 of 4. It
issues 128 operations of a thread a clock, and a weight takes about one to widen (two or three of 4 bits) and one for
each row. Past half of that the tensor cores do better.
"""
MOST_ROUNDED_ROWS = 1
"""The same where inputs are rounded to e4m3 too, which takes eight operations for each input and program."""


def most_small_rows(bits: int, rounds_input: bool) -> int:
    """Rows of x up to which `small_linear_kernel` multiplies weights of so many bits."""
    return MOST_ROUNDED_ROWS if rounds_input else MOST_SMALL_ROWS[bits]


def small_tiles(
    device: Device, num_rows: int, shape: tuple[int, int], itemsize: int, is_int4: bool = False, least: int = 1
) -> SmallTiles:
    """shape: weight rows, and elements of `itemsize` bytes in one of them; least: columns of a program.

    Bytes on their way must be the latency times the bandwidth (Little's law): at 4.3 TB/s and a microsecond under load
    33 KB for each of an H200's 132 multiprocessors. A program of 4 warps has 8 columns x 16 bytes x 128 threads = 16 KB
    on their way while it multiplies the 16 KB before them. 3 (of 8 bits, 168 registers a thread) to 8 (of 16 bits, 64
    registers) fit a multiprocessor, which makes 48 KB or more where there are as many: 4096 rows in eights are 3.9.
    Narrower matrices get fewer columns a program, down to one; so none needs its rows cut, and a sum is one program's.
    """
    # 4 bits hold two halves of the inputs, and the groups' scales: with 8 columns registers spill.
    columns = min(8, 16 // (power_of_two(num_rows) * (4 if is_int4 else 1)))
    while columns > least and -(-shape[0] // columns) < 3 * device.num_multiprocessors:
        columns //= 2
    loads = max(1, shape[1] * itemsize // (16 * 32))  # 16 bytes for each thread of a warp
    num_warps = min(4, power_of_two(loads + 1) // 2)
    return SmallTiles(max(columns, least, 1), num_warps, device.launches_early)
