"""The option `lora_modules`: adapters that a server has from its start."""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec

from headrace.ipc.failure import OptionError
from headrace.ipc.struct_types import threadsafe


class LoRAModulePath(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of them, under vLLM's name and with its fields."""

    name: str
    path: str
    base_model_name: str | None = None
    is_3d_lora_weight: bool = False


FORM = 'NAME=PATH, or JSON {"name": ..., "path": ..., "base_model_name": ..., "is_3d_lora_weight": ...}'


def parse_lora_modules(given: Sequence[str]) -> tuple[LoRAModulePath, ...]:
    """In their order, each of a name of its own. Raises OptionError."""
    found: dict[str, LoRAModulePath] = {}
    for text in given:
        for each in _modules_in(text):
            if not each.name or not each.path:
                raise _bad(text, f"a name and a path are needed: {FORM}")
            if each.name in found:
                raise _bad(text, f"there is an adapter {each.name!r} already")
            found[each.name] = each
    return tuple(found.values())


def _modules_in(text: str) -> Sequence[LoRAModulePath]:
    if not text.lstrip().startswith(("{", "[")):
        name, equals, path = text.partition("=")
        if not equals:
            raise _bad(text, f"it must be {FORM}")
        return [LoRAModulePath(name.strip(), os.path.expanduser(path.strip()))]
    try:
        several = msgspec.json.decode(text, type=threadsafe(LoRAModulePath | list[LoRAModulePath]))
    except msgspec.MsgspecError as error:
        raise _bad(text, f"{error}; it must be {FORM}") from None
    return several if isinstance(several, list) else [several]


def _bad(text: str, why: str) -> OptionError:
    return OptionError(f"lora_modules={text[:200]}: {why}")
