"""Makes one answer of those of several engines to the same command."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.ipc.control import ExtensionAnswers
from headrace.ipc.messages import EngineStats, ExpertBalance

_LARGEST = frozenset({"sleep_level", "max_loras"})
"""Fields that are no counts: of several engines the largest is told."""


def combined(answers: Sequence[Any]) -> Any:
    """Counts are summed, and workers' lists joined by rank, as are names; of other answers, which are equal, the
    first."""
    first = answers[0]
    if isinstance(first, EngineStats):
        return _sum(answers)
    if isinstance(first, ExtensionAnswers):
        payloads = [payload for answer in answers for payload in answer.payloads]
        return msgspec.structs.replace(first, payloads=tuple(payloads))
    return first


def _sum(values: Sequence[Any]) -> Any:
    values = [value for value in values if value is not None]
    if not values:
        return None
    first = values[0]
    if isinstance(first, ExpertBalance):
        return min(values, key=lambda balance: balance.avg)  # the engine whose ranks are least balanced
    if isinstance(first, bool):
        return any(values)
    if isinstance(first, msgspec.Struct):
        found = {name: [getattr(each, name) for each in values] for name in first.__struct_fields__}
        return type(first)(**{name: max(each) if name in _LARGEST else _sum(each) for name, each in found.items()})
    if isinstance(first, dict):
        keys = dict.fromkeys(key for each in values for key in each)
        return {key: sum(each.get(key, 0) for each in values) for key in keys}
    if isinstance(first, tuple):
        if any(isinstance(each, str) for value in values for each in value):
            return tuple(dict.fromkeys(itertools.chain(*values)))
        return tuple(map(sum, itertools.zip_longest(*values, fillvalue=0)))  # one that counts nothing yet has none
    return sum(values)
