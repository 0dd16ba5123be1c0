"""xtc ("exclude top choices"): sometimes removes all tokens above a threshold's probability but the least likely one.

As defined by its author (p-e-w, text-generation-webui's pull request 6335). Whether it happens at a position depends on
the seed and the position, like every random number here.
"""

from __future__ import annotations

import numpy as np

from headrace.executor.sampling.random_numbers import uniform
from headrace.executor.sampling.row_processors import Candidates, Position, ProcessorKind, RowProcessor, TokenMask
from headrace.ipc.messages import Sampling


class Xtc(RowProcessor):
    def __init__(self, probability: float, threshold: float) -> None:
        self._probability, self._threshold = probability, threshold

    def keep(self, candidates: Candidates, at: Position) -> TokenMask | None:
        if uniform(at.seed, len(at.tokens)) >= self._probability:
            return None
        ranking = candidates.ranking()
        count = int((candidates.probabilities() >= self._threshold).sum())
        mask = np.ones(len(ranking), bool)
        mask[ranking[: max(0, count - 1)]] = False
        return mask


def _of(sampling: Sampling) -> Xtc | None:
    if sampling.xtc_threshold > 0.5:  # two tokens cannot both have more than half
        return None
    return Xtc(sampling.xtc_probability, sampling.xtc_threshold)


PROCESSOR = ProcessorKind(order=40, field="xtc_probability", of=_of)
