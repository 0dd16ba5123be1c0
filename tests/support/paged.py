"""Paged batches for tests of attention, with caches that hold NaN in every slot that was not written."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from headrace.kernels.reference.attention import PagedBatch


def make_batch(
    lengths: list[tuple[int, int]],
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    shared_blocks: int = 0,
) -> tuple[PagedBatch, Tensor, Tensor]:
    """Makes a batch of sequences of (new tokens, context). A context of 0 is padding, with slots of -1.

    All sequences share their first shared_blocks blocks. Returns the batch and the two caches.
    """
    numbers = random.Random(3)
    counts = [-(-context // block_size) for _, context in lengths]
    free = list(range(sum(counts) + 5))
    numbers.shuffle(free)
    shape = (len(free), num_kv_heads, block_size, head_dim)
    keys, values = torch.full(shape, float("nan"), dtype=dtype), torch.full(shape, float("nan"), dtype=dtype)
    tables = torch.full((len(lengths), max(counts) + 2), free.pop(), dtype=torch.int32)
    shared = [free.pop() for _ in range(shared_blocks)]
    slots = []
    for i, (new, context) in enumerate(lengths):
        blocks = (shared + [free.pop() for _ in range(max(0, counts[i] - len(shared)))])[: counts[i]]
        tables[i, : counts[i]] = torch.tensor(blocks, dtype=torch.int32)
        for number, block in enumerate(blocks):
            filled = min(block_size, context - number * block_size)
            keys[block, :, :filled], values[block, :, :filled] = torch.randn(2, num_kv_heads, filled, head_dim).to(
                dtype
            )
        slots += [
            blocks[p // block_size] * block_size + p % block_size if context else -1
            for p in range(context - new, context)
        ]
    starts = torch.tensor([0] + [new for new, _ in lengths], dtype=torch.int32).cumsum(0).to(torch.int32)
    seq_lens = torch.tensor([context for _, context in lengths], dtype=torch.int32)
    longest = max(new for new, _ in lengths)
    batch = PagedBatch(starts, seq_lens, tables, torch.tensor(slots), block_size, max_query_len=longest)
    return batch, keys, values
