"""The declaration of a format: these structs are the schema of the YAML files in this folder and of users' own.

reasoning:              text before the answer
  begin: <think>
  end: </think>
calls:                  tool calls
  call: [<tool_call>, </tool_call>]
  body: json            {"name": ..., "arguments": {...}}
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self, get_args

import msgspec

from headrace.ipc.failure import HeadraceError
from headrace.ipc.process.regular_files import read_file
from headrace.ipc.struct_types import threadsafe

FOLDER = Path(__file__).parent
Pair = tuple[str, str]
"""The markers before and after something; either may be empty."""
_NOT_HERE = {
    "hf": "it reads answers by the response template of the model's tokenizer_config.json. A format's name, or a "
    "declaration in a file that ends in .yaml, says how the model's calls and reasoning are written"
}
"""Names of vLLM's for which there is no declaration, and why."""
_TAG = re.compile(r"</?\w+>")


class FormatError(HeadraceError, ValueError):
    """A declaration that cannot be read, or an unknown format."""


class ReasoningFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    end: str
    """The marker after the reasoning."""
    begin: str = ""
    """The marker before it; a prompt may end with it."""
    label: str = ""
    """Text that may follow `begin`, before the reasoning."""
    starts_open: bool = False
    """Answers begin inside reasoning, whether or not the prompt ends with `begin`."""
    has_lines: bool = False
    """Line breaks separate the reasoning, and the answer after it, from the markers."""
    also: tuple[Pair, ...] = ()
    """Other markers with which a prompt may open the reasoning."""
    is_content: bool = False
    """The reasoning stays in the content, with its end; `begin`, which the prompt has, is put before it."""

    def __post_init__(self) -> None:
        if not all(end.strip() for end in (self.end, *(each for _, each in self.also))):
            raise ValueError("reasoning needs an end, the text after which the answer comes: it is empty")

    def as_opened_in(self, prompt: str) -> Self:
        """The format with those of its markers that the prompt has last."""
        pairs = ((self.begin, self.end), *self.also)
        begin, end = max(pairs, key=lambda pair: prompt.rfind(pair[0]) if pair[0] else -1)
        return msgspec.structs.replace(self, begin=begin, end=end)

    def is_open_after(self, prompt: str) -> bool:
        """Whether an answer to this prompt begins inside reasoning."""
        opened_at = prompt.rfind(self.begin) if self.begin else -1
        return self.starts_open or opened_at > prompt.rfind(self.end)


class CallFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    body: Literal["json", "named_json", "pythonic", "xml", "elements", "escaped"]
    """json: an object with name and arguments, or a list of them. named_json: a name, then an object of arguments.
    pythonic: [f(a=1), g()], or in a section one call per line. xml: a name, then parameters whose values are text.
    elements: a name, then an element per parameter, which has its name and text or further elements. escaped: a name,
    then {key:value,...} with `escape` around strings."""
    is_either: bool = False
    """A call is written as json or as xml."""
    lists: bool = False
    """One or more calls may be written as a list (json; pythonic in a section; named_json, whose lists hold objects as
    in json)."""
    section: Pair | None = None
    """Markers around all calls."""
    call: Pair = ("", "")
    """Markers around each call; the second may be missing in an answer."""
    also: tuple[Pair, ...] = ()
    """Markers that some models of the family write around calls instead of `section` or, without one, of `call`."""
    loose: tuple[Pair, ...] = ()
    """Markers that models write instead by mistake, or ("", ""), anywhere in an answer (json; pythonic, whose lists
    alone may lack markers). What they enclose is a call only if it names one of the request's tools."""
    separator: str = ""
    """Text between calls."""
    kind: str = ""
    """Optional marker before name[0]. If an answer has it, the name follows it a first time, before name[0] (xml)."""
    name: Pair = ("", "")
    """Markers around a name (named_json, xml, escaped). If the second is empty, the name ends where the arguments
    begin."""
    after_arguments: str = ""
    """Optional marker after the arguments, before the call's end."""
    parameter: tuple[str, str, str, str] = ("", "", "", "")
    """Markers before and after a parameter's name, and before and after its value (xml). For elements, the last stands
    before the name a second time."""
    value_kinds: tuple[Pair, ...] = ()
    """(JSON type or other, text that may follow the name of a parameter of that type): a string's value is text, any
    other JSON (xml). A type in the schema decides where there is one."""
    may_lack_kinds: bool = False
    """The texts of value_kinds may be missing (xml)."""
    number: Pair = ("", "")
    """Markers around a call's number, which follows its name (xml)."""
    quotes: Pair = ("", "")
    """Markers that may stand around a whole value, in which other markers are text (xml)."""
    values_have_lines: bool = False
    """Line breaks separate a value from its markers (xml)."""
    escape: str = ""
    """Marker before and after a string (escaped)."""
    names_are_doubled: bool = False
    """A tool's name may be written NAME.NAME, since templates show tools as members of what they are called."""
    name_keys: tuple[str, ...] = ("name",)
    """Keys of the name in an object (json)."""
    argument_keys: tuple[str, ...] = ("arguments", "parameters")
    """Keys of the arguments in an object (json)."""
    id_keys: tuple[str, ...] = ()
    """Keys of the call's id, which comes before its name (json)."""
    name_is_key: bool = False
    """An object has the name as its only key, and the arguments as its value (json)."""
    is_bare: bool = False
    """An answer may begin with calls that have no marker."""
    name_is_id: bool = False
    """A name is written functions.NAME:INDEX, which is also the call's id."""
    space_is_content: bool = False
    """White space before a call belongs to the content, since the family's template writes nothing between them."""
    ends_answer: bool = False
    """Text after calls is dropped: the family's template has no place for it, and a message's content comes first."""
    id_length: int = 0
    """The length of a call's id if the models' templates require one; 0 if any id will do."""

    @property
    def opener(self) -> str:
        """The marker that calls begin with; empty if they have none."""
        return self.section[0] if self.section else self.call[0]

    def __post_init__(self) -> None:
        if not self.opener and not self.is_bare:
            raise ValueError("calls need a marker (the first of section or of call), or is_bare")
        if self.loose and self.body not in ("json", "pythonic"):
            raise ValueError("loose goes with body json and pythonic")
        if (self.name_is_key or self.id_keys) and (self.body != "json" or self.is_bare):
            raise ValueError("name_is_key and id_keys go with body json and a marker")
        if self.value_kinds and not (self.body == "xml" and all(map(all, self.value_kinds)) and self.parameter[2]):
            raise ValueError("value_kinds are pairs of texts, and go with body xml and a marker before values")
        if any(self.number) and not (self.body == "xml" and all(self.number) and self.name[1]):
            raise ValueError("number is two markers, and goes with body xml and a marker after names")
        if self.is_either and self.body not in ("json", "xml"):
            raise ValueError("is_either goes with body json and xml")
        if (self.body == "xml" or self.is_either) and not (self.parameter[0] and self.parameter[3]):
            raise ValueError("calls of body xml need parameter: [before name, after name, before value, after value]")
        before, after, _, end = self.parameter
        if self.body == "elements" and not (before and after and end.startswith(before) and self.name[1]):
            raise ValueError(
                "calls of body elements need name, and parameter: [before name, after name, '', before the name at the "
                "element's end], whose last begins as its first"
            )
        if self.body == "escaped" and not (self.escape and all(self.name)):
            raise ValueError("calls of body escaped need escape, and name: [before it, after it]")


class ChannelFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Markers of answers that consist of messages with headers (channels.py)."""

    start: str
    """Before a header."""
    channel: str
    """Before a channel's name."""
    message: str
    """Between a header and its text."""
    ends: tuple[str, ...]
    """After a message's text: the first if another message follows, the second after a call."""
    reasoning: tuple[str, ...]
    """Names of the channels that hold reasoning."""
    functions: str
    """The prefix of a call's recipient."""
    constrain: str
    """The end of a call's header, which says that the arguments are JSON."""

    def __post_init__(self) -> None:
        if len(self.ends) < 2 or not self.reasoning:
            raise ValueError("channels need two ends, after a text and after a call, and a channel of reasoning")
        _check_texts(self, "start", "channel", "message", "ends", "reasoning", "functions")


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, cache_hash=True):
    reasoning: ReasoningFormat | None = None
    """How reasoning is written."""
    calls: CallFormat | None = None
    """How tool calls are written."""
    channels: ChannelFormat | None = None
    """Instead of `reasoning` and `calls`."""
    template_marks: tuple[str, ...] = ()
    """Texts that all occur in the chat template of a model that writes this format."""
    left_out: tuple[str, ...] = ()
    """Markers around the answer that are not part of it."""
    headers: tuple[str, ...] = ()
    """Markers of messages' headers. The text between one and the next marker is no part of the answer, which begins
    within a header if such a marker is the prompt's last one."""
    may_have_suffix: bool = False
    """The tokenizer's markers <name> may be written with a suffix, which is the same for all: <name:1a2b3c4d>."""
    same_as: tuple[str, ...] = ()
    """Other names of the format."""

    def __post_init__(self) -> None:
        _check_texts(self, "template_marks", "left_out", "headers", "same_as")

    def as_written(self, prompt: str, tokens: Iterable[str]) -> OutputFormat:
        """The format with the reasoning's markers that this prompt has opened, if it may be one of several pairs, and
        with the suffix that these tokens have at markers, if they may have one."""
        written = self
        if self.reasoning is not None and self.reasoning.also:
            written = msgspec.structs.replace(self, reasoning=self.reasoning.as_opened_in(prompt))
        if not self.may_have_suffix:
            return written
        opener = self.calls.opener if self.calls is not None else self.reasoning.begin if self.reasoning else ""
        spelt = re.compile(re.escape(opener.removesuffix(">")) + r"(:[^\s>]+)>")
        suffix = next((found[1] for each in tokens if (found := spelt.fullmatch(each))), "")
        return msgspec.convert(_with_suffix(msgspec.to_builtins(written), suffix), threadsafe(OutputFormat))


def _with_suffix(declared: Any, suffix: str) -> Any:
    """What is declared, with the suffix at each marker."""
    if isinstance(declared, dict):
        return {key: _with_suffix(value, suffix) for key, value in declared.items()}
    if isinstance(declared, list | tuple):
        return [_with_suffix(each, suffix) for each in declared]
    return _TAG.sub(lambda tag: f"{tag[0][:-1]}{suffix}>", declared) if isinstance(declared, str) else declared


def _check_texts(declared: msgspec.Struct, *names: str) -> None:
    """Raises ValueError, which names the field, for an empty text, which would match everywhere."""
    for name in names:
        value = getattr(declared, name)
        if not all([value] if isinstance(value, str) else value):
            raise ValueError(f"{name} has a text that is empty")


NONE: Mapping[str, OutputFormat] = types.MappingProxyType({})


@functools.cache
def known_formats() -> dict[str, OutputFormat]:
    """The formats that come with Headrace, by name."""
    found = {}
    for path in sorted(FOLDER.glob("*.yaml")):
        declared = _read(path)
        found.update(dict.fromkeys((path.stem, *declared.same_as), declared))
    return found


def load_format(name: str, own: Mapping[str, OutputFormat] = NONE) -> OutputFormat:
    """The format of this name, among a user's `own` first, or in the YAML file of this path. Raises FormatError."""
    if (declared := own.get(name) or known_formats().get(name)) is not None:
        return declared
    if name.endswith((".yaml", ".yml")):
        return _read(Path(name))
    if name in _NOT_HERE:
        raise FormatError(f"{name} is not supported: {_NOT_HERE[name]}")
    raise FormatError(
        f"no output format is called {name!r}; known: {', '.join(sorted({*own, *known_formats()}))}, and a file "
        "that ends in .yaml is read as a declaration"
    )


def format_of_template(
    template: str, own: Mapping[str, OutputFormat] = NONE, *, with_reasoning: bool = False
) -> str | None:
    """The name of the format with calls (or with reasoning) whose template_marks all occur in a chat template; of
    several, the one with the longest marks. None if there is none."""
    found = [
        (sum(map(len, declared.template_marks)), name)
        for name, declared in {**known_formats(), **own}.items()
        if name not in declared.same_as
        and ((declared.reasoning if with_reasoning else declared.calls) or declared.channels)
        and declared.template_marks
        and all(mark in template for mark in declared.template_marks)
    ]
    return max(found)[1] if found else None


def _read(path: Path) -> OutputFormat:
    try:
        return msgspec.yaml.decode(read_file(path), type=threadsafe(OutputFormat))
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from None
    except msgspec.MsgspecError as error:
        raise FormatError(f"{path}: not an output format: {error}{_allowed_at(str(error))}") from None


def _allowed_at(problem: str) -> str:
    """The keys or the values that are allowed at the place that msgspec names; empty if they are no short list."""
    kind: Any = OutputFormat
    place = re.search(r"at `\$\.?([\w.]*)`$", problem)
    for name in filter(None, place[1].split(".") if place else ()):
        kinds = [each.type for each in msgspec.structs.fields(kind) if each.name == name]
        kind = next((each for each in get_args(kinds[0]) if _is_struct(each)), kinds[0])
    allowed = [each.name for each in msgspec.structs.fields(kind)] if _is_struct(kind) else get_args(kind)
    return f"; allowed: {', '.join(allowed)}" if all(isinstance(each, str) for each in allowed) and allowed else ""


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)
