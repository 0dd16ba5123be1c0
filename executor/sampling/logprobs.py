"""Log-probabilities of tokens and of their likeliest alternatives, from raw logits (`raw_logprobs`), for the wire.

Tokens are ranked everywhere in one total order: by logit, highest first, and equal logits by token id, lowest
first (`reference_sampling.likeliest`). bf16 models tie often, and without such an order a result would depend on the
sort that produced it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headrace.ipc.codec import Tensor as WireTensor
from headrace.ipc.messages import LogprobRows
from headrace.kernels.reference.sampling import token_logprobs

WHOLE_VOCABULARY = -1


def logprob_rows(logits: Tensor, token_ids: np.ndarray, counts: np.ndarray) -> LogprobRows:
    """The log-probability and rank of one token per row, and of the likeliest ones.

    logits: [num_rows, vocab_size] float32, as the model gave them; token_ids: [num_rows], the row's own token;
    counts: [num_rows], how many of the likeliest to add, WHOLE_VOCABULARY for all. Padding has logprob -inf.
    """
    counts = limited(counts, logits.shape[1])
    own_ids = torch.from_numpy(token_ids.astype(np.int64)).to(logits.device)
    found = token_logprobs(logits, own_ids, int(counts.max(initial=0)))
    ids, values, ranks = (each.cpu().numpy() for each in found)
    return padded(ids, values, ranks, counts)


def limited(counts: np.ndarray, vocab_size: int) -> np.ndarray:
    """Counts as asked for -> how many there are of each."""
    return np.where(counts == WHOLE_VOCABULARY, vocab_size, np.minimum(counts, vocab_size))


def padded(ids: np.ndarray, values: np.ndarray, ranks: np.ndarray, counts: np.ndarray) -> LogprobRows:
    """Rows of `TokenLogprobs`, of which each has more of the likeliest than its count [num_rows], or as many."""
    width = 1 + int(counts.max(initial=0))
    ids, values = ids[:, :width].copy(), values[:, :width].copy()
    padding = np.arange(width) > counts[:, None]
    ids[padding], values[padding] = -1, -np.inf
    return LogprobRows(
        token_ids=WireTensor.from_numpy(ids),
        logprobs=WireTensor.from_numpy(values),
        ranks=WireTensor.from_numpy(ranks.copy()),
    )
