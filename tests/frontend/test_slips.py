"""Calls that models write with slips, as reported of the families: they are read where it is certain that a call is
meant, and what is around them is not lost."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from example_tools import NOW, weather
from fake_tokenizers import bundle_of, byte_level_tokenizer
from family_answers import MINIMAX, V3, WAYS, Way, dsml
from read_answers import Read, read
from thinned import every

from headrace.frontend.text.chat_template import RenderedChat
from headrace.frontend.text.formats.declaration import load_format
from headrace.frontend.text.formats.output_formats import OutputFormats, ToolChoice
from headrace.frontend.text.formats.parser import OutputParser
from headrace.frontend.text.tokenizer import Tokenizer

ANY: dict[str, Any] = {"note": {}, "count": {"description": "how many"}}
TOOLS = [weather(**ANY), NOW]
NOW_CALL = '{"name": "now", "arguments": {}}'
CALL = '{"name": "get_weather", "arguments": {"city": "Zürich", "days": 3}}'
OLD_CALL = CALL.replace("arguments", "parameters")
PLAIN: tuple[str, dict[str, Any]] = ("get_weather", {"city": "Zürich", "days": 3})
QWEN_CALL = (
    "<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>"
)
KIMI, KIMIS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


def without_end(value: str) -> str:
    return QWEN_CALL.replace(f"{value}\n</parameter>", value)


def kimis(id: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def deepseeks(arguments: str) -> str:
    calls = load_format("deepseek_v31").calls
    assert calls is not None
    assert calls.section is not None
    written = f"{calls.call[0]}get_weather{calls.name[1]}{arguments}{calls.call[1]}"
    return f"{calls.section[0]}{written}{calls.section[1]}"


PYTHON = "get_weather(city='Zürich', days=3)"
GOOD = kimis("functions.get_weather:1", '{"city": "Zürich", "days": 3}')
SINGLE_QUOTES = "{'name': 'get_weather', 'arguments': {'city': 'Zürich', 'days': 3}}"
ALMOST_JSON: list[tuple[str, dict[str, Any]]] = [
    ('{"city": "Zürich", "days": 3,}', PLAIN[1]),
    ('{"city": "Zürich", "days": 3, \n}', PLAIN[1]),
    ('{"note": [1, 2,], "count": {"a": 1,},}', {"note": [1, 2], "count": {"a": 1}}),
    ('{"note": ",}", "count": ",]"}', {"note": ",}", "count": ",]"}),
    ("{'city': 'Zürich', 'days': 3}", PLAIN[1]),
    ("""{'note': 'say "it\\'s" and it's', 'count': ''}""", {"note": "say \"it's\" and it's", "count": ""}),
    ("""{"note": "it's, 'so'"}""", {"note": "it's, 'so'"}),
    ('{"note": True, "count": [None, False, true, null]}', {"note": True, "count": [None, False, True, None]}),
    ('{"note": "True, None,}"}', {"note": "True, None,}"}),
    ('{"note": "a\nb\tc\\nd"}', {"note": "a\nb\tc\nd"}),
    (r"""{"note": "\d+\. C:\dir \u00e9 \ud83d\ude00 \uXY \' \\ \/"}""", {"note": "\\d+\\. C:\\dir é 😀 \\uXY ' \\ /"}),
    ('{"note": -1.5e3, "count": {"a": [[], {}]}}', {"note": -1500, "count": {"a": [[], {}]}}),
    ('{city: "Zürich", days: 3}', PLAIN[1]),
    ("{city : 'Zürich',\n  days\n: 3,}", PLAIN[1]),
    (
        '{note: {a_1: true, "b": [{c: null}], größe: {}}, count: -1}',
        {"note": {"a_1": True, "b": [{"c": None}], "größe": {}}, "count": -1},
    ),
    ('{"note": "{a: 1, b: c}", "count": "a: b"}', {"note": "{a: 1, b: c}", "count": "a: b"}),
    ('{"city": "Zürich" "days": 3}', PLAIN[1]),
    ('{"city": "Zürich"\n  days: 3}', PLAIN[1]),
    ('{"days": 3 "city": "Zürich"}', PLAIN[1]),
    (
        '{"note": [1 2 -3, 4 "a" "b" true false null {"a": 1} {"b": 2} [3] [4]] "count": {} }',
        {"note": [1, 2, -3, 4, "a", "b", True, False, None, {"a": 1}, {"b": 2}, [3], [4]], "count": {}},
    ),
    ('{"note": 12345678.5e+10, "count": [10, 200 , 3000]}', {"note": 12345678.5e10, "count": [10, 200, 3000]}),
]
"""Arguments with what models write by mistake, and what they mean."""
GLM = (
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>"
)
SEED = (
    "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Zürich</parameter>\n<parameter=days>3</parameter>\n"
    "</function>\n</seed:tool_call>"
)
UNMARKED = (
    ("glm45", GLM, "</arg_value>"), ("glm45", GLM.replace("\n", ""), "</arg_value>"),
    ("minimax_m2", MINIMAX([PLAIN]), "</parameter>"),
    ("minimax_m2", MINIMAX([PLAIN]).replace("\n", ""), "</parameter>"), ("seed_oss", SEED, "</parameter>"),
)  # fmt: skip
"""Calls, and the ends of their values."""
FENCED = (
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", 1),
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>", 2),
    ("qwen3_xml", f"<tool_call>\n{QWEN_CALL}\n</tool_call>", 1), ("glm45", GLM, 1), ("minimax_m2", MINIMAX([PLAIN]), 1),
    ("seed_oss", SEED, 1), ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{json.dumps(PLAIN[1])}", 1),
    ("granite", f"<|tool_call|>[{CALL}]", 1), ("jamba", f"<tool_calls>[{CALL}]</tool_calls>", 1),
    ("llama3_json", OLD_CALL, 1), ("longcat", f"<longcat_tool_call>{CALL}</longcat_tool_call>", 1),
)  # fmt: skip
"""A call or two in their markers."""
GEMMAS = 'get_weather{city:<|"|>Zürich<|"|>,days:3}<tool_call|>'
CASES: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    # Qwen2.5-Coder, whose template is that of Hermes
    ("hermes", f"```json\n{CALL}\n```", "", [PLAIN]),
    ("hermes", f"I look it up.\n```json\n{CALL}\n{NOW_CALL}\n```\n", "I look it up.", [PLAIN, ("now", {})]),
    ("hermes", f"```\n[{CALL}, {NOW_CALL}]\n```", "", [PLAIN, ("now", {})]),
    ("hermes", f"<tools>\n{CALL}\n</tools>", "", [PLAIN]),
    ("hermes", f"{CALL}", "", [PLAIN]),
    ("hermes", f"So: {CALL}", "So:", [PLAIN]),
    ("hermes", '```json\n{"name": "other", "arguments": {}}\n```',
     '```json\n{"name": "other", "arguments": {}}\n```', []),
    ("hermes", '```json\n{"name": "now"}\n```', '```json\n{"name": "now"}\n```', []),
    ("hermes", '```json\n{"a": 1}\n``` and ```python\nprint({"name": 1})\n```',
     '```json\n{"a": 1}\n``` and ```python\nprint({"name": 1})\n```', []),
    # bare objects after text
    ("llama3_json", f"Here is the call: {OLD_CALL}", "Here is the call:", [PLAIN]),
    ("llama3_json", f"First {OLD_CALL}; {OLD_CALL} and more", "First and more", [PLAIN, PLAIN]),
    ("llama3_json", 'Like {"name": "other", "parameters": {}}.', 'Like {"name": "other", "parameters": {}}.', []),
    ("llama3_json", 'He is {"name": "now"}', 'He is {"name": "now"}', []),
    ("xlam", f"I call it. [{CALL}]", "I call it.", [PLAIN]),
    ("xlam", f"<think>hm</think>[{CALL}, {NOW_CALL}]", "<think>hm</think>", [PLAIN, ("now", {})]),
    # Qwen3-Coder
    ("qwen3_xml", QWEN_CALL, "", [PLAIN]),
    ("qwen3_xml", f"I look.\n\n{QWEN_CALL}\n</tool_call>", "I look.", [PLAIN]),
    ("qwen3_xml", f"<tool_call>\n{without_end('Zürich')}\n</tool_call>", "", [PLAIN]),
    ("qwen3_xml", f"<tool_call>\n{without_end('3')}\n</tool_call>", "", [PLAIN]),
    ("qwen3_xml", f"<tool_call>\n{QWEN_CALL}", "", [PLAIN]),
    ("qwen3_xml", f"<tool_call>\n{QWEN_CALL}\n<tool_call>\n{QWEN_CALL}\n</tool_call>", "", [PLAIN, PLAIN]),
    ("qwen3_xml", "an <function=other>", "an <function=other>", []),
    # markers within a value are its text
    ("qwen3_xml", "<tool_call>\n<function=get_weather>\n<parameter=city>\na\n<parameter=x>\nb\n</function>\nc\n"
     "</parameter>\n</function>\n</tool_call>", "", [("get_weather", {"city": "a\n<parameter=x>\nb\n</function>\nc"})]),
    # Kimi K2: one broken call among good ones
    ("kimi_k2", f"{KIMI}{kimis('functions.now:0', '{')}{GOOD}{KIMIS_END}", "", [("now", None), PLAIN]),
    ("kimi_k2", f"{KIMI}{kimis('functions.now:0', '{' + chr(34) + 'a')}{GOOD}{KIMIS_END}", "", [("now", None), PLAIN]),
    ("kimi_k2", f"{KIMI}{GOOD}{kimis('functions.now:0', '{')}{GOOD}{KIMIS_END}", "", [PLAIN, ("now", None), PLAIN]),
    ("kimi_k2", f"{KIMI}{kimis('', '{}')}{GOOD}{KIMIS_END}", "", [PLAIN]),
    ("kimi_k2", f"{KIMI} so {GOOD} and {GOOD}{KIMIS_END}", "", [PLAIN, PLAIN]),
    ("kimi_k2", f"{KIMI}{kimis('functions.later', '{}')}{GOOD}{KIMIS_END}", "", [PLAIN]),
    ("kimi_k2", f"{KIMI}{kimis('functions.now', '{}')}{KIMIS_END}", "", [("now", {})]),
    ("deepseek_v31", f"{V3[0]}{V3[2]}now{V3[4]}{{{V3[3]}{V3[2]}now{V3[4]}{{}}{V3[3]}{V3[1]}", "",
     [("now", None), ("now", {})]),
    ("kimi_k2", f"So. {KIMI}{GOOD}{KIMIS_END} more {KIMI}{GOOD}{KIMIS_END} text", "So.", [PLAIN, PLAIN]),
    # markers that are left out, and a call that ends before its name does
    ("gemma4", f"<|tool_call>:{GEMMAS}", "", [PLAIN]),
    ("gemma4", f"So. <|tool_call>call:now no brace<tool_call|><|tool_call>call:{GEMMAS}",
     "So. <|tool_call>call:now no brace<tool_call|>", [PLAIN]),
    ("deepseek_v4", f"I look.\n{dsml('tool_calls')([PLAIN]).partition(chr(10))[2]}", "I look.", [PLAIN]),
    ("deepseek_v32", dsml("tool_calls")([PLAIN, ("now", {})]), dsml("tool_calls")([]),
     [PLAIN, ("now", {})]),
    ("minimax_m2", MINIMAX([PLAIN]).removeprefix("<minimax:tool_call>\n"), "", [PLAIN]),
    ("minicpm5", '<function name="get_weather"><param name="city"><![CDATA[Zürich]]></param>\n'
     '<param name="days"><![CDATA[3]]> </param></function>', "", [PLAIN]),
    ("minicpm5", '<function name="get_weather"><param name="note"><![CDATA[  a</param> b\n]]></param></function>', "",
     [("get_weather", {"note": "  a</param> b\n"})]),
    # arguments that are no object
    ("llama3_json", '{"name": "now", "parameters": {no json}', '{"name": "now", "parameters": {no json}', []),
    ("hermes", '<tool_call>{"name": "now", "arguments": {', "", [("now", None)]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [("now", {})]),
    ("hermes", '<tool_call>{"name": "now", "arguments": ""}</tool_call>', "", [("now", {})]),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("now", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
     '<tool_call>{"name": "now", "arguments": [1]}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "now", "arguments": "x"}</tool_call>',
     '<tool_call>{"name": "now", "arguments": "x"}</tool_call>', []),
    ("hermes", f'<tool_call>{{"arguments": 7, "name": "now"}}</tool_call>\n<tool_call>{CALL}</tool_call>',
     '<tool_call>{"arguments": 7, "name": "now"}</tool_call>', [PLAIN]),
    # closing markers that close nothing
    ("hermes", f"<tool_call>{CALL}</tool_call></tool_call>\n</tool_call>", "", [PLAIN]),
    ("qwen3_xml", f"<tool_call>\n{QWEN_CALL}\n</tool_call>\n</tool_call>", "", [PLAIN]),
    *(
        ("kimi_k2", f"{KIMI}{kimis(id, json.dumps(PLAIN[1]))}{KIMIS_END}", "", [PLAIN])
        for id in ("functions_get_weather_2", "functions.get_weather_2", "get_weather_2", "functions:get_weather:2")
    ),
    ("kimi_k2", f"{KIMI}{kimis('functions_other_2', '{}')}{GOOD}{KIMIS_END}", "", [PLAIN]),
    # a fence, as DeepSeek V3's format has it
    *(
        ("deepseek_v31", deepseeks(f"{begin}{json.dumps(PLAIN[1])}{end}"), "", [PLAIN])
        for begin, end in (("```json\n", "\n```"), ("\n```\n", "\n```\n"), ("```json\n", ""))
    ),
    # arguments that are almost JSON
    *(
        ("hermes", f'<tool_call>{{"name": "get_weather", "arguments": {written}}}</tool_call>', "", [(PLAIN[0], meant)])
        for written, meant in ALMOST_JSON
    ),
    *(
        ("kimi_k2", f"{KIMI}{kimis('functions.get_weather:0', written)}{GOOD}{KIMIS_END}", "",
         [(PLAIN[0], meant), PLAIN])
        for written, meant in ALMOST_JSON
    ),
    *(("mistral", f"[TOOL_CALLS]get_weather[ARGS]{written}", "", [(PLAIN[0], meant)])
      for written, meant in ALMOST_JSON),
    *(
        (name, f"{begin}{SINGLE_QUOTES.replace('arguments', key)}{end}", "", [PLAIN])
        for name, key, begin, end in (
            ("hermes", "arguments", "<tool_call>\n", "\n</tool_call>"), ("llama3_json", "parameters", "", ""),
            ("xlam", "arguments", "[", "]"), ("granite", "arguments", "<|tool_call|>[", "]"),
            ("jamba", "arguments", "<tool_calls>[", "]</tool_calls>"),
        )
    ),
    *(
        ("hermes", f'<tool_call>{{"name": "get_weather", "arguments": {json.dumps(written)}}}</tool_call>', "", [PLAIN])
        for written in ("{'city': 'Zürich', 'days': 3}", '{"city": "Zürich", "days": 3}')
    ),
    # other keys, and keys and names without quotes
    *(
        (name, f"{begin}{CALL.replace('name', key, 1).replace('arguments', arguments)}{end}", "", [PLAIN])
        for name, begin, end in (("hermes", "<tool_call>\n", "\n</tool_call>"), ("granite", "<|tool_call|>[", "]"),
                                 ("llama3_json", "", ""), ("hermes", "```json\n", "\n```"))
        for key in ("name", "tool", "function", "tool_name", "function_name")
        for arguments in ("args", "input", "params", "kwargs", "tool_input")
    ),
    *(
        (name, f"{begin}{written}{end}", said, [PLAIN])
        for name, said, begin, end in (
            ("hermes", "", "<tool_call>\n", "\n</tool_call>"), ("hermes", "", "", ""), ("llama3_json", "", "", ""),
            ("llama3_json", "So:", "So: ", ""), ("xlam", "So:", "So: [", "]"), ("granite", "", "<|tool_call|>[", "]"),
            ("mistral", "", "[TOOL_CALLS]", ""), ("glm45", "", "<tool_call>", "</tool_call>"),
        )
        for written in (
            '{name: "get_weather", arguments: {city: "Zürich", days: 3}}',
            '{name: get_weather, parameters: {"city": "Zürich", "days": 3}}',
            '{"name": "get_weather" "arguments": {"city": "Zürich" "days": 3}}',
            "{name: 'get_weather', args: {'city': 'Zürich' days: 3}}",
        )
    ),
    ("hermes", '<tool_call>{"args": {"city": "Zürich", "days": 3}, "tool": "get_weather"}</tool_call>', "", [PLAIN]),
    ("hermes", '<tool_call>{"name": "other", "args": {}}</tool_call>',
     '<tool_call>{"name": "other", "args": {}}</tool_call>', []),
    ("hermes", "<tool_call>{name: other, arguments: {}}</tool_call>",
     "<tool_call>{name: other, arguments: {}}</tool_call>", []),
    *(
        (name, said, said, [])
        for name in ("hermes", "llama3_json")
        for said in ('{"tool": "other", "args": {}}', '{"input": {"a": 1}, "name": "now"}', "{tool: now}", "{name} is",
                     "a {name: other, arguments: {}} b", "{city: get_weather}", "{now: {}}", '{"name": now}',
                     "{name: now, arguments}", "{name: now, city: 3}")
    ),
    # tags of another family, or with the name as an attribute
    *(
        (name, f"{said}{begin}{written}{end}", said, [PLAIN])
        for name, begin, end in (
            ("qwen3_xml", "<tool_call>\n", "\n</tool_call>"), ("hermes", "<tool_call>\n", "\n</tool_call>"),
            ("qwen3_xml", "", ""), ("hermes", "", ""), ("llama3_json", "", ""), ("granite", "", ""),
        )
        for said in ("", "I look.\n")
        for written in (
            QWEN_CALL,
            QWEN_CALL.replace("=get_weather", ' name="get_weather"'),
            QWEN_CALL.replace("=get_weather", " name='get_weather'").replace("=city", " name='city'"),
            QWEN_CALL.replace("=get_weather", " name=get_weather").replace("=days", ' name="days"'),
            f"<function=get_weather>{json.dumps(PLAIN[1])}</function>",
            '<function name="get_weather">\n{city: "Zürich", "days": 3}\n</function>',
        )
    ),
    ("seed_oss", SEED.replace("=get_weather", ' name="get_weather"').replace("=city", " name=city"), "", [PLAIN]),
    ("minimax_m2", MINIMAX([PLAIN]).replace(' name="', "=").replace('">', ">"), "", [PLAIN]),
    ("minimax_m2", f"So. {MINIMAX([PLAIN]).partition(chr(10))[2]}".replace("'", "").replace('name="', "name='")
     .replace('">', "'>"), "So.", [PLAIN]),
    ("qwen3_xml", QWEN_CALL.replace("Zürich\n</parameter>", "Zürich").replace("=days", ' name="days"'), "", [PLAIN]),
    *(
        (name, said, said, [])
        for name in ("qwen3_xml", "hermes", "llama3_json")
        for said in ("an <function=other>{}</function>", '<function name="other">{}</function>',
                     "a <function name=", "see <function>now</function>", "<function = now>")
    ),
    # objects around a call, and one brace too many
    *(
        ("hermes", f"So. <tool_call>\n{written}\n</tool_call>", "So.", [PLAIN])
        for written in (f'{{"type": "function", "function": {CALL}}}', f'{{"tool_calls": [{CALL}]}}', f"{{{CALL}}}",
                        f"{CALL}}}", f"<tool_call>\n{CALL}")
    ),
    ("llama3_json", f'{{"type": "function", "function": {OLD_CALL}}}', "", [PLAIN]),
    ("llama3_json", '{"function": "a text", "type": {}}', '{"function": "a text", "type": {}}', []),
    ("hermes", '<tool_call>{"function": {"name": 3}}</tool_call>', '<tool_call>{"function": {"name": 3}}</tool_call>',
     []),
    # a fence around calls with their markers
    *(
        (name, f"{said}{fence}\n{written}{end}", said, [PLAIN] * count)
        for name, written, count in FENCED
        for said in ("", "I look.\n") for fence in ("```", "```json", "```xml") for end in ("\n```", "```\n", "")
    ),
    ("hermes", f"```\n<tool_call>{CALL}</tool_call>\n```\nDone.", "Done.", [PLAIN]),
    ("hermes", f"```py\nx = 1\n```\n<tool_call>{CALL}</tool_call>", "```py\nx = 1\n```", [PLAIN]),
    ("glm45", "```\n<tool_call>other {}</tool_call>\n```", "```\n<tool_call>other {}</tool_call>\n```", []),
    ("glm45", "```sh\nls\n```", "```sh\nls\n```", []),
    ("minimax_m2", "``` and ```", "``` and ```", []),
    # values without their end
    *(
        (name, written.replace(f"Zürich{end}", "Zürich"), "", [PLAIN])
        for name, written, end in UNMARKED
    ),
    *((name, written.replace(f"3{end}", "3"), "", [PLAIN]) for name, written, end in UNMARKED),
    ("minimax_m2", MINIMAX([("get_weather", {"note": 'a <parameter name="other"> b </invoke> c'})]), "",
     [("get_weather", {"note": 'a <parameter name="other"> b </invoke> c'})]),
    ("glm45", "<tool_call>get_weather<arg_key>note</arg_key><arg_value>a </tool_call> b</arg_value></tool_call>", "",
     [("get_weather", {"note": "a </tool_call> b"})]),
    ("qwen3_xml", QWEN_CALL.replace("=get_weather", '="get_weather"'), "", [PLAIN]),
    # markers of a section that are missing or spelt otherwise
    ("kimi_k2", f"So. {GOOD}", "So. ", [PLAIN]),
    ("kimi_k2", f"{GOOD}{GOOD}{KIMIS_END}", "", [PLAIN, PLAIN]),
    ("kimi_k2", f"{KIMI}{GOOD}{GOOD}{KIMIS_END}".replace("calls_s", "call_s"), "", [PLAIN, PLAIN]),
    ("kimi_k2", kimis("functions.other:1", "{}"), kimis("functions.other:1", "{}"), []),
    ("kimi_k2", f"{KIMI}{kimis('functions.get_weather:0', json.dumps(json.dumps(PLAIN[1])))}{KIMIS_END}", "", [PLAIN]),
    ("mistral", f"[TOOL_CALLS]{CALL}", "", [PLAIN]),
    # a call as another family's format has it, within the markers of the model's own
    *(
        (name, f"{begin}{written}{end}", "", [PLAIN])
        for name, begin, end in (("glm45", "<tool_call>", "\n</tool_call>"),
                                 ("qwen3_xml", "<tool_call>\n", "</tool_call>"),
                                 ("seed_oss", "<seed:tool_call>", "</seed:tool_call>"))
        for written in (CALL, f"\n{CALL}", f"[{CALL}]", f"```json\n{CALL}\n```")
    ),
    ("hermes", f"<tool_call>\n```json\n{CALL}\n```\n</tool_call>", "", [PLAIN]),
    *(
        ("glm45", f"So. <tool_call>get_weather{begin}{json.dumps(PLAIN[1])}{end}</tool_call>", "So.", [PLAIN])
        for begin, end in (("\n", "\n"), ("(", ")"), (" ", ""))
    ),
    ("glm45", "<tool_call>other {}</tool_call>", "<tool_call>other {}</tool_call>", []),
    # quotes in markers
    *(
        (name, MINIMAX([PLAIN]).removeprefix(without).replace('"', quote), "", [PLAIN])
        for name, without, quotes in (("minimax_m2", "", ("'", "")), ("minimax_m2", "<minimax:tool_call>\n", ("'",)))
        for quote in quotes
    ),
    ("deepseek_v32", dsml("function_calls")([PLAIN]).replace('="', "='").replace('">', "'>").replace('" s', "' s"), "",
     [PLAIN]),
    ("minimax_m2", "an <invoke name='other'>", "an <invoke name='other'>", []),
    # lists of calls in Python in a fence, or after a sentence
    *(
        (name, f"{said}{written}", said, calls)
        for name in ("pythonic", "llama4_pythonic", "olmo3", "lfm2")
        for said in ("", "I look it up.\n")
        for written, calls in (
            (f"```python\n[{PYTHON}]\n```", [PLAIN]), (f"```tool_code\n{PYTHON}\n```", [PLAIN]),
            (f"[{PYTHON}]", [PLAIN]),
            (f"```\n{PYTHON}\nnow()\n```", [PLAIN, ("now", {})]), (f"```py\n[{PYTHON}, now()]", [PLAIN, ("now", {})]),
        )
    ),
    ("lfm2", f"So.\n```py\n{PYTHON}\n```\nnow then", "So.\nnow then", [PLAIN]),
    *(
        ("pythonic", said, said, [])
        for said in ("see [1] and [get_weather]", "```python\nprint(get_weather)\n```",
                     "```python\nget_weather(city)\n```", "```python\nget_weather(city == 3)\n```",
                     f"so [other({'x' * 400}=1)]", "call now() then", "so [now(", "[",
                     "```python\nnow = 3\n```", "```")
    ),
    ("glm45", "<tool_call>now\n</tool_call>\n</tool_call> ok", " ok", [("now", {})]),
    ("hermes", "no </tool_call> here", "no </tool_call> here", []),
]  # fmt: skip


@pytest.mark.parametrize(("name", "answer", "content", "calls"), every(2, CASES))
def test_a_slip_is_read_as_what_was_meant(name: str, answer: str, content: str, calls: list[tuple[str, Any]]):
    """Whole, and character by character. None for arguments that are broken themselves."""
    for pieces in ([answer], answer):
        found = read(name, pieces, tools=TOOLS, reasoning=None)
        assert [called for called, _ in found.calls] == [called for called, _ in calls], found
        for (_, said), (_, meant) in zip(found.calls, calls, strict=True):
            assert meant is None or json.loads(said) == meant
        assert found.content.strip() == content.strip(), found


@pytest.mark.parametrize(
    ("name", "written", "end"),
    [
        ("glm45", GLM, "</tool_call>"), ("glm45", GLM, "</arg_value>\n</tool_call>"),
        ("glm45", GLM.replace("\n", ""), "</arg_value></tool_call>"),
        ("qwen3_xml", f"<tool_call>\n{QWEN_CALL}\n</tool_call>", "\n</parameter>\n</function>\n</tool_call>"),
        ("qwen3_xml", f"<tool_call>\n{QWEN_CALL}\n</tool_call>", "</function>\n</tool_call>"),
        ("minimax_m2", MINIMAX([PLAIN]), "</invoke>\n</minimax:tool_call>"),
        ("seed_oss", SEED, "</parameter>\n</function>\n</seed:tool_call>"),
    ],
)  # fmt: skip
def test_markers_that_the_model_forgot_at_its_end_are_missing_only_where_the_answer_was_cut(name, written, end):
    """An answer that ran out of tokens may lack arguments."""
    cut = written.removesuffix(end)
    assert cut != written
    for pieces in ([cut], cut):
        ((called, said),) = read(name, pieces, tools=TOOLS, reasoning=None, finish_reason="stop").calls
        assert (called, json.loads(said)) == PLAIN
        ((_, said),) = read(name, pieces, tools=TOOLS, reasoning=None, finish_reason="length").calls
        with pytest.raises(json.JSONDecodeError):
            json.loads(said)


BROKEN = [
    lambda text: re.sub(r"days(\W+)7[})\]]*", r"days\g<1>7", text),  # without its braces
    lambda text: re.sub(r"QQQ(\W+)days\W+7[})\]]*", "QQQ", text),  # cut within a text
    lambda text: text.replace("QQQ", 'Q"Q'),  # a quote that is not escaped
    lambda text: re.sub(r"\"QQQ(\W+)days\W+7[})\]]*", "", text),  # cut before a value
]
MARKED = [
    way
    for way in WAYS
    if way.format in ("hermes", "longcat", "ernie45", "granite4", "internlm", "inkling", "k2_horizon")
    and '"days"' in way.write([PLAIN])
]
"""Formats that write each call as a JSON object within markers of its own."""


@pytest.mark.parametrize("way", MARKED, ids=lambda way: way.format)
@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_call_loses_none_of_those_behind_it(way: Way, broken: Callable[[str], str]) -> None:
    answer = way.write([("get_weather", {"city": "QQQ", "days": 7}), PLAIN])
    assert broken(answer) != answer
    for pieces in ([broken(answer)], broken(answer)):
        found = read(way.format, pieces, "", way.special, tools=TOOLS, reasoning=None)
        (first, _), (name, said) = found.calls
        assert (first, name, json.loads(said), found.content.strip()) == ("get_weather", *PLAIN, "")


OF_JSON = [
    way
    for way in WAYS
    if (calls := load_format(way.format).calls) is not None and calls.body == "json" and '"days"' in way.write([PLAIN])
]


@pytest.mark.parametrize("way", OF_JSON, ids=[f"{way.format}-{place}" for place, way in enumerate(OF_JSON)])
def test_a_text_may_be_an_example_of_calls(way: Way) -> None:
    """Escaped as JSON has it, however its markers follow each other."""
    calls = load_format(way.format).calls
    assert calls is not None
    begin, end = calls.call
    texts = (f'a {begin}{{"name": "x"}}{end}{begin}{{"name": "y"}}{end} b', f"}}{begin}{{", f"{begin}{end}{begin}")
    for text in texts:
        call = ("get_weather", {"city": text, "days": 7})
        answer = way.write([call])
        for pieces in ([answer], answer):
            ((name, said),) = read(way.format, pieces, "", way.special, tools=TOOLS, reasoning=None).calls
            assert (name, json.loads(said)) == call


@pytest.mark.parametrize("way", WAYS, ids=[f"{way.format}-{place}" for place, way in enumerate(WAYS)])
def test_a_call_without_its_last_brace_is_read_and_so_are_those_behind_it(way: Way) -> None:
    """The outer one of two, or of an object without quotes its own."""
    calls = [("get_weather", {"city": "QQQ", "days": 7}), PLAIN]
    if way.format in ("gigachat3", "minimax_m3") or "7}" not in (answer := way.write(calls)):
        return
    short = re.sub(r"7(\}*)\}", r"7\1", answer, count=1)
    for pieces in ([short], short):
        found = read(way.format, pieces, "", way.special, tools=TOOLS, reasoning=None)
        assert [name for name, _ in found.calls] == ["get_weather"] * 2, found
        assert (json.loads(found.calls[1][1]), found.content.strip()) == (PLAIN[1], "")


THINKING = [
    ("hermes", "qwen3", "<think>I need it.\n<tool_call>\n" + CALL + "\n</tool_call>", "I need it."),
    ("qwen3_xml", "", "<think>I need it.\n\n<tool_call>\n" + QWEN_CALL + "\n</tool_call>", "I need it."),
    ("kimi_k2", "", f"<think>I need it.{KIMI}{GOOD}{KIMIS_END}", "I need it."),
    ("glm45", "", "<think>I need it.<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n"
     "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>", "I need it."),
    ("mistral", "", "[THINK]I need it.[TOOL_CALLS]get_weather[ARGS]" + json.dumps(PLAIN[1]), "I need it."),
]  # fmt: skip


@pytest.mark.parametrize(("name", "reasoning", "answer", "thought"), THINKING)
@pytest.mark.parametrize("is_open", [False, True])
def test_a_call_ends_reasoning_that_the_model_has_not_ended(name, reasoning, answer, thought, is_open):
    begin = "[THINK]" if name == "mistral" else "<think>"
    answer, prompt = (answer.removeprefix(begin), begin) if is_open else (answer, "")
    for pieces in ([answer], answer):
        found = read(name, pieces, prompt, tools=TOOLS, reasoning=reasoning)
        assert [(called, json.loads(said)) for called, said in found.calls] == [PLAIN]
        assert (found.reasoning.strip(), found.content.strip()) == (thought, "")


def test_a_marker_within_reasoning_that_begins_no_call_is_reasoning():
    thought = 'I may write <tool_call> and then {..}. Or <tool_call>{"name": 3}.'
    for pieces in ([f"<think>{thought}</think>Hello."], f"<think>{thought}</think>Hello."):
        assert read("hermes", pieces, tools=TOOLS, reasoning="qwen3") == Read("Hello.", thought, [])


def test_an_end_of_reasoning_after_a_call_within_it_is_no_content():
    answer = f"<think>Hm.<tool_call>{CALL}</tool_call></think>"
    found = read("hermes", answer, tools=TOOLS, reasoning="qwen3")
    assert (found.content, found.reasoning, len(found.calls)) == ("", "Hm.", 1)


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("city='Zürich', days=03", PLAIN[1]),
        ("city='007', days=-05", {"city": "007", "days": -5}),
        ("note={'b', 'a', {'c'}}", {"note": ["b", "a", ["c"]]}),
        ("note=[{'x': {1}}, 010, '01']", {"note": [{"x": [1]}, 10, "01"]}),
        ("note=0.50", {"note": 0.5}),
        ("note=0x10", {"note": 16}),
        ("city='sed -n '360,450p' a.py'", {"city": "sed -n '360,450p' a.py"}),
        ("city='awk -F',' '{print}' a', days=3", {"city": "awk -F',' '{print}' a", "days": 3}),
        ("city='x (a='b')' , days=3", {"city": "x (a='b')", "days": 3}),
        (
            """city='python3 -c "print(f(3, m='\\,'))"', days=3""",
            {"city": """python3 -c "print(f(3, m='\\,'))\"""", "days": 3},
        ),
        ("city='it's', days=3", {"city": "it's", "days": 3}),
        ("city='Zü' 'rich', days=3", PLAIN[1]),
        ("city='Zürich' , days=3 , ", PLAIN[1]),
    ],
)
@pytest.mark.parametrize("name", ["pythonic", "lfm2", "olmo3"])
def test_python_that_is_not_quite(name: str, written: str, arguments: dict[str, Any]):
    around = {"lfm2": "<|tool_call_start|>[{}]<|tool_call_end|>", "olmo3": "<function_calls>\n{}\n</function_calls>"}
    answer = around.get(name, "[{}]").replace("{}", f"get_weather({written})")
    for pieces in ([answer], answer):
        ((called, said),) = read(name, pieces, tools=TOOLS, reasoning=None).calls
        assert (called, json.loads(said)) == ("get_weather", arguments)


WRITTEN = {
    "deepseek_v32": lambda key, value: dsml("function_calls")([("get_weather", {key: value})]),
    "minicpm5": lambda key, value: (
        f'<function name="get_weather"><param name="{key}">{json.dumps(value)}</param></function>'
    ),
    "qwen3_xml": lambda key, value: (
        "<tool_call>\n<function=get_weather>\n"
        f"<parameter={key}>\n{json.dumps(value)}\n</parameter>\n</function>\n</tool_call>"
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize(
    ("key", "value", "arguments"),
    [
        ("arguments", PLAIN[1], PLAIN[1]),
        ("input", PLAIN[1], PLAIN[1]),
        ("properties", {}, {}),
        ("arguments", {"town": "Zürich"}, {"arguments": {"town": "Zürich"}}),  # nothing of the tool's
        ("arguments", [PLAIN[1]], {"arguments": [PLAIN[1]]}),
        ("place", PLAIN[1], {"place": PLAIN[1]}),
        ("note", PLAIN[1], {"note": PLAIN[1]}),  # a parameter of the tool's
    ],
)
def test_arguments_written_into_a_parameter_that_the_tool_does_not_have(
    name: str, key: str, value: Any, arguments: Any
):
    answer = WRITTEN[name](key, value)
    for pieces in ([answer], answer):
        ((called, said),) = read(name, pieces, tools=TOOLS, reasoning=None).calls
        assert (called, json.loads(said)) == ("get_weather", arguments)


def test_such_a_parameter_is_the_tools_own_where_it_has_it():
    own = [{"type": "function", "function": {"name": "run", "parameters": {"properties": {"input": {}, "city": {}}}}}]
    answer = dsml("function_calls")([("run", {"input": {"city": 1}})])
    ((_, said),) = read("deepseek_v32", answer, tools=own, reasoning=None).calls
    assert json.loads(said) == {"input": {"city": 1}}


@pytest.mark.parametrize(
    ("name", "begin", "end"),
    [
        ("qwen3_xml", "<tool_call>\n<function=get_weather>\n<parameter=note>\n",
         "\n</parameter>\n</function>\n</tool_call>"),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="note">',
         "</parameter>\n</invoke>\n</minimax:tool_call>"),
        ("glm45", "<tool_call>get_weather\n<arg_key>note</arg_key>\n<arg_value>", "</arg_value>\n</tool_call>"),
        ("seed_oss", "<seed:tool_call>\n<function=get_weather>\n<parameter=note>",
         "</parameter>\n</function>\n</seed:tool_call>"),
    ],
)  # fmt: skip
def test_a_value_of_unknown_type_is_the_text_that_the_model_wrote(name: str, begin: str, end: str):
    """Objects and lists are JSON, since a text is seldom written so."""
    written = {
        "  two  ": "  two  ", "007": "007", "5": "5", "true": "true", "null": "null", "\tx\n": "\tx\n", "1e3": "1e3",
        '{"a": [1, " "]}': {"a": [1, " "]}, "[1, 2]": [1, 2], "[x] is not": "[x] is not", " {a} ": " {a} ", "": "",
        "[1": "[1", "{": "{", "[": "[", "if (a) {": "if (a) {",
    }  # fmt: skip
    for text, value in written.items():
        for pieces in ([begin + text + end], begin + text + end):
            ((_, said),) = read(name, pieces, tools=TOOLS, reasoning=None).calls
            assert json.loads(said) == {"note": value}, text


def test_calls_without_markers_need_a_tool_of_their_name():
    for tools, num_calls in ((TOOLS, 1), ([NOW], 0), ([], 0)):
        parser = OutputParser(None, load_format("hermes"), tools=tools)
        found = Read.of([*parser.feed(f"```json\n{CALL}\n```"), *parser.finish()])
        assert len(found.calls) == num_calls
        assert num_calls or found.content == f"```json\n{CALL}\n```"


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "xlam"])
def test_an_object_that_has_a_long_name_is_not_held_back(name: str):
    parser = OutputParser(None, load_format(name), tools=TOOLS)
    said = "".join(each.content for piece in '{"name": "' + "x" * 2000 for each in parser.feed(piece))
    assert len(said) > 1600


def test_slips_are_text_where_a_grammar_holds_calls_to_their_schemas():
    """It cannot hold those: a strict tool would get arguments that do not fit."""
    function: dict[str, Any] = NOW["function"]  # type: ignore[assignment]
    tools = [{"type": "function", "function": {**function, "strict": True}}]
    prompt = RenderedChat("", '{# <tool_call> "arguments" <think></think> #}')
    tokenizer = Tokenizer(bundle_of(byte_level_tokenizer()))
    for given, num_calls in ((tools, 0), ([NOW], 1)):
        choice = ToolChoice(given)
        make = OutputFormats(reasoning_parser="auto").of(prompt, choice).parser_factory(tokenizer, prompt, choice)
        assert make is not None
        for answer in (f"```json\n{NOW_CALL}\n```", f"<think>hm<tool_call>{NOW_CALL}</tool_call>"):
            parser = make()
            found = Read.of([*parser.feed(answer), *parser.finish()])
            assert len(found.calls) == num_calls
            assert num_calls or NOW_CALL in found.content + found.reasoning


@pytest.mark.parametrize("calls", ["hermes", None])
@pytest.mark.parametrize(
    ("answer", "content"),
    [("</think>Hello.", "Hello."), ("\n</think>\n\nHello.", "Hello."), ("So </think> no.", "So </think> no.")],
)
def test_an_end_of_reasoning_before_the_answer_is_no_content(calls: str | None, answer: str, content: str):
    """As models write it whose reasoning the prompt has ended already. Within an answer it is text."""
    for pieces in ([answer], answer):
        parser = OutputParser(load_format("qwen3"), None if calls is None else load_format(calls), tools=TOOLS)
        found = Read.of([*(event for piece in pieces for event in parser.feed(piece)), *parser.finish()])
        assert (found.content.strip(), found.reasoning, found.calls) == (content, "", [])
