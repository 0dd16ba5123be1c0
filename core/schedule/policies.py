"""Who is served first, and how long prompts share a step. One function per decision."""

from __future__ import annotations

import msgspec
import numpy as np


def order_of(policy: str, priority: int, arrival: int, *, has_begun: bool) -> tuple[int, ...]:
    """The sort key of a request: the smallest is served first, the largest is preempted first.

    has_begun: it comes from an engine that died or drains, and somebody reads its stream; as one that was preempted
    here it goes before those that wait for their first token.
    """
    return (priority, not has_begun, arrival) if policy == "priority" else (not has_begun, arrival)


class PrefillLimits(msgspec.Struct, frozen=True):
    """What every step is bound by."""

    max_tokens: int
    chunked_prefill: bool = True


def prefill_share(missing_tokens: int, budget_tokens: int, limits: PrefillLimits, others_wait: bool) -> int:
    """How many of a prompt's missing tokens this step takes, with `budget_tokens` of it left.

    A prompt of more than half a step leaves half of what is left to the others that wait, so that a very long one
    delays short ones by a step and not by all of its own; several long ones take a half, a quarter, and so on.
    What then remains unused is handed back to them at the end of the step. Without chunked prefill it is all or
    nothing.
    """
    if not limits.chunked_prefill:
        return missing_tokens if missing_tokens <= budget_tokens else 0
    if others_wait and missing_tokens > limits.max_tokens // 2:
        return min(missing_tokens, max(1, budget_tokens // 2)) if budget_tokens else 0
    return min(missing_tokens, budget_tokens)


def in_turn(is_pending: np.ndarray, last_step: np.ndarray, num_parts: int) -> np.ndarray:
    """[num_chosen] indices, ascending: which decoding rows this step takes when a row is in one step at a time.

    Each step takes at most an equal part of all rows, so that `num_parts` steps in flight keep as many pipeline stages
    busy; those that have waited longest come first. `is_pending` rows ([num_rows] bool) are in a step in flight, and
    `last_step` ([num_rows]) is the one that last computed each.
    """
    known = np.flatnonzero(~is_pending)
    share = -(-len(is_pending) // num_parts)
    if len(known) <= share:
        return known
    return np.sort(known[np.argsort(last_step[known], kind="stable")[:share]])
