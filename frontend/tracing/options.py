"""The options of traces, as `headrace serve`, LLM and AsyncLLM take them. Imports nothing of OpenTelemetry."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from headrace.ipc.failure import OptionError

DETAILS = {"model": ("forward",), "worker": ("execute",), "all": ("schedule", "execute", "forward")}
"""The spans of each step that a value of collect_detailed_traces asks for."""
NAMES = ("otlp_traces_endpoint", "collect_detailed_traces")
"""Options of vLLM's engine that here are those of whoever submits the requests."""


def details_of(text: str | None) -> frozenset[str]:
    """The spans of steps that a value of collect_detailed_traces asks for: one of DETAILS, or several with commas.
    Raises OptionError."""
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    if unknown := [name for name in names if name not in DETAILS]:
        raise OptionError(f"collect_detailed_traces={unknown[0]} is unknown; allowed: {', '.join(DETAILS)}")
    return frozenset(span for name in names for span in DETAILS[name])


def check_traces(endpoint: str | None, details: str | None) -> None:
    """Raises OptionError for options that would have no effect."""
    if details_of(details) and endpoint is None:
        raise OptionError("collect_detailed_traces adds to the traces of otlp_traces_endpoint: give that too")


def take_traces(options: MutableMapping[str, Any]) -> tuple[str | None, str | None]:
    """Removes NAMES from an engine's options and returns their values. Raises OptionError."""
    endpoint, details = (options.pop(name, None) for name in NAMES)
    for name, value in zip(NAMES, (endpoint, details), strict=True):
        if not isinstance(value, str | None):
            raise OptionError(f"{name} must be a text, not {value!r:.100}")
    check_traces(endpoint, details)
    return endpoint, details
