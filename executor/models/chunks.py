"""Chunked attention: a token attends to the tokens of its own chunk up to itself (Llama 4) and to those of some chunks
before (RNJ 1.5).

A sequence whose new tokens lie in several chunks is split into one sequence per chunk, each with the blocks of its
chunk and of those before that it reads, so that any kernel for paged attention can compute it:

    chunks of 8, blocks of 4     context 0 1 2 3 | 4 5 6 7 || 8 9 10 11 | 12         computed in this step: 6 .. 12
    first sequence               blocks of 0 .. 7, length 8, computes 6 and 7
    second sequence              blocks of 8 .. 12, length 5, computes 8 .. 12
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headrace.ipc.failure import ModelError
from headrace.kernels.reference.attention import PagedBatch


def in_chunks(batch: PagedBatch, size: int, before: int = 0) -> PagedBatch:
    """The batch with its sequences split into chunks of `size` tokens, each with `before` chunks before it; made once
    per step (`batch.memo`). Raises ModelError if block_size does not divide `size`."""
    key = ("chunks", size, before)
    if key not in batch.memo:
        if size % batch.block_size:
            raise ModelError(
                f"attention in chunks of {size} tokens needs a block_size that divides them, not {batch.block_size}"
            )
        split = _of_one_token if batch.max_query_len == 1 else _of_several
        batch.memo[key] = split(batch, size, before)
    found: PagedBatch = batch.memo[key]
    return found


def _of_one_token(batch: PagedBatch, size: int, before: int) -> PagedBatch:
    """For sequences that compute one token each. Reads nothing back from the device, so a CUDA graph may capture it."""
    passed = ((batch.seq_lens - 1) // size - before).clamp(min=0)  # whole chunks before those that the token reads
    tables = _tables(batch, torch.arange(len(batch.seq_lens), device=passed.device), passed, size * (1 + before), size)
    return replace(batch, seq_lens=batch.seq_lens - passed * size, block_tables=tables, memo={})


def _of_several(batch: PagedBatch, size: int, before: int) -> PagedBatch:
    starts, sequences, chunks, lens = [0], [], [], []
    for sequence, context_len in enumerate(batch.context_lens):
        end = batch.query_starts[sequence + 1]
        position = context_len - (end - batch.query_starts[sequence])
        while position < context_len:
            chunk = position // size
            first, stop = max(0, chunk - before), min((chunk + 1) * size, context_len)
            sequences.append(sequence)
            chunks.append(first)
            lens.append(stop - first * size)
            starts.append(starts[-1] + stop - position)
            position = stop
        if starts[-1] < end:  # padding, whose length is 0
            sequences.append(sequence)
            chunks.append(0)
            lens.append(0)
            starts.append(end)
    device = batch.seq_lens.device
    of, first_chunks = (torch.tensor(each, device=device) for each in (sequences, chunks))
    tables = _tables(batch, of, first_chunks, size * (1 + before), size)
    query_start, seq_lens = (torch.tensor(each, dtype=torch.int32, device=device) for each in (starts, lens))
    return replace(batch, query_start=query_start, seq_lens=seq_lens, block_tables=tables, memo={})


def _tables(batch: PagedBatch, sequences: Tensor, chunks: Tensor, read: int, size: int) -> Tensor:
    """Block tables of the `read` tokens from the start of each chunk, [num_chunks, blocks of these] int32. Entries
    beyond the sequence's table repeat its last column."""
    width = batch.block_tables.shape[1]
    columns = torch.arange(min(read // batch.block_size, width), device=chunks.device)
    columns = chunks.long()[:, None] * (size // batch.block_size) + columns
    return batch.block_tables[sequences[:, None].long(), columns.clamp(max=width - 1)]


def query_growth(batch: PagedBatch, positions_per_step: int, share: float, offset: int) -> Tensor:
    """`growth_at` of each token, [num_tokens] float32."""
    key = ("query growth", positions_per_step, share, offset)
    if key not in batch.memo:
        batch.memo[key] = growth_at(_positions(batch), positions_per_step, share, offset)
    found: Tensor = batch.memo[key]
    return found


def log_growth(batch: PagedBatch, floor: int, share: float) -> Tensor:
    """Factors of scores, [num_tokens] float32, which keep attention sharp in contexts of more than `floor` tokens:
    1 + share * log(tokens in the context / floor)."""
    key = ("log growth", floor, share)
    if key not in batch.memo:
        batch.memo[key] = 1 + share * ((_positions(batch) + 1) / floor).clamp(min=1).log()
    found: Tensor = batch.memo[key]
    return found


def _positions(batch: PagedBatch) -> Tensor:
    """Of each token, [num_tokens] float32."""
    tokens = torch.arange(len(batch.slot_mapping), device=batch.seq_lens.device)
    sequences = torch.searchsorted(batch.query_start[1:].long(), tokens, right=True).clamp(max=len(batch.seq_lens) - 1)
    before = batch.seq_lens[sequences] - (batch.query_start[sequences + 1] - batch.query_start[sequences])
    return (before + tokens - batch.query_start[sequences]).float()


def growth_at(positions: Tensor, positions_per_step: int, share: float, offset: int) -> Tensor:
    """Factors of queries at float32 positions, which keep attention sharp in long contexts (Llama 4's attention
    temperature): 1 + share * log(1 + floor((position + offset) / positions_per_step))."""
    return 1 + share * torch.log1p(torch.floor((positions + offset) / positions_per_step).clamp(min=0))
