"""`StructuredOutputsParams`: constraints on an output's form, under vLLM's names, and those of OpenAI's API.

    SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
    {"response_format": {"type": "json_schema", "json_schema": {"name": "cat", "schema": {...}, "strict": true}}}

Cheap checks are made here: types, that exactly one constraint is given, and that JSON is valid. Only the engine can
tell whether it supports a schema or a grammar.
"""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.core.options.structured_outputs import BACKENDS, split_backend
from headrace.frontend.request.lists import elements
from headrace.frontend.request.parameters.sampling_fields import check_attribute
from headrace.ipc.failure import InvalidRequestError
from headrace.ipc.messages import MOST_GRAMMAR_CHARACTERS, StructuredOutput

FORMS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
RETIRED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "guided_whitespace_pattern": "whitespace_pattern",
    "structural_tag": "structural_tag",
}
"""Request fields of older vLLM servers, and the fields that replaced them."""
MOST_DEPTH = 100
"""Deepest nesting of a JSON schema; grammar libraries accept no more."""
_IS_FLAG = "json_object"
_FLAGS = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties")
_WRITER = json.JSONEncoder(ensure_ascii=False)


@dataclass
class StructuredOutputsParams:
    """A constraint on the output: exactly one of the first five fields and structural_tag must be set.

    The constructor raises InvalidRequestError, which names the field.
    """

    json: str | dict[str, Any] | None = None
    """A JSON schema, as text or as a dict: the answer is JSON that is valid under it."""
    regex: str | None = None
    """A regular expression that the whole answer matches."""
    choice: list[str] | None = None
    """The answer is one of these."""
    grammar: str | None = None
    """A grammar of the answer in Lark's or GBNF's notation, with the start rule `start` or `root`."""
    json_object: bool | None = None
    """The answer is any JSON object."""
    disable_any_whitespace: bool = False
    """JSON has no white space between its parts."""
    disable_additional_properties: bool = False
    """Objects have only the properties that the schema names."""
    whitespace_pattern: str | None = None
    """A regular expression for the white space between the parts of JSON; "" allows none."""
    structural_tag: str | dict[str, Any] | None = None
    """Free text with constrained parts: {"format": ...} as in xgrammar, or the older {"structures": [{"begin",
    "schema", "end"}], "triggers": [...]}."""
    disable_fallback: bool = False
    """Refuse a constraint that the engine's first grammar library does not support, instead of trying the next one."""
    backend: str | None = None
    """The grammar library to use, named as in structured_outputs_config; None means the engine's choice."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dataclass_fields__:
            check_attribute(self, name, self.__dataclass_fields__)
        super().__setattr__(name, value)

    def __post_init__(self) -> None:
        self._checked: tuple[str, str] | None = None
        if (several := elements(self.choice)) is not None:
            self.choice = list(several)
        self.verify()

    def verify(self) -> None:
        """Raises InvalidRequestError for the first invalid field.

        Runs several times per request, since fields may be changed in between; a constraint whose text is the same as
        last time is not parsed again."""
        given = self._given()
        if len(given) != 1:
            named = f"; given are {', '.join(given)}" if given else ""
            raise InvalidRequestError(f"{_FIELD} needs exactly one of {', '.join(FORMS)}{named}")
        name = given[0]
        value = getattr(self, name)
        if self._checked is None and _is_longer(value, MOST_GRAMMAR_CHARACTERS):  # before all of it is encoded
            raise _too_long(name)
        if name == "json_object":
            _check_type(name, value, bool, "True")
        elif name == "choice":
            if not isinstance(value, list | tuple) or not value or not all(isinstance(each, str) for each in value):
                raise _bad(name, "must be a list of texts, at least one")
        elif name in ("json", "structural_tag"):
            _check_type(
                name, value, str | Mapping, "a schema, as JSON or as a dict" if name == "json" else "JSON or a dict"
            )
        else:
            _check_type(name, value, str, "a text that is not empty")
            if not value:
                raise _bad(name, "must be a text that is not empty")
        for flag in _FLAGS:
            _check_type(flag, getattr(self, flag), bool, "True or False")
        if self.whitespace_pattern is not None:
            _check_type("whitespace_pattern", self.whitespace_pattern, str, "a regular expression")
        if self.backend is not None:
            _check_type("backend", self.backend, str, f"one of {', '.join(BACKENDS)}")
            self._check_backend(self.backend)
        text = self._text(name)
        if (name, text) == self._checked:
            return
        if name in ("json", "structural_tag"):
            _check_json(name, value)
        if len(text) > MOST_GRAMMAR_CHARACTERS:
            raise _too_long(name)
        self._checked = name, text

    def all_constraints_none(self) -> bool:
        """vLLM's method: whether no constraint is set. True only if fields were reset after construction."""
        return all(getattr(self, name) is None for name in FORMS)

    def all_non_structural_tag_constraints_none(self) -> bool:
        return all(getattr(self, name) is None for name in FORMS if name != "structural_tag")

    def to_wire(self) -> StructuredOutput:
        name: Any = self._given()[0]
        backend, more = split_backend(self.backend or "")
        flags = {flag: more.get(flag, False) or getattr(self, flag) for flag in _FLAGS}
        flags["disable_any_whitespace"] |= self.whitespace_pattern == ""
        return StructuredOutput(
            kind=name, text=self._text(name), whitespace_pattern=self.whitespace_pattern or "", backend=backend, **flags
        )

    def _given(self) -> list[str]:
        """Names of the constraints that are set. json_object=False sets none; False in another field counts, so that
        `verify` refuses it by name."""
        return [name for name in FORMS if (value := getattr(self, name)) is not None and (value or name != _IS_FLAG)]

    @staticmethod
    def _check_backend(backend: str) -> None:
        name, more = split_backend(backend)
        if name not in BACKENDS or not more.keys() <= set(_FLAGS):
            raise _bad("backend", f"is {backend!r}; allowed: {', '.join(BACKENDS)}")

    def _text(self, name: str) -> str:
        value = getattr(self, name)
        if name == "json_object":
            return ""
        if isinstance(value, str):
            return value
        try:
            return _WRITER.encode(value)
        except (ValueError, TypeError) as error:
            raise _bad(name, f"is not valid JSON: {error}") from None
        except RecursionError:
            raise _bad(name, f"is nested deeper than {MOST_DEPTH} levels") from None


def structured_outputs_from(fields: Mapping[str, Any]) -> StructuredOutputsParams:
    """From a dict. Raises InvalidRequestError for an unknown field."""
    known = list(StructuredOutputsParams.__dataclass_fields__)
    for name in fields:
        if name not in known:
            raise InvalidRequestError(f"{_FIELD} has no field {name!r}; it has {', '.join(known)}")
    return StructuredOutputsParams(**fields)


class GuidedDecodingParams(StructuredOutputsParams):
    """The name of StructuredOutputsParams in older versions of vLLM."""

    @classmethod
    def from_optional(cls, json: Any = None, **given: Any) -> GuidedDecodingParams | None:
        """None if no constraint is given. json: a schema, or a pydantic class that has one."""
        if hasattr(json, "model_json_schema"):
            json = json.model_json_schema()
        fields = {"json": json, **given}
        if all(fields.get(name) is None for name in FORMS):
            return None
        return cls(**{name: value for name, value in fields.items() if value is not None})


def field_of_body(body: Any) -> str:
    """The field of a request's body that sets the constraint; "structured_outputs" if none does."""
    if isinstance(body.structured_outputs, dict):
        forms = (name for name in FORMS if body.structured_outputs.get(name) not in (None, False))
        return next((f"structured_outputs.{name}" for name in forms), "structured_outputs")
    names = ("response_format", *RETIRED)
    return next((name for name in names if getattr(body, name) not in (None, False)), "structured_outputs")


def from_body(body: Any) -> StructuredOutputsParams | None:
    """From the fields of a request's body; None if it sets no constraint. Raises InvalidRequestError, which names the
    body's field."""
    retired = {}
    for name in RETIRED:
        if (value := getattr(body, name)) not in (None, False):
            retired[name] = value
    asked = (body.response_format, body.structured_outputs, body.guided_decoding_backend)
    if not retired and asked == (None, None, None):
        return None
    asked_by = {RETIRED[name]: name for name in retired} | {"backend": "guided_decoding_backend"}
    if body.response_format is not None:
        asked_by |= dict.fromkeys(("json", "structural_tag"), "response_format")
    try:
        named = {
            "structured_outputs": body.structured_outputs,
            "response_format": from_response_format(body.response_format),
            "guided_...": {RETIRED[name]: value for name, value in retired.items()} or None,
        }
        given = {name: value for name, value in named.items() if value is not None}
        forms = [name for name in retired if RETIRED[name] in FORMS]
        if len(forms) > 1:
            raise InvalidRequestError(f"SamplingParams.{forms[1]} is given beside {forms[0]}: give one of them")
        if len(given) > 1:
            raise InvalidRequestError(f"{_FIELD} is given several times, as {' and '.join(given)}: give one of them")
        if retired and not forms:
            alone = next(iter(retired))
            raise InvalidRequestError(f"SamplingParams.{alone} is given, and the request asks for no form")
        found = next(iter(given.values()), None)
        params = structured_outputs_from(found) if isinstance(found, dict) else found
        return _with_backend(params, body.guided_decoding_backend)
    except InvalidRequestError as error:
        said = str(error)
        if body.structured_outputs is None:
            for name, written in asked_by.items():
                said = said.replace(f"{_FIELD}.{name} ", f"SamplingParams.{written} ", 1)
        raise InvalidRequestError(said) from None


def _with_backend(params: StructuredOutputsParams | None, backend: str | None) -> StructuredOutputsParams | None:
    if backend is None or (params is None and backend == "auto"):
        return params
    if params is None:
        raise _bad("backend", f"is {backend!r}, and the request asks for no form")
    if params.backend not in (None, backend):
        raise _bad("backend", f"is {params.backend!r}, and guided_decoding_backend {backend!r}: give one of them")
    return dataclasses.replace(params, backend=backend)


_KEYS_OF_FORMATS: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        "text": (),
        "json_object": ("schema", "value"),
        "json_schema": ("json_schema", "schema", "value"),
        "regex": ("regex", "pattern", "value"),
        "grammar": ("grammar", "value"),
    }
)
"""By type of a response_format, the keys that say more: OpenAI's first, then those of llama.cpp, TGI and Fireworks."""


def from_response_format(response_format: Any) -> StructuredOutputsParams | None:
    """From OpenAI's response_format; None if it sets no constraint. Raises InvalidRequestError."""
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag={k: v for k, v in response_format.items() if k != "type"})
    if not isinstance(kind, str) or kind not in _KEYS_OF_FORMATS:
        raise InvalidRequestError(
            "SamplingParams.response_format must be an object of type text, json_object, json_schema, structural_tag, "
            "regex or grammar"
        )
    given = {key: value for key, value in response_format.items() if key != "type" and value is not None}
    keys = _KEYS_OF_FORMATS[kind]
    about = ("name", "description", "strict") if kind == "json_schema" else ()  # beside the schema, as in responses
    if unknown := [key for key in given if key not in (*keys, *about)]:
        has = f"has {', '.join(keys)}" if keys else "has nothing besides its type"
        raise InvalidRequestError(f"SamplingParams.response_format: {unknown[0]!r:.80} is unknown; one of {kind} {has}")
    form = next((given[key] for key in keys if key in given), None)
    if kind == "text":
        return None
    if kind == "json_schema" and (form is None or "json_schema" in given):
        return _from_json_schema(form)
    if kind in ("json_object", "json_schema"):
        if form is None:
            return StructuredOutputsParams(json_object=True)
        if not isinstance(form, Mapping):
            raise InvalidRequestError("SamplingParams.response_format.schema must be an object: a JSON schema")
        return StructuredOutputsParams(json=dict(form))
    if not isinstance(form, str):
        raise InvalidRequestError(f"SamplingParams.response_format.{keys[0]} must be a text")
    return StructuredOutputsParams(regex=form) if kind == "regex" else StructuredOutputsParams(grammar=form)


def _from_json_schema(wrapped: Any) -> StructuredOutputsParams:
    schema = wrapped.get("schema") if isinstance(wrapped, Mapping) else None
    if not isinstance(schema, Mapping):
        raise InvalidRequestError(
            "SamplingParams.response_format.json_schema must be an object, and must be provided with its schema: "
            '{"name": "answer", "schema": {...}}'
        )
    if not isinstance(wrapped.get("strict"), bool | None):
        raise InvalidRequestError("SamplingParams.response_format.json_schema.strict must be true or false")
    # strict=false only permits a server to support less of JSON Schema; ours follows a schema fully or refuses it.
    return StructuredOutputsParams(json=dict(schema))


_FIELD = "SamplingParams.structured_outputs"


def _bad(name: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"{_FIELD}.{name} {why}")


def _too_long(name: str) -> InvalidRequestError:
    return _bad(name, f"must have at most {MOST_GRAMMAR_CHARACTERS} characters")


def _is_longer(value: Any, most: int) -> bool:
    """Whether the value's JSON is certain to have more than `most` characters. Stops as soon as it is."""
    size, left = 0, [value]
    while left and size <= most:
        each = left.pop()
        size += 2  # the least that a value and its separator take
        if isinstance(each, str):
            size += len(each)
        elif isinstance(each, Mapping | list | tuple) and size + 2 * len(each) > most:
            return True
        elif isinstance(each, Mapping):
            size += sum(len(key) if isinstance(key, str) else 1 for key in each)
            left.extend(each.values())
        elif isinstance(each, list | tuple):
            left.extend(each)
    return size > most


def _check_type(name: str, value: Any, kind: Any, right: str) -> None:
    if not isinstance(value, kind):
        raise _bad(name, f"is {type(value).__name__}, and must be {right}")


def _check_json(name: str, value: Any) -> None:
    """Checks that it is valid JSON, and not nested deeper than MOST_DEPTH. Raises InvalidRequestError."""
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise _bad(name, f"is not valid JSON: {error}") from None
    except RecursionError:
        raise _bad(name, f"is nested deeper than {MOST_DEPTH} levels") from None
    if isinstance(parsed, bool) and name == "json":
        return
    if not isinstance(parsed, Mapping):
        raise _bad(name, "must be a JSON object")
    if _is_deeper(parsed, MOST_DEPTH):
        raise _bad(name, f"is nested deeper than {MOST_DEPTH} levels")
    if name == "structural_tag" and not {"format", "structures"} & parsed.keys():
        raise _bad(name, "must have a format, or structures and triggers")


def _is_deeper(value: Any, most: int) -> bool:
    level = [value]
    for _ in range(most):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return True


def schema_of_answer(form: StructuredOutputsParams | None) -> Any:
    """The schema of an answer that has to be JSON; None for others. With tools, the answer may be calls instead."""
    if form is None or (form.json is None and not form.json_object):
        return None
    if form.json is None:
        return {"type": "object"}
    return msgspec.json.decode(form.json) if isinstance(form.json, str) else form.json
