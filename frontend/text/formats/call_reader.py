"""Rules that read one call in each of the bodies that formats declare, over text that arrives in pieces.

A call is emitted once its name is known. Arguments are emitted as JSON text while they arrive.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

from headrace.frontend.text.formats.declaration import CallFormat, known_formats
from headrace.frontend.text.formats.events import AnswerPart
from headrace.frontend.text.formats.markers import make_markers
from headrace.frontend.text.formats.parameters import Parameters
from headrace.frontend.text.formats.pieces import (
    KEY,
    KEY_BEGUN,
    LONGEST_NAME,
    NO_STOPS,
    SPACE,
    PieceReader,
    Reads,
    Stops,
    as_it_is,
)
from headrace.frontend.text.formats.values import (
    NoCallError,
    as_id,
    as_json,
    as_text,
    element_value,
    nest_as_json,
    object_of,
    within_text,
)

_NAME = re.compile(r"[\w.\-/ ]{1,256}")
MOST_SPACE = 1024
"""Most characters of white space that are held back until it is known whether a call follows."""
_FIRST_ARGUMENT, _ARGUMENT_BEGUN = re.compile(r"\s*(?:\)|[^\W\d]\w*\s*=[^=])"), re.compile(r"\s*(?:\w+\s*=?)?")
"""What follows the bracket of a call in Python with named arguments or none, and the beginning of it."""
_INDEX = re.compile(r":\d+\s*$")
"""The end of a name that is a call's id."""
_ID_OF_A_SLIP = re.compile(r"(?:functions[._:])?(.+?)[_:]\d+")
_QUOTES = ('"', "'", "")
"""What models write for a quote in a marker."""
_ATTRIBUTE = ' name="'
_WITHIN_STRING = make_markers(('"', '\\"', "\\\\"))
"""The end of a JSON string, and what begins like one."""
_DEEPEST = 64
"""Most elements of an argument's value within one another."""
_OTHER_KEYS = ("type", "id")
"""Keys that may come before a call's name. Any other key means that the object is no call."""
_WRAPPERS = ("function", "tool_calls")
"""Keys of objects around calls."""
_MOST_AROUND = 2
"""Most of those, within one another."""
_NAME_SLIPS = ("tool", "function", "tool_name", "function_name")
_ARGUMENT_SLIPS = ("args", "input", "params", "kwargs", "tool_input", "arguments", "parameters")
"""Keys that models write for a call's name and arguments instead of the format's. What has them is a call if it names
one of the request's tools."""
_AROUND_ARGUMENTS = (*_ARGUMENT_SLIPS, "properties")
"""Parameters that models write around all arguments of a call whose parameters have markers of their own."""


class Spelling(NamedTuple):
    """A way to write the markers around a name."""

    before: str
    quote: str
    """What stands for the quotes of these and further markers."""
    after: str


@functools.lru_cache(maxsize=256)
def spellings(before: str, after: str) -> tuple[Spelling, ...]:
    """The ways in which models write the markers around a name: with other quotes or none, and with the name as an
    attribute of its tag (`<function name="f">`) or as its value (`<function=f>`), as other families do. Of two that
    begin alike, the longer is first."""
    named, own = (
        _ATTRIBUTE,
        tuple(Spelling(before.replace('"', each), each, after.replace('"', each)) for each in _QUOTES),
    )
    if '"' not in before:
        own = own[:1]
    if before.endswith(named) and after.removeprefix('"'):
        return (*own, Spelling(before.removesuffix(named) + "=", '"', after.removeprefix('"')))
    if not (before.endswith("=") and before[-2:-1].isalpha()):
        return own
    attributes = (Spelling(before[:-1] + named.replace('"', each), each, each + after) for each in _QUOTES)
    return (*own, *attributes)


@functools.cache
def as_other_families() -> CallFormat:
    """How Qwen3-Coder writes calls, and Llama 3.1 with an object for the parameters. Models of formats with JSON do so
    too."""
    calls = known_formats()["qwen3_xml"].calls
    assert calls is not None
    return calls


def stops_of(calls: CallFormat) -> Stops:
    """The markers that end arguments in JSON which are broken, so that the calls behind them are read. A string may
    have markers as its text, but no line break beside them, and behind a call's beginning no name in quotes: they would
    be escaped."""
    begin, end = calls.call
    outside = tuple(filter(None, (begin, end, *(calls.section or ()))))
    name = "" if calls.name_is_key else f'{calls.name_keys[0]}"'
    objects = ("\n{", "\n[", f'{{"{name}', f'[{{"{name}')
    nexts = [f"{begin}{each}" for each in objects] if calls.body == "json" else [begin]
    if begin and end:
        return Stops(outside, (f"\n{end}", f"{end}\n{begin}", *(f"{end}{each}" for each in nexts)))
    return Stops(outside, tuple(f"}}{each}" for each in nexts) if begin else ())


class CallReader(PieceReader):
    """Reads the bodies of calls. `parser.py:OutputParser` finds them, and the markers around them."""

    def __init__(
        self, calls: CallFormat | None, tools: Sequence[Mapping[str, Any]], *, reads_slips: bool = True
    ) -> None:
        super().__init__()
        self._calls, self._tools, self._reads_slips = calls, tools, reads_slips
        self._stops_of_calls = stops_of(calls) if calls is not None and reads_slips else NO_STOPS
        self._is_loose = False
        """The markers of the call that is being read are not the format's."""
        self._space = ""
        """White space at the end of the content so far; dropped if a call follows."""
        self._has_said = False
        """Whether the content is more than white space."""
        self._events: list[AnswerPart] = []
        self.call = -1
        """Index of the call that is being read, or was read last in the current section; -1 outside of calls. Only
        calls with known names count."""
        self.num_calls = 0
        self.has_open_call = False
        """Whether the arguments of the last call are still incomplete."""
        self._is_whole = False
        """The answer has ended where the model ended it."""
        self.is_thinking = False
        """Whether reasoning has begun and not ended."""

    def _accept_marker(self, marker: str) -> Reads:
        """Takes the marker if it comes next. If the answer ends within or after a call, takes an incomplete one too."""
        if (yield from self._accept(marker)):
            return True
        if not (self.call >= 0 and self._ended and self._text and marker.startswith(self._text)):
            return False
        self._take(len(self._text))
        return True

    def _body(self) -> Reads:
        calls = self._calls
        assert calls is not None
        yield from self._skip_space()
        start = yield from self._peek(1)
        body = calls.body
        is_fenced = body not in ("pythonic", "named_json") and (yield from self._accept_fence())
        if is_fenced:
            start = yield from self._peek(1)
        if calls.is_either:
            body = "json" if start in ("{", "[") or (start == "<" and not calls.name[0]) else "xml"
        elif body in ("xml", "elements", "escaped") and start in ("{", "["):
            body = "json"  # as other models write calls: no name begins so
        if body == "json" and start == "<" and self._reads_slips:
            yield from self._xml_call(as_other_families())
            yield from self._skip_space()
            yield from self._accept_marker(as_other_families().after_arguments)
        elif body == "pythonic":
            yield from (self._list(self._python_call) if start == "[" else self._python_call())
        elif body == "xml":
            yield from self._xml_call(calls)
        elif body == "elements":
            yield from self._elements_call(calls)
        elif body == "escaped":
            yield from self._escaped_call(calls)
        elif start == "[" and not calls.name[0].startswith("["):
            yield from self._list(self._json_call)
        elif start == "{" and body == "named_json" and calls.lists:
            yield from self._json_call()
        elif body == "named_json":
            yield from self._named_call(calls)
        else:
            yield from self._json_call()
        if is_fenced:
            yield from self._skip_space()
            yield from self._accept("```")

    def _accept_fence(self) -> Reads:
        """Takes the beginning of a fence, which models write around what a call's markers enclose."""
        found = (yield from self._accept("```json")) or (yield from self._accept("```"))
        yield from self._skip_space()
        return found

    def _begin(self, name: str, id: str = "") -> int:
        calls = self._calls
        assert calls is not None
        name = name.strip()
        needs_tool = self._is_loose
        if calls.name_is_id:
            needs_tool = needs_tool or _INDEX.search(name) is None
            id, name = name, self._name_in(name)
        name = self._undoubled(name)
        if not name or (needs_tool and not self._may_name(name)):
            raise NoCallError
        if calls.space_is_content and self._has_said:
            self._events.append(AnswerPart(content=self._space))
        self._space, self._raw, self.call, self.is_thinking = "", None, self.num_calls, False
        self._events.append(AnswerPart(call=self.call, name=name, id=id, id_length=calls.id_length))
        self.num_calls += 1
        self.has_open_call = True
        return self.call

    def _name_in(self, id: str) -> str:
        """The name in a call's id, `functions.NAME:INDEX`. Models write other signs between its parts, where what is
        left then names a tool."""
        name = _INDEX.sub("", id.split(".", 1)[-1])
        found = _ID_OF_A_SLIP.fullmatch(id)
        is_slip = found is not None and not self._may_name(name) and self._may_name(found[1])
        return found[1] if is_slip and found is not None else name

    def _unquoted(self, name: str) -> str:
        """A tool's name without the quotes that models write around it."""
        inner = name.strip()[1:-1]
        return inner if name.strip() in (f'"{inner}"', f"'{inner}'") and self._may_name(inner) else name

    def _undoubled(self, name: str) -> str:
        """A tool's name, where it is written as a member of what is called so."""
        assert self._calls is not None
        outer, _, inner = name.partition(".")
        return outer if self._calls.names_are_doubled and outer == inner and not self._is_tool(name) else name

    def _may_name(self, name: str) -> bool:
        """Whether a call that lacks the format's markers may have this name."""
        if not self._tools:
            return self._calls is not None and (self._calls.is_bare or self._calls.body in ("xml", "elements"))
        return self._is_tool(name)

    def _is_tool(self, name: str) -> bool:
        return any(each["function"]["name"] == name for each in self._tools)

    def _arguments(self, call: int, text: str) -> None:
        self._events.append(AnswerPart(call=call, arguments=text))

    def _more_text(self, call: int) -> Callable[[str], None]:
        """A function that emits text as a part of a JSON string."""
        return lambda text: self._arguments(call, within_text(text))

    def _list(self, read_one: Callable[[], Reads]) -> Reads:
        yield from self._expect("[")
        while True:
            yield from self._skip_space()
            if (yield from self._accept("]")):
                return
            yield from read_one()
            self.has_open_call = False
            yield from self._skip_space()
            yield from self._accept(",")

    def _json_call(self, depth: int = 0) -> Reads:
        """An object with a name and arguments, in any order. A call begins once its name and the beginning of its
        arguments are known. Without arguments it is one only in formats whose calls need a marker: other objects may
        have a name too. depth: how many objects are around it."""
        calls = self._calls
        assert calls is not None
        yield from self._expect("{")
        if (yield from (self._keyed_call() if calls.name_is_key else self._doubled_braces(depth))):
            return
        call, name, held, id = -1, None, "", ""
        num_calls, needs_arguments, is_slip = self.num_calls, calls.is_bare or self._is_loose, False
        nexts = ("{", "]", calls.separator.strip()[:1] or "{")
        while True:
            yield from self._skip_space()
            if (yield from self._accept("}")) or (call >= 0 and (yield from self._peek(1)) in nexts):
                break  # without the brace, where another call or the end of the list follows
            try:
                said, has_quotes = yield from self._key(needs_quotes=not self._reads_slips)
                is_wrapper = name is None and (yield from self._wrapped_calls(said, depth))
                key = said if is_wrapper else self._meant_key(said, name, needs_arguments=needs_arguments)
                is_slip = is_slip or key != said or not has_quotes
                self._check_slip(name if is_slip else None)
                if is_wrapper:
                    held = "{}"
                elif key in calls.name_keys and name is None:
                    name = yield from self._call_name(needs_arguments=needs_arguments, is_slip=is_slip)
                    if held:
                        call = self._begin(name, id)
                        self._arguments(call, held)
                elif key in calls.argument_keys and name is None:
                    held = object_of((yield from self._json_whole()))
                elif key in calls.argument_keys and not held:
                    held = "{}"
                    call = yield from self._json_arguments(name or "", id)
                elif key in calls.id_keys and name is None:
                    id = as_id((yield from self._json_whole()))
                elif call < 0 and key not in _OTHER_KEYS:
                    raise NoCallError
                else:
                    yield from self._json_whole()
            except NoCallError:
                if self._ended and self.num_calls == num_calls and name is not None and not needs_arguments:
                    self._begin(name)
                raise
            yield from self._skip_space()
            yield from self._accept(",")
        if call < 0 and self.num_calls == num_calls:
            call = self._bare_name(None if needs_arguments else name, id)
        if not held:
            self._arguments(call, "{}")

    def _meant_key(self, said: str, name: str | None, *, needs_arguments: bool) -> str:
        """The format's key for what a model writes in an object. name: the call's, if it came before. Arguments before
        the name are held back, so a slip there is none in what may be another object."""
        calls = self._calls
        assert calls is not None
        if said in (*calls.name_keys, *calls.argument_keys, *calls.id_keys, *_OTHER_KEYS):
            return said
        if said in _NAME_SLIPS and name is None:
            return calls.name_keys[0]
        is_arguments = said in _ARGUMENT_SLIPS and (name is not None or not needs_arguments)
        return calls.argument_keys[0] if is_arguments else said

    def _check_slip(self, name: str | None) -> None:
        """Raises NoCallError for the name of a call with a slip that is known and no tool's."""
        if name is not None and not self._is_tool(name):
            raise NoCallError

    def _doubled_braces(self, depth: int) -> Reads:
        """Reads a call in a second pair of braces, as templates have them that show one. Returns whether that is so."""
        yield from self._skip_space()
        if depth == _MOST_AROUND or (yield from self._peek(1)) != "{":
            return False
        yield from self._json_call(depth + 1)
        yield from self._skip_space()
        yield from self._accept("}")
        return True

    def _wrapped_calls(self, key: str, depth: int) -> Reads:
        """Reads calls within a further object, as OpenAI's messages have them. Returns whether `key` is that of one."""
        if key not in _WRAPPERS or depth == _MOST_AROUND or (start := (yield from self._peek(1))) not in ("{", "["):
            return False
        inner = functools.partial(self._json_call, depth + 1)
        yield from (self._list(inner) if start == "[" else inner())
        return True

    def _bare_name(self, name: str | None, id: str) -> int:
        """Begins a call without arguments."""
        if name is None:
            raise NoCallError
        return self._begin(name, id)

    def _keyed_call(self) -> Reads:
        """The rest of an object {name: arguments}. Returns True."""
        yield from self._skip_space()
        name, has_quotes = yield from self._key(needs_quotes=not self._reads_slips)
        if not (has_quotes or self._is_tool(name)):
            raise NoCallError
        yield from self._json_arguments(name)
        yield from self._skip_space()
        if not (yield from self._accept("}")) and (yield from self._peek(1)) not in (",", "]"):
            raise NoCallError
        return True

    def _call_name(self, *, needs_arguments: bool, is_slip: bool) -> Reads:
        """A call's name, also without quotes. Raises NoCallError if it must be a tool's and is not."""
        has_quotes = (yield from self._peek(1)) in ('"', "'")
        if not has_quotes:
            name = yield from self._word()
        else:
            name = yield from (self._json_name() if needs_arguments or is_slip else self._json_string())
        if (is_slip or not has_quotes) and not (self._reads_slips and self._is_tool(name)):
            raise NoCallError
        return name

    def _json_name(self) -> Reads:
        """The name of what may be a call; another object's may be long, and must not be held back."""
        quote = yield from self._peek(1)
        while (at := self._text.find(quote, 1)) < 0 and len(self._text) <= LONGEST_NAME and not self._ended:
            yield
        if not 0 < at <= LONGEST_NAME:
            raise NoCallError
        name = yield from self._json_string()
        if self._is_loose and not self._may_name(name):
            raise NoCallError
        return name

    def _json_arguments(self, name: str, id: str = "") -> Reads:
        """Emits a call, and its arguments while they arrive; once complete if the object is written as a JSON string.
        Returns the call. Raises NoCallError for arguments that are no object."""
        if (yield from self._begins_object()):
            call = self._begin(name, id)
            stops = NO_STOPS if self._is_loose else self._stops_of_calls
            yield from self._json_value(lambda text: self._arguments(call, text), told=as_it_is, stops=stops)
            return call
        arguments = object_of((yield from self._json_whole()))
        call = self._begin(name, id)
        self._arguments(call, arguments)
        return call

    def _begins_object(self) -> Reads:
        """Whether an object comes next. Raises NoCallError if what it begins with is no key."""
        while (yield from self._peek(1)) == "{":
            inner = self._text[1:].lstrip(SPACE)
            if inner[:1] in ('"', "'", "}") or KEY.match(inner):
                return True
            is_open = len(self._text) <= MOST_SPACE and (inner == "" or KEY_BEGUN.fullmatch(inner))
            if self._ended and is_open:
                return True
            if self._ended or not is_open:
                raise NoCallError
            yield
        return False

    def _named_call(self, calls: CallFormat) -> Reads:
        if calls.name[0]:
            yield from self._expect(calls.name[0])
        name = yield from self._name_before("{")
        call = self._begin(name.removesuffix("[ARGS]").split("[CALL_ID]")[0])
        yield from self._skip_space()
        # Models write a fence that the format of an earlier version had.
        is_fenced = yield from self._accept_fence()
        if (yield from self._peek(1)) == '"':
            self._arguments(call, object_of((yield from self._json_whole())))
            return
        if (yield from self._peek(1)) != "{":
            self._arguments(call, "{}")
            return
        stops = self._stops_of_calls if calls.section is None else Stops(calls.call[1:], calls.call[1:])
        yield from self._json_value(lambda text: self._arguments(call, text), told=as_it_is, stops=stops)
        if is_fenced:
            yield from self._skip_space()
            yield from self._accept("```")

    def _python_call(self) -> Reads:
        if self._is_loose:
            yield from self._expect_tool()
        name = yield from self._short_until("(")
        if not _NAME.fullmatch(name.strip()):
            raise NoCallError
        call, separator = self._begin(name), "{"
        while True:
            yield from self._skip_space()
            if (yield from self._accept(")")):
                break
            key = yield from self._short_until("=")
            self._arguments(call, f"{separator}{as_text(key.strip())}: ")
            separator = ", "
            yield from self._skip_space()
            if (yield from self._peek(1)) in ("'", '"'):
                self._arguments(call, '"')
                yield from self._python_text(self._more_text(call))
                self._arguments(call, '"')
                yield from self._skip_space()
                if (yield from self._peek(1)) not in (",", ")"):
                    raise NoCallError
            else:
                self._arguments(call, (yield from self._python_value()))
            yield from self._accept(",")
        self._arguments(call, "{}" if separator == "{" else "}")

    def _expect_tool(self) -> Reads:
        """Raises NoCallError unless one of the tools is called next with named arguments: other code may be meant for
        the user, and must not be held back."""
        names = [f"{each['function']['name']}(" for each in self._tools]
        while not (found := [name for name in names if self._text.startswith(name)]):
            if self._ended or not any(name.startswith(self._text) for name in names):
                raise NoCallError
            yield
        while not _FIRST_ARGUMENT.match(self._text, len(found[0])):
            rest = self._text[len(found[0]) :]
            if self._ended or len(rest) > LONGEST_NAME or not _ARGUMENT_BEGUN.fullmatch(rest):
                raise NoCallError
            yield

    def _parameters_of(self, name: str) -> Parameters:
        name, functions = self._undoubled(name), (each["function"] for each in self._tools)
        schemas = [each.get("parameters") or {} for each in functions if each["name"] == name]
        return Parameters(schemas[-1] if schemas else {})

    def _xml_call(self, calls: CallFormat) -> Reads:
        before_name, after_name, before_value, _ = calls.parameter
        if not any(calls.name) and (yield from self._name_with_object()):
            return
        if calls.kind and (yield from self._accept(calls.kind)):
            yield from self._short_until(calls.name[0])
            spelling = Spelling(calls.name[0], '"', calls.name[1])
        else:
            spelling = yield from self._accept_spelt(*calls.name)
        if spelling is None:
            raise NoCallError
        name = yield from self._name_before("<", spelling.after)
        if calls.number[1]:
            yield from self._short_until(calls.number[1])
        name = self._unquoted(name)
        if calls is not self._calls and not self._is_tool(name.strip()):
            raise NoCallError
        call, separator, said = self._begin(name), "{", set[str]()
        parameters = self._parameters_of(name.strip())
        while True:
            yield from self._skip_space()
            if not said and (yield from self._peek(1)) == "{":
                yield from self._json_value(lambda text: self._arguments(call, text), told=as_it_is)
                return
            if (spelling := (yield from self._accept_spelt(before_name, after_name))) is None:
                break
            key = (yield from self._short_until(spelling.after)).strip()
            types = parameters.types(key)
            if before_value:
                yield from self._skip_space()
                said_types = yield from self._value_kind(calls, spelling.quote)
                types = types or said_types
                if not (yield from self._accept_marker(before_value)):
                    raise NoCallError
            if not said and key in _AROUND_ARGUMENTS and parameters.names and key not in parameters.names:
                space = yield from self._skip_space()
                if (yield from self._peek(1)) == "{":
                    members = yield from self._wrapped_arguments(calls, key, types, parameters.names)
                    if members:
                        self._arguments(call, separator + members)
                        separator = ", "
                    continue
                self._text = space + self._text
            self._arguments(call, f"{separator}{as_text(key)}: ")
            separator = ", "
            others = parameters.names - said
            said.add(key)
            yield from self._xml_value(call, calls, types, others)
        if self._is_over and not self._is_whole:
            raise NoCallError
        self._arguments(call, "{}" if separator == "{" else "}")

    def _name_with_object(self) -> Reads:
        """Reads a call whose arguments are written as an object behind a name without markers, also in parentheses.
        Returns whether one comes next; raises NoCallError if its name is no tool's."""
        try:
            name = (yield from self._short_before("{", ("<",))).strip(SPACE + "(")
        except NoCallError:
            return False
        if not self._may_name(name):
            raise NoCallError
        yield from self._json_arguments(name)
        yield from self._skip_space()
        yield from self._accept(")")
        return True

    def _accept_spelt(self, before: str, after: str) -> Reads:
        """Takes the marker before a name. Returns its spelling; None if the marker does not come next."""
        for each in spellings(before, after):
            if (yield from self._accept_marker(each.before)):
                return each
        return None

    def _name_before(self, arguments: str, after_name: str | None = None) -> Reads:
        """Takes a call's name up to the marker after it (by default, the format's), and that; without one, up to how
        arguments begin. Raises NoCallError if the call ends before."""
        calls = self._calls
        assert calls is not None
        after_name = calls.name[1] if after_name is None else after_name
        marker, ends = after_name or arguments, (*calls.call, *(calls.section or ()), calls.after_arguments)
        name = yield from self._short_before(marker, [each for each in ends if each and each not in marker])
        self._take(len(after_name))
        return name

    def _value_kind(self, calls: CallFormat, quote: str) -> Reads:
        """The types that a parameter's markers say its value has; empty if they say none."""
        for type_, said in calls.value_kinds:
            if (yield from self._accept(said.replace('"', quote))):
                yield from self._skip_space()
                return frozenset(["string"] if type_ == "string" else ["object", "number"])
        return frozenset[str]()

    def _wrapped_arguments(self, calls: CallFormat, key: str, types: frozenset[str], names: Set[str]) -> Reads:
        """Reads an object that is the value of a parameter which the tool does not have, as models write the arguments
        themselves into one. Returns its members or, if they are not the tool's parameters, the parameter as one."""
        text = yield from self._whole_value(calls, names, is_nest="string" not in types)
        said = as_json(text.strip(SPACE))
        value = json.loads(said)
        if isinstance(value, dict) and value.keys() <= names:
            return said[1:-1].strip(SPACE)
        return f"{as_text(key)}: {as_text(text) if 'string' in types else said}"

    def _xml_value(self, call: int, calls: CallFormat, types: frozenset[str], others: Set[str]) -> Reads:
        """Emits a string while it arrives, without the line breaks around it; other values once they are complete. A
        value of unknown type is a string unless it is an object or a list. others: the tool's further parameters."""
        after, has_lines = calls.parameter[3], calls.values_have_lines
        if has_lines:
            yield from self._accept("\n")
        space = "" if "string" in types else (yield from self._skip_space())
        if calls.quotes[0] and (yield from self._accept(calls.quotes[0])):
            yield from self._quoted(call, calls.quotes[1], types)
            yield from self._skip_space()
            yield from self._accept_marker(after)
            return
        is_nest = "string" not in types and (yield from self._peek(1)) in ("{", "[")
        if "string" in types or not (types or is_nest):
            self._text = space + self._text
            if "null" in types and (yield from self._accept_null(("\n" if has_lines else "") + after)):
                self._arguments(call, "null")
                return
            self._arguments(call, '"')
            yield from self._until_end_of_value(calls, others, self._more_text(call), is_text=True)
            self._arguments(call, '"')
            return
        text = yield from self._whole_value(calls, others, is_nest=is_nest)
        said = as_json(text.strip(SPACE))
        self._arguments(call, as_text(space + text) if not types and said.startswith('"') else said)

    def _whole_value(self, calls: CallFormat, others: Set[str], *, is_nest: bool) -> Reads:
        """Takes a parameter's value and the marker after it, and returns the value's text."""
        parts: list[str] = []
        if is_nest:  # a string within may contain the marker
            after = calls.parameter[3]
            yield from self._nest(
                parts.append, make_markers((f"\n{after}" if calls.values_have_lines else after, after))
            )
        yield from self._until_end_of_value(calls, others, parts.append)
        return "".join(parts)

    def _until_end_of_value(
        self, calls: CallFormat, others: Set[str], give: Callable[[str], None], *, is_text: bool = False
    ) -> Reads:
        """Passes a parameter's value to `give` and takes the marker after it. A model may leave that out: then the next
        parameter's marker, or that after the arguments, ends the value."""
        after, line = calls.parameter[3], "\n" if calls.values_have_lines else ""
        nexts = [each.before for each in spellings(*calls.parameter[:2])]
        begun = [each for each in (*nexts, calls.after_arguments or calls.call[1]) if each]
        slips = [f"\n{each}" for each in begun] + ([] if line else begun)
        ends, reads = make_markers((line + after, after, *slips)), self._until_end_of_text if is_text else self._until
        while True:
            found = yield from reads(ends, give)
            if found is None and not self._is_whole:
                raise NoCallError
            if found not in slips:
                return
            marker = found.removeprefix("\n")
            if (yield from self._ends_value(calls, marker, others)):
                self._text = marker + self._text
                return
            give(found)

    def _ends_value(self, calls: CallFormat, marker: str, others: Set[str]) -> Reads:
        """Whether a marker within a value ends it, by what follows: one of the tool's other parameters, or the end of
        the call."""
        after = next((each.after for each in spellings(*calls.parameter[:2]) if each.before == marker), None)
        if after is not None:
            while (at := self._text.find(after)) < 0 and len(self._text) <= LONGEST_NAME and not self._ended:
                yield
            return self._text[: max(at, 0)].strip() in others
        nexts = {*calls.call, *(calls.section or ()), calls.name[0]} - {"", marker}
        while (rest := self._text.lstrip(SPACE)) == "" or any(each.startswith(rest) for each in nexts):
            if self._ended or rest in nexts or len(self._text) > MOST_SPACE:
                break
            yield
        return rest == "" or rest.startswith(tuple(nexts))

    def _accept_null(self, after: str) -> Reads:
        """Takes null or None and the marker after it, for a value that the schema allows to be null."""
        for word in ("null", "None"):
            if (yield from self._accept(word + after)):
                return True
        return False

    def _elements_call(self, calls: CallFormat) -> Reads:
        begin, after_name, _, _ = calls.parameter
        yield from self._expect(calls.name[0])
        name = yield from self._name_before("<")
        call, separator = self._begin(name), "{"
        parameters = self._parameters_of(name.strip())
        while True:
            yield from self._skip_space()
            if not (yield from self._accept_marker(begin)):
                break
            if (yield from self._peek(1)) == "/":  # of the marker after the arguments
                self._text = begin + self._text
                break
            key = (yield from self._short_until(after_name)).strip()
            begun = f"{separator}{as_text(key)}: "
            if parameters.types(key) == {"string"}:
                self._arguments(call, f'{begun}"')
                yield from self._element_text(calls, key, self._more_text(call))
                self._arguments(call, '"')
            else:
                value = element_value((yield from self._element(calls, key)), parameters.schema(key))
                self._arguments(call, begun + json.dumps(value, ensure_ascii=False))
            separator = ", "
        if self._is_over and not self._is_whole:
            raise NoCallError
        self._arguments(call, "{}" if separator == "{" else "}")

    def _element_text(self, calls: CallFormat, name: str, give: Callable[[str], None]) -> Reads:
        """Passes an element's text to `give` while it arrives, and takes the element's end."""
        begin, after_name, _, end = calls.parameter
        closing = end.removeprefix(begin) + name + after_name
        while (found := (yield from self._until_end_of_text(make_markers((begin,)), give))) is not None:
            if (yield from self._accept(closing)):
                return
            if self._ended and closing.startswith(self._text):
                break
            give(found)
        raise NoCallError

    def _element(self, calls: CallFormat, name: str, depth: int = 0) -> Reads:
        """The rest of an element: its text, or pairs of its elements' names and what those are."""
        begin, after_name, _, end = calls.parameter
        closing = end.removeprefix(begin)
        parts, inner = list[str](), list[tuple[str, Any]]()
        while (yield from self._until(make_markers((begin,)), parts.append)) is not None:
            if (yield from self._accept(closing + name + after_name)):
                return inner or "".join(parts)
            if depth == _DEEPEST or (yield from self._peek(len(closing))) == closing:
                found = yield from self._until(make_markers((calls.after_arguments,)), lambda text: None)
                self._text = (found or "") + self._text
                break
            key = yield from self._short_until(after_name)
            inner.append((key, (yield from self._element(calls, key, depth + 1))))
        raise NoCallError

    def _escaped_call(self, calls: CallFormat) -> Reads:
        if not (yield from self._accept(calls.name[0])):  # models leave out the word before the colon
            yield from self._expect(calls.name[0][-1])
        name = yield from self._name_before("{")
        call, separator = self._begin(name), "{"
        parameters = self._parameters_of(name.strip())
        while True:
            yield from self._skip_space()
            if (yield from self._accept("}")):
                break
            if calls.call[1] and (yield from self._accept(calls.call[1])):  # without the brace
                self._text = calls.call[1] + self._text
                break
            key = (yield from self._short_before(":", calls.call)).strip()
            self._take(1)
            self._arguments(call, f"{separator}{as_text(key)}: ")
            separator = ", "
            yield from self._escaped_value(call, calls.escape, parameters.types(key))
            yield from self._skip_space()
            yield from self._accept(",")
        self._arguments(call, "{}" if separator == "{" else "}")

    def _escaped_value(self, call: int, escape: str, types: frozenset[str]) -> Reads:
        """Emits a string while it arrives; other values once they are complete."""
        if (yield from self._accept_marker(escape)):
            if "null" in types and (yield from self._accept_null(escape)):
                self._arguments(call, "null")
                return
            yield from self._quoted(call, escape, types)
            return
        if (yield from self._peek(1)) in ("{", "["):
            self._arguments(call, (yield from self._escaped_nest(escape)))
            return
        if (yield from self._peek(1)) == '"':
            self._arguments(call, (yield from self._json_whole()))
            return
        scalar = yield from self._scalar()
        if self._is_over:
            raise NoCallError
        self._arguments(call, as_json(scalar))

    def _quoted(self, call: int, end: str, types: frozenset[str]) -> Reads:
        """Emits the value before the marker `end`: a string while it arrives, another once it is complete."""
        parts: list[str] = []
        is_text, ends = not types or "string" in types, make_markers((end,))
        if is_text:
            self._arguments(call, '"')
            found = yield from self._until_end_of_text(ends, self._more_text(call))
        else:
            found = yield from self._until(ends, parts.append, is_value=True)
        if found is None:
            raise NoCallError
        self._arguments(call, '"' if is_text else as_json("".join(parts).strip(SPACE)))

    def _escaped_nest(self, escape: str) -> Reads:
        """An object or a list, converted to JSON; models also write JSON itself, whose strings may have brackets."""
        parts: list[str] = []
        markers, depth = make_markers((escape, '"', "{", "}", "[", "]")), 0
        while True:
            found = yield from self._until(markers, parts.append)
            if found is None:
                raise NoCallError
            if found == escape or (found == '"' and (yield from self._accept_rest(escape, parts))):
                text: list[str] = []
                if (yield from self._until(make_markers((escape,)), text.append)) is None:
                    raise NoCallError
                parts.append(as_text("".join(text)))
                continue
            parts.append(found)
            if found == '"':
                while (inner := (yield from self._until(_WITHIN_STRING, parts.append))) not in (None, '"'):
                    parts.append(inner)
                parts.append('"')
                continue
            depth += 1 if found in "{[" else -1
            if depth == 0:
                return nest_as_json("".join(parts))

    def _accept_rest(self, escape: str, parts: list[str]) -> Reads:
        """Whether a quote that was found is the one within `escape`: its beginning ends `parts`, from which it is
        removed, and its end is taken."""
        before, quote, after = escape.partition('"')
        count = len(before)
        if not quote or not "".join(parts[-count:]).endswith(before) or not (yield from self._accept(after)):
            return False
        while count:
            last = parts.pop()
            parts += [last[:-count]] if len(last) > count else []
            count -= min(count, len(last))
        return True
