"""The rounding of one-byte caches, for models of transformers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache


class RoundedCache(DynamicCache):
    """transformers' cache, but rows are rounded to one-byte codes when they are stored, each with its own scale."""

    def __init__(self, stored: torch.dtype) -> None:
        super().__init__()
        self.stored = stored
        self.largest = 127.0 if stored == torch.int8 else torch.finfo(stored).max

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *rest: Any, **named: Any) -> Any:
        return super().update(self.rounded(key_states), self.rounded(value_states), *rest, **named)

    def rounded(self, rows: torch.Tensor) -> torch.Tensor:
        scales = rows.abs().amax(-1, keepdim=True) / self.largest
        codes = rows / scales
        return (codes.round() if self.stored == torch.int8 else codes.to(self.stored)).to(rows.dtype) * scales
