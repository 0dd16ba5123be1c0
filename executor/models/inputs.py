"""What one forward pass computes, as tensors on the device, and what comes of it. Made per step, never stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from headrace.executor.cpu.batch import StepArrays
from headrace.kernels.reference.attention import PagedBatch


@dataclass(frozen=True, eq=False)
class StepInputs:
    """The tokens of one step, sequence after sequence, each sequence's in order of position."""

    token_ids: Tensor
    """[num_tokens] int64"""
    positions: Tensor
    """[num_tokens] int64"""
    slot_mapping: tuple[Tensor, ...]
    """For each cache group [num_tokens] int64: block_id * block_size + offset, where the token's key and value go"""
    query_start: Tensor
    """[num_seqs + 1] int32: sequence i computes tokens query_start[i] .. query_start[i + 1]"""
    seq_lens: Tensor
    """[num_seqs] int32: tokens in context after this step"""
    block_tables: tuple[Tensor, ...]
    """For each cache group [num_seqs, max_blocks] int32; entries beyond a sequence's blocks, and those that a sliding
    window has passed, are never read"""
    logits_indices: Tensor
    """[num_logits] int64: the rows of `hidden` whose logits are wanted"""
    block_size: int
    prompt_lens: Tensor | None = None
    """[num_seqs] int32, read only by models whose rotary base grows with the prompt (`ArchSpec.uses_prompt_lens`).
    Without it such a model takes `seq_lens`, so its answers beyond the trained context depend on chunking."""
    max_query_len: int | None = None
    """The host's bound on the tokens of any one sequence, where it is known; see `PagedBatch`."""

    @cached_property
    def paged_batches(self) -> tuple[PagedBatch, ...]:
        """The part that attention and the cache write need, for each cache group."""
        return tuple(
            PagedBatch(
                self.query_start,
                self.seq_lens,
                block_tables,
                slot_mapping,
                self.block_size,
                max_query_len=self.max_query_len,
            )
            for block_tables, slot_mapping in zip(self.block_tables, self.slot_mapping, strict=True)
        )

    @classmethod
    def on(cls, device: torch.device, arrays: StepArrays) -> StepInputs:
        """The host's arrays on a device."""
        values = dict(vars(arrays))
        block_size = values.pop("block_size")
        del values["reads_logits"]
        tensors: dict[str, Any] = {name: torch.from_numpy(array).to(device) for name, array in values.items()}
        for name in ("token_ids", "positions", "logits_indices"):
            tensors[name] = tensors[name].long()
        longest = int(np.diff(arrays.query_start).max(initial=0))
        for name in ("slot_mapping", "block_tables"):
            tensors[name] = tuple(tensors[name])
        return cls(block_size=block_size, max_query_len=longest, **tensors)


class BegunBlocks(NamedTuple):
    """Sequences of a repeated step whose token begins a block."""

    sequences: list[int]
    """By their place in the step."""
    places: np.ndarray  # [num_sequences] int32: the block's, in its sequence's block tables
    block_ids: np.ndarray  # [num_groups, num_sequences] int32


class Chosen(NamedTuple):
    """Tokens for rows of logits."""

    token_ids: np.ndarray  # [num_rows] int32; meaningless where `best` is not finite
    best: np.ndarray  # [num_rows] float32: each row's highest logit, NaN where it holds one


@dataclass(frozen=True)
class StepLogits:
    """A step's logits. All of it may be memory that the next call of `at`, or the next step, writes again."""

    sampled: Tensor  # [len(logits_indices), vocab_size] float32
    at: Callable[[int, int], Tensor]
    """(first, last) -> the logits of the step's tokens [first, last), [last - first, vocab_size] float32."""
    chosen: Chosen | None = None
    """Tokens for the sampled rows as they are, from a model that chooses them within the step."""


def no_logits() -> StepLogits:
    """What a stage of a pipeline has that is not the last."""
    nothing = torch.empty(0, 0)
    return StepLogits(nothing, lambda first, last: nothing)


class HiddenStateModel(Protocol):
    """A model that is asked for hidden states first and for logits of some of them then."""

    def forward(self, inputs: StepInputs, kv_cache: Any) -> Tensor:
        """[num_tokens, hidden_size]; writes the step's keys and values into the cache."""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [n, hidden_size]. Returns a new [n, vocab_size] float32."""


@torch.inference_mode()
def step_in_two(model: HiddenStateModel, inputs: StepInputs, kv_cache: Any) -> StepLogits:
    """One step of such a model."""
    hidden = model.forward(inputs, kv_cache)
    wanted = len(inputs.logits_indices)
    if wanted:
        sampled = model.logits(hidden if wanted == len(hidden) else hidden[inputs.logits_indices])
    else:
        sampled = torch.empty(0, 0, device=hidden.device)
    return StepLogits(sampled, lambda first, last: model.logits(hidden[first:last]))
