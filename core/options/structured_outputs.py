"""vLLM's structured_outputs_config: which library applies grammars, and how strict JSON is."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.ipc.extras import how_to_install
from headrace.ipc.failure import OptionError

BACKENDS: Mapping[str, tuple[str, ...]] = {
    "auto": ("llguidance",),
    "llguidance": ("llguidance",),
    "guidance": ("llguidance",),
    "xgrammar": ("xgrammar", "llguidance"),
    "outlines": ("llguidance",),
    "lm-format-enforcer": ("llguidance",),
}
"""vLLM's names of backends, and the libraries used for each: a library gets the grammars that those before it refuse.
Headrace does not use the libraries of the last two names: llguidance takes their grammars, and a decision of the plan
states it."""
WHITESPACE: Mapping[str, str] = {"outlines": "[ ]?"}
"""The white space between the parts of JSON, as an expression, of names with which vLLM does not write any."""
WHY: Mapping[str, str] = {
    "auto": "backend auto takes it: it follows the most of JSON Schema, and computes nothing before the first token",
    "xgrammar": "for backend xgrammar; the second has what the first does not follow",
}
EXTRAS = {"xgrammar": "xgrammar"}
"""Libraries that need an extra of this package, and the extra's name."""


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """How grammars of requests are applied. A request may ask for more strictness, but not for less."""

    backends: tuple[str, ...] = BACKENDS["auto"]
    whitespace_pattern: str = ""
    """The white space between the parts of JSON where a request names no backend and asks for none; "" for any."""
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    enable_in_reasoning: bool = False
    """A grammar applies from the first token on, including reasoning; else from the end of the reasoning on."""
    reasoning_parser: str = ""
    """The frontends' name of the reasoning format for requests that name none; "" for none."""


def split_backend(value: str) -> tuple[str, dict[str, bool]]:
    """Splits vLLM's old form of a backend, such as xgrammar:no-fallback,disable-any-whitespace, into the name and the
    fields that it sets."""
    backend, _, words = value.partition(":")
    fields = [word.strip().replace("-", "_").replace("no_fallback", "disable_fallback") for word in words.split(",")]
    return backend, dict.fromkeys(filter(None, fields), True)


def structured_outputs_of(config: Mapping[str, Any]) -> StructuredOutputs:
    """Reads `structured_outputs_config`. Raises OptionError, naming the field."""
    values = {name: value for name, value in config.items() if value is not None}
    backend, more = split_backend(str(values.pop("backend", "auto")))
    values |= more
    if backend not in BACKENDS:
        raise OptionError(f"structured_outputs_config has backend={backend!r}; allowed: {', '.join(BACKENDS)}")
    lacking = [name for name in BACKENDS[backend] if name in EXTRAS and importlib.util.find_spec(name) is None]
    if lacking:
        raise OptionError(
            f"structured_outputs_config has backend={backend!r}, and {lacking[0]} is not installed; "
            f"{how_to_install(EXTRAS[lacking[0]])}"
        )
    known = [name for name in StructuredOutputs.__struct_fields__ if name not in ("backends", "whitespace_pattern")]
    for name, value in values.items():
        if name not in known:
            raise OptionError(f"structured_outputs_config has no {name!r}; it has backend, {', '.join(known)}")
        right = ("the name of a format", str) if name == "reasoning_parser" else ("true or false", bool)
        if not isinstance(value, right[1]):
            raise OptionError(f"structured_outputs_config has {name}={value!r}; it must be {right[0]}")
    return StructuredOutputs(backends=BACKENDS[backend], whitespace_pattern=WHITESPACE.get(backend, ""), **values)
