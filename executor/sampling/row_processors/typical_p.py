"""typical_p: keeps the tokens whose information is nearest to the entropy, up to a share of the probability mass.

Meister et al., "Locally Typical Sampling" (2022), section 4. Of equally near tokens the lowest ids come first.
"""

from __future__ import annotations

import numpy as np

from headrace.executor.sampling.row_processors import Candidates, Position, ProcessorKind, RowProcessor, TokenMask
from headrace.ipc.messages import Sampling


class TypicalP(RowProcessor):
    def __init__(self, share: float) -> None:
        self._share = share

    def keep(self, candidates: Candidates, at: Position) -> TokenMask:
        probabilities = candidates.probabilities()
        with np.errstate(divide="ignore"):
            information = -np.log(probabilities)
        entropy = float((probabilities * np.where(probabilities > 0, information, 0.0)).sum())
        nearest = np.lexsort((candidates.token_ids, np.abs(information - entropy)))
        mass = probabilities[nearest].cumsum()
        count = int((mass < self._share * mass[-1]).sum()) + 1
        mask = np.zeros(len(nearest), bool)
        mask[nearest[:count]] = True
        return mask


def _of(sampling: Sampling) -> TypicalP:
    return TypicalP(sampling.typical_p)


PROCESSOR = ProcessorKind(order=30, field="typical_p", of=_of)
