"""Rewrites JSON schemas so that xgrammar applies them fully, and refuses keywords that it would ignore.

Rewritten schemas never allow more than the original:

- The library reads keywords for one type, such as `minLength`, only together with that `type`. A part without `type`
  gets the type of its first such keyword.
- It reads no keyword beside `enum` and `const`. Only the values that `type` allows are kept.
- It requires a name in `required` only if it is among the `properties`, so missing names are added there.
- A text of bounded length gets a pattern instead. For a pattern the library computes masks before the first token; for
  a bounded length it checks most tokens near the text's end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from types import MappingProxyType
from typing import Any

from headrace.core.structured_output.expressions import ExpressionPart, parts_of, written
from headrace.core.structured_output.schema_references import PLAIN_REFERENCE

FOLLOWED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "object": ("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
        "array": ("prefixItems", "items", "minItems", "maxItems"),
        "string": ("minLength", "maxLength", "pattern"),
        "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    }
)
"""Keywords that apply to values of one type."""
_TYPE_OF = {keyword: kind for kind, keywords in FOLLOWED.items() for keyword in keywords}
_ALONE = ("$ref", "enum", "const", "anyOf", "allOf")
"""Keywords beside which the library reads no others."""
_IGNORED = frozenset(
    {
        *("not", "if", "then", "else", "oneOf", "contains", "minContains", "maxContains", "uniqueItems", "multipleOf"),
        *("patternProperties", "propertyNames", "dependentRequired", "dependentSchemas", "dependencies"),
        *("unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef", "$anchor", "$dynamicAnchor"),
        *("additionalItems", "format"),
    }
)
_OBJECT: tuple[type, ...] = (dict,)
_SHAPES: Mapping[str, tuple[tuple[type, ...], str]] = MappingProxyType(
    {
        **dict.fromkeys(("properties", "$defs", "definitions"), (_OBJECT, "an object")),
        **dict.fromkeys(("anyOf", "allOf", "prefixItems", "enum", "required"), ((list,), "a list")),
        **dict.fromkeys(("pattern", "$ref"), ((str,), "a text")),
        "type": ((str, list), "a type, or a list of types"),
    }
)
_NOT_EMPTY = ("anyOf", "allOf", "enum", "type")
_LENGTHS = ("minLength", "maxLength")
_CHARACTER = r'[^"\\\r\n]'
"""A character as the library defines it in texts of bounded length. Written as ranges, its masks would cost more than
those of a bounded length."""
_BEYOND_ASCII = frozenset("DWSpP")
_ESCAPED = (*range(0x20), ord('"'), ord("\\"))
"""Characters that JSON strings contain only as escapes."""
_LEAST_STEP = Decimal("0.000001")
LONGEST_PATTERN = 128
"""Most characters of a bounded text that becomes a pattern: for longer patterns the library computes no masks ahead."""
_PYTHON_TYPES: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {
        "object": (dict,),
        "array": (list,),
        "string": (str,),
        "number": (int, float),
        "integer": (int, float),
        "boolean": (bool,),
        "null": (type(None),),
    }
)


def followed(schema: Any, pointer: str = "") -> Any:
    """The schema rewritten for the library. Raises ValueError, with the place, for parts that it does not support."""
    if isinstance(schema, bool):
        if schema:
            return {}
        raise ValueError(f"it does not follow false (at {pointer or '/'})")
    if not isinstance(schema, dict):
        raise ValueError(f"a schema must be an object or a boolean (at {pointer or '/'})")
    for name in sorted(_IGNORED & schema.keys()):
        if (name, schema[name]) != ("uniqueItems", False):
            raise ValueError(f"it does not follow {name} (at {pointer or '/'})")
    if "$id" in schema and pointer:
        raise ValueError(f"it does not follow $id (at {pointer})")
    _check_shapes(schema, pointer)
    definitions = {
        name: {key: followed(value, f"{pointer}/{name}/{key}") for key, value in schema[name].items()}
        for name in ("$defs", "definitions")
        if name in schema
    }
    return definitions | _body(schema, pointer)


def _check_shapes(schema: dict[str, Any], pointer: str) -> None:
    """Checks the types of keywords' values, and that lists are not empty. Raises ValueError."""
    for name, (kind, what) in _SHAPES.items():
        if name in schema and not isinstance(schema[name], kind):
            raise ValueError(f"{name} must be {what} (at {pointer or '/'})")
        if name in _NOT_EMPTY and name in schema and not schema[name]:
            raise ValueError(f"{name} must not be empty, as nothing would be valid (at {pointer or '/'})")
    if not all(isinstance(each, str) for each in schema.get("required", ())):
        raise ValueError(f"required must be a list of names (at {pointer or '/'})")


def _body(schema: dict[str, Any], pointer: str) -> dict[str, Any]:
    alone = [name for name in _ALONE if name in schema]
    if not alone:
        return _typed(schema, pointer)
    (first, *others) = alone
    is_value = first in ("enum", "const")
    others += [name for name in schema if name in _TYPE_OF or (name == "type" and not is_value)]
    if others:
        raise ValueError(f"it does not follow {others[0]} beside {first} (at {pointer or '/'})")
    if is_value:
        values = schema["enum"] if first == "enum" else [schema["const"]]
        kinds = schema.get("type")
        admitted = [each for each in values if kinds is None or _is_of(each, kinds)]
        _check_digits(admitted, pointer)
        if not admitted:
            raise ValueError(f"its type admits none of its values (at {pointer or '/'})")
        return {"enum": admitted}
    if first == "$ref":
        if not str(schema["$ref"]).startswith("#/") and schema["$ref"] != "#":
            raise ValueError(f"it follows references within the schema alone (at {pointer or '/'})")
        if not PLAIN_REFERENCE.fullmatch(schema["$ref"]):  # of an empty name the library takes what is above it
            raise ValueError(f"the reference {schema['$ref']!r:.100} leads nowhere (at {pointer or '/'})")
        return {"$ref": schema["$ref"]}
    parts = [followed(each, f"{pointer}/{first}/{index}") for index, each in enumerate(schema[first])]
    if first == "allOf" and len(parts) != 1:
        raise ValueError(f"it does not follow allOf of several schemas (at {pointer or '/'})")
    return {"anyOf": parts}


def _typed(schema: dict[str, Any], pointer: str) -> dict[str, Any]:
    kinds = schema.get("type")
    if kinds is None:
        kinds = next((_TYPE_OF[name] for name in schema if name in _TYPE_OF), None)
    if isinstance(kinds, list):
        return {"anyOf": [_typed({**schema, "type": each}, pointer) for each in kinds]}
    if kinds is None:
        return {}
    found: dict[str, Any] = {"type": kinds}
    for name in FOLLOWED.get("number" if kinds == "integer" else kinds, ()):
        if name not in schema:
            continue
        value, where = schema[name], f"{pointer}/{name}"
        if name == "properties":
            value = {key: followed(each, f"{where}/{key}") for key, each in value.items()}
        elif name == "prefixItems":
            value = [followed(each, f"{where}/{index}") for index, each in enumerate(value)]
        elif name in ("items", "additionalProperties") and not isinstance(value, bool):
            value = followed(value, where)
        elif isinstance(value, float) and value.is_integer():
            value = int(value)
        found[name] = value
    if kinds == "object":
        _name_required(found, pointer)
    if kinds == "number":
        _check_bounds(found, pointer)
    if "pattern" in found:
        found["pattern"] = _followed_pattern(found["pattern"], pointer)
    if kinds == "string":
        _count_by_pattern(found, pointer)
    return found


_BEYOND = re.compile(r"\\U[0-9a-fA-F]{8}|\\?[^\x00-\x7f]|\\.", re.DOTALL)
"""Characters beyond ASCII, perhaps escaped; and other escapes, which begin no such one."""


def _in_ascii(found: re.Match[str]) -> str:
    """Beside a character beyond ASCII, the library lets through what JSON escapes; and it has no \\U."""
    text = found[0]
    if text.startswith("\\U"):
        return f"\\u{{{int(text[2:], 16):x}}}"
    return text if text[-1].isascii() else f"\\u{{{ord(text[-1]):x}}}"


def followed_expression(pattern: str) -> str:
    """An expression in syntax that the library reads as `re` does. Raises ValueError if it cannot express it."""
    parts = parts_of(pattern)
    for part in parts:
        if part.classes & _BEYOND_ASCII or (part.is_negated and part.classes):
            raise ValueError(f"it does not follow {part.text}, of which more than ASCII is left out")
        part.text = r"[^\n]" if part.text == "." else _BEYOND.sub(_in_ascii, part.text)
    return written(parts)


def _followed_pattern(pattern: str, pointer: str) -> str:
    """The pattern of a JSON string, in which the library writes no escapes. Raises ValueError, with the place."""
    try:
        pattern = followed_expression(pattern)
    except ValueError as error:
        raise ValueError(f"{error} (at {pointer}/pattern)") from None
    parts = parts_of(pattern)
    _keep_repeats_exact(parts, f"{pointer}/pattern")
    for part in parts:
        if not part.is_negated and any(low <= each <= high for low, high in part.ranges for each in _ESCAPED):
            raise ValueError(f"it does not follow {part.text}, as JSON escapes some of that (at {pointer}/pattern)")
    return written(parts)


@dataclass
class _Group:
    """What a group of an expression has in it, at any depth."""

    begin: ExpressionPart | None = None
    has_loops: bool = False
    """Whether something may be repeated without end."""
    has_counts: bool = False
    """Whether something may be repeated in several numbers of times."""
    has_options: bool = False
    """Whether an optional group in it has repeats."""
    has_alternatives: bool = False
    """Whether it is of several itself."""


def _keep_repeats_exact(parts: list[ExpressionPart], where: str) -> None:
    """Rewrites what the library's automaton lets more through than: it enters an optional group past its beginning if
    something is repeated there (`1(-2+)?` allows 12), but no group with an empty alternative. Raises ValueError, with
    the place, for alternatives with counted repeats, which it joins (`a{1,2}|a` allows aaa)."""
    groups = [_Group()]
    ends = ExpressionPart("", 0)
    for part, following, lazy in zip(parts, [*parts[1:], ends], [*parts[2:], ends, ends], strict=False):
        if part.text.startswith("(") and not (part.text.startswith("(?") and part.text.endswith(")")):
            groups.append(_Group(part))
        elif part.text == "|":
            groups[-1].has_alternatives = True
        elif part.text == ")" and len(groups) > 1:
            group = groups.pop()
            _check_alternatives(group, where)
            is_optional = following.text.startswith("{0") and (group.has_loops or group.has_counts)
            if is_optional or (following.text.startswith("{") and group.has_options):
                raise ValueError(
                    f"it does not follow {following.text} behind a group with repeats exactly (at {where})"
                )
            if following.text == "?" and (group.has_loops or group.has_counts):
                assert group.begin is not None, "it is not the whole"
                group.begin.text, following.text = f"(?:{group.begin.text}", "|)"
                lazy.text = "" if lazy.text == "?" else lazy.text
                groups[-1].has_options = True
            groups[-1].has_options |= group.has_options
            groups[-1].has_loops |= group.has_loops
            groups[-1].has_counts |= group.has_counts
        elif part.is_repeat:
            groups[-1].has_loops |= part.text.startswith(("*", "+")) or part.text.endswith(",}")
            groups[-1].has_counts |= "," in part.text
    _check_alternatives(groups[0], where)


def _check_alternatives(group: _Group, where: str) -> None:
    if group.has_alternatives and group.has_counts:
        raise ValueError(f"it does not follow alternatives with counted repeats exactly (at {where})")


def _count_by_pattern(schema: dict[str, Any], pointer: str) -> None:
    lengths = [name for name in _LENGTHS if name in schema]
    if lengths and "pattern" in schema:
        raise ValueError(f"it does not follow {lengths[0]} beside pattern (at {pointer or '/'})")
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if isinstance(least, int) and isinstance(most, int) and 0 <= least <= most <= LONGEST_PATTERN:
        schema["pattern"] = f"^{_CHARACTER}{{{least},{most}}}$"
        for name in lengths:
            del schema[name]


def _check_digits(value: Any, pointer: str) -> None:
    """Raises ValueError for a number that the library would write otherwise: it writes up to 17 digits of each."""
    if isinstance(value, list | dict):
        for each in value if isinstance(value, list) else value.values():
            _check_digits(each, pointer)
    elif isinstance(value, float) and Decimal(f"{value:.17g}") != Decimal(repr(value)):
        raise ValueError(f"it does not follow the number {value!r} exactly (at {pointer or '/'})")


def _check_bounds(schema: dict[str, Any], pointer: str) -> None:
    """Raises ValueError for bounds of a number between which the library finds none: it writes six decimals."""
    for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if name in schema and Decimal(repr(schema[name])) % _LEAST_STEP:
            raise ValueError(f"it does not follow more than six decimals of {name} (at {pointer or '/'})")
    low, high = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if low is not None and high is not None and Decimal(repr(high)) - Decimal(repr(low)) <= _LEAST_STEP:
        raise ValueError(f"it finds no number between {low!r} and {high!r} (at {pointer or '/'})")


def _name_required(schema: dict[str, Any], pointer: str) -> None:
    others, properties = schema.get("additionalProperties", {}), dict(schema.get("properties", {}))
    for name in schema.get("required", ()):
        if name not in properties and others is False:
            raise ValueError(f"it requires {name!r}, which it does not admit (at {pointer or '/'})")
        properties.setdefault(name, {} if isinstance(others, bool) else others)
    for name in properties:
        if "\\" in json.dumps(name, ensure_ascii=False):
            raise ValueError(f"it does not follow the name {name!r}, which JSON escapes (at {pointer or '/'})")
    if properties:
        schema["properties"] = properties


def _is_of(value: Any, kinds: Any) -> bool:
    """Whether `type` (one or several) allows the value."""
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind != "boolean" and isinstance(value, bool):
            continue
        is_fraction = isinstance(value, float) and not value.is_integer()
        if isinstance(value, _PYTHON_TYPES.get(kind, ())) and not (kind == "integer" and is_fraction):
            return True
    return False
