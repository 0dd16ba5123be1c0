"""Names of properties that a schema does not declare, for llguidance: in the only way in which JSON has to write them.

Where an object is open to other properties, the library takes any JSON string for their names, and so a declared name
too if it is written with an escape that it does not need (`"\\u0061"` for `a`). Its value is then that of any property,
and breaks the declared schema. Names that have to match a pattern are written with needed escapes alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

_VALUES = ("enum", "const", "default", "examples")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_ANY = "^(?s:.*)$"
_TWICE = re.compile(r"[\x00-\x1f]")
"""Characters for which JSON has several escapes."""


def with_exact_names(schema: Any, where: str = "") -> Any:
    """The schema with patterns for the names that it does not declare. Raises ValueError, with the place, for a
    declared name that needs an escape of which there are several."""
    if isinstance(schema, list):
        return [with_exact_names(each, f"{where}/{index}") for index, each in enumerate(schema)]
    if not isinstance(schema, dict):
        return schema
    found = dict[str, Any]()
    for name, value in schema.items():
        if name in _NAMED and isinstance(value, dict):
            found[name] = {each: with_exact_names(inner, f"{where}/{name}/{each}") for each, inner in value.items()}
        else:
            found[name] = value if name in _VALUES else with_exact_names(value, f"{where}/{name}")
    properties, others = found.get("properties"), found.get("additionalProperties", True)
    if not isinstance(properties, dict) or not properties or others is False or "patternProperties" in found:
        return found
    required = found.get("required")
    asked = [each for each in required if isinstance(each, str)] if isinstance(required, list) else []
    declared = properties | {each: others for each in asked if each not in properties}
    for name in declared:
        if _TWICE.search(name):
            raise ValueError(
                f"the property {name!r} is not followed in an object that is open to others, as JSON may write its "
                f"name in several ways: set additionalProperties to false (at {where or '/'})"
            )
    is_any = others is True or others == {}
    pattern = _ANY if is_any else f"^(?:{_others(declared)})$"
    return {**found, "properties": declared, "patternProperties": {pattern: others}, "additionalProperties": False}


def _others(names: Iterable[str]) -> str:
    """An expression of all texts but the names."""
    by_first = dict[str, list[str]]()
    is_name = False
    for name in names:
        is_name |= not name
        if name:
            by_first.setdefault(name[0], []).append(name[1:])
    if not by_first:
        return "(?s:.)+" if is_name else "(?s:.)*"
    apart = "".join(f"\\x{{{ord(each):x}}}" for each in by_first)
    parts = [f"[^{apart}](?s:.)*"]
    parts += [f"\\x{{{ord(each):x}}}(?:{_others(rests)})" for each, rests in by_first.items()]
    return "|".join(parts) if is_name else "(?:" + "|".join(parts) + ")?"
