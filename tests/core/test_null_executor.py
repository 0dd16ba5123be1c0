"""The null executor's promises, and that its oracle finds each kind of wrong plan."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
import pytest
from engine_parts import make_plan

from headrace.core.options.engine_options import Options
from headrace.executor.testing.null import NullExecutor, NullModel
from headrace.executor.testing.plan_check import PlanCheck
from headrace.ipc.failure import InconsistentError, OptionError
from headrace.ipc.messages import Generate, Sampling
from headrace.ipc.step import NewRow, StepPlan, StepResult


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def new_row(row: int, tokens: list[int], blocks: list[int], **changes: Any) -> NewRow:
    values: dict[str, Any] = {
        "num_prompt_tokens": len(tokens),
        "num_computed_tokens": 0,
        "task": Generate(sampling=Sampling(max_tokens=9)),
        "seed": 0,
        **changes,
    }
    return NewRow(row=row, token_ids=i32(*tokens), block_ids=i32(*blocks), **values)


def make_step(step: int, *work: tuple[int, int, int, bool], **changes: Any) -> StepPlan:
    """work: (row, tokens computed, tokens before them, sampled)"""
    rows, counts, computed, sampled = zip(*work, strict=True) if work else ((), (), (), ())
    values: dict[str, Any] = {
        "released_rows": i32(),
        "new_rows": (),
        "block_tables": i32(),
        "block_ids": i32(),
        **changes,
    }
    return StepPlan(
        step=step,
        rows=i32(*rows),
        num_tokens=i32(*counts),
        num_computed_tokens=i32(*computed),
        sampled=np.array(sampled, bool),
        total_tokens=sum(counts),
        **values,
    )


def executor(**fields: Any) -> NullExecutor:
    plan, facts = make_plan()
    made = NullExecutor(plan.options, NullModel(vocab_size=100, **fields))
    made.describe(lambda phase: None)
    made.load(plan, lambda phase: None)
    made.allocate(facts.num_blocks, facts.max_model_len)
    return made


def run(made: NullExecutor, plan: StepPlan) -> StepResult:
    made.submit(plan)
    return made.collect()


def test_tokens_depend_on_prompt_and_position_alone() -> None:
    first, second = executor(check=True), executor(check=True)
    start = make_step(0, (0, 5, 0, True), new_rows=(new_row(0, [5, 6, 7, 8, 9], [1, 2]),))
    tokens = [run(first, start).token_ids.item()]
    for step in range(1, 4):
        plan = make_step(step, (0, 1, 4 + step, True))
        tokens.append(run(first, plan).token_ids.item())
    assert len(set(tokens)) > 1
    assert all(3 <= token < 100 for token in tokens)

    other = new_row(2, [1, 1], [7])
    resumed = new_row(4, [5, 6, 7, 8, 9, *tokens[:2]], [3, 4], num_prompt_tokens=5)
    result = run(second, make_step(0, (2, 2, 0, True), (4, 7, 0, True), new_rows=(other, resumed)))
    assert result.token_ids[1] == tokens[2]


def test_it_ends_fails_and_crashes_as_told() -> None:
    ending = executor(eos_after_tokens=2)
    assert run(ending, make_step(0, (0, 1, 0, True), new_rows=(new_row(0, [5], [1]),))).token_ids.item() != 2
    assert run(ending, make_step(1, (0, 1, 1, True))).token_ids.item() == 2

    failing = executor(fail_token_id=66)
    both = (new_row(0, [5], [1]), new_row(1, [66], [2]))
    result = run(failing, make_step(0, (0, 1, 0, True), (1, 1, 0, True), new_rows=both))
    assert (result.rows.tolist(), [f.row for f in result.failures]) == ([0], [1])

    for crashing in (executor(crash_step=0), executor(crash_token_id=5)):
        with pytest.raises(RuntimeError, match="told to crash in step 0"):
            run(crashing, make_step(0, (0, 1, 0, True), new_rows=(new_row(0, [5], [1]),)))


def test_logprobs_have_the_shapes_that_were_asked_for() -> None:
    wanting = new_row(1, [5, 6, 7], [2], task=Generate(sampling=Sampling(max_tokens=9, logprobs=2, prompt_logprobs=1)))
    made = executor()
    first = run(made, make_step(0, (0, 1, 0, True), (1, 2, 0, False), new_rows=(new_row(0, [5], [1]), wanting)))
    second = run(made, make_step(1, (1, 1, 2, True)))
    assert first.logprobs is None
    assert [(r.row, r.start, r.rows.token_ids.tolist()) for r in first.prompt_logprobs] == [(1, 1, [6, 6, 7, 7])]
    assert second.prompt_logprobs == ()
    assert second.logprobs is not None
    assert second.logprobs.token_ids.shape == (1, 3)
    assert second.logprobs.token_ids.tolist()[0] == second.token_ids.item()


def test_its_model_may_come_from_the_options_and_a_misspelt_field_is_named() -> None:
    assert NullExecutor(Options(hf_overrides={"vocab_size": 7})).model.vocab_size == 7
    with pytest.raises(OptionError, match=r"vocab_sise.*known: vocab_size"):
        NullExecutor(Options(hf_overrides={"vocab_sise": 7}))


def test_importing_it_loads_no_torch() -> None:
    code = "import sys, headrace.executor.testing.null; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- the oracle -------------------------------------------------------------------------------------------------

PROMPT = [5, 6, 7, 8, 9]


def checker() -> PlanCheck:
    """Rows of 8, blocks of 4 tokens. Row 0 holds PROMPT in blocks 1 and 2, computed, and one sampled token."""
    plan, facts = make_plan()
    check = PlanCheck(plan, facts.num_blocks, facts.max_model_len)
    check.apply(make_step(0, (0, 5, 0, True), new_rows=(new_row(0, PROMPT, [1, 2]),)))
    check.append_sampled(i32(0), i32(50))
    return check


def test_a_right_plan_passes_with_shared_blocks_and_a_reused_row() -> None:
    check = checker()
    sharing = new_row(1, [5, 6, 7, 8, 1], [1, 3], num_computed_tokens=4)
    check.apply(make_step(1, (0, 1, 5, True), (1, 1, 4, True), new_rows=(sharing,)))
    check.append_sampled(i32(0, 1), i32(51, 52))
    again = new_row(0, [4, 4], [2])
    check.apply(make_step(2, (0, 2, 0, True), (1, 1, 5, True), released_rows=i32(0), new_rows=(again,)))


WRONG_PLANS = {
    "releases row 3, which is free": make_step(1, released_rows=i32(3)),
    "new row 0: is occupied": make_step(1, new_rows=(new_row(0, [1], [3]),)),
    "not below max_num_seqs": make_step(1, new_rows=(new_row(8, [1], [3]),)),
    "prompt of 2 of 1": make_step(1, new_rows=(new_row(1, [1], [3], num_prompt_tokens=2),)),
    "1 of 1 computed": make_step(1, new_rows=(new_row(1, [1], [3], num_computed_tokens=1),)),
    "outside the vocabulary": make_step(1, new_rows=(new_row(1, [100], [3]),)),
    "token -1": make_step(1, new_rows=(new_row(1, [-1], [3]),)),
    "to row 4, which is free": make_step(1, block_tables=i32(4), block_ids=i32(3)),
    "a block occurs twice": make_step(1, block_tables=i32(0), block_ids=i32(1)),
    "no such block": make_step(1, block_tables=i32(0), block_ids=i32(64)),
    r"no such block in \[1, 2, 0\]": make_step(1, block_tables=i32(0), block_ids=i32(0)),
    "different lengths": msgspec.structs.replace(make_step(1, (0, 1, 5, True)), num_tokens=i32(1, 1)),
    "a row occurs twice": make_step(1, (0, 1, 5, True), (0, 1, 5, True)),
    "over the budget": make_step(1, (1, 33, 0, True), new_rows=(new_row(1, [1] * 33, [*range(3, 12)]),)),
    "row 1: is free": make_step(1, (1, 1, 0, True)),
    "computes 0 tokens": make_step(1, (0, 0, 5, False)),
    "says 4 computed, it is 5": make_step(1, (0, 2, 4, True)),
    "only 6 tokens are known": make_step(1, (0, 2, 5, True)),
    "sampled is False at 6 of 6": make_step(1, (0, 1, 5, False)),
    "its 1 blocks hold 4": make_step(1, (1, 5, 0, True), new_rows=(new_row(1, [1] * 5, [3]),)),
    "both write block 2": make_step(1, (0, 1, 5, True), (1, 5, 0, True), new_rows=(new_row(1, PROMPT, [3, 2]),)),
    "block 3 was never written at position 0": make_step(
        1, (1, 1, 4, True), new_rows=(new_row(1, [*PROMPT], [3, 4], num_computed_tokens=4),)
    ),
    "block 1 holds another sequence at position 1": make_step(
        1, (1, 1, 4, True), new_rows=(new_row(1, [5, 5, 5, 5, 5], [1, 4], num_computed_tokens=4),)
    ),
    "row 0: block 1 holds another sequence": make_step(
        1, (0, 1, 5, True), (1, 2, 0, True), new_rows=(new_row(1, [1, 1], [1]),)
    ),
}


@pytest.mark.parametrize("complaint", WRONG_PLANS)
def test_the_oracle_names_what_is_wrong(complaint: str) -> None:
    check = checker()
    with pytest.raises(InconsistentError, match=complaint):
        check.apply(WRONG_PLANS[complaint])
