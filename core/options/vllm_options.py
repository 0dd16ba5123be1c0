"""vLLM's options that Headrace lacks: which are renamed, which pass silently, and which are refused and why.

The rule: such an option passes silently at a value that asks for nothing, that is, vLLM's own default or what Headrace
does anyway; None always passes. Every other value is refused by name with the reason or, if no answer depends on the
option, passes with a note. So a script that sets defaults explicitly runs unchanged, and no option is silently ignored.

The names are rows of vllm_options.toml, which is read when a name is met that is none of Headrace's options.
compilation_config.py has those of which parts are options here.
"""

from __future__ import annotations

import contextlib
import functools
import json
import tomllib
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from headrace.core.options import compilation_config


class Unsupported(msgspec.Struct, frozen=True):
    """An option of vLLM's that Headrace lacks."""

    reason: str
    """Ends the sentence 'NAME=VALUE is refused: ...'."""
    passes: tuple[Any, ...]
    """Values that ask for nothing."""
    short: str = ""
    """The option's single-dash name."""
    is_harmless: bool = False
    """No answer depends on the option: every value passes, with a note."""

    @property
    def is_flag(self) -> bool:
        return bool(self.passes) and all(isinstance(value, bool) for value in self.passes)


@functools.cache
def _file() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("vllm_options.toml").read_text(encoding="utf-8"))


@functools.cache
def unsupported_options() -> Mapping[str, Unsupported]:
    """vLLM's options that Headrace lacks, by name."""
    short = {name: letters for letters, name in _file()["short"].items()}
    return types.MappingProxyType(
        {
            name: Unsupported(reason, tuple(passes), short.get(name, ""), is_harmless)
            for section, is_harmless in (("unsupported", False), ("without_effect", True))
            for reason, rows in _file()[section].items()
            for name, passes in rows.items()
        }
    )


@functools.cache
def renamed_options() -> Mapping[str, str]:
    """Retired names and their successors. A successor is `option`, or `option.key` for a key of a JSON object (the
    retired option's value is JSON, or text with `option.key:text`), or `option=value`."""
    return types.MappingProxyType(_file()["renamed"])


def taken_options() -> Mapping[str, Any]:
    """vLLM's options that Headrace lacks and takes at some values, with a value of each that asks for nothing."""
    passing = {name: each.passes[0] if each.passes else None for name, each in unsupported_options().items()}
    return {**passing, **dict.fromkeys(renamed_options()), **compilation_config.DEFAULTS}


def why_no_value(name: str, value: str) -> str | None:
    """Why Headrace's option lacks a value that vLLM's option of the same name has, and what to use instead. None for
    any other value."""
    found: str | None = _file()["values"].get(name, {}).get(value)
    return found


def is_vllm_option(name: str) -> bool:
    """Whether vLLM has or had an option of this name that Headrace lacks."""
    return name in unsupported_options() or name in renamed_options() or name in compilation_config.DEFAULTS


def successor(name: str) -> str:
    """The option that has replaced a retired name."""
    return renamed_options()[name].partition("=")[0].partition(".")[0]


def rename(name: str, value: Any) -> tuple[str, Any, str]:
    """The successor of a retired name, its value, and a note for the user. If the given value asks for nothing, the
    value is None and, for a given None, the note is empty.

    Raises ValueError for an invalid value.
    """
    target, _, fixed = renamed_options()[name].partition("=")
    option, _, key = target.partition(".")
    if value is None:
        return option, None, ""
    if fixed:
        asked = value if isinstance(value, bool) else {"true": True, "false": False}.get(str(value).lower())
        if asked is None:
            raise ValueError(f"{name}={value}: it must be true or false")
        return option, fixed if asked else None, f"{name} is retired; use {option}={fixed}"
    if key:
        key, _, form = key.partition(":")
        if isinstance(value, str) and form != "text":
            try:
                value = json.loads(value)
            except ValueError as error:
                raise ValueError(f"{name}={value}: it must be JSON ({error})") from None
        return option, {key: value}, f"{name} is now called {option}={json.dumps({key: '...'})}"
    return option, value, f"{name} is now called {option}"


def check_unsupported(name: str, value: Any, spelled: str) -> tuple[str, str]:
    """The problem with this value of an unsupported option, and a note for the user; each may be empty."""
    option = unsupported_options()[name]
    if value is None or any(_same(value, passing) for passing in option.passes):
        return "", ""
    if option.is_harmless:
        return "", f"{spelled}={value} has no effect: {option.reason}"
    return f"{spelled}={value} is refused: {option.reason}", ""


def _same(value: Any, passing: Any) -> bool:
    """Whether the values are equal; `value` may be text from a command line or a config file."""
    if isinstance(value, bool) != isinstance(passing, bool) and not isinstance(value, str):
        return False
    if isinstance(value, str) and isinstance(passing, dict | list):
        with contextlib.suppress(ValueError):
            return bool(json.loads(value) == passing)
        return value.lower() == "none"
    if isinstance(value, str) and not isinstance(passing, str):
        return value.lower() == json.dumps(passing) or value.lower() == "none"
    return bool(value == passing)
