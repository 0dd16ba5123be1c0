"""The engine's load in a response header, for load balancers that read ORCA reports.

ORCA (Open Request Cost Aggregation) is a format of the xDS project, which Envoy reads. A request that names a format in
a header gets the report; the metrics have vLLM's names.
"""

from __future__ import annotations

import json

from headrace.frontend.client.engine_metrics import kv_use
from headrace.frontend.fleet.pool import Engine

LOAD_FORMAT_HEADER = b"endpoint-load-metrics-format"
_HEADER = b"endpoint-load-metrics"
_TIMEOUT_S = 0.5


async def load_headers(engine: Engine, form: str) -> list[tuple[bytes, bytes]]:
    """The header; none for a format other than TEXT and JSON, or if the engine does not answer in time."""
    stats = await engine.stats(_TIMEOUT_S) if form.upper() in ("TEXT", "JSON") else None
    if stats is None:
        return []
    told = {"kv_cache_usage_perc": round(kv_use(stats), 6), "num_requests_waiting": stats.num_waiting}
    if form.upper() == "JSON":
        text = "JSON " + json.dumps({"named_metrics": told})
    else:
        text = "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in told.items())
    return [(_HEADER, text.encode())]
