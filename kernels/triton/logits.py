"""Launching what is done to logits before a token is chosen."""

from __future__ import annotations

from torch import Tensor

from headrace.kernels.reference_sampling import LogitChanges
from headrace.kernels.triton.logits_kernels import adjust_kernel, bias_kernel, count_kernel

BLOCK = 2048
BIAS_BLOCK = 256
ROWS_BLOCK = 128
NUM_WARPS = 4


def adjust_logits(logits: Tensor, changes: LogitChanges) -> Tensor:
    """As `reference_sampling.adjust_logits`: one launch for masks and penalties, one for bias, none without them."""
    num_rows, vocab_size = logits.shape
    penalties, allowed = changes.penalties, changes.allowed_bits
    if num_rows and (penalties is not None or allowed is not None):
        adjust_kernel[(num_rows, -(-vocab_size // BLOCK))](
            logits,
            allowed,
            None if penalties is None else penalties.state_rows,
            None if penalties is None else penalties.output_counts,
            None if penalties is None else penalties.prompt_bits,
            None if penalties is None else penalties.repetition,
            None if penalties is None else penalties.frequency,
            None if penalties is None else penalties.presence,
            vocab_size,
            logits.stride(0),
            0 if allowed is None else allowed.stride(0),
            0 if penalties is None else penalties.prompt_bits.stride(0),
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
    if num_rows and changes.bias_ids is not None and changes.bias is not None and changes.bias_ids.shape[1]:
        bias_kernel[(num_rows,)](
            logits,
            changes.bias_ids,
            changes.bias,
            changes.bias_ids.shape[1],
            logits.stride(0),
            changes.bias_ids.stride(0),
            changes.bias.stride(0),
            BLOCK=BIAS_BLOCK,
            num_warps=NUM_WARPS,
        )
    return logits


def count_tokens(output_counts: Tensor, state_rows: Tensor, token_ids: Tensor) -> None:
    """As `reference_sampling.count_tokens`."""
    num_rows = len(state_rows)
    if num_rows:
        count_kernel[(-(-num_rows // ROWS_BLOCK),)](
            output_counts,
            state_rows,
            token_ids,
            num_rows,
            output_counts.shape[1],
            BLOCK=ROWS_BLOCK,
            num_warps=NUM_WARPS,
        )
