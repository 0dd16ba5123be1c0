"""The grammar of an answer that has to call a tool, from the format's declaration and the tools' schemas.

In Lark's notation as llguidance reads it: `%json` is a value that a schema admits, `<[7]>` the token 7. A marker that
is a special token is written as that token, since the same letters from other tokens are something else to the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from headrace.frontend.text.formats.declaration import CallFormat, ReasoningFormat
from headrace.frontend.text.formats.values import types_of

PLAIN_CALLS = CallFormat(body="json", is_bare=True)
"""For a model whose own format is not known: a list of objects with name and arguments."""
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class Rules:
    """Writes a grammar; `text()` is all of it."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        """special_ids: of the tokenizer's special tokens."""
        self._special_ids, self._rules = special_ids, list[str]()

    def text(self) -> str:
        return "\n".join(reversed(self._rules)) + "\n"

    def _rule(self, name: str, body: str) -> str:
        name = f"{name}_{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def _marker(self, text: str) -> str:
        """With what a model writes between a marker and what follows."""
        parts = re.split("(" + "|".join(map(re.escape, self._special_ids)) + ")", text) if self._special_ids else [text]
        return " ".join(
            f"<[{self._special_ids[part]}]>" if part in self._special_ids else literal(part) for part in parts if part
        )

    def _json(self, schema: Any) -> str:
        return f"%json {json.dumps({**schema, 'x-guidance': _JSON_STYLE}, ensure_ascii=False)}"

    def _text_until(self, name: str, end: str) -> str:
        if end in self._special_ids:
            return f"/(.|\\n)*/ {self._marker(end)}"
        name = f"{name}_{len(self._rules)}"
        self._rules.append(f"{name}[lazy]: /(.|\\n)*{regex(end)}/")
        return name


class ForcedCalls(Rules):
    """Of an answer that has to call a tool."""

    def __init__(
        self,
        calls: CallFormat,
        tools: Sequence[Mapping[str, Any]],
        special_ids: Mapping[str, int],
        *,
        several: bool,
        thinks_first: ReasoningFormat | None = None,
    ) -> None:
        """tools: as in OpenAI's requests, those that may be called. several: more than one call is allowed.
        thinks_first: the prompt has opened reasoning of this kind."""
        super().__init__(special_ids)
        self._calls = calls
        self._tools, self._several, self._thinks_first = tools, several, thinks_first

    def text(self) -> str:
        """Once."""
        start = self._answer()
        if self._thinks_first is not None:
            start = f'{self._text_until("thought", self._thinks_first.end)} "\\n"? "\\n"? {start}'
        self._rules.append(f"start: {start}")
        return super().text()

    def _answer(self) -> str:
        """After the reasoning."""
        each = [self._rule("call", self._call(tool["function"])) for tool in self._tools]
        return self._sequence(self._rule("any_call", " | ".join(each)), self._several)

    def _sequence(self, call: str, several: bool) -> str:
        calls, more = self._calls, ""
        if calls is PLAIN_CALLS or (calls.body == "pythonic" and calls.section is None):
            more = f'(", " {call})*' if several else ""
            inner = f'"[" {call} {more} "]"'
        elif calls.body == "pythonic":
            more = f'("\\n" {call})*' if several else ""
            inner = f"{call} {more}"
        else:
            separator = self._separator(calls)
            more = f"({separator} {call})*" if several else ""
            inner = f"{call} {more}"
        if calls.body == "pythonic" and calls.section is None:
            return " ".join((self._marker(calls.call[0]), inner, self._marker(calls.call[1])))
        if calls.section is None:
            return inner
        return f'{self._marker(calls.section[0])} "\\n"? {inner} "\\n"? {self._marker(calls.section[1])}'

    def _separator(self, calls: CallFormat) -> str:
        if not calls.separator:
            return '"\\n"?'
        return self._marker(calls.separator) if calls.section else literal(calls.separator + " ")

    def _call(self, function: Mapping[str, Any]) -> str:
        calls, name = self._calls, str(function["name"])
        schema = function.get("parameters") or NO_ARGUMENTS
        if calls.body == "pythonic":
            return f"{literal(name + '(')} {self._comma_separated(schema, self._python_argument)} {literal(')')}"
        if calls.body == "xml":
            inner = f"{self._named(name)} {self._xml_parameters(schema)} "
        elif calls.body == "escaped":
            inner = f"{self._named(name)} {self._comma_separated(schema, self._escaped_argument)} {literal('}')}"
        elif calls.body == "named_json":
            inner = f"{self._named(name)} {self._json(schema)}"
        else:
            keys = f'{{"{calls.name_keys[0]}": {json.dumps(name)}, "{calls.argument_keys[0]}": '
            inner = f"{literal(keys)} {self._json(schema)} {literal('}')}"
        if calls.after_arguments:
            inner += f' "\\n"? {self._marker(calls.after_arguments)}'
        begin, end = (self._marker(each) for each in calls.call)
        gap = '"\\n"?' if calls.call[1] and calls.body not in ("named_json", "escaped") else ""
        return " ".join(filter(None, (begin, gap, inner, gap, end)))

    def _named(self, name: str) -> str:
        before, after = self._calls.name
        if self._calls.name_is_id:
            return f"{literal(f'functions.{name}:')} /[0-9]{{1,2}}/ {self._marker(after)}"
        if not after and "[ARGS]" in self._special_ids:
            after = "[ARGS]"
        return " ".join(filter(None, (self._marker(before), literal(name), self._marker(after))))

    def _xml_parameters(self, schema: Mapping[str, Any]) -> str:
        before_name, after_name, before_value, after_value = self._calls.parameter
        required, written = schema.get("required") or (), ""
        for name, each in (schema.get("properties") or {}).items():
            begin = " ".join(filter(None, (literal(before_name + name + after_name), literal(before_value))))
            value = self._rule("value", self._xml_value(_inlined(each, schema), after_value))
            written += f' ("\\n"? {begin} {value})' + ("" if name in required else "?")
        return f'{written} "\\n"?'

    def _xml_value(self, schema: Mapping[str, Any], end: str) -> str:
        """With what follows it. Where lines set values off, they are written, so that none is taken from the text."""
        line = "\n" if self._calls.values_have_lines else ""
        return " ".join(filter(None, (literal(line), self._text_or_json(schema, line, end))))

    def _text_or_json(self, schema: Mapping[str, Any], line: str, end: str) -> str:
        """A value and its end, where texts stand as they are: what may be a text is read as one."""
        if "string" in types_of(schema):
            return f"({' | '.join(self._texts(schema, line, end))})"
        return " ".join(filter(None, (self._json(schema), literal(line), self._marker(end))))

    def _texts(self, schema: Mapping[str, Any], line: str, end: str) -> list[str]:
        """The ways to write a text that the schema admits, or null."""
        for said in ([schema["const"]] if "const" in schema else None, schema.get("enum")):
            if isinstance(said, list):
                texts = ["null" if each is None else each for each in said]
                return [f"{literal(each + line)} {self._marker(end)}" for each in texts if isinstance(each, str)]
        ways = list[str]()
        for each in (each for name in ("anyOf", "oneOf") for each in schema.get(name) or ()):
            ways += self._texts(each, line, end) if isinstance(each, Mapping) else []
        declared = schema.get("type")
        types = [declared] if isinstance(declared, str) else declared or ()
        if "string" in types:
            ways.append(self._text(schema, line, end))
        if "null" in types:
            ways.append(f"{literal('null' + line)} {self._marker(end)}")
        return ways

    def _text(self, schema: Mapping[str, Any], line: str, end: str) -> str:
        """As long as the schema says and of its pattern, up to the first `end`."""
        is_special = end in self._special_ids
        close = regex(line if is_special else line + end)
        parts = [rf"/(.|\n){{{schema.get('minLength') or 0},{schema.get('maxLength', '')}}}{close}/"]
        if isinstance(pattern := schema.get("pattern"), str):
            parts.append(f"/{_whole_pattern(pattern)}{close}/")
        if is_special:
            name = self._rule("TEXT", " & ".join(parts))
            return f"{name if close else f'({name})?'} {self._marker(end)}"
        parts.append(rf"~/(.|\n)*{regex(end)}(.|\n)+/")
        name = f"text_{len(self._rules)}"
        self._rules.append(f"{name}[lazy]: {' & '.join(parts)}")
        return name

    def _python_argument(self, name: str, schema: dict[str, Any]) -> str:
        """Values are JSON, which is read too."""
        return f"{literal(name + '=')} {self._json(schema)}"

    def _escaped_argument(self, name: str, schema: dict[str, Any]) -> str:
        if "string" in types_of(schema):
            value = f"{self._marker(self._calls.escape)} {self._text_or_json(schema, '', self._calls.escape)}"
        else:
            value = self._json(schema)
        return f"{literal(name + ':')} {value}"

    def _comma_separated(self, schema: Mapping[str, Any], argument: Callable[[str, dict[str, Any]], str]) -> str:
        """Those that must be there in the schema's order, then the others."""
        comma = '","' if self._calls.body == "escaped" else '", "'
        properties, required = schema.get("properties") or {}, schema.get("required") or ()
        ordered = sorted(properties, key=lambda name: name not in required)
        rest = '""'
        for place, name in reversed(list(enumerate(ordered))):
            own = argument(name, _inlined(properties[name], schema))
            separated = f"({comma} {own})" if place else own
            if name in required:
                rest = f"{separated} {rest}"
            elif place:
                rest = f"({separated} {rest})?"
            else:
                rest = f"({own} {rest})?"
            rest = self._rule("arguments", rest)
        return rest


class StrictCalls(ForcedCalls):
    """Of an answer that may say anything; but where it begins a call, that is one of the tools' and fits its schema."""

    _or_json: Any = None

    def text(self, or_json: Any = None) -> str:
        """or_json: the schema of an answer that is no call."""
        self._or_json = or_json
        return super().text()

    def _answer(self) -> str:
        calls, ways = self._calls, []
        if self._or_json is not None:
            ways.append(self._json(self._or_json))
            if calls.opener:
                ways.append(self._rule("calls", super()._answer()))
        else:
            times = "*" if self._several else "?"
            within = f"({self._until_opener()} ({self._opened()})){times} " if calls.opener else ""
            ways.append(within + self._free())
        if calls.is_bare:
            self._calls = msgspec.structs.replace(calls, call=("", ""), section=None)
            ways.append(super()._answer())
            self._calls = calls
        return f"({' | '.join(ways)})"

    def _opened(self) -> str:
        """A call, or a section, whose opener has been read with the text before it."""
        calls = self._calls
        section = ("", calls.section[1]) if calls.section else None
        call = calls.call if calls.section else ("", calls.call[1])
        self._calls = msgspec.structs.replace(calls, section=section, call=call, is_bare=True)
        if calls.section or calls.body == "pythonic":
            answer = super()._answer()
        else:
            answer = " | ".join(self._rule("call", self._call(tool["function"])) for tool in self._tools)
        self._calls = calls
        return answer

    @property
    def _any_text(self) -> str:
        """What begins like a bare call is none."""
        return r"(\s*[^\s{\[](.|\n)*)?" if self._calls.is_bare else r"(.|\n)*"

    def _until_opener(self) -> str:
        opener = self._calls.opener
        if opener in self._special_ids:
            return f"/{self._any_text}/ {self._marker(opener)}"
        name = f"text_{len(self._rules)}"
        self._rules.append(f"{name}[lazy]: /{self._any_text}{regex(opener)}/")
        return name

    def _free(self) -> str:
        """Text that begins no call. A marker that is a special token is in no text."""
        openers = [
            each for each in (self._calls.opener, *dict(self._calls.also)) if each and each not in self._special_ids
        ]
        without = "".join(rf" & ~/(.|\n)*{regex(each)}(.|\n)*/" for each in openers)
        name = f"FREE_{len(self._rules)}"
        self._rules.append(f"{name}: /{self._any_text}/{without}")
        return name


def _inlined(schema: Any, whole: Mapping[str, Any]) -> dict[str, Any]:
    """A property's schema on its own: with the definitions that it may refer to."""
    own = dict(schema) if isinstance(schema, Mapping) else {}
    return {**{name: whole[name] for name in ("$defs", "definitions") if name in whole}, **own}


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def regex(text: str) -> str:
    return re.sub(r"([.^$*+?()\[\]{}|\\/])", r"\\\1", text)


def _whole_pattern(pattern: str) -> str:
    """Of a text that holds what a schema's pattern says somewhere, or at its ends where that says so."""
    begin = "" if pattern.startswith("^") else r"(.|\n)*"
    ends = pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern.removeprefix("^").removesuffix("$") if ends else pattern.removeprefix("^")
    return begin + "(" + re.sub(r"(?<!\\)/", r"\\/", inner) + ")" + ("" if ends else r"(.|\n)*")
