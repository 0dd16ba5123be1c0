"""The formats in which model families write tool calls, and the calls that tests write in each format.

The formats come from the chat templates of the model cards, or, if there is none, from the tests of public parsers.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from example_tools import NOW

Call = tuple[str, dict[str, Any]]
PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "ratio": {"type": "number"},
    "units": {"type": ["string", "null"]},
    "options": {"type": "object"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "exact": {"type": "boolean"},
}
WEATHER = {"name": "get_weather", "parameters": {"type": "object", "properties": PROPERTIES}}
TOOLS = [{"type": "function", "function": WEATHER}, NOW]
PLAIN: Call = ("get_weather", {"city": "Zürich", "days": 3})
NOTHING: Call = ("now", {})
CALLS: dict[str, list[Call]] = {
    "one": [PLAIN],
    "without arguments": [NOTHING],
    "two": [PLAIN, NOTHING],
    "the same twice": [PLAIN, PLAIN],
    "quotes and lines": [("get_weather", {"city": "Sie sagte \"ja\" und 'nein'\n\tund \\\\ \\n"})],
    "brackets": [("get_weather", {"city": '}{][ it\'s {"a": [1'})],
    "nested": [
        ("get_weather", {"options": {"a": [1, {"b": None}], "c": True, "d": {}}, "days": -3, "tags": ["x", "y, z"]}),
        PLAIN,
    ],
    "other types": [("get_weather", {"ratio": -1.5e-3, "exact": False, "city": "", "units": None})],
    "characters": [("get_weather", {"city": "東京 😀 — \u200d ñ"})],
    "markers in a text": [("get_weather", {"city": "a </tool_call> b <tool_call> c", "tags": ["</parameter>"]})],
    "words in a text": [("get_weather", {"city": "true", "units": "007"})],
    "spaces": [("get_weather", {"city": "  two  "}), NOTHING],
}


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def objects(key: str = "arguments", *, ascii: bool = False) -> Callable[[Sequence[Call]], list[str]]:
    return lambda calls: [json.dumps({"name": name, key: said}, ensure_ascii=ascii) for name, said in calls]


def each(begin: str, end: str, between: str = "", key: str = "arguments") -> Callable[[Sequence[Call]], str]:
    """One object per call, each between markers."""
    return lambda calls: between.join(begin + one + end for one in objects(key)(calls))


def listed(begin: str, end: str, between: str = ", ", key: str = "arguments") -> Callable[[Sequence[Call]], str]:
    """The objects of all calls between one pair of markers."""
    return lambda calls: begin + between.join(objects(key)(calls)) + end


def pythonic(begin: str, end: str, between: str) -> Callable[[Sequence[Call]], str]:
    def write(calls: Sequence[Call]) -> str:
        said = [f"{name}({', '.join(f'{key}={value!r}' for key, value in said.items())})" for name, said in calls]
        return begin + between.join(said) + end

    return write


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else as_json(value)


def xml(
    begin: str, name: tuple[str, str], parameter: tuple[str, str, str], end: str, *, around: tuple[str, str] = ("", "")
) -> Callable[[Sequence[Call]], str]:
    """name: the text before and after a call's name; parameter: the text before and after its name, and after its
    value; around: the text before and after all calls."""

    def write(calls: Sequence[Call]) -> str:
        written = []
        for called, said in calls:
            inner = "".join(
                parameter[0] + key + parameter[1] + as_text(value) + parameter[2] for key, value in said.items()
            )
            written.append(begin + name[0] + called + name[1] + inner + end)
        return around[0] + "\n".join(written) + around[1]

    return write


def escaped(value: Any) -> str:
    if isinstance(value, str):
        return f"<escape>{value}<escape>"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{escaped(each)}" for key, each in value.items()) + "}"
    return "[" + ",".join(map(escaped, value)) + "]" if isinstance(value, list) else as_json(value)


def dsml(tag: str) -> Callable[[Sequence[Call]], str]:
    """DeepSeek's, which say of each value whether it is a string."""

    def write(calls: Sequence[Call]) -> str:
        lines = [f"<｜DSML｜{tag}>"]
        for name, said in calls:
            lines.append(f'<｜DSML｜invoke name="{name}">')
            for key, value in said.items():
                kind = "true" if isinstance(value, str) else "false"
                lines.append(f'<｜DSML｜parameter name="{key}" string="{kind}">{as_text(value)}</｜DSML｜parameter>')
            lines.append("</｜DSML｜invoke>")
        return "\n".join([*lines, f"</｜DSML｜{tag}>"])

    return write


def gemma4(calls: Sequence[Call]) -> str:
    texts = [f"<|tool_call>call:{name}{escaped(said)}<tool_call|>" for name, said in calls]
    return "".join(texts).replace("<escape>", '<|"|>')


def keyed(calls: Sequence[Call]) -> str:
    return f"<|tools_prefix|>[{', '.join(as_json({name: said}) for name, said in calls)}]<|tools_suffix|>"


def cohere(calls: Sequence[Call]) -> str:
    said = [{"tool_call_id": str(i), "tool_name": name, "parameters": each} for i, (name, each) in enumerate(calls)]
    lines = ",\n".join(f"    {as_json(each)}" for each in said)
    return f"<|START_ACTION|>[\n{lines}\n]<|END_ACTION|>"


def functiongemma(calls: Sequence[Call]) -> str:
    return "".join(f"<start_function_call>call:{name}{escaped(said)}<end_function_call>" for name, said in calls)


def step3(calls: Sequence[Call], line: str = "", between: str = "<｜tool_sep｜>") -> str:
    def one(name: str, said: Mapping[str, Any]) -> str:
        inner = "".join(
            f'<steptml:parameter name="{key}">{as_text(value)}</steptml:parameter>' for key, value in said.items()
        )
        kind = f"<｜tool_call_begin｜>{line}function<｜tool_sep｜>"
        return f'{kind}<steptml:invoke name="{name}">{inner}</steptml:invoke><｜tool_call_end｜>'

    return f"<｜tool_calls_begin｜>{line}{between.join(one(*call) for call in calls)}{line}<｜tool_calls_end｜>"


def named(begin: str, after_name: str, end: str, between: str = "") -> Callable[[Sequence[Call]], str]:
    return lambda calls: between.join(f"{begin}{name}{after_name}{as_json(said)}{end}" for name, said in calls)


def around(begin: str, inner: Callable[[Sequence[Call]], str], end: str) -> Callable[[Sequence[Call]], str]:
    return lambda calls: begin + inner(calls) + end


def kimi(calls: Sequence[Call]) -> str:
    said = "".join(
        f"<|tool_call_begin|>functions.{name}:{place}<|tool_call_argument_begin|>{as_json(said)}<|tool_call_end|>"
        for place, (name, said) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{said}<|tool_calls_section_end|>"


K3_TYPES = {str: "string", bool: "boolean", int: "number", float: "number", dict: "object", list: "array"}


def kimi_k3(calls: Sequence[Call]) -> str:
    def argument(key: str, value: Any) -> str:
        said = value if isinstance(value, str) else as_json(value)
        kind = K3_TYPES.get(type(value), "null")
        return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{said}<|close|>argument<|sep|>'

    written = "".join(
        f'<|open|>call tool="{name}" index="{place}"<|sep|>'
        f"{''.join(argument(*each) for each in said.items())}<|close|>call<|sep|>"
        for place, (name, said) in enumerate(calls, 1)
    )
    return f"<|open|>tools<|sep|>{written}<|close|>tools<|sep|><|close|>message<|sep|>"


NAMESPACE = "]<]minimax[>["


def elements(value: Any) -> str:
    """A value as MiniMax M3's template writes it within an element."""
    if isinstance(value, dict):
        return "".join(f"{NAMESPACE}<{key}>{elements(each)}{NAMESPACE}</{key}>" for key, each in value.items())
    if isinstance(value, list):
        return "".join(f"{NAMESPACE}<item>{elements(each)}{NAMESPACE}</item>" for each in value)
    return as_text(value)


def minimax_m3(calls: Sequence[Call]) -> str:
    """An object whose schema declares nothing is JSON: elements say no types."""

    def written_as(said: Mapping[str, Any]) -> str:
        return elements({key: as_json(each) if isinstance(each, dict) else each for key, each in said.items()})

    written = [f'{NAMESPACE}<invoke name="{name}">{written_as(said)}{NAMESPACE}</invoke>' for name, said in calls]
    return "\n".join([f"{NAMESPACE}<tool_call>", *written, f"{NAMESPACE}</tool_call>"])


V3 = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
QWEN = xml(
    "<tool_call>\n", ("<function=", ">\n"), ("<parameter=", ">\n", "\n</parameter>\n"), "</function>\n</tool_call>"
)
THINK, CALL = ("<think>", "</think>"), ("<tool_call>", "</tool_call>")
PYTHON, MISTRAL = ("<|python_start|>", "<|python_end|>"), ("[THINK]", "[/THINK]")
STEP3 = (
    "<｜tool_calls_begin｜>",
    "<｜tool_calls_end｜>",
    "<｜tool_call_begin｜>",
    "<｜tool_call_end｜>",
    "<｜tool_sep｜>",
)


class Way(NamedTuple):
    """The way in which a family writes calls."""

    format: str
    write: Callable[[Sequence[Call]], str]
    special: tuple[str, ...] = ()
    """Special tokens of the family's tokeniser that stay in the text, since they are markers of the format."""
    reasoning: str = ""
    """The format of the reasoning, if that of the calls does not include it."""
    thinks: tuple[str, str] | None = None
    """The text before and after the reasoning; None if answers have none."""
    is_open: bool = False
    """Whether the prompt ends inside the reasoning."""
    takes_text: bool = True
    """Whether text may precede the calls."""


HERMES = each("<tool_call>\n", "\n</tool_call>", "\n")
LONGCAT = ("<longcat_tool_call>", "</longcat_tool_call>", "<longcat_think>", "</longcat_think>")
LONGCAT_XML = xml(
    LONGCAT[0],
    ("", "\n"),
    ("<longcat_arg_key>", "</longcat_arg_key>\n<longcat_arg_value>", "</longcat_arg_value>\n"),
    LONGCAT[1],
)
MINIMAX = xml(
    '<invoke name="', ("", '">\n'), ('<parameter name="', '">', "</parameter>\n"), "</invoke>",
    around=("<minimax:tool_call>\n", "\n</minimax:tool_call>"),
)  # fmt: skip
SEED = xml(
    "<seed:tool_call>\n",
    ("<function=", ">\n"),
    ("<parameter=", ">", "</parameter>\n"),
    "</function>\n</seed:tool_call>",
)
ARGUMENTS = ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")
SOLAR = ("<|tool_arg:start|>", "<|tool_arg:value|>", "<|tool_arg:end|>\n")
ACTION = ("<|START_ACTION|>", "<|END_ACTION|>", "<|START_THINKING|>", "<|END_THINKING|>")
K3 = ("<|open|>", "<|close|>", "<|sep|>")
K2 = ("<ifm|arg_key>", "</ifm|arg_key>\n<ifm|arg_value>", "</ifm|arg_value>\n")
PLAMO = ("<|plamo:begin_{}:plamo|>", "<|plamo:end_{}:plamo|>")
WAYS = [
    Way("minimax_m3", minimax_m3, ("<mm:think>", "</mm:think>"), thinks=("<mm:think>", "</mm:think>")),
    Way("inkling", each("<|content_invoke_tool_json|>", "<|end_message|>", key="args"), ("<|message_model|>",
        "<|content_text|>", "<|content_thinking|>", "<|end_message|>", "<|content_invoke_tool_json|>"),
        thinks=("<|content_thinking|>", "<|end_message|>"), takes_text=False),
    Way("hy_v4", xml("<tool_call>", ("", "\n"), ARGUMENTS, "</tool_call>",
        around=("<tool_calls>\n", "\n</tool_calls>")), ("<tool_calls>", "</tool_calls>", *CALL), thinks=THINK,
        is_open=True),
    Way("dots", xml('<invoke name="', ("", '">\n'), ('<parameter name="', '">', "</parameter>\n"), "</invoke>",
        around=("<dots_function_call>\n", "\n</dots_function_call>"))),
    Way("dots", listed("<dots_function_call>\n", "\n</dots_function_call>", "\n")),
    Way("deepseek_v41", lambda calls: dsml("calls")(calls).replace("｜DSML｜", "｜DSML｜ "), THINK, thinks=THINK),
    Way("k2_horizon", xml("<ifm|tool_call>", ("", "\n"), K2, "</ifm|tool_call>",
        around=("<ifm|tool_calls>\n", "\n</ifm|tool_calls>")), thinks=("<ifm|think>", "</ifm|think>"), is_open=True),
    Way("k2_horizon", around("<ifm|tool_calls>", each("<ifm|tool_call>\n", "\n</ifm|tool_call>", "\n"),
        "</ifm|tool_calls>")),
    Way("plamo3", around(PLAMO[0].format("tool_requests"), named(
        PLAMO[0].format("tool_request") + PLAMO[0].format("tool_name"),
        f"{PLAMO[1].format('tool_name')}{PLAMO[0].format('tool_arguments')}<|plamo:constrain|>json<|plamo:msg|>",
        PLAMO[1].format("tool_arguments") + PLAMO[1].format("tool_request")), PLAMO[1].format("tool_requests")),
        thinks=(PLAMO[0].format("think"), PLAMO[1].format("think"))),
    Way("muse_glimmer", xml('<atem:invoke name="', ("", '">\n'), ('<atem:parameter name="', '">',
        "</atem:parameter>\n"), "</atem:invoke>", around=("<|message|><atem:function_calls>\n",
        "\n</atem:function_calls>")), ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>"),
        thinks=(" to=self<|message|>", "<|eom|>"), takes_text=False),
    Way("kimi_k3", kimi_k3, K3, thinks=("<|open|>think<|sep|>", "<|close|>think<|sep|>")),
    Way("deepseek_v32", dsml("function_calls"), THINK, thinks=THINK),
    Way("deepseek_v4", dsml("tool_calls"), THINK, thinks=THINK, is_open=True),
    Way("gemma4", gemma4, ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
        thinks=("<|channel>thought\n", "\n<channel|>")),
    Way("lfm2", pythonic("<|tool_call_start|>[", "]<|tool_call_end|>", ", "),
        ("<|tool_call_start|>", "<|tool_call_end|>"), thinks=THINK),
    Way("apertus", keyed, ("<|tools_prefix|>", "<|tools_suffix|>"), thinks=("<|inner_prefix|>", "<|inner_suffix|>")),
    Way("hy_v3", xml("<tool_call>", ("", "<tool_sep>\n"), ARGUMENTS, "</tool_call>",
        around=("<tool_calls>\n", "\n</tool_calls>")), ("<tool_calls>", "</tool_calls>", *CALL, "<tool_sep>"),
        thinks=THINK),
    Way("cohere_command3", cohere, ACTION, thinks=ACTION[2:]),
    Way("minicpm5", xml("", ('<function name="', '">'), ('<param name="', '">', "</param>"), "</function>"),
        thinks=THINK),
    Way("solar_open2", xml("<|tool_call:start|>", ("", "\n"), SOLAR, "<|tool_call:end|>"),
        ("<|tool_call:start|>", "<|tool_call:end|>"), thinks=("<|think:start|>", "<|think:end|>")),
    Way("step3p5", QWEN, (*CALL, *THINK), thinks=("", "\n</think>\n"), is_open=True),
    Way("granite-20b-fc", each("<function_call> ", ""), ("<function_call>",)),
    Way("internlm", each("<|action_start|><|plugin|>\n", "<|action_end|>", "", "parameters"),
        ("<|action_start|>", "<|plugin|>", "<|action_end|>")),
    Way("internlm", each("<|action_start|><|plugin|>\n", "<|action_end|>\n"),
        ("<|action_start|>", "<|plugin|>", "<|action_end|>")),
    Way("xlam", listed("[", "]"), reasoning="qwen3", thinks=THINK, takes_text=False),
    Way("xlam", listed("[TOOL_CALLS][", "]")),
    Way("xlam", listed("<tool_call>[", "]</tool_call>")),
    Way("xlam", listed("```json\n[", "]\n```"), reasoning="qwen3", thinks=THINK),
    Way("phi4_mini_json", listed("functools[", "]")),
    Way("hunyuan_a13b", listed("<tool_calls>[", "]</tool_calls>"), thinks=("<think>\n", "\n</think>\n")),
    Way("step3", step3, (*STEP3, "</think>"), thinks=("", "</think>"), is_open=True),
    Way("olmo3", pythonic("<function_calls>\n", "\n</function_calls>", "\n"), thinks=THINK, is_open=True),
    Way("ernie45", each("<tool_call>\n", "\n</tool_call>\n", "\n"), (*CALL, *THINK, "<response>", "</response>"),
        thinks=("", "\n</think>\n\n\n"), is_open=True),
    Way("step3", functools.partial(step3, line="\n", between="\n"), (*STEP3, "</think>"),
        thinks=("", "\n</think>\n"), is_open=True),
    Way("longcat", each("<longcat_tool_call>\n", "\n</longcat_tool_call>"), LONGCAT[:2], thinks=LONGCAT[2:],
        is_open=True),
    Way("longcat", LONGCAT_XML, thinks=LONGCAT[2:]),
    Way("longcat_xml", LONGCAT_XML, LONGCAT, thinks=LONGCAT[2:], is_open=True),
    Way("longcat_xml", each("<longcat_tool_call>", "</longcat_tool_call>", "\n")),
    Way("functiongemma", functiongemma, ("<start_function_call>", "<end_function_call>", "<escape>")),
    Way("pythonic", pythonic("[", "]", ", "), reasoning="deepseek_r1", thinks=("", "</think>"), takes_text=False),
    Way("llama4_pythonic", pythonic("[", "]", ", "), PYTHON, takes_text=False),
    Way("llama4_pythonic", pythonic(f"{PYTHON[0]}[", f"]{PYTHON[1]}", ", "), PYTHON),
    Way("granite4", HERMES),
    Way("hermes", HERMES, (*CALL, *THINK), reasoning="qwen3", thinks=THINK),
    Way("llama3_json", each("", "", "; ", "parameters"), ("<|python_tag|>",), reasoning="deepseek_r1",
        thinks=("<think>", "</think>\n\n"), is_open=True, takes_text=False),
    Way("llama3_json", around("<|python_tag|>", each("", "", "; ", "parameters"), ""), ("<|python_tag|>",)),
    Way("mistral", listed("[TOOL_CALLS][", "]"), ("[TOOL_CALLS]", *MISTRAL), thinks=MISTRAL),
    Way("mistral", named("[TOOL_CALLS]", "[ARGS]", ""), ("[TOOL_CALLS]", "[ARGS]", *MISTRAL), thinks=MISTRAL),
    Way("qwen3_xml", QWEN, thinks=THINK),
    Way("deepseek_v3", around(V3[0], named(f"{V3[2]}function{V3[4]}", "\n```json\n", f"\n```{V3[3]}", "\n"), V3[1]), V3,
        thinks=THINK),
    Way("deepseek_v31", around(V3[0], named(V3[2], V3[4], V3[3]), V3[1]), (*V3, *THINK), thinks=THINK, is_open=True),
    Way("granite", listed("<|tool_call|>[", "]"), ("<|tool_call|>",),
        thinks=("Here is my thought process:", " Here is my response:")),
    Way("granite", listed("<tool_call>[", "]")),
    Way("jamba", listed("<tool_calls>[\n  ", "\n]</tool_calls>", ",\n  "), ("<tool_calls>", "</tool_calls>")),
    Way("kimi_k2", kimi, ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
        "<|tool_call_end|>", "<|tool_call_argument_begin|>"), thinks=THINK),
    Way("glm45", xml(CALL[0], ("", "\n"), ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"), CALL[1]),
        (*CALL, *THINK), thinks=THINK),
    Way("glm47", xml("<tool_call>", ("", ""), ("<arg_key>", "</arg_key><arg_value>", "</arg_value>"), "</tool_call>"),
        thinks=THINK),
    Way("minimax_m2", MINIMAX, ("<minimax:tool_call>", "</minimax:tool_call>", *THINK), thinks=("", "</think>"),
        is_open=True),
    Way("seed_oss", SEED, ("<seed:think>", "</seed:think>"), thinks=("<seed:think>", "</seed:think>")),
    Way("gigachat3", each("<|function_call|>", ""), ("<|function_call|>", "<|role_sep|>", "<|message_sep|>")),
    Way("openai", named("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "<|call|>",
        "<|start|>assistant"), ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>"),
        takes_text=False),
]  # fmt: skip
