"""vLLM's reasoning_config: how an answer's reasoning is set off, and what ends it where its budget is spent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.ipc.failure import OptionError


class Reasoning(msgspec.Struct, frozen=True, kw_only=True):
    """Empty texts stand for what the format of reasoning has."""

    reasoning_parser: str = ""
    """The format of requests that bring none, as frontends know it; "" for none."""
    reasoning_start_str: str = ""
    reasoning_end_str: str = ""
    """What is forced when a thinking_token_budget is spent. It holds the format's own end, and may say more before."""


def reasoning_of(config: Mapping[str, Any], reasoning_parser: str) -> Reasoning:
    """What the options `reasoning_config` and, for the format, `structured_outputs_config` ask for.

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
