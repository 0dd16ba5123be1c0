"""Block sizes by architecture and shape, as a fixed table: starts are reproducible, and nothing is autotuned.

Registers and shared memory were checked by compiling (`benchmarks/triton_resources.py` records them); speed must be
measured on a GPU.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, replace

import torch
from torch import Tensor

LARGE_SHARED_MEMORY = frozenset({(8, 0), (8, 7), (9, 0), (10, 0), (10, 3)})
"""Compute capabilities with 160 KiB or more of shared memory per block; others have about 99 KiB."""
NO_GPU = (8, 0)
"""The capability that kernels are configured for under the interpreter."""


@dataclass(frozen=True)
class Tiles:
    """The block sizes of one attention kernel."""

    block_m: int
    """Rows of queries: tokens times the heads that share a key/value head."""
    block_n: int
    """Keys per iteration."""
    num_warps: int
    num_stages: int
    part_registers: int = 0
    """Limit on a thread's registers if keys are divided into parts and the cache is not of one byte; 0: no limit."""


PART_REGISTERS = 168
"""Registers per thread with three programs of 128 threads, the most that shared memory allows. Without it Triton 3.6's
assembler limits itself to 128 and spills four."""


@dataclass(frozen=True)
class DeviceProperties:
    """The properties of a GPU that launches depend on."""

    capability: tuple[int, int]
    num_multiprocessors: int

    @property
    def has_fp8(self) -> bool:
        """Whether the hardware converts e4m3."""
        return self.capability >= (8, 9)

    @property
    def has_large_shared_memory(self) -> bool:
        return self.capability in LARGE_SHARED_MEMORY

    @property
    def launches_early(self) -> bool:
        """Whether kernels that support it are launched while the previous one ends (programmatic dependent launch).
        Requires HEADRACE_PDL=1, until a GPU has shown a gain."""
        return self.capability >= (9, 0) and os.environ.get("HEADRACE_PDL") == "1"


def device_of(tensor: Tensor) -> DeviceProperties:
    """The device of a tensor; a small device for the interpreter's CPU tensors."""
    return _cuda_device(tensor.device.index) if tensor.is_cuda else DeviceProperties(NO_GPU, 4)


@functools.cache
def _cuda_device(index: int) -> DeviceProperties:
    properties = torch.cuda.get_device_properties(index)
    return DeviceProperties((properties.major, properties.minor), properties.multi_processor_count)


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least count."""
    return 1 << max(0, count - 1).bit_length()


def decode_tiles(device: DeviceProperties, head_dim: int, group: int, itemsize: int) -> Tiles:
    """The tiles for sequences of one token. group: query heads per key/value head; itemsize: bytes of a query element.

    Triton's pipeliner spends half of the stages on loading the block table, which gives the keys' addresses: 5 stages
    keep two tiles of keys and values in shared memory.
    """
    block_m = max(16, power_of_two(group))
    stages = 5 if device.has_large_shared_memory else 3
    if itemsize == 4 or head_dim > 256:
        return Tiles(block_m, 16 if head_dim > 128 else 32, 4, 3)
    if head_dim > 128:
        return Tiles(block_m, 32, 4, stages)
    return Tiles(block_m, 64, 4, stages, PART_REGISTERS if block_m == 16 else 0)


def prefill_tiles(device: DeviceProperties, head_dim: int, group: int, itemsize: int) -> Tiles:
    """The tiles for sequences of several tokens; a tile holds at least one token's group of heads."""
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


def invariant_tiles(device: DeviceProperties, head_dim: int, group: int, itemsize: int) -> Tiles:
    """The tiles of batch-invariant attention, in which both launches must do the same arithmetic for a row."""
    prefill = prefill_tiles(device, head_dim, group, itemsize)
    block_m = 32 if head_dim > 128 else min(prefill.block_m, 64)
    return Tiles(max(block_m, power_of_two(group)), min(prefill.block_n, 32), 8, min(prefill.num_stages, 3))


def latent_tiles(device: DeviceProperties, latent_dim: int, itemsize: int, *, decode: bool) -> Tiles:
    """The tiles of latent attention. A row's sums are as wide as the compressed vector, so tiles have few rows and
    keys."""
    if itemsize == 4:
        return Tiles(16, 16, 4, 1)
    keys = 16 if latent_dim > 256 and not device.has_large_shared_memory else 32
    return Tiles(16 if decode else 32, keys, 8, 2)


@dataclass(frozen=True)
class MatrixTiles:
    """The block sizes of x @ weight^T."""

    block_m: int
    """Rows of x."""
    block_n: int
    """Rows of the weight."""
    block_k: int
    num_warps: int
    num_stages: int
    splits: int = 1
    """Parts of the inputs, each summed by a separate program (split-K)."""


SPLIT_ROWS = 64
"""The most rows of x for which a product is limited by loading weights rather than by the tensor cores."""
LEAST_SPLIT_BLOCKS = 8
"""The fewest blocks of inputs in a part, so that its pipeline fills."""


def matrix_tiles(
    device: DeviceProperties, num_rows: int, itemsize: int, shape: tuple[int, int], is_int4: bool = False
) -> MatrixTiles:
    """Narrow tiles for few tokens, so that all multiprocessors read weights; wide ones for many.

    shape: (out_features, in_features). A pipeline of 4 stages has 3 tiles of weights in flight: 12 KB of 8-bit weights,
    of the 33 KB that a multiprocessor needs (`small_tiles`). With fewer than 2.5 tiles per multiprocessor the inputs
    are divided.
    """
    tiles = _matrix_tiles(device, num_rows, itemsize, is_int4)
    num_tiles = -(-num_rows // tiles.block_m) * -(-shape[0] // tiles.block_n)
    most, splits = shape[1] // (LEAST_SPLIT_BLOCKS * tiles.block_k), 1
    while num_rows <= SPLIT_ROWS and 2 * splits <= most and 2 * splits * num_tiles < 5 * device.num_multiprocessors:
        splits *= 2
    return replace(tiles, splits=splits)


def _matrix_tiles(device: DeviceProperties, num_rows: int, itemsize: int, is_int4: bool) -> MatrixTiles:
    if itemsize == 4:
        return MatrixTiles(32, 32, 32, 4, 2)
    stages = 4 if device.has_large_shared_memory else 3
    if num_rows <= 16:
        return MatrixTiles(16, 32, 128, 4, stages)
    if num_rows <= 64:
        return MatrixTiles(64, 64, 64, 4, stages)
    if is_int4 and device.capability[0] != 9:
        return MatrixTiles(64, 64, 64, 8, 3)  # both halves of the inputs are in registers, and larger tiles spill
    return MatrixTiles(128, 128, 64, 8, 3)


def least_scaled_mm_rows(device: DeviceProperties, out_features: int) -> int:
    """The fewest rows of x for torch's fp8 product, whose tiles are 128 wide and do not divide the inputs."""
    return 17 if -(-out_features // 128) >= device.num_multiprocessors else SPLIT_ROWS + 1


def invariant_matrix_tiles(device: DeviceProperties, itemsize: int) -> MatrixTiles:
    """One block size for every number of tokens."""
    return MatrixTiles(32, 32, 32, 4, 2) if itemsize == 4 else MatrixTiles(64, 64, 64, 4, 3)


def experts_tiles(
    device: DeviceProperties, num_pairs: int, num_experts: int, itemsize: int, is_int4: bool, *, invariant: bool
) -> MatrixTiles:
    """The tiles for the rows that chose the same expert, on average num_pairs / num_experts."""
    if invariant:
        return invariant_matrix_tiles(device, itemsize)
    tiles = _matrix_tiles(device, min(64, num_pairs // num_experts), itemsize, is_int4)
    # Without wgmma, which reads its operands from shared memory, both halves of the inputs and two sums spill.
    spills = is_int4 and tiles.block_m == 64 and device.capability[0] != 9
    return MatrixTiles(32, 64, 64, 4, 3) if spills else tiles


@dataclass(frozen=True)
class SmallTiles:
    """The configuration of `small_linear_kernel`."""

    columns: int
    """Rows of the weight that a program owns; at least 2 with an activation, which pairs them."""
    num_warps: int
    launches_early: bool = False
    """`Device.launches_early`"""


MOST_SMALL_ROWS = {32: 4, 16: 4, 8: 2, 4: 1}
"""Bits of a weight -> the most rows of x that are multiplied without tensor cores.

At 4.3 TB/s each of an H200's 132 multiprocessors receives 18 bytes per clock: 9 weights of 16 bits, 18 of 8, 36 of 4.
It issues 128 operations of a thread per clock. A weight takes about one to widen (two or three for 4 bits) and one for
each row. If that is more than half of the 128, tensor cores are faster.
"""
MOST_ROUNDED_ROWS = 1
"""The same if inputs are rounded to e4m3 too, which takes eight operations per input in every program."""


def most_small_rows(bits: int, rounds_input: bool) -> int:
    """The most rows of x that `small_linear_kernel` multiplies by weights of `bits` bits."""
    return MOST_ROUNDED_ROWS if rounds_input else MOST_SMALL_ROWS[bits]


def small_tiles(
    device: DeviceProperties,
    num_rows: int,
    shape: tuple[int, int],
    itemsize: int,
    is_int4: bool = False,
    least: int = 1,
) -> SmallTiles:
    """shape: (rows of the weight, elements of `itemsize` bytes in a row); least: the fewest columns of a program.

    Bytes in flight must be latency times bandwidth (Little's law): at 4.3 TB/s and a microsecond under load, 33 KB for
    each of an H200's 132 multiprocessors. A program of 4 warps has 8 columns x 16 bytes x 128 threads = 16 KB in flight
    while it multiplies the previous 16 KB. A multiprocessor holds 3 programs (8 bits, 168 registers per thread) to 8
    (16 bits, 64 registers), which makes 48 KB or more if there are enough programs: 4096 rows with 8 columns give 3.9
    per multiprocessor. Narrower matrices get fewer columns per program, down to one. So no row is divided, and each sum
    is computed by one program.
    """
    # 4 bits need both halves of the inputs and the groups' scales: with 8 columns registers spill.
    columns = min(8, 16 // (power_of_two(num_rows) * (4 if is_int4 else 1)))
    while columns > least and -(-shape[0] // columns) < 3 * device.num_multiprocessors:
        columns //= 2
    loads = max(1, shape[1] * itemsize // (16 * 32))  # 16 bytes for each thread of a warp
    num_warps = min(4, power_of_two(loads + 1) // 2)
    return SmallTiles(max(columns, least, 1), num_warps, device.launches_early)
