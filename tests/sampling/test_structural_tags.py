"""Structural tags in both notations, followed token by token by both libraries: they take what the tag says, and no
more; what a library cannot follow is refused with the reason."""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_grammar_backends import ONE_PROPERTY, compiled, each_backend, takes
from thinned import every

from headrace import InvalidRequestError, StructuredOutputsParams


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def tag(begin: str, content: dict[str, Any], end: str | list[str]) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def before(end: str, form: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": [form, const(end)]}


SCHEMA = {"type": "json_schema", "json_schema": ONE_PROPERTY}
DIGITS = {"type": "regex", "pattern": r"\d{1,3}/x"}
ANY = {"type": "any_text"}
F, G = tag("<f>", SCHEMA, "</f>"), tag("<g>", DIGITS, "</g>")
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f", "<g"], "tags": [F, G]}
SEPARATED = {"type": "tags_with_separator", "tags": [F, G], "separator": ","}
ONE_F, ONE_G = '<f>{"a":1}</f>', "<g>12/x</g>"

CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "const_string": (const('a "b"'), ['a "b"'], ["a", 'a "b" ', ""]),
    "json_schema": (SCHEMA, ['{"a":7}'], ['{"b":7}', '{"a":"7"}', "7"]),
    "json_schema true": ({"type": "json_schema", "json_schema": True}, ["[1]", "null"], ["nul"]),
    "regex": (DIGITS, ["1/x", "123/x"], ["1234/x", "1x", "/x"]),
    "grammar, GBNF": ({"type": "grammar", "grammar": 'root ::= "a" root | "b"'}, ["b", "aab"], ["a", "ba"]),
    "any_text": (ANY, ["", "so it is\n<f>"], []),
    "any_text without": ({**ANY, "excludes": ["no", "nay"]}, ["", "yes n"], ["a no b", "nay"]),
    "sequence": ({"type": "sequence", "elements": [const("a"), DIGITS, const("b")]}, ["a1/xb"], ["a1/x", "1/xb"]),
    "sequence, text at its end": ({"type": "sequence", "elements": [const("a"), ANY]}, ["a", "a b"], ["b a"]),
    "or": ({"type": "or", "elements": [const("a"), DIGITS]}, ["a", "5/x"], ["a5/x", ""]),
    "optional": (
        {"type": "sequence", "elements": [{"type": "optional", "content": F}, const("!")]},
        ["!", ONE_F + "!"],
        [ONE_F],
    ),
    "star": (
        {"type": "sequence", "elements": [{"type": "star", "content": F}, const("!")]},
        ["!", ONE_F * 3 + "!"],
        [ONE_F],
    ),
    "plus": (
        {"type": "sequence", "elements": [{"type": "plus", "content": F}, const("!")]},
        [ONE_F * 2 + "!"],
        ["!", ONE_F],
    ),
    "repeat": ({"type": "repeat", "min": 1, "max": 2, "content": const("ab")}, ["ab", "abab"], ["", "ababab"]),
    "repeat at least": ({"type": "repeat", "min": 2, "max": -1, "content": const("ab")}, ["ababab"], ["", "ab"]),
    "tag": (F, [ONE_F], ['<f>{"a":1}', '<f>{"b":1}</f>', ONE_F + "x", '{"a":1}']),
    "tag of text": (tag("<t>", ANY, "</t>"), ["<t></t>", "<t>a < b</t>"], ["<t>a", "<t>a</t>b", "<t></t></t>"]),
    "tag with two ends": (tag("<t>", ANY, ["</t>", "."]), ["<t>a</t>", "<t>a."], ["<t>a", "<t>a.b", "<t>a.</t>"]),
    "tag of either": (
        tag("<t>", {"type": "or", "elements": [DIGITS, tag("<", ANY, ">")]}, "</t>"),
        ["<t>1/x</t>", "<t><a></t>"],
        ["<t>1/x", "<t><a</t>"],
    ),
    "triggered_tags": (
        TRIGGERED,
        ["", "text", f"a {ONE_F} b {ONE_G}", ONE_F * 2],
        ["a <f", '<f>{"b":1}</f>', "<g>x</g>"],
    ),
    "triggered_tags at_least_one": (
        {**TRIGGERED, "at_least_one": True},
        [ONE_F, ONE_G + " and more " + ONE_F],
        ["", "text", "a " + ONE_F],
    ),
    "triggered_tags stop_after_first": (
        {**TRIGGERED, "stop_after_first": True},
        ["", "text", "a " + ONE_F],
        [ONE_F + "b", ONE_F * 2],
    ),
    "triggered_tags, one exactly": (
        {**TRIGGERED, "at_least_one": True, "stop_after_first": True},
        [ONE_F, ONE_G],
        ["", "a" + ONE_F, ONE_F * 2],
    ),
    "triggered_tags without": ({**TRIGGERED, "excludes": ["no"]}, ["n", "a " + ONE_F + " b"], ["no", ONE_F + " no"]),
    "triggered_tags in a tag": (
        tag("<t>", TRIGGERED, "</t>"),
        ["<t></t>", f"<t>a {ONE_F} b</t>"],
        ["<t>a", f"<t>{ONE_F}", '<t><f>{"b":1}</f></t>', "<t></t>a"],
    ),
    "tags_with_separator": (SEPARATED, ["", ONE_F, f"{ONE_F},{ONE_G},{ONE_F}"], [ONE_F + ONE_G, ONE_F + ",", "a"]),
    "tags_with_separator at_least_one": ({**SEPARATED, "at_least_one": True}, [ONE_F, f"{ONE_F},{ONE_G}"], [""]),
    "tags_with_separator, at most one": ({**SEPARATED, "stop_after_first": True}, ["", ONE_G], [f"{ONE_F},{ONE_G}"]),
    "reasoning and an answer": (
        {"type": "sequence", "elements": [tag("<think>", ANY, "</think>"), SCHEMA]},
        ['<think>so</think>{"a":1}'],
        ['{"a":1}', "<think>so</think>"],
    ),
}


@each_backend
@pytest.mark.parametrize("case", every(2, CASES))
def test_a_tag_takes_what_its_format_says_and_no_more(name: str, case: str) -> None:
    form, taken, refused = CASES[case]
    start = compiled(name, "structural_tag", json.dumps({"type": "structural_tag", "format": form}))
    assert [each for each in taken if not takes(start, each)] == []
    assert [each for each in refused if takes(start, each)] == []


@each_backend
def test_the_older_notation_is_that_of_triggered_tags(name: str) -> None:
    structures = [{"begin": "<f>", "schema": ONE_PROPERTY, "end": "</f>"}]
    for schema in (ONE_PROPERTY, json.dumps(ONE_PROPERTY)):
        structures[0]["schema"] = schema
        start = compiled(name, "structural_tag", json.dumps({"structures": structures, "triggers": ["<f"]}))
        assert takes(start, f"a {ONE_F} b")
        assert not takes(start, "a <fa")


@each_backend
def test_schemas_in_formats_are_closed_where_that_is_asked_for(name: str) -> None:
    text = json.dumps({"format": {"type": "sequence", "elements": [TRIGGERED | {"at_least_one": True}]}})
    with_others = ONE_F.replace("1}", '1,"b":2}')
    assert takes(compiled(name, "structural_tag", text), with_others) == (name == "llguidance"), "xgrammar's always are"
    assert not takes(compiled(name, "structural_tag", text, disable_additional_properties=True), with_others)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"type": "token", "token": 5}, "Invalid value 'token' - at `$.format.type`"),
        ({"type": "const_string"}, "missing required field `value` - at `$.format`"),
        ({**SCHEMA, "style": "qwen_xml"}, "unknown field `style`"),
        ({**TRIGGERED, "triggers": ["<f"]}, "no trigger begins '<g>'"),
        ({"type": "or", "elements": []}, "nothing to choose from"),
        ({"type": "sequence", "elements": [ANY, DIGITS]}, "any_text may go on with any text"),
        ({"type": "star", "content": ANY}, "any_text may go on with any text"),
        ({"type": "json_schema", "json_schema": {"type": "foo"}}, "Invalid type: foo"),
        ({"type": "regex", "pattern": "(a"}, "unclosed group"),
    ],
)
def test_what_llguidance_cannot_be_told_is_refused_with_the_reason(form: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError, match="the structural tag cannot be used") as caught:
        compiled("llguidance", "structural_tag", json.dumps({"format": form}))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"triggers": []}, "structural_tag must have a format, or structures and triggers"),
        ("{", "structural_tag is not valid JSON"),
        ("[]", "structural_tag must be a JSON object"),
        (5, "structural_tag is int, and must be JSON or a dict"),
    ],
)
def test_what_is_no_tag_is_refused_before_it_is_sent(given: Any, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        StructuredOutputsParams(structural_tag=given)
