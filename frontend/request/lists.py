"""What counts as a list in calls: anything that has a length and can be iterated, of whichever library.

numpy's and torch's arrays, columns of pandas, pyarrow, polars and datasets, tuples, deques and sets are lists. Texts,
bytes and mappings are single values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.ipc.failure import InvalidRequestError

_SINGLE = (str, bytes, bytearray, memoryview, Mapping, type)


def elements(value: Any) -> Sequence[Any] | None:
    """The elements of a list in this sense, as Python's own objects where its library has a conversion; None for
    anything else. Raises InvalidRequestError for a table, whose iteration yields the names of its columns."""
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, _SINGLE):
        return None
    if not isinstance(value, Sequence):
        try:
            len(value)  # an array without dimensions has the method, which raises
            iter(value)
        except TypeError:
            return None
        if hasattr(value, "columns"):
            raise InvalidRequestError(f"{type(value).__name__} is a table: give one of its columns")
    convert = getattr(value, "tolist", None) or getattr(value, "to_pylist", None)
    converted = list(value) if convert is None else convert()
    return converted if isinstance(converted, list) else [converted]


def one_for_each(given: Any, kind: type, name: str, count: int, *, may_be_none: bool = False) -> Sequence[Any]:
    """One of this kind for each of `count` prompts: the same for all, or those of a list. name: of the argument.
    may_be_none: prompts may have None in its place. Raises InvalidRequestError."""
    kinds = (kind, type(None)) if may_be_none else kind
    if isinstance(given, kinds):
        return [given] * count
    several = elements(given)
    if several is None or not all(isinstance(each, kinds) for each in several):
        one = "one (or None)" if may_be_none else "one"
        raise InvalidRequestError(
            f"{name} must be a {kind.__name__}, or a list with {one} for each prompt, not {given!r:.100}"
        )
    if len(several) != count:
        names = name.removesuffix("s") + "s"
        raise InvalidRequestError(f"there are {count} prompts and {len(several)} {names}; give one for each")
    return several


def asks_for_nothing(value: Any) -> bool:
    """Whether the value is None or empty, or a list or dict of such values alone."""
    if value is None:
        return True
    if isinstance(value, str | bytes):
        return not value
    inner = list(value.values()) if isinstance(value, Mapping) else elements(value)
    return inner is not None and all(asks_for_nothing(each) for each in inner)
