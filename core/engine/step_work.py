"""Estimates what steps compute and move, for a device's utilisation (MFU). Per rank, from the model's config:

    operations   2 for each parameter of a matrix that a token meets, and those of attention for each pair of tokens
    bytes read   the weights once a step (of experts those that are likely to be chosen), and each row's cached tokens
    bytes written    the new tokens' keys and values

Activations are left out: they mostly stay in caches.
"""

from __future__ import annotations

import numpy as np

from headrace.core.options.plan import Facts, Plan, StepWork
from headrace.ipc.failure import OptionError
from headrace.ipc.messages import Work
from headrace.ipc.step import StepPlan


class WorkMeter:
    """The sums of all steps."""

    def __init__(self, plan: Plan, facts: Facts) -> None:
        """Raises OptionError for a model whose work is not known."""
        if plan.model.step_work is None:
            raise OptionError(
                f"enable_mfu_metrics: {plan.model.architecture} does not say what it computes; leave it out"
            )
        options = plan.options
        self._work, self._num_ranks = (
            plan.model.step_work,
            options.tensor_parallel_size * options.pipeline_parallel_size,
        )
        self._weights_bytes = facts.memory.weights_bytes
        # One rank's bytes for each token of the whole model's elements.
        cached_tokens = max(1, facts.num_blocks * plan.block_size)
        elements = sum(each.cached_elements for each in self._work.attention)
        self._element_bytes = facts.kv_cache_bytes / cached_tokens / elements if elements else 0.0
        self._flops = self._read_bytes = self._write_bytes = 0.0

    def step(self, plan: StepPlan) -> None:
        work, num_tokens = self._work, plan.total_tokens
        new, before = plan.num_tokens.astype(np.int64), plan.num_computed_tokens.astype(np.int64)
        flops = num_tokens * work.token_flops + int(plan.sampled.sum()) * work.output_flops
        for each in work.attention:
            flops += pairs(new, before, each.window) * each.pair_flops
            held = before + new if each.window is None else np.minimum(before + new, each.window + new)
            self._read_bytes += int(held.sum()) * each.cached_elements * self._element_bytes
            self._write_bytes += num_tokens * each.cached_elements * self._element_bytes
        self._flops += flops / self._num_ranks
        self._read_bytes += self._weights_bytes * weights_read(work, num_tokens)

    def work(self) -> Work:
        return Work(flops=self._flops, read_bytes=self._read_bytes, write_bytes=self._write_bytes)


def pairs(new: np.ndarray, before: np.ndarray, window: int | None) -> int:
    """How many pairs of a new token and one that it attends to there are. new, before: [num_rows] int64, each row's
    tokens in this step and before it."""
    if window is None:
        return int((new * before + new * (new + 1) // 2).sum())
    growing = np.clip(window - before, 0, new)  # new tokens that attend to all before them
    return int((growing * before + growing * (growing + 1) // 2 + (new - growing) * window).sum())


def weights_read(work: StepWork, num_tokens: int) -> float:
    """The share of the weights that a step reads, if tokens choose experts independently."""
    untouched = (1.0 - work.chosen_share) ** num_tokens
    return 1.0 - work.expert_share * untouched
