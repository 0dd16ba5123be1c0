"""Schemas as clients emit them: every one is followed, or refused with the keyword and what to write instead.

`client_schemas.json` has the tools that Claude Code 2, codex, opencode and qwen-code send (recorded by a server that
answers nothing; their descriptions are left out), and what pydantic 2.14, zod 4.6, zod-to-json-schema 3.25 and the
OpenAI client make of models that use most of their types.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import tiny_models
from test_grammar_backends import BACKENDS, TOKENIZER, VOCAB_SIZE, compiled, takes
from thinned import every

from headrace import InvalidRequestError

SCHEMAS: dict[str, Any] = json.loads((Path(__file__).parent / "client_schemas.json").read_text())
UNIQUE = "uniqueItems is not followed: it is followed for up to 4 values of enum or const"
REFUSED = {
    "pydantic set of texts": f"{UNIQUE}.*/properties/a",
    "pydantic serialisation": f"{UNIQUE}.*/properties/s",
    "zod-to-json-schema collections": f"{UNIQUE}.*/properties/s",
    "pydantic 64 bit integer": "-9223372036854775808 is not followed exactly: integers up to 2",
    "zod formats": r"\(\?! at 12: lookaheads are not followed.*/properties/dur/pattern",
}
FOLLOWED = sorted(SCHEMAS.keys() - REFUSED.keys())
ENDS = {
    each: [id for id, text in enumerate(map(TOKENIZER.decode, range(VOCAB_SIZE))) if text == each] for each in '"}]'
}
HASTE = 0.5
"""Share of the tokens that end a part, where one may."""


def answer(schema: Any, numbers: random.Random) -> str | None:
    """An answer by tokens chosen at random, those that end a part more often; None if it becomes long."""
    matcher = compiled("llguidance", "json", json.dumps(schema))
    mask, token_ids = np.zeros((1, -(-VOCAB_SIZE // 32)), np.int32), list[int]()
    while not matcher.is_complete:
        BACKENDS["llguidance"].fill([(matcher, 0, [])], mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        ends = [each for each in allowed if each in ENDS]
        token_id = numbers.choice(ends if ends and numbers.random() < HASTE else allowed)
        token_id = tiny_models.EOS if tiny_models.EOS in allowed else token_id
        assert matcher.accept(token_id)
        if len(token_ids) > 400:
            return None
        if token_id != tiny_models.EOS:
            token_ids.append(token_id)
    return str(TOKENIZER.decode(token_ids))


def test_the_schemas_are_those_of_many_clients() -> None:
    assert len(SCHEMAS) > 120
    for client in ("claude", "codex", "opencode", "qwen", "pydantic", "zod", "zod-to-json-schema", "openai"):
        assert sum(name.startswith(f"{client} ") for name in SCHEMAS) >= 5, client


@pytest.mark.parametrize("name", every(3, FOLLOWED))
def test_a_clients_schema_is_followed(name: str) -> None:
    schema, numbers = SCHEMAS[name], random.Random(name)
    newest = jsonschema.Draft4Validator if "open" in name and "api" in name else jsonschema.Draft202012Validator
    validator = jsonschema.validators.validator_for(schema, newest)
    if r"\p{" in json.dumps(schema).replace("\\\\", "\\"):  # which re, and so jsonschema, lacks
        validator = jsonschema.validators.extend(validator, {"pattern": None})
    for _ in range(3):
        if (found := answer(schema, numbers)) is not None:
            validator(schema).validate(json.loads(found))


@pytest.mark.parametrize("name", REFUSED)
def test_a_clients_schema_is_refused_by_keyword_and_place(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=REFUSED[name]):
        compiled("llguidance", "json", json.dumps(SCHEMAS[name]))


# --- keywords ---------------------------------------------------------------------------------------------------------

TEXT: dict[str, Any] = {"type": "string"}
WITHOUT_EFFECT: dict[str, dict[str, Any]] = {
    "uniqueItems": {"type": "array", "items": TEXT, "uniqueItems": False},
    "a unique item": {"type": "array", "items": TEXT, "uniqueItems": True, "maxItems": 1},
    "a whole length": {"type": "string", "minLength": 1.0, "maxLength": 2.0},
    "a whole count": {"type": "array", "items": TEXT, "minItems": 1.0, "maxItems": 2.0},
    "a whole number of properties": {"type": "object", "minProperties": 0.0, "maxProperties": 1.0},
    "an unknown format": {"type": "string", "format": "password"},
    "a format of numbers": {"type": "integer", "format": "int64"},
    "a format of any type": {"format": "int32"},
    "a format that is only an annotation": {"type": "string", "format": "json-pointer"},
    "if alone": {"type": "string", "if": {"minLength": 2}},
    "then alone": {"type": "string", "then": {"minLength": 2}, "else": False},
    "not of nothing": {"type": "string", "not": False},
    "contains at least none": {"type": "array", "items": TEXT, "contains": {"const": 1}, "minContains": 0},
    "minContains alone": {"type": "array", "items": TEXT, "minContains": 2, "maxContains": 3},
    "no dependencies": {"type": "object", "dependentRequired": {}, "dependentSchemas": {}, "dependencies": {"a": []}},
    "names that are texts": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": TEXT},
    "unevaluated": {"type": "object", "unevaluatedProperties": True, "unevaluatedItems": {}},
    "nothing said of an object": {
        **{"type": "object", "properties": None, "required": None, "additionalProperties": None, "$defs": None},
        **{"propertyNames": None, "dependentRequired": None, "unevaluatedProperties": None, "default": None},
    },
    "nothing said of a text": {
        **{"type": "string", "minLength": None, "pattern": None, "format": None, "enum": None, "$ref": None},
        **{"anyOf": None, "oneOf": None, "allOf": None, "not": None, "if": None, "description": None},
    },
    "nothing said of a list": {"type": "array", "items": None, "prefixItems": None, "maxItems": 2, "uniqueItems": None},
    "nothing said of a number": {"type": "integer", "minimum": None, "exclusiveMaximum": None, "multipleOf": None},
    "no type": {"type": None, "maximum": 3},
    "notes": {
        **{"type": "string", "$comment": "a", "deprecated": True, "readOnly": True, "writeOnly": False},
        **{"contentSchema": {"type": "object"}, "contentMediaType": "a/b", "contentEncoding": "base64"},
        **{"discriminator": {"propertyName": "a"}, "xml": {}, "externalDocs": {}, "x-more": 1, "nullable": False},
    },
}


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_a_keyword_without_effect_is_no_reason_to_refuse(name: str) -> None:
    numbers = random.Random(name)
    for _ in range(3):
        if (found := answer(WITHOUT_EFFECT[name], numbers)) is not None:
            said = {keyword: value for keyword, value in WITHOUT_EFFECT[name].items() if value is not None}
            jsonschema.Draft202012Validator(said).validate(json.loads(found))


IN_CAPITALS: dict[str, Any] = {
    "type": "OBJECT",
    "properties": {
        "type": {"type": "STRING", "enum": ["STRING"]},
        "list": {"type": "Array", "items": {"type": ["INTEGER", "NULL"]}, "maxItems": 2},
        "either": {"oneOf": [{"type": "BOOLEAN"}, {"type": "NULL"}]},
    },
    "required": ["type", "list", "either"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("name", BACKENDS)
def test_types_may_be_named_in_capitals(name: str) -> None:
    start = compiled(name, "json", json.dumps(IN_CAPITALS))
    for more in ("true", "null"):
        assert takes(start, f'{{"type":"STRING","list":[1,null],"either":{more}}}')
    for wrong in ('{"type":"string","list":[],"either":true}', '{"type":"STRING","list":["a"],"either":true}', "[]"):
        assert not takes(start, wrong)


IN_PYTHON: dict[str, Any] = {
    "type": "dict",
    "properties": {
        "text": {"type": "str", "enum": ["str"]},
        "list": {"type": "list", "items": {"type": ["int", "null"]}, "maxItems": 2},
        "number": {"type": "float", "enum": [0.5]},
        "either": {"type": "bool"},
    },
    "required": ["text", "list", "number", "either"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("name", BACKENDS)
def test_types_may_be_named_as_python_names_them(name: str) -> None:
    start = compiled(name, "json", json.dumps(IN_PYTHON))
    assert takes(start, '{"text":"str","list":[1,null],"number":0.5,"either":true}')
    for wrong in ('{"text":"str","list":["a"],"number":0.5,"either":true}', "[]"):
        assert not takes(start, wrong)


def test_alternatives_of_one_type_in_two_spellings_do_not_exclude_each_other() -> None:
    schema = {"oneOf": [{"type": "STRING", "maxLength": 3}, {"type": "string", "minLength": 2}]}
    with pytest.raises(InvalidRequestError, match="oneOf is not followed"):
        compiled("llguidance", "json", json.dumps(schema))


KIND_A = {"type": "object", "properties": {"kind": {"const": "a"}, "x": TEXT}, "required": ["kind"]}
KIND_B = {"type": "object", "properties": {"kind": {"enum": ["b", "c"]}}, "required": ["kind"]}
OPEN_A, OPEN_B = ({"type": "object", "properties": {each: TEXT}, "required": [each]} for each in "ab")
IN_OTHER_WORDS: dict[str, tuple[Any, list[str], list[str]]] = {
    "oneOf by types": ({"oneOf": [{"type": "integer"}, TEXT, {"type": "null"}]}, ["1", '"a"', "null"], ["true", "1.5"]),
    "oneOf by references": (
        {"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], "$defs": {"A": KIND_A, "B": KIND_B}},
        ['{"kind":"a","x":"y"}', '{"kind":"c"}'],
        ['{"kind":"d"}', "{}", '{"x":"y"}'],
    ),
    "oneOf of objects that only their names tell apart": (
        {"oneOf": [OPEN_A, OPEN_B]},
        ['{"a":"x"}', '{"b":"x"}'],
        ['{"a":"x","b":"y"}', "{}"],
    ),
    "oneOf of objects that say they are open": (
        {"oneOf": [{**OPEN_A, "additionalProperties": True}, {**OPEN_B, "additionalProperties": {}}]},
        ['{"a":"x"}', '{"b":"x"}'],
        ['{"a":"x","b":"y"}', "{}"],
    ),
    "oneOf of objects that do not describe what they require": (
        {"oneOf": [{**OPEN_A, "required": ["b"]}, {**OPEN_B, "required": ["c"]}]},
        ['{"a":"x","b":"y"}', '{"b":1}', '{"c":1}'],
        ["{}", '{"a":"x"}', '{"b":"x","c":1}'],
    ),
    "oneOf of objects of which one describes what another requires": (
        {"oneOf": [OPEN_A, {**OPEN_B, "properties": {"a": TEXT, "b": TEXT}}]},
        ['{"a":"x"}', '{"b":"x"}'],
        ['{"a":"x","b":"y"}', "{}"],
    ),
    "oneOf of what is required, beside the properties": (
        {"type": "object", "properties": {"a": TEXT, "b": TEXT}, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        ['{"a":"x"}', '{"b":"x"}', '{"b":"x","c":1}'],
        ['{"a":"x","b":"y"}', "{}", '{"a":1}', "1"],
    ),
    "oneOf of objects, beside what all require": (
        {"type": "object", "properties": {"c": TEXT}, "required": ["c"], "oneOf": [OPEN_A, OPEN_B]},
        ['{"c":"x","a":"x"}', '{"c":"x","b":"x"}'],
        ['{"c":"x","a":"x","b":"y"}', '{"a":"x"}', '{"c":"x"}'],
    ),
    "oneOf of references with more beside them": (
        {
            "oneOf": [{"$ref": "#/$defs/A", "required": ["c"], "x-order": 1}, {"$ref": "#/$defs/B", "title": "B"}],
            "$defs": {"A": OPEN_A, "B": {"$ref": "#/$defs/C"}, "C": OPEN_B},
        },
        ['{"a":"x","c":1}', '{"b":"x"}'],
        ['{"a":"x"}', '{"c":1}', '{"b":"x","a":"x","c":1}'],
    ),
    "oneOf of itself": (
        {
            "$ref": "#/$defs/T",
            "$defs": {
                "T": {"oneOf": [{"$ref": "#/$defs/leaf"}, {"$ref": "#/$defs/pair"}]},
                "leaf": {"type": "object", "properties": {"v": TEXT}, "required": ["v"]},
                "pair": {"type": "object", "properties": {"l": {"$ref": "#/$defs/T"}}, "required": ["l"]},
            },
        },
        ['{"v":"a"}', '{"l":{"l":{"v":"a"}}}'],
        ['{"l":{"v":"a"},"v":"b"}', '{"l":{}}'],
    ),
    "oneOf beside anyOf": (
        {"oneOf": [TEXT, {"type": "null"}], "anyOf": [{"type": "string", "maxLength": 1}, {"type": "integer"}]},
        ['"a"'],
        ['"ab"', "null", "1"],
    ),
    "propertyNames of an enum": (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}},
        ['{"a":1}', '{"b":2}', "{}"],
        ['{"c":1}', '{"a":"x"}'],
    ),
    "propertyNames of a pattern": (
        {"type": "object", "propertyNames": {"pattern": "^x-"}, "additionalProperties": {"type": "integer"}},
        ['{"x-a":1}', "{}"],
        ['{"a":1}', '{"x-a":"x"}'],
    ),
    "propertyNames of a length": (
        {"type": "object", "propertyNames": {"minLength": 2, "maxLength": 3}},
        ['{"ab":1}', "{}"],
        ['{"a":1}', '{"abcd":1}'],
    ),
    "unevaluatedProperties": (
        {"type": "object", "properties": {"a": TEXT}, "unevaluatedProperties": False},
        ['{"a":"x"}', "{}"],
        ['{"b":1}'],
    ),
    "unevaluatedItems": (
        {"type": "array", "prefixItems": [TEXT], "unevaluatedItems": False},
        ['["x"]'],
        ['["x",1]'],
    ),
    "uniqueItems of an enum": (
        {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True, "minItems": 1},
        ['["a"]', '["b","a"]'],
        ["[]", '["a","a"]', '["a","b","a"]'],
    ),
    "contains of anything": ({"type": "array", "items": TEXT, "contains": {}}, ['["a"]', '["a","b"]'], ["[]"]),
    "contains of anything, with counts as other programs write them": (
        {"type": "array", "items": TEXT, "contains": True, "minContains": 1.0, "maxContains": 2.0},
        ['["a"]', '["a","b"]'],
        ["[]", '["a","b","c"]'],
    ),
    "lengths of names, as other programs write them": (
        {"type": "object", "propertyNames": {"minLength": 1.0, "maxLength": 2.0}, "maxProperties": 1},
        ["{}", '{"a":1}', '{"ab":1}'],
        ['{"":1}', '{"abc":1}', '{"a{1,2.0}":1}'],
    ),
    "lengths of names that a reference has": (
        {"type": "object", "propertyNames": {"$ref": "#/$defs/N"}, "$defs": {"N": {"maxLength": 2.0}}},
        ["{}", '{"a":1}'],
        ['{"abc":1}', '{"a{0,2.0}":1}'],
    ),
    "lengths that no name has": (
        {"type": "object", "propertyNames": {"minLength": 3, "maxLength": 2}},
        ["{}"],
        ['{"a":1}', '{"abc":1}'],
    ),
    "a length that every name has": (
        {"type": "object", "propertyNames": {"maxLength": 1e10}, "maxProperties": 1},
        ["{}", '{"a":1}'],
        ['{"a":1,"b":2}'],
    ),
    "not of everything": (
        {"type": "object", "properties": {"a": TEXT, "n": {"not": {}}}, "required": ["a"]},
        ['{"a":"x"}'],
        ['{"a":"x","n":1}'],
    ),
    "a lookahead": (
        {"type": "string", "pattern": r"^(?!\.)(?!.*\.\.)(?=.{2,4}$)[a-c.]+$"},
        ['"a.b"', '"ab."'],
        ['".ab"', '"a..b"', '"a"', '"abcab"'],
    ),
    "a text of a number": (
        {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"},
        ['"-1.5"', '".5"', '"12"'],
        ['"-"', '"."', '""', '"1a"'],
    ),
}


@pytest.mark.parametrize("name", IN_OTHER_WORDS)
def test_a_keyword_is_followed_in_other_words(name: str) -> None:
    schema, valid, invalid = IN_OTHER_WORDS[name]
    start, is_valid = (
        compiled("llguidance", "json", json.dumps(schema)),
        jsonschema.Draft202012Validator(schema).is_valid,
    )
    for text in (*valid, *invalid):
        assert is_valid(json.loads(text)) == (text in valid), text
        assert takes(start, text) == (text in valid), text


def test_alternatives_may_have_keywords_that_are_null() -> None:
    one = {**OPEN_A, "enum": None, "patternProperties": None}
    two = {**OPEN_B, "properties": None, "type": None, "additionalProperties": None}
    start = compiled("llguidance", "json", json.dumps({"oneOf": [one, two]}))
    for text in ('{"a":"x"}', '{"b":"x"}'):
        assert takes(start, text)
    for text in ('{"a":"x","b":"y"}', "{}"):
        assert not takes(start, text)


def test_values_of_a_list_are_those_of_a_reference_and_of_what_stands_beside_it() -> None:
    schema = {"type": "array", "uniqueItems": True, "items": {"$ref": "#/$defs/E", "enum": ["a"]}}
    with pytest.raises(InvalidRequestError, match="uniqueItems is not followed"):
        compiled("llguidance", "json", json.dumps({**schema, "$defs": {"E": {"enum": ["a", "b"]}}}))


@pytest.mark.parametrize("place", ["$defs", "definitions"])
@pytest.mark.parametrize("name", BACKENDS)
def test_definitions_that_no_reference_leads_to_have_no_effect(name: str, place: str) -> None:
    """Programs that make tools from an API's document give each tool all of its definitions."""
    definitions: dict[str, Any] = {
        "a/b": {"type": "array", "items": {"$ref": f"#/{place}/deep/properties/c"}, "maxItems": 1},
        "deep": {"type": "object", "properties": {"c": {"type": "null"}}},
        "unused": {"not": {"$ref": f"#/{place}/unused_too"}},
        "unused_too": {"if": {"$ref": f"#/{place}/unused"}, "then": {"minItems": 1}},
    }
    schema = {"type": "object", "properties": {"x": {"$ref": f"#/{place}/a~1b"}}, "required": ["x"]}
    start = compiled(name, "json", json.dumps({**schema, "additionalProperties": False, place: definitions}))
    assert takes(start, '{"x":[null]}')
    assert not takes(start, '{"x":[1]}')
    with pytest.raises(InvalidRequestError, match=rf"not is not followed: .*\(at /.{place[1:]}/unused\)"):
        compiled(name, "json", json.dumps({"$ref": f"#/{place}/unused", place: definitions}))


NOT_FOLLOWED: dict[str, Any] = {
    "not": {"type": "string", "not": {"const": "a"}},
    "if": {"if": {"type": "string"}, "then": {"minLength": 2}},
    "contains": {"type": "array", "contains": {"type": "string"}},
    "uniqueItems": {"type": "array", "items": TEXT, "uniqueItems": True},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
    "propertyNames": {"type": "object", "propertyNames": {"not": {"const": "a"}}},
    "unevaluatedProperties": {"allOf": [OPEN_A], "unevaluatedProperties": False},
    "$dynamicRef": {"$dynamicRef": "#a"},
    "oneOf": {"oneOf": [TEXT, {"type": "string", "minLength": 2}]},
}


@pytest.mark.parametrize("around", ["{}", '{{"properties": {{"p": {}}}}}'])
@pytest.mark.parametrize("name", NOT_FOLLOWED)
def test_a_keyword_that_is_not_followed_is_named_with_its_place_and_what_to_write(name: str, around: str) -> None:
    where = "/" if around == "{}" else "/properties/p"
    schema = around.format(json.dumps(NOT_FOLLOWED[name]))
    with pytest.raises(InvalidRequestError, match=rf"{name.replace('$', '.')} is not followed: .*\(at {where}\)"):
        compiled("llguidance", "json", schema)


@pytest.mark.parametrize("more", [{}, {"type": "string"}, {"pattern": "^[^.]*$", "maxLength": 30}], ids=str)
def test_dates_and_times_are_ones_that_programs_can_read(more: dict[str, Any]) -> None:
    dates, times = ("2023-02-28", "2024-02-29", "2000-02-29", "2023-12-31"), ("00:00:00Z", "23:59:59+14:00")
    bad_dates = ("2023-02-29", "1900-02-29", "2023-02-30", "2023-04-31", "2023-13-01", "2023-1-01", "023-01-01")
    bad_times = ("23:59:60Z", "08:48:60Z", "24:00:00Z", "12:60:00Z", "12:00:00", "12:00:00+24:00")
    cases: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
        "date": (dates, bad_dates),
        "time": (times, bad_times),
        "date-time": (
            tuple(f"{date}T{time}" for date in dates for time in times),
            (*(f"{date}T{times[0]}" for date in bad_dates), *(f"{dates[0]}T{time}" for time in bad_times)),
        ),
    }
    for name, (good, bad) in cases.items():
        for library in ("llguidance",) if "pattern" in more else BACKENDS:
            start = compiled(library, "json", json.dumps({"format": name, **more}))
            assert all(takes(start, json.dumps(text)) for text in good)
            assert not [text for text in bad if takes(start, json.dumps(text))]
