"""LAST: the hidden state of the prompt's last token, which has seen all others in a causal model."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor


class LastToken:
    reads_all: ClassVar[bool] = False

    def wanted(self, begin: int, end: int, num_tokens: int) -> slice:
        return slice(end - 1, end) if end == num_tokens else slice(end, end)

    def add(self, row: int, hidden: Tensor, *, is_end: bool) -> Tensor | None:
        return hidden.clone()

    def whole(self, states: list[Tensor]) -> Tensor:
        return torch.cat(states)

    def leave(self, row: int) -> None:
        pass
