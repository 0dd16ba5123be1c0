"""A pipeline's stages before the last learn which tokens were sampled: those they need, and no token of another row."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from headrace.executor.parallel.rank_place import Collectives, World, collectives_bytes, open_collectives
from headrace.executor.sampling.draws import Draws
from headrace.executor.step.batch import BatchState, StepArrays
from headrace.executor.step.inputs import StepLogits, no_logits
from headrace.executor.step.pipeline import PENDING, StageRunner
from headrace.ipc.messages import Generate, Sampling
from headrace.ipc.step import NewRow, StepPlan
from headrace.kernels.cpu import build

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))
NONE = np.zeros(0, np.int32)


class Seen:
    """A stage's model that keeps what it was given."""

    def __init__(self) -> None:
        self.token_ids: list[list[int]] = []

    def step(self, arrays: StepArrays, kv_cache: Any, draws: Draws | None) -> StepLogits:
        self.token_ids.append(arrays.token_ids.tolist())
        return no_logits()


@pytest.fixture
def links() -> Iterator[tuple[Collectives, Collectives]]:
    """Of the first stage and of the last."""
    world = World(1, 2, max_tokens=16, max_seqs=4, hidden_size=16, vocab_size=64)
    fd = os.memfd_create("test")
    os.ftruncate(fd, collectives_bytes(world))
    yield open_collectives(fd, world, 0, deadline_s=30), open_collectives(fd, world, 1, deadline_s=30)
    os.close(fd)


def new_row(row: int, tokens: list[int]) -> NewRow:
    return NewRow(
        row=row,
        token_ids=np.array(tokens, np.int32),
        num_prompt_tokens=len(tokens),
        num_computed_tokens=0,
        block_ids=np.array([1 + row], np.int32),
        task=Generate(sampling=Sampling(max_tokens=8)),
        seed=0,
    )


def plan(
    step: int, rows: list[tuple[int, int, int]], new: tuple[NewRow, ...] = (), released: tuple[int, ...] = ()
) -> StepPlan:
    """rows: (row, tokens of it, tokens computed before); each samples."""
    columns = np.array(rows, np.int32).reshape(-1, 3).T
    return StepPlan(
        step=step,
        released_rows=np.array(released, np.int32),
        new_rows=new,
        block_tables=NONE,
        block_ids=NONE,
        rows=columns[0],
        num_tokens=columns[1],
        num_computed_tokens=columns[2],
        sampled=np.ones(len(rows), bool),
        total_tokens=int(columns[1].sum()),
    )


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def test_a_step_waits_for_the_tokens_that_it_computes(links: tuple[Collectives, Collectives]) -> None:
    first, last = links
    model = Seen()
    runner = StageRunner(model, None, BatchState(4, 16, 16), first)
    runner.step(plan(1, [(0, 3, 0)], new=(new_row(0, [5, 6, 7]),)))
    late = threading.Timer(0.05, last.publish, (1, tokens(0), tokens(42)))
    late.start()
    runner.step(plan(2, [(0, 1, 3)]))
    late.join()
    assert model.token_ids == [[5, 6, 7], [42]]


def test_a_step_of_other_rows_does_not_wait(links: tuple[Collectives, Collectives]) -> None:
    first, last = links
    model = Seen()
    runner = StageRunner(model, None, BatchState(4, 16, 16), first)
    runner.step(plan(1, [(0, 2, 0)], new=(new_row(0, [5, 6]),)))
    runner.step(plan(2, [(1, 2, 0)], new=(new_row(1, [8, 9]),)))  # nothing was published yet
    last.publish(1, tokens(0), tokens(42))
    last.publish(2, tokens(1), tokens(43))
    runner.step(plan(3, [(1, 1, 2), (0, 1, 2)]))
    assert model.token_ids == [[5, 6], [8, 9], [43, 42]]


def test_a_token_of_a_row_that_was_given_up_does_not_reach_the_rows_next_request(
    links: tuple[Collectives, Collectives],
) -> None:
    first, last = links
    model, batch = Seen(), BatchState(4, 16, 16)
    runner = StageRunner(model, None, batch, first)
    runner.step(plan(1, [(0, 2, 0), (1, 2, 0)], new=(new_row(0, [5, 6]), new_row(1, [7, 8]))))
    last.publish(1, tokens(0, 1), tokens(42, 43))
    runner.step(plan(2, [(0, 3, 0), (1, 1, 2)], new=(new_row(0, [9, 10, 11]),), released=(0,)))
    assert model.token_ids[1] == [9, 10, 11, 43]
    assert batch.tokens[:2, :4].tolist() == [[9, 10, 11, PENDING], [7, 8, 43, PENDING]]


def test_tokens_of_another_step_than_the_one_that_is_due_are_an_error(links: tuple[Collectives, Collectives]) -> None:
    first, last = links
    runner = StageRunner(Seen(), None, BatchState(4, 16, 16), first)
    runner.step(plan(1, [(0, 2, 0)], new=(new_row(0, [5, 6]),)))
    last.publish(7, tokens(0), tokens(42))
    with pytest.raises(RuntimeError, match="tokens of step 7 came where those of step 1 were due"):
        runner.step(plan(2, [(0, 1, 2)]))
