"""Steps of a batch that only decodes: planned as the one before once more, and exact about when that ends."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from engine_parts import EOS, VOCAB_SIZE, SteppedCore

from headrace.core.schedule.features.feature import StepFeature
from headrace.core.schedule.scheduler import Scheduler
from headrace.executor.testing.null import NullExecutor, NullModel
from headrace.ipc.messages import Abort, FinishReason
from headrace.ipc.step import Attachment, StepPlan


class Noting(NullExecutor):
    """Remembers the plans that it was given, beside checking them."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        super().submit(plan)


class NotingTwo(Noting):
    max_steps_in_flight = 2
    async_by_default = True


def core_of(executor: type[Noting] = Noting, eos_after: int = 0, **changes: Any) -> SteppedCore:
    model = NullModel(vocab_size=VOCAB_SIZE, eos_token_id=EOS, check=True, eos_after_tokens=eos_after)
    return SteppedCore(model, executor, **{"block_size": 8, **changes})


def repeats(core: SteppedCore) -> list[bool]:
    """Which plans were made without the scheduler's stages: those have their arrays in common with the one before."""
    assert isinstance(core.executor, Noting)
    plans = core.executor.plans
    return [False, *(plan.rows is before.rows for before, plan in pairwise(plans))]


@pytest.mark.parametrize("executor", [Noting, NotingTwo])
def test_most_steps_of_a_long_answer_repeat_the_one_before(executor: type[Noting]) -> None:
    core = core_of(executor)
    client = core.open()
    client.add(0, [5] * 4, max_tokens=44)
    core.run_until_idle()
    assert len(client.tokens()[0]) == 44
    assert sum(repeats(core)) == 42  # all but the prompt's, and the first token's own


@pytest.mark.parametrize("executor", [Noting, NotingTwo])
@pytest.mark.parametrize(("ending", "reason"), [("eos", FinishReason.STOP), ("limit", FinishReason.LENGTH)])
def test_a_request_ends_where_it_should_within_repeated_steps(
    executor: type[Noting], ending: str, reason: FinishReason
) -> None:
    for length in range(1, 12):
        core = core_of(executor, eos_after=length if ending == "eos" else 0)
        client = core.open()
        client.add(0, [5], max_tokens=40 if ending == "eos" else length)
        client.add(1, [6], max_tokens=30, ignore_eos=True)
        core.run_until_idle()
        assert [len(client.tokens()[slot]) for slot in (0, 1)] == [length, 30]
        assert [finish.reason for finish in client.finishes()] == [reason, FinishReason.LENGTH]


def test_a_stop_token_ends_a_request_within_repeated_steps() -> None:
    core = core_of()
    client = core.open()
    client.add(0, [5], max_tokens=40)
    core.run_until_idle()
    answer = client.tokens()[0]
    place = next(i for i in range(3, 30) if answer[i] not in answer[:i])
    client.add(1, [5], max_tokens=40, stop_token_ids=(answer[place],))
    core.run_until_idle()
    assert client.tokens()[1] == answer[: place + 1]
    assert client.finishes()[-1].stop_token == answer[place]


@pytest.mark.parametrize("executor", [Noting, NotingTwo])
def test_who_comes_or_leaves_is_in_the_very_next_plan(executor: type[Noting]) -> None:
    core = core_of(executor, max_model_len=64)
    assert isinstance(core.executor, Noting)
    client = core.open()
    client.add(0, [5], max_tokens=50)
    while not repeats(core)[-1]:
        core.loop.turn()
    client.add(1, [6], max_tokens=50)
    core.loop.turn()
    assert len(core.executor.plans[-1].new_rows) == 1
    while not repeats(core)[-1]:
        core.loop.turn()
    client.send(Abort(slots=(0,)))
    core.loop.turn()
    assert len(core.executor.plans[-1].released_rows) == 1
    assert len(core.executor.plans[-1].rows) == 1
    core.run_until_idle()
    assert len(client.tokens()[1]) == 50


def test_no_step_repeats_while_somebody_waits_or_a_scheduler_has_stages_of_its_own() -> None:
    core = core_of(max_num_seqs=1)
    client = core.open()
    client.add(0, [5], max_tokens=20)
    client.add(1, [5], max_tokens=20)
    while client.finishes() == []:
        core.loop.turn()
    assert not any(repeats(core))
    core.run_until_idle()
    assert any(repeats(core))
    own = core_of(scheduler_cls=f"{__name__}:OneStageOfItsOwn")
    client = own.open()
    client.add(0, [5], max_tokens=20)
    own.run_until_idle()
    assert not any(repeats(own))


class OneStageOfItsOwn(Scheduler):
    def _top_up_prefills(self, draft: Any) -> None:
        super()._top_up_prefills(draft)


class Other(Attachment, frozen=True):
    """As a feature of one's own attaches."""


class AttachesOther(StepFeature):
    attaches = (Other,)

    def seal(self, plan: StepPlan) -> StepPlan:
        return msgspec.structs.replace(plan, attachments=(*plan.attachments, Other()))


class ReadsOther(Noting):
    reads = Noting.reads | {Other}


def test_an_attachment_that_the_repeated_plans_do_not_make_is_in_every_plan() -> None:
    core = SteppedCore(executor_class=ReadsOther, async_scheduling=False)
    core.loop.scheduler.add_feature(AttachesOther())
    client = core.open()
    client.add(1, [5, 6], max_tokens=20, ignore_eos=True)
    core.run_until_idle()
    assert isinstance(core.executor, Noting)
    assert [[type(each) for each in plan.attachments] for plan in core.executor.plans] == [[Other]] * 20
