"""`Field`, the metadata of a `SamplingParams` field, and everything that derives from a field's declaration.

field of ipc/messages.py:Sampling  --> its range; whether a model's generation config may set it
field of SamplingParams + `Field`  --> the check of its value, its conversion for the wire, the field of HTTP bodies and
                                       its OpenAPI schema, flags of commands, what `headrace chat` can set
"""

from __future__ import annotations

import difflib
import math
import numbers
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

import msgspec

from headrace.core.options.option import Option
from headrace.ipc.failure import InvalidRequestError
from headrace.ipc.messages import Sampling
from headrace.ipc.ranges import FLOAT32, Range, model_defaults, ranges_of

AS_MODEL = "the model's own, else neutral"
FLAGS = "Sampling"
"""The group of sampling flags in --help."""


LIKELY = 0.8
"""How similar a name is to a field's, by difflib, to be a slip rather than a script's own name."""


def check_attribute(params: object, name: str, known: Iterable[str]) -> None:
    """Raises AttributeError for an attribute of `params` whose name looks like one of the fields `known`, and is none.
    Other attributes are a script's own."""
    if name.startswith("_") or hasattr(type(params), name):
        return
    if near := difflib.get_close_matches(name, known, n=1, cutoff=LIKELY):
        raise AttributeError(f"{type(params).__name__} has no field {name!r}; did you mean {near[0]!r}?")


class ParamsStruct(msgspec.Struct, dict=True):
    """The base of parameters. As in vLLM, scripts may add attributes of their own."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__struct_fields__:
            check_attribute(self, name, self.__struct_fields__)
        super().__setattr__(name, value)


class Field(msgspec.Struct, frozen=True):
    """Annotates a field's type: `min_p: Annotated[float, Field("...")] = 0.0`."""

    help: str
    range: Range | None = None
    """The values that users may give; None means the range of the field of the same name in Sampling."""
    in_body: bool = True
    """Whether HTTP bodies have the field: with this name, type and help, or as http/openai/requests.py declares it."""
    flag: bool = False
    """Whether commands that generate text have it as a flag."""
    longest: int | None = None
    """Most entries of the list in an HTTP body."""


class Declared(typing.NamedTuple):
    """The declaration of a SamplingParams field."""

    name: str
    kind: Any
    """Its type without None: bool, int, float or another."""
    optional: bool
    """Whether None is a valid value."""
    default: Any
    field: Field
    range: Range | None


def declared_fields(cls: type[msgspec.Struct]) -> Mapping[str, Declared]:
    """The fields of a struct that are annotated with a `Field`, by name. All of its fields have defaults."""
    ranges, found = ranges_of(Sampling), {}
    defaults = dict(zip(cls.__struct_fields__, cls.__struct_defaults__, strict=True))
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        field = next((each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Field)), None)
        if field is None:
            continue
        kind, optional = _without_none(hint.__origin__)
        found[name] = Declared(name, kind, optional, defaults[name], field, field.range or ranges.get(name))
    return types.MappingProxyType(found)


Check = Callable[[Any], Any]
"""Raises InvalidRequestError for an invalid value. Returns the value, as Python's own type if it is one of numpy's."""


def check_of(declared: Declared) -> Check | None:
    """The check of a bool field or of a number with a range, of a value that is not None; None for fields that are
    checked elsewhere."""
    name, kind, found = declared.name, declared.kind, declared.range
    if kind is bool:
        return _check_bool(name)
    if found is None or kind not in (int, float):
        return None
    return _check_integer(name, found) if kind is int else _check_number(name, found)


def plain_integer(value: Any) -> int | None:
    """The value as a Python integer, if it is an integer of any type (such as numpy's) and no bool; else None."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        return None
    return int(value)


def sent_fields(fields: Mapping[str, Declared]) -> list[tuple[str, Any, Callable[[Any], Any]]]:
    """Fields that Sampling takes from SamplingParams one to one: name, default (which is not sent) and converter."""
    found = []
    for name in Sampling.__struct_fields__:
        if name in fields and (converted := _converter(fields[name])) is not None:
            found.append((name, fields[name].default, converted))
    return found


def body_fields(fields: Mapping[str, Declared], besides: tuple[str, ...]) -> list[tuple[str, Any, None]]:
    """Fields of an HTTP body for `msgspec.defstruct`, without `besides`, which the body declares itself. Each has the
    default None, which is the same as left out."""
    own = [each for each in fields.values() if each.field.in_body and each.name not in besides]
    return [(each.name, _body_type(each), None) for each in own]


def flag_fields(fields: Mapping[str, Declared], besides: tuple[str, ...] = ()) -> list[tuple[str, Any, None]]:
    """Flags for `msgspec.defstruct`, without `besides`: the fields that a model's generation config may set too. Each
    has the default None, which means not given."""
    by_model = model_defaults(Sampling)
    return [
        (name, Annotated[fields[name].kind | None, Option(FLAGS, fields[name].field.help, default_text=AS_MODEL)], None)
        for name in by_model
        if name in fields and fields[name].field.flag and name not in besides
    ]


def bad(name: str, value: Any, why: str) -> InvalidRequestError:
    error = InvalidRequestError(f"SamplingParams.{name} = {value!r:.500}: {why}")
    error.value = value
    return error


def _converter(declared: Declared) -> Callable[[Any], Any] | None:
    kind = declared.kind
    if kind is float:
        most = FLOAT32 if declared.range is None else declared.range.high
        return lambda value: min(float(value), most)
    if kind in (int, bool):
        return kind
    if kind == list[int]:
        return lambda token_ids: tuple(map(int, token_ids))
    if kind == dict[str, Any]:
        return dict
    if kind == dict[int, float]:
        return lambda values: {int(key): float(value) for key, value in values.items()}
    return None


MOST_EXTRA_BYTES = 1 << 16


def verify_extra_args(values: Any) -> None:
    """Raises InvalidRequestError for an extra_args that cannot be sent or is too large."""
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise bad("extra_args", values, "must be a dict with names as keys")
    try:
        size = len(msgspec.msgpack.encode(values))
    except OverflowError:
        raise InvalidRequestError(
            "SamplingParams.extra_args integers must be at least -2**63 and less than 2**64, in lists and dicts too"
        ) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise bad("extra_args", values, f"cannot be sent: {error}") from None
    if size > MOST_EXTRA_BYTES or len(values) > 256:
        raise InvalidRequestError(
            f"SamplingParams.extra_args has {len(values)} entries of {size} bytes together: at most 256 of "
            f"{MOST_EXTRA_BYTES} bytes are taken"
        )


def _body_type(declared: Declared) -> Any:
    kind, field, found = declared.kind, declared.field, declared.range
    if field.longest is not None:
        kind = Annotated[kind, msgspec.Meta(max_length=field.longest)]
    schema: dict[str, Any] = {}
    if found is not None and kind in (int, float):
        schema["exclusiveMinimum" if found.open_low else "minimum"] = found.low
        if abs(found.high) < FLOAT32:
            schema["maximum"] = found.high
    return Annotated[kind | None, msgspec.Meta(description=field.help, extra_json_schema=schema)]


def _without_none(hint: Any) -> tuple[Any, bool]:
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return hint, False
    parts = [part for part in typing.get_args(hint) if part is not types.NoneType]
    kind = parts[0]
    for part in parts[1:]:
        kind = kind | part
    return kind, len(parts) < len(typing.get_args(hint))


def _check_bool(name: str) -> Check:
    def check(value: Any) -> bool:
        if not isinstance(value, bool):
            raise bad(name, value, "must be True or False")
        return value

    return check


def _check_integer(name: str, allowed: Range) -> Check:
    def check(value: Any) -> int:
        plain = value if type(value) is int else plain_integer(value)
        if plain is None:
            raise bad(name, value, f"must be an integer of at least {allowed.low}")
        if plain not in allowed:
            raise bad(name, value, f"must be {allowed.words()}")
        return plain

    return check


def _check_number(name: str, allowed: Range) -> Check:
    """Where float32 is the only bound, larger finite numbers pass too: `sent_fields` clamps them to float32's limit."""
    if allowed.high == FLOAT32:
        allowed = msgspec.structs.replace(allowed, high=sys.float_info.max)

    def check(value: Any) -> int | float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise bad(name, value, f"must be a number, {allowed.words()}")
        try:
            number = float(value)
        except OverflowError:  # an integer larger than any float
            number = math.inf
        if number not in allowed:
            more = "" if math.isfinite(number) else ", and finite"
            raise bad(name, value, f"must be {allowed.words()}{more}")
        return value if isinstance(value, int) else number

    return check
