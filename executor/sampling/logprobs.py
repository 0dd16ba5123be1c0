"""Logprobs of tokens and of the top alternatives, for the wire: from raw logits, or from the logits that
`sampling.sampler` has processed (option logprobs_mode).

Tokens are ranked everywhere in one total order: by logit, highest first, and equal logits by token id, lowest first
(`kernels.reference.sampling.likeliest`). bf16 models tie often, and without a total order a result would depend on the
sorting algorithm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from headrace import kernels
from headrace.ipc.codec import Tensor as WireTensor
from headrace.ipc.messages import LogprobRows

if TYPE_CHECKING:
    from headrace.executor.sampling.columns import SamplingColumns

WHOLE_VOCABULARY = -1


Asked = list[np.ndarray]
"""For each row, the tokens that the request names (logprob_token_ids), [n] int64; empty for the top tokens."""


def asked_tokens(columns: SamplingColumns, rows: np.ndarray) -> Asked:
    """The `Asked` of these rows."""
    params = [columns.params[row] for row in rows.tolist()]
    return [np.array(() if each is None else each.logprob_token_ids, np.int64) for each in params]


def logprob_rows(
    logits: Tensor, token_ids: np.ndarray, counts: np.ndarray, asked: Asked | None = None, *, as_logits: bool = False
) -> LogprobRows:
    """The logprob and rank of one token per row, and of its top tokens.

    logits: [num_rows, vocab_size] float32, in the state that logprobs_mode names; token_ids: [num_rows], the row's own
    token; counts: [num_rows], how many top tokens to add, WHOLE_VOCABULARY for all. Padding has logprob -inf.
    as_logits: report logits instead of logprobs.
    """
    counts = limited(counts, logits.shape[1])
    own_ids = torch.from_numpy(token_ids.astype(np.int64)).to(logits.device)
    op = kernels.choose("token_logprobs", device=logits.device, dtype=logits.dtype, vocab_size=logits.shape[1])
    found = op(logits, own_ids, int(counts.max(initial=0)))
    ids, values, ranks = (each.cpu().numpy() for each in found)
    if as_logits:
        values = logits.gather(1, found.token_ids.long()).cpu().numpy()
    rows = padded(ids, values, ranks, counts)

    def values_of(row: int, tokens: np.ndarray) -> np.ndarray:
        chosen = logits[row, torch.from_numpy(tokens)] - (0 if as_logits else logits[row].logsumexp(0))
        return chosen.cpu().numpy()

    return with_asked(rows, asked or [], values_of)


def with_asked(rows: LogprobRows, asked: Asked, values_of: Callable[[int, np.ndarray], np.ndarray]) -> LogprobRows:
    """Replaces the top tokens by the requested ones in rows that request tokens. values_of: gives their logprobs."""
    if not any(len(tokens) for tokens in asked):
        return rows
    ids, values = rows.token_ids.numpy(), rows.logprobs.numpy()
    kept = [1 if len(tokens) else int((ids[row] >= 0).sum()) for row, tokens in enumerate(asked)]
    width = max(count + len(tokens) for count, tokens in zip(kept, asked, strict=True))
    all_ids, all_values = np.full((len(ids), width), -1, np.int32), np.full((len(ids), width), -np.inf, np.float32)
    for row, (count, tokens) in enumerate(zip(kept, asked, strict=True)):
        all_ids[row, :count], all_values[row, :count] = ids[row, :count], values[row, :count]
        if len(tokens):
            end = count + len(tokens)
            all_ids[row, count:end], all_values[row, count:end] = tokens, values_of(row, tokens)
    return LogprobRows(
        token_ids=WireTensor.from_numpy(all_ids), logprobs=WireTensor.from_numpy(all_values), ranks=rows.ranks
    )


def no_prompt_logprobs(error: Exception) -> str:
    """The failure message of a request whose prompt logprobs could not be computed."""
    return f"no log-probabilities of the prompt: {type(error).__name__}: {error}"


def limited(counts: np.ndarray, vocab_size: int) -> np.ndarray:
    """Requested counts -> actual numbers, at most vocab_size."""
    return np.where(counts == WHOLE_VOCABULARY, vocab_size, np.minimum(counts, vocab_size))


def padded(ids: np.ndarray, values: np.ndarray, ranks: np.ndarray, counts: np.ndarray) -> LogprobRows:
    """Cuts each row of `TokenLogprobs` to its count [num_rows] of top tokens, which it must have, and pads the rest."""
    width = 1 + int(counts.max(initial=0))
    ids, values = ids[:, :width].copy(), values[:, :width].copy()
    padding = np.arange(width) > counts[:, None]
    ids[padding], values[padding] = -1, -np.inf
    return LogprobRows(
        token_ids=WireTensor.from_numpy(ids),
        logprobs=WireTensor.from_numpy(values),
        ranks=WireTensor.from_numpy(ranks.copy()),
    )
