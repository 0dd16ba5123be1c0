"""Rewrites JSON schemas in keywords that the grammar libraries follow, and refuses others by name.

Keywords without effect are dropped (unknown formats, `uniqueItems: false`), and some are written in others (`oneOf` of
alternatives that exclude each other as `anyOf`, `propertyNames` as `patternProperties`). A rewritten schema never
allows more than the original. What is left of REFUSED after that is refused, with what to write instead.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from headrace.core.structured_output.exact_numbers import check_exact, check_multiples, with_exact_bounds
from headrace.core.structured_output.expressions import leading_assertions
from headrace.core.structured_output.schema_references import (
    DEFINITIONS,
    PLAIN_REFERENCE,
    has_resources,
    lookup,
    with_used_definitions,
)

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
_COUNTS = (
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains"),
)
_BEYOND_ANSWERS = 1 << 31
"""As many characters, values or properties no answer has."""
_IN_PLACE = ("$ref", "anyOf", "oneOf", "allOf", "if", "dependentSchemas", "$dynamicRef", "$recursiveRef")
"""Keywords whose schemas apply to the same value."""
_MOST_UNIQUE = 4
"""Most values of a list without repetition: their orders are written one by one."""
_NAMED = ("properties", "patternProperties", *DEFINITIONS, "dependentSchemas")
"""Keywords whose objects have schemas by name."""
_SCHEMAS = (
    *("items", "prefixItems", "additionalItems", "additionalProperties", "anyOf", "allOf", "oneOf"),
    *("not", "if", "then", "else", "contains", "propertyNames", "unevaluatedProperties", "unevaluatedItems"),
)
_VALUES = ("enum", "const", "default", "examples", "required", "dependentRequired")
_VALUES_OF_NULL = ("const", "default", "examples")
"""Keywords that null is a value for."""
_CONSTRAINTS = frozenset(
    (
        *("type", "enum", "const", "required", "dependentRequired", "dependencies", "uniqueItems", "pattern", "format"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("properties", "patternProperties", *_IN_PLACE, *_COUNTS, *_SCHEMAS),
    )
)
"""Keywords that say which values are valid."""
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
        self._has_resources = has_resources(root)
        self._root = root if self._has_resources else with_used_definitions(root)
        self._is_merged = _adds_bounds(self._root)
        self._added = dict[tuple[str, _Narrowing | None], str]()
        """The names of definitions to add: of a reference's schema, and of what it is needed without."""

    def whole(self) -> Any:
        if self._is_merged:
            check_multiples(set(_steps(self._root)))
        found = self._rewritten(self._root, "")
        if not self._added:
            return found
        definitions, done = dict(found.get("$defs") or {}), 0
        while done < len(self._added):  # those may need further ones
            for (reference, narrowing), name in list(self._added.items())[done:]:
                schema = lookup(self._root, reference)
                if narrowing is not None:
                    schema = narrowing.of(self._resolved(schema))
                definitions[name] = self._rewritten(schema, reference[1:])
                done += 1
        return {**found, "$defs": definitions}

    def _add(self, reference: str, narrowing: _Narrowing | None = None) -> str:
        """A reference to a definition that is added for this one."""
        if (reference, narrowing) not in self._added:
            known = self._root.get("$defs") or {}
            names = (f"added_{number}" for number in itertools.count(len(self._added)))
            self._added[reference, narrowing] = next(name for name in names if name not in known)
        return f"#/$defs/{self._added[reference, narrowing]}"

    def _reference(self, reference: str) -> str:
        """To a definition, by a name without escapes. Of the libraries one decodes no escapes, one takes nothing but
        ASCII, and neither finds what has been rewritten."""
        if PLAIN_REFERENCE.fullmatch(reference) or lookup(self._root, reference) is None or self._has_resources:
            return reference
        return self._add(reference)

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
        found = {name: value for name, value in _without_nulls(schema).items() if name not in _DROPPED}
        if "type" in found:
            found["type"] = _known_types(found["type"])
        for name in ("enum", "const"):
            check_exact(found.get(name), where)
        found = with_exact_bounds(found, where, is_merged=self._is_merged)
        found = _with_counts(found, where)
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
                if isinstance(found[name], dict):
                    found[name] = _with_counts(found[name], f"{where.rstrip('/')}/{name}")
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
        """With `anyOf` instead of `oneOf`, if the alternatives exclude each other, perhaps once they are narrowed."""
        whole = [self._resolved(each) for each in alternatives]
        rest = {name: value for name, value in schema.items() if name != "oneOf"}
        if not self._exclude_each_other(whole):
            narrowings = [self._narrowing(nth, whole, rest) for nth in range(len(whole))]
            if None in narrowings:
                return schema
            alternatives = [
                self._narrowed(each, narrowing)
                for each, narrowing in zip(alternatives, narrowings, strict=True)
                if narrowing is not None
            ]
        if "anyOf" not in rest:
            return {**rest, "anyOf": alternatives}
        return {**rest, "allOf": [*rest.get("allOf", []), {"anyOf": alternatives}]}

    def _narrowing(self, nth: int, alternatives: list[Any], beside: dict[str, Any]) -> _Narrowing | None:
        """How one of the alternatives, beside these keywords, gets to exclude all others; None if it is not found."""
        one, others = alternatives[nth], [*alternatives[:nth], *alternatives[nth + 1 :]]
        found = _Narrowing(is_closed=beside.keys().isdisjoint(_CONSTRAINTS - {"type"}))
        left = [each for each in others if not self._excludes(found.of(one), each)]
        if not left:
            return found
        if not all(isinstance(each, dict) and "object" in _types_of(each) for each in (one, *left)):
            return None
        needed, described = {*_required(one), *_required(beside)}, _properties(one)
        names = set[str]()
        for other in left:
            own = [name for name in _required(other) if name not in needed]
            names.update(sorted(own, key=described.__contains__)[:1])
        is_object = any(_types_of(one) & _types_of(each) != {"object"} for each in left)
        found = found._replace(is_object=is_object, forbidden=tuple(sorted(names)))
        return found if all(self._excludes(found.of(one), each) for each in others) else None

    def _narrowed(self, schema: Any, narrowing: _Narrowing) -> Any:
        if self._target(schema) is None:
            return narrowing.of(self._resolved(schema))
        return {"$ref": self._add(schema["$ref"], narrowing)}

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
        return any(self._differ_in(first, second, name, depth) for name in (*_required(first), *_required(second)))

    def _differ_in(self, first: dict[str, Any], second: dict[str, Any], name: str, depth: int) -> bool:
        """Whether a property, which one of two objects requires, tells them apart."""
        schemas = []
        for each in (first, second):
            others = {} if "patternProperties" in each else each.get("additionalProperties", {})
            schemas.append(_properties(each).get(name, others))
        return self._excludes(schemas[0], schemas[1], depth + 1)

    def _resolved(self, schema: Any) -> Any:
        """The schema that a reference alone leads to."""
        for _ in range(20):
            if (target := self._target(schema)) is None:
                break
            schema = target
        return _without_nulls(schema) if isinstance(schema, dict) else schema

    def _target(self, schema: Any) -> Any:
        """What the reference of a schema without other constraints leads to; None for any other schema."""
        if not isinstance(schema, dict) or not isinstance(reference := schema.get("$ref"), str):
            return None
        is_alone = _without_nulls(schema).keys() & _CONSTRAINTS == {"$ref"}
        return lookup(self._root, reference) if is_alone else None


class _Narrowing(NamedTuple):
    """What an alternative of several loses, so that no value of it is valid under another one."""

    is_closed: bool
    """Objects have none but the properties that it describes or requires, where it says nothing of others."""
    is_object: bool = False
    """It has no values but objects."""
    forbidden: tuple[str, ...] = ()
    """Names of properties that objects do not have."""

    def of(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        found = {**schema, "type": "object"} if self.is_object else schema
        if not self.is_closed or "properties" not in schema or schema.keys() & {"patternProperties", *_IN_PLACE}:
            return self._without_forbidden(found)
        left = {name: value for name, value in _properties(schema).items() if name not in self.forbidden}
        if schema.get("additionalProperties", True) in (True, {}):
            others = [name for name in _required(schema) if name not in left]
            return {**found, "properties": {**left, **dict.fromkeys(others, True)}, "additionalProperties": False}
        if schema["additionalProperties"] is False:
            return {**found, "properties": left}
        return self._without_forbidden(found)

    def _without_forbidden(self, schema: dict[str, Any]) -> dict[str, Any]:
        if not self.forbidden:
            return schema
        return {**schema, "properties": {**_properties(schema), **dict.fromkeys(self.forbidden, False)}}


def _without_nulls(schema: dict[str, Any]) -> dict[str, Any]:
    """Clients write keywords that a program has left out as null."""
    return {name: value for name, value in schema.items() if value is not None or name in _VALUES_OF_NULL}


def _with_counts(schema: dict[str, Any], where: str) -> dict[str, Any]:
    """With counts as integers below 2^31. Raises ValueError, with the place, for one that no answer can have."""
    found = dict(schema)
    for name in _COUNTS:
        if isinstance(value := found.get(name), float) and value.is_integer():
            found[name] = value = int(value)
        if isinstance(value, int) and value >= _BEYOND_ANSWERS:  # libraries count in 32 bits
            if name.startswith("min"):
                raise ValueError(f"{name} is 2^31 or more, which no answer can have (at {where})")
            del found[name]
    return found


def _required(schema: dict[str, Any]) -> list[str]:
    names = schema.get("required")
    return [each for each in names if isinstance(each, str)] if isinstance(names, list) else []


def _properties(schema: dict[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


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
    elif found["contains"] in ({}, True) and _is_count(least) and (most is None or _is_count(most)):
        for name in ("contains", "minContains", "maxContains"):
            found.pop(name, None)
        found["minItems"] = max(found.get("minItems", 0), least)
        if most is not None:
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
    least, most = names.get("minLength", 0), names.get("maxLength", math.inf)
    if not (_is_count(least) and (most == math.inf or _is_count(most))):
        return schema
    if least > most:
        return {**rest, "additionalProperties": False}
    bounds = f"{{{least},{'' if most == math.inf else most}}}"
    return _by_pattern(rest, f"^(?s:.){bounds}$", others)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


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
