"""Log lines about an engine's load, with rates since the line before and the fields of vLLM's log lines."""

from __future__ import annotations

from typing import Any

from headrace.frontend.client.engine_metrics import hit_rate, kv_use
from headrace.ipc.control import EngineReport
from headrace.ipc.messages import EngineStats


class StatsLog:
    """The statistics lines of one engine."""

    def __init__(self, index: int = 0) -> None:
        self._name = f"Engine {index:03d}"
        self._last: tuple[EngineStats, float] | None = None
        self.is_idle = True
        """Whether the engine was idle during the intervals of the last two lines."""
        self._was_at_rest = True

    def line(self, stats: EngineStats, now_s: float) -> str:
        """The line for the interval since the line before; `now_s` in monotonic seconds. The first has no rates yet."""
        before, before_s = self._last or (stats, now_s)
        if stats.steps < before.steps:  # the engine was replaced
            before, before_s = stats, now_s
        self._last = stats, now_s
        elapsed_s = max(now_s - before_s, 1e-9)
        prompt = (stats.num_prompt_tokens - before.num_prompt_tokens) / elapsed_s
        generation = (stats.num_generated_tokens - before.num_generated_tokens) / elapsed_s
        at_rest = stats.steps == before.steps and not stats.num_running and not stats.num_waiting
        self.is_idle, self._was_at_rest = at_rest and self._was_at_rest, at_rest
        text = (
            f"{self._name}: Avg prompt throughput: {prompt:.1f} tokens/s, "
            f"Avg generation throughput: {generation:.1f} tokens/s, "
            f"Running: {stats.num_running} reqs, Waiting: {stats.num_waiting} reqs, "
            f"KV cache usage: {100 * kv_use(stats):.1f}%, "
            f"Prefix cache hit rate: {100 * (hit_rate(stats) or 0.0):.1f}%"
        )
        if drafted := stats.num_draft_tokens - before.num_draft_tokens:
            accepted = stats.num_accepted_tokens - before.num_accepted_tokens
            text += f", Draft acceptance rate: {100 * accepted / drafted:.1f}%"
        return text


def cache_line(report: EngineReport, index: int = 0) -> str:
    """A line about the size of an engine's cache."""
    facts: dict[str, Any] = report.facts
    return (
        f"Engine {index:03d}: KV cache size: {facts['kv_cache_tokens']:,} tokens, Maximum concurrency for "
        f"{facts['max_model_len']:,} tokens per request: {facts['kv_cache_requests']:.2f}x"
    )
