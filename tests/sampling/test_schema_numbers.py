"""Numbers of JSON schemas: an answer has exactly the number, or one within the bounds, or the schema is refused."""

from __future__ import annotations

import itertools
import json
import random
from decimal import Decimal
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_grammar_backends import NAMES, compiled, each_backend, takes, walk
from thinned import every

from headrace import InvalidRequestError

NOT_EXACT = "is not followed exactly: integers up to 2"
EXACT = ("0", "-1", "9007199254740992", "-9007199254740992", "1000000000000000000", "0.5", "-2.25", "1e2", "3.0")
IN_LLGUIDANCE = ("0.1", "3.14", "-0.007", "123456.789", "1e-7", "99999999999999.5")
NEVER = (
    *("9007199254740993", "-9007199254740993", "9223372036854775807", "-9223372036854775808", "18446744073709551615"),
    *("123456789012345678901234567890", "0.1234567890123456789", "123456789.123456789", "1e400", "1e300", "5e-324"),
    *("0.30000000000000004", "1" + 400 * "0", "1e20", "9223372036854775808.0"),
)


def refused(name: str, schema: str, said: str = NOT_EXACT) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        compiled(name, "json", schema)


def written(name: str, schema: str) -> Decimal:
    text, is_whole = walk(name, compiled(name, "json", schema).copy(), random.Random(1), 60)
    assert is_whole
    return Decimal(text)


@pytest.mark.parametrize("number", EXACT)
@each_backend
def test_a_value_is_written_exactly(name: str, number: str) -> None:
    assert written(name, f'{{"const": {number}}}') == Decimal(number)
    assert written(name, f'{{"enum": [{number}]}}') == Decimal(number)


@pytest.mark.parametrize("number", IN_LLGUIDANCE)
def test_a_fraction_is_written_in_its_own_digits(number: str) -> None:
    assert written("llguidance", f'{{"const": {number}}}') == Decimal(number)


def test_xgrammar_gets_no_fraction_that_it_writes_in_17_digits() -> None:
    for number in ("0.1", "3.14", "1e-7"):
        refused("xgrammar", f'{{"const": {number}}}', "it does not follow the number .* exactly")


@pytest.mark.parametrize("around", every(2, ['{{"const": {0}}}', '{{"enum": [{{"a": [{0}]}}]}}', '{{"minimum": {0}}}']))
@pytest.mark.parametrize("number", NEVER)
@each_backend
def test_a_number_that_would_be_rounded_is_refused(name: str, number: str, around: str) -> None:
    refused(name, around.format(number))
    refused(name, f'{{"properties": {{"a": {around.format(number)}}}}}', r"\(at /properties/a")


@given(
    st.integers(-(2**66), 2**66)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.decimals(-1000, 1000, places=4).map(float)
)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_value_is_exact_or_refused(value: float) -> None:
    for name in NAMES:
        try:
            found = written(name, json.dumps({"const": value}))
        except InvalidRequestError:
            is_near_0 = 0 < abs(value) < 1e-22
            assert abs(value) > 2**53 or is_near_0 or len(repr(value)) > 5 or name == "xgrammar"
        else:
            assert found == Decimal(repr(value))


# --- bounds -----------------------------------------------------------------------------------------------------------

ENDS: tuple[float | None, ...] = (None, 0, 1, -1, 0.5, -0.5, 0.05, 1.5, 9, 9.5, -9.5, 10, 99.99, 1e-7)
KEYWORDS = list(itertools.product(("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")))
AT_ENDS = ("0", "-0", "0.0", "1", "-1", "1.0", "0.5", "0.05", "-0.5", "1.5", "9.5", "-9.5", "10", "99.99", "1e-7")
BETWEEN = (
    "0.049",
    "0.051",
    "0.1",
    "0.3",
    "-0.1",
    "-0.9",
    "1.05",
    "2",
    "9.49",
    "9.6",
    "11",
    "99",
    "100",
    "-9.49",
    "-12",
)


def bounded(low: float | None, high: float | None, names: tuple[str, str], kind: str) -> dict[str, Any]:
    bounds = {name: end for name, end in zip(names, (low, high), strict=True) if end is not None}
    return {"type": kind, **bounds}


@pytest.mark.parametrize(
    "names",
    every(
        3, [(names,) for names in itertools.product(("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))]
    ),
)
@pytest.mark.parametrize("kind", ["number", "integer"])
@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.system)])  # prime to the number of ends
@each_backend
def test_bounds_are_kept_exactly(name: str, step: int, kind: str, names: tuple[str, str]) -> None:
    for low, high in [*itertools.product(ENDS, ENDS)][::step]:
        schema = bounded(low, high, names, kind)
        is_valid = jsonschema.Draft202012Validator(schema).is_valid
        between = [each for each in BETWEEN if is_valid(json.loads(each))]
        try:
            start = compiled(name, "json", json.dumps(schema))
        except InvalidRequestError:
            assert not between or (name == "xgrammar" and kind == "number"), schema
            continue
        assert all(is_valid(json.loads(each)) for each in (*AT_ENDS, *BETWEEN) if takes(start, each)), schema
        assert all(takes(start, each) for each in between), schema


MERGED: dict[str, Any] = {
    "in allOf": {"allOf": [{"type": "number", "exclusiveMinimum": 0}, {"maximum": 0.5}]},
    "beside a reference": {
        "$ref": "#/$defs/a",
        "maximum": 0.5,
        "$defs": {"a": {"type": "number", "exclusiveMinimum": 0}},
    },
    "beside anyOf": {"maximum": 0.5, "anyOf": [{"type": "number", "exclusiveMinimum": 0}]},
    "as draft 4 has it": {"type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 0.5},
    "of two kinds": {"type": ["integer", "number"], "exclusiveMinimum": 0, "maximum": 0.5},
    "without a type": {"exclusiveMinimum": 0, "maximum": 0.5},
}


@pytest.mark.parametrize("name", MERGED)
def test_bounds_from_several_places_are_kept(name: str) -> None:
    start = compiled("llguidance", "json", json.dumps(MERGED[name]))
    assert not [text for text in ("0", "0.0", "-0", "0.51", "1", "-0.1") if takes(start, text)]
    assert all(takes(start, text) for text in ("0.1", "0.25", "0.5", "0.001"))


def test_xgrammar_gets_no_range_in_which_it_finds_no_number() -> None:
    for bounds in ({"minimum": 1e-7, "maximum": 2e-7}, {"exclusiveMinimum": 0.5, "exclusiveMaximum": 0.500001}):
        schema = json.dumps({"type": "number", **bounds})
        refused("xgrammar", schema, "it does not follow more than six decimals|it finds no number")
        assert 0 < written("llguidance", schema) < 1


@pytest.mark.parametrize("most", [1.7976931348623157e308, 3.4028234663852886e38, 1e19])
@each_backend
def test_far_bounds_are_followed_as_far_as_the_library_can(name: str, most: float) -> None:
    start = compiled(name, "json", json.dumps({"type": "number", "minimum": -most, "maximum": most}))
    assert takes(start, "12345.5")
    assert takes(start, "-999999999999999999")
    assert not takes(start, "1e999")


@each_backend
def test_a_far_bound_of_integers_is_refused(name: str) -> None:
    for bound in ("1e20", "9223372036854775808", "9007199254740993.0"):
        refused(name, f'{{"type": "integer", "maximum": {bound}}}')


@each_backend
def test_counts_beyond_any_answer_are_no_limits_or_refused(name: str) -> None:
    for most in ("1000000000000", "1e15"):
        assert takes(compiled(name, "json", f'{{"type": "string", "maxLength": {most}}}'), '"abc"')
        assert takes(
            compiled(name, "json", f'{{"type": "array", "items": {{"type": "null"}}, "maxItems": {most}}}'), "[null]"
        )
        refused(name, f'{{"type": "string", "minLength": {most}}}', "minLength is 2.31 or more")


def test_common_multiples_are_followed_or_refused() -> None:
    """llguidance computes them in 32 bits, and takes what overflows for another number."""
    few = compiled("llguidance", "json", '{"allOf": [{"multipleOf": 0.5}, {"type": "number", "multipleOf": 0.3}]}')
    assert takes(few, "1.5")
    assert not takes(few, "0.5")
    for many in (
        {"allOf": [{"type": "integer", "multipleOf": 65536}, {"multipleOf": 65537}]},
        {"$ref": "#/$defs/a", "multipleOf": 65537, "$defs": {"a": {"type": "integer", "multipleOf": 65536}}},
        {"allOf": [{"type": "number", "multipleOf": 0.0003}, {"multipleOf": 500003}]},
    ):
        refused("llguidance", json.dumps(many), "several multipleOf of one number")
    alone = compiled("llguidance", "json", '{"properties": {"a": {"multipleOf": 65537}, "b": {"multipleOf": 65536}}}')
    assert not takes(alone, '{"a":65536}')
