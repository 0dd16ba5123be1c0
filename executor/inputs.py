"""What one forward pass computes, as tensors on the device. Made once per step, passed down, never stored."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from headrace.kernels.reference_attention import PagedBatch


@dataclass(frozen=True, eq=False)
class StepInputs:
    """The tokens of one step, sequence after sequence, each sequence's in order of position."""

    token_ids: Tensor
    """[num_tokens] int64"""
    positions: Tensor
    """[num_tokens] int64"""
    slot_mapping: Tensor
    """[num_tokens] int64: block_id * block_size + offset, where the token's key and value go"""
    query_start: Tensor
    """[num_seqs + 1] int32: sequence i computes tokens query_start[i] .. query_start[i + 1]"""
    seq_lens: Tensor
    """[num_seqs] int32: tokens in context after this step"""
    block_tables: Tensor
    """[num_seqs, max_blocks] int32; entries beyond a sequence's own blocks are never read"""
    logits_indices: Tensor
    """[num_logits] int64: the rows of `hidden` whose logits are wanted"""
    block_size: int
    prompt_lens: Tensor | None = None
    """[num_seqs] int32, read only by models whose rotary base grows with the prompt (`ArchSpec.uses_prompt_lens`).
    Without it such a model takes `seq_lens`, so its answers beyond the trained context depend on chunking."""

    @cached_property
    def paged_batch(self) -> PagedBatch:
        """The part that attention and the cache write need."""
        return PagedBatch(self.query_start, self.seq_lens, self.block_tables, self.slot_mapping, self.block_size)
