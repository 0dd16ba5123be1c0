"""What a schema says of a tool's parameters elsewhere than in the property itself: behind references, in alternatives
of the whole, by keywords alone. Formats that write texts without quotes need it to tell 3 from "3"."""

from __future__ import annotations

import json
from typing import Any

import pytest
from read_answers import read
from schema_checks import validate
from test_call_grammars import accepts
from thinned import pairs

from headrace.frontend.text.formats.declaration import known_formats, load_format
from headrace.frontend.text.formats.grammar import ForcedCalls
from headrace.frontend.text.formats.parameters import MOST_FOLLOWED, types_of, with_all_properties

XML = [name for name, declared in known_formats().items() if declared.calls and declared.calls.body == "xml"]
WITHOUT_KINDS = [
    name for name in XML if not load_format(name).calls.value_kinds and not load_format(name).calls.is_either
]  # type: ignore[union-attr]
"""Formats that write no types, and parameters in no other way."""
DEFINITIONS = {
    "Unit": {"enum": ["c", "f"], "type": "string"},
    "Count": {"type": "integer", "minimum": 0, "maximum": 9},
    "Again": {"$ref": "#/$defs/Count"},
}
PROPERTIES: dict[str, tuple[Any, str, Any]] = {
    # its schema, what the model writes, and the value
    "unit": ({"$ref": "#/$defs/Unit"}, "c", "c"),
    "count": ({"$ref": "#/$defs/Count"}, "3", 3),
    "twice": ({"$ref": "#/$defs/Again", "description": "how many"}, "3", 3),
    "part": ({"allOf": [{"$ref": "#/$defs/Count"}], "default": 1}, "3", 3),
    "parts": ({"allOf": [{"type": ["string", "integer"]}, {"type": "integer"}]}, "3", 3),
    "maybe": ({"anyOf": [{"$ref": "#/$defs/Unit"}, {"type": "null"}]}, "f", "f"),
    "nothing": ({"anyOf": [{"$ref": "#/$defs/Unit"}, {"type": "null"}]}, "null", None),
    "either": ({"oneOf": [{"$ref": "#/$defs/Count"}, {"type": "null"}]}, "4", 4),
    "first": ({"$ref": "#/properties/count"}, "5", 5),
    "escaped": ({"$ref": "#/properties/a~1b%20c"}, "5", 5),
    "a/b c": ({"type": "integer"}, "5", 5),
    "level": ({"enum": [1, 2, 3]}, "2", 2),
    "on": ({"const": True}, "true", True),
    "least": ({"minimum": 2}, "7", 7),
    "code": ({"pattern": "^[0-9]{3}$"}, "007", "007"),
    "list": ({"items": {"$ref": "#/properties/first"}, "type": "array"}, "[1, 2]", [1, 2]),
    "any": ({}, "abc", "abc"),
    "object": ({}, '{"a": 1}', {"a": 1}),
}
SCHEMA = {"type": "object", "properties": {n: each for n, (each, _, _) in PROPERTIES.items()}, "$defs": DEFINITIONS}


def tool(schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "book", "parameters": schema}}


def written(name: str, **values: str) -> str:
    """A call in the format."""
    calls = load_format(name).calls
    assert calls is not None
    line = "\n" if calls.values_have_lines else ""
    before_name, after_name, before_value, end = calls.parameter
    number = f"{calls.number[0]}1{calls.number[1]}" if calls.number[0] else ""

    def kind(value: str) -> str:
        if not calls.value_kinds:
            return ""
        is_text = value[:1] not in "[{" and value not in ("null", "true") and not value.isdecimal()
        return " " + next(said for type_, said in calls.value_kinds if (type_ == "string") == is_text)

    inner = "".join(
        f"{before_name}{key}{after_name}{kind(value)}{before_value}{line}{value}{line}{end}"
        for key, value in values.items()
    )
    parts = (*(calls.section or ())[:1], calls.call[0], calls.name[0] + "book" + calls.name[1], number, inner)
    return "".join((*parts, calls.after_arguments, calls.call[1], *(calls.section or ())[1:]))


@pytest.mark.parametrize("name", XML)
def test_values_have_the_types_that_are_said_elsewhere(name: str) -> None:
    text = written(name, **{key: said for key, (_, said, _) in PROPERTIES.items()})
    for pieces in ([text], text):
        ((_, arguments),) = read(name, pieces, tools=[tool(SCHEMA)], reasoning=None).calls
        assert json.loads(arguments) == {key: value for key, (_, _, value) in PROPERTIES.items()}


@pytest.mark.parametrize(("name", "key"), pairs(WITHOUT_KINDS, tuple(PROPERTIES)))
def test_a_forced_call_holds_what_is_said_elsewhere(name: str, key: str) -> None:
    _, said, value = PROPERTIES[key]
    schema = {**SCHEMA, "required": [key]}
    calls = load_format(name).calls
    assert calls is not None
    grammar = ForcedCalls(calls, [tool(schema)], {}, several=False).text()
    text = written(name, **{key: said})
    assert accepts(grammar, text), text
    assert not accepts(grammar, written(name)), "it is required"
    ((_, arguments),) = read(name, text, tools=[tool(schema)], reasoning=None).calls
    assert json.loads(arguments) == {key: value}
    if key in ("unit", "count", "twice", "part", "maybe", "either", "first", "level", "code"):
        assert not accepts(grammar, written(name, **{key: "77"}))


WHOLE = {
    "type": "object",
    "oneOf": [
        {"properties": {"kind": {"const": "acme"}, "payload": {"type": "object"}}, "required": ["kind", "payload"]},
        {"$ref": "#/$defs/Other"},
    ],
    "allOf": [{"properties": {"size": {"type": "integer"}}, "required": ["size"]}],
    "if": {"required": ["more"]},
    "then": {"properties": {"more": {"type": "number"}}},
    "$defs": {
        "Other": {"properties": {"kind": {"const": "other"}, "count": {"type": "integer"}}, "required": ["kind"]}
    },
}


@pytest.mark.parametrize("name", XML)
def test_parameters_are_found_in_alternatives_and_parts_of_the_whole(name: str) -> None:
    text = written(name, size="2", kind="acme", payload='{"a": "1"}', count="4", more="5")
    for pieces in ([text], text):
        ((_, arguments),) = read(name, pieces, tools=[tool(WHOLE)], reasoning=None).calls
        assert json.loads(arguments) == {"size": 2, "kind": "acme", "payload": {"a": "1"}, "count": 4, "more": 5}
    assert with_all_properties(WHOLE)["required"] == ["size", "kind"]


@pytest.mark.parametrize("name", WITHOUT_KINDS)
def test_a_forced_call_holds_alternatives_and_parts_of_the_whole(name: str) -> None:
    calls = load_format(name).calls
    assert calls is not None
    grammar = ForcedCalls(calls, [tool(WHOLE)], {}, several=False).text()
    text = written(name, size="2", kind="acme", payload='{"a": "1"}')
    assert accepts(grammar, text)
    ((_, arguments),) = read(name, text, tools=[tool(WHOLE)], reasoning=None).calls
    validate(json.loads(arguments), WHOLE)
    assert not accepts(grammar, written(name, size="2", kind="none"))


@pytest.mark.parametrize("name", XML)
def test_parameters_without_a_name_have_the_type_of_all_others(name: str) -> None:
    schema = {"additionalProperties": {"$ref": "#/$defs/Count"}, "$defs": DEFINITIONS}
    ((_, arguments),) = read(name, [written(name, a="3", b="4")], tools=[tool(schema)], reasoning=None).calls
    assert json.loads(arguments) == {"a": 3, "b": 4}


@pytest.mark.parametrize(
    ("named", "type_"),
    [("STRING", "string"), ("str", "string"), ("Integer", "integer"), ("int", "integer"), ("float", "number"),
     ("bool", "boolean"), ("dict", "object"), ("list", "array")],
)  # fmt: skip
def test_names_of_types_as_other_apis_write_them(named: str, type_: str) -> None:
    assert types_of({"type": named}) == {type_}


def test_references_in_a_ring_and_those_that_multiply_are_given_up() -> None:
    ring = {
        "properties": {"a": {"$ref": "#/$defs/a"}},
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
    }
    assert with_all_properties(ring)["properties"].keys() == {"a"}
    links = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 10} for n in range(20)}
    grown = with_all_properties({"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": links})
    assert json.dumps(grown["properties"]).count("anyOf") <= MOST_FOLLOWED
    large = {
        "properties": {str(n): {"$ref": "#/$defs/a"} for n in range(1000)},
        "$defs": {"a": dict.fromkeys(map(str, range(1000)), 1)},
    }
    assert sum(map(len, with_all_properties(large)["properties"].values())) < 50_000
    whole: dict[str, Any] = {"anyOf": [{"$ref": "#"}, {"$ref": "#"}], "properties": {"a": {"type": "integer"}}}
    assert types_of(with_all_properties(whole)["properties"]["a"]) == {"integer"}
    for odd in ({"properties": None, "required": "a"}, {"properties": {"a": True, "b": {"type": 3}}, "allOf": 3}):
        with_all_properties(odd)
