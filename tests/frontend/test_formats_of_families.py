"""Calls as the families' own templates write them, read in every format: one conversation, many ways to write it."""

from __future__ import annotations

import itertools
import json

import pytest
from family_answers import CALLS, PLAIN, THINK, TOOLS, WAYS, kimi, listed, step3
from hypothesis import given, settings
from hypothesis import strategies as st
from read_answers import parser_of, read

from headrace.frontend.text.formats.declaration import known_formats, load_format

IDS = [f"{way.format}-{place}" for place, way in enumerate(WAYS)]


def test_every_format_has_its_way():
    held = [load_format(way.format) for way in WAYS]
    assert [name for name, declared in known_formats().items() if declared.calls and declared not in held] == []


@pytest.mark.parametrize("way", WAYS, ids=IDS)
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


@pytest.mark.parametrize("way", WAYS, ids=IDS)
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
