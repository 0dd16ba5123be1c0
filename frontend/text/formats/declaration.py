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
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from headrace.ipc.failure import HeadraceError
from headrace.ipc.process.regular_files import read_file

FOLDER = Path(__file__).parent
Pair = tuple[str, str]
"""The markers before and after something; either may be empty."""


class FormatError(HeadraceError, ValueError):
    """A declaration that cannot be read, or an unknown format."""


class ReasoningFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    end: str
    begin: str = ""
    label: str = ""
    """Text that may follow `begin`, before the reasoning."""
    starts_open: bool = False
    """Answers begin inside reasoning, whether or not the prompt ends with `begin`."""
    has_lines: bool = False
    """Line breaks separate the reasoning, and the answer after it, from the markers."""

    def __post_init__(self) -> None:
        if not self.end.strip():
            raise ValueError("reasoning needs an end, the text after which the answer comes: it is empty")

    def is_open_after(self, prompt: str) -> bool:
        """Whether an answer to this prompt begins inside reasoning."""
        opened_at = prompt.rfind(self.begin) if self.begin else -1
        return self.starts_open or opened_at > prompt.rfind(self.end)


class CallFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    body: Literal["json", "named_json", "pythonic", "xml", "escaped"]
    """json: an object with name and arguments, or a list of them. named_json: a name, then an object of arguments.
    pythonic: [f(a=1), g()], or in a section one call per line. xml: a name, then parameters whose values are text.
    escaped: a name, then {key:value,...} with `escape` around strings."""
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
    """Markers that some models of the family write around calls instead of `call`."""
    loose: tuple[Pair, ...] = ()
    """Markers that models write instead by mistake, or ("", ""), anywhere in an answer (json). What they enclose is a
    call only if it names one of the request's tools."""
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
    """Markers before and after a parameter's name, and before and after its value (xml)."""
    value_kinds: tuple[Pair, ...] = ()
    """(JSON type or other, text that may follow the name of a parameter of that type): a string's value is text, any
    other JSON (xml). A type in the schema decides where there is one."""
    number: Pair = ("", "")
    """Markers around a call's number, which follows its name (xml)."""
    quotes: Pair = ("", "")
    """Markers that may stand around a whole value, in which other markers are text (xml)."""
    values_have_lines: bool = False
    """Line breaks separate a value from its markers (xml)."""
    escape: str = ""
    """Marker before and after a string (escaped)."""
    name_keys: tuple[str, ...] = ("name",)
    argument_keys: tuple[str, ...] = ("arguments", "parameters")
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
        if self.loose and self.body != "json":
            raise ValueError("loose goes with body json")
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
    calls: CallFormat | None = None
    channels: ChannelFormat | None = None
    """Instead of `reasoning` and `calls`."""
    template_marks: tuple[str, ...] = ()
    """Texts that all occur in the chat template of a model that writes this format."""
    left_out: tuple[str, ...] = ()
    """Markers around the answer that are not part of it."""
    same_as: tuple[str, ...] = ()
    """Other names of the format."""

    def __post_init__(self) -> None:
        _check_texts(self, "template_marks", "left_out", "same_as")


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
        if ((declared.reasoning if with_reasoning else declared.calls) or declared.channels)
        and declared.template_marks
        and all(mark in template for mark in declared.template_marks)
    ]
    return max(found)[1] if found else None


def _read(path: Path) -> OutputFormat:
    try:
        return msgspec.yaml.decode(read_file(path), type=OutputFormat)
    except (OSError, msgspec.MsgspecError) as error:
        raise FormatError(f"{path}: not an output format: {error}") from None
