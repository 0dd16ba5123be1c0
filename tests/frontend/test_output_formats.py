"""Reasoning and tool calls are read from an answer's text, the same however it is cut, in every format."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
from fake_tokenizers import bundle_of, byte_level_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from processor_time import least_processor_s
from read_answers import TOOLS, Read, read
from source_tree import ROOT
from thinned import every

from headrace.frontend.request.message import message_of
from headrace.frontend.text.chat_template import RenderedChat
from headrace.frontend.text.formats.declaration import (
    FormatError,
    format_of_template,
    known_formats,
    load_format,
)
from headrace.frontend.text.formats.output_formats import OutputFormats, ToolChoice
from headrace.frontend.text.formats.parser import OutputParser
from headrace.frontend.text.tokenizer import Tokenizer
from headrace.ipc.failure import OptionError

ZURICH = {"city": 'Zü"r</tool_call>ich [x] {', "days": 3}
ZURICH_JSON = json.dumps(ZURICH, ensure_ascii=False)
ONE, TWO = [("get_weather", ZURICH)], [("get_weather", ZURICH), ("now", {})]
CALL, NOW_CALL = f'{{"name": "get_weather", "arguments": {ZURICH_JSON}}}', '{"name": "now", "arguments": {}}'
OLD_CALL, OLD_NOW = CALL.replace("arguments", "parameters"), NOW_CALL.replace("arguments", "parameters")
NO_CALL = "no call at all, but < and <tool and a brace {\n"
V3_CALL = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{ZURICH_JSON}\n```<｜tool▁call▁end｜>"
V3_NOW = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"
V31_CALL = f"<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{ZURICH_JSON}<｜tool▁call▁end｜>"
D_VALUE = "</｜DSML｜parameter>\n"
DSML = (
    '\n<｜DSML｜invoke name="get_weather">\n'
    f'<｜DSML｜parameter name="city" string="true">7{D_VALUE}<｜DSML｜parameter name="days" string="true">3{D_VALUE}'
    f'<｜DSML｜parameter name="other" string="true">[1]{D_VALUE}<｜DSML｜parameter name="more" string="false">'
    f'{{"x": 1}}{D_VALUE}<｜DSML｜parameter name="last" string="false">8{D_VALUE}</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n'
)
DSML_CALLS = [("get_weather", {"city": "7", "days": 3, "other": "[1]", "more": {"x": 1}, "last": 8}), ("now", {})]
CASES: list[tuple[str, str, str, str, list[tuple[str, Any]]]] = [
    ("hermes", f"Let me look.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{NOW_CALL}</tool_call>",
     "Let me look.", "", TWO),
    ("hermes", '<tool_call>{"name": "now"}</tool_call> then more', "then more", "", [("now", {})]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "now"}</tool_call>', "", "", [("now", {"a": 1})]),
    ("hermes", NO_CALL, NO_CALL, "", []),
    ("hermes", "<tool_call>nothing</tool_call>", "<tool_call>nothing</tool_call>", "", []),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', "", "", [("now", {"a": 1})]),
    ("qwen3", "<think>\nso\n</think>\n\nyes", "\n\nyes", "\nso\n", []),
    ("qwen3", "yes </think> no", "yes </think> no", "", []),
    ("deepseek_r1", "so</think>yes", "yes", "so", []),
    ("deepseek_r1", "<think>so</think>yes", "yes", "so", []),
    ("deepseek_v3", f"<think>hm</think>ok<｜tool▁calls▁begin｜>{V3_CALL}\n{V3_NOW}<｜tool▁calls▁end｜>",
     "ok", "hm", TWO),
    ("deepseek_v31", f"<｜tool▁calls▁begin｜>{V31_CALL}<｜tool▁call▁begin｜>now<｜tool▁sep｜>{{}}<｜tool▁call▁end｜>"
     "<｜tool▁calls▁end｜>", "", "", TWO),
    ("llama3_json", f"{OLD_CALL}; {OLD_NOW}", "", "", TWO),
    ("llama3_json", f"<|python_tag|>{OLD_NOW}", "", "", [("now", {})]),
    ("llama3_json", '{"answer": 42}', '{"answer": 42}', "", []),
    ("pythonic", "[get_weather(city='Zü\"r</tool_call>ich [x] {', days=3), now()]", "", "", TWO),
    ("pythonic", "[1, 2] is a list", "[1, 2] is a list", "", []),
    ("llama4_pythonic", '<|python_start|>[now(), now(a=[1, {"b": None}], c=True)]<|python_end|>', "", "",
     [("now", {}), ("now", {"a": [1, {"b": None}], "c": True})]),
    ("olmo3", "<think>a</think><function_calls>\nget_weather(city='x')\nnow()\n</function_calls>", "", "a",
     [("get_weather", {"city": "x"}), ("now", {})]),
    ("mistral", f"hi [TOOL_CALLS] [{CALL}, {NOW_CALL}]", "hi", "", TWO),
    ("mistral", f"[THINK]a[/THINK][TOOL_CALLS]get_weather{ZURICH_JSON}[TOOL_CALLS]now[ARGS]{{}}", "", "a", TWO),
    ("qwen3_xml", '<tool_call>\n<function=get_weather>\n<parameter=city>\nNew\n"York"\n</parameter>\n<parameter=days>'
     "\n3\n</parameter>\n<parameter=other>\n[true]\n</parameter>\n</function>\n</tool_call>",
     "", "", [("get_weather", {"city": 'New\n"York"', "days": 3, "other": [True]})]),
    ("seed_oss", "<seed:think>x</seed:think>a<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
     "a", "x", [("now", {})]),
    ("glm45", "<think>a</think>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>7</arg_value>\n"
     "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
     "", "a", [("get_weather", {"city": "7", "days": 3}), ("now", {})]),
    ("minimax_m2", 'hm</think>\n\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">x'
     '</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
     "", "hm", [("get_weather", {"city": "x"}), ("now", {})]),
    ("step3", "t</think><｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke "
     'name="get_weather"><steptml:parameter name="city">x</steptml:parameter></steptml:invoke><｜tool_call_end｜>'
     "<｜tool_calls_end｜>", "", "t", [("get_weather", {"city": "x"})]),
    ("granite", f"<|tool_call|>[{CALL}]", "", "", ONE),
    ("granite4", f"Yes:\n<tool_call>\n{CALL}\n</tool_call> Now:\n<tool_call>{NOW_CALL}</tool_call>",
     "Yes:\n Now:\n", "", TWO),
    ("granite-20b-fc", f"<function_call> {CALL}\n<function_call> {NOW_CALL}", "", "", TWO),
    ("internlm", f"ok<|action_start|><|plugin|>\n{OLD_CALL}<|action_end|>", "ok", "", ONE),
    ("jamba", f"<tool_calls>[\n  {CALL},\n {NOW_CALL}\n]</tool_calls>", "", "", TWO),
    ("minimax", f"<tool_calls>\n{CALL}\n{NOW_CALL}\n</tool_calls>", "", "", TWO),
    ("hunyuan_a13b", "<think>\na\n</think>\n<answer>\nhello\n</answer>", "hello", "a", []),
    ("ernie45", f"a</think>\n<tool_call>\n{CALL}\n</tool_call>", "", "a", ONE),
    ("ernie45", "a\n</think>\n\n<response>\nHello.\n</response>\n", "\n\n\nHello.\n\n", "a\n", []),
    ("xlam", f"[{CALL}]", "", "", ONE),
    ("phi4_mini_json", f"functools[{CALL}]", "", "", ONE),
    ("longcat", f"<longcat_tool_call>{NOW_CALL}</longcat_tool_call>", "", "", [("now", {})]),
    ("longcat_xml", "<longcat_think>\nhm</longcat_think>\nSo:<longcat_tool_call>get_weather\n<longcat_arg_key>city"
     "</longcat_arg_key>\n<longcat_arg_value>7</longcat_arg_value>\n<longcat_arg_key>days</longcat_arg_key>\n"
     "<longcat_arg_value>3</longcat_arg_value>\n</longcat_tool_call>\n<longcat_tool_call>now</longcat_tool_call>"
     f"<longcat_tool_call>\n{NOW_CALL}\n</longcat_tool_call>", "\nSo:", "\nhm",
     [("get_weather", {"city": "7", "days": 3}), ("now", {}), ("now", {})]),
    ("kimi_k2", f"x<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
     f"{ZURICH_JSON}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
     "<|tool_calls_section_end|>", "x", "", TWO),
    ("kimi_k3", '<|open|>think<|sep|>a<|close|>think<|sep|><|open|>response<|sep|>Ok.<|close|>response<|sep|>'
     '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" type="string"'
     '<|sep|>Zü"r<br>ich<|close|>argument<|sep|><|open|>argument key="other" type="object"<|sep|>{"a":1}<|close|>'
     'argument<|sep|><|close|>call<|sep|><|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|><|close|>tools'
     "<|sep|><|close|>message<|sep|>", "Ok.", "a",
     [("get_weather", {"city": 'Zü"r<br>ich', "other": {"a": 1}}), ("now", {})]),
    ("deepseek_v41", f"<think>a</think>Ok.\n\n<｜DSML｜ calls>{DSML}</｜DSML｜ calls>".replace("｜invoke", "｜ invoke")
     .replace("｜parameter", "｜ parameter"), "Ok.", "a", DSML_CALLS),
    ("minimax_m3", "<mm:think>hm</mm:think>I order.\n]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke "
     'name="get_weather">]<]minimax[>[<city>a <b> ]<] c]<]minimax[>[</city>]<]minimax[>[<days>42]<]minimax[>[</days>\n'
     "]<]minimax[>[<items>\n]<]minimax[>[<item>]<]minimax[>[<sku>book-001]<]minimax[>[</sku>]<]minimax[>[<n>1]<]minimax[>[</n>]<]minimax[>["
     "<n>2]<]minimax[>[</n>]<]minimax[>[</item>\n]<]minimax[>[</items>]<]minimax[>[</invoke>\n]<]minimax[>[<invoke "
     'name="now">]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>', "I order.\n", "hm",
     [("get_weather", {"city": "a <b> ]<] c", "days": 42, "items": [{"sku": "book-001", "n": ["1", "2"]}]}),
      ("now", {})]),
    ("minimax_m3", "</mm:think>Yes.", "Yes.", "", []),
    ("inkling", '<|content_thinking|>So.<|end_message|><|message_model|><|content_text|>Ok: <b>.<|end_message|>'
     f'<|message_model|>get_weather<|content_invoke_tool_json|>{{"name":"get_weather","args":{ZURICH_JSON}}}'
     "<|end_message|><|message_model|>now<|content_invoke_tool_json|>"
     '{"name":"now","args":{}}<|content_model_end_sampling|>', "Ok: <b>.", "So.", TWO),
    ("inkling", 'now<|content_invoke_tool_json|>{"name":"now","args":{}}<|end_message|>', "", "", [("now", {})]),
    ("inkling", "<|content_text|>Yes.<|end_message|><|content_model_end_sampling|>", "Yes.", "", []),
    ("inkling", "Just text.", "Just text.", "", []),
    ("inkling", f"{'long ' * 90}<|end_message|>", "long " * 90, "", []),
    ("inkling", f"{'I look. ' * 30}<|message_model|>now<|content_invoke_tool_json|>"
     '{"name":"now","args":{}}<|end_message|>', ("I look. " * 30)[:-1], "", [("now", {})]),
    ("hy_v4", "<think>a</think>Checking.<tool_calls>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Bei\n"
     "jing</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now</tool_call>\n"
     "</tool_calls>", "Checking.", "a", [("get_weather", {"city": "Bei\njing", "days": 3}), ("now", {})]),
    ("minimax_m2_append_think", "So.</think>\n\nYes.", "<think>So.</think>\n\nYes.", "", []),
    ("dots", 'Ok.\n<dots_function_call>\n<invoke name="get_weather">\n<parameter name="city">x</parameter>\n'
     '<parameter name="days">3</parameter>\n</invoke>\n</dots_function_call>', "Ok.", "",
     [("get_weather", {"city": "x", "days": 3})]),
    ("dots", f"<dots_function_call>\n{CALL}\n</dots_function_call>", "", "", ONE),
    ("k2_horizon", "<ifm|think>a</ifm|think>\n<ifm|tool_calls>\n<ifm|tool_call>get_weather\n<ifm|arg_key>city"
     "</ifm|arg_key>\n<ifm|arg_type>string</ifm|arg_type>\n<ifm|arg_value>7</ifm|arg_value>\n<ifm|arg_key>other"
     "</ifm|arg_key><ifm|arg_type>array</ifm|arg_type><ifm|arg_value>[1]</ifm|arg_value>\n</ifm|tool_call>\n"
     f"<ifm|tool_call>{NOW_CALL}</ifm|tool_call></ifm|tool_calls>", "", "a",
     [("get_weather", {"city": "7", "other": [1]}), ("now", {})]),
    ("plamo3", "<|plamo:begin_think:plamo|>So.<|plamo:end_think:plamo|>Ok.<|plamo:begin_tool_requests:plamo|>"
     "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>get_weather<|plamo:end_tool_name:plamo|>"
     f"<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>{ZURICH_JSON}"
     "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|><|plamo:end_tool_requests:plamo|>"
     "<|plamo:tag|>", "Ok.", "So.", ONE),
    ("muse_glimmer", ' to=self<|message|>Hm: <atem:invoke name="no">.<|eom|><|start|>assistant '
     "to=get_weather.get_weather<|message|><atem:function_calls>\n"
     '<atem:invoke name="get_weather.get_weather">\n<atem:parameter name="city">x</atem:parameter>\n</atem:invoke>\n'
     "</atem:function_calls><|eom|>", "", 'Hm: <atem:invoke name="no">.', [("get_weather", {"city": "x"})]),
    ("muse_glimmer", ' to=user<|message|>It is <atem:function_calls> to=that.<|eot|>',
     "It is <atem:function_calls> to=that.", "", []),
    ("granite_thinking_parser", "<think>\nSo.\n</think>\nYes.", "Yes.", "So.", []),
    ("deepseek_v32", f"<think>a</think>Ok.\n\n<｜DSML｜function_calls>{DSML}</｜DSML｜function_calls>", "Ok.", "a",
     DSML_CALLS),
    ("deepseek_v4", f"<｜DSML｜tool_calls>{DSML}</｜DSML｜tool_calls>", "", "", DSML_CALLS),
    ("gemma4", "<|channel>thought\nSo.\nYes.<channel|>Let me look. <|tool_call>call:get_weather{"
     'city:<|"|>Paris, France<|"|>,days:42,other:{inner:{<|"|>3<|"|>:<|"|>new<|"|>},'
     'list:[<|"|>a]b<|"|>,true,3.5]},more:null}<tool_call|><|tool_call>call:now{}<tool_call|>',
     "Let me look.", "So.\nYes.", [("get_weather", {"city": "Paris, France", "days": 42, "more": None,
      "other": {"inner": {"3": "new"}, "list": ["a]b", True, 3.5]}}), ("now", {})]),
    ("gemma4", "<|channel>thousand reasons<channel|>Done", "Done", "thousand reasons", []),
    ("lfm2", "<|tool_call_start|> [get_weather(city='Martha\\'s', days=3, other={'a': [None, True]}), now()]"
     "<|tool_call_end|>\nDone.", "\nDone.", "",
     [("get_weather", {"city": "Martha's", "days": 3, "other": {"a": [None, True]}}), ("now", {})]),
    ("apertus", f'Sure! <|tools_prefix|>[{{"get_weather": {ZURICH_JSON}}}, {{"now": {{}}}}]<|tools_suffix|>',
     "Sure!", "", TWO),
    ("apertus", f'<|inner_prefix|>So.<|inner_suffix|><|tools_prefix|>[{{"get_weather": {ZURICH_JSON}}}]',
     "", "So.", ONE),
    ("hy_v3", "Checking.<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n"
     "<arg_value>Bei\njing</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n"
     "<tool_call>now<tool_sep></tool_call>\n</tool_calls>", "Checking.", "",
     [("get_weather", {"city": "Bei\njing", "days": 3}), ("now", {})]),
    ("cohere_command3", "<|START_THINKING|> I look.<|END_THINKING|><|START_ACTION|>\n[\n"
     f'    {{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {ZURICH_JSON}}},\n'
     '    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]\n<|END_ACTION|>', "", " I look.", TWO),
    ("cohere_command4", "<|START_THINKING|>Hm.<|END_THINKING|>\n<|START_RESPONSE|>It is 9.<|END_RESPONSE|>",
     "\nIt is 9.", "Hm.", []),
    ("minicpm5", 'Intro.\n<function name="get_weather"><param name="city">上海</param><param name="days">3</param>'
     '</function>\n<function name="now"></function>', "Intro.", "",
     [("get_weather", {"city": "上海", "days": 3}), ("now", {})]),
    ("solar_open2", "<|think:start|>I use a tool<|think:end|>Sure.<|tool_call:start|>get_weather\n"
     "<|tool_arg:start|>city<|tool_arg:value|>Seoul<|tool_arg:end|>\n<|tool_call:end|>\n"
     "<|tool_call:start|>now\n<|tool_call:end|>post", "Sure.", "I use a tool",
     [("get_weather", {"city": "Seoul"}), ("now", {})]),
    ("step3p5", "So.\n</think>\nLet me see.<tool_call>\n<function=get_weather>\n<parameter=city>\nDallas\n"
     "</parameter>\n</function>\n</tool_call>", "Let me see.", "So.", [("get_weather", {"city": "Dallas"})]),
    # --- as the model families' own templates and the public parsers' tests write them
    ("step3", "Hm.</think>Ok.\n<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>get_weather\n"
     '<steptml:invoke name="get_weather"><steptml:parameter name="city"> a\n</steptml:parameter><steptml:parameter '
     'name="days"> 4 </steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_sep｜><｜tool_call_begin｜>'
     '<steptml:invoke name="now"></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>', "Ok.", "Hm.",
     [("get_weather", {"city": " a\n", "days": 4}), ("now", {})]),
    ("granite", '<tool_call> [{"arguments": {"days": 3}, "name": "get_weather"}, {"arguments": {}, "name": "now"}]',
     "", "", [("get_weather", {"days": 3}), ("now", {})]),
    ("xlam", f"Let me see.<tool_call>[{CALL}]</tool_call>", "Let me see.", "", ONE),
    ("llama3_json", f"{OLD_CALL}\n{NOW_CALL}", "", "", TWO),
    ("olmo3", "<function_calls>get_weather(city='San', days=3)\nnow()</function_calls>", "", "",
     [("get_weather", {"city": "San", "days": 3}), ("now", {})]),
    ("seed_oss", "<seed:think>\n<seed:cot_budget_reflect>0</seed:cot_budget_reflect>\n</seed:think><seed:tool_call>\n"
     "<function=get_weather>\n<parameter=city>Bar, S\n</parameter>\n</function>\n</seed:tool_call>", "",
     "\n<seed:cot_budget_reflect>0</seed:cot_budget_reflect>\n", [("get_weather", {"city": "Bar, S\n"})]),
    ("functiongemma", "Ok. <start_function_call>call:get_weather{city:<escape>a, {b}: \"c\"\n<escape>,days:<escape>42"
     "<escape>,other:{x:[<escape>y<escape>,2],z:true}}<end_function_call><start_function_call>call:now{}"
     "<end_function_call>", "Ok.", "",
     [("get_weather", {"city": 'a, {b}: "c"\n', "days": 42, "other": {"x": ["y", 2], "z": True}}), ("now", {})]),
    ("gigachat3", f"Ok.<|message_sep|>\n\nfunction call<|role_sep|>\n{CALL}", "Ok.", "", ONE),
    ("openai", "<|channel|>analysis<|message|>Let me <b>see</b>.<|end|><|start|>assistant<|channel|>commentary"
     "<|message|>Wait.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json"
     "<|message|>"
     f"{ZURICH_JSON}<|call|>", "Wait.", "Let me <b>see</b>.", ONE),
    ("openai", "<|channel|>analysis<|message|>x<|end|><|start|>assistant to=functions.now<|channel|>commentary json"
     "<|message|><|call|>", "", "x", [("now", {})]),
    ("openai", "<|channel|>final<|message|>Yes.<|return|>", "Yes.", "", []),
    ("gigachat3", f"<|function_call|>{NOW_CALL}", "", "", [("now", {})]),
    # The prompt ends within the header of the first message.
    ("openai", f" to=functions.get_weather<|channel|>commentary json<|message|>{ZURICH_JSON}<|call|>", "", "", ONE),
    ("openai", " to=nobody, and so on", " to=nobody, and so on", "", []),
    # Seed's template writes values as Python does.
    ("seed_oss", "<seed:tool_call>\n<function=get_weather>\n<parameter=days>3</parameter>\n<parameter=other>"
     "{'a': [1, None], 'b': \"it's </parameter>\", 'c': True}</parameter>\n</function>\n</seed:tool_call>", "", "",
     [("get_weather", {"days": 3, "other": {"a": [1, None], "b": "it's </parameter>", "c": True}})]),
    # Objects that need no marker are calls when they have arguments.
    ("llama3_json", '{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', "", []),
    ("llama3_json", '{"name": "Ann"}', '{"name": "Ann"}', "", []),
    ("xlam", '```json\n[{"name": "Ann"}]\n``` it is', '```json\n[{"name": "Ann"}]\n``` it is', "", []),
    # A text that may be missing.
    ("glm45", "<tool_call>get_weather\n<arg_key>units</arg_key>\n<arg_value>null</arg_value>\n<arg_key>city</arg_key>\n"
     "<arg_value>null</arg_value>\n</tool_call>", "", "", [("get_weather", {"units": None, "city": "null"})]),
    ("functiongemma", '<start_function_call>call:now{a:"b, c",d:"e"}<end_function_call>', "", "",
     [("now", {"a": "b, c", "d": "e"})]),
    # Texts as Python writes them.
    ("pythonic", r"[now(a='\x41\u00fc\ud83d\ude00\U0001F600\101\n\\\'\q', b='' 'z', e=['\ud83d'])]",
     "", "", [("now", {"a": "Aü😀😀A\n\\'\\q", "b": "z", "e": ["�"]})]),
    ("pythonic", """[now(a="it's", b='''x"'y''', c='')]""", "", "",
     [("now", {"a": "it's", "b": "x\"'y", "c": ""})]),
    ("qwen3_xml", "<tool_call>\n<function=get_weather>\n<parameter=other>\n[see, it's]\n</parameter>\n</function>\n"
     "</tool_call>", "", "", [("get_weather", {"other": "[see, it's]"})]),
]  # fmt: skip


def test_reasoning_is_read_with_the_markers_that_the_prompt_has_opened():
    """K2 Horizon's templates open the reasoning by the effort that a request asks for."""
    tokenizer, choice = Tokenizer(bundle_of(byte_level_tokenizer())), ToolChoice(TOOLS)
    for marker in ("think", "think_fast", "think_faster"):
        prompt = RenderedChat(f"<ifm|think>no</ifm|think> <ifm|{marker}>\n", "")
        formats = OutputFormats("none", "k2_horizon").of(prompt, choice).as_written(prompt.text, tokenizer)
        make_parser = formats.parser_factory(tokenizer, prompt, choice)
        assert make_parser is not None
        reader = make_parser()
        assert Read.of([*reader.feed(f"so</ifm|{marker}>yes"), *reader.finish()]) == Read("yes", "so", [])
        assert formats.reasoning is not None
        assert formats.reasoning.end == f"</ifm|{marker}>"


def test_markers_may_have_the_suffix_that_the_tokenizer_gives_them():
    """Hunyuan 4's checkpoints, whose tokens are <think:6124c78e> and so on."""
    library = byte_level_tokenizer()
    library.add_tokens([f"<{end}{name}:1a\\2>" for name in ("tool_calls", "tool_call", "think") for end in ("", "/")])
    tokenizer, prompt, choice = Tokenizer(bundle_of(library)), RenderedChat("<think:1a\\2>", ""), ToolChoice(TOOLS)
    formats = OutputFormats("hy_v4", "hy_v4").of(prompt, choice).as_written(prompt.text, tokenizer)
    make_parser = formats.parser_factory(tokenizer, prompt, choice)
    assert make_parser is not None
    reader = make_parser()
    text = "so</think><tool_calls><tool_call>now</tool_call></tool_calls>".replace(">", ":1a\\2>")
    assert Read.of([*reader.feed(text), *reader.finish()]) == Read("", "so", [("now", "{}")])
    grammar = formats.grammar(tokenizer, prompt, ToolChoice(TOOLS, TOOLS), several=False)
    assert "<tool_calls:1a" in (grammar or "")


@pytest.mark.parametrize(("prompt", "is_header"), [("", True), ("<|message_user|>a<|message_model|>", True),
    ("<|message_model|><|content_text|>So", False)])  # fmt: skip
def test_a_header_is_left_out_where_the_prompt_has_begun_it(prompt, is_header):
    found = read("inkling", ["name<|content_text|>text"], prompt)
    assert found == Read("text" if is_header else "nametext", "", [])


def test_a_broken_element_says_no_argument_and_none_of_it_is_content():
    text = (
        ']<]minimax[>[<invoke name="now">]<]minimax[>[<a>]<]minimax[>[<b>x]<]minimax[>[</a>]<]minimax[>[</invoke>Yes.'
    )
    found = read("minimax_m3", text)
    assert (found.content, found.calls) == ("Yes.", [("now", "")])


def test_elements_of_many_names_are_read_in_linear_time():
    inner = "".join(f"]<]minimax[>[<k{i}>v]<]minimax[>[</k{i}>" for i in range(20_000))
    text = f']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="now">]<]minimax[>[<a>{inner}]<]minimax[>[</a>'
    whole = [f"{text}]<]minimax[>[</invoke>]<]minimax[>[</tool_call>"]
    ((_, said),) = read("minimax_m3", whole).calls
    assert len(json.loads(said)["a"]) == 20_000
    assert least_processor_s(lambda: read("minimax_m3", whole), 10) < 10, "a square of the number would take minutes"


def test_elements_within_elements_without_end_are_no_call():
    text = ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="now">' + "]<]minimax[>[<a>" * 5000
    assert [name for name, _ in read("minimax_m3", [text]).calls] == ["now"]


def test_every_format_has_a_case():
    said = [load_format(name) for name, *_ in CASES]
    assert [name for name, declared in known_formats().items() if declared not in said] == []


@pytest.mark.parametrize(("name", "text", "content", "reasoning", "calls"), every(2, CASES))
def test_what_a_format_says_is_read(name, text, content, reasoning, calls):
    found = read(name, [text])
    assert (found.content, found.reasoning) == (content, reasoning)
    assert [(called, json.loads(arguments)) for called, arguments in found.calls] == calls


@pytest.mark.parametrize(("name", "shape"), [("mistral", "[0-9a-z]{9}"), ("hermes", "call_[0-9a-f]{24}")])
def test_calls_get_ids_of_a_form_that_the_models_templates_take(name, shape):
    text = "[TOOL_CALLS]now[ARGS]{}" * 2 if name == "mistral" else f"<tool_call>{NOW_CALL}</tool_call>" * 2
    calls = OutputParser(None, load_format(name), tools=TOOLS)
    first, second = message_of([*calls.feed(text), *calls.finish()]).tool_calls
    assert re.fullmatch(shape, first.id)
    assert re.fullmatch(shape, second.id)
    assert first.id != second.id


@pytest.mark.parametrize(("name", "text"), every(3, [(name, text) for name, text, *_ in CASES]))
def test_an_answer_reads_the_same_however_it_is_cut(name, text):
    whole = read(name, [text])
    assert read(name, text) == whole, "by characters"
    for at in range(len(text)):
        assert read(name, [text[:at], text[at:]]) == whole, f"cut at {at}"


@settings(max_examples=300, deadline=None)
@given(case=st.sampled_from(CASES), numbers=st.randoms(use_true_random=False), num_cuts=st.integers(2, 12))
def test_an_answer_reads_the_same_in_any_pieces(case, numbers, num_cuts):
    name, text, *_ = case
    cuts = sorted(numbers.randint(0, len(text)) for _ in range(num_cuts))
    pieces = [text[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(text)])]
    assert read(name, pieces) == read(name, [text])


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from(sorted(known_formats())),
    pieces=st.lists(
        st.sampled_from(
            [*"{}[]()\"'\\<>=,:;\n a1", "<tool_call>", "</tool_call>", '{"name": "now"', '"arguments": {', "<think>"]
        )
        | st.sampled_from([text[: len(text) // 2] for _, text, *_ in CASES]),
        max_size=12,
    ),
)
def test_any_text_at_all_is_read_without_an_error_and_alike_in_pieces(name, pieces):
    assert read(name, pieces) == read(name, ["".join(pieces)]) == read(name, "".join(pieces))


@pytest.mark.parametrize(("name", "text"), every(2, [(name, text) for name, text, *_, calls in CASES if calls]))
def test_arguments_come_before_the_call_is_complete(name, text):
    """Half a call at max_tokens: nothing of it is lost, and once its name is there it is a call."""
    long = text.replace(json.dumps(ZURICH["city"], ensure_ascii=False)[1:-1], "x" * 200)
    half = read(name, [long[:-110]])
    if "x" * 90 in long:
        assert half.calls[0][0] == "get_weather"
        assert "x" * 80 in half.calls[0][1]


def test_a_prompt_that_opened_the_reasoning_is_known():
    assert read("qwen3", ["so</think>yes"], prompt="a<think>\n") == Read("yes", "so", [])
    assert read("qwen3", ["yes"], prompt="a<think>\n\n</think>\n\n") == Read("yes", "", [])


def test_pieces_in_which_no_marker_can_begin_are_known_at_once():
    """What most pieces are: their cost is a look for the markers' first letters."""
    declared = load_format("hermes")
    parser = OutputParser(load_format("qwen3"), declared, prompt="<think>\n", tools=TOOLS)
    assert parser.go_on("so") is None, "nothing has been read yet"
    assert Read.of(parser.feed("so")) == Read("", "so", [])
    assert (parser.go_on(" it is "), parser.is_thinking) == (" it is ", True)
    assert parser.go_on("a < b") is None
    assert Read.of(parser.feed(" a </thi")) == Read("", " a ", [])
    assert parser.go_on("nk, he said") is None, "the text before waits to be read"
    assert Read.of(parser.feed("nk>yes")) == Read("yes", "", [])
    assert (parser.go_on(" no"), parser.is_thinking) == (" no", False)
    assert parser.go_on(" no\n") is None, "it may stand before a call"
    assert Read.of(parser.feed(" no\n")) == Read(" no", "", [])
    assert parser.go_on("but") == "\nbut"
    assert Read.of([*parser.feed('<tool_call>{"name": "now", "arguments": {"a": "')]).calls == [("now", '{"a": "')]
    assert (parser.go_on("text"), parser.call) == ("text", 0)
    assert parser.go_on('\\"') is None
    assert [each.arguments for each in parser.feed('"}}</tool_call>')] == ['"}']


def test_special_tokens_that_are_no_markers_are_left_out():
    text = '<|im_start|>a<|eot|><tool_call>{"name": "now"}</tool_call><|im_end|>'
    for pieces in ([text], text):
        found = read("hermes", pieces, hidden=("<|im_start|>", "<|im_end|>", "<|eot|>", "<tool_call>"))
        assert found == Read("a", "", [("now", "{}")])


def test_numbers_that_json_cannot_write_are_no_arguments():
    found = read("pythonic", ["[get_weather(days=1e999)]"])
    assert "Infinity" not in str(found.calls)


def test_a_template_speaks_for_its_format():
    begin, separator = "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'", "'<｜tool▁sep｜>'"
    assert format_of_template(begin + "tool['type']" + separator + "'\\n```json\\n'") == "deepseek_v3"
    assert format_of_template(begin + "tool['function']['name']" + separator) == "deepseek_v31"
    assert format_of_template("'<start_function_call>call:' ... '<escape>'") == "functiongemma"
    assert format_of_template('... <tool_call>\n{"name": <name>, "arguments": <args>}') == "hermes"
    assert format_of_template("<tool_call><function=a><parameter=b>") in ("qwen3_xml", "qwen3_coder")
    assert format_of_template("{{ messages }}") is None
    llama = (
        """'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value.'"""
    )
    assert load_format(format_of_template(llama) or "") == load_format("llama3_json")
    longcat = 'return a json object within <longcat_tool_call> tags: {"name": ..., "arguments": ...}'
    assert format_of_template(longcat) == "longcat"
    assert format_of_template(longcat + "<longcat_arg_key>{arg-key}</longcat_arg_key>") == "longcat_xml"
    ernie = '<global_setting>\nthink_mode=True <tool_call>\n{"name": ..., "arguments": ...} <think> <response>'
    assert format_of_template(ernie) == "ernie45"
    gigachat = "role_sep='<|role_sep|>' ... by the `function call` role"
    assert format_of_template(gigachat) == "gigachat3"
    lists = '<tool_call></tool_call>: <tool_calls>[{"name": ..., "arguments": ...}]</tool_calls>'
    assert load_format(format_of_template(lists) or "") == load_format("jamba")


@pytest.mark.parametrize(
    ("template", "calls", "reasoning"),
    [
        ('<tool_call> "arguments" </think>', "hermes", "qwen3"),
        ('<tool_call> "arguments"', "hermes", None),
        ("</think>", None, "qwen3"),
        ("<arg_key> <arg_value> </think>", "glm45", "glm45"),
        ("<|channel|> <|message|> analysis", "openai", "openai"),
    ],
)
def test_auto_finds_the_reasoning_too_where_the_format_of_calls_has_none(template, calls, reasoning):
    prompt, choice = RenderedChat("", template), ToolChoice(TOOLS)
    found = OutputFormats(reasoning_parser="auto").of(prompt, choice)
    if calls == "openai":
        assert found.channels == load_format("openai").channels
        return
    assert found.calls == (calls and load_format(calls))
    assert found.reading == (reasoning and load_format(reasoning))
    assert OutputFormats().of(prompt, choice).reading is None


CHANNELS = "channels: {start: S, channel: C, message: M, ends: [E, C], reasoning: [a], functions: f, constrain: x}"


def test_a_format_of_ones_own_is_a_yaml_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("calls: {call: [CALL, END], body: json}\n")
    assert read(str(path), ['x CALL{"name": "now"}END']) == Read("x", "", [("now", "{}")])
    path.write_text("calls: {body: json}\n")
    with pytest.raises(FormatError, match=r"mine\.yaml: not an output format: calls need a marker"):
        load_format(str(path))
    with pytest.raises(FormatError, match=r"no output format is called 'herms'; known: .*hermes"):
        load_format("herms")


def test_the_format_of_the_tutorial_reads_the_tutorials_answer(tmp_path):
    page = (ROOT / "docs/tutorials/custom-parts.md").read_text()
    declared, answer = re.findall(r"^```(?:yaml)?\n(.*?)^```", page, re.M | re.S)[:2]
    (tmp_path / "bracket.yaml").write_text(declared)
    said = read(str(tmp_path / "bracket.yaml"), [answer])
    assert (said.content.strip(), said.calls) == ("I look it up.", [("get_weather", '{"city": "Oslo"}')])
    assert format_of_template("... [CALL] ...", {"bracket": load_format(str(tmp_path / "bracket.yaml"))}) == "bracket"


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ("call: {}", r"unknown field `call`; allowed: reasoning, calls, channels, template_marks, "),
        (
            "calls: {cal: [a, b], body: json}",
            r"unknown field `cal` - at `\$\.calls`; allowed: body, is_either, ",
        ),
        ("calls: {call: [a, b], body: jsn}", r"'jsn' - at `\$\.calls\.body`; allowed: json, named_json, pythonic, "),
        ("reasoning: {begin: x}", r"required field `end` - at `\$\.reasoning`; allowed: end, begin, label, "),
        ("calls: {call: 3, body: json}", r"Expected `array`, got `int` - at `\$\.calls\.call`$"),
        ("[", "not an output format: .*"),
    ],
)
def test_a_declaration_that_is_none_is_refused_with_what_is_allowed(tmp_path, declared, words):
    path = tmp_path / "mine.yaml"
    path.write_text(declared)
    with pytest.raises(FormatError, match=words):
        load_format(str(path))
    with pytest.raises(FormatError, match=r"none\.yaml cannot be read: no such file or directory$"):
        load_format(str(tmp_path / "none.yaml"))


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ('reasoning: {begin: <t>, end: ""}', "reasoning needs an end, the text after which the answer comes: it is"),
        ('reasoning: {begin: <t>, end: " "}', "reasoning needs an end"),
        ("reasoning: {end: </t>}\ntemplate_marks: ['']", "template_marks has a text that is empty"),
        ("reasoning: {end: </t>}\nleft_out: [x, '']", "left_out has a text that is empty"),
        (CHANNELS.replace("ends: [E, C]", "ends: [E]"), "channels need two ends"),
        (CHANNELS.replace("reasoning: [a]", "reasoning: []"), "a channel of reasoning"),
        (CHANNELS.replace("message: M", "message: ''"), "message has a text that is empty"),
    ],
)
def test_a_declaration_whose_marker_is_empty_is_refused_by_its_name(tmp_path, declared, words):
    path = tmp_path / "mine.yaml"
    path.write_text(declared)
    with pytest.raises(OptionError, match=rf"reasoning_parser={path}: .*mine\.yaml: not an output format: .*{words}"):
        OutputFormats(reasoning_parser=str(path))


def test_channels_of_ones_own_are_read(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(CHANNELS)
    OutputFormats(reasoning_parser=str(path))


@pytest.mark.parametrize("template", ["{# <think></think> #}", "{# none #}"])
def test_reasoning_that_no_format_is_named_for_stays_in_the_content(template):
    prompt, choice = RenderedChat("", template), ToolChoice()
    tokenizer = Tokenizer(bundle_of(byte_level_tokenizer()))
    assert OutputFormats(reasoning_parser="none").of(prompt, choice).parser_factory(tokenizer, prompt, choice) is None


@pytest.mark.parametrize(
    ("template", "parser", "told"),
    [
        ("{{ messages }}", "auto", ["never refers to `tools`: .* its calls stay text, as the template speaks for no"]),
        ("{{ messages }}", "hermes", [r"never refers to `tools`: .* makes it\. --chat-template"]),
        ("{{ messages }}{{ tools }}", "hermes", []),
    ],
)
def test_tools_that_the_template_shows_nobody_are_told_once(template, parser, told, caplog):
    formats = OutputFormats(parser)
    formats.of(RenderedChat("", template), ToolChoice())
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []
    for _ in range(2):
        formats.of(RenderedChat("", template), ToolChoice(TOOLS))
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == len(told)
    assert all(re.search(words, each) for words, each in zip(told, said, strict=True)), said


def test_a_plugin_makes_a_format_known_by_its_files_name_and_to_templates(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("calls: {call: [CALL, END], body: json}\ntemplate_marks: [CALL]\n")
    tokenizer = Tokenizer(bundle_of(byte_level_tokenizer()))
    for name in ("mine", "auto"):
        formats = OutputFormats(name, plugins={"tool_parser_plugin": str(path)})
        prompt, choice = RenderedChat("", "{# CALL #}"), ToolChoice(TOOLS)
        make_parser = formats.of(prompt, choice).parser_factory(tokenizer, prompt, choice)
        assert make_parser is not None
        reader = make_parser()
        assert Read.of([*reader.feed('x CALL{"name": "now"}END'), *reader.finish()]) == Read("x", "", [("now", "{}")])
    with pytest.raises(OptionError, match=r"tool_parser_plugin=p\.py: a Python file is written against vLLM's parser"):
        OutputFormats("mine", plugins={"tool_parser_plugin": "p.py"})
    with pytest.raises(OptionError, match=r"tool_call_parser=hermse: no output format is called .* known: .*mine"):
        OutputFormats("hermse", plugins={"tool_parser_plugin": str(path)})
    with pytest.raises(OptionError, match=r"reasoning_parser=mine: that format has no reasoning"):
        OutputFormats(reasoning_parser="mine", plugins={"reasoning_parser_plugin": str(path)})


def test_a_header_is_none_beyond_its_longest_however_the_text_is_cut():
    text = f"<|start|>{'a' * 400}<|channel|>final<|message|>yes"
    assert read("openai", [text]) == read("openai", text)
    assert read("openai", text).content.startswith("a" * 400)
