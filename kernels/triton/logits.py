"""Masks and penalties on logits."""

# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
# Functions under triton.jit handle types that mypy does not know.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.reference.sampling import LogitChanges

BLOCK = 2048
NUM_WARPS = 4


def adjust_logits(logits: Tensor, changes: LogitChanges) -> Tensor:
    """As `reference.sampling.adjust_logits`, with bitwise equal results: one launch, or none without changes."""
    num_rows, vocab_size = logits.shape
    penalties, allowed = changes.penalties, changes.allowed_bits
    if not num_rows or (penalties is None and allowed is None):
        return logits
    adjust_kernel[(num_rows, -(-vocab_size // BLOCK))](
        logits,
        changes.rows,
        allowed,
        None if penalties is None else penalties.prompt_bits,
        None if penalties is None else penalties.output_bits,
        None if penalties is None else penalties.output_counts,
        None if penalties is None else penalties.repetition,
        None if penalties is None else penalties.frequency,
        None if penalties is None else penalties.presence,
        vocab_size,
        logits.stride(0),
        -(-vocab_size // 32),
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
    return logits


@triton.jit
def bit_of(words, ids, mask):
    """Whether the bit of each token id is set, bit id % 32 of word id // 32."""
    return (tl.load(words + ids // 32, mask=mask, other=0) >> (ids % 32)) & 1 != 0


@triton.jit
def adjust_kernel(
    logits,  # [num_rows, vocab_size] float32, changed in place
    rows,  # [num_rows]: each row's row of the states that follow
    allowed_bits,  # [num_states, num_words] int32 or None
    prompt_bits,  # [num_states, num_words] int32 or None: no penalties
    output_bits,  # the same
    output_counts,  # [num_states, vocab_size] int32 or None: no frequency penalties
    repetition,  # [num_states] float32
    frequency,
    presence,
    vocab_size,
    row_stride,
    num_words,
    BLOCK: tl.constexpr,
):
    """Grid (num_rows, ceil(vocab_size / BLOCK)). To be compiled without fused multiply-adds, which round otherwise."""
    row = tl.program_id(0).to(tl.int64)
    state = tl.load(rows + row).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab_size
    values = tl.load(logits + row * row_stride + ids, mask=inside, other=0.0)
    if allowed_bits is not None:
        values = tl.where(bit_of(allowed_bits + state * num_words, ids, inside), values, float("-inf"))
    if prompt_bits is not None:
        written = bit_of(output_bits + state * num_words, ids, inside)
        seen = bit_of(prompt_bits + state * num_words, ids, inside) | written
        factor = tl.load(repetition + state) + tl.zeros_like(values)
        values = tl.where(seen, tl.where(values > 0, tl.div_rn(values, factor), values * factor), values)
        losses = tl.load(presence + state) + tl.zeros_like(values)
        if output_counts is not None:
            counts = tl.load(output_counts + state * vocab_size + ids, mask=inside & written, other=0)
            losses = tl.load(frequency + state) * counts.to(tl.float32) + losses
        values = tl.where(written, values - losses, values)
    tl.store(logits + row * row_stride + ids, values, mask=inside)
