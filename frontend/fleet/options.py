"""The router's options that users set, declared once for `headrace serve` and for LLM and AsyncLLM."""

from __future__ import annotations

from typing import Annotated

import msgspec

from headrace.core.options.option import Option
from headrace.core.options.values import read_options
from headrace.frontend.fleet.decisions import RouterOptions

ENGINES = "Server engines"

HeartbeatTimeout = Annotated[
    float,
    Option(
        ENGINES,
        "How long an engine that runs requests may be silent (it normally reports every second) before its requests "
        "continue on another engine; 30 times as long if it runs on this host and its process is working. A request "
        "that has moved for this reason and got no token since moves again after 4 times as long",
        "seconds",
        minimum=0.1,
        maximum=3600,
    ),
]
HEARTBEAT_TIMEOUT_S = RouterOptions().suspect_after_s


class _OptionsOfCalls(msgspec.Struct):
    heartbeat_timeout: HeartbeatTimeout = HEARTBEAT_TIMEOUT_S


def router_options(heartbeat_timeout: float | None) -> RouterOptions:
    """None asks for the default. Raises OptionError for a bad value."""
    options, _ = read_options(_OptionsOfCalls, {"heartbeat_timeout": heartbeat_timeout})
    return RouterOptions(suspect_after_s=options.heartbeat_timeout)
