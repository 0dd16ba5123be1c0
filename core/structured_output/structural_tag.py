"""Structural tags (texts of which some parts have a form) in both notations of vLLM:

    {"structures": [{"begin": TEXT, "schema": SCHEMA, "end": TEXT}], "triggers": [TEXT]}
    {"type": "structural_tag", "format": FORMAT}

The second is xgrammar's and can express more; the first is converted to it. A format is an object whose `type` names
one of the classes below. llguidance has no such notation: `in_lark` converts formats of these types to a grammar:

    const_string, json_schema, regex, grammar, any_text
    sequence, or, optional, star, plus, repeat
    tag, triggered_tags, tags_with_separator
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from headrace.core.structured_output.exact_numbers import read_float
from headrace.ipc.struct_types import threadsafe

_SCHEMA = "json_schema"
_ANY_TEXT = r"/(.|\n)*/"


class Structure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    begin: str
    schema: Any
    end: str


class OlderTag(msgspec.Struct, frozen=True):
    structures: list[Structure]
    triggers: list[str]


def format_of(tag: Any) -> Any:
    """A tag of either notation as a FORMAT, which is not checked. Raises ValueError."""
    if "format" in tag:
        return tag["format"]
    older = msgspec.convert(tag, threadsafe(OlderTag))
    if not older.structures:
        raise ValueError("there are no structures")
    tags = [
        {
            "type": "tag",
            "begin": each.begin,
            "content": {
                "type": _SCHEMA,
                _SCHEMA: json.loads(each.schema, parse_float=read_float)
                if isinstance(each.schema, str)
                else each.schema,
            },
            "end": each.end,
        }
        for each in older.structures
    ]
    return {"type": "triggered_tags", "triggers": older.triggers, "tags": tags}


def with_schemas(form: Any, change: Callable[[Any], Any]) -> Any:
    """Applies `change` to all JSON schemas of a format."""
    return _with_parts(form, _SCHEMA, _SCHEMA, change)


def with_patterns(form: Any, change: Callable[[str], str]) -> Any:
    """Applies `change` to all regular expressions of a format."""
    return _with_parts(form, "regex", "pattern", change)


def with_grammars(form: Any, change: Callable[[str], str]) -> Any:
    """Applies `change` to all grammars of a format."""
    return _with_parts(form, "grammar", "grammar", change)


def _with_parts(form: Any, kind: str, field: str, change: Callable[[Any], Any]) -> Any:
    """Applies `change` to `field` in all parts of a format whose type is `kind`."""
    if isinstance(form, list):
        return [_with_parts(each, kind, field, change) for each in form]
    if not isinstance(form, dict):
        return form
    is_of_kind = form.get("type") == kind
    return {
        name: change(value)
        if is_of_kind and name == field
        # A schema contains no formats, even if it looks so.
        else value
        if name == _SCHEMA
        else _with_parts(value, kind, field, change)
        for name, value in form.items()
    }


def in_lark(
    form: Any, *, schema_of: Callable[[Any], str], regex_of: Callable[[str], str], lark_of: Callable[[str], str]
) -> str:
    """Converts a format to llguidance's grammar. Raises ValueError if the grammar cannot express it.

    schema_of, regex_of: convert a JSON schema or a regular expression to Lark; lark_of: converts a grammar in Lark or
    GBNF to Lark.
    """
    lark = Lark(schema_of, regex_of, lark_of)
    start = msgspec.convert({"format": form}, threadsafe(Root)).format.written(lark, ())
    rules = "\n".join(["%llguidance {}", f"start: {start}", *lark.rules])
    return json.dumps({"grammars": [{"name": "structural_tag", "lark_grammar": rules}, *lark.grammars]})


class Lark:
    """A Lark grammar under construction. Methods add rules and return names to refer to them."""

    def __init__(
        self, schema_of: Callable[[Any], str], regex_of: Callable[[str], str], lark_of: Callable[[str], str]
    ) -> None:
        self.schema_of, self.regex_of, self._lark_of = schema_of, regex_of, lark_of
        self.rules: list[str] = []
        self.grammars: list[dict[str, str]] = []

    def text(self, excludes: Sequence[str]) -> str:
        """A terminal that matches any text in which none of `excludes` occurs."""
        if not excludes:
            return _ANY_TEXT
        name = f"TEXT_{len(self.rules)}"
        excluded = " | ".join(map(json.dumps, excludes))
        self.rules.append(f"{name}: {_ANY_TEXT} & ~({_ANY_TEXT} ({excluded}) {_ANY_TEXT})")
        return name

    def upto(self, text: str, ends: Sequence[str]) -> str:
        """A rule for text of the terminal `text` up to and including the first of `ends`; without ends, all text."""
        name = f"text_{len(self.rules)}"
        self.rules.append(f"{name}[lazy]: {text} {_closing(ends)}" if ends else f"{name}: {text}")
        return name

    def rule(self, expression: str) -> str:
        name = f"rule_{len(self.rules)}"
        self.rules.append(f"{name}: {expression}")
        return name

    def grammar(self, text: str) -> str:
        name = f"grammar_{len(self.grammars)}"
        self.grammars.append({"name": name, "lark_grammar": self._lark_of(text)})
        return f"@{name}"


class TagFormat(msgspec.Struct, tag_field="type", forbid_unknown_fields=True):
    """Base class of the formats."""

    @property
    def is_open(self) -> bool:
        """It may continue with any text, so that only the end of a tag or of the answer ends it."""
        return False

    def body(self, lark: Lark) -> str:
        """The Lark expression of a format that is not open."""
        raise NotImplementedError

    def written(self, lark: Lark, ends: Sequence[str]) -> str:
        """The Lark expression of the format, followed by one of the ends, if there are any."""
        return f"{self.body(lark)} {_closing(ends)}"

    def closed(self, lark: Lark) -> str:
        """The Lark expression of a format that another format follows. Raises ValueError if this one is open."""
        if self.is_open:
            raise ValueError(f"{self.__struct_config__.tag} may go on with any text, and something follows on it")
        return self.body(lark)


class ConstString(TagFormat, tag="const_string"):
    value: str

    def body(self, lark: Lark) -> str:
        return json.dumps(self.value)


class JsonSchema(TagFormat, tag=_SCHEMA):
    json_schema: bool | dict[str, Any]

    def body(self, lark: Lark) -> str:
        return lark.schema_of(self.json_schema)


class Regex(TagFormat, tag="regex"):
    pattern: str

    def body(self, lark: Lark) -> str:
        return lark.regex_of(self.pattern)


class Grammar(TagFormat, tag="grammar"):
    grammar: str

    def body(self, lark: Lark) -> str:
        return lark.grammar(self.grammar)


class AnyText(TagFormat, tag="any_text"):
    excludes: tuple[str, ...] = ()

    @property
    def is_open(self) -> bool:
        return True

    def written(self, lark: Lark, ends: Sequence[str]) -> str:
        return lark.upto(lark.text(self.excludes), ends)


class InOrder(TagFormat, tag="sequence"):
    elements: tuple[AnyFormat, ...]

    @property
    def is_open(self) -> bool:
        return bool(self.elements) and self.elements[-1].is_open

    def body(self, lark: Lark) -> str:
        return self.written(lark, ())

    def written(self, lark: Lark, ends: Sequence[str]) -> str:
        written, elements = list[str](), list(self.elements)
        while elements:
            element = elements.pop(0)
            following = elements[0] if elements else None
            if following is None:
                written.append(element.written(lark, ends))
            elif element.is_open and isinstance(following, ConstString):
                del elements[0]
                written.append(element.written(lark, [following.value]))
                if not elements:
                    written.append(_closing(ends))
            else:
                written.append(element.closed(lark))
        return " ".join(written)


class Either(TagFormat, tag="or"):
    elements: tuple[AnyFormat, ...]

    @property
    def is_open(self) -> bool:
        return any(each.is_open for each in self.elements)

    def body(self, lark: Lark) -> str:
        return self.written(lark, ())

    def written(self, lark: Lark, ends: Sequence[str]) -> str:
        return _one_of(each.written(lark, ends) for each in self.elements)


class RepeatedFormat(TagFormat):
    """Base class of formats that repeat their content."""

    content: AnyFormat

    @property
    def times(self) -> str:
        raise NotImplementedError

    def body(self, lark: Lark) -> str:
        return f"({self.content.closed(lark)}){self.times}"


class AtMostOnce(RepeatedFormat, tag="optional"):
    @property
    def times(self) -> str:
        return "?"


class AnyTimes(RepeatedFormat, tag="star"):
    @property
    def times(self) -> str:
        return "*"


class OnceOrMore(RepeatedFormat, tag="plus"):
    @property
    def times(self) -> str:
        return "+"


class BoundedTimes(RepeatedFormat, tag="repeat"):
    min: int
    max: int
    """-1: any number."""

    @property
    def times(self) -> str:
        return f"{{{self.min},{self.max if self.max >= 0 else ''}}}"


class Tag(TagFormat, tag="tag"):
    begin: str
    content: AnyFormat
    end: str | tuple[str, ...]

    def body(self, lark: Lark) -> str:
        return f"{json.dumps(self.begin)} {self.after(lark)}"

    def after(self, lark: Lark) -> str:
        """The Lark expression of the content and the end, without the begin."""
        ends = (self.end,) if isinstance(self.end, str) else self.end
        return self.content.written(lark, ends if all(ends) else ())


class TriggeredTags(TagFormat, tag="triggered_tags"):
    triggers: tuple[str, ...]
    tags: tuple[Tag, ...]
    at_least_one: bool = False
    """There is at least one tag, and the first one comes without text before it."""
    stop_after_first: bool = False
    excludes: tuple[str, ...] = ()

    @property
    def is_open(self) -> bool:
        return not (self.at_least_one and self.stop_after_first)

    def body(self, lark: Lark) -> str:
        return _one_of(each.body(lark) for each in self.tags)

    def written(self, lark: Lark, ends: Sequence[str]) -> str:
        if not self.is_open:
            return super().written(lark, ends)
        text = lark.text(self.excludes)
        rest = lark.upto(text, ends)
        triggered = _one_of(self._triggered(lark, text))
        if self.stop_after_first:
            return _one_of([f"{triggered} {_closing(ends)}", rest])
        first = self.body(lark) if self.at_least_one else ""
        return f"{first} {triggered}* {rest}"

    def _triggered(self, lark: Lark, text: str) -> Iterator[str]:
        """For each trigger, the Lark expression of the text up to it and the rest of its tags."""
        of_trigger: dict[str, list[Tag]] = {}
        for tag in self.tags:
            trigger = next((each for each in self.triggers if each and tag.begin.startswith(each)), None)
            if trigger is None:
                raise ValueError(f"no trigger begins {tag.begin!r}")
            of_trigger.setdefault(trigger, []).append(tag)
        for trigger, tags in of_trigger.items():
            behind = (f"{_literal(each.begin.removeprefix(trigger))} {each.after(lark)}" for each in tags)
            yield f"{lark.upto(text, [trigger])} {_one_of(behind)}"


class TagsWithSeparator(TagFormat, tag="tags_with_separator"):
    tags: tuple[Tag, ...]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False

    def body(self, lark: Lark) -> str:
        tag = lark.rule(_one_of(each.body(lark) for each in self.tags))
        several = tag if self.stop_after_first else f"{tag} ({_literal(self.separator)} {tag})*"
        return several if self.at_least_one else f"({several})?"


AnyFormat = (
    ConstString
    | JsonSchema
    | Regex
    | Grammar
    | AnyText
    | InOrder
    | Either
    | AtMostOnce
    | AnyTimes
    | OnceOrMore
    | BoundedTimes
    | Tag
    | TriggeredTags
    | TagsWithSeparator
)


class Root(msgspec.Struct, frozen=True):
    format: AnyFormat


def _one_of(expressions: Iterable[str]) -> str:
    found = list(expressions)
    if not found:
        raise ValueError("there is nothing to choose from")
    return f"({' | '.join(found)})"


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""


def _closing(ends: Sequence[str]) -> str:
    return _one_of(map(json.dumps, ends)) if ends else ""
