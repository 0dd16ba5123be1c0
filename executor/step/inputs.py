"""Inputs of one forward pass as tensors on the device, and its logits. Made anew for each step, and never kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from headrace.executor.sampling.draws import Chosen, Draws
from headrace.executor.step.batch import StepArrays
from headrace.executor.step.row_inputs import PlacedInput
from headrace.ipc.codec import Tensor as Values
from headrace.kernels.reference.attention import PagedBatch
from headrace.kernels.reference.states import StateBatch

StepAdapters = Any
"""A `TokenAdapters`, on the host; for a model whose slots are in the device's memory, a `SlottedTokens`. What adds
adapters to a layer's products takes one kind."""


class GivenRows(NamedTuple):
    """Embeddings in the place of those of the step's tokens [at, at + len(tensor))."""

    at: int
    tensor: Tensor  # [num_tokens, embedding width] of any float type, on the host

    @classmethod
    def of(cls, placed: Sequence[PlacedInput]) -> tuple[GivenRows, ...]:
        return tuple(cls(each.at, _floats(each.values())) for each in placed)


def _floats(values: Values) -> Tensor:
    array = values.numpy().copy()  # torch shares no read-only memory
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if values.dtype == "bfloat16" else tensor


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
    """[num_logits] int64: the rows of `hidden` for which logits are computed"""
    block_size: int
    pooled_indices: Tensor | None = None
    """[num_pooled] int64: the rows of `hidden` that are pooled"""
    prompt_lens: Tensor | None = None
    """[num_seqs] int32, read only by models whose rotary base grows with the prompt (`ArchSpec.uses_prompt_lens`). If
    None, such a model uses `seq_lens`, so its results beyond the trained context depend on how prompts are chunked."""
    max_query_len: int | None = None
    """Upper bound of the tokens that any one sequence computes; None: not known on the host. See `PagedBatch`."""
    token_types: Tensor | None = None
    """[num_tokens] int64: 1 in the second text of a pair; None: all are 0."""
    earlier_ids: Tensor | None = None
    """[num_tokens, reach] int64: the tokens before each, the nearest first, -1 before the sequence; None for models
    that do not read them (`ArchSpec.lookback`)."""
    key_lens: Tensor | None = None
    """[num_seqs] int32: see `PagedBatch`."""
    given: tuple[GivenRows, ...] = ()
    """What takes the place of tokens' embeddings."""
    states: StateBatch | None = None
    """For models with layers that keep a state per sequence."""
    adapters: StepAdapters | None = None
    """None where no token has any."""

    @property
    def batches(self) -> tuple[PagedBatch | StateBatch, ...]:
        """What the layers of each cache group read besides their inputs; the state group is the last."""
        return self.paged_batches if self.states is None else (*self.paged_batches, self.states)

    @cached_property
    def paged_batches(self) -> tuple[PagedBatch, ...]:
        """The inputs of attention and of the cache write, for each cache group."""
        return tuple(
            PagedBatch(
                self.query_start,
                self.seq_lens,
                block_tables,
                slot_mapping,
                self.block_size,
                max_query_len=self.max_query_len,
                key_lens=self.key_lens,
            )
            for block_tables, slot_mapping in zip(self.block_tables, self.slot_mapping, strict=True)
        )

    @classmethod
    def on(cls, device: torch.device, arrays: StepArrays) -> StepInputs:
        """Copies the host's arrays to a device."""
        values = dict(vars(arrays))
        block_size, states, adapters = values.pop("block_size"), values.pop("states"), values.pop("adapters")
        del values["reads_logits"]
        given = GivenRows.of(values.pop("given"))
        for name in ("token_types", "key_lens", "earlier_ids"):
            if values[name] is None:
                del values[name]
        tensors: dict[str, Any] = {name: torch.from_numpy(array).to(device) for name, array in values.items()}
        for name in ("token_ids", "positions", "logits_indices", "pooled_indices", "token_types", "earlier_ids"):
            if name in tensors:
                tensors[name] = tensors[name].long()
        longest = int(np.diff(arrays.query_start).max(initial=0))
        for name in ("slot_mapping", "block_tables"):
            tensors[name] = tuple(tensors[name])
        found = None
        if states is not None:
            parts = [torch.from_numpy(each).to(device) for each in states.parts]
            found = states_of(parts, tensors["query_start"], longest)
        return cls(
            block_size=block_size, max_query_len=longest, states=found, given=given, adapters=adapters, **tensors
        )


def states_of(parts: Sequence[Tensor], query_start: Tensor, max_query_len: int | None) -> StateBatch:
    """parts: those of a `StateArrays`, on the device; the others are as in `StepInputs`."""
    rows, pages, sources, has_source, replayed, committed, starts, ends, kept = parts
    per_state = len(pages) // len(rows)
    return StateBatch(
        *(query_start, rows, pages.view(-1, per_state), sources.view(-1, per_state), has_source, replayed, committed),
        *(starts, ends, kept.view(-1, per_state)),
        max_query_len=max_query_len,
    )


class BegunBlocks(NamedTuple):
    """Sequences of a repeated decode step whose new token is the first of a block."""

    sequences: list[int]
    """Their indices in the step."""
    block_indices: np.ndarray  # [num_sequences] int32: of the block in its sequence's block tables
    block_ids: np.ndarray  # [num_groups, num_sequences] int32


@dataclass(frozen=True)
class StepLogits:
    """A step's logits. The next call of `at`, or the next step, may overwrite their memory."""

    sampled: Tensor  # [len(logits_indices), vocab_size] float32
    at: Callable[[int, int], Tensor]
    """(first, last) -> the logits of the step's tokens [first, last), [last - first, vocab_size] float32."""
    chosen: Chosen | None = None
    """Tokens for the rows of `sampled`, if the model chose them within the step; else None."""
    pooled: np.ndarray | None = None
    """[len(pooled_indices), width] float32: the states that the head reads, if there are such indices."""


def no_logits() -> StepLogits:
    """The result of a pipeline stage that is not the last."""
    nothing = torch.empty(0, 0)
    return StepLogits(nothing, lambda first, last: nothing)


class Model(Protocol):
    """A model that computes a step on the calling thread: `models.decoder.Decoder` and `cpu.decoder.CpuDecoder`."""

    def step(self, arrays: StepArrays, kv_cache: Any, draws: Draws | None) -> StepLogits:
        """Writes the tokens' keys and values into the cache and returns the logits of `arrays.logits_indices`.

        It may also choose their tokens, by `draws` (None: greedily); the runner decides whether to use them.
        """


class HiddenStateModel(Protocol):
    """A model that computes hidden states, and in a second call the logits of some of them."""

    def forward(self, inputs: StepInputs, kv_cache: Any) -> Tensor:
        """[num_tokens, hidden_size]; writes the step's keys and values into the cache."""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [n, hidden_size]. Returns a new [n, vocab_size] float32."""


class PoolableModel(HiddenStateModel, Protocol):
    def last_states(self, hidden: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        """hidden: [n, hidden_size] -> [n, width], what the head reads."""

    def logits(self, hidden: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        """As `HiddenStateModel.logits`, of tokens with these adapters."""


@torch.inference_mode()
def step_in_two(model: PoolableModel, inputs: StepInputs, kv_cache: Any) -> StepLogits:
    """One step of a `PoolableModel`."""
    hidden = model.forward(inputs, kv_cache)
    wanted = len(inputs.logits_indices)
    adapters = inputs.adapters

    def logits_of(rows: Tensor, indices: slice | np.ndarray) -> Tensor:
        return model.logits(rows) if adapters is None else model.logits(rows, adapters.of(indices))

    def logits_at(first: int, last: int) -> Tensor:
        return logits_of(hidden[first:last], slice(first, last))

    if wanted == len(hidden):
        sampled = logits_at(0, wanted)
    elif wanted:
        sampled = logits_of(hidden[inputs.logits_indices], inputs.logits_indices.cpu().numpy())
    else:
        sampled = torch.empty(0, 0, device=hidden.device)
    indices = inputs.pooled_indices
    pooled = None
    if indices is not None and len(indices):
        own = None if adapters is None else adapters.of(indices.cpu().numpy())
        pooled = model.last_states(hidden[indices], own).float().cpu().numpy()
    return StepLogits(sampled, logits_at, pooled=pooled)
