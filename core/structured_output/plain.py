"""Finds forms that are cheap to compile, so that they do not wait for others, which may take a second each.

They are JSON schemas of bounded size without expressions and references, with few alternatives and a bounded sum of
counts, so that costs cannot multiply. A library may crash on them all the same, so the trial process tries them too.
"""

from __future__ import annotations

import json
from typing import Any

from headrace.core.options.structured_outputs import WHITESPACE
from headrace.ipc.messages import StructuredOutput

MOST_CHARACTERS = 1 << 14
"""Length of a schema, or of all choices together."""
MOST_SCHEMAS = 200
"""Schemas within a schema, including itself."""
MOST_DEPTH = 16
MOST_ALTERNATIVES = 16
"""Alternatives in all `anyOf` and lists of types together."""
MOST_COUNTED = 2000
"""Sum of all values of minLength, maxLength, minItems and maxItems."""
LEAST_NUMBER, MOST_NUMBER = 1e-6, 1e9
"""Range of the absolute values of minimum, maximum and their exclusive forms."""
MOST_DIGITS = 20
"""Digits of such a bound."""
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_NOTES = ("title", "description", "default", "examples", "$schema", "$comment", "deprecated", "readOnly", "writeOnly")
_CHOICES = ("enum", "const", "required")


def is_plain(wanted: StructuredOutput) -> bool:
    if len(wanted.text) > MOST_CHARACTERS or wanted.whitespace_pattern not in ("", *WHITESPACE.values()):
        return False
    match wanted.kind:
        case "json_object" | "choice":
            return True
        case "json":
            try:
                return _Count().admits(json.loads(wanted.text), 0)
            except (ValueError, RecursionError):
                return False
    return False


class _Count:
    """Counts in one schema of everything that is bounded."""

    def __init__(self) -> None:
        self._schemas = self._alternatives = self._counted = 0

    def admits(self, schema: Any, depth: int) -> bool:
        self._schemas += 1
        if self._schemas > MOST_SCHEMAS or depth > MOST_DEPTH:
            return False
        if isinstance(schema, bool):
            return True
        return isinstance(schema, dict) and all(self._keyword(name, value, depth) for name, value in schema.items())

    def _keyword(self, name: str, value: Any, depth: int) -> bool:
        if name == "properties":
            return isinstance(value, dict) and all(self.admits(each, depth + 1) for each in value.values())
        if name == "anyOf":
            return self._has_room(value) and all(self.admits(each, depth + 1) for each in value)
        if name == "items":
            return self.admits(value, depth + 1)
        if name == "type":
            return isinstance(value, str) or self._has_room(value)
        if name in _COUNTS:
            return self._counts(value)
        if name in _BOUNDS:
            return _is_short(value)
        return name in _NOTES or name in _CHOICES or (name == "additionalProperties" and isinstance(value, bool))

    def _has_room(self, alternatives: Any) -> bool:
        self._alternatives += len(alternatives) if isinstance(alternatives, list) else MOST_ALTERNATIVES + 1
        return self._alternatives <= MOST_ALTERNATIVES

    def _counts(self, value: Any) -> bool:
        self._counted += value if isinstance(value, int) and value >= 0 else MOST_COUNTED + 1
        return self._counted <= MOST_COUNTED


def _is_short(number: Any) -> bool:
    return isinstance(number, int | float) and (
        number == 0 or (LEAST_NUMBER <= abs(number) <= MOST_NUMBER and len(repr(number)) <= MOST_DIGITS)
    )
