"""What a format is: the YAML files of this folder, and a user's own, are these structs.

reasoning:              what comes before the answer
  begin: <think>
  end: </think>
calls:                  what the model asks to be called
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

FOLDER = Path(__file__).parent
Pair = tuple[str, str]
"""What stands before and after something; either may be empty."""


class FormatError(HeadraceError, ValueError):
    """A declaration that cannot be read, or one that nobody knows."""


class ReasoningFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    end: str
    begin: str = ""
    starts_open: bool = False
    """Answers begin inside reasoning, whatever the prompt ends with."""

    def __post_init__(self) -> None:
        if not self.end.strip():
            raise ValueError("reasoning needs an end, the text after which the answer comes: it is empty")

    def is_open_after(self, prompt: str) -> bool:
        """Whether an answer to this prompt begins inside reasoning."""
        opened_at = prompt.rfind(self.begin) if self.begin else -1
        return self.starts_open or opened_at > prompt.rfind(self.end)


class CallFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    body: Literal["json", "named_json", "pythonic", "xml", "escaped"]
    """json: an object with name and arguments, or a list of them. named_json: a name, then its arguments' object.
    pythonic: [f(a=1), g()], or in a section a line for each. xml: a name, then parameters with text for values.
    escaped: a name, then {key:value,...} with an `escape` around texts."""
    is_either: bool = False
    """A call is written as json or as xml."""
    lists: bool = False
    """Several calls, or one, may stand in one list (json, and named_json, which has objects there)."""
    section: Pair | None = None
    """Around all calls."""
    call: Pair = ("", "")
    """Around each call; the end may be missing."""
    also: tuple[Pair, ...] = ()
    """What some of the models write around calls instead of the opener and the end."""
    separator: str = ""
    """Between calls."""
    kind: str = ""
    """May stand before a name's begin, with the name for the first time after it (xml)."""
    name: Pair = ("", "")
    """Around a name (named_json and xml). Where nothing follows it, it ends where the arguments begin."""
    after_arguments: str = ""
    """May follow the arguments, before the call's end."""
    parameter: tuple[str, str, str, str] = ("", "", "", "")
    """Before and after a parameter's name, before and after its value (xml)."""
    values_have_lines: bool = False
    """Line breaks set a value off from its markers (xml)."""
    escape: str = ""
    """Before and after a text (escaped)."""
    name_keys: tuple[str, ...] = ("name",)
    argument_keys: tuple[str, ...] = ("arguments", "parameters")
    is_bare: bool = False
    """An answer may begin with calls without any marker."""
    name_is_id: bool = False
    """A name is written functions.NAME:INDEX, which is the call's id too."""
    id_length: int = 0
    """Letters and digits of a call's id, where the models' templates take no other; 0 where any will do."""

    @property
    def opener(self) -> str:
        """The marker that calls begin with; empty where they are only bare."""
        return self.section[0] if self.section else self.call[0]

    def __post_init__(self) -> None:
        if not self.opener and not self.is_bare:
            raise ValueError("calls need a marker (the first of section or of call), or is_bare")
        if self.is_either and self.body not in ("json", "xml"):
            raise ValueError("is_either goes with body json and xml")
        if (self.body == "xml" or self.is_either) and not (self.parameter[0] and self.parameter[3]):
            raise ValueError("calls of body xml need parameter: [before name, after name, before value, after value]")
        if self.body == "escaped" and not (self.escape and all(self.name)):
            raise ValueError("calls of body escaped need escape, and name: [before it, after it]")


class ChannelFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Answers that are messages with a header each (channels.py)."""

    start: str
    channel: str
    """Before a channel's name."""
    message: str
    """Between a header and its text."""
    ends: tuple[str, ...]
    """After a text: the first where another message follows, the second after a call."""
    reasoning: tuple[str, ...]
    """Channels of reasoning."""
    functions: str
    """What the recipients of calls begin with."""
    constrain: str
    """The end of a call's header."""

    def __post_init__(self) -> None:
        if len(self.ends) < 2 or not self.reasoning:
            raise ValueError("channels need two ends, after a text and after a call, and a channel of reasoning")
        _check_texts(self, "start", "channel", "message", "ends", "reasoning", "functions")


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, cache_hash=True):
    reasoning: ReasoningFormat | None = None
    calls: CallFormat | None = None
    channels: ChannelFormat | None = None
    """Instead of both."""
    template_marks: tuple[str, ...] = ()
    """A chat template that has all of these is of a model that writes this format."""
    left_out: tuple[str, ...] = ()
    """Texts around the answer that are no part of it."""
    same_as: tuple[str, ...] = ()
    """Other names for it."""

    def __post_init__(self) -> None:
        _check_texts(self, "template_marks", "left_out", "same_as")


def _check_texts(declared: msgspec.Struct, *names: str) -> None:
    """Raises ValueError, which names the field, for a text that is empty: it would be found everywhere."""
    for name in names:
        value = getattr(declared, name)
        if not all([value] if isinstance(value, str) else value):
            raise ValueError(f"{name} has a text that is empty")


NONE: Mapping[str, OutputFormat] = types.MappingProxyType({})


@functools.cache
def known_formats() -> dict[str, OutputFormat]:
    """All that come with Headrace, by name."""
    found = {}
    for path in sorted(FOLDER.glob("*.yaml")):
        declared = _read(path)
        found.update(dict.fromkeys((path.stem, *declared.same_as), declared))
    return found


def load_format(name: str, own: Mapping[str, OutputFormat] = NONE) -> OutputFormat:
    """By its name, among a user's `own` first, or a file of one's own. Raises FormatError."""
    if (declared := own.get(name) or known_formats().get(name)) is not None:
        return declared
    if name.endswith((".yaml", ".yml")):
        return _read(Path(name))
    raise FormatError(
        f"no output format is called {name!r}; known are {', '.join(sorted({*own, *known_formats()}))}, and a file "
        "that ends in .yaml is read as a declaration"
    )


def format_of_template(
    template: str, own: Mapping[str, OutputFormat] = NONE, *, with_reasoning: bool = False
) -> str | None:
    """The name of the format with calls, or with reasoning, that a chat template's marks speak for: the one with most
    marks."""
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
        return msgspec.yaml.decode(path.read_bytes(), type=OutputFormat)
    except (OSError, msgspec.MsgspecError) as error:
        raise FormatError(f"{path}: not an output format: {error}") from None
