"""What changes one row's choice beyond what every kernel knows: a file for each, with a constant `PROCESSOR`.

    penalties > change (dry, top_n_sigma) > temperature, min_p, top_k, top_p > keep (typical_p, xtc, mirostat) > draw

A request that asks for none costs one look at each `PROCESSOR` when it enters, and nothing in a step. Torch-free: a row
of logits is a numpy array on the host, whatever computed it. One that raises fails its own request alone.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from headrace.ipc.messages import Sampling

TokenMask = np.ndarray


@dataclass(frozen=True)
class Position:
    """Where a row stands: the token at hand follows `tokens`."""

    tokens: np.ndarray  # [num_tokens] int32: the prompt, and the output so far
    num_prompt_tokens: int
    seed: int
    """[0, 2**64): what the row's random numbers come from."""
    vocab_size: int


@dataclass(frozen=True)
class Candidates:
    """The tokens that are left of a row, in no order, with their tempered logits."""

    token_ids: np.ndarray  # [n] int64
    logits: np.ndarray  # [n] float64, finite

    def probabilities(self) -> np.ndarray:
        """[n] float64, which sum to 1."""
        weights = np.exp(self.logits - self.logits.max())
        return np.asarray(weights / weights.sum())

    def ranking(self) -> np.ndarray:
        """[n] int64: indices, the likeliest first, and of equal ones the lowest token id first."""
        return np.lexsort((self.token_ids, -self.logits))

    def where(self, mask: TokenMask) -> Candidates:
        return Candidates(self.token_ids[mask], self.logits[mask])


class RowProcessor:
    """Of one request, from its entry to its end or preemption; what it does is a function of the tokens, unless it
    says otherwise."""

    only_random = True
    """Greedy requests do without it."""

    def change(self, logits: np.ndarray, at: Position) -> None:
        """In place, before temperature. logits: [vocab_size] float32; -inf forbids."""

    def keep(self, candidates: Candidates, at: Position) -> TokenMask | None:
        """[n] bool: which of the candidates stay, at least one; None: all."""

    def chosen(self, token_id: int, candidates: Candidates, at: Position) -> None:
        """The token that was drawn from what all processors kept."""


@dataclass(frozen=True)
class ProcessorKind:
    order: int
    """Within change and keep, lowest first."""
    of: Callable[[Sampling], RowProcessor | None]
    """None where the request does not ask for it."""


@functools.cache
def kinds() -> tuple[ProcessorKind, ...]:
    modules = [importlib.import_module(f"{__name__}.{each.name}") for each in pkgutil.iter_modules(__path__)]
    return tuple(sorted((module.PROCESSOR for module in modules), key=lambda kind: kind.order))


def processors_of(sampling: Sampling) -> tuple[RowProcessor, ...]:
    return tuple(each for kind in kinds() if (each := kind.of(sampling)) is not None)
