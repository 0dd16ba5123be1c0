"""dry ("don't repeat yourself"): penalises a token that would continue a repetition, more for longer repetitions.

As defined by its author (p-e-w, text-generation-webui's pull request 5677): if the last `length` tokens occurred
before, followed by some token, that token loses multiplier * base ** (length - allowed_length), from allowed_length on.
A repetition does not extend over a sequence breaker, and is measured up to LONGEST tokens back.
"""

from __future__ import annotations

import numpy as np

from headrace.executor.sampling.row_processors import Position, ProcessorKind, RowProcessor
from headrace.ipc.messages import Sampling

LONGEST = 50


class Dry(RowProcessor):
    only_random = False

    def __init__(self, sampling: Sampling) -> None:
        self._multiplier, self._base = sampling.dry_multiplier, sampling.dry_base
        self._allowed_length, self._last_n = sampling.dry_allowed_length, sampling.dry_penalty_last_n
        self._breakers = np.array(sampling.dry_breaker_token_ids, np.int64)

    def change(self, logits: np.ndarray, at: Position) -> None:
        tokens = at.tokens if self._last_n < 0 else at.tokens[max(0, len(at.tokens) - self._last_n) :]
        next_tokens, lengths = self._runs(tokens)
        penalised = lengths >= self._allowed_length
        if penalised.any():
            longest = np.zeros(len(logits))
            np.maximum.at(longest, next_tokens[penalised], lengths[penalised])
            places = np.flatnonzero(longest)
            loss = self._multiplier * self._base ** (longest[places] - self._allowed_length)
            logits[places] -= loss.astype(np.float32)

    def _runs(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each earlier place of the last token: the token after it, and the length of the longest run that ends
        both there and at the end."""
        places = np.flatnonzero(tokens[:-1] == tokens[-1]) if len(tokens) else np.zeros(0, np.int64)
        if np.isin(tokens[-1:], self._breakers).any():
            places = places[:0]
        places = places[~np.isin(tokens[places + 1], self._breakers)]
        lengths = np.ones(len(places), np.int64)
        going_on = np.arange(len(places))
        for length in range(1, min(LONGEST, len(tokens))):
            previous = tokens[-1 - length]
            before = places[going_on] - length
            going_on = going_on[(before >= 0) & (tokens[before] == previous)]
            if not len(going_on) or (self._breakers == previous).any():
                break
            lengths[going_on] = length + 1
        return tokens[places + 1].astype(np.int64), lengths


def _of(sampling: Sampling) -> Dry | None:
    return Dry(sampling) if sampling.dry_penalty_last_n != 0 else None


PROCESSOR = ProcessorKind(order=10, field="dry_multiplier", of=_of)
