"""Formats are known by the names that vLLM's users give, each a short declaration, and a server says which it found."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from example_tools import NOW

from headrace.frontend.http.apis.openai.chat import ChatParts
from headrace.frontend.http.options import ServeOptions
from headrace.frontend.text.chat_template import RenderedChat
from headrace.frontend.text.formats.declaration import FOLDER, load_format
from headrace.frontend.text.formats.output_formats import OutputFormats, ToolChoice
from headrace.ipc.failure import OptionError

CALLS = """
hermes llama3_json llama4_json llama4_pythonic pythonic mistral qwen3_xml qwen3_coder deepseek_v3 deepseek_v31 granite
granite-20b-fc granite4 internlm jamba xlam phi4_mini_json kimi_k2 glm45 glm47 minimax minimax_m2 hunyuan_a13b seed_oss
step3 olmo3 gigachat3 ernie45 longcat openai functiongemma deepseek_v32 deepseek_v4 gemma4 lfm2 apertus hy_v3 mimo
poolside_v1 cohere_command3 cohere_command4 minicpm5 solar_open2 step3p5 kimi_k3 minimax_m3 inkling hy_v4 dots
deepseek_v41 k2_horizon plamo3 muse_glimmer ling3 qwen3_json
"""
REASONING = """
deepseek_r1 deepseek_v3 qwen3 granite mistral glm45 openai_gptoss gptoss hunyuan_a13b minimax_m2 kimi_k2 olmo3 seed_oss
step3 ernie45 glm47 deepseek_v4 gemma4 hy_v3 mimo poolside_v1 cohere_command3 cohere_command4 solar_open2 step3p5
nemotron_v3 holo2 kimi_k3 minimax_m3 inkling hy_v4 minimax_m2_append_think deepseek_v41 k2_horizon plamo3 muse_glimmer
ling3 granite_thinking_parser minicpmv
"""


@pytest.mark.parametrize("name", CALLS.split())
def test_a_format_of_calls_is_known_by_vllms_name(name):
    declared = load_format(name)
    assert declared.calls or declared.channels
    OutputFormats(name)


@pytest.mark.parametrize("name", REASONING.split())
def test_a_format_of_reasoning_is_known_by_vllms_name(name):
    declared = load_format(name)
    assert declared.reasoning or declared.channels
    OutputFormats(reasoning_parser=name)


def test_a_name_of_vllms_without_a_declaration_is_refused_with_its_reason():
    for option in ("tool_call_parser", "reasoning_parser"):
        with pytest.raises(OptionError, match=rf"{option}=hf: hf is not supported: it reads .* response template"):
            OutputFormats(**{option: "hf"})


def test_a_declaration_is_short():
    lengths = {path.stem: len(path.read_text().splitlines()) for path in FOLDER.glob("*.yaml")}
    assert {name: length for name, length in lengths.items() if length >= 40} == {}


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ('{# <tool_call> "arguments" <think></think> #}', ["answers are read as hermes", "reasoning is that of qwen3"]),
        ("{# <|channel|> <|message|> analysis #}", ["answers are read as openai"]),
        ("{{ messages }}", ["the chat template matches no known tool-call format"]),
    ],
)
def test_what_the_chat_template_speaks_for_is_said_once(template, said, caplog):
    caplog.set_level(logging.INFO)
    formats = OutputFormats(reasoning_parser="auto")
    for _ in range(2):
        formats.of(RenderedChat("", template), ToolChoice([]))
    told = [record.message for record in caplog.records]
    assert [each for each in told if any(each.startswith(words) for words in said)] == told[: len(said)]
    assert len(told) == len(said)


def formats_of_server(**options: Any) -> OutputFormats:
    return ChatParts(ServeOptions(**options), None, trusts_requests=False).formats


def test_a_server_knows_the_formats_of_its_plugins_by_their_files_names(tmp_path):
    (calls := tmp_path / "mine.yaml").write_text("calls: {call: [CALL, END], body: json}\n")
    (thoughts := tmp_path / "hm.yaml").write_text("reasoning: {begin: HM, end: OVER}\n")
    formats = formats_of_server(
        tool_call_parser="mine",
        tool_parser_plugin=str(calls),
        reasoning_parser="hm",
        reasoning_parser_plugin=str(thoughts),
    )
    found = formats.of(RenderedChat("", ""), ToolChoice([NOW]))
    assert (found.calls, found.reading) == (load_format(str(calls)), load_format(str(thoughts)))


def test_a_server_without_auto_tool_choice_reads_the_calls_that_requests_force_alone():
    for reads in (True, False):
        formats = formats_of_server(tool_call_parser="hermes", enable_auto_tool_choice=reads)
        assert (formats.of(RenderedChat("", ""), ToolChoice([NOW])).calls is not None) == reads
        assert formats.of(RenderedChat("", ""), ToolChoice([NOW], [NOW])).calls == load_format("hermes")
