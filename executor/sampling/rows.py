"""Runs the processors of single rows (row_processors/) around the choice of tokens; an error fails only its row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from headrace.executor.sampling.columns import Needs, SampledRows
from headrace.executor.sampling.draws import Draws
from headrace.executor.sampling.row_processors import Candidates, Position, RowProcessor
from headrace.ipc.failure import let_interrupts_pass
from headrace.kernels.reference.sampling import likeliest, truncated

T = TypeVar("T")


class ProcessedRows:
    """The rows of a step that have processors. problems: index of a row -> why it failed; is added to."""

    def __init__(
        self, batch: SampledRows, rows: np.ndarray, num_tokens: np.ndarray | None, problems: dict[int, str]
    ) -> None:
        """rows, num_tokens: as in `sampler.sample`."""
        self._problems = problems
        self._kept: dict[int, tuple[Candidates, Position]] = {}
        self._processors: dict[int, tuple[RowProcessor, ...]] = {}
        self._ends = batch.num_tokens[rows] if num_tokens is None else num_tokens
        self._batch, self._rows = batch, rows
        for index in np.flatnonzero((batch.sampling.needs[rows] & Needs.PROCESSORS) != 0).tolist():
            row = rows[index]
            if num_tokens is not None and num_tokens[index] > batch.num_tokens[row]:
                # A processor's state could not be rolled back after a rejected draft, so the row ends before its first
                # draft.
                problems[index] = "its processors take one token at a time"
                continue
            is_random = (batch.sampling.needs[row] & Needs.RANDOM) != 0
            found = batch.sampling.processors[int(row)]
            self._processors[index] = tuple(each for each in found if is_random or not each.only_random)

    def change(self, logits: Tensor) -> None:
        """Runs `RowProcessor.change`, in place. logits: [num_rows, vocab_size] float32."""
        for index, processors in self._processors.items():
            values, at = logits[index].cpu().numpy(), self._position(index, logits.shape[1])
            for each in processors:
                self._guarded(index, each, each.change, values, at)
            if logits.device.type != "cpu":
                logits[index] = torch.from_numpy(values).to(logits.device)

    def keep(self, logits: Tensor, draws: Draws) -> Draws:
        """Forbids, in place, what truncation and processors remove; returns the draws without that truncation."""
        chosen = [index for index in self._processors if draws.temperature[index] > 0 and index not in self._problems]
        if not chosen:
            return draws
        top_k, top_p, min_p = draws.top_k.copy(), draws.top_p.copy(), draws.min_p.copy()
        for index in chosen:
            at = self._position(index, logits.shape[1])
            candidates = truncate_row(logits[index], draws, index)
            for each in self._processors[index]:
                mask = self._guarded(index, each, each.keep, candidates, at)
                if mask is not None:
                    candidates = candidates.where(mask)
            if not len(candidates.token_ids):
                self._problems.setdefault(index, "its processors left no token to choose")
                continue
            self._kept[index] = candidates, at
            ids = torch.from_numpy(candidates.token_ids).to(logits.device)
            kept = logits[index, ids]
            logits[index] = -torch.inf
            logits[index, ids] = kept
            top_k[index], top_p[index], min_p[index] = 0, 1.0, 0.0
        return dataclasses.replace(draws, top_k=top_k, top_p=top_p, min_p=min_p)

    def chosen(self, token_ids: np.ndarray) -> None:
        """Passes the chosen tokens [num_rows] int32 to the processors."""
        for index, (candidates, at) in self._kept.items():
            for each in self._processors[index]:
                if index not in self._problems:
                    self._guarded(index, each, each.chosen, int(token_ids[index]), candidates, at)

    def _position(self, index: int, vocab_size: int) -> Position:
        row, batch = self._rows[index], self._batch
        tokens = batch.tokens[row, : self._ends[index]]
        return Position(tokens, int(batch.num_prompt_tokens[row]), int(batch.sampling.seed[row]), vocab_size)

    def _guarded(self, index: int, processor: RowProcessor, call: Callable[..., T], *arguments: object) -> T | None:
        try:
            return call(*arguments)
        except BaseException as error:  # any error fails only this request
            let_interrupts_pass(error)
            name = type(processor).__name__
            self._problems.setdefault(index, f"its processor {name} failed: {type(error).__name__}: {error}")
            return None


def truncate_row(logits: Tensor, draws: Draws, index: int) -> Candidates:
    """A random row's candidates after temperature and truncation. logits: [vocab_size] float32; index: its draws."""
    temperature, *truncation = (
        torch.from_numpy(column[index : index + 1]).to(logits.device)
        for column in (draws.temperature, draws.top_k, draws.top_p, draws.min_p)
    )
    tempered, top_k = logits[None] / temperature, int(draws.top_k[index])
    ranked = likeliest(tempered, min(top_k, len(logits)) if top_k > 0 else len(logits))
    token_ids = ranked[0].cpu().numpy()
    values = truncated(tempered, ranked, *truncation)[0].cpu().numpy()
    kept = np.isfinite(values)
    return Candidates(token_ids[kept], values[kept])
