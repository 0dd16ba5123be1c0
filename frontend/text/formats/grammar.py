"""Grammars of answers with tool calls, made from a format's declaration and the tools' schemas.

They are in Lark's notation as llguidance reads it: `%json` is a JSON value that fits a schema, `<[7]>` the token 7.
`%text` declares a text up to its end marker (`core/structured_output/unquoted_texts.py`). A marker that is a special
token is written as that token, since the same letters in other tokens mean something else to the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from headrace.frontend.text.formats.declaration import CallFormat, ReasoningFormat
from headrace.frontend.text.formats.parameters import types_of, with_properties_apart
from headrace.ipc.failure import InvalidRequestError
from headrace.ipc.messages import MOST_GRAMMAR_CHARACTERS

PLAIN_CALLS = CallFormat(body="json", is_bare=True, lists=True)
"""The format for a model whose own is unknown: a list of objects with name and arguments."""
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class Rules:
    """Collects the rules of a grammar; `text()` returns all of it."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        """special_ids: ids of the tokenizer's special tokens, by their texts."""
        self._special_ids, self._rules = special_ids, list[str]()
        self._num_characters = 0

    def text(self) -> str:
        return "\n".join(reversed(self._rules)) + "\n"

    def _rule(self, name: str, body: str) -> str:
        name = f"{name}_{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def _marker(self, text: str) -> str:
        """A marker as a sequence of special tokens and literals."""
        parts = re.split("(" + "|".join(map(re.escape, self._special_ids)) + ")", text) if self._special_ids else [text]
        return " ".join(
            f"<[{self._special_ids[part]}]>" if part in self._special_ids else literal(part) for part in parts if part
        )

    def _json(self, schema: Any) -> str:
        """A value of the schema. Raises InvalidRequestError once there are more characters than a grammar may have: the
        definitions of a schema are repeated for each property."""
        written = f"%json {json.dumps({**schema, 'x-guidance': _JSON_STYLE}, ensure_ascii=False)}"
        self._num_characters += len(written)
        if self._num_characters > MOST_GRAMMAR_CHARACTERS:
            raise InvalidRequestError(
                f"tools: the grammar of their calls has more than {MOST_GRAMMAR_CHARACTERS} characters; make the "
                "schemas shorter, or choose one tool"
            )
        return written

    def _text_until(self, name: str, end: str) -> str:
        if end in self._special_ids:
            return f"/(.|\\n)*/ {self._marker(end)}"
        name = f"{name}_{len(self._rules)}"
        self._rules.append(f"{name}[lazy]: /(.|\\n)*{regex(end)}/")
        return name


class ForcedCalls(Rules):
    """The grammar of an answer that must call a tool."""

    def __init__(
        self,
        calls: CallFormat,
        tools: Sequence[Mapping[str, Any]],
        special_ids: Mapping[str, int],
        *,
        several: bool,
        thinks_first: ReasoningFormat | None = None,
    ) -> None:
        """tools: those that may be called, as in OpenAI's requests. several: more than one call is allowed.
        thinks_first: the format of the reasoning that the prompt has opened, if any."""
        super().__init__(special_ids)
        self._calls = calls
        self._tools, self._several, self._thinks_first = tools, several, thinks_first
        self._one = self._listed = ""
        """Names of the rules for a call without its markers: alone, and in a list."""

    def text(self) -> str:
        """The grammar. May be called once."""
        start = self._answer()
        if self._thinks_first is not None:
            start = f'{self._text_until("thought", self._thinks_first.end)} "\\n"? "\\n"? {start}'
        self._rules.append("GAP: /[ \\n]{1,5}/")
        self._rules.append(f"start: {start}")
        return super().text()

    def _answer(self) -> str:
        """The rule body of the answer after its reasoning."""
        # Without `several` nothing may follow the call, so the grammar's end also ends the answer.
        return f"({self._all_calls()}) {'GAP?' if self._several else ''}"

    def _write_calls(self) -> None:
        functions = [tool["function"] for tool in self._tools]
        self._one = self._listed = self._rule("call", " | ".join(map(self._call, functions)))
        if self._calls.body == "named_json" and self._calls.lists:
            self._listed = self._rule("object", " | ".join(map(self._object, functions)))

    def _all_calls(self) -> str:
        calls = self._calls
        self._write_calls()
        if calls.section is not None:
            return self._in_section(*calls.section)
        around = [calls.call, *calls.also]
        if calls.is_bare and calls.opener:
            around.append(("", ""))
        return " | ".join(self._run(begin, end) for begin, end in around)

    def _in_section(self, begin: str, end: str) -> str:
        calls, one = self._calls, self._marked(*self._calls.call)
        between = f"({self._marker(calls.separator)} | GAP)?" if calls.separator else "GAP?"
        inner = f"{one} ({between} {one})*" if self._several else one
        if calls.lists:
            inner = f"({inner} | {self._list()})"
        return " ".join(filter(None, (self._marker(begin), "GAP?", inner, "GAP?", self._marker(end))))

    def _run(self, begin: str, end: str, *, is_opened: bool = False) -> str:
        """Calls in a row, or a list of calls, outside of a section. is_opened: `begin` precedes this rule already; if
        each call then needs its own marker, this is one call, and the caller repeats the rule."""
        calls = self._calls
        if calls.body == "pythonic":
            return " ".join(filter(None, ("" if is_opened else self._marker(begin), self._list(), self._marker(end))))
        first, later = self._marked("" if is_opened else begin, end), self._marked(begin, end)
        if calls.separator:
            separator = literal(calls.separator + " ")
            later = f"{separator} ({self._marker(begin)})? {self._marked('', end)}" if begin else f"{separator} {later}"
        elif is_opened:
            later = ""
        else:
            later = f"GAP? {later}"
        run = f"{first} ({later})*" if self._several and later else first
        if calls.lists:
            run += f" | {self._marked('' if is_opened else begin, end, self._list())}"
        return f"({run})"

    def _list(self) -> str:
        more = f'("," GAP? {self._listed})*' if self._several else ""
        return f'"[" GAP? {self._listed} {more} GAP? "]"'

    def _marked(self, begin: str, end: str, inner: str = "") -> str:
        """A call, or a list of calls, between markers."""
        # No space between a marker and a name.
        gap = "" if self._calls.body in ("named_json", "escaped") and not inner else "GAP?"
        parts = [self._marker(begin), gap if begin or self._calls.call[0] else "", inner or self._one]
        return " ".join(filter(None, (*parts, gap if end else "", self._marker(end))))

    def _call(self, function: Mapping[str, Any]) -> str:
        """The rule body of a call without its markers."""
        calls, name = self._calls, str(function["name"])
        schema = arguments_of(function)
        if calls.body == "pythonic":
            return f"{literal(name + '(')} {self._comma_separated(schema, self._python_argument)} {literal(')')}"
        ways = []
        if calls.body == "xml" or calls.is_either:
            ways.append(f"{self._named(name)} {self._xml_parameters(schema)}")
        if calls.body == "elements":
            ways.append(f"{self._named(name)} {self._elements(schema)}")
        if calls.body == "escaped":
            ways.append(f"{self._named(name)} {self._comma_separated(schema, self._escaped_argument)} {literal('}')}")
        if calls.body == "named_json":
            ways.append(f"{self._named(name)} {self._json(schema)}")
        if calls.body == "json":
            ways.append(self._object(function))
        if calls.after_arguments:
            ways = [f"{each} GAP? {self._marker(calls.after_arguments)}" for each in ways]
        if calls.is_either and calls.body != "json":
            ways.append(self._object(function))
        return " | ".join(ways)

    def _object(self, function: Mapping[str, Any]) -> str:
        key, name = self._calls.name_keys[0], json.dumps(function["name"], ensure_ascii=False)
        if self._calls.name_is_key:
            return f"{literal(f'{{{name}: ')} {self._json(arguments_of(function))} {literal('}')}"
        if self._calls.id_keys:
            begin = literal(f'{{"{self._calls.id_keys[0]}": "')
            named = literal(f'", "{key}": {name}, "{self._calls.argument_keys[0]}": ')
            return f"{begin} /[0-9]{{1,3}}/ {named} {self._json(arguments_of(function))} {literal('}')}"
        begins = [literal(f'{{"{key}": {name}, "{other}": ') for other in self._calls.argument_keys]
        schema = self._json(arguments_of(function))
        return f"({' | '.join(begins)}) {schema} {literal('}')}"

    def _named(self, name: str) -> str:
        before, after = self._calls.name
        if self._calls.name_is_id:
            return f"{literal(f'functions.{name}:')} /[0-9]{{1,2}}/ {self._marker(after)}"
        ends = self._marker(after)
        if not after and self._calls.lists:  # Mistral's marker, which older models lack
            ends = self._marker("[ARGS]") if "[ARGS]" in self._special_ids else '("[ARGS]")?'
        kind = f"({self._marker(self._calls.kind)})?" if self._calls.kind else ""
        begin, end = self._calls.number
        number = f"{literal(begin)} /[0-9]{{1,3}}/ {self._marker(end)}" if end else ""
        return " ".join(filter(None, (kind, self._marker(before), literal(name), ends, number)))

    def _xml_parameters(self, schema: Mapping[str, Any]) -> str:
        before_name, after_name, before_value, after_value = self._calls.parameter
        schema, written = with_properties_apart(schema), ""
        for name in schema["properties"]:
            own = _apart(schema, name)
            begin = literal(before_name + name + after_name)
            if any(special in before_name for special in self._special_ids):
                begin = f"{self._marker(before_name)} {literal(name + after_name)}"
            if self._calls.value_kinds:
                ways = [self._marker(f" {each}{before_value}") for each in self._kinds_of(own)]
                ways += [f"GAP? {self._marker(before_value)}"] if self._calls.may_lack_kinds else []
                begin += f" ({' | '.join(ways)})"
            elif before_value:
                begin += f" GAP? {literal(before_value)}"
            value = self._rule("value", self._xml_value(own, after_value))
            written += f" (GAP? {begin} {value})" + ("" if name in schema["required"] else "?")
        return written

    def _elements(self, schema: Mapping[str, Any]) -> str:
        """An element for each property of an object."""
        schema, written = with_properties_apart(schema), ""
        for name in schema["properties"]:
            element = self._rule("element", self._element(name, _apart(schema, name)))
            written += f" (GAP? {element})" + ("" if name in schema["required"] else "?")
        return written

    def _element(self, name: str, schema: Mapping[str, Any]) -> str:
        """An element: a string as text, an object or a list that declares what it holds as further elements, and any
        other value as JSON."""
        begin, after_name, _, before_end = self._calls.parameter
        end, types = before_end + name + after_name, types_of(schema)
        if "string" in types or not types:
            value = self._text_or_json(schema, "", end)
        elif types == {"object"} and schema.get("properties") and "$ref" not in schema:
            value = f"{self._elements(schema)} GAP? {self._marker(end)}"
        elif types == {"array"} and isinstance(schema.get("items"), Mapping) and "$ref" not in schema["items"]:
            known = {each: schema[each] for each in ("$defs", "definitions", "title") if each in schema}
            item = self._rule("element", self._element("item", {**known, **schema["items"]}))
            value = f"{self._repeated(item, schema)} GAP? {self._marker(end)}"
        else:
            value = f"{self._json(schema)} {self._marker(end)}"
        return f"{self._marker(begin + name + after_name)} {value}"

    def _repeated(self, item: str, schema: Mapping[str, Any]) -> str:
        """A list's items, as many as the schema allows."""
        least, most = schema.get("minItems") or 0, schema.get("maxItems", "")
        return f"(GAP? {item}){{{least},{most}}}"

    def _kinds_of(self, schema: Mapping[str, Any]) -> list[str]:
        """What `value_kinds` say of values of this schema."""
        types = {"number" if each == "integer" else each for each in types_of(schema)}
        if not types:
            return [said for _, said in self._calls.value_kinds]
        if "string" in types:  # any other value is parsed as a string then
            types = {"string"}
        found = [said for type_, said in self._calls.value_kinds if type_ in types]
        return found or [said for type_, said in self._calls.value_kinds if type_ != "string"]

    def _xml_value(self, schema: Mapping[str, Any], end: str) -> str:
        """A value and its end marker. The first line break of values_have_lines is required, so that the parser does
        not take one from the text; a text may lack the one at its end."""
        line = "\n" if self._calls.values_have_lines else ""
        return " ".join(filter(None, (literal(line), self._text_or_json(schema, line, end))))

    def _text_or_json(self, schema: Mapping[str, Any], line: str, end: str) -> str:
        """A value and its end marker, in formats that write strings without quotes. A value that may be a string, or
        anything, is parsed as one."""
        types = types_of(schema)
        if "string" in types or not types:
            return f"({' | '.join(self._texts(schema, line, end) or [self._text(schema, line, end)])})"
        return " ".join(filter(None, (self._json(schema), literal(line), self._marker(end))))

    def _texts(self, schema: Mapping[str, Any], line: str, end: str) -> list[str]:
        """Alternatives for a string, or null, that fits the schema. Raises InvalidRequestError if none can be written
        before the end marker."""
        for said in ([schema["const"]] if "const" in schema else None, schema.get("enum")):
            if isinstance(said, list):
                texts = ["null" if each is None else each for each in said if each is None or isinstance(each, str)]
                whole = [each for each in texts if end not in each]
                if texts and not whole:
                    raise InvalidRequestError(
                        f"tools: of the texts that an enum or const of a parameter allows, {texts!r:.200}, each has "
                        f"{end!r}, where a text ends in this model's format of calls"
                    )
                return [f"{literal(each + line)} {self._marker(end)}" for each in whole]
        ways = list[str]()
        for each in (each for name in ("anyOf", "oneOf") for each in schema.get(name) or ()):
            ways += self._texts(each, line, end) if isinstance(each, Mapping) else []
        types = types_of({"type": schema.get("type")})
        if "string" in types:
            ways.append(self._text(schema, line, end))
        if "null" in types:
            ways.append(f"{literal('null' + line)} {self._marker(end)}")
        return ways

    def _text(self, schema: Mapping[str, Any], line: str, end: str) -> str:
        """A string of the schema's length and pattern, up to the first `end`: a declared text, which each library gets
        in its own notation (`core/structured_output/unquoted_texts.py`)."""
        is_special = any(map(end.startswith, self._special_ids))
        declared: dict[str, Any] = {} if is_special else {"end": end}
        declared |= {each: int(schema[each]) for each in ("minLength", "maxLength") if schema.get(each) is not None}
        if isinstance(pattern := schema.get("pattern"), str):
            declared["pattern"] = _whole_pattern(pattern)
        if line:
            declared["line_break"] = True
        name = f"text_{len(self._rules)}"
        self._rules.append(f"{name}: %text {json.dumps(declared, ensure_ascii=False)}")
        return f"{name} {self._marker(end)}" if is_special else name

    def _python_argument(self, name: str, schema: dict[str, Any]) -> str:
        """An argument whose value is JSON (which the parser accepts too), or a Python string, bool or None. A Python
        string of bounded length has no escapes, with which a character would be a group (`_times`)."""
        return f"{literal(name + '=')} ({' | '.join([self._json(schema), *self._python_values(schema)])})"

    def _python_values(self, schema: Mapping[str, Any]) -> list[str]:
        said = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(said, list):
            return [literal(repr(each)) for each in said if each is None or isinstance(each, bool | str)]
        ways = list[str]()
        for each in (each for name in ("anyOf", "oneOf") for each in schema.get(name) or ()):
            ways += self._python_values(each) if isinstance(each, Mapping) else []
        types = types_of({"type": schema.get("type")})
        if "string" in types and not {"pattern", "format"} & schema.keys():
            times, escapes = _times(schema), r"\\[\\'\"nrt]"
            ways.append(rf"/'([^'\\\n]|{escapes}){times}'/" if times in "*+" else rf"/'[^'\\\n]{times}'/")
        ways += [literal("True"), literal("False")] if "boolean" in types else []
        ways += [literal("None")] if "null" in types else []
        return ways

    def _escaped_argument(self, name: str, schema: dict[str, Any]) -> str:
        if "string" in types_of(schema):
            value = f"{self._marker(self._calls.escape)} {self._text_or_json(schema, '', self._calls.escape)}"
        else:
            value = self._json(schema)
        return f"{literal(name + ':')} {value}"

    def _comma_separated(self, schema: Mapping[str, Any], argument: Callable[[str, dict[str, Any]], str]) -> str:
        """Arguments with commas between them: the required ones in the schema's order, then the optional ones."""
        comma = '","' if self._calls.body == "escaped" else '", "'
        schema = with_properties_apart(schema)
        properties, required = schema["properties"], schema["required"]
        written = {name: self._rule("argument", argument(name, _apart(schema, name))) for name in properties}
        needed = [written[name] for name in properties if name in required]
        rest, firsts = "", list[str]()
        for name in reversed([name for name in properties if name not in required]):
            firsts.append(f"{written[name]} {rest}")
            rest = self._rule("arguments", f"({comma} {written[name]})? {rest}")
        if needed:
            return f"{f' {comma} '.join(needed)} {rest}"
        return f"({' | '.join(reversed(firsts))})?" if firsts else ""


class StrictCalls(ForcedCalls):
    """The grammar of an answer that may hold any text, but whose calls must name a tool and fit its schema."""

    _or_json: Any = None

    def text(self, or_json: Any = None) -> str:
        """The grammar. or_json: the schema of an answer that is no call. May be called once."""
        self._or_json = or_json
        return super().text()

    def _answer(self) -> str:
        if self._or_json is not None:
            return f"({self._json(self._or_json)} | {super()._answer()})"
        self._write_calls()
        opened = " | ".join(self._opened())
        before = f"({self._rule('opened', opened)}){'*' if self._several else '?'}" if opened else ""
        ways = [f"{before} {self._free()}"]
        if self._calls.is_bare:
            ways.append(f"{self._run('', '')} {self._free()}")
        return f"({' | '.join(ways)})"

    def _opened(self) -> list[str]:
        """Alternatives of text up to an opener, and the calls after it.

        Openers that are text share one rule, so that a call may have the end of another opener: with a rule for each,
        which excludes the others, the lexer reaches its limits."""
        ways, written = list[str](), self._written_openers
        if written:
            name = f"text_{len(self._rules)}"
            self._rules.append(f"{name}[lazy]: /{self._any_text}{_one_of(written)}/")
            after = dict.fromkeys(self._after(each) for each in written)
            ways.append(f"{name} ({' | '.join(after)})")
        for opener in self._openers:
            before, marker = self._at_special(opener)
            if marker:
                name = f"TEXT_{len(self._rules)}"
                self._rules.append(f"{name}: /{self._any_text}{regex(before)}/{self._without_openers}")
                ways.append(f"{name} {self._marker(marker)} {self._after(opener)}")
        return ways

    def _after(self, opener: str) -> str:
        """The calls after an opener."""
        end = self._openers[opener]
        return self._in_section("", end) if self._calls.section else self._run(opener, end, is_opened=True)

    @property
    def _openers(self) -> dict[str, str]:
        """The markers that open a section or a call, with their end markers."""
        calls = self._calls
        if calls.section is not None:
            return {calls.section[0]: calls.section[1], **dict(calls.also)}
        return dict(pair for pair in (calls.call, *calls.also) if pair[0])

    @property
    def _any_text(self) -> str:
        """A regular expression for free text. With bare calls, text must not begin like a call or a separator."""
        if self._calls.is_bare:
            return rf"(\s*[^\s{{\[{regex(self._calls.separator)}](.|\n)*)?"
        return r"(.|\n)*"

    def _free(self) -> str:
        """The name of a rule for text that contains no opener."""
        name = f"FREE_{len(self._rules)}"
        self._rules.append(f"{name}: /{self._any_text}/{self._without_openers}")
        return name

    @property
    def _written_openers(self) -> list[str]:
        """The openers that are text. Those with a special token cannot occur in text."""
        return [each for each in self._openers if not self._at_special(each)[1]]

    @property
    def _without_openers(self) -> str:
        """Excludes openers from a text rule."""
        written = self._written_openers
        return rf" & ~/(.|\n)*{_one_of(written)}(.|\n)*/" if written else ""

    def _at_special(self, marker: str) -> tuple[str, str]:
        """A marker's text before its first special token, and the rest."""
        at = min((at for each in self._special_ids if (at := marker.find(each)) >= 0), default=len(marker))
        return marker[:at], marker[at:]


def arguments_of(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a call's arguments, with type object, which it may lack. Its title names the tool in errors of the
    grammar compiler."""
    title = f"parameters of the tool {function['name']}"
    return {**(function.get("parameters") or NO_ARGUMENTS), "type": "object", "title": title}


def _apart(whole: Mapping[str, Any], property: str) -> dict[str, Any]:
    """A property's schema as a schema of its own, whose title tells in errors what it is."""
    definitions = {name: whole[name] for name in ("$defs", "definitions") if name in whole}
    return {**definitions, **whole["properties"][property], "title": f"{whole['title']}, property {property}"}


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def regex(text: str) -> str:
    return re.sub(r"([.^$*+?()\[\]{}|\\/])", r"\\\1", text)


def _one_of(texts: Iterable[str]) -> str:
    """A regular expression for any of the texts."""
    return f"({'|'.join(map(regex, texts))})"


def _times(schema: Mapping[str, Any]) -> str:
    """How often a string's character repeats. Without a bound it is a star or a plus: where a group repeats by a count,
    and be it {0,}, xgrammar looks at each token of the vocabulary anew for each mask."""
    least, most = int(schema.get("minLength") or 0), schema.get("maxLength")
    if most is None and least <= 1:
        return "+" if least else "*"
    return f"{{{least},{'' if most is None else int(most)}}}"


def _whole_pattern(pattern: str) -> str:
    """A regular expression for a whole text that contains a match of a schema's pattern; ^ and $ anchor the match."""
    begin = "" if pattern.startswith("^") else r"(.|\n)*"
    ends = pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern.removeprefix("^").removesuffix("$") if ends else pattern.removeprefix("^")
    return begin + "(" + re.sub(r"(?<!\\)/", r"\\/", inner) + ")" + ("" if ends else r"(.|\n)*")
