"""Launching what is done to logits before a token is chosen."""

from __future__ import annotations

from torch import Tensor

from headrace.kernels.reference.sampling import LogitChanges
from headrace.kernels.triton.logits_kernels import adjust_kernel

BLOCK = 2048
NUM_WARPS = 4


def adjust_logits(logits: Tensor, changes: LogitChanges) -> Tensor:
    """As `reference_sampling.adjust_logits`, to the bit: one launch, and none without changes."""
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
