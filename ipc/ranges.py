"""The range of a message's field, declared at the field: `min_tokens: Annotated[int, Range(0, INT32)]`.

From this declaration the core refuses values that its arrays cannot hold (`out_of_range`), and tests and the wire
fuzzer choose edge values (`ranges_of`). Decoding does not enforce it, since a request with a value out of range must
still get its one terminal answer.
"""

from __future__ import annotations

import functools
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

INT32, INT64 = 2**31 - 1, 2**63 - 1
FLOAT32 = 3.4e38
"""The largest number that is used in computations."""


class Range(msgspec.Struct, frozen=True):
    """Numbers from `low` to `high`, both included unless `open_low`. A NaN lies in no range."""

    low: float
    high: float
    open_low: bool = False

    def __contains__(self, value: float) -> bool:
        return (self.low < value if self.open_low else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        return f"{'(' if self.open_low else '['}{_text(self.low)}, {_text(self.high)}]"

    def words(self) -> str:
        """The range in words, such as `over 0 and at most 1`."""
        low = f"{'over' if self.open_low else 'at least'} {_text(self.low)}"
        return low if self.high >= FLOAT32 else f"{low} and at most {_text(self.high)}"


class ModelDefault(msgspec.Struct, frozen=True):
    """Marks a field whose default generation_config.json and override_generation_config may set."""

    stored_as: str | None
    """The field's name in generation_config.json; None if only the option sets it."""


class Longest(msgspec.Struct, frozen=True):
    """Maximum number of characters of a text, or of entries of a tuple or dict."""

    count: int


VOCABULARY = "a token id"
"""Marks a number that must also be a token id of the model: `names_marked` finds the fields with such numbers."""

Check = Callable[[str, Any], str | None]
"""Takes a field's name and value; returns a sentence that says why it is refused, or None."""


def out_of_range(message: msgspec.Struct, known: msgspec.Struct | None = None) -> str | None:
    """The first field of the message, or of a struct in it, that lies outside its declared range, as a sentence.
    known: a struct in it that was checked before."""
    for name, default, check in checks_of(type(message)):
        value = getattr(message, name)
        if value == default or (known is not None and value is known):
            continue
        if (problem := check(name, value)) is not None:
            return problem
    return None


@functools.cache
def ranges_of(kind: type[msgspec.Struct]) -> Mapping[str, Range]:
    """The ranges of the struct's own numeric fields, by name."""
    found: dict[str, Range] = {}
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        parts = typing.get_args(hint) if is_union else (hint,)
        marks = [mark for part in parts for mark in getattr(part, "__metadata__", ())]
        if marks and isinstance(marks[0], Range):
            found[name] = marks[0]
    return types.MappingProxyType(found)


@functools.cache
def model_defaults(kind: type[msgspec.Struct]) -> Mapping[str, tuple[ModelDefault, type, Range]]:
    """The struct's own fields that are marked with a ModelDefault, as (mark, int or float, range) by name."""
    found: dict[str, tuple[ModelDefault, type, Range]] = {}
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        mark = next((each for each in getattr(hint, "__metadata__", ()) if isinstance(each, ModelDefault)), None)
        if mark is not None:
            found[name] = mark, hint.__origin__, ranges_of(kind)[name]
    return types.MappingProxyType(found)


@functools.cache
def names_marked(kind: type[msgspec.Struct], mark: object) -> tuple[str, ...]:
    """The struct's own fields whose annotation contains the mark at any depth."""

    def has_mark(hint: Any) -> bool:
        return mark in getattr(hint, "__metadata__", ()) or any(has_mark(part) for part in typing.get_args(hint))

    return tuple(name for name, hint in typing.get_type_hints(kind, include_extras=True).items() if has_mark(hint))


@functools.cache
def checks_of(kind: type[msgspec.Struct]) -> tuple[tuple[str, Any, Check], ...]:
    """What `out_of_range` checks of such a message: of fields with another value than the default. Made at the first
    call, those of structs in it too."""
    defaults = {
        field.name: field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        for field in msgspec.structs.fields(kind)
    }
    checks = ((name, _check_of(hint)) for name, hint in typing.get_type_hints(kind, include_extras=True).items())
    return tuple((name, defaults[name], check) for name, check in checks if check is not None)


def _check_of(hint: Any) -> Check | None:
    """None if there is nothing to check."""
    marks = getattr(hint, "__metadata__", ())
    checks = [_check_of_mark(mark) for mark in marks if isinstance(mark, Range | Longest)]
    if marks:
        hint = hint.__origin__
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        structs = [checks_of(part) for part in parts if isinstance(part, type) and issubclass(part, msgspec.Struct)]
        inner = (check for part in parts if (check := _check_of(part)) is not None)
        checks += [_check_of_struct] if structs else [_unless_none(check) for check in inner]
    elif origin is tuple and (check := _check_of(parts[0])) is not None:
        checks.append(_of_each(check, lambda values: values))
    elif origin is dict:
        for part, values in zip(parts, (dict.keys, dict.values), strict=True):
            if (check := _check_of(part)) is not None:
                checks.append(_of_each(check, values))
    elif isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        checks_of(hint)
        checks.append(_check_of_struct)
    if len(checks) < 2:
        return checks[0] if checks else None
    return lambda name, value: next((why for check in checks if (why := check(name, value)) is not None), None)


def _check_of_mark(mark: Range | Longest) -> Check:
    if isinstance(mark, Longest):
        longest = mark.count
        return lambda name, value: (
            f"{name} has a length of {len(value)}; at most {longest} is taken" if len(value) > longest else None
        )
    return lambda name, value: None if value in mark else f"{name} is {value}; it must lie in {mark}"


def _check_of_struct(_: str, value: Any) -> str | None:
    return out_of_range(value) if isinstance(value, msgspec.Struct) else None


def _unless_none(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def _of_each(check: Check, values: Callable[[Any], Any]) -> Check:
    return lambda name, value: next((why for each in values(value) if (why := check(name, each)) is not None), None)


def _text(bound: float) -> str:
    return str(bound) if isinstance(bound, int) or math.isinf(bound) else f"{bound:g}"
