"""Rewrites JSON schemas in keywords that the grammar libraries follow, and refuses others by name.

Keywords without effect are dropped (unknown formats, `uniqueItems: false`), and some are written in others (`oneOf` of
alternatives that exclude each other as `anyOf`, `propertyNames` as `patternProperties`). A rewritten schema never
allows more than the original. What is left of REFUSED after that is refused, with what to write instead.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote

from headrace.core.structured_output.exact_numbers import check_exact, check_multiples, with_exact_bounds
from headrace.core.structured_output.expressions import leading_assertions

FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""Formats that are followed. All others are annotations, as JSON Schema has it."""
_DATE = (
    r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    r"|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
IN_PATTERNS: Mapping[str, str] = MappingProxyType(
    {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}[Tt]{_TIME}$"}
)
"""Formats for which llguidance lets through what programs cannot read: February 29 in every year, a leap second in
every minute (no leap second here)."""
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "not": "write what is allowed",
        "if": "write the cases as anyOf",
        "contains": "write the items",
        "uniqueItems": "it is followed for up to 4 values of enum or const; for more, leave it out",
        "dependentRequired": "write the cases as anyOf",
        "dependentSchemas": "write the cases as anyOf",
        "dependencies": "write the cases as anyOf",
        "propertyNames": "it is followed with enum, const, pattern and lengths, without patternProperties beside it",
        "unevaluatedProperties": "write additionalProperties",
        "unevaluatedItems": "write items",
        "$dynamicRef": "write $ref",
        "$recursiveRef": "write $ref",
        "oneOf": "its alternatives do not exclude each other for certain: write anyOf",
    }
)
"""Keywords that are not followed, or not always, and what to write instead."""
_DROPPED = (
    *("$vocabulary", "$dynamicAnchor", "$recursiveAnchor", "$comment", "deprecated"),
    *("contentSchema", "contentMediaType", "contentEncoding", "discriminator", "externalDocs", "xml"),
)
"""Annotations. Libraries refuse some of them in some drafts."""
_NOTES = ("title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_BEYOND_ANSWERS = 1 << 31
"""As many characters, values or properties no answer has."""
PLAIN_REFERENCE = re.compile(r"#(?:/(?:\$defs|definitions)/[A-Za-z0-9_.-]+)?")
"""To the whole schema, or to a definition whose name has no escapes."""
_IN_PLACE = ("$ref", "anyOf", "oneOf", "allOf", "if", "dependentSchemas", "$dynamicRef", "$recursiveRef")
"""Keywords whose schemas apply to the same value."""
_MOST_UNIQUE = 4
"""Most values of a list without repetition: their orders are written one by one."""
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose objects have schemas by name."""
_SCHEMAS = (
    *("items", "prefixItems", "additionalItems", "additionalProperties", "anyOf", "allOf", "oneOf"),
    *("not", "if", "then", "else", "contains", "propertyNames", "unevaluatedProperties", "unevaluatedItems"),
)
_VALUES = ("enum", "const", "default", "examples", "required", "dependentRequired")
_VALUES_OF_NULL = ("const", "default", "examples")
"""Keywords that null is a value for."""
_TYPES = ("null", "boolean", "number", "string", "array", "object")
_TYPE_NAMES = {name: name for name in (*_TYPES, "integer")} | {
    "dict": "object",
    "str": "string",
    "list": "array",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
}
"""JSON Schema's types, by their names and by Python's."""


def in_followed_keywords(schema: Any) -> Any:
    """The schema rewritten. Raises ValueError, with the place, for what is not followed."""
    return _Rewriting(schema).whole()


class _Rewriting:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._is_merged = _adds_bounds(root)
        self._added = dict[tuple[str, bool], str]()
        """The names of definitions to add: of a reference's schema, and whether that is needed closed."""

    def whole(self) -> Any:
        if self._is_merged:
            check_multiples(set(_steps(self._root)))
        found = self._rewritten(self._root, "")
        if not self._added:
            return found
        definitions, done = dict(found.get("$defs") or {}), 0
        while done < len(self._added):  # those may need further ones
            for (reference, is_closed), name in list(self._added.items())[done:]:
                schema = _lookup(self._root, reference)
                definitions[name] = self._rewritten(_closed(schema) if is_closed else schema, reference[1:])
                done += 1
        return {**found, "$defs": definitions}

    def _add(self, reference: str, *, is_closed: bool) -> str:
        """A reference to a definition that is added for this one."""
        if (reference, is_closed) not in self._added:
            known = self._root.get("$defs") or {}
            names = (f"added_{number}" for number in itertools.count(len(self._added)))
            self._added[reference, is_closed] = next(name for name in names if name not in known)
        return f"#/$defs/{self._added[reference, is_closed]}"

    def _reference(self, reference: str) -> str:
        """To a definition, by a name without escapes. Of the libraries one decodes no escapes, one takes nothing but
        ASCII, and neither finds what has been rewritten."""
        if PLAIN_REFERENCE.fullmatch(reference) or _lookup(self._root, reference) is None or self._has_resources:
            return reference
        return self._add(reference, is_closed=False)

    @functools.cached_property
    def _has_resources(self) -> bool:
        """Some schema within has a URI of its own, which references there begin at."""
        return any("$id" in each for each in _schemas_in(self._root) if each is not self._root)

    def _rewritten(self, schema: Any, where: str) -> Any:
        if isinstance(schema, list):
            return [self._rewritten(each, f"{where}/{index}") for index, each in enumerate(schema)]
        if not isinstance(schema, dict):
            return schema
        schema = self._changed(schema, where or "/")
        if isinstance(reference := schema.get("$ref"), str):
            schema = {**schema, "$ref": self._reference(reference)}
        return {name: self._within(name, value, f"{where}/{name}") for name, value in schema.items()}

    def _within(self, name: str, value: Any, where: str) -> Any:
        """A keyword's value, with the schemas in it rewritten."""
        if name in _VALUES:
            return value
        if name in _NAMED and isinstance(value, dict):
            return {key: self._rewritten(each, f"{where}/{key}") for key, each in value.items()}
        if name in _SCHEMAS:
            return self._rewritten(value, where)
        try:
            return self._rewritten(value, where)  # a reference may lead there
        except ValueError:
            return value

    def _changed(self, schema: dict[str, Any], where: str) -> dict[str, Any]:
        """The schema itself rewritten, and not yet the schemas within it."""
        # Clients write keywords that a program has left out as null.
        found = {
            name: value
            for name, value in schema.items()
            if name not in _DROPPED and (value is not None or name in _VALUES_OF_NULL)
        }
        if "type" in found:
            found["type"] = _known_types(found["type"])
        for name in ("enum", "const"):
            check_exact(found.get(name), where)
        found = with_exact_bounds(found, where, is_merged=self._is_merged)
        for name in _COUNTS:
            if isinstance(value := found.get(name), float) and value.is_integer():
                found[name] = value = int(value)
            if isinstance(value, int) and value >= _BEYOND_ANSWERS:  # libraries count in 32 bits
                if name.startswith("min"):
                    raise ValueError(f"{name} is 2^31 or more, which no answer can have (at {where})")
                del found[name]
        if isinstance(form := found.get("format"), str) and (form not in FORMATS or form in IN_PATTERNS):
            del found["format"]
            if form in IN_PATTERNS and "pattern" in found:
                found["allOf"] = [*found.get("allOf", []), {"pattern": IN_PATTERNS[form]}]
            elif form in IN_PATTERNS:
                found["pattern"] = IN_PATTERNS[form]
        if not found.keys() & _REWRITTEN:
            return found
        for name in ("items", "propertyNames"):
            if name in found and ("uniqueItems" in found or name == "propertyNames"):
                found[name] = _without_notes(self._resolved(found[name]))
        for change in _CHANGES:
            found = change(found)
        check_exact(found.get("enum"), where)  # which may come from within
        _check_distinct_names(found, where)
        if isinstance(alternatives := found.get("oneOf"), list):
            found = self._one_of(found, alternatives)
        for name in found.keys() & REFUSED.keys():
            raise ValueError(f"{name} is not followed: {REFUSED[name]} (at {where})")
        return found

    def _one_of(self, schema: dict[str, Any], alternatives: list[Any]) -> dict[str, Any]:
        """With `anyOf` instead of `oneOf`, if the alternatives exclude each other, perhaps once they are closed."""
        whole = [self._resolved(each) for each in alternatives]
        if not self._exclude_each_other(whole):
            if not self._exclude_each_other([_closed(each) for each in whole]):
                return schema
            alternatives = [self._in_closed_form(each) for each in alternatives]
        rest = {name: value for name, value in schema.items() if name != "oneOf"}
        if "anyOf" not in rest:
            return {**rest, "anyOf": alternatives}
        return {**rest, "allOf": [*rest.get("allOf", []), {"anyOf": alternatives}]}

    def _in_closed_form(self, schema: Any) -> Any:
        if self._resolved(schema) is schema:
            return _closed(schema)
        return {"$ref": self._add(schema["$ref"], is_closed=True)}

    def _exclude_each_other(self, schemas: list[Any]) -> bool:
        return all(self._excludes(first, second) for first, second in itertools.combinations(schemas, 2))

    def _excludes(self, first: Any, second: Any, depth: int = 0) -> bool:
        """Whether no value is valid under both, as far as types, values and required properties tell."""
        first, second = self._resolved(first), self._resolved(second)
        if first is False or second is False:
            return True
        if not isinstance(first, dict) or not isinstance(second, dict) or depth > 8:
            return False
        for one, other in ((first, second), (second, first)):
            parts = one.get("anyOf") or one.get("oneOf")
            if isinstance(parts, list) and all(self._excludes(part, other, depth + 1) for part in parts):
                return True
        if not _types_of(first) & _types_of(second):
            return True
        values, others = _values_of(first), _values_of(second)
        if values is not None and others is not None and not values & others:
            return True
        if _types_of(first) & _types_of(second) != {"object"}:
            return False
        return any(
            self._differ_in(first, second, name, depth)
            for name in (*first.get("required", ()), *second.get("required", ()))
        )

    def _differ_in(self, first: dict[str, Any], second: dict[str, Any], name: str, depth: int) -> bool:
        """Whether a property, which one of two objects requires, tells them apart."""
        schemas = []
        for each in (first, second):
            properties = each.get("properties", {})
            others = {} if "patternProperties" in each else each.get("additionalProperties", {})
            schemas.append(properties.get(name, others))
        return self._excludes(schemas[0], schemas[1], depth + 1)

    def _resolved(self, schema: Any) -> Any:
        """The schema that a reference without other keywords than annotations leads to."""
        for _ in range(20):
            if not isinstance(schema, dict) or not isinstance(reference := schema.get("$ref"), str):
                break
            found = _lookup(self._root, reference)
            if found is None or any(name in schema for name in ("properties", "type", "allOf", "anyOf", "oneOf")):
                break
            schema = found
        return schema


def _lookup(root: Any, reference: str) -> Any:
    """What a JSON pointer within the schema leads to; None if it leads nowhere or elsewhere. Names are decoded as in a
    URI, unless no such name is there: pydantic, for one, writes a class's name as it is."""
    if reference == "#":
        return root
    if not reference.startswith("#/"):
        return None
    at = root
    for part in reference[2:].split("/"):
        name, as_it_is = (each.replace("~1", "/").replace("~0", "~") for each in (unquote(part), part))
        if isinstance(at, dict):
            at = at.get(name, at.get(as_it_is))
        elif isinstance(at, list) and name.isdecimal() and int(name) < len(at):
            at = at[int(name)]
        else:
            return None
    return at


def _schemas_in(value: Any) -> Iterator[dict[str, Any]]:
    """All objects in a schema, some of which are no schemas."""
    if isinstance(value, dict):
        yield value
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _schemas_in(each)


def _without_notes(schema: Any) -> Any:
    return {k: v for k, v in schema.items() if k not in _NOTES} if isinstance(schema, dict) else schema


def _known_types(types: Any) -> Any:
    """One or several types by JSON Schema's names, which clients of Gemini's API write in capitals, and those of
    function-calling benchmarks as Python does."""
    if isinstance(types, list):
        return [_known_types(each) for each in types]
    return _TYPE_NAMES.get(types.lower(), types) if isinstance(types, str) else types


def _types_of(schema: dict[str, Any]) -> set[str]:
    if (values := _values_in(schema)) is not None:
        return {_type_of(each) for each in values}
    kinds = _known_types(schema.get("type", _TYPES))
    kinds = {kinds} if isinstance(kinds, str) else set(map(str, kinds))
    return {"number" if each == "integer" else each for each in kinds}


def _type_of(value: Any) -> str:
    for kind, types in (("boolean", bool), ("number", int | float), ("string", str), ("array", list), ("object", dict)):
        if isinstance(value, types):
            return kind
    return "null"


def _values_in(schema: dict[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _values_of(schema: dict[str, Any]) -> set[str] | None:
    """The values that the schema lists, each as a text; None if it lists none."""
    values = _values_in(schema)
    return None if values is None else {_key_of(each) for each in values}


def _key_of(value: Any) -> str:
    """A text that only equal values share, as JSON Schema has it: 1 and 1.0 are, 1 and true are not."""
    return json.dumps(_with_whole_numbers(value), sort_keys=True)


def _with_whole_numbers(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_whole_numbers(each) for each in value]
    if isinstance(value, dict):
        return {name: _with_whole_numbers(each) for name, each in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _closed(schema: Any) -> Any:
    if isinstance(schema, dict) and isinstance(schema.get("properties"), dict) and "patternProperties" not in schema:
        return {"additionalProperties": False, **schema}
    return schema


def _adds_bounds(schema: Any) -> bool:
    """Whether some schema within it adds to the bounds of another."""
    if isinstance(schema, list):
        return any(map(_adds_bounds, schema))
    if not isinstance(schema, dict):
        return False
    has_bounds = any("inimum" in name or "aximum" in name or name == "multipleOf" for name in schema)
    if "allOf" in schema or (has_bounds and any(name in schema for name in _IN_PLACE)):
        return True
    return any(_adds_bounds(each) for name, each in schema.items() if name not in _VALUES)


def _steps(schema: Any) -> Iterator[float]:
    """All values of `multipleOf` within a schema."""
    for each in schema if isinstance(schema, list) else schema.values() if isinstance(schema, dict) else ():
        yield from _steps(each)
    if isinstance(schema, dict) and isinstance(step := schema.get("multipleOf"), int | float) and step:
        yield abs(step)


# --- single keywords --------------------------------------------------------------------------------------------------


def _without_vain_conditions(schema: dict[str, Any]) -> dict[str, Any]:
    found = dict(schema)
    if "if" in found and not ("then" in found or "else" in found):
        del found["if"]
    if "if" not in found:
        for name in ("then", "else"):
            found.pop(name, None)
    for name in ("dependentRequired", "dependentSchemas", "dependencies"):
        if found.get(name) == {} or (
            isinstance(found.get(name), dict) and all(each in ([], {}, True) for each in found[name].values())
        ):
            del found[name]
    return found


def _without_not(schema: dict[str, Any]) -> dict[str, Any]:
    """`not` of everything, as of zod's `never`, is a list of no schemas; `not` of nothing has no effect."""
    if "not" not in schema or schema["not"] not in ({}, True, False):
        return schema
    rest = {name: value for name, value in schema.items() if name != "not"}
    return rest if schema["not"] is False else {**rest, "allOf": [*rest.get("allOf", []), False]}


def _without_contains(schema: dict[str, Any]) -> dict[str, Any]:
    found = dict(schema)
    least, most = found.get("minContains", 1), found.get("maxContains")
    if "contains" not in found or (least == 0 and most is None):
        for name in ("contains", "minContains", "maxContains"):
            found.pop(name, None)
    elif found["contains"] in ({}, True) and isinstance(least, int):
        for name in ("contains", "minContains", "maxContains"):
            found.pop(name, None)
        found["minItems"] = max(found.get("minItems", 0), least)
        if isinstance(most, int):
            found["maxItems"] = min(found.get("maxItems", most), most)
    return found


def _without_unique_items(schema: dict[str, Any]) -> dict[str, Any]:
    """`uniqueItems` has no effect on short lists; lists of a few values are written one by one."""
    if "uniqueItems" not in schema:
        return schema
    rest = {name: value for name, value in schema.items() if name != "uniqueItems"}
    most, items = schema.get("maxItems"), schema.get("items")
    if schema["uniqueItems"] is False or (isinstance(most, int) and most <= 1):
        return rest
    values = _distinct_values(items)
    is_alone = schema.get("type") == "array" and not schema.keys() & {"prefixItems", "enum", "const"}
    if values is None or len(values) > _MOST_UNIQUE or not is_alone:
        return schema
    least, most = schema.get("minItems", 0), min(len(values), most if isinstance(most, int) else len(values))
    rest = {name: value for name, value in rest.items() if name not in ("items", "minItems", "maxItems", "type")}
    lists = [list(each) for size in range(least, most + 1) for each in itertools.permutations(values, size)]
    return {**rest, "enum": lists}


def _distinct_values(schema: Any) -> list[Any] | None:
    """All values of a schema that says no more of them than their type; None if it does, or lists none."""
    values = _values_in(schema) if isinstance(schema, dict) and schema.keys() <= {"type", "enum", "const"} else None
    if values is None or ("const" in schema and "enum" in schema):
        return None
    kinds = _known_types(schema.get("type", [_type_of(each) for each in values]))
    kinds = kinds if isinstance(kinds, list) else [kinds]
    of_type = [each for each in values if _type_of(each) in kinds or ("integer" in kinds and _is_whole(each))]
    return list({_key_of(each): each for each in of_type}.values())


def _is_whole(value: Any) -> bool:
    return not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and value.is_integer()))


def _without_property_names(schema: dict[str, Any]) -> dict[str, Any]:
    names = schema.get("propertyNames")
    if names is None:
        return schema
    rest = {name: value for name, value in schema.items() if name != "propertyNames"}
    if names is True or (
        isinstance(names, dict) and names.keys() <= {"type"} and names.get("type") in (None, "string")
    ):
        return rest
    if not isinstance(names, dict) or "patternProperties" in schema or names.get("type", "string") != "string":
        return schema
    others, properties = rest.pop("additionalProperties", {}), rest.get("properties", {})
    values = _values_in(names)
    if values is not None and names.keys() <= {"type", "enum", "const"}:
        named = {each: properties.get(each, others) for each in values if isinstance(each, str)}
        return {**rest, "properties": named, "additionalProperties": False}
    if properties or not names.keys() <= {"type", "pattern", "minLength", "maxLength"}:
        return schema
    if "pattern" in names:
        return schema if len(names.keys() - {"type"}) > 1 else _by_pattern(rest, names["pattern"], others)
    bounds = f"{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}"
    return _by_pattern(rest, f"^(?s:.){bounds}$", others)


def _by_pattern(schema: dict[str, Any], pattern: str, others: Any) -> dict[str, Any]:
    return {**schema, "patternProperties": {pattern: others}, "additionalProperties": False}


def _check_distinct_names(schema: dict[str, Any], where: str) -> None:
    """Raises ValueError, with the place, if an answer must have several properties that the schema does not name: no
    library keeps their names apart, and those of one name are one property."""
    least, required = schema.get("minProperties"), schema.get("required")
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if is_closed or not isinstance(least, int):
        return
    if least - (len(set(map(str, required))) if isinstance(required, list) else 0) > 1:
        raise ValueError(f"minProperties {least} is not followed: name at least {least - 1} in required (at {where})")


def _without_unevaluated(schema: dict[str, Any]) -> dict[str, Any]:
    """Where no other schema applies to the value, what is unevaluated is what is additional."""
    found = dict(schema)
    is_alone = not any(name in schema for name in _IN_PLACE)
    for name, additional in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
        if name in found and (found[name] in ({}, True) or is_alone):
            value = found.pop(name)
            if is_alone:
                found.setdefault(additional, value)
    return found


def _without_assertions(schema: dict[str, Any]) -> dict[str, Any]:
    """Lookaheads at the beginning of a pattern, as zod and pydantic write them, as further patterns."""
    pattern = schema.get("pattern")
    if not isinstance(pattern, str) or not pattern.startswith(("^(?=", "^(?!")):
        return schema
    assertions, rest = leading_assertions(pattern)
    if rest.startswith(("(?=", "(?!")) or not assertions:
        return schema
    parts = [*schema.get("allOf", []), *({"pattern": each} for each in assertions)]
    return {**schema, "pattern": f"^{rest}", "allOf": parts}


_REWRITTEN = frozenset({*REFUSED, "pattern", "then", "else", "minContains", "maxContains", "minProperties"})
"""Keywords that _CHANGES look for."""
_CHANGES: tuple[Callable[[dict[str, Any]], dict[str, Any]], ...] = (
    _without_vain_conditions,
    _without_not,
    _without_contains,
    _without_unique_items,
    _without_unevaluated,
    _without_property_names,  # after it: what names allow is evaluated
    _without_assertions,
)
