"""Arguments as JSON, from what models write for them."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Mapping
from typing import Any

_BARE_KEY = re.compile(r"([{,]\s*)([\w.\-]+)\s*:")


class NoCallError(Exception):
    """The text is not what the format says."""


def as_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def types_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a schema allows, as far as it says so."""
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else set(declared or ())
    for name in ("anyOf", "oneOf"):
        types.update(*(types_of(each) for each in schema.get(name) or () if isinstance(each, dict)))
    if isinstance(schema.get("enum"), list) and not types:
        types.update("string" for each in schema["enum"] if isinstance(each, str))
    return frozenset(types)


def as_json(text: str) -> str:
    """A value written without quotes: JSON or a Python literal where it is one, else text."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        if text.startswith(("{", "[")):
            with contextlib.suppress(NoCallError):
                return python_as_json(text)
        lowered = {"True": "true", "False": "false", "None": "null"}.get(text)
        return lowered or as_text(text)
    return text


def nest_as_json(text: str) -> str:
    """Keys have got no quotes yet, unless it is JSON."""
    for each in (text, _BARE_KEY.sub(r'\1"\2":', text)):
        try:
            json.loads(each)
        except (ValueError, RecursionError):
            continue
        return each
    raise NoCallError


def python_as_json(text: str) -> str:
    """A Python literal, or JSON, which models mix up, as JSON."""
    text = text.strip()
    for read in (ast.literal_eval, json.loads):
        try:
            return json.dumps(read(text), ensure_ascii=False, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
    raise NoCallError
