"""What min_p, top_k and top_p keep of tempered logits, in torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.executor.cpu.batch import Draws
from headrace.executor.sampling.row_processors import Candidates
from headrace.kernels.reference.sampling import CPU_TILE_ELEMENTS, likeliest

CANDIDATES = 256
"""How many of the likeliest tokens are ranked at first; rows whose choice needs more are ranked whole."""
MOST_CANDIDATES = 1024


@dataclass(frozen=True)
class Truncated:
    token_ids: Tensor  # [num_rows, width] int64, in the order of `likeliest`
    logits: Tensor  # [num_rows, width] float64, -inf for what is truncated
    complete: np.ndarray  # [num_rows] bool: nothing that truncation keeps lies beyond `width`


def truncate(tempered: Tensor, width: int, *, top_k: np.ndarray, top_p: np.ndarray, min_p: np.ndarray) -> Truncated:
    """The tokens that min_p, top_k and top_p keep, looked for among the `width` likeliest.

    tempered: [num_rows, vocab_size] float32; top_k: 0 for none, top_p: 1 for none, min_p: 0 for none, [num_rows].
    In the total order each of the three keeps a beginning: min_p the tokens at least min_p times as probable as
    the first, top_k the first k of those, top_p the shortest beginning of what is left that has at least the
    share top_p of its mass. What is kept does not depend on the width, as long as that is enough.
    """
    vocab_size = tempered.shape[1]
    token_ids = likeliest(tempered, width)
    values = tempered.gather(1, token_ids).double()
    first = values[:, :1]
    weights = (values - first).exp()
    by_min_p = (weights >= to_column(min_p, tempered)[:, None]).sum(1)
    by_top_k = to_column(np.where(top_k > 0, np.minimum(top_k, vocab_size), vocab_size), tempered)
    # When all `width` pass min_p, more beyond them may.
    by_min_p = torch.where(by_min_p < width, by_min_p, vocab_size)
    limit = torch.minimum(by_min_p, by_top_k)
    bounded = limit <= width

    share = to_column(top_p, tempered)
    place = torch.arange(width, device=tempered.device)
    mass = weights.masked_fill_(place >= limit[:, None], 0).cumsum(1)
    total = mass[:, -1]
    # Without min_p and top_k, top_p takes its share of the whole vocabulary, of which `width` tokens may be enough.
    whole = to_column((min_p <= 0) & (top_k <= 0), tempered)
    if whole.any():
        total = total.masked_scatter(whole, _exp_sums(tempered, first, whole))
    by_top_p = (mass < (share * total)[:, None]).sum(1) + 1
    reached = whole & (by_top_p <= width)
    keep = torch.where(share < 1, torch.minimum(by_top_p, limit), limit)
    return Truncated(token_ids, values.masked_fill_(place >= keep[:, None], -torch.inf), to_host(bounded | reached))


def _exp_sums(logits: Tensor, first: Tensor, chosen: Tensor) -> Tensor:
    """[num_chosen] float64: the sums of exp(logits - first) of the rows that chosen [num_rows] bool marks."""
    at_once = max(1, CPU_TILE_ELEMENTS // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    sums = [
        (logits[rows] - first[rows].float()).exp_().sum(1, dtype=torch.float64)
        for rows in chosen.nonzero()[:, 0].split(at_once)
    ]
    return torch.cat(sums)


def first_width(top_k: np.ndarray, vocab_size: int) -> int:
    """Wide enough for every small top_k, and for what top_p and min_p usually keep."""
    wanted = np.where(top_k > 0, np.minimum(top_k, MOST_CANDIDATES), CANDIDATES)
    return min(int(wanted.max(initial=1)), vocab_size)


def truncate_row(logits: Tensor, draws: Draws, index: int) -> Candidates:
    """What is left of one row, which is drawn at random: logits [vocab_size] float32, by the draws at `index`."""
    tempered = logits[None] / to_column(draws.temperature[index : index + 1], logits)[:, None]
    top_k, top_p, min_p = (each[index : index + 1] for each in (draws.top_k, draws.top_p, draws.min_p))
    vocab_size = len(logits)
    if not (top_k > 0) | (top_p < 1) | (min_p > 0):
        values = to_host(tempered[0].double())
        kept = np.flatnonzero(np.isfinite(values))
        return Candidates(kept, values[kept])
    found = truncate(tempered, first_width(top_k, vocab_size), top_k=top_k, top_p=top_p, min_p=min_p)
    if not found.complete[0]:
        found = truncate(tempered, vocab_size, top_k=top_k, top_p=top_p, min_p=min_p)
    token_ids, values = to_host(found.token_ids[0]), to_host(found.logits[0])
    kept = np.isfinite(values)
    return Candidates(token_ids[kept], values[kept])


def to_indices(indices: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(indices.astype(np.int64)).to(like.device)


def to_column(values: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(like.device)


def to_host(values: Tensor) -> np.ndarray:
    return values.cpu().numpy()
