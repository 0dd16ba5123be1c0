"""Who is served first, and how long prompts share a step. One function per decision."""

from __future__ import annotations


def order_of(policy: str, priority: int, arrival: int) -> tuple[int, ...]:
    """The sort key of a request: the smallest is served first, the largest gives way first."""
    return (priority, arrival) if policy == "priority" else (arrival,)


def prefill_share(missing_tokens: int, budget_tokens: int, step_tokens: int, others_wait: bool) -> int:
    """How many of a prompt's missing tokens this step takes.

    A prompt of more than half a step leaves half of what is left to the others that wait, so that a very long one
    delays short ones by a step and not by all of its own; several long ones take a half, a quarter, and so on.
    What then remains unused is handed back to them at the end of the step.
    """
    if others_wait and missing_tokens > step_tokens // 2:
        return min(missing_tokens, max(1, budget_tokens // 2)) if budget_tokens else 0
    return min(missing_tokens, budget_tokens)
