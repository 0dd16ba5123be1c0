"""Forms that libraries of grammars would read in different ways: all read them as Python's `re`, JSON Schema and
llama.cpp do, or refuse them with what to write instead."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import jsonschema
import pytest
from processor_time import processor_s
from test_grammar_backends import NAMES, VOCABULARY, compiled, each_backend, takes, walk
from thinned import every

from headrace import InvalidRequestError, StructuredOutputsParams
from headrace.core.structured_output.backend import MOST_FORCED
from headrace.core.structured_output.expressions import in_common_words
from headrace.core.structured_output.follower import Follower
from headrace.core.structured_output.helper.trial import Trial
from headrace.frontend.request.parameters.structured_outputs import from_response_format
from headrace.ipc.messages import StructuredOutput


@pytest.fixture
def trial() -> Iterator[Trial]:
    follower = Follower(VOCABULARY, "llguidance")
    yield Trial(follower.helper)
    follower.stop()


# --- regular expressions ----------------------------------------------------------------------------------------------

REFUSED = {
    "a$b": "$ at 1: it is followed at the end of the whole alone",
    "a^b": "^ at 1: it is followed at the beginning of the whole alone",
    "(a|b$)c": "$ at 4: it is followed at the end",
    "(^a)*": "repeated",
    r"a\Z": r"\Z at 1: write $",
    r"\Aab": r"\A at 0: write ^",
    r"ab\z": r"\z at 2: write $",
    "[[:alpha:]]+": "[:alpha:] at 1: Python's re has no such class: write its characters, as A-Za-z",
    "[a&&b]": r"&& at 2: some libraries compute with sets there: write \&",
    "[a-z--c]": r"write \-",
    "a++b": "+ at 2: it repeats a repeat",
    "a{2}+": "it repeats a repeat",
    "(?=a)b": "(?= at 0: lookaheads are not followed",
    "(?<!a)b": "lookbehinds are not followed",
    "(?>a)": "write (?:",
    "(?x)a b": "i, m and s are",
    r"(a)\1": "references to groups",
    r"\012": r"write \x0a",
    r"\bab": "word boundaries are not followed",
    r"\h": "Python's re has no such escape",
    r"\x{41}": r"write two digits, as \x41",
    "[a": r"for the character write \[",
    "a\\": "it escapes nothing",
}


@each_backend
@pytest.mark.parametrize("pattern", REFUSED)
def test_what_a_library_reads_otherwise_than_re_is_refused_with_what_to_write(name: str, pattern: str) -> None:
    said = re.escape(REFUSED[pattern])
    with pytest.raises(InvalidRequestError, match=rf"structured_outputs: .*{said}"):
        compiled(name, "regex", pattern)
    with pytest.raises(InvalidRequestError, match=rf"structured_outputs: .*{said}.*\(at /properties/a/pattern\)"):
        compiled(name, "json", json.dumps({"properties": {"a": {"type": "string", "pattern": pattern}}}))
    with pytest.raises(InvalidRequestError, match=rf"{said}.*\(at /items/pattern\)"):
        compiled(name, "grammar", f"start: %json {json.dumps({'items': {'type': 'string', 'pattern': pattern}})}")
    form = {"format": {"type": "sequence", "elements": [{"type": "regex", "pattern": pattern}]}}
    with pytest.raises(InvalidRequestError, match=rf"structured_outputs: .*{said}"):
        compiled(name, "structural_tag", json.dumps(form))


FOLLOWED = (
    *("^ab$", "(^a|b$)", "a|^b", "^^a$$", "(?:^|,)a", "a(,|$)", "^(a|b$)$", "", "|a", ".", ".{3}", "[^a]"),
    *("[[a]b]", "[]a]", "[^]a]", r"[\]a-]", r"\<a\>", r"\x41\u0041\U00000041", r"\d\-\/\ \#", "a{2,}?b", "[a&b]", "}]"),
    *("a{,2}", "a{,}b", "a{ 1}", "a{", "{{a}}", "a{}"),
)


@pytest.mark.filterwarnings("ignore:Possible nested set")
@pytest.mark.parametrize("pattern", every(2, FOLLOWED))
@each_backend
def test_what_is_followed_is_what_re_matches(name: str, pattern: str) -> None:
    start, numbers = compiled(name, "regex", pattern), random.Random(5)
    for _ in range(20):
        text, is_whole = walk(name, start.copy(), numbers, 40)
        assert re.fullmatch(pattern, text) or not is_whole, text
    for text in ("", "a", "b", "ab", "ab]", "[b]", "]", "<a>", "\n", "AAA", ",a", "a,", "xyz"):
        assert not takes(start, text) or re.fullmatch(pattern, text), text


@pytest.mark.parametrize("pattern", [r"\D", r"\W\w", r"[^\s]", r"[^a\d]"])
def test_what_xgrammar_lets_through_beside_a_class_of_characters_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"it does not follow .*more than ASCII"):
        compiled("xgrammar", "regex", pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        '^"$',
        r"^[\"]$",
        r"^\\$",
        r"^a\n$",
        "^[ -~]{2}$",
        "^[^a]{2}$",
        '^[^"]{2}$',
        "^.{2}$",
        r"^\s\w$",
        r"^[\x01-\x05]$",
        r"^[\x00-\x1f]$",
    ],
)
@each_backend
def test_a_text_with_a_pattern_is_json(name: str, pattern: str) -> None:
    """xgrammar writes no escapes, so what JSON has escaped alone is refused."""
    schema = {"type": "string", "pattern": pattern}
    try:
        start = compiled(name, "json", json.dumps(schema))
    except InvalidRequestError:
        with pytest.raises(InvalidRequestError, match="as JSON escapes some of that"):
            compiled("xgrammar", "json", json.dumps(schema))
        assert name == "xgrammar"
        return
    numbers = random.Random(6)
    for _ in range(15):
        text, is_whole = walk(name, start.copy(), numbers, 40)
        assert is_whole
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    "pattern",
    [
        *(
            '^[^"]$',
            '^[^-"]$',
            r'^[^"\d]$',
            '^[^"-]$',
            r"^[^\W]$",
            '^[^]"]$',
            r"^[\x00-\x1f]$",
            "^[\x00-\x1f]$",
            r"^[\u0000-!]$",
        ),
        *(r"^[\x00ab]$", r"^\x00$", r"^\p{Cc}$", r"^\P{P}$", r"^[^\p{P}]$", r"^\PP$"),
    ],
)
def test_a_quote_is_in_no_set_that_leaves_it_out(pattern: str) -> None:
    """llguidance takes NUL within a set for NUL and a quote."""
    start = compiled("llguidance", "json", json.dumps({"type": "string", "pattern": pattern}))
    assert not takes(start, r'"\""')
    assert takes(start, '"\\n"') == (pattern not in (r"^[^\W]$", r"^[\x00ab]$", r"^\x00$"))
    grammar = f"start: %json {json.dumps({'type': 'string', 'pattern': pattern})}"
    assert not takes(compiled("llguidance", "grammar", grammar), r'"\""')


def test_a_class_that_has_nul_is_refused_in_a_set_of_json_alone() -> None:
    refused = r"a class that has NUL is not followed in a set of JSON.*\(at /pattern\)"
    for pattern in (r"^[a\p{Cc}]$", r"^[a\PP]$"):
        with pytest.raises(InvalidRequestError, match=refused):
            compiled("llguidance", "json", json.dumps({"type": "string", "pattern": pattern}))
        compiled("llguidance", "regex", pattern)
    kept = compiled("llguidance", "json", json.dumps({"type": "string", "pattern": r"^[\p{L}\p{P}\P{C}-]+$"}))
    assert takes(kept, '"é1-"')


@each_backend
def test_a_minus_beside_a_class_is_one_as_in_json_schemas_expressions(name: str) -> None:
    for pattern in (r"[\w-.]", r"[a\w-.]", r"[.-\w]"):
        start = compiled(name, "regex", pattern)
        assert [each for each in "a9_.-/+" if takes(start, each)] == ["a", "9", "_", ".", "-"]


def test_an_expression_of_many_characters_is_read_at_once() -> None:
    for pattern in ("a" * 200_000, "[" + "ab-d" * 40_000 + "]", "(a" * 40_000):
        assert processor_s(partial(in_common_words, pattern)) < 30  # in the square of its length it would take hours


# --- JSON schemas -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"anyOf": []}, "anyOf must not be empty, as nothing would be valid (at /)"),
        ({"type": []}, "type must not be empty"),
        ({"properties": 5}, "properties must be an object (at /)"),
        ({"properties": {"a": {"required": 5}}}, "required must be a list (at /properties/a)"),
        ({"required": [5]}, "required must be a list of names"),
        ({"$defs": 5}, "$defs must be an object"),
        ({"enum": 5}, "enum must be a list"),
        ({"items": {"type": "string", "pattern": 5}}, "pattern must be a text (at /items)"),
        ({"properties": {"a": {"type": "string", "format": "ipv4"}}}, "it does not follow format (at /properties/a)"),
    ],
)
def test_what_is_no_schema_xgrammar_refuses_in_json_schemas_words(schema: Any, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(said)):
        compiled("xgrammar", "json", json.dumps(schema))


def test_names_of_properties_are_no_keywords() -> None:
    properties = {"pattern": {"const": "a$b"}, "format": {"type": "null"}}
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    for name in NAMES:
        assert takes(compiled(name, "json", json.dumps(schema)), '{"pattern":"a$b","format":null}')


LOOP = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}


WITHOUT_ANSWER = (
    ("json", '{"$ref": "#"}'),
    ("json", json.dumps({"$defs": LOOP, "$ref": "#/$defs/a"})),
    ("grammar", "root ::= root"),
    ("grammar", 'start: start "a"'),
)


def test_what_no_answer_can_be_is_refused_before_it_is_followed(trial: Trial) -> None:
    for name in NAMES:
        for kind, text in WITHOUT_ANSWER:
            with pytest.raises(InvalidRequestError, match=r"structured_outputs: .*leads back to itself"):
                trial.check(name, StructuredOutput(kind=kind, text=text))  # type: ignore[arg-type]


# --- forced texts -----------------------------------------------------------------------------------------------------


@each_backend
def test_of_a_long_forced_text_a_bounded_part_is_found_at_once(name: str) -> None:
    """The loop's thread looks for it: a text of a million characters would stop it for 20 s."""
    matcher = compiled(name, "regex", "a{20000}")
    forced = matcher.forced_tokens()
    assert 0 < len(forced) <= MOST_FORCED
    num_asked = 0
    while forced and num_asked < 3:
        for token_id in forced:
            assert matcher.accept(token_id)
        forced, num_asked = matcher.forced_tokens(), num_asked + 1
    assert num_asked == 3, "the rest is found later"


def test_a_text_too_long_to_be_forced_is_refused(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "headrace.core.structured_output.helper.trial.MOST_WAIT_S", 300.0
    )  # for a busy machine to compile it
    for pattern in ("a{1000000}", "a{5000000}"):
        with pytest.raises(InvalidRequestError, match=r"structured_outputs: .*takes more than"):
            trial.check("xgrammar", StructuredOutput(kind="regex", text=pattern))


# --- grammars and choices ---------------------------------------------------------------------------------------------


@each_backend
@pytest.mark.parametrize("start", ["start", "?start", "!start", "start.2", "?start.-1", "  start"])
def test_rules_of_lark_have_its_modifiers(name: str, start: str) -> None:
    matcher = compiled(name, "grammar", f'{start}: "a" other\n?other.3: "b"\n')
    assert takes(matcher, "ab")
    assert not takes(matcher, "a")


@each_backend
@pytest.mark.parametrize(
    ("written", "texts"),
    [
        (r'"\u00e9"', ["é"]),
        (r'"\U0001F600\u000a"', ["😀\n"]),
        (r'"\u0022\u005c"', ['"\\']),
        (r"[\u00e9-\u00eb]", ["é", "ê", "ë"]),
        (r"[\u002d\u005d\u005e]", ["-", "]", "^"]),
        (r"[^\u00e9]", ["è", "à", "U"]),
        (r'"\\u00e9"', ["\\u00e9"]),
    ],
)
def test_gbnf_has_escapes_of_four_and_eight_digits(name: str, written: str, texts: list[str]) -> None:
    start = compiled(name, "grammar", f"root ::= {written}")
    assert all(takes(start, each) for each in texts)
    assert not any(takes(start, each) for each in ("é", "e9", "u00e9", "U", "à") if each not in texts)


def test_an_escape_of_no_character_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"\\ud83d is no character"):
        compiled("llguidance", "grammar", r'root ::= "\ud83d"')


@each_backend
def test_there_may_be_thousands_of_choices(name: str) -> None:
    choices = [f"c{number} of the mill" for number in range(3000)]
    start = compiled(name, "choice", json.dumps(choices))
    assert takes(start, choices[0])
    assert takes(start, choices[-1])
    assert not takes(start, "c3000 of the mill")
    assert not takes(start, "c1")


# --- what the frontend reads ------------------------------------------------------------------------------------------


def test_no_white_space_is_what_an_empty_pattern_asks_for() -> None:
    assert StructuredOutputsParams(json={}, whitespace_pattern="").to_wire().disable_any_whitespace
    assert not StructuredOutputsParams(json={}).to_wire().disable_any_whitespace


def test_a_json_object_with_a_schema_has_that_schema() -> None:
    """llama.cpp's way to write it."""
    schema = {"type": "object", "properties": {"a": {"type": "null"}}}
    params = from_response_format({"type": "json_object", "schema": schema})
    assert params is not None
    assert params.to_wire() == StructuredOutputsParams(json=schema).to_wire()
    with pytest.raises(InvalidRequestError, match=r"response_format\.schema must be an object"):
        from_response_format({"type": "json_object", "schema": 5})


def test_false_is_a_wrong_schema_and_not_none() -> None:
    with pytest.raises(InvalidRequestError, match=r"structured_outputs\.json is bool, and must be a schema"):
        StructuredOutputsParams(json=False)  # type: ignore[arg-type]
    assert StructuredOutputsParams(regex="a", json_object=False).to_wire().kind == "regex"
