"""Every library of grammars, followed token by token: nothing that it lets through breaks its schema, and what it
cannot follow is refused. Judged by jsonschema and by JSON Schema's own suite."""

from __future__ import annotations

import ipaddress
import itertools
import json
import random
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jsonschema
import numpy as np
import pytest
import tiny_models
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_structured_outputs import ENGINE, WITHOUT_FORMATS, answers_to_random_schemas, ask, asked_of_many, form
from thinned import every
from transformers.convert_slow_tokenizer import bytes_to_unicode

from headrace import LLM, InvalidRequestError, OptionError
from headrace.core.options.structured_outputs import structured_outputs_of
from headrace.core.structured_output.backend import Backend, Vocabulary, make_backend
from headrace.ipc.extras import how_to_install
from headrace.ipc.messages import StructuredOutput

NAMES = ("llguidance", "xgrammar")
TOKENIZER = tiny_models.make_tokenizer()
VOCAB_SIZE = len(TOKENIZER)
VOCABULARY = Vocabulary(
    tokenizer_json=TOKENIZER.backend_tokenizer.to_str().encode(),
    vocab_size=VOCAB_SIZE,
    eos_token_ids=(tiny_models.EOS,),
)
BACKENDS: dict[str, Backend] = {name: make_backend(name, VOCABULARY) for name in NAMES}
each_backend = pytest.mark.parametrize("name", NAMES)


def compiled(name: str, kind: Any, text: str, **more: Any) -> Any:
    is_tight = name == "llguidance" or kind in ("json", "json_object")
    wanted = StructuredOutput(kind=kind, text=text, **{"disable_any_whitespace": is_tight, **more})
    return BACKENDS[name].compile(wanted)


def tokens_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def may_end(matcher: Any) -> bool:
    return bool(matcher.is_complete or matcher.num_valid([tiny_models.EOS]))


def takes(start: Any, text: str) -> bool:
    """Whether the text is a whole answer."""
    matcher = start.copy()
    return all(matcher.accept(token_id) for token_id in tokens_of(text)) and may_end(matcher)


def walk(name: str, matcher: Any, numbers: random.Random, most: int) -> tuple[str, bool]:
    """An answer of tokens chosen at random among those that masks allow, and whether it is whole."""
    mask, token_ids = np.zeros((1, -(-VOCAB_SIZE // 32)), np.int32), list[int]()
    while len(token_ids) < most and not matcher.is_complete:
        BACKENDS[name].fill([(matcher, 0, [])], mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        assert allowed, f"nothing may follow on {TOKENIZER.decode(token_ids)!r}"
        token_id = tiny_models.EOS if tiny_models.EOS in allowed else numbers.choice(allowed)
        assert matcher.accept(token_id), f"the mask allows {token_id}, and the matcher does not"
        if token_id != tiny_models.EOS:
            token_ids.append(token_id)
    return TOKENIZER.decode(token_ids), matcher.is_complete


WITHIN = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
"""A schema alone, in a tag and in a grammar."""


@each_backend
@pytest.mark.parametrize(
    ("more", "allowed"),
    [
        ({}, ("", " ", "  ", "\n")),
        ({"disable_any_whitespace": True}, ("",)),
        ({"whitespace_pattern": "[ ]?"}, ("", " ")),
    ],
    ids=("any", "none", "pattern"),
)
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json", json.dumps(WITHIN)),
        ("structural_tag", json.dumps({"format": {"type": "json_schema", "json_schema": WITHIN}})),
        ("grammar", f"start: %json {json.dumps(WITHIN)}"),
    ],
    ids=("json", "structural_tag", "grammar"),
)
def test_json_has_the_white_space_that_is_asked_for_wherever_it_stands(
    name: str, kind: str, text: str, more: dict[str, Any], allowed: tuple[str, ...]
) -> None:
    options = {"disable_any_whitespace": False, **more}
    if name == "xgrammar" and more and (kind, *more) != ("json", "disable_any_whitespace"):
        with pytest.raises(InvalidRequestError, match=r"white space of JSON within|no whitespace_pattern"):
            compiled(name, kind, text, **options)
        return
    matcher = compiled(name, kind, text, **options)
    found = [each for each in ("", " ", "  ", "\n") if takes(matcher, f'{{"a":{each}1{each}}}')]
    assert found == list(allowed)


@pytest.mark.parametrize("others", [True, {}, {"type": "string"}, {"maxLength": 3}, None], ids=str)
def test_a_declared_name_is_not_written_in_another_way(others: Any) -> None:
    declared = {each: {"type": "integer"} for each in ("a", "ab", "c/d", 'q"r', "back\\s", "\u00e9", "")}
    schema: dict[str, Any] = {"properties": declared, "required": ["a", "z"], "type": "object"}
    schema |= {} if others is None else {"additionalProperties": others}
    start = compiled("llguidance", "json", json.dumps(schema))
    for name in (
        r"\u0061",
        r"a\u0062",
        r"c\/d",
        r"q\u0022r",
        r"back\u005cs",
        r"\u00e9",
        r"\u00E9",
        "a",
        "ab",
        r"\u007a",
    ):
        assert not takes(start, f'{{"a":1,"z":"s","{name}":"s"}}'), name
    for name in ("b", "abc", "ac", "c", "q", r"q\"", r"z\n", "\u4e2d", "e\u0301", "x" * 30):
        assert takes(start, f'{{"a":1,"z":"s","{name}":"s"}}'), name
    for name in ("ab", "c/d", r"q\"r", r"back\\s", "\u00e9", ""):
        assert takes(start, f'{{"a":1,"{name}":5,"z":"s"}}'), name


def test_a_declared_name_with_several_escapes_is_refused_in_an_open_object() -> None:
    schema = {"properties": {"a\nb": {"type": "integer"}}, "type": "object"}
    with pytest.raises(InvalidRequestError, match=r"may write its name in several ways.*\(at /items\)"):
        compiled("llguidance", "json", json.dumps({"type": "array", "items": schema}))
    start = compiled("llguidance", "json", json.dumps({**schema, "additionalProperties": False}))
    assert takes(start, r'{"a\nb":5}')


ONE_PROPERTY = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
IN_LARK = f"""start: "%json {{" /[%"]json/ %json {json.dumps(ONE_PROPERTY)}  // "%json {{
"""
TAGGED = {"structures": [{"begin": "<f>", "schema": ONE_PROPERTY, "end": "</f>"}], "triggers": ["<f>"]}


@pytest.mark.parametrize(
    ("name", "kind", "text", "around"),
    [
        ("llguidance", "json", json.dumps(ONE_PROPERTY), ("", "")),
        ("xgrammar", "json", json.dumps(ONE_PROPERTY), ("", "")),
        ("llguidance", "grammar", IN_LARK, ('%json {"json', "")),
        ("llguidance", "structural_tag", json.dumps(TAGGED), ("<f>", "</f>")),
    ],
)
def test_objects_have_no_other_properties_wherever_their_schema_stands(
    name: str, kind: str, text: str, around: tuple[str, str]
) -> None:
    free, strict = (compiled(name, kind, text, disable_additional_properties=each) for each in (False, True))
    named, other = ('{"a":1}'.join(around), '{"a":1,"b":2}'.join(around))
    assert takes(free, named)
    assert takes(free, other)
    assert takes(strict, named)
    assert not takes(strict, other)


TWICE = {
    'root ::= ("a"+)* "b"': (["b", "aab"], ["a", "ba"]),
    'root ::= (("a" | "b"){2}){2}': (["abab"], ["ab", "aba", "ababa"]),
    'root ::= ( ([a-c]? )) {2,3} "+)*"  # ("a"+)*': (["ab+)*", "+)*", "abc+)*"], ["abca+)*", "ab"]),
    'root ::= ("a" x*)+\nx ::= ("+)*" | [+)*]{2})': (["a", "a+)*a", "a)+"], ["a+", "+)*"]),
}


@each_backend
@pytest.mark.parametrize("grammar", TWICE)
def test_what_is_repeated_in_a_gbnf_grammar_may_be_a_repetition(name: str, grammar: str) -> None:
    start, (right, wrong) = compiled(name, "grammar", grammar), TWICE[grammar]
    assert [text for text in right if not takes(start, text)] == []
    assert [text for text in wrong if takes(start, text)] == []


def test_another_version_of_xgrammar_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its functions are called without its Python package, which would know their arguments; and 0.2.9 takes texts that
    repeat `([^a].){2,6}` no time."""
    monkeypatch.setattr(metadata, "version", lambda _: "0.2.9")
    with pytest.raises(InvalidRequestError, match=r"xgrammar 0\.2\.9 cannot be used.*xgrammar>=0\.2\.5,<0\.2\.9"):
        make_backend("xgrammar", VOCABULARY)


NO_END = {"$ref": "#/$defs/a"}
ENDLESS = {"type": "object", "additionalProperties": NO_END, "$defs": {"a": {"$ref": "#/$defs/b"}, "b": NO_END}}


@each_backend
def test_an_answer_that_nothing_may_follow_on_is_not_taken_for_a_whole_one(name: str) -> None:
    matcher = compiled(name, "json", json.dumps(ENDLESS)).copy()
    assert takes(matcher, "{}")
    assert all(matcher.accept(token_id) for token_id in tokens_of('{"a":'))
    mask = np.zeros((1, -(-VOCAB_SIZE // 32)), np.int32)
    BACKENDS[name].fill([(matcher, 0, [])], mask)
    assert not matcher.is_complete
    assert not matcher.accept(tiny_models.EOS)
    assert not matcher.is_complete
    if name == "llguidance":
        assert "leads back to itself" in matcher.problem


LISTED: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"enum": ["a", 1, 2.0, True, None], "type": "string"}, ["[]", '["a"]'], ["[1]", '["a",1]', "[null]"]),
    ({"enum": ["a", 1, 2.0, 0.5, True], "type": ["integer", "boolean"]}, ["[1,2,true]"], ["[0.5]", '["a"]']),
    ({"enum": ["a", "a", "b"]}, ['["a","b"]', '["b"]'], ['["a","a"]', '["a","b","a"]']),
    ({"enum": [[1], [1.0], [True], {"a": [0]}]}, ["[[1],[true]]"], ["[[1],[1.0]]", '[{"a":[0]},{"a":[0.0]}]']),
]  # fmt: skip


@each_backend
@pytest.mark.parametrize("index", range(len(LISTED)))
def test_lists_without_repetition_have_the_values_that_their_type_allows(name: str, index: int) -> None:
    items, right, wrong = LISTED[index]
    schema = {"type": "array", "items": items, "uniqueItems": True}
    assert not [text for text in right if not jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))]
    assert not [text for text in wrong if jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))]
    start = compiled(name, "json", json.dumps(schema))
    assert [text for text in right if not takes(start, text)] == []
    assert [text for text in wrong if takes(start, text)] == []


@each_backend
def test_a_list_without_repetition_is_refused_where_more_is_said_of_it(name: str) -> None:
    for items, beside in (
        ({"enum": ["a", "bb"], "minLength": 2}, {}),
        ({"enum": ["a", "b"], "const": "b"}, {}),
        ({"enum": ["a", "b"]}, {"enum": [["a"]]}),
        ({"enum": ["a", "b"]}, {"const": ["a"]}),
    ):
        with pytest.raises(InvalidRequestError, match="uniqueItems is not followed"):
            compiled(name, "json", json.dumps({"type": "array", "items": items, "uniqueItems": True, **beside}))
    with pytest.raises(InvalidRequestError, match="is not followed exactly"):
        compiled(name, "json", '{"type": "array", "items": {"enum": [9007199254740993]}, "uniqueItems": true}')


@each_backend
def test_properties_that_only_repeat_a_name_do_not_count(name: str) -> None:
    for schema in ({"minProperties": 2}, {"minProperties": 3, "required": ["a"]}):
        with pytest.raises(
            InvalidRequestError, match=r"minProperties \d is not followed: name at least \d in required"
        ):
            compiled(name, "json", json.dumps({"type": "object", **schema}))
    two = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"], "minProperties": 2}
    start = compiled(name, "json", json.dumps(two))
    assert takes(start, '{"a":null,"b":1}')
    assert not takes(start, '{"a":null,"a":1}')
    assert not takes(start, '{"a":null}')


SURROGATES = [bytes((0xED, second, 0x80)) for second in range(0xA0, 0xC0)]
BYTES = {each: TOKENIZER.convert_tokens_to_ids(character) for each, character in bytes_to_unicode().items()}


@each_backend
@pytest.mark.parametrize(("least", "most"), [(0, 0), (0, 3), (2, 3), (3, 3), (1, 128), (1, 129)])
def test_a_text_has_as_many_characters_as_its_schema_says(name: str, least: int, most: int) -> None:
    start = compiled(name, "json", json.dumps({"type": "string", "minLength": least, "maxLength": most}))
    for length in {0, least - 1, least, most - 1, most, most + 1} - {-1}:
        assert takes(start, f'"{"ü" * length}"') == (least <= length <= most), length
    if most > 1:
        assert not takes(start, '"a\n"')
        assert not takes(start, '"a"b"')
    if most:
        for not_utf_8 in (b"\xe0\x80\x80", b"\xe0\x9f\xbf", b"\xf0\x80\x80\x80", b"\xf4\x90\x80\x80"):
            assert start.num_valid([BYTES[each] for each in b'"' + not_utf_8]) == 2, not_utf_8


@each_backend
def test_a_text_within_a_grammar_has_no_control_characters(name: str) -> None:
    start = compiled(name, "grammar", 'start: "f" %json {"type": "string", "maxLength": 4}')
    assert takes(start, 'f"ab"')
    assert start.num_valid([BYTES[each] for each in b'f"a\x11']) == 3


@each_backend
@pytest.mark.parametrize(
    ("kind", "text", "before"), [("json", '{"type": "string", "maxLength": 4}', b'"a'), ("regex", ".{2,4}", b"a")]
)
def test_no_answer_has_what_utf_8_does_not_have(name: str, kind: str, text: str, before: bytes) -> None:
    """A surrogate is three bytes of no character: a text of bounded length would be longer than its bound."""
    start = compiled(name, kind, text)
    assert all(start.accept(BYTES[each]) for each in before)
    begun = start.copy()
    assert begun.accept(BYTES[0xED]), "characters up to U+D7FF begin so"
    mask = np.zeros((2, -(-VOCAB_SIZE // 32)), np.int32)
    BACKENDS[name].fill([(begun, 0, [])], mask[:1])
    after = np.unpackbits(mask.view(np.uint8), axis=1, bitorder="little")
    assert [each for each in range(0x80, 0xC0) if after[0, BYTES[each]]] == list(range(0x80, 0xA0))
    BACKENDS[name].fill([(start, 0, [BYTES[0xED]])], mask)
    drafted = np.unpackbits(mask.view(np.uint8), axis=1, bitorder="little")
    assert np.array_equal(drafted[1], after[0])
    for surrogate in SURROGATES:
        assert start.num_valid([BYTES[each] for each in surrogate]) == 1
        assert not begun.copy().accept(BYTES[surrogate[1]])
    assert start.num_valid([BYTES[each] for each in "\ud7ff".encode()]) == 3


@each_backend
@pytest.mark.parametrize(
    ("kind", "text", "answer"),
    [
        ("json", '{"enum": ["<s>x"]}', '"<s>x"'),
        ("json", '{"type": "string"}', '"<s>x"'),
        ("choice", '["<s>x"]', "<s>x"),
        ("regex", "<s>x", "<s>x"),
        ("grammar", 'root ::= "<s>x"', "<s>x"),
    ],
)
def test_a_special_token_does_not_stand_for_its_text_in_an_answer(name: str, kind: str, text: str, answer: str) -> None:
    """Answers do not show it: what a choice says would be lacking."""
    start, before = compiled(name, kind, text), answer.partition("<")[0]
    assert all(start.accept(token_id) for token_id in tokens_of(before))
    forced = start.forced_tokens()
    assert tiny_models.BOS not in forced
    mask = np.zeros((1, -(-VOCAB_SIZE // 32)), np.int32)
    BACKENDS[name].fill([(start, 0, [])], mask)
    assert not mask[0, 0] & (1 << tiny_models.BOS)
    assert not start.copy().accept(tiny_models.BOS)
    letters = [token_id for each in "<s>x" for token_id in tokens_of(each)]
    assert start.num_valid(letters) == len(letters)


CLASSES = (r"\d", r"\w", r"[\d-]{2}", r"[-\w]{2}", r"\\\d", r"\[\d")
COMPLEMENTS = (r"\D", r"\W", r"\S", r"[^\d]", r"[^a\w]{2}", r"[^]\w]", r"[^\s]", r"[^\D]", r"[^\W]", r"[]\d]")


@pytest.mark.parametrize(
    ("name", "pattern"),
    [(name, each) for name in NAMES for each in CLASSES] + [("llguidance", each) for each in COMPLEMENTS],
)
def test_classes_of_characters_are_no_wider_than_pythons(name: str, pattern: str) -> None:
    r"""Unicode has digits that few fonts and no int() know, and marks that are part of Rust's \w alone."""
    start, numbers = compiled(name, "regex", pattern), random.Random(3)
    for _ in range(40):
        text, is_whole = walk(name, start.copy(), numbers, 40)
        assert is_whole
        assert re.fullmatch(pattern, text), text
        if pattern in CLASSES:
            assert text.isascii()


def of_pattern(name: str, pattern: str) -> Any:
    return compiled(name, "json", json.dumps({"type": "string", "pattern": pattern}))


@pytest.mark.parametrize("pattern", ["é.", "^.é$", "[^é]", "^[^é]{2}$", "[a-é].", "😀\\s", r"\U0001f600.", "é*."])
@each_backend
def test_a_character_beyond_ascii_lets_through_nothing_that_json_escapes(name: str, pattern: str) -> None:
    start, numbers = of_pattern(name, pattern), random.Random(2)
    for raw in ('"', "\n", "\\", "\x00", "\r"):
        for text in (f"é{raw}", f"{raw}é", raw, f"a{raw}", f"😀{raw}"):
            assert not takes(start, f'"{text}"'), text
    for _ in range(20):
        text, is_whole = walk(name, start.copy(), numbers, 60)
        assert not is_whole or re.search(pattern, json.loads(text)), text


OUTSIDE = {
    r"^\W$": "-\xe9\u07f5\uff11_a",
    r"^\D$": "a\xe9\uff11\u06631",
    r"^\S$": "a\xe9\xa0\u2028\ufeff",
    r"^[^\w]$": "-\xe9a",
    r"^[^\d\s]$": "a\u0663 ",
    r"^[\Wa]$": "a-\xe9b",
    r"^[^\W]$": "a\xe9-",
}


@pytest.mark.parametrize("pattern", OUTSIDE)
def test_what_a_class_leaves_out_is_left_out_in_ascii_and_in_unicode(pattern: str) -> None:
    start = of_pattern("llguidance", pattern)
    taken = {each for each in OUTSIDE[pattern] if takes(start, json.dumps(each, ensure_ascii=False))}
    in_both = {each for each in OUTSIDE[pattern] if re.search(pattern, each) and re.search(pattern, each, re.ASCII)}
    assert taken <= in_both
    assert taken >= {each for each in in_both if each.isascii()}
    assert taken


SHORT = ["".join(each) for length in range(6) for each in itertools.product("a1-", repeat=length)]
WRONG_REPEATS = (r"(?:a1*){0,1}-", r"(?:(?:(?:a){2,})?){2,}", r"(?:a{1,2}|a)", r"a{1,2}|a|-")
RIGHT_REPEATS: tuple[str, ...] = (
    r"1{3}(?:-1{2})?",
    r"a+(?:-a+)*",
    r"(?:a|1)?-{1,2}",
    r"(?:a{2}|1)-",
    r"a?(?:1|-)+?",
    r"\(?a{1,3}\)?",
)
RIGHT_REPEATS += (r"a(?:-1+)?", r"(?:a{2,3})?1", r"(?:a*1)?-", r"((a+)-)??1", r"1(?:-1{1,2}(?:a+)?)?")


@pytest.mark.parametrize("pattern", every(2, [*WRONG_REPEATS, *RIGHT_REPEATS]))
@each_backend
def test_repeats_of_a_pattern_are_exact_or_refused(name: str, pattern: str) -> None:
    whole = f"^(?:{pattern})$" if "|" in pattern else f"^{pattern}$"
    if name == "xgrammar" and pattern in WRONG_REPEATS:
        with pytest.raises(InvalidRequestError, match=r"it does not follow .* (with|counted) repeats exactly"):
            of_pattern(name, whole)
        return
    start = of_pattern(name, whole)
    assert [each for each in SHORT if takes(start, f'"{each}"') != bool(re.fullmatch(whole, each))] == []


# --- schemas ----------------------------------------------------------------------------------------------------------


small, names = st.integers(0, 3), st.sampled_from(["a", "b", "name", "größe"])
leaves = st.one_of(
    st.fixed_dictionaries({"type": st.sampled_from(["string", "integer", "boolean", "null", ["string", "null"]])}),
    st.fixed_dictionaries({"type": st.just("string"), "maxLength": st.just(5)}, optional={"minLength": small}),
    st.fixed_dictionaries({"minimum": st.sampled_from([-3, 0, 0.5]), "maximum": st.sampled_from([7, 8.25])}),
    st.fixed_dictionaries({"enum": st.lists(st.sampled_from(["x", 1, None, True, [2]]), min_size=1)}),
    st.just({"type": ["string", "integer"], "enum": ["x", 4, None]}),
    st.fixed_dictionaries({"type": st.just("string"), "pattern": st.sampled_from(["^[a-c]{1,3}$", "^(no|yes)$"])}),
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    parts, fewest = st.lists(inner, min_size=1, max_size=3), {"minItems": small}
    objects = {"properties": st.dictionaries(names, inner, max_size=3)}
    optional = {"required": st.lists(names, unique=True, max_size=2), "additionalProperties": inner | st.just(False)}
    return st.one_of(
        st.fixed_dictionaries(objects, optional={**optional, "type": st.just("object")}),
        st.fixed_dictionaries({"type": st.just("array"), "items": inner, "maxItems": st.just(3)}, optional=fewest),
        st.fixed_dictionaries({"prefixItems": parts, "items": st.booleans()}, optional=fewest),
        *(st.fixed_dictionaries({keyword: parts}) for keyword in ("anyOf", "oneOf", "allOf")),
        st.fixed_dictionaries({"not": inner}),
    )


schemas = st.recursive(leaves, containers, max_leaves=6)


@each_backend
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=schemas, numbers=st.randoms(use_true_random=False))
def test_answers_to_random_schemas_are_valid(name: str, schema: Any, numbers: random.Random) -> None:
    try:
        start = compiled(name, "json", json.dumps(schema))
    except InvalidRequestError:
        return  # what becomes of those is what other tests are about
    text, is_whole = walk(name, start.copy(), numbers, 150)
    if is_whole:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


@each_backend
def test_most_random_schemas_are_followed_to_their_end(name: str) -> None:
    """Else the test above would have nothing to say."""
    found: Counter[str] = Counter()

    @settings(max_examples=60, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(schema=schemas)
    def count(schema: Any) -> None:
        try:
            start = compiled(name, "json", json.dumps(schema))
        except InvalidRequestError:
            found["refused"] += 1
            return
        found["whole" if walk(name, start, random.Random(1), 150)[1] else "cut"] += 1

    count()
    assert found["whole"] > found["cut"], found
    assert found["whole"] > 12, found


SUITE = "draft2020-12"


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JSON Schema's own, which the source of the installed jsonschema has in its folder json/."""
    folder, version = tmp_path_factory.mktemp("suite"), metadata.version("jsonschema")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "jsonschema"]
    subprocess.run([*pip, "--dest", str(folder), f"jsonschema=={version}"], check=True, timeout=250)
    (archive,) = folder.glob("jsonschema-*.tar.gz")
    with tarfile.open(archive) as source:
        source.extractall(folder, filter="data")
    return folder / f"jsonschema-{version}" / "json" / "tests" / SUITE


@pytest.mark.system
@pytest.mark.parametrize(("name", "fewest", "times"), [("llguidance", 160, 4), ("xgrammar", 110, 2.5)])
def test_no_instance_that_json_schemas_suite_calls_invalid_is_let_through(
    suite: Path, name: str, fewest: int, times: float
) -> None:
    """times: as many valid instances are taken, at least, as are not."""
    found: Counter[str] = Counter()
    wrong = []
    for file in sorted(suite.glob("*.json")):
        for case in json.loads(file.read_text(encoding="utf-8")):
            try:
                start = compiled(name, "json", json.dumps(case["schema"]))
            except InvalidRequestError:
                found["schemas refused"] += 1
                continue
            found["schemas followed"] += 1
            for instance in case["tests"]:
                text = json.dumps(instance["data"], ensure_ascii=False, separators=(",", ":"))
                is_taken = takes(start, text)
                found[f"{'valid' if instance['valid'] else 'invalid'}, {'taken' if is_taken else 'not taken'}"] += 1
                if is_taken and not instance["valid"]:
                    wrong.append((file.name, case["schema"], text))
    print(name, dict(found))
    assert not wrong
    assert found["schemas followed"] >= fewest
    assert found["valid, taken"] > times * found["valid, not taken"], "a narrower reading is for corners alone"
    assert found["invalid, not taken"] > 150


# --- xgrammar ---------------------------------------------------------------------------------------------------------


def test_xgrammars_library_is_loaded_without_torch_and_transformers(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(VOCABULARY.tokenizer_json)
    code = f"""
import sys
from pathlib import Path
from headrace.core.structured_output.backend import Vocabulary
from headrace.core.structured_output.backend import make_backend
from headrace.ipc.messages import StructuredOutput
vocabulary = Vocabulary(tokenizer_json=Path(sys.argv[1]).read_bytes(), vocab_size={VOCAB_SIZE}, eos_token_ids=(1,))
matcher = make_backend("xgrammar", vocabulary).compile(StructuredOutput(kind="choice", text='["yes"]'))
assert matcher.num_valid([5]) in (0, 1)
assert not {{"torch", "transformers", "xgrammar"}} & set(sys.modules)
import torch
print(torch.ones(1).item())
"""
    command = [sys.executable, "-c", code, str(tmp_path / "tokenizer.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "1.0\n", done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_models.save("llama", tmp_path_factory.mktemp("model"), tokenizer=True))


def engine_of(folder: str, backend: str, **more: Any) -> LLM:
    config = {"backend": backend}
    return LLM(model=folder, in_process=True, structured_outputs_config=config, **{**ENGINE, **more})


@pytest.fixture(scope="module")
def llm(folder: str) -> Iterator[LLM]:
    with engine_of(folder, "xgrammar:no-fallback") as llm:
        ask(llm, form(regex="ready"))  # starts what tries grammars, which ends with the engine
        yield llm


def test_xgrammar_follows_every_form(llm: LLM) -> None:
    tag = {"structures": [{"begin": "<a>", "schema": {"type": "boolean"}, "end": "</a>"}], "triggers": ["<a"]}
    expression, choice, lark, gbnf, whole, tagged = ask(
        llm,
        [
            form(regex="[a-c]{3}(xy)?"),
            form(choice=["yes", 'no "x"\n', "é世"]),
            form(grammar='start: "a" start | "b"'),
            form(grammar='root ::= "x" [0-9]{2}'),
            form(json_object=True, max_tokens=300, disable_any_whitespace=True, seed=1),
            form(structural_tag=json.dumps(tag), max_tokens=300, seed=2),
        ],
    )
    assert re.fullmatch("[a-c]{3}(xy)?", expression)
    assert choice in ("yes", 'no "x"\n', "é世")
    assert re.fullmatch("a*b", lark)
    assert re.fullmatch("x[0-9]{2}", gbnf)
    assert isinstance(json.loads(whole), dict)
    assert set(re.findall("<a.*", tagged)) <= {"<a>true</a>", "<a>false</a>"} or "<a" not in tagged


def test_an_answer_whose_form_is_complete_has_no_end_token_and_one_that_may_go_on_has(llm: LLM) -> None:
    def answer(regex: str, min_tokens: int) -> tuple[bool, str | None]:
        params = form(regex=regex)
        params.min_tokens = min_tokens
        (output,) = llm.generate("a", params)[0].outputs
        return llm.get_tokenizer().eos_token_id in output.token_ids, output.finish_reason

    assert [answer("ab", least) for least in (0, 20)] == [(False, "stop")] * 2
    assert [answer("a{1,199}", least) for least in (0, 20)] == [(True, "stop")] * 2


def test_answers_by_xgrammar_to_random_schemas_are_valid(llm: LLM) -> None:
    assert answers_to_random_schemas(llm, 16, 2, WITHOUT_FORMATS) > 24


@pytest.mark.system
def test_a_thousand_answers_by_xgrammar_to_random_schemas_are_valid(llm: LLM) -> None:
    assert answers_to_random_schemas(llm, 125, 8, WITHOUT_FORMATS) > 800


def test_answers_by_xgrammar_are_the_same_after_preemption_and_with_speculation(llm: LLM, folder: str) -> None:
    prompts, params = asked_of_many()
    expected = [each.outputs[0].token_ids for each in llm.generate(prompts, params, use_tqdm=False)]
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    tight = {"num_gpu_blocks_override": 42, "max_num_batched_tokens": 24}
    for more in ({"speculative_config": drafts}, tight):
        with engine_of(folder, "xgrammar", **more) as other:
            found = [each.outputs[0].token_ids for each in other.generate(prompts, params, use_tqdm=False)]
            assert found == expected, more


def test_xgrammar_keeps_masks_for_later_grammars_until_it_is_to_forget_them() -> None:
    backend = make_backend("xgrammar", VOCABULARY)
    compiler = backend._compiler  # type: ignore[attr-defined]
    texts = [json.dumps({"properties": {name: {"type": "string", "maxLength": 9}}}) for name in ("a", "b")]
    sizes = list[int]()
    for text in texts:
        backend.compile(StructuredOutput(kind="json", text=text))
        sizes.append(compiler.get_cache_size_bytes())
    assert 0 < sizes[1] < 2 * sizes[0], "the second has the masks of the first one's texts"
    backend.forget()
    assert compiler.get_cache_size_bytes() == 0


@each_backend
def test_a_long_forced_text_is_written_in_tokens_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not again after each of them, which takes milliseconds a token."""
    text = "river ab " * 120
    matcher = compiled(name, "choice", json.dumps([text]))
    forced = matcher.forced_tokens()
    assert len(forced) > 300
    with monkeypatch.context() as patch:
        patch.setattr(matcher, "matcher", Accepting(matcher.matcher))
        for nth, token_id in enumerate(forced[:200]):
            assert matcher.accept(token_id)
            assert matcher.forced_tokens() == forced[nth + 1 :]
    again = matcher.copy()
    again._forced = None
    written = TOKENIZER.decode(again.forced_tokens())
    assert TOKENIZER.decode(matcher.forced_tokens()) == written
    assert text.endswith(written)


class Accepting:
    """A library's matcher that can be asked for nothing but the next place."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def __getattr__(self, name: str) -> Any:
        assert name in ("consume_token", "is_error", "accept_token"), f"{name} is called for each token"
        return getattr(self._matcher, name)


def test_what_xgrammar_is_forced_to_takes_fewer_steps_than_tokens(llm: LLM) -> None:
    before = llm.get_stats().steps
    (answer,) = llm.generate(["the water"], form(choice=["the water of the mill"], temperature=0), use_tqdm=False)
    assert answer.outputs[0].text == "the water of the mill"
    assert llm.get_stats().steps - before < len(answer.outputs[0].token_ids)


@pytest.mark.parametrize(
    ("of", "said"),
    [
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems is not followed: it is followed for up to 4"),
        ({"json": {"properties": {"a": {"format": "ipv4"}}}}, "it does not follow format (at /properties/a)"),
        ({"json": {"$ref": "#/$defs/a", "type": "object", "$defs": {"a": {}}}}, "does not follow type beside $ref"),
        (
            {"json": {"type": "string", "pattern": "^a", "maxLength": 2}},
            "it does not follow maxLength beside pattern (at /)",
        ),
        ({"json": {"type": "foo"}}, 'Unsupported type "foo"'),
        ({"json": {"type": "object"}, "whitespace_pattern": " "}, "xgrammar has no whitespace_pattern"),
        ({"regex": "(?=a)b"}, "lookaheads are not followed"),
        ({"grammar": "root ::= nobody"}, "nobody"),
        ({"grammar": 'start: %json {"type": "string", "format": "ipv4"}'}, "it does not follow format (at /)"),
    ],
)
def test_what_xgrammar_does_not_follow_is_refused_with_the_reason(llm: LLM, of: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be used") as caught:
        llm.generate(["the water"], form(**of), use_tqdm=False)
    assert said in str(caught.value)


def test_what_xgrammar_refuses_llguidance_follows_where_it_may(folder: str, caplog: pytest.LogCaptureFixture) -> None:
    schema = {"type": "string", "format": "ipv4"}
    with engine_of(folder, "xgrammar") as both, caplog.at_level("INFO", logger="headrace"):
        answers = ask(both, [form(json=schema), form(regex="[ab]")])
        assert ipaddress.IPv4Address(json.loads(answers[0]))
        assert answers[1] in "ab"
    assert re.search(r"a grammar is compiled by llguidance, .* it does not follow format", caplog.text)


def test_a_library_that_is_not_installed_is_told_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(OptionError, match=re.escape(f"xgrammar is not installed; {how_to_install('xgrammar')}")):
        structured_outputs_of({"backend": "xgrammar"})


def requires(reference: str, **others: Any) -> str:
    """A schema of an object whose only property is what a reference leads to."""
    properties = {"r": {"$ref": reference}}
    return json.dumps({**others, "type": "object", "properties": properties, "required": ["r"]})


BOOLEAN, INTEGER = {"type": "boolean"}, {"type": "integer"}


@each_backend
@pytest.mark.parametrize(
    ("reference", "others"),
    [
        *((f"#/$defs/{each}", {"$defs": {"a b": BOOLEAN}}) for each in ("a b", "a%20b")),
        *((f"#/$defs/{each}", {"$defs": {"Größe 日😀": BOOLEAN}}) for each in ("Größe 日😀", quote("Größe 日😀"))),
        ("#/$defs/a%20b", {"$defs": {"a b": BOOLEAN, "a%20b": INTEGER}}),
        ("#/$defs/a~1b", {"$defs": {"a/b": BOOLEAN, "a~1b": INTEGER}}),
        ("#/$defs/~01", {"$defs": {"~1": BOOLEAN, "/": INTEGER}}),
        ('#/$defs/"\\\n', {"$defs": {'"\\\n': BOOLEAN}}),
        ("#/$defs/", {"$defs": {"": BOOLEAN}}),
        ("#/$defs/a%2Fb", {"$defs": {"a/b": BOOLEAN, "added_0": INTEGER}}),
        ("#/components/schemas/Y", {"components": {"schemas": {"Y": BOOLEAN}}}),
        ("#/$defs/x/oneOf/0", {"$defs": {"x": {"oneOf": [BOOLEAN, INTEGER]}}}),
        ("#/$defs/x/prefixItems/1", {"$defs": {"x": {"type": "array", "prefixItems": [INTEGER, BOOLEAN]}}}),
    ],
)
def test_a_reference_leads_where_json_schema_says(name: str, reference: str, others: dict[str, Any]) -> None:
    matcher = compiled(name, "json", requires(reference, **others))
    assert [each for each in ("true", "1", '"a"', "{}") if takes(matcher, f'{{"r":{each}}}')] == ["true"]


@each_backend
@pytest.mark.parametrize("reference", ["#/$defs/", "#/", "#/$defs//a", "#/$defs/b", "#/$defs/a%20"])
def test_a_reference_that_leads_nowhere_is_refused(name: str, reference: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"leads nowhere|does not exist|Cannot find"):
        compiled(name, "json", requires(reference, **{"$defs": {"a": BOOLEAN}}))


def test_alternatives_behind_encoded_references_are_told_apart_by_what_these_lead_to() -> None:
    """Both of `a b`; only one of them by its name as it is written."""
    definitions = {"a b": INTEGER, "a%20b": BOOLEAN, "c": {"type": "number"}}
    schema = {"$defs": definitions, "oneOf": [{"$ref": "#/$defs/a%20b"}, {"$ref": "#/$defs/c"}]}
    with pytest.raises(InvalidRequestError, match="do not exclude each other"):
        compiled("llguidance", "json", json.dumps(schema))


ODD = (
    *(
        '"',
        "\\",
        "\n",
        "\t",
        "\0",
        "\x1f",
        "\x7f",
        "é",
        "日",
        "\u2028",
        "😀",
        "👩\u200d👧",
        "</",
        "/",
        "\\n",
        "\\u0041",
        '\\"',
    ),
    *("{", "[", ":", ",", " ", "$", "%", "a", "\ufeff", "e\u0301", "#", "~1", "~0", "^", ".*", "(", "|", "?", "null"),
)


def odd_schema(numbers: random.Random, depth: int = 0) -> dict[str, Any]:
    """Of an object whose names and texts JSON escapes, in some way."""

    def text() -> str:
        return "".join(numbers.choices(ODD, k=numbers.choice((0, 1, 2, 4))))

    def value() -> dict[str, Any]:
        kinds: list[Any] = [
            INTEGER | {"minimum": 0, "maximum": 9},
            {"const": numbers.choice([text(), {text(): text()}, [text()]])},
            {"enum": [text(), text() + "a", None]},
            {"type": "string", "maxLength": 2},
            {"type": "array", "items": BOOLEAN, "maxItems": 2},
        ]
        return odd_schema(numbers, depth + 1) if depth < 2 and not numbers.randrange(6) else numbers.choice(kinds)

    names = list({text() for _ in range(numbers.randint(1, 4))})
    schema: dict[str, Any] = {"type": "object", "properties": {each: value() for each in names}}
    schema["required"] = [each for each in names if numbers.random() < 0.7]
    others = numbers.choice((False, False, {"const": 1}, None))
    return schema if others is None else {**schema, "additionalProperties": others}


@each_backend
def test_schemas_of_escaped_names_are_kept_to_or_refused(name: str) -> None:
    numbers, outcomes, refusals = random.Random(36), Counter[str](), list[str]()
    for _ in range(100):
        schema = odd_schema(numbers)
        try:
            matcher = compiled(name, "json", json.dumps(schema, ensure_ascii=numbers.random() < 0.5))
        except InvalidRequestError as error:
            refusals.append(str(error))
            continue
        for _ in range(3):
            answer, is_whole = walk(name, matcher.copy(), numbers, 300)
            outcomes["whole" if is_whole else "cut"] += 1
            if is_whole:
                pairs: list[Any] = json.loads(answer, object_pairs_hook=list)
                assert len(dict(pairs)) == len(pairs), answer
                jsonschema.validate(json.loads(answer), schema)
    assert outcomes["whole"] >= 50, outcomes
    by_name = re.compile(r"does not follow the name|the property .* is not followed")
    assert [each for each in refusals if not by_name.search(each)] == []
