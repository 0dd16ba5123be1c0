"""Ends an output that repeats itself: `SamplingParams.repetition_detection`, under vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.frontend.request.parameters.sampling_fields import ParamsStruct
from headrace.ipc.failure import InvalidRequestError

STOP_REASON = "repetition_detected"
_FIELD = "SamplingParams.repetition_detection"


class RepetitionDetectionParams(ParamsStruct, forbid_unknown_fields=True):
    """Ends an output with finish_reason `repetition` once its last tokens are min_count equal patterns in a row."""

    max_pattern_size: int = 0
    """Longest pattern to look for, in tokens; 0 turns the detection off."""
    min_pattern_size: int = 0
    """0 is the same as 1."""
    min_count: int = 2

    def __post_init__(self) -> None:
        self.verify()

    def verify(self) -> None:
        """Raises InvalidRequestError for the first invalid field."""
        self._check("max_pattern_size", 0, 1024)
        self._check("min_pattern_size", 0, max(1, self.max_pattern_size))
        self._check("min_count", 2 if self.max_pattern_size else 0, 1 << 20)

    def _check(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise InvalidRequestError(f"{_FIELD}.{name} = {value!r:.100}: must be an integer of {low} to {high}")

    def found(self, token_ids: Sequence[int]) -> bool:
        """Whether these output tokens end in such a repetition."""
        for size in range(max(1, self.min_pattern_size), self.max_pattern_size + 1):
            length = size * self.min_count
            if length > len(token_ids):
                return False
            if token_ids[-1] != token_ids[-1 - size]:
                continue
            if all(token_ids[-place] == token_ids[-place - size] for place in range(2, length - size + 1)):
                return True
        return False


def repetition_from(fields: Mapping[str, Any]) -> RepetitionDetectionParams:
    """From a dict. Raises InvalidRequestError for an unknown field, and for one that is missing."""
    try:
        return RepetitionDetectionParams(**fields)
    except TypeError as error:
        raise InvalidRequestError(f"{_FIELD}: {error}") from None
