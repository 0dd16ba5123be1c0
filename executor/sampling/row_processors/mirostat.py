"""mirostat: keeps the surprise of the output near a target, by a bound that is adjusted by each token's surprise.

Basu et al., "Mirostat: A Neural Text Decoding Algorithm that Directly Controls Perplexity" (2020): algorithm 1, and its
second version, which needs no estimate of Zipf's exponent. Surprises are in bits. The bound depends on the logits of
every token so far, which are not computed again after a preemption, so it is stored under a hash of those tokens.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict

import numpy as np

from headrace.executor.sampling.row_processors import Candidates, Position, ProcessorKind, RowProcessor, TokenMask
from headrace.ipc.messages import Sampling

RANKED = 100
"""Number of top tokens from which Zipf's exponent is estimated."""
MOST_KEPT = 1 << 16


class KeptBounds:
    """The bounds of requests after their tokens so far; beyond MOST_KEPT, the one stored first is dropped."""

    def __init__(self) -> None:
        self._bounds: OrderedDict[bytes, float] = OrderedDict()

    def put(self, at: Position, token_id: int, bound: float) -> None:
        self._bounds.pop(_key(at, at.tokens), None)
        self._bounds[_key(at, np.append(at.tokens, np.int32(token_id)))] = bound
        if len(self._bounds) > MOST_KEPT:
            self._bounds.popitem(last=False)

    def get(self, at: Position) -> float:
        """Raises LookupError if there is none for these tokens."""
        if (bound := self._bounds.get(_key(at, at.tokens))) is None:
            raise LookupError("the request was preempted, or came from another engine, and its bound is not here")
        return bound


_KEPT = KeptBounds()
"""For the whole process: a preempted request finds its bound here."""


class Mirostat(RowProcessor):
    def __init__(self, version: int, tau: float, eta: float) -> None:
        self._version, self._tau, self._eta = version, tau, eta
        self._bound: float | None = None

    def keep(self, candidates: Candidates, at: Position) -> TokenMask:
        if self._bound is None:
            is_new = len(at.tokens) == at.num_prompt_tokens
            self._bound = 2 * self._tau if is_new else _KEPT.get(at)
        ranking = candidates.ranking()
        probabilities = candidates.probabilities()
        if self._version == 1:
            count = _tokens_within(probabilities[ranking], self._bound, at.vocab_size)
        else:
            with np.errstate(divide="ignore"):
                count = int((-np.log2(probabilities) <= self._bound).sum())
        mask = np.zeros(len(ranking), bool)
        mask[ranking[: max(1, count)]] = True
        return mask

    def chosen(self, token_id: int, candidates: Candidates, at: Position) -> None:
        assert self._bound is not None, "keep comes first"
        probability = float(candidates.probabilities()[candidates.token_ids == token_id][0])
        self._bound -= self._eta * (-math.log2(probability) - self._tau)
        _KEPT.put(at, token_id, self._bound)


def _tokens_within(probabilities: np.ndarray, bound: float, vocab_size: int) -> int:
    """How many top tokens give a surprise near the bound. probabilities: [n] float64, highest first."""
    ranked = probabilities[:RANKED]
    ranked = ranked[ranked > 0]
    steps = np.log((np.arange(len(ranked) - 1) + 2) / (np.arange(len(ranked) - 1) + 1))
    falls = np.log(ranked[:-1] / ranked[1:])
    exponent = float((steps * falls).sum() / (steps**2).sum()) if len(steps) else 0.0
    excess = exponent - 1
    if exponent < 1e-6:
        return len(probabilities)
    share = 1 / math.log(vocab_size) if abs(excess) < 1e-9 else excess / (1 - float(vocab_size) ** -excess)
    # With logarithms, since the power overflows for a bound that has risen far.
    logarithm = (math.log(share) + bound * math.log(2)) / exponent
    return len(probabilities) if logarithm > math.log(len(probabilities)) else int(math.exp(logarithm))


def _key(at: Position, tokens: np.ndarray) -> bytes:
    head = f"{at.seed} {at.num_prompt_tokens} ".encode()
    return hashlib.blake2b(head + tokens.astype(np.int32).tobytes(), digest_size=16).digest()


def _of(sampling: Sampling) -> Mirostat:
    return Mirostat(sampling.mirostat, sampling.mirostat_tau, sampling.mirostat_eta)


PROCESSOR = ProcessorKind(order=50, field="mirostat", of=_of)
