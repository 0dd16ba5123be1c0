"""Makes one answer of those of several engines to the same command."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.ipc.control import ExtensionAnswers
from headrace.ipc.messages import EngineStats, ExpertBalance


def combined(answers: Sequence[Any]) -> Any:
    """Counts are summed, and workers' lists joined by rank; of other answers, which are equal, the first."""
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
        names = first.__struct_fields__
        return type(first)(**{name: _sum([getattr(each, name) for each in values]) for name in names})
    if isinstance(first, dict):
        keys = dict.fromkeys(key for each in values for key in each)
        return {key: sum(each.get(key, 0) for each in values) for key in keys}
    if isinstance(first, tuple):
        return tuple(map(sum, zip(*values, strict=True)))
    return sum(values)
