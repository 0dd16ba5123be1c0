"""Numbers of JSON schemas: libraries get those that they follow exactly; others are refused by name.

llguidance computes with doubles: it rounds longer numbers, takes bounds beyond 64 bits for the nearest ones, and
recurses without end at the least 64-bit integer. Of two bounds less than one apart, it lets through the one nearer to
0 if that is a whole number and excluded. So bounds of integers become inclusive ones, such a whole number is replaced
by a bound beside it, and what has more digits is refused.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from decimal import Decimal
from typing import Any

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
MOST_INTEGER = 1 << 63
"""The libraries' integers have less than this absolute value."""
MOST_BOUND = 1e18
"""Upper limit of a `maximum`, and with the other sign lower limit of a `minimum`, of numbers with fractions."""
MOST_DIGITS = 15
"""Digits of a bound beside an excluded whole number."""
LEAST_ABOVE_0 = 1e-20
"""The bound beside an excluded 0."""
_MOST_SIGNIFICAND, _MOST_EXPONENT = 1 << 53, 22
"""A number with a fraction of up to so many units in its last place, and such a power of ten, is read exactly by every
JSON library: serde_json's, which llguidance uses, may miss others by one unit."""
_ALLOWED = "integers up to 2^53 are, larger ones that a double is written as (10^18), and fractions of up to 15 digits"


class LongFloat(float):
    """A number of a JSON text that has more digits than a double."""

    text: str


def read_float(text: str) -> float:
    """A number with a fraction or an exponent, for `json.loads(parse_float=...)`: a LongFloat if a double differs."""
    value = float(text)
    if math.isfinite(value) and Decimal(repr(value)) == Decimal(text):
        return value
    found = LongFloat(text)
    found.text = text
    return found


def check_exact(value: Any, where: str) -> None:
    """Raises ValueError, with the place, for a number within a value that libraries would write otherwise."""
    if isinstance(value, list):
        for each in value:
            check_exact(each, where)
    elif isinstance(value, dict):
        for each in value.values():
            check_exact(each, where)
    elif isinstance(value, int | float) and not isinstance(value, bool) and not _is_exact(value):
        text = value.text if isinstance(value, LongFloat) else repr(value)
        raise ValueError(f"the number {text:.60} is not followed exactly: {_ALLOWED} (at {where})")


def _is_exact(value: float) -> bool:
    if isinstance(value, int):  # first, as one may be too large for a float
        return abs(value) < MOST_INTEGER and int(Decimal(repr(float(value)))) == value
    if isinstance(value, LongFloat) or not math.isfinite(value) or abs(value) >= MOST_INTEGER:
        return False
    _, digits, exponent = Decimal(repr(value)).as_tuple()  # as it is written for a library
    significand = int("".join(map(str, digits)))
    return significand < _MOST_SIGNIFICAND and abs(int(exponent)) <= _MOST_EXPONENT


def with_exact_bounds(schema: dict[str, Any], where: str, *, is_merged: bool) -> dict[str, Any]:
    """The schema with bounds of numbers that libraries follow exactly. Raises ValueError, with the place.

    is_merged: schemas of the same whole may add bounds to these, so that both bounds are not known here.
    """
    if not any(isinstance(schema.get(name), int | float) for name in BOUNDS):
        return schema
    kinds = schema.get("type", "number")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "number" in kinds:
        schema = {name: _within_reach(name, value) for name, value in schema.items()}
    for name in BOUNDS:
        check_exact(schema.get(name), f"{where.rstrip('/')}/{name}")
    rest = {name: value for name, value in schema.items() if name not in BOUNDS}
    low, high = _bound(schema, "minimum", max), _bound(schema, "maximum", min)
    if "number" not in kinds:
        return rest | _inclusive(low, high, where)
    low, high = _beside(low, high, 1, is_merged=is_merged), _beside(high, low, -1, is_merged=is_merged)
    for name, bound in (("minimum", low), ("maximum", high)):
        if bound is not None:
            rest[f"exclusive{name.capitalize()}" if bound[1] else name] = bound[0]
    return rest


def check_multiples(steps: Collection[float]) -> None:
    """Raises ValueError if llguidance may miss a common multiple of several `multipleOf`: it computes it in 32 bits."""
    exact = [Decimal(repr(each)).as_tuple() for each in steps]
    if len(exact) < 2:
        return
    scale = -min(0, *(int(each.exponent) for each in exact))
    whole = sorted(int("".join(map(str, each.digits))) * 10 ** (scale + int(each.exponent)) for each in exact)
    if whole[-1] * whole[-2] >= 1 << 32:
        raise ValueError(
            f"several multipleOf of one number are followed if they have few digits, and not {max(steps)!r}"
        )


def _bound(schema: dict[str, Any], name: str, stricter: Any) -> tuple[float, bool] | None:
    """The bound that the inclusive and the exclusive keyword give, and whether it is exclusive."""
    inclusive, exclusive = schema.get(name), schema.get(f"exclusive{name.capitalize()}")
    if isinstance(exclusive, bool):  # as JSON Schema's draft 4 has it
        return None if inclusive is None else (inclusive, exclusive)
    if inclusive is None or exclusive is None:
        found = exclusive if inclusive is None else inclusive
        return None if found is None else (found, inclusive is None)
    return (exclusive, True) if stricter(inclusive, exclusive) == exclusive else (inclusive, False)


def _inclusive(low: tuple[float, bool] | None, high: tuple[float, bool] | None, where: str) -> dict[str, int]:
    """Bounds of integers. Raises ValueError, with the place."""
    found = dict[str, int]()
    if low is not None:
        found["minimum"] = math.floor(low[0]) + 1 if low[1] else math.ceil(low[0])
    if high is not None:
        found["maximum"] = math.ceil(high[0]) - 1 if high[1] else math.floor(high[0])
    for name, bound in found.items():
        check_exact(bound, f"{where.rstrip('/')}/{name}")
    return found


def _beside(
    bound: tuple[float, bool] | None, other: tuple[float, bool] | None, direction: int, *, is_merged: bool
) -> tuple[float, bool] | None:
    """A bound, or the one beside it, in the direction of `other`, that replaces it."""
    if bound is None or not bound[1] or direction * bound[0] < 0 or not float(bound[0]).is_integer():
        return bound
    is_in_unit = other is not None and 0 < direction * (other[0] - bound[0]) < 1
    if not (is_in_unit or is_merged):
        return bound
    if bound[0] == 0:
        return direction * LEAST_ABOVE_0, False
    num_decimals = MOST_DIGITS - len(str(abs(int(bound[0]))))
    return float(Decimal(int(bound[0])) + direction * Decimal(10) ** -num_decimals), False


def _within_reach(name: str, value: Any) -> Any:
    """A bound of numbers with fractions, at most as far as libraries follow one: zod's float64 and float32 have bounds
    of 1e308 and 1e38."""
    if name in ("minimum", "exclusiveMinimum") and isinstance(value, float):
        return max(value, -MOST_BOUND)
    if name in ("maximum", "exclusiveMaximum") and isinstance(value, float):
        return min(value, MOST_BOUND)
    return value
