"""Calls as the families' own templates write them, read in every format: one conversation, many ways to write it."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from fake_tokenizers import bundle_of, byte_level_tokenizer
from family_answers import CALLS, PLAIN, STEP3, THINK, TOOLS, WAYS, kimi, listed, step3
from hypothesis import given, settings
from hypothesis import strategies as st
from read_answers import Read, parser_of, read
from thinned import every

from headrace.frontend.text.chat_template import RenderedChat, render_chat
from headrace.frontend.text.formats.declaration import known_formats, load_format
from headrace.frontend.text.formats.output_formats import OutputFormats, ToolChoice
from headrace.frontend.text.tokenizer import Tokenizer

IDS = [f"{way.format}-{place}" for place, way in enumerate(WAYS)]


def test_every_format_has_its_way():
    held = [load_format(way.format) for way in WAYS]
    assert [name for name, declared in known_formats().items() if declared.calls and declared not in held] == []


@pytest.mark.parametrize("way", every(2, WAYS), ids=IDS)
@pytest.mark.parametrize("case", CALLS)
def test_calls_are_read_as_their_family_writes_them(way, case):
    """Whole and by characters, with text and reasoning before them and more text after."""
    calls = CALLS[case][:1] if way.format == "gigachat3" else CALLS[case]
    if case == "markers in a text" and way.format in ("qwen3_xml", "minimax_m2", "seed_oss"):
        calls = [("get_weather", {"city": calls[0][1]["city"]})]  # the end of a value stands in a list's text
    text, thought = way.write(calls), "First I think.\nThen {act} <soon>, [maybe]."
    answers = [(text, "", "")]
    if way.takes_text:
        answers.append((f"Let me <b>look</b> that {{up}}. \n{text}", "Let me <b>look</b> that {up}.", ""))
    if way.thinks is not None:
        begin, end = way.thinks
        answers.append((f"{begin}{thought}{end}{text}", "", thought))
        if way.takes_text:
            answers.append((f"{begin}{thought}{end}So: {text}", "So:", thought))
    for answer, content, reasoning in answers:
        prompt = ((way.thinks or THINK)[0] or "<think>\n") if way.is_open and reasoning else ""
        for pieces in ([answer], answer):
            read_in = way.reasoning if reasoning else None
            found = read(way.format, pieces, prompt, way.special, reasoning=read_in, tools=TOOLS)
            assert [(name, json.loads(said)) for name, said in found.calls] == calls, answer
            assert (found.content.strip(), found.reasoning.strip()) == (content, reasoning), answer


@settings(max_examples=200, deadline=None)
@given(
    way=st.sampled_from(WAYS),
    case=st.sampled_from(sorted(CALLS)),
    cuts=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=40),
)
def test_calls_are_read_alike_in_any_pieces(way, case, cuts):
    text = "So: " * way.takes_text + way.write(CALLS[case][: 1 if way.format == "gigachat3" else None])
    places = sorted(int(each * len(text)) for each in cuts)
    pieces = [text[begin:end] for begin, end in itertools.pairwise([0, *places, len(text)])]
    found, whole = (read(way.format, each, "", way.special, reasoning=None, tools=TOOLS) for each in (pieces, [text]))
    assert found == whole


@pytest.mark.parametrize("way", every(2, WAYS), ids=IDS)
def test_an_answer_that_is_cut_within_its_calls_says_no_part_of_their_markers(way):
    """Half a call at max_tokens: what was read of the arguments is there, and nothing of what stands around them."""
    text = way.write([PLAIN])
    ((_, whole),) = read(way.format, [text], "", way.special, reasoning=None, tools=TOOLS).calls
    num_begun = 0
    for at in range(len(text)):
        half = read(way.format, [text[:at]], "", way.special, reasoning=None, tools=TOOLS)
        if half.calls:
            ((name, said),) = half.calls
            assert (name, half.content) == ("get_weather", ""), text[:at]
            assert said == "{}" or whole.startswith(said), text[:at]
            num_begun += said not in ("{}", whole)
    assert num_begun >= len("Zürich"), "arguments stream before the call is complete"


@pytest.mark.parametrize("way", WAYS, ids=IDS)
def test_a_long_text_within_arguments_is_told_without_a_turn_of_the_reader(way):
    """What most pieces of a call are. Such a turn costs several times as much, which streams of calls would pay."""
    long = "It rains, and it is 9 degrees. " * 20
    parser = parser_of(way.format, "", way.special, reasoning=None, tools=TOOLS)
    text, said, num_direct = way.write([("get_weather", {"city": long, "days": 3})]), "", 0
    for at in range(0, len(text), 5):
        piece = text[at : at + 5]
        if (told := parser.go_on(piece)) is not None:
            num_direct += parser.call == 0
            said += told if parser.call == 0 else ""
        else:
            said += "".join(each.arguments for each in parser.feed(piece))
    said += "".join(each.arguments for each in parser.finish())
    assert json.loads(said) == {"city": long, "days": 3}
    assert num_direct >= len(long) // 5 - 2


def test_a_further_call_of_a_section_that_is_cut_before_its_name_is_left_out():
    for name, write in (("kimi_k2", kimi), ("step3", step3), ("jamba", listed("<tool_calls>[", "]</tool_calls>"))):
        whole = write([PLAIN, PLAIN])
        for at in range(len(write([PLAIN])), whole.rindex("get_weather") + 3):
            half = read(name, [whole[:at]], reasoning=None, tools=TOOLS)
            assert half.content == "", whole[:at]
            assert [name for name, _ in half.calls] == ["get_weather"]


STEP3S_TEMPLATE = (
    "{% macro said(content) %} {% if content is string %}{{- content }}{% else %}{% for part in content %}"
    "{% if part.type == 'text' %}{{- part.text }}{% endif %}{% endfor %}{% endif %} {% endmacro %}{{ bos_token }}"
    "{% for m in messages if m.role == 'system' %}{{ said(m['content']) }}{% endfor %}"
    "{% if tools is defined and tools %}{% set all = namespace(lines='') %}{% for tool in tools %}"
    "{% set all.lines = all.lines + (tool | tojson(ensure_ascii=False)) + '\n' %}{% endfor %}"
    "<tools>{{ all.lines }}</tools>" + step3([("tool", {"parameter": "..."})], line="\n", between="\n") + "\n"
    "{% endif %}{% for m in messages if m.role == 'user' %}{{- '<|BOT|>' + m.role + '\n' + said(m['content']) }}"
    "{{- '<|EOT|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{- '<|BOT|>assistant\n<think>\n' }}{% endif %}"
)
"""In other words than the model's, but built as that: a macro for contents, tools in a namespace, the calls' format."""


def test_step3s_template_leads_to_its_calls_from_a_conversation():
    """The prompt, the format that it speaks for, the answer in it, and the grammar of a strict tool."""
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Où?"}]}]
    text = render_chat(STEP3S_TEMPLATE, asked, add_generation_prompt=True, tools=TOOLS, variables={"bos_token": "<b>"})
    assert text.startswith('<b> Be brief. <tools>{"type": "function", "function": {"name": "get_weather"')
    assert text.endswith("<|BOT|>user\n Où? <|EOT|><|BOT|>assistant\n<think>\n")

    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([*STEP3, "</think>"])
    ours = Tokenizer(bundle_of(tokenizer))
    prompt, choice = RenderedChat(text, STEP3S_TEMPLATE), ToolChoice(TOOLS)
    formats = OutputFormats(reasoning_parser="auto").of(prompt, choice)
    make_parser = formats.parser_factory(ours, prompt, choice)
    assert make_parser is not None
    reader, answer = make_parser(), "Hm.\n</think>\n" + step3([PLAIN, PLAIN], line="\n", between="\n")
    found = Read.of([*(event for piece in answer for event in reader.feed(piece)), *reader.finish()])
    assert (found.reasoning, found.content.strip()) == ("Hm.\n", "")
    assert [(name, json.loads(said)) for name, said in found.calls] == [PLAIN, PLAIN]
    functions: list[Any] = [each["function"] for each in TOOLS]
    strict = ToolChoice([{"type": "function", "function": {**each, "strict": True}} for each in functions])
    assert formats.can_hold_calls(ours)
    assert "<steptml:invoke name=" in (formats.grammar(ours, prompt, strict, several=True) or "")
