"""Decodes JSON bodies and query parameters to request structs, with errors that name the field."""

from __future__ import annotations

import difflib
import logging
import re
import types
import typing
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Literal, TypeVar

import msgspec

from headrace.frontend.http.server.decoding.foreign_fields import (
    ANY,
    CONTENTS,
    LISTS_IN_TEXT,
    OF_MESSAGES,
    Neutral,
    SameAs,
    list_in_text,
)
from headrace.frontend.http.server.decoding.large_lists import decode_json
from headrace.frontend.http.server.errors import LONGEST_PARAM, ApiError, bad_field, renamed, shortened
from headrace.ipc.failure import InvalidRequestError
from headrace.ipc.struct_types import threadsafe

S = TypeVar("S", bound=msgspec.Struct)
logger = logging.getLogger(__name__)
Others = Mapping[type[msgspec.Struct], Mapping[str, Neutral | SameAs]]
"""By kind of request, the fields that it lacks."""
NOTHING: Mapping[Any, Any] = types.MappingProxyType({})
MOST_MESSAGES = 16384
"""Most messages of a conversation, or conversations of a batch."""


class RequestDecoder:
    """Decodes bodies to request structs. All methods raise ApiError, which names the field.

    A struct may have class attributes besides its fields: `message_kind` (the struct of its messages, which may name
    its `unread` fields), `inner_fields` (by field that is an object, the fields in it), `own_names` (its names of
    completions' and chats' fields) and `check_fields` (checks the body's fields before they are converted).

    Fields that no answer depends on are accepted with any value. So are unknown fields, unless the name looks like a
    misspelt known one or is one in camel case. `strict` refuses both.
    """

    def __init__(self, *, strict: bool, others: Others = NOTHING) -> None:
        """others: by kind of request, the fields that it lacks and what they mean there."""
        self._strict, self._others = strict, others
        self._ignored: set[str] = set()  # names that have been logged

    def decode(self, body: bytes, kind: type[S]) -> S:
        return self._request(_fields(body), kind)

    def decode_one_of(self, body: bytes, kinds: Mapping[str, type[S]]) -> S:
        """Decodes a body as the first kind whose key in `kinds` is a field of the body."""
        fields = _fields(body)
        kind = next((kinds[name] for name in kinds if name in fields), None)
        if kind is None:
            raise bad_field(next(iter(kinds)), f"the body must have {' or '.join(kinds)}", "missing_required_parameter")
        return self._request(fields, kind)

    def _request(self, fields: dict[str, Any], kind: type[S]) -> S:
        lacking = self._others.get(kind, NOTHING)
        taken_as = {} if lacking.keys().isdisjoint(fields) else self._take_others(fields, kind)
        for name in LISTS_IN_TEXT:
            if name in fields:
                fields[name] = list_in_text(fields[name])
        if unknown := set(fields).difference(kind.__struct_fields__):
            self._drop_unknown(fields, unknown, kind)
        for name, known_inside in getattr(kind, "inner_fields", {}).items():
            for inner in fields[name] if isinstance(fields.get(name), dict) else ():
                if inner not in known_inside and fields[name][inner] is not None:
                    raise _unknown(inner, known_inside, name)
        if (message_kind := getattr(kind, "message_kind", None)) is not None:
            self._check_messages(fields.get("messages"), message_kind)
        if (check := getattr(kind, "check_fields", None)) is not None:
            check(fields)
        if not taken_as:
            return self._convert(fields, kind)
        with renamed(taken_as):
            return self._convert(fields, kind)

    def _drop_unknown(self, fields: dict[str, Any], unknown: set[str], kind: type[msgspec.Struct]) -> None:
        known = kind.__struct_fields__
        for name in [name for name in fields if name in unknown]:
            # Finding the closest known name is too slow to do for many fields.
            if self._strict or len(unknown) > _MOST_UNKNOWN or closest(name, known) is not None:
                raise _unknown(name, known)
            # As programs in JavaScript write it.
            written = _in_snake_case(name)
            if written in known or not _is_without_effect(fields[name], self._others.get(kind, NOTHING).get(written)):
                raise _unknown(name, (written,))
            del fields[name]
            self._note_ignored(name)

    def _convert(self, fields: dict[str, Any], kind: type[S]) -> S:
        try:
            return msgspec.convert(fields, threadsafe(kind))
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, InvalidRequestError):
                raise ApiError.of(error.__cause__) from None
            found = error
            if not self._strict:
                try:
                    # Numbers may be strings, as in vLLM's server.
                    return msgspec.convert(fields, threadsafe(kind), strict=False)
                except msgspec.ValidationError as still:  # the field that is wrong even so
                    found = still
            raise invalid_body(str(found), kind) from None
        except RecursionError:
            raise ApiError(HTTPStatus.BAD_REQUEST, "the body is nested too deeply", code="invalid_json") from None

    def _take_others(self, fields: dict[str, Any], kind: type[msgspec.Struct]) -> dict[str, str]:
        """Replaces the fields that this kind of request lacks by what they mean, or removes them. Raises ApiError for
        one that is refused. Returns the names that the request has for the fields that it sets in this way."""
        table, taken_as = self._others[kind], {}
        for name in [name for name in fields if name in table]:
            value, other = fields.pop(name), table[name]
            if value is None:
                continue
            if isinstance(other, SameAs):
                given = {other.name: value} if other.fields is None else other.fields(value, fields)
                for general, each in given.items():
                    ours = getattr(kind, "own_names", {}).get(general, general)
                    self._take_as(fields, kind, name, ours, each)
                    taken_as[ours] = name
            elif _is_nothing(value, other):
                continue
            elif not other.is_harmless or self._strict:
                raise bad_field(name, f"{name} is refused: {other.reason}", other.code)
            elif other.is_noted:
                self._note_ignored(name)
        return taken_as

    @staticmethod
    def _take_as(fields: dict[str, Any], kind: type[msgspec.Struct], name: str, ours: str, value: Any) -> None:
        if ours not in kind.__struct_fields__:
            raise bad_field(name, f"{name} is refused: this route has no {ours}", "unsupported_parameter")
        if fields.get(ours) is not None and not _same(fields[ours], value):
            raise bad_field(name, f"{name} is given beside {ours}, which is the same field here: give one of them")
        fields[ours] = value

    def _check_messages(self, messages: Any, kind: type[msgspec.Struct]) -> None:
        """Raises ApiError for fields of messages, by the rules for those of the body."""
        unread = getattr(kind, "unread", ())
        read = set(kind.__struct_fields__).difference(unread)
        for message in messages if isinstance(messages, list) else ():
            if not (isinstance(message, dict) and message.keys() <= read):
                self._check_odd_messages(messages, kind.__struct_fields__, unread)
                return

    def _check_odd_messages(self, messages: list[Any], known: tuple[str, ...], unread: tuple[str, ...]) -> None:
        unknown = set[str]()
        for where, message in _each_message(messages):
            for name in message:
                if name in known:
                    if self._strict and name in unread and message[name] is not None:
                        raise _unknown(name, (), where)
                elif (other := OF_MESSAGES.get(name)) is not None and not (
                    _is_nothing(message[name], other) or (name in CONTENTS and message.get("content") is not None)
                ):
                    raise bad_field(f"{where}.{name}", f"{where}.{name} is refused: {other.reason}", other.code)
                elif name not in unknown:
                    unknown.add(name)
                    if self._strict or len(unknown) > _MOST_UNKNOWN or closest(name, known) is not None:
                        raise _unknown(name, known, where)
                    self._note_ignored(f"messages[].{name}")

    def _note_ignored(self, name: str) -> None:
        """Logs each ignored name once, and at most _MOST_IGNORED names, since clients choose them."""
        name = shortened(name, _LONGEST_NAME)
        if name not in self._ignored and len(self._ignored) < _MOST_IGNORED:
            self._ignored.add(name)
            logger.warning("the unknown request field %r is ignored; --strict-requests refuses such fields", name)


def _fields(body: bytes) -> dict[str, Any]:
    try:
        fields = decode_json(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        why = _lone_surrogate(body) or _not_utf8(body) or str(error)
        raise ApiError(HTTPStatus.BAD_REQUEST, f"the body is not valid JSON: {why}", code="invalid_json") from None
    except RecursionError:
        raise ApiError(HTTPStatus.BAD_REQUEST, "the body is nested too deeply", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise ApiError(HTTPStatus.BAD_REQUEST, "the body must be a JSON object", code="invalid_json")
    if len(fields) > _MOST_FIELDS:
        raise ApiError(HTTPStatus.BAD_REQUEST, f"the body has {len(fields)} fields", code="unknown_parameter")
    return fields


def _not_utf8(body: bytes) -> str | None:
    """The error of a body in another encoding, if any: PowerShell sends Latin-1 unless it is told otherwise."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return (
            f"byte {error.start} is not UTF-8; in PowerShell, -ContentType 'application/json; charset=utf-8' sends that"
        )
    return None


def _lone_surrogate(body: bytes) -> str | None:
    """The error of an escaped UTF-16 surrogate without its pair, if any: the decoder does not name it."""
    alone = next((each[1].decode() for each in _ESCAPES.finditer(body, 0, _MOST_SEARCHED) if each[1]), None)
    return None if alone is None else f"\\{alone} is half of a character's escape, and the other half is missing"


_ESCAPES = re.compile(rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL)
_MOST_SEARCHED = 1 << 20
"""Bytes of a body that are searched for the cause of an error."""


def decode_query(query: str, kind: type[S]) -> S:
    """Decodes the query parameters of a URL. Raises ApiError, which names the parameter.

    A parameter whose default is a tuple may be repeated, also as NAME[], as OpenAI's clients write lists; of others,
    the last one counts.
    """
    several = [field.name for field in msgspec.structs.fields(kind) if isinstance(field.default, tuple)]
    fields: dict[str, Any] = {}
    for name, value in urllib.parse.parse_qsl(query, keep_blank_values=True):
        if (plain := name.removesuffix("[]")) in several:
            fields.setdefault(plain, []).append(value)
        else:
            fields[name] = value
    for name in fields:
        if name not in kind.__struct_fields__:
            raise _unknown(name, kind.__struct_fields__)
    try:
        return msgspec.convert(fields, threadsafe(kind), strict=False)
    except msgspec.ValidationError as error:
        raise invalid_body(str(error), kind) from None


def _each_message(messages: Sequence[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each message and its place in the body, also within the conversations of a batch. Skips what is not an object."""
    for index, each in enumerate(messages[:MOST_MESSAGES]):
        if isinstance(each, list):
            inner = enumerate(each[:MOST_MESSAGES])
            yield from ((f"messages[{index}][{at}]", one) for at, one in inner if isinstance(one, dict))
        elif isinstance(each, dict):
            yield f"messages[{index}]", each


def _is_nothing(value: Any, other: Neutral) -> bool:
    """Whether a field that is accepted at values without effect has one of them."""
    return value is None or any(each is ANY or _same(value, each) for each in other.values)


def _is_without_effect(value: Any, other: Neutral | SameAs | None) -> bool:
    """Whether no answer depends on a field at this value. other: what the field means, if it is known."""
    return (
        other is None
        or value is None
        or (isinstance(other, Neutral) and (other.is_harmless or _is_nothing(value, other)))
    )


def _in_snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])[A-Z]", lambda capital: f"_{capital[0].lower()}", name[:_LONGEST_NAME])


def _same(value: Any, neutral: Any) -> bool:
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def _unknown(name: str, known: tuple[str, ...], where: str = "") -> ApiError:
    close = closest(name, known)
    name = shortened(name, _LONGEST_NAME)
    hint = f"; did you mean {close}?" if close is not None else ""
    of = f" of {where}" if where else ""
    return bad_field(f"{where}.{name}" if where else name, f"unknown field {name!r}{of}{hint}", "unknown_parameter")


def closest(name: str, known: tuple[str, ...]) -> str | None:
    """The known name of which `name` may be a misspelling; None if there is none."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=_MISSPELT) if len(name) <= _LONGEST_NAME else []
    return close[0] if close else None


_MISSPELT = 0.75
"""The similarity (difflib's ratio) from which a name counts as a misspelling of another."""
_MOST_FIELDS, _MOST_UNKNOWN = 256, 8
_MOST_IGNORED = 100
_LONGEST_NAME = 64
"""Characters of a field's name that are compared and quoted; a client may send millions."""
_MISSING, _EXTRA = "Object missing required field `", "Object contains unknown field `"


def invalid_body(text: str, kind: type[msgspec.Struct]) -> ApiError:
    """Converts msgspec's message, such as 'Expected `int`, got `str` - at `$.max_tokens`'; it quotes names in full."""
    what, at, where = text.rpartition(" - at `$")
    if not at:
        what, where = text, ""
    where = shortened(where.removeprefix(".").removesuffix("`"), LONGEST_PARAM)
    for begin, code in ((_MISSING, "missing_required_parameter"), (_EXTRA, "unknown_parameter")):
        if not what.startswith(begin):
            continue
        name = shortened(what[len(begin) :].removesuffix("`"), _LONGEST_NAME)
        where = f"{where}.{name}" if where else name
        message = f"{where} is required" if begin == _MISSING else f"unknown field {where}"
        return bad_field(where, message, code)
    what = shortened(what, LONGEST_PARAM).replace("`", "")
    if values := list(dict.fromkeys(value for hint in _types_at(where, kind) for value in _literals(hint))):
        what += f"; it must be one of {', '.join(values)}"
    return bad_field(where, f"{where}: {what[:1].lower()}{what[1:]}", "invalid_type")


def _types_at(where: str, kind: type[msgspec.Struct]) -> list[Any]:
    """The types that a field which msgspec names, such as `messages[0].role`, may have in a struct: several where it is
    in one of several structs. Of an element it is that of its list."""
    found: list[Any] = [kind]
    for name in re.sub(r"\[[^\]]*\]", "", where).split("."):
        structs = [struct for each in found for struct in _structs(each)]
        fields = [field for struct in structs for field in msgspec.structs.fields(struct)]
        found = [field.type for field in fields if field.encode_name == name]
    return found


def _structs(hint: Any) -> tuple[type[msgspec.Struct], ...]:
    """All structs in a type."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return (hint,)
    return tuple(each for part in typing.get_args(hint) for each in _structs(part))


def _literals(hint: Any) -> tuple[str, ...]:
    """The values of all Literals in a field's type."""
    if typing.get_origin(hint) is Literal:
        return tuple(map(str, typing.get_args(hint)))
    return tuple(each for part in typing.get_args(hint) for each in _literals(part))
