"""Log-probabilities of tokens and of their likeliest alternatives, from raw logits (`raw_logprobs`).

Tokens are ranked everywhere in one total order: by logit, highest first, and equal logits by token id, lowest
first. bf16 models tie often, and without such an order a result would depend on the sort that produced it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headrace.ipc.codec import Tensor as WireTensor
from headrace.ipc.messages import LogprobRows

WHOLE_VOCABULARY = -1
LOW_WORD = 0xFFFFFFFF
TILE_ELEMENTS = 1 << 18
"""On a CPU so many logits are ranked at a time: their keys stay in its cache."""


def likeliest(logits: Tensor, count: int) -> Tensor:
    """Token ids [num_rows, count] int64 of the first `count` tokens in the total order; count <= vocab_size.

    logits: [num_rows, vocab_size] float32. Each logit and its id make one int64 key, distinct and ordered alike:

        bits 63..32: the float's bits as an integer of the same order    31..0: 0xFFFFFFFF - token id
    """
    num_rows, vocab_size = logits.shape
    reversed_ids = torch.arange(LOW_WORD, LOW_WORD - vocab_size, -1, device=logits.device)
    at_once = max(1, TILE_ELEMENTS // vocab_size) if logits.device.type == "cpu" else max(1, num_rows)
    return torch.cat([_likeliest(part, reversed_ids, count) for part in logits.split(at_once)])


def _likeliest(logits: Tensor, reversed_ids: Tensor, count: int) -> Tensor:
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    bits ^= (bits >> 31).bitwise_and_(0x7FFFFFFF)
    keys = bits.long()
    keys <<= 32
    keys |= reversed_ids
    top = keys.topk(count, dim=1).values if count < keys.shape[1] else keys.sort(dim=1, descending=True).values
    return LOW_WORD - (top & LOW_WORD)


def logprob_rows(logits: Tensor, token_ids: np.ndarray, counts: np.ndarray) -> LogprobRows:
    """The log-probability and rank of one token per row, and of the likeliest ones.

    logits: [num_rows, vocab_size] float32, as the model gave them; token_ids: [num_rows], the row's own token;
    counts: [num_rows], how many of the likeliest to add, WHOLE_VOCABULARY for all. Padding has logprob -inf.
    """
    counts = limited(counts, logits.shape[1])
    own_ids = torch.from_numpy(token_ids.astype(np.int64)).to(logits.device)
    most = torch.from_numpy(counts).to(logits.device)
    ids, values, ranks = logprob_tensors(logits, own_ids, most, int(counts.max(initial=0)))
    return LogprobRows(
        token_ids=WireTensor.from_numpy(ids.cpu().numpy()),
        logprobs=WireTensor.from_numpy(values.cpu().numpy()),
        ranks=WireTensor.from_numpy(ranks.cpu().numpy()),
    )


def limited(counts: np.ndarray, vocab_size: int) -> np.ndarray:
    """Counts as asked for -> how many there are of each."""
    return np.where(counts == WHOLE_VOCABULARY, vocab_size, np.minimum(counts, vocab_size))


def logprob_tensors(logits: Tensor, token_ids: Tensor, counts: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """`logprob_rows` on the device: ids [num_rows, 1 + width] int32, values of that shape float32, ranks [num_rows].

    token_ids: [num_rows] int64; counts: [num_rows] `limited`, none above `width`. Waits for nothing.
    """
    own_ids = token_ids[:, None]
    own_logits = logits.gather(1, own_ids)
    ids, values = own_ids, own_logits
    if width:
        best_ids = likeliest(logits, width)
        padding = torch.arange(width, device=logits.device) >= counts[:, None]
        ids = torch.cat((own_ids, best_ids.masked_fill(padding, -1)), 1)
        values = torch.cat((own_logits, logits.gather(1, best_ids).masked_fill_(padding, -torch.inf)), 1)
    ranks = (logits > own_logits).sum(1, dtype=torch.int32) + 1
    return ids.int(), values - logits.logsumexp(1, keepdim=True), ranks
