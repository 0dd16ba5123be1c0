"""Softmaxes over different parts of a sequence's keys, made into one."""

# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
# What triton.jit compiles has types of its own.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def merge(max_a, sum_a, acc_a, max_b, sum_b, acc_b):
    """Two running softmaxes over different keys as one. Either may have seen nothing."""
    new_max = tl.maximum(max_a, max_b)
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    decay_a, decay_b = tl.exp2(max_a - shift), tl.exp2(max_b - shift)
    return (
        new_max,
        sum_a * decay_a + sum_b * decay_b,
        acc_a * decay_a[:, None] + acc_b * decay_b[:, None],
    )


@triton.jit(do_not_specialize=["num_parts", "window"])
def combine_kernel(
    out,  # [num_tokens, num_heads, HEAD_DIM]
    parts,  # [num_seqs, num_heads, num_parts, HEAD_DIM] float32
    part_stats,  # [num_seqs, num_heads, num_parts, 2] float32
    seq_lens,  # [num_seqs]
    query_start,  # [num_seqs + 1]
    num_parts,
    value_scale,
    window,
    out_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Merges the parts of sequences of one token. Grid (num_seqs, num_heads).

    Where SPLIT_TOKENS is set, one by one in order, as a prompt's tile merges its own; otherwise AT_ONCE at a time, as
    a loop over parts would wait for memory once for each.
    """
    seq = tl.program_id(0)
    head = tl.program_id(1)
    begin = tl.load(query_start + seq)
    num_queries = tl.load(query_start + seq + 1) - begin
    context_len = tl.load(seq_lens + seq)
    if num_queries != 1:
        return
    dims = tl.arange(0, BLOCK_D)
    in_head = dims < HEAD_DIM
    base = (seq.to(tl.int64) * NUM_HEADS + head) * num_parts
    running_max = tl.full([1], float("-inf"), tl.float32)
    running_sum = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BLOCK_D], tl.float32)
    if SPLIT_TOKENS:
        # Others were not written.
        first = 0
        end = tl.cdiv(context_len, SPLIT_TOKENS)
        if WINDOW:
            first = tl.maximum(context_len - window, 0) // SPLIT_TOKENS
        for part in range(first, end):
            part_max = tl.load(part_stats + (base + part) * 2 + tl.arange(0, 1))
            part_sum = tl.load(part_stats + (base + part) * 2 + 1 + tl.arange(0, 1))
            part_acc = tl.load(parts + (base + part) * HEAD_DIM + dims, mask=in_head, other=0.0)[None, :]
            running_max, running_sum, acc = merge(running_max, running_sum, acc, part_max, part_sum, part_acc)
    else:
        for start in range(0, num_parts, AT_ONCE):
            part = start + tl.arange(0, AT_ONCE)
            part_max = tl.load(part_stats + (base + part) * 2, mask=part < num_parts, other=float("-inf"))
            part_sum = tl.load(part_stats + (base + part) * 2 + 1, mask=part < num_parts, other=0.0)
            in_part = (part < num_parts)[:, None] & in_head[None, :]
            part_acc = tl.load(parts + (base + part)[:, None] * HEAD_DIM + dims[None, :], mask=in_part, other=0.0)
            highest = tl.max(part_max, 0)
            decay = tl.exp2(part_max - tl.where(highest == float("-inf"), 0.0, highest))
            some_max = tl.full([1], 0.0, tl.float32) + highest
            some_sum = tl.zeros([1], tl.float32) + tl.sum(part_sum * decay, 0)
            some_acc = tl.sum(part_acc * decay[:, None], 0)[None, :]
            running_max, running_sum, acc = merge(running_max, running_sum, acc, some_max, some_sum, some_acc)
    total = tl.where(running_sum > 0, running_sum, 1.0)
    result = acc * (value_scale / total)[:, None]
    target = out + begin.to(tl.int64) * out_stride + head * HEAD_DIM + dims[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=in_head[None, :])
