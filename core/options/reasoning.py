"""vLLM's reasoning_config: the markers of an answer's reasoning, and the text that ends it when its budget is spent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.ipc.failure import OptionError


class Reasoning(msgspec.Struct, frozen=True, kw_only=True):
    """Format and markers of reasoning. An empty marker means the format's own."""

    reasoning_parser: str = ""
    """The frontends' name of the reasoning format for requests that name none; "" for none."""
    reasoning_start_str: str = ""
    reasoning_end_str: str = ""
    """Text that is forced when a thinking_token_budget is spent: the format's end marker, with any text before it."""


def reasoning_of(config: Mapping[str, Any], reasoning_parser: str) -> Reasoning:
    """Reads `reasoning_config`. reasoning_parser: the format that `structured_outputs_config` names, or "".

    Raises OptionError, naming the field.
    """
    known = Reasoning.__struct_fields__
    values = {name: value for name, value in config.items() if value is not None}
    for name, value in values.items():
        if name not in known:
            raise OptionError(f"reasoning_config has no {name!r}; it has {', '.join(known)}")
        if not isinstance(value, str):
            raise OptionError(f"reasoning_config has {name}={value!r}; it must be text")
    named = values.pop("reasoning_parser", "") or reasoning_parser
    if reasoning_parser not in ("", named):
        raise OptionError(
            f"reasoning_config has reasoning_parser={named!r}, and structured_outputs_config {reasoning_parser!r}: "
            "give one of them"
        )
    return Reasoning(reasoning_parser=named, **values)
