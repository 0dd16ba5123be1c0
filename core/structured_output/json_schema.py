"""Changes to JSON schemas before a library gets them, and the search for the part of a schema that it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from headrace.core.structured_output.exact_numbers import read_float

MOST_TRIES = 200
"""Most parts of a schema that are compiled separately to find the one that a library refuses."""
_IN_DICTS = ("properties", "patternProperties", "$defs", "definitions")
_IN_LISTS = ("prefixItems", "anyOf", "allOf", "oneOf", "items")
_LARK_PARTS = re.compile(r""""(?:\\.|[^"\\\n])*+"?|//[^\n]*|/(?:\\.|[^/\\\n])++/?|%json\s*""")
"""Strings, comments and regular expressions of a Lark grammar, in which %json is no schema; and the %json of a schema.

A string or an expression without an end, which no valid grammar has, matches up to the end of its line. Otherwise each
quote within it would be tried as a start.
"""
_ALONE = ("items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else")


def without_additional_properties(schema: Any) -> Any:
    """Closes objects: those with `properties` get additionalProperties false unless the schema states which others they
    have."""
    if isinstance(schema, list):
        return [without_additional_properties(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {
        name: value if name in ("enum", "const", "default", "examples") else without_additional_properties(value)
        for name, value in schema.items()
    }
    if isinstance(schema.get("properties"), dict) and "patternProperties" not in schema:
        changed.setdefault("additionalProperties", False)
    return changed


def with_schemas_in_lark(lark: str, change: Callable[[Any], Any]) -> str:
    """Applies `change` to all schemas of a Lark grammar (those after %json)."""
    parts, at = list[str](), 0
    while (found := _LARK_PARTS.search(lark, at)) is not None:
        parts.append(lark[at : found.end()])
        at = found.end()
        if found[0].startswith("%json"):
            schema, at = json.JSONDecoder(parse_float=read_float).raw_decode(lark, at)
            parts.append(json.dumps(change(schema)))
    return "".join([*parts, lark[at:]])


def schemas_in_lark(lark: str) -> list[Any]:
    """All schemas of a Lark grammar (those after %json). Raises ValueError for one that is not JSON."""
    found: list[Any] = []

    def keep(schema: Any) -> Any:
        found.append(schema)
        return schema

    with_schemas_in_lark(lark, keep)
    return found


def find_culprit(schema: Any, problem: str, problem_of: Callable[[Any], str]) -> str:
    """The JSON pointer of the innermost part of a schema that alone has the problem; "" if only the whole has it.

    problem_of: returns why a schema cannot be compiled, or "".
    """
    definitions = {
        name: schema[name] for name in ("$defs", "definitions") if isinstance(schema, dict) and name in schema
    }
    tries = 0

    def innermost(part: Any, pointer: str) -> str:
        nonlocal tries
        for name, inner in _parts(part):
            tries += 1
            if tries > MOST_TRIES:
                break
            alone = {**definitions, **inner} if isinstance(inner, dict) else inner
            if isinstance(alone, dict) and problem_of(alone) == problem:
                return innermost(inner, f"{pointer}/{name}")
        return pointer

    return innermost(schema, "")


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """The schemas directly within a schema, each with its relative JSON pointer."""
    if not isinstance(schema, dict):
        return
    for name in _IN_DICTS:
        inner = schema.get(name)
        for key, value in inner.items() if isinstance(inner, dict) else ():
            yield f"{name}/{key.replace('~', '~0').replace('/', '~1')}", value
    for name in _IN_LISTS:
        inner = schema.get(name)
        for index, value in enumerate(inner) if isinstance(inner, list) else ():
            yield f"{name}/{index}", value
    for name in _ALONE:
        if isinstance(schema.get(name), dict):
            yield name, schema[name]
