"""`StructuredOutputsParams`: the form that an answer has to have, under vLLM's names, and the forms of OpenAI's API.

    SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
    {"response_format": {"type": "json_schema", "json_schema": {"name": "cat", "schema": {...}, "strict": true}}}

What is cheap to see is checked here: types, that there is one form, and that JSON is JSON. Whether a schema or a
grammar can be followed only the engine knows.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.core.options.structured_outputs import BACKENDS, split_backend
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
"""Fields of requests to older servers, and what took over."""
MOST_DEPTH = 100
"""Of JSON within JSON in a schema: what a library reads."""
_IS_FLAG = "json_object"
_FLAGS = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties")
_WRITER = json.JSONEncoder(ensure_ascii=False)


@dataclass
class StructuredOutputsParams:
    """Exactly one of the first five and structural_tag says the form.

    Raises InvalidRequestError, which names the field, when it is made.
    """

    json: str | dict[str, Any] | None = None
    """A JSON schema, as text or as what it stands for: the answer is JSON that it admits."""
    regex: str | None = None
    """A regular expression that the whole answer matches."""
    choice: list[str] | None = None
    """The answer is one of these."""
    grammar: str | None = None
    """A grammar of the answer in Lark's or GBNF's notation; its rule `start`, or `root`, is the whole."""
    json_object: bool | None = None
    """The answer is some JSON object."""
    disable_any_whitespace: bool = False
    """JSON without spaces."""
    disable_additional_properties: bool = False
    """Objects have only the properties that the schema names."""
    whitespace_pattern: str | None = None
    """A regular expression of the white space between the parts of JSON; with "" there is none."""
    structural_tag: str | dict[str, Any] | None = None
    """Text with parts that have a form: {"format": ...} as xgrammar has it, or the older {"structures": [{"begin",
    "schema", "end"}], "triggers": [...]}."""
    disable_fallback: bool = False
    """What the engine's first library cannot do is refused."""
    backend: str | None = None
    """The library that follows it, as structured_outputs_config names it; None is the engine's own."""

    def __post_init__(self) -> None:
        self._checked: tuple[str, str] | None = None
        self.verify()

    def verify(self) -> None:
        """Raises InvalidRequestError for the first field whose value cannot be.

        It is called several times for a request, as values may be changed meanwhile: a form that is written as it was
        the last time is not looked through again."""
        given = self._given()
        if len(given) != 1:
            named = f"; given are {', '.join(given)}" if given else ""
            raise InvalidRequestError(f"{_FIELD} needs exactly one of {', '.join(FORMS)}{named}")
        name = given[0]
        value = getattr(self, name)
        if self._checked is None and _is_longer(value, MOST_GRAMMAR_CHARACTERS):  # before it is read whole
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
        """vLLM's question: whether no form is asked for. False, but for one that was taken away since."""
        return all(getattr(self, name) is None for name in FORMS)

    def all_non_structural_tag_constraints_none(self) -> bool:
        return all(getattr(self, name) is None for name in FORMS if name != "structural_tag")

    def to_wire(self) -> StructuredOutput:
        name: Any = self._given()[0]
        backend, more = split_backend(self.backend or "")
        flags = {flag: more.get(flag, False) or getattr(self, flag) for flag in _FLAGS}
        flags["disable_any_whitespace"] |= self.whitespace_pattern == ""
        return StructuredOutput(
            kind=name,
            text=self._text(name),
            whitespace_pattern=self.whitespace_pattern or "",
            backend=backend,
            **flags,
        )

    def _given(self) -> list[str]:
        """json_object=False asks for nothing; False in the others is a mistake, which is told by name."""
        return [name for name in FORMS if (value := getattr(self, name)) is not None and (value or name != _IS_FLAG)]

    @staticmethod
    def _check_backend(backend: str) -> None:
        name, more = split_backend(backend)
        if name not in BACKENDS or not more.keys() <= set(_FLAGS):
            raise _bad("backend", f"is {backend!r}; there are {', '.join(BACKENDS)}")

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
    """Raises InvalidRequestError for a name that is none of its fields."""
    known = list(StructuredOutputsParams.__dataclass_fields__)
    for name in fields:
        if name not in known:
            raise InvalidRequestError(f"{_FIELD} has no field {name!r}; it has {', '.join(known)}")
    return StructuredOutputsParams(**fields)


class GuidedDecodingParams(StructuredOutputsParams):
    """Their name in older versions."""

    @classmethod
    def from_optional(cls, json: Any = None, **given: Any) -> GuidedDecodingParams | None:
        """None where no form is given. json: also a pydantic class, whose schema it is."""
        if hasattr(json, "model_json_schema"):
            json = json.model_json_schema()
        fields = {"json": json, **given}
        if all(fields.get(name) is None for name in FORMS):
            return None
        return cls(**{name: value for name, value in fields.items() if value is not None})


def field_of_body(body: Any) -> str:
    """The field by which a request's body asks for a form; "structured_outputs" where none does."""
    if isinstance(body.structured_outputs, dict):
        forms = (name for name in FORMS if body.structured_outputs.get(name) not in (None, False))
        return next((f"structured_outputs.{name}" for name in forms), "structured_outputs")
    names = ("response_format", *RETIRED)
    return next((name for name in names if getattr(body, name) is not None), "structured_outputs")


def from_body(body: Any) -> StructuredOutputsParams | None:
    """From the fields of a request's body; None where it asks for no form. Raises InvalidRequestError."""
    retired = {name: value for name in RETIRED if (value := getattr(body, name)) is not None}
    asked_by = {RETIRED[name]: name for name in retired} | {"backend": "guided_decoding_backend"}
    if body.response_format is not None:
        asked_by["structural_tag"] = "response_format"
    try:
        named = {
            "structured_outputs": body.structured_outputs,
            "response_format": from_response_format(body.response_format),
            "guided_...": {RETIRED[name]: value for name, value in retired.items()} or None,
        }
        given = {name: value for name, value in named.items() if value is not None}
        forms = [name for name, value in retired.items() if RETIRED[name] in FORMS and value is not False]
        if len(forms) > 1:
            raise InvalidRequestError(f"SamplingParams.{forms[1]} is given beside {forms[0]}: give one of them")
        if len(given) > 1:
            raise InvalidRequestError(f"{_FIELD} is given several times, as {' and '.join(given)}: give one of them")
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


def from_response_format(response_format: Any) -> StructuredOutputsParams | None:
    """OpenAI's field; None for what asks for nothing. Raises InvalidRequestError."""
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        if (schema := response_format.get("schema")) is not None:  # llama.cpp's way to give one
            if not isinstance(schema, Mapping):
                raise InvalidRequestError("SamplingParams.response_format.schema must be an object: a JSON schema")
            return StructuredOutputsParams(json=dict(schema))
        return StructuredOutputsParams(json_object=True)
    if kind == "json_schema":
        return _from_json_schema(response_format.get("json_schema"))
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag={k: v for k, v in response_format.items() if k != "type"})
    raise InvalidRequestError(
        "SamplingParams.response_format must be an object of type text, json_object, json_schema or structural_tag"
    )


def _from_json_schema(wrapped: Any) -> StructuredOutputsParams:
    schema = wrapped.get("schema") if isinstance(wrapped, Mapping) else None
    if not isinstance(schema, Mapping):
        raise InvalidRequestError(
            'SamplingParams.response_format.json_schema must be an object such as {"name": "answer", "schema": {...}}'
        )
    if not isinstance(wrapped.get("strict"), bool | None):
        raise InvalidRequestError("SamplingParams.response_format.json_schema.strict must be true or false")
    # strict false only lets a server know less of JSON schemas; ours follows the whole schema, or says why not.
    return StructuredOutputsParams(json=dict(schema))


_FIELD = "SamplingParams.structured_outputs"


def _bad(name: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"{_FIELD}.{name} {why}")


def _too_long(name: str) -> InvalidRequestError:
    return _bad(name, f"must have at most {MOST_GRAMMAR_CHARACTERS} characters")


def _is_longer(value: Any, most: int) -> bool:
    """Whether its JSON has surely more characters. Looks at no more of it than that takes."""
    size, left = 0, [value]
    while left and size <= most:
        each = left.pop()
        size += 2  # at least, with what follows
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
    """That it is JSON, and not nested deeper than libraries read."""
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
