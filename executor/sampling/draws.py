"""How tokens are drawn from logits, and the drawn tokens, as numpy arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headrace.ipc.step import TokenMasks


@dataclass(frozen=True)
class Draws:
    """How tokens are drawn from rows of logits after all changes to the logits. For a greedy row only its temperature,
    0, is read; top_k 0, top_p 1 and min_p 0 keep all tokens."""

    temperature: np.ndarray  # [num_rows] float32
    top_k: np.ndarray  # [num_rows] int64
    top_p: np.ndarray  # [num_rows] float64
    min_p: np.ndarray  # [num_rows] float64
    seed: np.ndarray  # [num_rows] uint64
    position: np.ndarray  # [num_rows] int32: the drawn token's position in its sequence
    masks: TokenMasks | None = None
    """The allowed tokens; None allows all. A model that chooses tokens applies them to its logits."""


class Chosen(NamedTuple):
    """Tokens that were chosen for rows of logits."""

    token_ids: np.ndarray  # [num_rows] int32; meaningless where `best` is not finite
    best: np.ndarray  # [num_rows] float32: each row's highest logit, NaN if the row contains NaN
