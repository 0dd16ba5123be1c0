"""Token embeddings with the vocabulary divided among ranks, in torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor


def embed(token_ids: Tensor, table: Tensor, first_row: int = 0, scale: float = 1.0) -> Tensor:
    """This rank's rows of the embedding, times `scale`; zeros for tokens of other ranks and padding (negative ids).

    token_ids [num_tokens] int32 or int64; table [num_rows, width]: rows first_row .. first_row + num_rows - 1 of the
    whole table. The ranks' results sum to the embedding. Returns [num_tokens, width] in the table's dtype, rounded
    once.
    """
    local = token_ids.long() - first_row
    mine = (local >= 0) & (local < len(table))
    rows = table[torch.where(mine, local, 0)].masked_fill(~mine[:, None], 0)
    return rows if scale == 1.0 else rows * scale


REFERENCES: Mapping[str, Callable[..., Any]] = MappingProxyType({"embed": embed})
