"""What it costs to report a prompt's log-probabilities: so much for each position, however many there are.

Counted in processor time of this process, of a few runs the shortest: a machine's load does not show in it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from processor_time import processor_s

from headrace.core.engine.outputs import StepEvents, drop_departed, gather_prompt_logprobs
from headrace.frontend.client.request_stream import RequestStream
from headrace.frontend.request.checks import CheckedRequest
from headrace.frontend.request.parameters.sampling_params import SamplingParams
from headrace.frontend.request.prompts import Prompt
from headrace.ipc.codec import Tensor
from headrace.ipc.messages import LogprobRows
from headrace.ipc.step import PromptLogprobRun, StepResult

FEW, TIMES, MOST_TIMES = 250, 16, 120
"""A search in a list of all for each would make it 256 times as much. Processors that others use too cost many times
more for each position of a long prompt, as little of it stays in their caches."""


def rows(count: int) -> LogprobRows:
    return LogprobRows(
        token_ids=Tensor.from_numpy(np.ones((count, 2), np.int32)),
        logprobs=Tensor.from_numpy(np.full((count, 2), -1.5, np.float32)),
        ranks=Tensor.from_numpy(np.ones(count, np.int32)),
    )


class Table:
    """Rows of which each has a request that is still there."""

    def __init__(self, count: int) -> None:
        self.requests = [SimpleNamespace(client=row % 3, slot=row, num_prompt_logprobs=1) for row in range(count)]

    def still_there(self, found: np.ndarray, step: int) -> np.ndarray:
        return np.ones(len(found), bool)


def gathered_in_the_core(count: int) -> int:
    """A run for each of so many requests."""
    runs = tuple(PromptLogprobRun(row=row, start=1, rows=rows(1)) for row in range(count))
    numbers = Tensor.from_numpy(np.arange(count, dtype=np.int32))
    result = StepResult(
        step=1, rows=cast(Any, numbers.numpy()), token_ids=cast(Any, numbers.numpy()), prompt_logprobs=runs
    )
    table, events = cast(Any, Table(count)), StepEvents()
    gather_prompt_logprobs(events, drop_departed(result, table), table)
    return sum(map(len, events.prompt_logprobs.values()))


def read_by_the_user(count: int, *, flat: bool) -> int:
    """So many positions, which came one in each step."""
    params = SamplingParams(prompt_logprobs=1, flat_logprobs=flat)
    stream = RequestStream(CheckedRequest("r", Prompt(token_ids=[5] * (count + 1)), params), None)
    for _ in range(count):
        stream.add_prompt_logprobs(rows(1))
    found = stream.prompt_logprobs
    assert found is not None
    assert stream.prompt_logprobs is found, "they are made once"
    return len(found) - 1


@pytest.mark.parametrize(
    "cost",
    [gathered_in_the_core, partial(read_by_the_user, flat=False), partial(read_by_the_user, flat=True)],
    ids=["gathered in the core", "read by the user", "read by the user, flat"],
)
def test_log_probabilities_of_prompts_are_found_without_searching_lists(cost: Callable[[int], int]) -> None:
    assert cost(FEW) == FEW
    few_s, many_s = (min(processor_s(partial(cost, count)) for _ in range(4)) for count in (FEW, TIMES * FEW))
    assert many_s < MOST_TIMES * few_s
