"""Launching paged attention: which kernels a batch needs, how keys are divided, where the parts go."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.reference.attention import AttentionParams, CacheScales, PagedBatch
from headrace.kernels.triton import configs
from headrace.kernels.triton.attention_kernels import attend_kernel
from headrace.kernels.triton.combine_kernels import combine_kernel
from headrace.kernels.triton.configs import (
    Device,
    Tiles,
    decode_tiles,
    invariant_tiles,
    power_of_two,
    prefill_tiles,
)

LOG2_E = 1.4426950408889634
PROGRAMS_PER_MULTIPROCESSOR = 2
"""Decode programs wanted at once, each of which keeps a few tiles of keys in flight."""
MOST_PARTS = 128
"""With one key/value head, as on each of eight ranks, a single long sequence still has programs for all of an H200."""
PARTS_AT_ONCE = 32
"""Parts that are merged together by a program of four warps, where there are more than FEW_PARTS."""
FEW_PARTS = 4
"""So many are merged by a program of one warp: large batches have few parts of each sequence, and many sequences."""
FIXED_SPLIT_TOKENS = 4096
"""Batch-invariant attention divides every context at multiples of this."""
CACHE_KINDS = {torch.int8: 1, torch.float8_e4m3fn: 2}
E4M3_IN_HARDWARE = 3


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    params: AttentionParams,
    scales: CacheScales | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """As `reference_attention.paged_attention`; out, if given, is like query and may be strided by token.

    Sequences of one token divide their keys among programs; the number of programs depends on the number of sequences
    and the device alone, so a captured launch serves every context. Where `batch.max_query_len` is not 1, a second
    kernel does the prompts. float32 is multiplied in float32, not in TF32.
    """
    launch = Launch(query, key_cache, value_cache, batch, params, scales)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
    if params.batch_invariant:
        tiles = invariant_tiles(*launch.facts)
        launch.decodes(out, tiles, split_tiles=FIXED_SPLIT_TOKENS // tiles.block_n)
        if batch.max_query_len != 1:
            launch.prompts(out, tiles, split_tiles=FIXED_SPLIT_TOKENS // tiles.block_n)
        return out
    launch.decodes(out, decode_tiles(*launch.facts))
    if batch.max_query_len != 1:
        launch.prompts(out, prefill_tiles(*launch.facts))
    return out


@dataclass(frozen=True, eq=False)
class Parts:
    """Room for softmaxes over parts of the keys."""

    values: Tensor  # [num_seqs, num_heads, num_parts, head_dim] float32
    stats: Tensor  # [num_seqs, num_heads, num_parts, 2] float32

    @classmethod
    def empty(cls, query: Tensor, num_seqs: int, num_parts: int) -> Parts:
        _, num_heads, head_dim = query.shape
        shape = (num_seqs, num_heads, num_parts)
        return cls(
            torch.empty((*shape, head_dim), dtype=torch.float32, device=query.device),
            torch.empty((*shape, 2), dtype=torch.float32, device=query.device),
        )

    @property
    def count(self) -> int:
        return self.values.shape[2]


class Launch:
    """The kernels' arguments that do not depend on how the work is divided."""

    def __init__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: PagedBatch,
        params: AttentionParams,
        scales: CacheScales | None,
    ) -> None:
        if query.stride(2) != 1 or query.stride(1) != query.shape[2]:
            query = query.contiguous()
        self.query, self.batch = query, batch
        _, num_heads, self.head_dim = query.shape
        self.num_kv_heads, block_size = key_cache.shape[1:3]
        self.num_heads, self.group = num_heads, num_heads // self.num_kv_heads
        self.device = configs.device_of(query)
        self._window = params.sliding_window or 0
        if not key_cache.is_contiguous() or not value_cache.is_contiguous():
            raise ValueError("the key and value caches of a layer must each be contiguous")
        scales = scales or CacheScales()
        kind = CACHE_KINDS.get(key_cache.dtype, 0)
        if key_cache.dtype == torch.float8_e4m3fn:
            key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
            kind = E4M3_IN_HARDWARE if self.device.has_fp8 else kind
        self._value_scale = scales.value if kind and scales.values is None else 1.0
        key_scale = scales.key if kind and scales.keys is None else 1.0
        unit = LOG2_E if params.soft_cap is None else 1.0 / params.soft_cap
        self._tensors = (query, key_cache, value_cache, scales.keys, scales.values)
        self._scalars = (params.scale * key_scale * unit, self._value_scale, params.soft_cap or 0.0, self._window)
        self._shape = {
            "NUM_KV_HEADS": self.num_kv_heads,
            "GROUP": self.group,
            "HEAD_DIM": self.head_dim,
            "BLOCK_D": max(16, power_of_two(self.head_dim)),
            "BLOCK_SIZE": block_size,
            "KIND": kind,
            "ROW_SCALES": scales.keys is not None and kind != 0,
            "SOFT_CAP": params.soft_cap is not None,
            "WINDOW": params.sliding_window is not None,
            "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        }
        self._cache_strides = (key_cache.stride(0), key_cache.stride(1))

    @property
    def facts(self) -> tuple[Device, int, int, int]:
        """What the tiles are chosen by."""
        return self.device, self.head_dim, self.group, self.query.element_size()

    def num_parts(self, num_programs: int) -> int:
        """How many parts keys are divided into when there are so many programs without that."""
        parts = self.device.num_multiprocessors * PROGRAMS_PER_MULTIPROCESSOR // max(1, num_programs)
        if parts > PARTS_AT_ONCE:
            parts = min(MOST_PARTS, parts - parts % PARTS_AT_ONCE)
        return max(1, parts)

    def decodes(self, out: Tensor, tiles: Tiles, split_tiles: int = 0) -> None:
        """Sequences of one token. split_tiles: tiles in each part; 0 divides by the number of programs."""
        num_seqs = len(self.batch.seq_lens)
        if num_seqs == 0:
            return
        programs = num_parts = self.num_parts(num_seqs * self.num_kv_heads)
        if split_tiles:
            longest = self.batch.block_tables.shape[1] * self.batch.block_size
            num_parts = max(1, -(-longest // (split_tiles * tiles.block_n)))
            programs = min(num_parts, programs)
        parts = Parts.empty(self.query, num_seqs, num_parts) if num_parts > 1 else None
        grid = (num_seqs, self.num_kv_heads, programs)
        self.attend(grid, tiles, out if parts is None else parts, SPLIT_TILES=split_tiles, DECODE=True)
        if parts is not None:
            self.combine(out, parts, split_tiles * tiles.block_n)

    def prompts(self, out: Tensor, tiles: Tiles, split_tiles: int = 0) -> None:
        """Sequences of several tokens."""
        num_tokens, num_seqs = len(self.query), len(self.batch.seq_lens)
        tokens_per_tile = tiles.block_m // self.group
        # Each sequence adds at most one tile that is not full.
        grid = (num_tokens // tokens_per_tile + num_seqs, self.num_kv_heads, 1)
        self.attend(grid, tiles, out, SPLIT_TILES=split_tiles, SKIP_DECODES=True)

    def attend(
        self,
        grid: tuple[int, int, int],
        tiles: Tiles,
        into: Tensor | Parts,
        **options: int | bool,
    ) -> None:
        """One launch of `attend_kernel`, into the result or into parts of it."""
        batch = self.batch
        has_parts = isinstance(into, Parts)
        out, parts, stats = (None, into.values, into.stats) if isinstance(into, Parts) else (into, None, None)
        flags = {"SPLIT_TILES": 0, "DECODE": False, "SKIP_DECODES": False, **options}
        attend_kernel[grid](
            out,
            parts,
            stats,
            *self._tensors,
            batch.block_tables,
            batch.seq_lens,
            batch.query_start,
            len(batch.seq_lens),
            into.count if isinstance(into, Parts) else 1,
            *self._scalars,
            self.query.stride(0),
            0 if out is None else out.stride(0),
            batch.block_tables.stride(0),
            *self._cache_strides,
            BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n,
            PARTS=has_parts,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
            **self._shape,
            **flags,
        )

    def combine(self, out: Tensor, parts: Parts, split_tokens: int = 0) -> None:
        """Merges the parts of sequences of one token into out."""
        batch, is_few = self.batch, split_tokens > 0 or parts.count <= FEW_PARTS
        combine_kernel[(len(batch.seq_lens), self.num_heads)](
            out,
            parts.values,
            parts.stats,
            batch.seq_lens,
            batch.query_start,
            parts.count,
            self._value_scale,
            self._window,
            out.stride(0),
            NUM_HEADS=self.num_heads,
            HEAD_DIM=self.head_dim,
            BLOCK_D=self._shape["BLOCK_D"],
            SPLIT_TOKENS=split_tokens,
            WINDOW=self._shape["WINDOW"],
            AT_ONCE=FEW_PARTS if is_few else PARTS_AT_ONCE,
            num_warps=1 if is_few else 4,
        )
