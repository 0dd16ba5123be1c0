"""Reads options from Python values and from text: checks names, types and ranges, and reports all problems at once.

Works with any frozen msgspec Struct whose fields are annotated with `Option`, so that other programs declare their
options in the same way.
"""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any, Literal, TypeVar

import msgspec

from headrace.core.options import compilation_config
from headrace.core.options.engine_options import Options
from headrace.core.options.option import HIDDEN, Option, Secret
from headrace.core.options.vllm_options import (
    check_unsupported,
    rename,
    renamed_options,
    unsupported_options,
    why_no_value,
)
from headrace.ipc.failure import OptionError

T = TypeVar("T", bound=msgspec.Struct)

OptionKind = Literal["bool", "int", "float", "str", "choice", "list", "numbers", "dict", "secret", "secrets"]
KINDS: Mapping[Any, OptionKind] = types.MappingProxyType(
    {
        bool: "bool",
        int: "int",
        float: "float",
        str: "str",
        Literal: "choice",
        tuple[str, ...]: "list",
        tuple[int, ...]: "numbers",
        dict: "dict",
        Secret: "secret",
        tuple[Secret, ...]: "secrets",
    }
)
UNITS_WITH_SUFFIX = ("tokens", "bytes")


class OptionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The declaration of one option, read from its field."""

    name: str
    kind: OptionKind
    option: Option
    default: Any
    nullable: bool
    choices: tuple[str, ...] = ()

    @property
    def is_secret(self) -> bool:
        """The value must not be shown in any message or log."""
        return self.kind in ("secret", "secrets")


@functools.cache
def option_specs(struct: type[msgspec.Struct] = Options) -> Mapping[str, OptionSpec]:
    """The declarations of a Struct's options, by name and in order."""
    hints = typing.get_type_hints(struct, include_extras=True)
    specs = {}
    for field in msgspec.structs.fields(struct):
        annotated, option = typing.get_args(hints[field.name])
        is_union = typing.get_origin(annotated) in (types.UnionType, typing.Union)
        parts = typing.get_args(annotated) if is_union else (annotated,)
        inner = next(part for part in parts if part is not type(None))
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        specs[field.name] = OptionSpec(
            name=field.name,
            kind=KINDS[inner if inner in KINDS else typing.get_origin(inner)],
            option=option,
            default=default,
            nullable=type(None) in parts,
            choices=typing.get_args(inner) if typing.get_origin(inner) is Literal else (),
        )
    return types.MappingProxyType(specs)


def read_options(
    struct: type[T], values: Mapping[str, Any], spell: Callable[[str], str] = str, also_known: Iterable[str] = ()
) -> tuple[T, tuple[str, ...]]:
    """Makes the Struct from values by name. Also returns notes for the user about retired names and options without
    effect.

    spell: turns an option's name into the form that the user writes, for error messages. also_known: names besides the
    Struct's that are suggested for an unknown one. Raises OptionError with all problems.
    """
    specs = option_specs(struct)
    problems: list[str] = []
    notes: list[str] = []
    taken: dict[str, Any] = {}
    given_as: dict[str, str] = {}
    for given_name, name, given in _in_parts(struct, values, spell, problems, notes):
        value = given
        if name not in specs and struct is Options:
            if name in renamed_options():
                try:
                    name, value, note = rename(name, value)
                except ValueError as error:
                    problems.append(str(error))
                    continue
                notes += [note] if note else []
                if value is None:
                    continue
            elif name in unsupported_options():
                problem, note = check_unsupported(name, value, spell(name))
                problems += [problem] if problem else []
                notes += [note] if note else []
                continue
        if name not in specs:
            problems.append(_unknown(given_name, (*specs, *also_known), spell))
            continue
        spec = specs[name]
        try:
            value = convert(spec, value)
        except ValueError as error:
            problems.append(f"{spell(name)}={HIDDEN if spec.is_secret else _show(value)}: {error}")
            continue
        if name in taken and spec.kind != "dict":
            if given_name.replace("-", "_") in compilation_config.DEFAULTS and taken[name] == value:
                continue
            problems.append(f"{spell(name)} is given twice, as {spell(given_as[name])} and as {spell(given_name)}")
            continue
        given_as[name] = given_name
        taken[name] = {**taken[name], **value} if name in taken else value
    if problems:
        raise OptionError(problems[0] if len(problems) == 1 else _list(problems))
    return struct(**taken), tuple(notes)


def _in_parts(
    struct: type[msgspec.Struct],
    values: Mapping[str, Any],
    spell: Callable[[str], str],
    problems: list[str],
    notes: list[str],
) -> Iterator[tuple[str, str, Any]]:
    """Each given option as its name as given, its name and its value; in place of one of `compilation_config.DEFAULTS`
    those that it sets, last."""
    names = {given: given.replace("-", "_") for given in values}
    in_parts = {given for given, name in names.items() if name in compilation_config.DEFAULTS and struct is Options}
    yield from ((given, names[given], values[given]) for given in values if given not in in_parts)
    for given, name in names.items():
        if given in in_parts:
            found = compilation_config.parts_of(name, values[given], spell(name))
            problems += [found.problem] if found.problem else []
            notes += [found.note] if found.note else []
            yield from ((given, option, value) for option, value in found.options.items())


def plain_options(struct: msgspec.Struct) -> dict[str, Any]:
    """Every option as plain data, including secrets, for another process to read. Must not be shown."""
    return {name: _plain(getattr(struct, name), secret=lambda each: each.value) for name in struct.__struct_fields__}


def shown_options(struct: msgspec.Struct) -> dict[str, Any]:
    """Options that differ from their defaults, as plain data for display. A secret shows only that it is set."""
    default = type(struct)()
    names = [name for name in struct.__struct_fields__ if getattr(struct, name) != getattr(default, name)]
    return {name: _plain(getattr(struct, name), secret=repr) for name in names}


def _plain(value: Any, secret: Callable[[Secret], str]) -> Any:
    if isinstance(value, Secret):
        return secret(value)
    if isinstance(value, tuple):
        return [_plain(item, secret) for item in value]
    return msgspec.to_builtins(value)


def with_secrets(options: T, theirs: T | None) -> T:
    """The options with their secrets replaced by those of `theirs`. None: by the defaults."""
    names = [name for name, spec in option_specs(type(options)).items() if spec.is_secret]
    source = type(options)() if theirs is None else theirs
    return msgspec.structs.replace(options, **{name: getattr(source, name) for name in names})


def convert(spec: OptionSpec, value: Any) -> Any:
    """Converts a value to the option's type and checks its range. Raises ValueError that says what is allowed."""
    option = spec.option
    if value is None:
        return None if spec.nullable else spec.default
    word = str(value).lower()
    if word in option.words:
        return option.words[word]
    # A text may well be `none`; None as Python spells it is what vLLM's command line takes for nothing.
    if spec.nullable and (value == "None" if spec.kind == "str" else word in ("none", "null")):
        return None
    converted = _CONVERTERS[spec.kind](spec, value)
    if spec.kind in ("int", "float", "numbers"):
        low, high = option.minimum, option.maximum
        numbers = converted if spec.kind == "numbers" else (converted,)
        if spec.kind != "float" and any(abs(number) > _LARGEST for number in numbers):
            raise ValueError(f"out of range; no whole number may be beyond {_LARGEST:,}")
        # These comparisons are false for NaN.
        if not all((low is None or number >= low) and (high is None or number <= high) for number in numbers):
            raise ValueError(f"out of range; it must be {range_text(option)}")
    return converted


_LARGEST = 2**63 - 1
"""What a message to the engine's process can hold."""


def range_text(option: Option) -> str:
    """The option's range in words; empty if there is none."""
    unit = f" {option.unit}" if option.unit else ""
    if option.minimum is not None and option.maximum is not None:
        return f"{_number(option.minimum)} to {_number(option.maximum)}{unit}"
    if option.minimum is not None:
        one = unit.removesuffix("es" if unit.endswith("xes") else "s")
        return f"at least {_number(option.minimum)}{one if option.minimum == 1 else unit}"
    if option.maximum is not None:
        return f"at most {_number(option.maximum)}{unit}"
    return ""


_SIZE = re.compile(r"([+-]?\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d{1,2})?)\s*(?:([kKmMgGtT])(i?[bB])?|[bB])?")


def parse_size(text: str) -> int:
    """A whole number with an optional suffix: 8k is 8000, 8K and 8KiB are 8192, 8KB is 8000; likewise m, g and t.

    A single letter is read as in vLLM: lower case is decimal, upper case is binary. Raises ValueError.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("not a whole number; write it like 4096, 8k (8,000), 8K (8,192) or 4GiB")
    digits, letter, rest = match.groups()
    power = " kmgt".index((letter or " ").lower())
    is_binary = letter is not None and (rest.startswith("i") if rest else letter.isupper())
    number = Decimal(digits.replace("_", "")) * (1024 if is_binary else 1000) ** power
    if number != number.to_integral_value():
        raise ValueError(f"{number.normalize():f} is not a whole number")
    return int(number)


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """The most similar of the names; empty if none has at least `cutoff` by difflib's ratio."""
    found = difflib.get_close_matches(name.replace("-", "_"), names, n=1, cutoff=cutoff)
    return found[0] if found else ""


def _unknown(name: str, known: Iterable[str], spell: Callable[[str], str]) -> str:
    close = nearest(name, known)
    return f"unknown option {spell(name)}" + (f"; did you mean {spell(close)}?" if close else "")


def _list(problems: list[str]) -> str:
    return f"{len(problems)} problems with the options:" + "".join(f"\n  - {problem}" for problem in problems)


def _show(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        value = " ".join(value)
    text = value if isinstance(value, str) and value else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _to_bool(spec: OptionSpec, value: Any) -> bool:
    known = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    if str(value).lower() not in known:
        raise ValueError("it must be true or false")
    return known[str(value).lower()]


def _to_int(spec: OptionSpec, value: Any) -> int:
    if isinstance(value, bool):
        raise ValueError("it must be a whole number, not a truth value")
    if isinstance(value, str):
        if spec.option.unit in UNITS_WITH_SUFFIX:
            return parse_size(value)
        try:
            return int(value)
        except ValueError:
            raise ValueError("it must be a whole number") from None
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if hasattr(value, "__index__"):
        return int(value.__index__())
    raise ValueError("it must be a whole number")


def _to_float(spec: OptionSpec, value: Any) -> float:
    try:
        if isinstance(value, bool):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError):  # the last: a whole number beyond any float
        raise ValueError("it must be a number") from None


def _to_str(spec: OptionSpec, value: Any) -> str:
    if not isinstance(value, str | os.PathLike):
        raise ValueError(f"it must be text, not {type(value).__name__}")
    text = os.fsdecode(os.fspath(value))
    if spec.option.forms and not _has_form(text, spec.option.forms):
        *others, last = spec.option.forms
        meant = text.lower().replace("gpu", "cuda")
        hint = f"; did you mean {meant!r}?" if _has_form(meant, spec.option.forms) else ""
        raise ValueError(f"it must be {', '.join(others)} or {last}{hint}")
    return text


def _has_form(text: str, forms: tuple[str, ...]) -> bool:
    return any(re.fullmatch(re.escape(form).replace("INDEX", "[0-9]+"), text) for form in forms)


def _to_choice(spec: OptionSpec, value: Any) -> str:
    # torch.float16 and numpy.float16 are recognised by name, so that neither library has to be imported.
    text = value if isinstance(value, str) else getattr(value, "__name__", None) or str(value).removeprefix("torch.")
    if text not in spec.choices:
        if reason := why_no_value(spec.name, str(text)):
            raise ValueError(reason)
        close = nearest(str(text), spec.choices) or nearest(str(text).lower(), spec.choices)
        raise ValueError(f"it must be one of {', '.join(spec.choices)}" + (f"; did you mean {close}?" if close else ""))
    return str(text)


def _to_list(spec: OptionSpec, value: Any) -> tuple[str, ...]:
    items = _as_json_list(value)
    items = [items] if isinstance(items, str) else items
    if isinstance(items, list | tuple):  # Python callers may give classes themselves
        items = [_name_of(item) if isinstance(item, type) else item for item in items]
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) and item for item in items):
        raise ValueError("it must be a name or a list of names")
    return tuple(items)


def _name_of(cls: type) -> str:
    """The module:Class by which the engine's process finds a class. For a class of the main script, the script's
    path:Class."""
    script = getattr(sys.modules.get("__main__"), "__file__", None) if cls.__module__ == "__main__" else None
    return f"{os.path.abspath(script) if script else cls.__module__}:{cls.__qualname__}"


def _as_json_list(value: Any) -> Any:
    """Decodes a list that is written as one JSON text, as in '["*"]' or '[1, 2]'; returns other values unchanged."""
    text = value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
    if not isinstance(text, str) or not text.lstrip().startswith("["):
        return value
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it looks like a JSON list, but is not valid JSON ({error})") from None


def _to_secret(spec: OptionSpec, value: Any) -> Secret:
    if isinstance(value, Secret):
        return value
    if not isinstance(value, str):
        raise ValueError(f"it must be text, not {type(value).__name__}")
    return Secret(value)


def _to_secrets(spec: OptionSpec, value: Any) -> tuple[Secret, ...]:
    items = _as_json_list(value)
    items = [items] if isinstance(items, str | Secret) else items
    if not isinstance(items, list | tuple):
        raise ValueError("it must be a text or a list of texts")
    return tuple(_to_secret(spec, item) for item in items)


def _to_numbers(spec: OptionSpec, value: Any) -> tuple[int, ...]:
    items = _as_json_list(value)
    items = [items] if isinstance(items, str | int) else items
    if not isinstance(items, list | tuple):
        raise ValueError("it must be a list of whole numbers, such as 1,2")
    parts = [part for item in items for part in (item.split(",") if isinstance(item, str) else [item])]
    numbers = []
    for part in parts:
        try:
            numbers.append(_to_int(spec, part))
        except ValueError:
            raise ValueError(f"{part!r} is not a whole number; write them like 1,2,4") from None
    return tuple(numbers)


def _to_dict(spec: OptionSpec, value: Any) -> dict[str, Any]:
    if callable(value):
        raise ValueError("a function cannot travel to the engine's process; give a dict")
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f'it must be a JSON object such as {{"key": 1}} ({error})') from None
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError("it must map names to values (in JSON, an object)")
    try:
        # As it goes to the engine's process: whole numbers have 64 bits, and others need not be finite, as in JSON.
        plain: dict[str, Any] = msgspec.msgpack.decode(
            msgspec.msgpack.encode(msgspec.to_builtins(dict(value), str_keys=True))
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"its values must be plain data: {error}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply, or holds itself") from None
    return plain


_CONVERTERS: Mapping[OptionKind, Callable[[OptionSpec, Any], Any]] = types.MappingProxyType(
    {
        "bool": _to_bool,
        "int": _to_int,
        "float": _to_float,
        "str": _to_str,
        "choice": _to_choice,
        "list": _to_list,
        "numbers": _to_numbers,
        "dict": _to_dict,
        "secret": _to_secret,
        "secrets": _to_secrets,
    }
)
