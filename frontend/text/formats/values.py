"""Converts argument values from the notations that models use to JSON."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import sys
from json.encoder import encode_basestring

_PYTHON_ESCAPES = {
    **{"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"},
    **{each: each for each in "\\'\""},
    "\n": "",
}
_BARE_KEY = re.compile(r"([{,]\s*)([\w.\-]+)\s*:")


_ID = re.compile(r"[\w.:\-]{1,64}")
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
        json.loads(text)
    except (ValueError, RecursionError):
        if text.startswith(("{", "[")):
            with contextlib.suppress(NoCallError):
                return python_as_json(text)
        lowered = {"True": "true", "False": "false", "None": "null"}.get(text)
        return lowered or as_text(text)
    return text


def object_of(text: str) -> str:
    """A call's arguments from their JSON: an object, one that is written as a string, or null or nothing for none.
    Raises NoCallError for other values."""
    try:
        said = json.loads(text, strict=False)
        if isinstance(said, str):
            text = said.strip()
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
    """A Python literal as JSON; also takes JSON, since models confuse the two. Raises NoCallError."""
    text = text.strip()
    for read in (ast.literal_eval, json.loads):
        try:
            return without_halves(json.dumps(read(text), ensure_ascii=False, allow_nan=False))
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
    raise NoCallError


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
