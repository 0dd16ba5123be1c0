"""The device's side of a step: from the state to tokens in the state, with nothing that needs the host meanwhile.

decode: every row computes its last known token.  state -> inputs -> model -> choice -> state. Reads and writes
        fixed tensors only, so it can be captured; the host says which rows by `state.batch_rows` beforehand.
mixed:  some rows compute several tokens of their prompt. The host sends those; the rest is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace import kernels
from headrace.executor.gpu.device_state import DeviceState
from headrace.executor.gpu.sampler import Choice, Choose, choose
from headrace.executor.models.inputs import HiddenStateModel, StepInputs
from headrace.kernels.reference.decode import RowsState

TOKEN, BEST, RAW_BEST = 0, 1, 2
"""Columns of `DeviceSteps.results`: the token, the bits of the row's highest logit, and of that before any change."""
NUM_RESULTS = 3


@dataclass(frozen=True, eq=False)
class MixedInputs:
    """What the host sends of a step that is no plain decode, on the device, int32."""

    token_ids: Tensor  # [num_tokens]; of a sampled row's last token anything, as the device knows it
    positions: Tensor  # [num_tokens]
    slot_mapping: Tensor  # [num_tokens]
    query_start: Tensor  # [num_seqs + 1]
    seq_lens: Tensor  # [num_seqs]
    rows: Tensor  # [num_seqs]
    logits_indices: Tensor  # [num_sampled]
    sampled_rows: Tensor  # [num_sampled]


class DeviceSteps:
    """Borrows model, cache and state. Used from one thread."""

    def __init__(
        self, model: HiddenStateModel, kv_cache: Any, state: DeviceState, block_size: int, choose: Choose = choose
    ) -> None:
        self._model, self._kv_cache, self._state, self._block_size = model, kv_cache, state, block_size
        self._choose = choose
        rows, device = state.shape.num_rows + 1, state.words.device
        self._counting = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._indices = torch.arange(rows, device=device)
        self._decode_inputs = kernels.choose("decode_inputs", device=device)
        self._rows = RowsState(state.block_table, state.last_token, state.num_computed, state.prompt_len)
        self.results = torch.zeros(rows, NUM_RESULTS, dtype=torch.int32, device=device)
        """[num_rows + 1, NUM_RESULTS]: one line for each sampled row of the last step, in the plan's order."""

    def use(self, model: HiddenStateModel) -> None:
        """From the next step on."""
        self._model = model

    @torch.inference_mode()
    def decode(self, size: int, choice: Choice, num_blocks: int | None = None, cascade: bool = False) -> Tensor | None:
        """One token of each of the first `size` of `state.batch_rows`; the logits [size, vocab_size] with LOGITS.

        num_blocks: how many columns of the block tables hold all of these rows' blocks; None takes them all.
        cascade: their first `state.shared_tokens` tokens, which lie in the same blocks, are read once for all rows.
        """
        state, block_size = self._state, self._block_size
        width = state.shape.max_blocks if num_blocks is None else num_blocks
        found = self._decode_inputs(state.batch_rows[:size], self._rows, block_size, width)
        inputs = StepInputs(
            token_ids=found.token_ids,
            positions=found.positions,
            slot_mapping=found.slot_mapping,
            query_start=self._counting[: size + 1],
            seq_lens=found.seq_lens,
            block_tables=found.block_tables,
            logits_indices=self._indices[:size],
            block_size=block_size,
            prompt_lens=found.prompt_lens,
            max_query_len=1,
            shared_tokens=state.shared_tokens if cascade else None,
        )
        logits = self._model.logits(self._model.forward(inputs, self._kv_cache))
        if choice is Choice.LOGITS:
            return logits
        self.take(logits, found.rows, found.next_positions, choice)
        return None

    @torch.inference_mode()
    def mixed(self, sent: MixedInputs, num_blocks: int, longest: int) -> tuple[Tensor, Tensor]:
        """Computes what was sent. Returns hidden [num_tokens, hidden_size] and logits [num_sampled, vocab_size].

        num_blocks: as in `decode`; longest: the most tokens that any row computes.
        """
        state = self._state
        rows, logits_indices = sent.rows.long(), sent.logits_indices.long()
        token_ids = sent.token_ids.long()
        token_ids[logits_indices] = state.last_token[sent.sampled_rows.long()].long()
        inputs = StepInputs(
            token_ids=token_ids,
            positions=sent.positions.long(),
            slot_mapping=sent.slot_mapping.long(),
            query_start=sent.query_start,
            seq_lens=sent.seq_lens,
            block_tables=state.block_table[:, :num_blocks][rows],
            logits_indices=logits_indices,
            block_size=self._block_size,
            prompt_lens=state.prompt_len[rows],
            max_query_len=longest,
        )
        hidden = self._model.forward(inputs, self._kv_cache)
        state.num_computed[rows] = sent.seq_lens
        if not len(logits_indices):
            return hidden, torch.empty(0, 0, device=hidden.device)
        return hidden, self._model.logits(hidden[logits_indices])

    @torch.inference_mode()
    def prompt_logits(self, hidden: Tensor, first: int, last: int) -> Tensor:
        """[last - first, vocab_size] float32: logits of the tokens [first, last) of a mixed step's hidden states."""
        return self._model.logits(hidden[first:last])

    @torch.inference_mode()
    def take(self, logits: Tensor, rows: Tensor, positions: Tensor, choice: Choice) -> Tensor:
        """Chooses and keeps a token for each of rows [n] int64: in the state for the next step, in `results` for the
        host. Returns the tokens, [n] int32. The rest as in `gpu_sampler.choose`."""
        chosen = self._choose(logits, self._state, rows, positions, choice)
        self._state.last_token[rows] = chosen.token_ids
        self.results[: len(rows), TOKEN] = chosen.token_ids
        self.results[: len(rows), BEST] = chosen.best.view(torch.int32)
        return chosen.token_ids
