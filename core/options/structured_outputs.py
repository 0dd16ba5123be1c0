"""vLLM's structured_outputs_config: which library follows grammars, and how strict JSON is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.ipc.failure import OptionError

BACKENDS: Mapping[str, tuple[str, ...]] = {
    "auto": ("llguidance",),
    "llguidance": ("llguidance",),
    "guidance": ("llguidance",),
    "xgrammar": ("llguidance",),
    "outlines": ("llguidance",),
    "lm-format-enforcer": ("llguidance",),
}
"""vLLM's names for them, and the libraries in order: one is for what those before it refuse. The last
three name libraries that are not used here: what they follow, llguidance does, and the plan's decisions say so."""


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """How every request's grammar is followed. A request may ask for more strictness, and not for less."""

    backends: tuple[str, ...] = BACKENDS["auto"]
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False


def structured_outputs_of(config: Mapping[str, Any]) -> StructuredOutputs:
    """What `structured_outputs_config` asks for. Raises OptionError, naming the field."""
    values = {name: value for name, value in config.items() if value is not None}
    # vLLM's old form of the backend: xgrammar:no-fallback,disable-any-whitespace
    backend, _, words = str(values.pop("backend", "auto")).partition(":")
    values |= {
        word.strip().replace("-", "_").replace("no_fallback", "disable_fallback"): True
        for word in words.split(",")
        if word
    }
    if backend not in BACKENDS:
        raise OptionError(f"structured_outputs_config has backend={backend!r}; there are {', '.join(BACKENDS)}")
    known = [name for name in StructuredOutputs.__struct_fields__ if name != "backends"]
    if values.pop("enable_in_reasoning", True) is not True:
        raise OptionError(
            "structured_outputs_config has enable_in_reasoning=false, which cannot apply: a grammar holds from the "
            "first token on, for reasoning too; leave it out"
        )
    for name, value in values.items():
        if name not in known:
            raise OptionError(
                f"structured_outputs_config has no {name!r}; it has backend, {', '.join(known)} and enable_in_reasoning"
            )
        if not isinstance(value, bool):
            raise OptionError(f"structured_outputs_config has {name}={value!r}; it must be true or false")
    return StructuredOutputs(backends=BACKENDS[backend], **values)
