"""What each route does with a field that its own requests lack but that is known elsewhere.

    fields of the requests' structs        own, on their routes
    Body.lacks                             of an API's own documentation: refused, or without effect
    FOREIGN                                of other servers' APIs: taken as an own field, refused, or without effect
    fields of this server's other routes   refused by name where they ask for something

So a name that is known anywhere is never ignored in silence.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from headrace.frontend.http.server.decoding.decoder import Others
from headrace.frontend.http.server.decoding.foreign_fields import FOREIGN, Neutral, SameAs
from headrace.frontend.request.parameters.sampling_params import FIELDS


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of request that an API declares, so that the other kinds know its fields."""

    kind: type[msgspec.Struct]
    called: str
    """What errors call requests of this kind, in the plural."""
    lacks: Mapping[str, Neutral] = types.MappingProxyType({})
    """Fields of its API's documentation that the struct lacks."""
    counts: type[msgspec.Struct] | None = None
    """The request that would generate from the prompt whose tokens this one counts."""
    foreign: Literal["taken", "refused", "last"] = "taken"
    """Whether other servers' fields are taken as equivalent own ones, or refused; last: refused, and what is said of
    other routes' fields of the same names counts."""
    hint: str = "this route does not have it"
    """Ends the message that refuses another route's field."""


_ASKS_FOR_NOTHING: Mapping[str, tuple[Any, ...]] = types.MappingProxyType(
    {
        **{name: (field.default,) for name, field in FIELDS.items()},
        **{"n": (1,), "best_of": (1,), "length_penalty": (1,), "top_logprobs": (0,), "logprobs": (False, 0)},
        **{"include_reasoning": (True,), "add_generation_prompt": (True,), "parallel_tool_calls": (True,)},
        **{"tool_choice": ("none", "auto"), "truncation": ("disabled",), "reasoning_effort": (), "enable_thinking": ()},
    }
)
_NOTHING: tuple[Any, ...] = (False, [], {}, "")
_OF_PROMPTS = frozenset(
    {
        *("chat_template", "chat_template_kwargs", "enable_thinking", "reasoning_effort", "verbosity", "documents"),
        *("tools", "tool_choice", "add_special_tokens", "add_generation_prompt", "continue_final_message"),
        *("system", "instructions", "prompt", "messages", "input", "thinking", "think", "reasoning", "suffix"),
        *("truncate_prompt_tokens", "truncation_side", "output_config"),
    }
)
"""Fields on which the tokens of a prompt depend, besides those by which a request would choose what is read."""
_NO_COUNT = Neutral("no count depends on it", is_harmless=True)


def others_of(bodies: Sequence[Body]) -> Others:
    """By kind of request, the fields that it lacks and what they mean there. Of several kinds that have a field,
    errors name the first."""
    by_kind = {body.kind: body for body in bodies}
    tables: dict[type[msgspec.Struct], Mapping[str, Neutral | SameAs]] = {}
    for body in bodies:
        others = _others(body, bodies) if body.counts is None else _of_counts(by_kind[body.counts], bodies)
        own = body.kind.__struct_fields__
        tables[body.kind] = types.MappingProxyType({name: other for name, other in others.items() if name not in own})
    return types.MappingProxyType(tables)


def _others(body: Body, bodies: Sequence[Body]) -> dict[str, Neutral | SameAs]:
    found = _of_other_routes(body, bodies)
    foreign: dict[str, Neutral | SameAs] = dict(FOREIGN)
    if body.foreign != "taken":
        refused = Neutral(f"it is a field of other servers; {body.hint}", _NOTHING)
        foreign = {
            name: found.get(name, refused) if isinstance(other, SameAs) else other for name, other in foreign.items()
        }
    return {**foreign, **found, **body.lacks} if body.foreign == "last" else {**found, **foreign, **body.lacks}


def _of_other_routes(own: Body, bodies: Sequence[Body]) -> dict[str, Neutral]:
    """The fields of the other routes that read texts or tokens, and those that they lack."""
    found: dict[str, Neutral] = {}
    for body in bodies:
        for name in body.kind.__struct_fields__:
            values = _ASKS_FOR_NOTHING.get(name, _NOTHING)
            found.setdefault(name, Neutral(f"it is a field of {body.called}; {own.hint}", values))
    for body in bodies:
        for name, other in body.lacks.items():
            found.setdefault(name, other)
    return found


def _of_counts(generating: Body, bodies: Sequence[Body]) -> dict[str, Neutral | SameAs]:
    """For a route that counts a prompt's tokens: most fields of the request that would generate from it do not
    matter."""
    found = _others(generating, bodies)
    for name in generating.kind.__struct_fields__:
        found.setdefault(name, Neutral(generating.hint, _NOTHING) if name in _OF_PROMPTS else _NO_COUNT)
    for name, other in found.items():
        if isinstance(other, SameAs) and name not in _OF_PROMPTS:
            found[name] = _NO_COUNT
    return found
