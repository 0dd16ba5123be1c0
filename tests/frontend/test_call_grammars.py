"""Grammars of calls, made of the formats' declarations: they admit what the families write, and nothing that does not
fit the tools' schemas."""

from __future__ import annotations

import importlib
import json
import random
import re
from typing import Any

import numpy as np
import pytest
from example_tools import DETAILED, FORCED
from fake_tokenizers import bundle_of, byte_level_tokenizer
from family_answers import WAYS, Way
from read_answers import Read, read
from schema_checks import validate
from thinned import every, pairs

from headrace.core.structured_output.unquoted_texts import for_llguidance, with_texts
from headrace.frontend.text.chat_template import RenderedChat
from headrace.frontend.text.formats.channels import ForcedChannelCalls, StrictChannelCalls
from headrace.frontend.text.formats.declaration import OutputFormat, ReasoningFormat, known_formats, load_format
from headrace.frontend.text.formats.grammar import ForcedCalls, StrictCalls
from headrace.frontend.text.formats.output_formats import OutputFormats, ToolChoice
from headrace.frontend.text.formats.parser import OutputParser
from headrace.frontend.text.tokenizer import Tokenizer
from headrace.ipc.failure import InvalidRequestError

BACKEND = "headrace.core.structured_output.llguidance_backend"
WITH_CALLS = [name for name, declared in known_formats().items() if declared.calls]


@pytest.mark.parametrize(("name", "is_special"), pairs(WITH_CALLS, (False, True)))
def test_a_grammar_of_every_format_admits_calls_that_its_reader_reads(name, is_special):
    """Answers drawn from the grammar's masks; markers as letters, and as special tokens."""
    llguidance = pytest.importorskip("llguidance")
    declared = load_format(name)
    calls, reasoning = declared.calls, ReasoningFormat(begin="<think>", end="</think>")
    tokenizer, special = byte_level_tokenizer(), [each for each in (calls.opener, "</think>") if each and is_special]
    tokenizer.add_special_tokens(special)
    ids = {each: tokenizer.token_to_id(each) for each in special}
    grammar = ForcedCalls(calls, FORCED, ids, several=True, thinks_first=reasoning).text()
    eos = tokenizer.token_to_id("<|endoftext|>")
    matching = llguidance.LLTokenizer(tokenizer.to_str(), eos_token=eos)
    numbers, num_calls = random.Random(name), 0
    ending = calls.parameter[3] or calls.escape
    closing_marker = tokenizer.encode(ending).ids
    for _ in range(20):
        if num_calls > 3:
            break
        matcher = llguidance.LLMatcher(
            matching, llguidance.LLMatcher.grammar_from_lark(with_texts(grammar, for_llguidance))
        )
        tokens: list[int] = []
        # The first of the thought's end that is allowed is taken, so that drawn text does not go on for ever.
        for token in tokenizer.encode("hm</think>").ids:
            tokens.append(token)
            assert matcher.consume_token(token), matcher.get_error()
        while not matcher.is_stopped() and len(tokens) < 600:
            # Drawn text would seldom come to a marker by itself.
            if ending and matcher.validate_tokens(closing_marker) == len(closing_marker):
                tokens += closing_marker
                assert matcher.consume_tokens(closing_marker)
            mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little").nonzero()[0]
            allowed = mask[mask != eos] if len(tokens) < 300 and len(mask) > 1 else mask
            closing = [
                each for each in allowed.tolist() if tokenizer.decode([each], False) in ('"', "<", "}", "]", ")")
            ]
            token = numbers.choice(closing) if closing and numbers.random() < 0.5 else numbers.choice(allowed.tolist())
            if token == eos:
                break
            tokens.append(token)
            assert matcher.consume_token(token), matcher.get_error()
        if not matcher.is_accepting():
            continue
        text = tokenizer.decode(tokens, skip_special_tokens=False)
        parser = OutputParser(OutputFormat(reasoning=reasoning), declared, prompt="<think>", tools=FORCED)
        found = Read.of([*parser.feed(text), *parser.finish()])
        assert found.content == "", (text, found)
        assert found.calls
        num_calls += len(found.calls)
        for called, arguments in found.calls:
            assert called in ("get_weather", "now")
            if called == "get_weather":
                validate(json.loads(arguments), DETAILED)
    assert num_calls, "none of the drawn answers came to its end"


CONSTRAINED = {
    "type": "object",
    "properties": {
        "note": {"anyOf": [{"type": "string", "minLength": 2, "maxLength": 5}, {"type": "null"}]},
        "code": {"type": "string", "pattern": "^[a-f]{2}-[0-9]+$", "maxLength": 6},
        "size": {"enum": ["s", "m", None]},
        "id": {"type": ["string", "null"]},
        "kind": {"const": "k"},
    },
    "required": ["note", "code", "size", "id", "kind"],
    "additionalProperties": False,
}
CONSTRAINED_TOOLS = [{"type": "function", "function": {"name": "book", "parameters": CONSTRAINED}}]


@pytest.mark.parametrize(
    ("name", "is_special"),
    pairs([name for name in WITH_CALLS if load_format(name).calls.body in ("xml", "escaped")], (False, True)),
)
def test_texts_without_quotes_keep_to_their_schemas_too(name, is_special):
    """Lengths, patterns, enums and null, where a format writes texts as they are."""
    calls = load_format(name).calls
    assert calls is not None
    end = calls.parameter[3] or calls.escape
    specials = (end,) if is_special else ()
    grammar = ForcedCalls(calls, CONSTRAINED_TOOLS, special_ids(specials), several=False).text()
    line = "\n" if calls.values_have_lines else ""

    def written(**values: str) -> str:
        said = {"note": "ab", "code": "af-1", "size": "s", "id": "", "kind": "k", **values}
        if calls.body == "escaped":
            inner = ",".join(f"{key}:{end}{value}{end}" for key, value in said.items())
            return f"{calls.call[0]}{calls.name[0]}book{calls.name[1]}{inner}}}{calls.call[1]}"
        before_name, after_name, before_value, _ = calls.parameter
        before_value = f" {calls.value_kinds[0][1]}{before_value}" if calls.value_kinds else before_value
        number = f"{calls.number[0]}1{calls.number[1]}" if calls.number[0] else ""
        inner = "".join(
            f"{before_name}{key}{after_name}{before_value}{line}{value}{line}{end}" for key, value in said.items()
        )
        parts = (*(calls.section or ())[:1], calls.call[0], calls.name[0] + "book" + calls.name[1], number, inner)
        return "".join((*parts, calls.after_arguments, calls.call[1], *(calls.section or ())[1:]))

    good: tuple[dict[str, str], ...] = (
        {},
        {"note": "null"},
        {"note": "\n\n"},
        {"note": "a<b"},
        {"size": "null"},
        {"id": "null"},
        {"id": "x" * 90},
    )
    for values in good:
        text = written(**values)
        assert accepts(grammar, text, specials), text
        parser = OutputParser(None, load_format(name), tools=CONSTRAINED_TOOLS)
        ((_, arguments),) = Read.of([*parser.feed(text), *parser.finish()]).calls
        found = json.loads(arguments)
        validate(found, CONSTRAINED)
        assert {key: found[key] for key in values} == {
            key: None if value == "null" else value for key, value in values.items()
        }
    for values in (
        {"note": "a"},
        {"note": "abcdef"},
        {"code": "ag-1"},
        {"code": "af-1234"},
        {"size": "l"},
        {"kind": ""},
    ):
        assert not accepts(grammar, written(**values), specials), values


def followed(matching: Any, grammar: str) -> Any:
    """llguidance's matcher, with the limits that the engine gives it."""
    llguidance = pytest.importorskip("llguidance")
    limits = llguidance.LLParserLimits(**importlib.import_module(BACKEND).LIMITS)
    lark = llguidance.LLMatcher.grammar_from_lark(with_texts(grammar, for_llguidance))
    return llguidance.LLMatcher(matching, lark, limits=limits)


def accepts(grammar: str, text: str, specials: tuple[str, ...] = ()) -> bool:
    llguidance = pytest.importorskip("llguidance")
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens(list(specials))
    eos = tokenizer.token_to_id("<|endoftext|>")
    matching = llguidance.LLTokenizer(tokenizer.to_str(), eos_token=eos)
    ids = tokenizer.encode(text).ids
    matcher = llguidance.LLMatcher(
        matching, llguidance.LLMatcher.grammar_from_lark(with_texts(grammar, for_llguidance))
    )
    assert not matcher.get_error()
    return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()


def special_ids(specials: tuple[str, ...]) -> dict[str, int]:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens(list(specials))
    return {each: tokenizer.token_to_id(each) for each in specials}


def strict_grammar(name: str, specials: tuple[str, ...] = (), or_json: Any = None) -> str:
    calls = load_format(name).calls
    assert calls is not None
    return StrictCalls(calls, FORCED, special_ids(specials), several=True).text(or_json)


GOOD, BAD = '{"city": "x", "days": 3}', '{"city": "x", "days": 30}'


@pytest.mark.parametrize("specials", [(), ("<tool_call>", "</tool_call>")])
def test_a_strict_tool_leaves_the_text_free_and_holds_calls_to_their_schemas(specials):
    grammar = strict_grammar("hermes", specials)

    def call(arguments: str, name: str = "get_weather") -> str:
        return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'

    for said in ("", "just text <tool", f"Sure.\n{call(GOOD)}", f"{call(GOOD)}\n{call('{}', 'now')} done"):
        assert accepts(grammar, said, specials), said
    for said in (call(BAD), f"a {call(GOOD, 'later')}", "<tool_call>text", f"{call(GOOD)} and {call(BAD)}"):
        assert not accepts(grammar, said, specials), said


@pytest.mark.parametrize("name", every(2, WITH_CALLS))
def test_every_format_has_a_strict_grammar(name):
    grammar = strict_grammar(name)
    assert accepts(grammar, "text, and (more)")
    opener = load_format(name).calls.opener
    assert not opener or not accepts(grammar, f"text {opener} text")


def test_strict_calls_without_a_marker_begin_the_answer():
    grammar = strict_grammar("llama3_json")
    good, bad = (f'{{"name": "get_weather", "parameters": {each}}}' for each in (GOOD, BAD))
    for said in (good, "some {text}", f"<|python_tag|>{good}"):
        assert accepts(grammar, said), said
    for said in (bad, f"<|python_tag|>{bad}"):
        assert not accepts(grammar, said), said


def test_an_answer_is_json_or_calls_where_both_were_asked_for():
    grammar = strict_grammar("hermes", or_json={"type": "object", "properties": {"a": {"type": "integer"}}})
    assert accepts(grammar, '{"a": 1}')
    assert accepts(grammar, f'<tool_call>{{"name": "get_weather", "arguments": {GOOD}}}</tool_call>')
    assert not accepts(grammar, "text")
    assert not accepts(grammar, '{"a": "b"}')


HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")
HARMONYS_THOUGHT = "<|channel|>analysis<|message|>hm, to=functions. is <b><|end|><|start|>assistant"


def harmonys_call(arguments: str, name: str = "get_weather", kind: str = " <|constrain|>json") -> str:
    return f"<|channel|>commentary to=functions.{name}{kind}<|message|>{arguments}"


def test_harmonys_grammar_admits_thoughts_then_one_call():
    channels = load_format("openai").channels
    assert channels is not None
    grammar = ForcedChannelCalls(channels, FORCED, special_ids(HARMONY)).text()
    call = harmonys_call(GOOD)
    for said in (call, HARMONYS_THOUGHT + call, f"{HARMONYS_THOUGHT}{call}<|call|>"):
        assert accepts(grammar, said, HARMONY), said
        assert read("openai", [said]).calls == [("get_weather", GOOD)]
    assert not accepts(grammar, call.replace(GOOD, BAD), HARMONY)
    assert not accepts(grammar, "<|channel|>final<|message|>no", HARMONY)


def test_a_strict_tool_leaves_harmonys_messages_free_and_holds_calls_to_their_schemas():
    channels = load_format("openai").channels
    assert channels is not None
    assert not StrictChannelCalls.are_possible(channels, special_ids(HARMONY[1:]))
    grammar = StrictChannelCalls(channels, FORCED, special_ids(HARMONY)).text()
    final, again = "<|channel|>final<|message|>Yes, 3 < 4.", "<|call|><|start|>assistant"
    preamble = "<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant"
    before_the_channel = f" to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{GOOD}<|call|>"
    calls = [harmonys_call(GOOD), harmonys_call(GOOD, kind=" json"), harmonys_call(GOOD, kind=""), before_the_channel]
    for said in calls:
        assert accepts(grammar, HARMONYS_THOUGHT + preamble + said, HARMONY), said
        assert read("openai", [HARMONYS_THOUGHT + said]).calls == [("get_weather", GOOD)]
        for bad in (said.replace(GOOD, BAD), said.replace("get_weather", "later"), said.replace(GOOD, "text")):
            assert not accepts(grammar, HARMONYS_THOUGHT + bad, HARMONY), bad
    python = "<|channel|>commentary to=python code<|message|>print(1)<|call|>"
    for said in ("", "text", final, f"{HARMONYS_THOUGHT}{final}<|return|>", python, f"{calls[0]}{again}{calls[0]}"):
        assert accepts(grammar, said, HARMONY), said
    for said in (f"{calls[0]}{again}{harmonys_call(BAD)}", final.replace("final", "final to=functions.x")):
        assert not accepts(grammar, said, HARMONY), said


def test_a_final_message_of_harmony_is_json_where_calls_are_the_other_choice():
    channels = load_format("openai").channels
    assert channels is not None
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    grammar = StrictChannelCalls(channels, FORCED, special_ids(HARMONY)).text(schema)
    final = '<|channel|>final <|constrain|>json<|message|>{"a": 1}<|return|>'
    for said in (final, HARMONYS_THOUGHT + final, HARMONYS_THOUGHT + harmonys_call(GOOD)):
        assert accepts(grammar, said, HARMONY), said
    for said in (final.replace("1", '"b"'), '{"a": 1}', "<|channel|>final<|message|>text", harmonys_call(BAD)):
        assert not accepts(grammar, said, HARMONY), said


def test_a_form_of_json_is_harmonys_final_message_after_its_thoughts():
    """A grammar of JSON alone would forbid the header that the model begins with."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens(list(HARMONY))
    prompt, choice = RenderedChat("", "{# <|channel|> <|message|> analysis #}"), ToolChoice()
    formats = OutputFormats().of(prompt, choice)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    grammar = formats.grammar(Tokenizer(bundle_of(tokenizer)), prompt, choice, several=True, or_json=schema)
    assert grammar is not None
    final = '<|channel|>final<|message|>{\n  "a": 1\n}<|return|>'
    for said in (final, HARMONYS_THOUGHT + final):
        assert accepts(grammar, said, HARMONY), said
    for said in ('{"a": 1}', final.replace("1", '"b"'), harmonys_call(GOOD)):
        assert not accepts(grammar, said, HARMONY), said
    plain = Tokenizer(bundle_of(byte_level_tokenizer()))
    assert formats.grammar(plain, prompt, choice, several=True, or_json=schema) is None


TWO = [("get_weather", {"city": "x", "days": 3}), ("now", {})]
WRONG = [[("get_weather", {"city": "x", "days": 30})], [("later", {})], [TWO[0], ("get_weather", {"city": "x"})]]


WITHOUT_QUOTES = [
    name
    for name in WITH_CALLS
    if (calls := load_format(name).calls) is not None and calls.body in ("xml", "escaped") and not calls.is_either
]


@pytest.mark.parametrize("name", WITHOUT_QUOTES)
def test_a_text_that_would_end_at_its_own_marker_is_not_written(name):
    calls = load_format(name).calls
    assert calls is not None
    end = calls.parameter[3] or calls.escape

    def grammar_of(*texts: str) -> str:
        schema = {"type": "object", "properties": {"tag": {"enum": [*texts]}}, "required": ["tag"]}
        tools = [{"type": "function", "function": {"name": "set", "parameters": schema}}]
        return ForcedCalls(calls, tools, special_ids(()), several=False).text()

    assert grammar_of("plain", f"a{end}b") == grammar_of("plain")
    with pytest.raises(InvalidRequestError, match="enum or const .* each has " + re.escape(repr(end))):
        grammar_of(f"a{end}b")


@pytest.mark.parametrize("way", every(3, WAYS), ids=[f"{way.format}-{place}" for place, way in enumerate(WAYS)])
def test_grammars_admit_calls_as_the_family_writes_them_and_no_others(way: Way):
    """A model that is held to another way than its own answers worse."""
    declared = load_format(way.format)
    specials = tuple(dict.fromkeys((*way.special, *(HARMONY if declared.channels else ()))))
    ids, grammars = special_ids(specials), list[str]()
    if declared.channels is not None:
        grammars = [each(declared.channels, FORCED, ids).text() for each in (ForcedChannelCalls, StrictChannelCalls)]
    elif declared.calls is not None:
        grammars = [each(declared.calls, FORCED, ids, several=True).text() for each in (ForcedCalls, StrictCalls)]
    assert grammars
    for grammar in grammars:
        for calls in [TWO[:1]] if declared.channels or way.format == "gigachat3" else [TWO[:1], TWO]:
            assert accepts(grammar, way.write(calls), specials), way.write(calls)
        for wrong in WRONG:
            assert not accepts(grammar, way.write(wrong), specials), way.write(wrong)


@pytest.mark.parametrize("name", every(2, WITH_CALLS))
def test_one_call_that_is_complete_ends_the_answer(name: str):
    llguidance = pytest.importorskip("llguidance")
    declared = load_format(name).calls
    assert declared is not None
    way = next(each for each in WAYS if load_format(each.format).calls == declared)
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens(list(way.special))
    grammar = ForcedCalls(declared, FORCED[1:], special_ids(way.special), several=False).text()
    matching = llguidance.LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id("<|endoftext|>"))
    matcher = llguidance.LLMatcher(
        matching, llguidance.LLMatcher.grammar_from_lark(with_texts(grammar, for_llguidance))
    )
    assert matcher.consume_tokens(tokenizer.encode(way.write(TWO[1:]).rstrip()).ids), matcher.get_error()
    assert matcher.is_stopped()


def test_a_call_behind_a_separator_is_held_to_its_schema_too():
    grammar = strict_grammar("llama3_json")
    good, bad = (f'{{"name": "get_weather", "parameters": {each}}}' for each in (GOOD, BAD))
    for begin in ("", "<|python_tag|>"):
        assert accepts(grammar, f"{begin}{good}; {good}")
        for separator in ("; ", ";", " ; "):
            assert not accepts(grammar, f"{begin}{good}{separator}{bad}"), separator


@pytest.mark.parametrize(("name", "bounds"), pairs(WITH_CALLS, ({}, {"minLength": 1}, {"minLength": 1.0})))
def test_a_string_without_a_bound_repeats_no_group_by_a_count(name, bounds):
    """For each mask, xgrammar looks anew at every token where a group repeats {0,} times: 0.11 s for 262,144."""
    schema = {"type": "object", "properties": {"text": {"type": "string", **bounds}}, "required": ["text"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    for grammar in (ForcedCalls, StrictCalls):
        assert not re.search(r"\)\{\d+\.?\d*,\}", grammar(load_format(name).calls, tools, {}, several=True).text())


def test_texts_and_truth_values_may_be_pythons_where_calls_are():
    properties: dict[str, Any] = {  # any of which may be left out
        "city": {"type": "string", "maxLength": 5},
        "note": {"type": "string"},
        "unit": {"enum": ["c", "it's"]},
        "exact": {"type": ["boolean", "null"]},
        "code": {"type": "string", "pattern": "^[a-z]$"},
    }
    parameters = {"type": "object", "properties": properties, "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    calls = load_format("pythonic").calls
    assert calls is not None
    grammar = ForcedCalls(calls, tools, {}, several=False).text()
    for said, meant in (
        (r"city='Z\u00fc'", None),  # this escape is none of those that count as one character
        (r"note='a\'\\\"\n'", {"note": "a'\\\"\n"}),
        (r"city='a\n'", None),  # where the length is bounded, escapes are JSON's
        (r'city="a\n"', {"city": "a\n"}),
        ("city='Basel'", {"city": "Basel"}),
        ("city='Zürich'", None),
        ('city="Basel"', {"city": "Basel"}),
        ("unit='c', exact=None", {"unit": "c", "exact": None}),
        ('unit="it\'s", exact=True', {"unit": "it's", "exact": True}),
        ("unit='d'", None),
        ('exact=false, code="x"', {"exact": False, "code": "x"}),
        ("code='x'", None),  # a pattern is of JSON's text
    ):
        answer = f"[f({said})]"
        assert accepts(grammar, answer) == (meant is not None), answer
        if meant is not None:
            ((_, arguments),) = read("pythonic", [answer]).calls
            assert json.loads(arguments) == meant
            validate(meant, parameters)


def test_pythons_values_are_those_of_types_in_capitals_too():
    def written(*types):
        schema = {
            "type": "object",
            "properties": {each: {"type": kind} for each, kind in zip("abc", types, strict=True)},
        }
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        return re.sub(
            r"%json \{.*?\}\}", "", ForcedCalls(load_format("pythonic").calls, tools, {}, several=False).text()
        )

    assert "True" in written("string", "boolean", "null")
    assert written("STRING", "Boolean", "NULL") == written("string", "boolean", "null")


def test_a_later_call_may_repeat_the_opener_behind_a_separator():
    grammar, opener = strict_grammar("llama3_json"), "<|python_tag|>"
    good = f'{{"name": "get_weather", "parameters": {GOOD}}}'
    assert accepts(grammar, f"So: {opener}{good}; {opener}{good}")
