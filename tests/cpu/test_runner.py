"""The batch state against a naive model of it, and the runner over a small model that reads its paged cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_maker import OTHER_BLOCKS, PlanMaker, i32
from torch import Tensor

from headrace.executor.cpu.runner import ModelRunner
from headrace.executor.sampling.draws import Draws
from headrace.executor.sampling.logprobs import logprob_rows
from headrace.executor.step.batch import BatchState, StepArrays
from headrace.executor.step.inputs import StepInputs, StepLogits, step_in_two
from headrace.executor.step.prompt_logprobs import PROMPT_LOGITS_BYTES
from headrace.ipc.messages import LogprobRows, Sampling
from headrace.ipc.step import StepPlan, StepResult

BLOCK_SIZE = 4
NUM_ROWS = 6
MAX_MODEL_LEN = 32
VOCAB_SIZE = 50
POISON = 13
"""A token from which on the small model's logits are NaN."""
GLITCH = 14
"""A token at which alone they are."""


# --- batch state ------------------------------------------------------------------------------------------------


def check_arrays(batch: BatchState, maker: PlanMaker, plan: StepPlan) -> None:
    arrays = batch.arrays(plan)
    token_ids, positions, slots, starts, last = [], [], [], [0], []
    for row, count, computed, sampled in zip(
        plan.rows.tolist(),
        plan.num_tokens.tolist(),
        plan.num_computed_tokens.tolist(),
        plan.sampled.tolist(),
        strict=True,
    ):
        for position in range(computed, computed + count):
            token_ids.append(maker.tokens[row][position])
            positions.append(position)
            slots.append(maker.blocks[row][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
        starts.append(len(positions))
        last += [len(positions) - 1] if sampled else []
    assert arrays.token_ids.tolist() == token_ids
    assert arrays.positions.tolist() == positions
    moved = [group * OTHER_BLOCKS * BLOCK_SIZE for group in range(batch.num_groups)]
    assert arrays.slot_mapping.tolist() == [[slot + first for slot in slots] for first in moved]
    assert arrays.query_start.tolist() == starts
    assert arrays.logits_indices.tolist() == last
    assert arrays.seq_lens.tolist() == [maker.computed[row] for row in plan.rows.tolist()]
    assert arrays.prompt_lens.tolist() == [maker.prompts[row] for row in plan.rows.tolist()]
    width = arrays.block_tables.shape[2]
    assert width == max((-(-maker.computed[row] // BLOCK_SIZE) for row in plan.rows.tolist()), default=0)
    for group, tables in enumerate(arrays.block_tables.tolist()):
        for row, table in zip(plan.rows.tolist(), tables, strict=True):
            blocks = [block + group * OTHER_BLOCKS for block in maker.blocks[row]]
            assert table == (blocks + [0] * width)[:width]
    kinds = {name: getattr(arrays, name).dtype.name for name in ("token_ids", "positions", "slot_mapping", "seq_lens")}
    assert kinds == {"token_ids": "int32", "positions": "int32", "slot_mapping": "int64", "seq_lens": "int32"}


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_batch_state_equals_a_model_of_plain_lists_under_any_plans(data: st.DataObject) -> None:
    num_groups = data.draw(st.integers(1, 3), label="groups")
    batch = BatchState(NUM_ROWS, MAX_MODEL_LEN, BLOCK_SIZE, factors=(1,) * num_groups)
    maker = PlanMaker(num_groups=num_groups, num_rows=NUM_ROWS)
    for _ in range(data.draw(st.integers(1, 12), label="steps")):
        for row in range(NUM_ROWS):
            action = data.draw(st.sampled_from(("stay", "stay", "leave", "enter")), label="action")
            if row in maker.tokens and (action == "leave" or len(maker.tokens[row]) == MAX_MODEL_LEN):
                maker.release(row)
            if row not in maker.tokens and action == "enter":
                length = data.draw(st.integers(1, MAX_MODEL_LEN), label="length")
                tokens = data.draw(st.lists(st.integers(0, 9), min_size=length, max_size=length), label="tokens")
                maker.enter(row, tokens, data.draw(st.integers(1, length), label="prompt"))
        for row in data.draw(st.permutations(sorted(maker.tokens)), label="order"):
            most = len(maker.tokens[row]) - maker.computed[row]
            if count := data.draw(st.integers(0, most), label="count"):
                maker.compute(row, count)
        plan = maker.plan()
        batch.apply(plan)
        check_arrays(batch, maker, plan)
        rows = plan.rows[plan.sampled]
        token_ids = np.arange(len(rows), dtype=np.int32)
        fits = np.array([len(maker.tokens[row]) < MAX_MODEL_LEN for row in rows.tolist()], bool)
        batch.append_sampled(rows, token_ids)
        maker.sampled(rows[fits], token_ids[fits])
        for row in range(NUM_ROWS):
            assert batch.tokens[row, : batch.num_tokens[row]].tolist() == maker.tokens.get(row, [])
            assert set(batch.num_blocks[row::NUM_ROWS].tolist()) == {len(maker.blocks.get(row, []))}


def test_a_token_beyond_max_model_len_is_not_kept() -> None:
    batch, maker = BatchState(NUM_ROWS, MAX_MODEL_LEN, BLOCK_SIZE), PlanMaker()
    maker.enter(0, [1] * MAX_MODEL_LEN)
    maker.enter(1, [2] * 3)
    maker.compute(0)
    maker.compute(1)
    batch.apply(maker.plan())
    batch.append_sampled(i32(0, 1), i32(7, 8))
    assert batch.num_tokens[:2].tolist() == [MAX_MODEL_LEN, 4]
    assert batch.tokens[1, :4].tolist() == [2, 2, 2, 8]


# --- runner -----------------------------------------------------------------------------------------------------


class PagedHashModel:
    """Logits from a hash of all tokens in context, each read from its cache slot; wrong slots give other tokens."""

    def step(self, arrays: StepArrays, kv_cache: Tensor, draws: Draws | None) -> StepLogits:
        return step_in_two(self, StepInputs.on(torch.device("cpu"), arrays), kv_cache)

    def forward(self, inputs: StepInputs, kv_cache: Tensor) -> Tensor:
        """kv_cache: [num_slots] int64 token ids. Returns [num_tokens, 1] int64, the hash of each token's context."""
        kv_cache[inputs.slot_mapping[0]] = inputs.token_ids
        hidden = []
        for seq, table in enumerate(inputs.block_tables[0]):
            slots = (table[:, None] * inputs.block_size + torch.arange(inputs.block_size)).reshape(-1)
            context = kv_cache[slots][: inputs.seq_lens[seq]].tolist()
            for position in inputs.positions[inputs.query_start[seq] : inputs.query_start[seq + 1]].tolist():
                seen = tuple(context[: position + 1])
                hidden.append(-1 if POISON in seen or seen[-1] == GLITCH else hash(seen))
        return torch.tensor(hidden)[:, None]

    def logits(self, hidden: Tensor) -> Tensor:
        rows = [
            torch.full((VOCAB_SIZE,), torch.nan)
            if state == -1
            else torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(state)) * 2
            for state in hidden[:, 0].tolist()
        ]
        logits = torch.stack(rows)
        logits[:, [POISON, GLITCH]] = -torch.inf  # only a prompt brings them
        return logits


class Bench:
    """A runner and the maker of its plans."""

    def __init__(self, vocab_size: int = VOCAB_SIZE) -> None:
        self.maker = PlanMaker()
        batch = BatchState(NUM_ROWS, MAX_MODEL_LEN, BLOCK_SIZE)
        cache = torch.zeros(1000 * BLOCK_SIZE, dtype=torch.int64)
        self.runner = ModelRunner(PagedHashModel(), cache, batch, vocab_size=vocab_size)

    def step(self, *work: int | tuple[int, int]) -> StepResult:
        """Computes the rows given, all of their tokens or (row, count)."""
        for item in work:
            self.maker.compute(*(item if isinstance(item, tuple) else (item,)))
        result = self.runner.step(self.maker.plan())
        self.maker.sampled(result.rows, result.token_ids)
        return result

    def finish(self, row: int, length: int) -> list[int]:
        while len(self.maker.tokens[row]) < length:
            self.step(row)
        return self.maker.tokens[row]


PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def test_greedy_and_seeded_tokens_do_not_depend_on_chunks_company_or_preemption() -> None:
    for sampling in ({"temperature": 0.0}, {"temperature": 1.5, "top_p": 0.9}, {"repetition_penalty": 1.4}):
        alone = Bench()
        alone.maker.enter(0, PROMPT, seed=42, **sampling)
        expected = alone.finish(0, 25)

        crowded = Bench()
        crowded.maker.enter(3, PROMPT, seed=42, **sampling)
        crowded.maker.enter(1, [7, 7, 7], seed=1, temperature=2.0, top_k=3)
        crowded.step((3, 3), 1)
        crowded.maker.enter(5, [9, 1], seed=2, frequency_penalty=1.0)
        crowded.step(5, 1, (3, 6))
        assert crowded.step(1, 3, 5).rows.tolist() == [1, 3, 5]
        crowded.step(3, 1)
        tokens = list(crowded.maker.tokens[3])
        crowded.maker.release(3)
        crowded.step(5)
        crowded.maker.enter(0, tokens, len(PROMPT), seed=42, **sampling)
        crowded.step((0, 5), 1)
        assert crowded.finish(0, 25) == expected


def test_a_step_reports_only_rows_that_reached_their_last_token() -> None:
    bench = Bench()
    bench.maker.enter(0, PROMPT)
    result = bench.step((0, 9))
    assert (result.rows.tolist(), result.token_ids.tolist(), result.failures) == ([], [], ())
    assert bench.step(0).rows.tolist() == [0]


def prompt_logprobs(bench: Bench, *chunks: int) -> tuple[list[int], np.ndarray, np.ndarray, np.ndarray]:
    """Starts of the runs, and their token ids, logprobs and ranks joined."""
    bench.maker.enter(2, PROMPT, prompt_logprobs=2)
    bench.maker.enter(0, [1, 2, 3])
    runs = [run for chunk in chunks for run in bench.step(0, (2, chunk)).prompt_logprobs]
    assert {run.row for run in runs} == {2}
    ids, values, ranks = (
        np.concatenate([getattr(run.rows, name).numpy() for run in runs]) for name in ("token_ids", "logprobs", "ranks")
    )
    return [run.start for run in runs], ids, values, ranks


def test_prompt_logprobs_are_complete_and_equal_however_the_prompt_is_cut() -> None:
    starts, ids, values, ranks = prompt_logprobs(Bench(), 10)
    assert starts == [1]
    assert ids[:, 0].tolist() == PROMPT[1:]
    for place in range(len(PROMPT) - 1):
        context = hash(tuple(PROMPT[: place + 1]))
        expected = PagedHashModel().logits(torch.tensor([[context]]))[0].log_softmax(0)
        assert values[place].tolist() == pytest.approx(expected[torch.from_numpy(ids[place]).long()].tolist(), abs=1e-5)
        assert ids[place, 1:].tolist() == expected.topk(2).indices.tolist()
        assert ranks[place] == 1 + int((expected > expected[PROMPT[place + 1]]).sum())

    narrow = Bench(vocab_size=PROMPT_LOGITS_BYTES // (3 * 4))  # makes the logits of three positions at a time
    for bench, chunks, expected_starts in (
        (Bench(), (1, 5, 4), [1, 2, 7]),
        (Bench(), (9, 1), [1]),  # the prompt's last token predicts an output token
        (narrow, (10,), [1, 4, 7]),
    ):
        found = prompt_logprobs(bench, *chunks)
        assert found[0] == expected_starts
        assert all((a == b).all() for a, b in zip(found[1:], (ids, values, ranks), strict=True))


def test_generated_tokens_of_a_resumed_request_are_not_reported_as_prompt() -> None:
    bench = Bench()
    bench.maker.enter(0, PROMPT, num_prompt=4, prompt_logprobs=0)
    (run,) = bench.step(0).prompt_logprobs
    assert (run.start, run.rows.token_ids.tolist()) == (1, PROMPT[1:4])


def test_a_row_without_finite_logits_fails_alone_and_logprobs_keep_their_rows() -> None:
    bench = Bench()
    for row, first in enumerate((1, POISON, 2, 3)):
        bench.maker.enter(row, [first, 4], logprobs=None if row == 2 else 0, temperature=0.0)
    bench.maker.enter(4, [POISON, 5, 6], prompt_logprobs=1)
    result = bench.step(0, 1, 2, 3, 4)
    assert result.rows.tolist() == [0, 2, 3]
    assert sorted(failure.row for failure in result.failures) == [1, 4]
    assert all("its computation overflowed" in failure.failure.message for failure in result.failures)
    assert result.logprob_indices is not None
    assert result.logprobs is not None
    assert result.logprob_indices.tolist() == [0, 2]
    assert result.logprobs.token_ids.tolist() == result.token_ids[[0, 2]].tolist()
    for row in (1, 4):
        bench.maker.release(row)
    assert bench.step(0, 2, 3).rows.tolist() == [0, 2, 3]


@pytest.mark.parametrize("chunk", [2, 3])
def test_a_row_of_which_only_the_prompt_logits_are_not_finite_fails_too(chunk: int) -> None:
    bench = Bench()
    bench.maker.enter(0, [GLITCH, 5, 6], prompt_logprobs=1, logprobs=0)
    bench.maker.enter(1, [4, 5, 6], logprobs=0)
    result = bench.step((0, chunk), 1)
    assert [failure.row for failure in result.failures] == [0]
    assert "not finite" in result.failures[0].failure.message
    assert result.prompt_logprobs == ()
    assert result.rows.tolist() == [1]
    assert result.logprob_indices is not None
    assert result.logprob_indices.tolist() == [0]


def test_a_request_whose_parameters_cannot_be_used_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(sampling: Sampling) -> None:
        if sampling.bad_words:
            raise ZeroDivisionError("no rules for these words")

    bench = Bench()
    monkeypatch.setattr("headrace.executor.sampling.columns.rules_of", refuse)
    bench.maker.enter(0, PROMPT, temperature=0.0)
    bench.maker.enter(1, PROMPT, bad_words=((5,),), logprobs=2, prompt_logprobs=1, temperature=0.0)
    result = bench.step(0, (1, 4))
    assert (result.rows.tolist(), result.failures) == ([0], ())
    result = bench.step(0, 1)
    assert result.rows.tolist() == [0]
    assert [failure.row for failure in result.failures] == [1]
    assert "ZeroDivisionError: no rules for these words" in result.failures[0].failure.message
    bench.maker.release(1)
    bench.maker.enter(1, PROMPT, temperature=0.0)
    result = bench.step(0, 1)
    assert result.rows.tolist() == [0, 1]
    assert bench.finish(1, 15) == bench.finish(0, 15), "the next one in its row is served"


def test_log_probabilities_of_one_prompt_that_cannot_be_told_fail_its_row_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def report(logits: Tensor, token_ids: np.ndarray, counts: np.ndarray) -> LogprobRows:
        if token_ids[0] == 8:
            raise IndexError("index 8 is out of bounds")
        return logprob_rows(logits, token_ids, counts)

    monkeypatch.setattr("headrace.executor.step.prompt_logprobs.logprob_rows", report)
    bench = Bench()
    bench.maker.enter(0, [7, 8, 9], prompt_logprobs=1)
    bench.maker.enter(1, [7, 7, 9], prompt_logprobs=1)
    result = bench.step(0, 1)
    assert [failure.row for failure in result.failures] == [0]
    assert "index 8 is out of bounds" in result.failures[0].failure.message
    assert (result.rows.tolist(), [run.row for run in result.prompt_logprobs]) == ([1], [1])


def test_a_plan_without_work_releases_rows() -> None:
    bench = Bench()
    bench.maker.enter(0, PROMPT)
    bench.step(0)
    bench.maker.release(0)
    assert bench.step().rows.tolist() == []
