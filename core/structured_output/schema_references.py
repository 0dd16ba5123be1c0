"""References within a JSON schema: what they lead to, and which definitions they need."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

DEFINITIONS = ("$defs", "definitions")
"""Keywords of schemas that apply only where a reference leads to them."""
PLAIN_REFERENCE = re.compile(r"#(?:/(?:\$defs|definitions)/[A-Za-z0-9_.-]+)?")
"""To the whole schema, or to a definition whose name has no escapes."""


def lookup(root: Any, reference: str) -> Any:
    """What a JSON pointer within the schema leads to; None if it leads nowhere or elsewhere. Names are decoded as in a
    URI, unless no such name is there: pydantic, for one, writes a class's name as it is."""
    if reference == "#":
        return root
    if not reference.startswith("#/"):
        return None
    at = root
    for name, as_it_is in _steps_of(reference):
        if isinstance(at, dict):
            at = at.get(name, at.get(as_it_is))
        elif isinstance(at, list) and name.isdecimal() and int(name) < len(at):
            at = at[int(name)]
        else:
            return None
    return at


def has_resources(root: Any) -> bool:
    """Whether some schema within has a URI of its own, which references there begin at."""
    return any("$id" in each for each in _schemas_in(root) if each is not root)


def with_used_definitions(root: Any) -> Any:
    """Without the definitions of the whole schema that no reference leads to: they apply to nothing."""
    if not isinstance(root, dict):
        return root
    places = [place for place in DEFINITIONS if isinstance(root.get(place), dict)]
    unused = {(place, name): schema for place in places for name, schema in root[place].items()}
    waiting: list[Any] = [{name: value for name, value in root.items() if name not in places}]
    while unused and waiting:
        for reference in _references_in(waiting.pop()):
            steps = _steps_of(reference)
            if reference != "#" and (not reference.startswith("#/") or len(steps) < 2):
                return root  # an anchor, a URI, or all definitions
            for key in itertools.product(steps[0], steps[1]) if len(steps) > 1 else ():
                if key in unused:
                    waiting.append(unused.pop(key))
    left = {
        place: {name: each for name, each in root[place].items() if (place, name) not in unused} for place in places
    }
    return {name: left.get(name, value) for name, value in root.items() if name not in left or left[name]}


def _steps_of(reference: str) -> list[tuple[str, str]]:
    """The names in a JSON pointer, each decoded as in a URI, and as it is."""
    parts = ((unquote(part), part) for part in reference[2:].split("/"))
    return [
        (one.replace("~1", "/").replace("~0", "~"), two.replace("~1", "/").replace("~0", "~")) for one, two in parts
    ]


def _references_in(value: Any) -> Iterator[str]:
    for each in _schemas_in(value):
        for name in ("$ref", "$dynamicRef", "$recursiveRef"):
            if isinstance(reference := each.get(name), str):
                yield reference


def _schemas_in(value: Any) -> Iterator[dict[str, Any]]:
    """All objects in a schema, some of which are no schemas."""
    if isinstance(value, dict):
        yield value
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _schemas_in(each)
