"""The schema of 20 fields that `structured.py` and `structured_workload.py` use. Imports only the standard library."""

from __future__ import annotations

from typing import Any

WORDS = ("red", "green", "blue", "white")


def schema_of(nth: int = 0, fields: int = 20) -> dict[str, Any]:
    """An object with strings, numbers, enums, arrays and objects; each `nth` gives a different schema."""
    kinds: list[dict[str, Any]] = [
        {"type": "string", "minLength": 12, "maxLength": 24},
        {"type": "integer", "minimum": 0, "maximum": 1000 + nth},
        {"enum": [f"{word} {nth}" for word in WORDS]},
        {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 4},
        {"type": "object", "properties": {"on": {"type": "boolean"}, "id": {"type": "string", "minLength": 8}}},
    ]
    properties = {f"field_{index}_{nth}": kinds[index % len(kinds)] for index in range(fields)}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
