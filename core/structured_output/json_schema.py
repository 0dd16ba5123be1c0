"""What is done to a JSON schema before a library takes it, and how the part that a library refuses is found."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from headrace.core.structured_output.structural_tag import format_of, with_schemas
from headrace.ipc.messages import StructuredOutput

MOST_TRIES = 200
"""Parts of a schema that are compiled alone, at most, to find the one that cannot be."""
_IN_DICTS = ("properties", "patternProperties", "$defs", "definitions")
_IN_LISTS = ("prefixItems", "anyOf", "allOf", "oneOf", "items")
_LARK_PARTS = re.compile(r""""(?:\\.|[^"\\\n])*+"?|//[^\n]*|/(?:\\.|[^/\\\n])++/?|%json\s*""")
"""Texts, comments and expressions, in which nothing is a schema, and what stands before one.

A text or an expression without its end, which no grammar has, goes to the end of its line: else each quote within would
be tried as a beginning.
"""
_ALONE = ("items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else")


def without_additional_properties(schema: Any) -> Any:
    """Objects whose properties are named have no others, unless the schema says itself what others they have."""
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


def closed(wanted: StructuredOutput) -> StructuredOutput:
    """With that done to every schema of a form, where it is asked for.

    Raises ValueError, KeyError and TypeError for what is no form of its kind."""
    if not wanted.disable_additional_properties:
        return wanted
    text = wanted.text
    if wanted.kind == "json":
        text = json.dumps(without_additional_properties(json.loads(text)))
    elif wanted.kind == "structural_tag":
        form = with_schemas(format_of(json.loads(text)), without_additional_properties)
        text = json.dumps({"type": "structural_tag", "format": form})
    elif wanted.kind == "grammar":
        text = with_schemas_in_lark(text, without_additional_properties)
    return msgspec.structs.replace(wanted, text=text)


def with_schemas_in_lark(lark: str, change: Callable[[Any], Any]) -> str:
    """A grammar with its schemas changed, which stand behind %json."""
    parts, at = list[str](), 0
    while (found := _LARK_PARTS.search(lark, at)) is not None:
        parts.append(lark[at : found.end()])
        at = found.end()
        if found[0].startswith("%json"):
            schema, at = json.JSONDecoder().raw_decode(lark, at)
            parts.append(json.dumps(change(schema)))
    return "".join([*parts, lark[at:]])


def schemas_in_lark(lark: str) -> list[Any]:
    """Those that stand behind %json in a grammar. Raises ValueError for one that is no JSON."""
    found: list[Any] = []

    def keep(schema: Any) -> Any:
        found.append(schema)
        return schema

    with_schemas_in_lark(lark, keep)
    return found


def find_culprit(schema: Any, problem: str, problem_of: Callable[[Any], str]) -> str:
    """The JSON pointer of the innermost part of a schema that has the problem by itself; "" for none but the whole.

    problem_of: why a schema cannot be compiled, "" when it can.
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
    """Schemas directly within a schema, with where they are."""
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
