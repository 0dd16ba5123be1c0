"""Scheduling policies: the order of requests, and the share of a step that a prompt gets. One function per decision."""

from __future__ import annotations

import msgspec
import numpy as np


def order_of(policy: str, priority: int, arrival: int, *, has_begun: bool) -> tuple[int, ...]:
    """The sort key of a request: the smallest is served first, the largest is preempted first.

    has_begun: the request comes from an engine that died or drains, and already has output. Like a preempted request,
    it goes before those that wait for their first token.
    """
    return (priority, not has_begun, arrival) if policy == "priority" else (not has_begun, arrival)


class PrefillLimits(msgspec.Struct, frozen=True):
    """Limits of every step's prefill."""

    max_tokens: int
    chunked_prefill: bool = True


def prefill_share(missing_tokens: int, budget_tokens: int, limits: PrefillLimits, others_wait: bool) -> int:
    """How many of a prompt's missing tokens this step computes, with `budget_tokens` of the step's budget left.

    While others wait, a prompt that needs more than half a step gets half of the remaining budget. So a very long
    prompt delays short ones by one step and not by all of its steps; several long ones get a half, a quarter, and so
    on. The scheduler gives them what remains unused at the end. Without chunked prefill it is all or nothing.
    """
    if not limits.chunked_prefill:
        return missing_tokens if missing_tokens <= budget_tokens else 0
    if others_wait and missing_tokens > limits.max_tokens // 2:
        return min(missing_tokens, max(1, budget_tokens // 2)) if budget_tokens else 0
    return min(missing_tokens, budget_tokens)


def in_turn(is_pending: np.ndarray, last_step: np.ndarray, num_parts: int) -> np.ndarray:
    """[num_chosen] indices, ascending: which decodes this step takes if a row may be in only one step at a time.

    Each step takes at most 1 / num_parts of all rows, so that `num_parts` steps in flight keep as many pipeline stages
    busy; rows that have waited longest come first. is_pending: [num_rows] bool, rows in a step in flight. last_step:
    [num_rows], the step that last computed each row.
    """
    known = np.flatnonzero(~is_pending)
    share = -(-len(is_pending) // num_parts)
    if len(known) <= share:
        return known
    return np.sort(known[np.argsort(last_step[known], kind="stable")[:share]])
