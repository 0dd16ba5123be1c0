"""The device's side of a step: from the state to tokens in the state, without waiting for the host.

decode: every row computes its last known token.  state -> inputs -> model -> choice -> state. Reads and writes
        fixed tensors only, so it can be captured; the host sets the rows in `state.batch_rows` beforehand.
mixed:  some rows compute several tokens of their prompt. The host sends those; the rest is the same.

`StepInFlight` is a step whose results the host has not read yet; it turns them into a StepResult.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from headrace import kernels
from headrace.executor.gpu.device_state import Device, DeviceState, Mark
from headrace.executor.gpu.sampler import Choose, StepEnding, choose
from headrace.executor.sampling.logprobs import Asked, padded, with_asked
from headrace.executor.sampling.sampler import ALL_FORBIDDEN, Sampled, find_problems
from headrace.executor.step.inputs import GivenRows, HiddenStateModel, StepInputs, states_of
from headrace.executor.step.pipeline import StepRows
from headrace.executor.step.prompt_logprobs import PromptReport
from headrace.executor.step.result import AddedTokens, assemble
from headrace.ipc.messages import LogprobRows
from headrace.ipc.step import StepPlan, StepResult
from headrace.kernels.low_rank import SlottedTokens
from headrace.kernels.reference.decode import RowsState
from headrace.kernels.reference.sampling import TokenLogprobs
from headrace.kernels.reference.states import StateBatch

TOKEN, BEST, RAW_BEST = 0, 1, 2
"""Columns of `DeviceSteps.results`: token, bits of the row's highest logit, and of the highest before changes."""
NUM_RESULTS = 3
ReportLogprobs = Callable[[Tensor, Tensor, int], TokenLogprobs]
"""Signature of the versions of the op `token_logprobs`."""


@dataclass(frozen=True, eq=False)
class MixedInputs:
    """What the host sends for a step that is not a plain decode: int32 tensors on the device."""

    token_ids: Tensor  # [num_tokens]; arbitrary for a sampled row's last token, which the device knows
    positions: Tensor  # [num_tokens]
    query_start: Tensor  # [num_seqs + 1]
    seq_lens: Tensor  # [num_seqs]
    rows: Tensor  # [num_seqs]
    logits_indices: Tensor  # [num_sampled]
    sampled_rows: Tensor  # [num_sampled]
    slot_mapping: tuple[Tensor, ...]  # for each cache group [num_tokens]
    given: tuple[GivenRows, ...] = ()
    adapters: SlottedTokens | None = None
    """None where no token has any."""
    states: StateBatch | None = None
    """For models with layers that keep a state per sequence."""

    @classmethod
    def of(
        cls, sent: list[Tensor], given: tuple[GivenRows, ...], num_groups: int, most_adapters: int, longest: int
    ) -> MixedInputs:
        """Takes the fields in order, then one slot mapping per cache group, slots and scales of the tokens' first
        adapters, of their second, and so on, and at the end the `StateArrays.parts`, if there are any."""
        token_ids, positions, query_start, seq_lens, rows, logits_indices, sampled_rows, *rest = sent
        slots, rest = rest[:num_groups], rest[num_groups:]
        of_adapters, of_states = rest[: 2 * most_adapters], rest[2 * most_adapters :]
        scales = (each.view(torch.float32) for each in of_adapters[1::2])
        uses = tuple(zip(of_adapters[0::2], scales, strict=True))
        return cls(
            *(token_ids, positions, query_start, seq_lens, rows, logits_indices, sampled_rows),
            slot_mapping=tuple(slots),
            given=given,
            adapters=SlottedTokens(uses) if uses else None,
            states=states_of(of_states, query_start, longest) if of_states else None,
        )


class DeviceSteps:
    """Runs steps; uses model, cache and state without owning them. Used from one thread."""

    def __init__(
        self, model: HiddenStateModel, kv_cache: Any, state: DeviceState, block_size: int, choose: Choose = choose
    ) -> None:
        self._model, self._kv_cache, self._state, self._block_size = model, kv_cache, state, block_size
        self._choose = choose
        rows, device = state.shape.num_rows + 1, state.words.device
        self._counting = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._indices = torch.arange(rows, device=device)
        self._decode_inputs = kernels.choose("decode_inputs", device=device)
        self._rows = RowsState(state.block_tables, state.last_token, state.num_computed, state.prompt_len)
        self.results = torch.zeros(rows, NUM_RESULTS, dtype=torch.int32, device=device)
        """[num_rows + 1, NUM_RESULTS]: one line for each sampled row of the last step, in the plan's order."""

    def use(self, model: HiddenStateModel) -> None:
        """Replaces the model from the next step on."""
        self._model = model

    @torch.inference_mode()
    def decode(
        self, size: int, ending: StepEnding, num_blocks: int | None = None, most_adapters: int = 0
    ) -> Tensor | None:
        """Computes a token for each of the first `size` of `state.batch_rows`; LOGITS returns logits [size,
        vocab_size].

        num_blocks: how many columns of the block tables hold all blocks of these rows; None uses all columns.
        most_adapters: of these rows; 0: they have none.
        """
        state, block_size = self._state, self._block_size
        width = state.shape.max_blocks if num_blocks is None else num_blocks
        found = self._decode_inputs(state.batch_rows[:size], self._rows, block_size, width)
        inputs = StepInputs(
            token_ids=found.token_ids,
            positions=found.positions,
            slot_mapping=tuple(found.slot_mapping),
            query_start=self._counting[: size + 1],
            seq_lens=found.seq_lens,
            block_tables=tuple(found.block_tables),
            logits_indices=self._indices[:size],
            block_size=block_size,
            prompt_lens=found.prompt_lens,
            max_query_len=1,
            states=self._states_of(found.rows, size) if state.shape.state_pages else None,
            adapters=self._adapters_of(found.rows, found.positions, most_adapters) if most_adapters else None,
        )
        logits = self._model.logits(self._model.forward(inputs, self._kv_cache))
        if ending is StepEnding.LOGITS:
            return logits
        self.take(logits, found.rows, found.next_positions, ending)
        return None

    @torch.inference_mode()
    def mixed(self, sent: MixedInputs, num_blocks: int, longest: int, feeds_back: bool = True) -> tuple[Tensor, Tensor]:
        """Computes the sent tokens. Returns hidden [num_tokens, hidden_size] and logits [num_sampled, vocab_size].

        num_blocks: as in `decode`; longest: most tokens that any row computes; feeds_back: sampled rows' last tokens
        are taken from the state, whatever was sent.
        """
        state = self._state
        rows, logits_indices = sent.rows.long(), sent.logits_indices.long()
        token_ids = sent.token_ids.long()
        if feeds_back:
            token_ids[logits_indices] = state.last_token[sent.sampled_rows.long()].long()
        inputs = StepInputs(
            token_ids=token_ids,
            positions=sent.positions.long(),
            slot_mapping=tuple(slots.long() for slots in sent.slot_mapping),
            query_start=sent.query_start,
            seq_lens=sent.seq_lens,
            block_tables=tuple(table[:, :num_blocks][rows] for table in state.block_tables),
            logits_indices=logits_indices,
            block_size=self._block_size,
            prompt_lens=state.prompt_len[rows],
            max_query_len=longest,
            given=sent.given,
            states=sent.states,
            adapters=sent.adapters,
        )
        hidden = self._model.forward(inputs, self._kv_cache)
        state.num_computed[rows] = sent.seq_lens
        if not len(logits_indices):
            return hidden, torch.empty(0, 0, device=hidden.device)
        return hidden, self._model.logits(hidden[logits_indices])

    def _states_of(self, indices: Tensor, size: int) -> StateBatch:
        """Of one token of each of the decode batch's rows, each of which may have one snapshot. indices: the rows."""
        pages, starts, rows = self._state.shape.state_pages, self._counting[: size + 1], self._state.batch_rows[:size]
        words = self._state.states[indices]
        own, source, snapshot, flags = words.split([pages, pages, pages, words.shape[1] - 3 * pages], dim=1)
        has_source, replayed, committed, ends = flags.unbind(1)
        return StateBatch(
            *(starts, rows, own, source, has_source, replayed, committed, starts, ends, snapshot), max_query_len=1
        )

    def _adapters_of(self, rows: Tensor, positions: Tensor, most: int) -> SlottedTokens:
        """Of one token of each of these rows."""
        state, uses = self._state, list[tuple[Tensor, Tensor]]()
        for use in range(most):
            is_in_use = positions >= state.adapter_from[use][rows]
            slots = torch.where(is_in_use, state.adapter_slot[use][rows], -1)
            uses.append((slots, state.adapter_scale[use][rows]))
        return SlottedTokens(tuple(uses))

    @torch.inference_mode()
    def prompt_logits(self, hidden: Tensor, first: int, last: int) -> Tensor:
        """[last - first, vocab_size] float32: logits of a mixed step's tokens [first, last), from hidden states."""
        return self._model.logits(hidden[first:last])

    @torch.inference_mode()
    def take(self, logits: Tensor, rows: Tensor, positions: Tensor, ending: StepEnding) -> Tensor:
        """Chooses a token for each of rows [n] int64, and stores it in the state for the next step and in `results` for
        the host. Returns the tokens, [n] int32. The other arguments are those of `sampler.Choose`."""
        chosen = self._choose(logits, self._state, rows, positions, ending)
        self._state.last_token[rows] = chosen.token_ids
        self.results[: len(rows), TOKEN] = chosen.token_ids
        self.results[: len(rows), BEST] = chosen.best.view(torch.int32)
        return chosen.token_ids


class LogprobsInFlight:
    """Logprobs on their way to the host: num_rows rows of 1 + width tokens each."""

    def __init__(
        self,
        device: Device,
        logits: Tensor,
        own_ids: Tensor,
        counts: np.ndarray,
        report: ReportLogprobs,
        asked: Asked | None = None,
    ) -> None:
        """logits [num_rows, vocab_size] float32; own_ids [num_rows] int64; counts [num_rows] `limited`.

        A row with logprob_token_ids has the whole vocabulary as its count; the host then picks those tokens out.
        """
        self._counts, self._asked = counts, asked or []
        found = report(logits, own_ids, int(counts.max(initial=0)))
        finite = logits.amax(1).isfinite().all()
        flat = torch.cat(
            (found.token_ids.flatten(), found.logprobs.flatten().view(torch.int32), found.ranks, finite.int()[None])
        )
        self._shape = found.token_ids.shape
        self._host = device.host_buffer(len(flat))
        device.to_host(self._host, flat)

    def rows(self, kept: np.ndarray | slice = slice(None)) -> LogprobRows:
        """The rows that `kept` [num_rows] bool marks, as wide as they need. Call it after the step's event."""
        num_rows, columns = self._shape
        words = self._host.numpy()[: num_rows * (2 * columns + 1)]
        ids, values, ranks = np.split(words, [num_rows * columns, 2 * num_rows * columns])
        ids, values = ids.reshape(num_rows, columns), values.view(np.float32).reshape(num_rows, columns)
        ids, values = ids[kept], values[kept]
        asked = [self._asked[row] for row in np.arange(num_rows)[kept]] if self._asked else []

        def values_of(row: int, tokens: np.ndarray) -> np.ndarray:
            return values[row, 1:][np.argsort(ids[row, 1:])[tokens]]  # [vocab_size]: each token once

        return with_asked(padded(ids, values, ranks[kept], self._counts[kept]), asked, values_of)

    @property
    def finite(self) -> bool:
        """Whether every row's highest logit is finite. Call it after the step's event."""
        num_rows, columns = self._shape
        return bool(self._host[num_rows * (2 * columns + 1)])


@dataclass(eq=False)
class StepInFlight:
    """A submitted step. `host` is pinned memory that the device writes before `done` passes."""

    plan: StepPlan
    sampled_rows: StepRows
    host: Tensor  # [at least num_sampled * NUM_RESULTS] int32
    began: Mark
    done: Mark
    changed: bool = False
    """Whether logits were changed before the choice; RAW_BEST then holds their highest value before the change."""
    reporting: np.ndarray | None = None  # [num_logprob_rows], ascending: indices of rows with logprobs
    logprobs: LogprobsInFlight | None = None
    prompts: PromptReport | None = None
    new: AddedTokens | None = None
    """Set once tokens are known: chosen on the host, or read from the device. Those that the device chose have their
    logprobs still in `logprobs`."""
    times_s: tuple[float, float] = (0.0, 0.0)

    @property
    def rows(self) -> np.ndarray:
        """[num_sampled] int32"""
        return self.sampled_rows.rows

    def settle(self) -> AddedTokens:
        """Waits for the device; returns the new tokens."""
        if self.new is None:
            self.done.synchronize()
            results = self.host.numpy()[: len(self.rows) * NUM_RESULTS].reshape(-1, NUM_RESULTS)
            best = results[:, BEST].copy().view(np.float32)
            if self.changed:
                problems = find_problems(results[:, RAW_BEST].copy().view(np.float32))
                for index in np.flatnonzero(np.isneginf(best)):
                    problems.setdefault(int(index), ALL_FORBIDDEN)
            else:
                problems = find_problems(best)
            self.new = AddedTokens.one_each(self.rows, Sampled(results[:, TOKEN].copy(), problems))
        return self.new

    def result(self) -> StepResult:
        """The result for the core, once `done` has passed."""
        new = self.settle()
        if self.reporting is not None and self.logprobs is not None:
            # A row with a problem has no logprobs.
            good = ~np.isin(self.rows[self.reporting], list(new.problems))
            new = msgspec.structs.replace(new, logprob_indices=self.reporting[good], logprobs=self.logprobs.rows(good))
        return assemble(self.plan, new, self.times_s, self.prompts)
