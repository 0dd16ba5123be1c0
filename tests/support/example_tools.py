"""Example tools for tests: one without parameters, one with simple parameters, and one whose schema has an enum, bounds
and a reference."""

from __future__ import annotations

from typing import Any

NOW = {"type": "function", "function": {"name": "now"}}


def weather(**more: Any) -> dict[str, Any]:
    """A tool with the parameters city and days. more: schemas of further parameters."""
    properties = {"city": {"type": "string"}, "days": {"type": "integer"}, **more}
    return {
        "type": "function",
        "function": {"name": "get_weather", "parameters": {"type": "object", "properties": properties}},
    }


DETAILED = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"type": "string", "enum": ["c", "f"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "deep": {"$ref": "#/$defs/deep"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"deep": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}},
}
FORCED: list[dict[str, Any]] = [{"type": "function", "function": {"name": "get_weather", "parameters": DETAILED}}, NOW]
