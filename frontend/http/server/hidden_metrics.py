"""Former names of metrics in vLLM, which /metrics has on request only (show_hidden_metrics_for_version)."""

from __future__ import annotations

import re

from headrace.ipc.failure import OptionError

HIDDEN = {
    "gpu_cache_usage_perc": ("kv_cache_usage_perc", (0, 10)),
    "gpu_prefix_cache_queries": ("prefix_cache_queries", (0, 10)),
    "gpu_prefix_cache_hits": ("prefix_cache_hits", (0, 10)),
    "time_per_output_token_seconds": ("inter_token_latency_seconds", (0, 11)),
}
"""By former name: the name now, and the last version of vLLM that had the former one."""
_VERSION = re.compile(r"v?([0-9]{1,4})\.([0-9]{1,4})(?:[.+a-z][0-9a-z.+]*)?", re.ASCII)


def hidden_names(version: str | None) -> list[str]:
    """The former names that this version of vLLM, such as 0.10, had; none for None. Raises OptionError."""
    if version is None:
        return []
    if not (found := _VERSION.fullmatch(version)):
        raise OptionError(f"show_hidden_metrics_for_version={version:.100}: give a version of vLLM, such as 0.10")
    asked = (int(found[1]), int(found[2]))
    return [name for name, (_, last) in HIDDEN.items() if asked <= last]
