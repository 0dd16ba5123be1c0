"""What a tool's schema says of each parameter. Formats that write parameters one by one need that: which there are,
which must come, and which types a value may have, since they write texts without quotes.

A schema may say it in other places than `properties`: behind references, and in alternatives and parts (`anyOf`,
`oneOf`, `allOf`, `then`, `else`) of the whole or of one property.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Set
from typing import Any
from urllib.parse import unquote

MOST_FOLLOWED, MOST_DEPTH = 1000, 30
"""Most references, alternatives and parts that are followed in one schema, and how many within each other: they may
multiply, or form rings."""
_KEYS_AS_ONE = 16
"""So many keys that are copied count as one that is followed."""
ALTERNATIVES, PARTS = ("anyOf", "oneOf"), "allOf"
_TYPES = {
    **dict.fromkeys(("str", "text"), "string"),
    **dict.fromkeys(("int", "long"), "integer"),
    **dict.fromkeys(("float", "double"), "number"),
    **dict.fromkeys(("dict", "map"), "object"),
    **dict.fromkeys(("list", "tuple"), "array"),
    **{"bool": "boolean", "none": "null"},
}
"""Names that clients give types, beside those of JSON Schema."""
_IMPLIED = {
    **dict.fromkeys(("properties", "additionalProperties", "patternProperties", "required"), "object"),
    **dict.fromkeys(("items", "prefixItems", "minItems", "maxItems", "uniqueItems"), "array"),
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), "string"),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), "number"),
}
"""The types of which keywords say something."""


def with_all_properties(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of an object, with all that is said of its properties in `properties` and `required`, and without
    references at the top of each property and of its alternatives."""
    reader = _Reader(schema)
    properties, required = reader.read(schema, 0)
    more = schema.get("additionalProperties")
    others = {"additionalProperties": reader.plain(more, 0)} if isinstance(more, Mapping) else {}
    needed = [each for each in properties if each in required]
    return {**schema, **others, "properties": properties, "required": needed}


class Parameters:
    """What a reader of calls needs to know of a tool's parameters."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        whole = with_all_properties(schema)
        self._schemas, others = whole["properties"], whole.get("additionalProperties")
        self._others = others if isinstance(others, Mapping) else {}

    @property
    def names(self) -> Set[str]:
        return self._schemas.keys()

    def types(self, name: str) -> frozenset[str]:
        """The types of this parameter's values; empty if they are not known."""
        return types_of(self.schema(name))

    def schema(self, name: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._schemas.get(name, self._others)
        return found


def types_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a schema without references allows, as far as it states or implies them."""
    declared = schema.get("type")
    named = [declared] if isinstance(declared, str) else declared if isinstance(declared, list) else ()
    types = {_TYPES.get(each.lower(), each.lower()) for each in named if isinstance(each, str)}
    for name in ALTERNATIVES:
        types.update(*(types_of(each) for each in _schemas(schema.get(name))))
    for stated in filter(None, map(types_of, _schemas(schema.get(PARTS)))):
        types = types & stated or types | stated
    if not types and isinstance(schema.get("enum"), list):
        types = {_type_of(each) for each in schema["enum"]}
    elif not types and "const" in schema:
        types = {_type_of(schema["const"])}
    return frozenset(types or {type_ for name, type_ in _IMPLIED.items() if name in schema})


def _type_of(value: Any) -> str:
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def _schemas(listed: Any) -> Iterable[Mapping[str, Any]]:
    return [each for each in listed if isinstance(each, Mapping)] if isinstance(listed, list) else ()


class _Reader:
    def __init__(self, whole: Mapping[str, Any]) -> None:
        self._whole, self._left = whole, MOST_FOLLOWED

    def read(self, schema: Mapping[str, Any], depth: int) -> tuple[dict[str, dict[str, Any]], set[str]]:
        """An object's properties, and those that it must have."""
        schema, found = self._followed(schema), dict[str, dict[str, Any]]()
        own, needed = schema.get("properties"), schema.get("required")
        own = own if isinstance(own, Mapping) else {}
        self._left -= len(own) // _KEYS_AS_ONE
        for name, each in own.items():
            found[name] = self.plain(each, depth) if isinstance(each, Mapping) else {}
        required = {each for each in needed if isinstance(each, str)} if isinstance(needed, list) else set()
        for more, also in self._read_all(schema.get(PARTS), depth):
            _join(found, more, PARTS)
            required |= also
        for name in ALTERNATIVES:
            ways, together = self._read_all(schema.get(name), depth), dict[str, dict[str, Any]]()
            for more, _ in ways:
                _join(together, more, "anyOf")
            _join(found, together, PARTS)
            required |= set.intersection(*(also for _, also in ways)) if ways else set()
        for more, _ in self._read_all([schema.get("then"), schema.get("else")], depth):
            found |= {name: each for name, each in more.items() if name not in found}
        return found, required

    def _read_all(self, schemas: Any, depth: int) -> list[tuple[dict[str, dict[str, Any]], set[str]]]:
        return [self.read(each, depth + 1) for each in _schemas(schemas) if self._may_follow(depth)]

    def _may_follow(self, depth: int) -> bool:
        self._left -= 1
        return self._left >= 0 and depth < MOST_DEPTH

    def plain(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        """The schema without references at its top, and at that of its alternatives and parts."""
        plain = self._followed(schema)
        for name in (*ALTERNATIVES, PARTS):
            if isinstance(plain.get(name), list):
                plain[name] = [
                    self.plain(each, depth + 1) if isinstance(each, Mapping) and self._may_follow(depth) else each
                    for each in plain[name]
                ]
        match plain.get(PARTS):
            case [dict() as only]:  # as pydantic writes a reference that has a default
                plain = {**only, **{name: each for name, each in plain.items() if name != PARTS}}
        return plain

    def _followed(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """The schema with what its reference names. One that cannot be followed is left."""
        plain = dict(schema)
        self._left -= len(plain) // _KEYS_AS_ONE
        while "$ref" in plain and self._may_follow(0):
            target = _at(self._whole, plain["$ref"])
            if not isinstance(target, Mapping):
                break
            self._left -= len(target) // _KEYS_AS_ONE
            del plain["$ref"]
            plain = {**target, **plain}
        return plain


def _at(whole: Mapping[str, Any], reference: Any) -> Any:
    """The part of the schema that a reference within it names; None if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: Any = whole
    for part in unquote(reference[1:]).split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and part.isdecimal() and int(part) < len(found):
            found = found[int(part)]
        elif isinstance(found, Mapping):
            found = found.get(part)
        else:
            return None
    return found


def _join(found: dict[str, dict[str, Any]], more: Mapping[str, dict[str, Any]], how: str) -> None:
    for name, each in more.items():
        before = found.get(name)
        if before is None or before == each:
            found[name] = each
        else:
            found[name] = {how: [before, each]}


def with_properties_apart(schema: Mapping[str, Any]) -> dict[str, Any]:
    """`with_all_properties`, where each property's schema, with the definitions of the whole, can stand alone."""
    whole = with_all_properties(schema)
    if not _refers_elsewhere(whole["properties"]):
        return whole
    return {**whole, "properties": _moved(whole["properties"]), "$defs": {"whole": _moved(schema)}}


def _refers_elsewhere(schema: Any) -> bool:
    """Whether a reference leads to another place than to the definitions."""
    written = json.dumps(schema)
    return '"$ref": "#' in written and '"$ref": "#' in written.replace('"$ref": "#/$defs/', "").replace(
        '"$ref": "#/definitions/', ""
    )


def _moved(schema: Any) -> Any:
    """The schema as a part of one that has the former whole among its definitions."""
    if isinstance(schema, list):
        return [_moved(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {name: _moved(each) for name, each in schema.items()}
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
        moved["$ref"] = f"#/$defs/whole{reference[1:]}"
    return moved
