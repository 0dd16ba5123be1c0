"""The engine's load in the header of an answer, for load balancers that read ORCA's reports.

ORCA (Open Request Cost Aggregation) is of the xDS project, which Envoy reads. A request that
names a format gets the report in it; the names are vLLM's.
"""

from __future__ import annotations

import json

from headrace.frontend.client.engine_metrics import kv_use
from headrace.frontend.fleet.pool import Engine

LOAD_FORMAT_HEADER = b"endpoint-load-metrics-format"
_HEADER = b"endpoint-load-metrics"
_TIMEOUT_S = 0.5


async def load_headers(engine: Engine, form: str) -> list[tuple[bytes, bytes]]:
    """None for a format that is neither TEXT nor JSON, and for an engine that does not answer in time."""
    stats = await engine.stats(_TIMEOUT_S) if form.upper() in ("TEXT", "JSON") else None
    if stats is None:
        return []
    told = {"kv_cache_usage_perc": round(kv_use(stats), 6), "num_requests_waiting": stats.num_waiting}
    if form.upper() == "JSON":
        text = "JSON " + json.dumps({"named_metrics": told})
    else:
        text = "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in told.items())
    return [(_HEADER, text.encode())]
