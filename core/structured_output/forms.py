"""Normalises a structured output's form before a library gets it, so that all libraries read it alike."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.core.structured_output.exact_numbers import read_float
from headrace.core.structured_output.expressions import in_common_words, in_json
from headrace.core.structured_output.gbnf import normalised
from headrace.core.structured_output.json_schema import with_schemas_in_lark, without_additional_properties
from headrace.core.structured_output.schema_keywords import in_followed_keywords
from headrace.core.structured_output.structural_tag import format_of, with_grammars, with_patterns, with_schemas
from headrace.ipc.messages import StructuredOutput

_RULE_OF_GBNF = re.compile(r"^[^\S\n]*[\w-]+\s*::=", re.MULTILINE)
"""A rule of GBNF, in one line up to its name: an expression that spans empty lines would be retried at each of them."""
_PRIORITY = re.compile(r"^([^\S\n]*[?!]{0,2}[a-z_][a-z_0-9]*)\.-?\d+([^\S\n]*:)", re.MULTILINE)
"""A priority of a Lark rule. It only chooses between parse trees of a text, while a terminal's priority may change
which texts match."""
_VALUES = ("enum", "const", "default", "examples")


def prepared(wanted: StructuredOutput) -> StructuredOutput:
    """The normalised form. Raises ValueError, KeyError and TypeError if the text is not valid for its kind."""
    text = wanted.text

    def changed(schema: Any) -> Any:
        if wanted.disable_additional_properties:
            schema = without_additional_properties(schema)
        return with_expressions(in_followed_keywords(schema), in_json)

    if wanted.kind == "regex":
        text = in_common_words(text)
    elif wanted.kind == "json":
        text = json.dumps(changed(json.loads(text, parse_float=read_float)))
    elif wanted.kind == "structural_tag":
        form = with_patterns(
            with_schemas(format_of(json.loads(text, parse_float=read_float)), changed), in_common_words
        )
        form = with_grammars(form, lambda grammar: normalised(grammar) if is_gbnf(grammar) else grammar)
        text = json.dumps({"type": "structural_tag", "format": form})
    elif wanted.kind == "grammar":
        text = normalised(text) if is_gbnf(text) else with_schemas_in_lark(_PRIORITY.sub(r"\1\2", text), changed)
    whitespace = in_common_words(wanted.whitespace_pattern)
    return msgspec.structs.replace(wanted, text=text, whitespace_pattern=whitespace)


def is_gbnf(grammar: str) -> bool:
    """Whether a grammar is in GBNF notation; otherwise it is in Lark's."""
    return _RULE_OF_GBNF.search(grammar) is not None


def with_expressions(schema: Any, change: Callable[[str], str], pointer: str = "") -> Any:
    """Applies `change` to all patterns of a schema. Raises ValueError with the place of a pattern that it refuses."""
    if isinstance(schema, list):
        return [with_expressions(each, change, f"{pointer}/{index}") for index, each in enumerate(schema)]
    if not isinstance(schema, dict):
        return schema
    found = dict[str, Any]()
    for name, value in schema.items():
        where = f"{pointer}/{name.replace('~', '~0').replace('/', '~1')}"
        if name == "pattern" and isinstance(value, str):
            found[name] = _changed(value, change, where)
        elif name == "patternProperties" and isinstance(value, dict):
            found[name] = {
                _changed(pattern, change, where): with_expressions(each, change, f"{where}/{pattern}")
                for pattern, each in value.items()
            }
        elif name in ("properties", "$defs", "definitions", "dependentSchemas") and isinstance(value, dict):
            # The keys are names, not keywords.
            found[name] = {each: with_expressions(inner, change, f"{where}/{each}") for each, inner in value.items()}
        else:
            found[name] = value if name in _VALUES else with_expressions(value, change, where)
    return found


def _changed(pattern: str, change: Callable[[str], str], where: str) -> str:
    try:
        return change(pattern)
    except ValueError as error:
        raise ValueError(f"{error} (at {where})") from None
