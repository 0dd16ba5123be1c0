"""The grammar of an answer that has to call a tool, from the format's declaration and the tools' schemas.

In Lark's notation as llguidance reads it: `%json` is a value that a schema admits, `<[7]>` the token 7. A marker that
is a special token is written as that token, since the same letters from other tokens are something else to the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.frontend.text.formats.declaration import CallFormat, ReasoningFormat

PLAIN_CALLS = CallFormat(body="json", is_bare=True)
"""For a model whose own format is not known: a list of objects with name and arguments."""
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class ForcedCalls:
    """Writes the grammar; `text()` is all of it."""

    def __init__(
        self,
        calls: CallFormat,
        tools: Sequence[Mapping[str, Any]],
        special_ids: Mapping[str, int],
        *,
        several: bool,
        thinks_first: ReasoningFormat | None = None,
    ) -> None:
        """tools: as in OpenAI's requests, those that may be called. special_ids: of the tokenizer's special tokens.
        several: more than one call is allowed. thinks_first: the prompt has opened reasoning of this kind."""
        self._calls, self._special_ids, self._rules = calls, special_ids, list[str]()
        each = [self._rule("call", self._call(tool["function"])) for tool in tools]
        call = self._rule("any_call", " | ".join(each))
        start = self._sequence(call, several)
        if thinks_first is not None:
            start = f'{self._text_until("thought", thinks_first.end)} "\\n"? "\\n"? {start}'
        self._rules.append(f"start: {start}")

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
            f"<[{self._special_ids[part]}]>" if part in self._special_ids else _literal(part) for part in parts if part
        )

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
        return self._marker(calls.separator) if calls.section else _literal(calls.separator + " ")

    def _call(self, function: Mapping[str, Any]) -> str:
        calls, name = self._calls, str(function["name"])
        schema = function.get("parameters") or _NO_ARGUMENTS
        if calls.body == "pythonic":
            return f"{_literal(name + '(')} {self._comma_separated(schema, self._python_argument)} {_literal(')')}"
        if calls.body == "xml":
            inner = f"{self._named(name)} {self._xml_parameters(schema)} "
        elif calls.body == "escaped":
            inner = f"{self._named(name)} {self._comma_separated(schema, self._escaped_argument)} {_literal('}')}"
        elif calls.body == "named_json":
            inner = f"{self._named(name)} {self._json(schema)}"
        else:
            keys = f'{{"{calls.name_keys[0]}": {json.dumps(name)}, "{calls.argument_keys[0]}": '
            inner = f"{_literal(keys)} {self._json(schema)} {_literal('}')}"
        if calls.after_arguments:
            inner += f' "\\n"? {self._marker(calls.after_arguments)}'
        begin, end = (self._marker(each) for each in calls.call)
        gap = '"\\n"?' if calls.call[1] and calls.body not in ("named_json", "escaped") else ""
        return " ".join(filter(None, (begin, gap, inner, gap, end)))

    def _named(self, name: str) -> str:
        before, after = self._calls.name
        if self._calls.name_is_id:
            return f"{_literal(f'functions.{name}:')} /[0-9]{{1,2}}/ {self._marker(after)}"
        if not after and "[ARGS]" in self._special_ids:
            after = "[ARGS]"
        return " ".join(filter(None, (self._marker(before), _literal(name), self._marker(after))))

    def _json(self, schema: Any) -> str:
        return f"%json {json.dumps({**schema, 'x-guidance': _JSON_STYLE}, ensure_ascii=False)}"

    def _xml_parameters(self, schema: Mapping[str, Any]) -> str:
        before_name, after_name, before_value, after_value = self._calls.parameter
        required, written = schema.get("required") or (), ""
        for name, each in (schema.get("properties") or {}).items():
            begin = " ".join(filter(None, (_literal(before_name + name + after_name), _literal(before_value))))
            value = self._rule("value", self._xml_value(_inlined(each, schema), after_value))
            written += f' ("\\n"? {begin} {value})' + ("" if name in required else "?")
        return f'{written} "\\n"?'

    def _xml_value(self, schema: Mapping[str, Any], end: str) -> str:
        if schema.get("type") != "string":
            return f"{self._json(schema)} {_literal(end)}"
        if isinstance(schema.get("enum"), list):
            return "(" + " | ".join(_literal(str(each)) for each in schema["enum"]) + f") {_literal(end)}"
        return self._text_until("text", end)

    def _text_until(self, name: str, end: str) -> str:
        if end in self._special_ids:
            return f"/(.|\\n)*/ {self._marker(end)}"
        name = f"{name}_{len(self._rules)}"
        self._rules.append(f"{name}[lazy]: /(.|\\n)*{_regex(end)}/")
        return name

    def _python_argument(self, name: str, schema: dict[str, Any]) -> str:
        """Values are JSON, which is read too."""
        return f"{_literal(name + '=')} {self._json(schema)}"

    def _escaped_argument(self, name: str, schema: dict[str, Any]) -> str:
        escape = self._marker(self._calls.escape)
        if schema.get("type") == "string" and isinstance(schema.get("enum"), list):
            value = f"{escape} ({' | '.join(_literal(str(each)) for each in schema['enum'])}) {escape}"
        elif schema.get("type") == "string":
            value = f"{escape} {self._text_until('text', self._calls.escape)}"
        else:
            value = self._json(schema)
        return f"{_literal(name + ':')} {value}"

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


def _inlined(schema: Any, whole: Mapping[str, Any]) -> dict[str, Any]:
    """A property's schema on its own: with the definitions that it may refer to."""
    own = dict(schema) if isinstance(schema, Mapping) else {}
    return {**{name: whole[name] for name in ("$defs", "definitions") if name in whole}, **own}


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _regex(text: str) -> str:
    return re.sub(r"([.^$*+?()\[\]{}|\\/])", r"\\\1", text)
