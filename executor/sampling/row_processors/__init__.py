"""Processors of single rows, for parameters that the kernels do not support: a file each, with a constant `PROCESSOR`.

    penalties > change (dry, top_n_sigma) > temperature, min_p, top_k, top_p > keep (typical_p, xtc, mirostat) > draw

A request without processors costs a look at one field for each `PROCESSOR` when it enters, and nothing in a step.
Imports no torch: a row of logits is a numpy array on the host, whatever device computed it. A processor that raises
fails only its own request.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np

from headrace.ipc.messages import Sampling

TokenMask = np.ndarray


@dataclass(frozen=True)
class Position:
    """The position of the token to choose: it follows `tokens`."""

    tokens: np.ndarray  # [num_tokens] int32: the prompt, and the output so far
    num_prompt_tokens: int
    seed: int
    """[0, 2**64): the seed of the row's random numbers."""
    vocab_size: int


@dataclass(frozen=True)
class Candidates:
    """The remaining tokens of a row, in no order, with their logits divided by the temperature."""

    token_ids: np.ndarray  # [n] int64
    logits: np.ndarray  # [n] float64, finite

    def probabilities(self) -> np.ndarray:
        """[n] float64, summing to 1."""
        weights = np.exp(self.logits - self.logits.max())
        return np.asarray(weights / weights.sum())

    def ranking(self) -> np.ndarray:
        """[n] int64: indices in order of probability, highest first, and of token id, lowest first, for equal ones."""
        return np.lexsort((self.token_ids, -self.logits))

    def where(self, mask: TokenMask) -> Candidates:
        return Candidates(self.token_ids[mask], self.logits[mask])


class RowProcessor:
    """The processor of one request, from its entry to its end or preemption. Its effect is a function of the tokens,
    unless the class says otherwise."""

    only_random = True
    """Whether greedy requests skip it."""

    def change(self, logits: np.ndarray, at: Position) -> None:
        """Changes logits [vocab_size] float32 in place, before temperature; -inf forbids a token."""

    def keep(self, candidates: Candidates, at: Position) -> TokenMask | None:
        """[n] bool: the candidates to keep, at least one; None keeps all."""

    def chosen(self, token_id: int, candidates: Candidates, at: Position) -> None:
        """Called with the token drawn from the candidates that all processors kept."""


@dataclass(frozen=True)
class ProcessorKind:
    order: int
    """The order of processors within change and within keep, lowest first."""
    field: str
    """The field of Sampling by which a request asks for it: with the field's default it does not."""
    of: Callable[[Sampling], RowProcessor | None]
    """Makes the processor of a request with that field; None if its values change nothing."""


@functools.cache
def kinds() -> tuple[ProcessorKind, ...]:
    modules = [importlib.import_module(f"{__name__}.{each.name}") for each in pkgutil.iter_modules(__path__)]
    return tuple(sorted((module.PROCESSOR for module in modules), key=lambda kind: kind.order))


_DEFAULTS = {each.name: each.default for each in msgspec.structs.fields(Sampling)}


def processors_of(sampling: Sampling) -> tuple[RowProcessor, ...]:
    asked = [kind for kind in kinds() if getattr(sampling, kind.field) != _DEFAULTS[kind.field]]
    return tuple(each for kind in asked if (each := kind.of(sampling)) is not None) if asked else ()
