"""Masks, penalties and bias on logits, and the counts that penalties need."""

# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
# What triton.jit compiles has types of its own.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def bit_of(words, ids, mask):
    """Whether the bit of each token id is set, bit id % 32 of word id // 32."""
    return (tl.load(words + ids // 32, mask=mask, other=0) >> (ids % 32)) & 1 != 0


@triton.jit
def adjust_kernel(
    logits,  # [num_rows, vocab_size] float32, changed in place
    allowed_bits,  # [num_rows, allowed_stride] int32 or None
    state_rows,  # [num_rows] int32 or None: no penalties
    output_counts,  # [num_states, vocab_size] int32
    prompt_bits,  # [num_states, prompt_stride] int32
    repetition,  # [num_rows] float32
    frequency,
    presence,
    vocab_size,
    row_stride,
    allowed_stride,
    prompt_stride,
    BLOCK: tl.constexpr,
):
    """Grid (num_rows, ceil(vocab_size / BLOCK))."""
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab_size
    values = tl.load(logits + row * row_stride + ids, mask=inside, other=0.0)
    if allowed_bits is not None:
        values = tl.where(bit_of(allowed_bits + row * allowed_stride, ids, inside), values, float("-inf"))
    if state_rows is not None:
        state = tl.load(state_rows + row).to(tl.int64)
        if state >= 0:
            counts = tl.load(output_counts + state * vocab_size + ids, mask=inside, other=0)
            seen = bit_of(prompt_bits + state * prompt_stride, ids, inside) | (counts > 0)
            factor = tl.load(repetition + row) + tl.zeros_like(values)
            changed = tl.where(values > 0, tl.div_rn(values, factor), values * factor)
            values = tl.where(seen, changed, values)
            losses = tl.load(frequency + row) * counts.to(tl.float32) + tl.load(presence + row)
            values = tl.where(counts > 0, values - losses, values)
    tl.store(logits + row * row_stride + ids, values, mask=inside)


@triton.jit
def bias_kernel(
    logits,  # [num_rows, vocab_size] float32, changed in place
    ids,  # [num_rows, width] int32, distinct in a row; negative for none
    bias,  # [num_rows, width] float32
    width,
    row_stride,
    ids_stride,
    bias_stride,
    BLOCK: tl.constexpr,
):
    """Grid (num_rows)."""
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        tokens = tl.load(ids + row * ids_stride + columns, mask=inside, other=-1)
        added = tl.load(bias + row * bias_stride + columns, mask=inside, other=0.0)
        places = logits + row * row_stride + tokens
        tl.store(places, tl.load(places, mask=tokens >= 0, other=0.0) + added, mask=tokens >= 0)


@triton.jit(do_not_specialize=["num_rows"])
def count_kernel(
    output_counts,  # [num_states, vocab_size] int32, changed in place
    state_rows,  # [num_rows] int32, distinct; negative for none
    token_ids,  # [num_rows], negative for none
    num_rows,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """Grid (ceil(num_rows / BLOCK))."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < num_rows
    states = tl.load(state_rows + rows, mask=inside, other=-1).to(tl.int64)
    tokens = tl.load(token_ids + rows, mask=inside, other=-1).to(tl.int64)
    kept = inside & (states >= 0) & (tokens >= 0)
    places = output_counts + states * vocab_size + tokens
    tl.store(places, tl.load(places, mask=kept, other=0) + 1, mask=kept)
