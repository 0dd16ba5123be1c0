"""top_n_sigma: keeps only tokens whose logits lie within n standard deviations of the highest.

Tang et al., "Top-nsigma: Not All Logits Are You Need" (2024), equation 5. The set does not depend on the temperature.
"""

from __future__ import annotations

import numpy as np

from headrace.executor.sampling.row_processors import Position, ProcessorKind, RowProcessor
from headrace.ipc.messages import Sampling


class TopNSigma(RowProcessor):
    def __init__(self, n: float) -> None:
        self._n = n

    def change(self, logits: np.ndarray, at: Position) -> None:
        allowed = logits[np.isfinite(logits)].astype(np.float64)
        if len(allowed):
            logits[logits < allowed.max() - self._n * allowed.std()] = -np.inf


def _of(sampling: Sampling) -> TopNSigma | None:
    return TopNSigma(sampling.top_n_sigma) if sampling.top_n_sigma > 0 else None


PROCESSOR = ProcessorKind(order=20, field="top_n_sigma", of=_of)
