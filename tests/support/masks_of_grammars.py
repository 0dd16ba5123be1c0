"""Follows a grammar by its masks, as the engine does."""

from __future__ import annotations

from typing import Any

import numpy as np


def allowed_after(start: Any, token_ids: list[int], size: int) -> list[int]:
    """The tokens that the mask allows after these, each of which the masks before must allow."""
    matcher, mask = start.copy(), np.zeros((1, -(-size // 32)), np.int32)
    for token_id in [*token_ids, -1]:
        matcher.backend.fill([(matcher, 0, [])], mask)
        allowed: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        if token_id >= 0:
            assert token_id in allowed
            assert matcher.accept(token_id)
    return allowed
