"""Converts argument values from the notations that models use to JSON."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import sys
from collections.abc import Mapping
from json.encoder import encode_basestring
from typing import Any

from headrace.frontend.text.formats.parameters import types_of

_PYTHON_ESCAPES = {
    **{"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"},
    **{each: each for each in "\\'\""},
    "\n": "",
}
_BARE_KEY = re.compile(r"([{,]\s*)([\w.\-]+)\s*:")


_ID = re.compile(r"[\w.:\-]{1,64}")
_LEADING_ZEROS = re.compile(r"""(?P<string>'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")|(?<![\w.])0+(?=\d)""", re.DOTALL)
"""Of whole numbers, which Python refuses; and strings, in which they stay."""
_HALF = re.compile("[\ud800-\udfff]")
REPLACEMENT = "\ufffd"


class NoCallError(Exception):
    """The text does not have the format's syntax."""


def as_text(text: str) -> str:
    return encode_basestring(text)


def within_text(text: str) -> str:
    """The text escaped for a JSON string, without the quotes."""
    return encode_basestring(text)[1:-1]


def as_json(text: str) -> str:
    """A value written without quotes, as JSON: itself if it is JSON, a converted Python literal, or else a string."""
    try:
        json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        if text.startswith(("{", "[")):
            with contextlib.suppress(NoCallError):
                return python_as_json(text)
        lowered = {"True": "true", "False": "false", "None": "null"}.get(text)
        return lowered or as_text(text)
    return text


def element_value(said: str | list[tuple[str, Any]], schema: Mapping[str, Any]) -> Any:
    """The value that an element stands for: a text, or pairs of its elements' names and what those hold. Without a
    schema elements called item are those of a list, as templates write lists; elements of the same name are one too."""
    types = types_of(schema)
    if isinstance(said, str):
        return _text_value(said, types)
    if "array" in types or ("object" not in types and {name for name, _ in said} == {"item"}):
        items = _declared_in(schema, "items")
        return [element_value(each, items) for _, each in said]
    properties, found = _declared_in(schema, "properties"), dict[str, list[Any]]()
    for name, each in said:
        own = properties.get(name)
        found.setdefault(name, []).append(element_value(each, own if isinstance(own, dict) else {}))
    return {name: values if len(values) > 1 else values[0] for name, values in found.items()}


def _declared_in(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """What a schema, or the first of its alternatives that has it, declares as `key`."""
    ways = [schema, *(each for way in ("anyOf", "oneOf") for each in schema.get(way) or ())]
    found = [each[key] for each in ways if isinstance(each, Mapping) and isinstance(each.get(key), Mapping)]
    return found[0] if found else {}


def _text_value(text: str, types: frozenset[str]) -> Any:
    """A value of one of these types that is written without quotes; without any, a text."""
    if "null" in types and text.strip() in ("null", "None"):
        return None
    if "string" in types or not types:
        return text
    if not text.strip() and types & {"array", "object"}:
        return [] if "array" in types else {}
    try:
        value = json.loads(as_json(text.strip()))
        json.dumps(value, allow_nan=False)
    except ValueError:
        return text
    return value


def _no_constant(text: str) -> None:
    raise ValueError(f"JSON has no {text}")


def object_of(text: str) -> str:
    """A call's arguments from their JSON: an object, one that is written as a string, or null or nothing for none.
    Raises NoCallError for other values."""
    try:
        said = json.loads(text, strict=False)
        if isinstance(said, str):
            text = said.strip()
            text = as_json(text) if text.startswith("{") else text
            said = json.loads(text, strict=False) if text else None
    except (ValueError, RecursionError):
        raise NoCallError from None
    if said is None:
        return "{}"
    if not isinstance(said, dict):
        raise NoCallError
    return text


def as_id(text: str) -> str:
    """A call's id from its JSON, a string or a number; empty, for which one is made, if it is neither or long."""
    said = text.strip().strip('"')
    return said if _ID.fullmatch(said) else ""


def nest_as_json(text: str) -> str:
    """An object or a list as JSON: itself, or with quotes added to bare keys. Raises NoCallError."""
    for each in (text, _BARE_KEY.sub(r'\1"\2":', text)):
        try:
            json.loads(each)
        except (ValueError, RecursionError):
            continue
        return each
    raise NoCallError


def python_as_json(text: str) -> str:
    """A Python literal as JSON; also takes JSON, since models confuse the two. A set is a list, and a number may begin
    with zeros. Raises NoCallError."""
    text = text.strip()
    for read in (_python_literal, json.loads):
        try:
            return without_halves(json.dumps(read(text), ensure_ascii=False, allow_nan=False))
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
    raise NoCallError


class _ListsForSets(ast.NodeTransformer):
    def visit_Set(self, node: ast.Set) -> ast.List:
        self.generic_visit(node)
        return ast.List(node.elts, ast.Load())


def _python_literal(text: str) -> Any:
    tree = ast.parse(_LEADING_ZEROS.sub(lambda found: found["string"] or "", text), mode="eval")
    return ast.literal_eval(_ListsForSets().visit(tree))


def python_escaped(byte: str, high: str, low: str, unit: str, code: str, octal: str, other: str) -> str:
    """The text for a Python escape sequence. The arguments are its groups; those of other escapes are None or empty."""
    if high:
        return chr(0x10000 + ((int(high, 16) - 0xD800) << 10) + int(low, 16) - 0xDC00)
    if digits := byte or unit or code:
        number = int(digits, 16)
        return without_halves(chr(number)) if number <= sys.maxunicode else REPLACEMENT
    return chr(int(octal, 8)) if octal else python_short_escape(other)


def python_short_escape(character: str) -> str:
    """The text that a backslash and this character stand for."""
    return _PYTHON_ESCAPES.get(character, "\\" + character)


def without_halves(text: str) -> str:
    """Joins the halves of surrogate pairs; a lone half becomes U+FFFD."""
    if not text.isascii() and _HALF.search(text):
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
