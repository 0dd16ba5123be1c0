"""The repetition, frequency and presence penalties, and the counts of tokens that they need."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headrace.executor.sampling.columns import Needs, SampledRows


class TokenCounts:
    """The distinct tokens of one row, and how often each is in the output. Counts are updated token by token: to
    compute the distinct tokens of a long context at every step would take longer than to choose a token."""

    def __init__(self, prompt: np.ndarray) -> None:
        """prompt: [num_prompt_tokens] int32."""
        ids = np.unique(prompt)
        self._ids = ids.astype(np.int64)  # [capacity], of which the first `_size` are used
        self._counts = np.zeros(len(ids), np.float32)  # [capacity]: occurrences in the output
        self._place = dict(zip(ids.tolist(), range(len(ids)), strict=True))
        self._size = len(ids)
        self.num_tokens = len(prompt)
        """How many of the row's tokens have been counted."""

    def count_until(self, tokens: np.ndarray) -> None:
        """tokens: [num_tokens] int32, all known tokens of the row."""
        for token in tokens[self.num_tokens :].tolist():
            self._count(token)
        self.num_tokens = len(tokens)

    def _count(self, token: int) -> None:
        place = self._place.setdefault(token, self._size)
        if place == self._size:
            if place == len(self._ids):
                self._ids, self._counts = (np.resize(each, 2 * place + 64) for each in (self._ids, self._counts))
            self._ids[place], self._counts[place] = token, 0
            self._size += 1
        self._counts[place] += 1

    def distinct(self, drafts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Distinct token ids [n] int64, and how often each is in the output [n] float32; drafts count as output."""
        ids, counts = self._ids[: self._size], self._counts[: self._size]
        if not len(drafts):
            return ids, counts
        new = np.array([each for each in np.unique(drafts).tolist() if each not in self._place], np.int64)
        ids, counts = np.concatenate((ids, new)), np.concatenate((counts, np.zeros(len(new), np.float32)))
        places = {token: self._size + nth for nth, token in enumerate(new.tolist())} | {
            each: self._place[each] for each in drafts.tolist() if each in self._place
        }
        np.add.at(counts, [places[each] for each in drafts.tolist()], 1)
        return ids, counts


def penalise(logits: Tensor, batch: SampledRows, rows: np.ndarray, num_tokens: np.ndarray | None = None) -> None:
    """Applies the repetition, frequency and presence penalties in place, in that order, as in vLLM.

    The logit of a token in prompt or output is divided by the repetition penalty if positive and multiplied by it if
    negative (Keskar et al., "CTRL", 2019). A token in the output then loses frequency_penalty per occurrence, and
    presence_penalty once. num_tokens: as in `sampler.sample`.
    """
    indices = np.flatnonzero((batch.sampling.needs[rows] & Needs.PENALTIES) != 0)
    if not indices.size:
        return
    columns, vocab_size = batch.sampling, logits.shape[1]
    seen: list[np.ndarray] = []  # flat indices into logits, each once
    counts: list[np.ndarray] = []  # how often each is in its row's output
    for index, row in zip(indices.tolist(), rows[indices].tolist(), strict=True):
        known = int(batch.num_tokens[row])
        end = known if num_tokens is None else int(num_tokens[index])
        ids, counted = _counts_of(batch, row, min(known, end)).distinct(batch.tokens[row, known:end])
        seen.append(ids + index * vocab_size)
        counts.append(counted)
    owners = np.repeat(rows[indices], [len(each) for each in seen])
    places, times = np.concatenate(seen), np.concatenate(counts)

    def beside(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(logits.device)

    flat_logits, at = logits.view(-1), beside(places)
    repetition = beside(columns.repetition_penalty[owners])
    values = flat_logits[at]
    values = torch.where(values > 0, values / repetition, values * repetition)
    losses = columns.frequency_penalty[owners] * times + columns.presence_penalty[owners] * (times > 0)
    flat_logits[at] = values - beside(losses)


def _counts_of(batch: SampledRows, row: int, num_tokens: int) -> TokenCounts:
    """The counts after the row's first num_tokens tokens."""
    counts = batch.sampling.counts.get(row)
    if counts is None or counts.num_tokens > num_tokens:
        counts = batch.sampling.counts[row] = TokenCounts(batch.tokens[row, : batch.num_prompt_tokens[row]])
    counts.count_until(batch.tokens[row, :num_tokens])
    return counts
