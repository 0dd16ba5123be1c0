"""Step features of other packages: their attachments reach the ranks that read them, and no other rank runs them."""

from __future__ import annotations

import itertools
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import installed_packages
import msgspec
import numpy as np
import pytest
from engine_parts import SteppedCore, make_plan
from test_steady import Noting
from thinned import every

from headrace.core.schedule.drafters.drafter import Drafter
from headrace.core.schedule.features.chosen import attached_kinds, features_of
from headrace.core.schedule.features.contained import CONCERNED, contain
from headrace.core.schedule.features.feature import NOTHING_NOW, Followed, Repeated, StepFeature
from headrace.core.schedule.requests import Request
from headrace.executor.cpu.rank import CpuRank
from headrace.executor.cpu.repeated_decode import ContinuedDecode
from headrace.executor.placement.step_codec import StepCodec
from headrace.executor.testing.null import NullExecutor
from headrace.ipc import plugins, step
from headrace.ipc.codec import CodecError
from headrace.ipc.failure import OptionError
from headrace.ipc.messages import FinishReason
from headrace.ipc.step import (
    KINDS,
    Attachment,
    AttachmentError,
    LazyArray,
    StepPlan,
    StepResult,
    StepSizes,
    attachment,
    attachment_bytes,
    problem_of_attachment,
    returned_bytes,
)


@attachment(most_bytes=lambda sizes: 8 * sizes.num_rows + 64)
class Marks(Attachment, frozen=True):
    """A number for each row of the step."""

    numbers: np.ndarray


class Marking(StepFeature):
    """Attaches a number to every row of a step, and ends an answer with a token that 7 divides."""

    attaches = (Marks,)

    def seal(self, plan: StepPlan) -> StepPlan:
        return msgspec.structs.replace(plan, attachments=(*plan.attachments, self._marks(plan)))

    def repeated(self, plan: StepPlan) -> Repeated | None:
        return MarkingAgain(self, plan)

    def follow(self, row_of: np.ndarray, token_ids: np.ndarray, ends: np.ndarray) -> Followed | None:
        return Followed(token_ids % 7 == 0, {})

    @staticmethod
    def _marks(plan: StepPlan) -> Marks:
        return Marks(numbers=plan.rows.astype(np.int64) + 100)


class MarkingAgain(Repeated):
    def __init__(self, feature: Marking, plan: StepPlan) -> None:
        self._feature, self._marks = feature, feature._marks(plan)

    def attachment(self, num_in_flight: int) -> Attachment | None:
        return self._marks

    def take(self, token_ids: np.ndarray) -> Followed | None:
        found = self._feature.follow(token_ids, token_ids, token_ids)
        return found if found is not None and found.completes.any() else None


class Guessing(StepFeature):
    """Drafts the same two tokens whenever it may."""

    def __init__(self) -> None:
        self.drafter = AlwaysTwo()


class AlwaysTwo(Drafter):
    def wants(self, rows: np.ndarray) -> np.ndarray:
        return np.ones(len(rows), bool)

    def propose(self, row: int, limit: int, least_likely: float = 0.0) -> np.ndarray:
        return np.array([9, 10], np.int32)[:limit]


class ReadsMarks(Noting):
    reads = NullExecutor.reads | {Marks}


class ReadsMarksAhead(ReadsMarks):
    max_steps_in_flight = 2


def install(folder: Path, entry_points: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = folder / "lab-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: lab\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(f"[headrace.step_features]\n{entry_points}\n")
    monkeypatch.syspath_prepend(str(folder))


def answers(core: SteppedCore) -> list[tuple[list[int], FinishReason]]:
    client = core.open()
    for slot in range(6):
        client.add(slot, [5, 6 + slot], max_tokens=25, ignore_eos=True)
    core.run_until_idle()
    ends = {finish.slot: finish.reason for finish in client.finishes()}
    return [(client.tokens()[slot], ends[slot]) for slot in range(6)]


@pytest.mark.parametrize("ahead", [False, True])
def test_an_installed_feature_is_part_of_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    plain = answers(SteppedCore(async_scheduling=False))
    install(tmp_path, f"marks = {__name__}:Marking", monkeypatch)
    assert attached_kinds(make_plan()[0]) == ("Drafts", "Marks", "TokenMasks")
    core = SteppedCore(executor_class=ReadsMarksAhead if ahead else ReadsMarks, async_scheduling=ahead)
    marked = answers(core)
    plans = cast(ReadsMarks, core.executor).plans
    assert all((marks := plan.get(Marks)) and (marks.numbers == plan.rows + 100).all() for plan in plans)
    assert any(plan.rows is before.rows for before, plan in pairwise(plans))  # repeated ones too
    for (tokens, _), (found, reason) in zip(plain, marked, strict=True):
        end = next((nth for nth, token in enumerate(tokens, 1) if token % 7 == 0), None)
        assert found == tokens[:end]
        assert reason is (FinishReason.LENGTH if end is None else FinishReason.STOP)
    assert any(reason is FinishReason.STOP for _, reason in marked)


class RaisingAgain(Repeated):
    def __init__(self, hook: str) -> None:
        self._hook = hook

    def attachment(self, num_in_flight: int) -> Attachment | None:
        if self._hook == "attachment":
            raise ZeroDivisionError
        return NOTHING_NOW

    def take(self, token_ids: np.ndarray) -> Followed | None:
        if self._hook == "take_again":
            raise ZeroDivisionError
        return None


def raising(hook: str, num_rows: int) -> StepFeature:
    """A feature of which this hook raises when it is first called for so many rows."""
    calls = itertools.count(1)

    def hooked(self: StepFeature, *given: Any) -> Any:
        if hook in ("attachment", "take_again"):
            return RaisingAgain(hook) if next(calls) == 1 else None
        if len(list(CONCERNED[hook](*given))) == num_rows and next(calls) == 1:
            raise ZeroDivisionError
        return getattr(StepFeature, name)(self, *given)

    name = "repeated" if hook in ("attachment", "take_again") else hook
    feature: StepFeature = type("Raising", (StepFeature,), {name: hooked})()
    return feature


@pytest.mark.parametrize("ahead", every(2, [False, True]))
@pytest.mark.parametrize(
    ("hook", "num_failed"),
    [
        *((each, 6) for each in ("waits", "propose", "seal", "quiet_steps", "repeated", "follow", "take")),
        *((each, 6) for each in ("attachment", "take_again")),
        *(("needed_by", 1), ("postpones", 1), ("cut", 1), ("leave", 0)),
    ],
)
def test_a_hook_that_raises_fails_the_requests_that_it_was_called_for_and_no_other(
    hook: str, num_failed: int, ahead: bool
) -> None:
    plain = answers(SteppedCore(async_scheduling=False))
    core = SteppedCore(executor_class=ReadsMarksAhead if ahead else ReadsMarks, async_scheduling=ahead)
    if hook == "cut":
        core.loop.scheduler.add_feature(Guessing())
    core.loop.scheduler.add_feature(contain(raising(hook, num_failed), "lab"))
    client = core.open()
    for slot in range(6):
        client.add(slot, [5, 6 + slot], max_tokens=25, ignore_eos=True)
    core.run_until_idle()
    ends = {finish.slot: finish for finish in client.finishes()}
    failed = {slot: end.failure for slot, end in ends.items() if end.reason is FinishReason.FAILED}
    called = {"attachment": "repeated", "take_again": "repeated"}.get(hook, hook)
    assert {each.message for each in failed.values() if each} <= {
        f"the step feature lab failed in {called}: ZeroDivisionError()"
    }
    is_not_called = (hook, ahead) in {("waits", False), ("cut", True), ("take_again", True)}
    assert len(failed) == (0 if is_not_called else num_failed)
    assert all(client.tokens()[slot] == plain[slot][0] for slot in ends.keys() - failed.keys())
    assert answers(core) == plain, "later requests have the feature, and the engine its rows and blocks"
    core.loop.scheduler.check()


@pytest.mark.parametrize("method", ["wants", "look_up", "propose", "judged"])
def test_a_drafter_of_a_feature_that_raises_drafts_nothing(method: str) -> None:
    plain = answers(SteppedCore(async_scheduling=False))
    feature, called = Guessing(), list[str]()

    def raises(*given: Any) -> Any:
        called.append(method)
        raise KeyError(method)

    feature.drafter = type("Raising", (AlwaysTwo,), {method: raises})()
    core = SteppedCore(executor_class=Noting, async_scheduling=False)
    core.loop.scheduler.add_feature(contain(feature, "lab"))
    assert answers(core) == plain
    assert called


class AnsweringAgain(Repeated):
    def __init__(self, hook: str, answer: Any) -> None:
        self._hook, self._answer = hook, answer

    def attachment(self, num_in_flight: int) -> Attachment | None:
        return self._answer if self._hook == "attachment" else NOTHING_NOW

    def take(self, token_ids: np.ndarray) -> Followed | None:
        return self._answer if self._hook == "take_again" else None


@pytest.mark.parametrize(
    ("hook", "answer", "expected"),
    [
        ("needed_by", np.zeros(3, bool), "True or False"),
        ("postpones", "no", "True or False"),
        ("waits", [True], "None, or a mask of the rows"),
        ("waits", np.zeros(40, bool), "None, or a mask of the rows"),
        ("cut", [np.zeros(50, np.int32)], "a prefix of each draft"),
        ("cut", None, "a prefix of each draft"),
        ("seal", None, "the plan"),
        ("quiet_steps", -1, "None, or a whole number of at least 0"),
        ("quiet_steps", "many", "None, or a whole number of at least 0"),
        ("repeated", 3, "None or a Repeated"),
        ("attachment", "x", "None, NOTHING_NOW, or an attachment of a kind that it attaches (none)"),
        ("take_again", np.zeros(1), "None, or a Followed"),
        ("follow", 5, "None, or a Followed"),
        ("follow", Followed(np.zeros(40, bool), {}), "None, or a Followed"),
        ("follow", Followed(np.zeros(1, bool), {40: "why"}), "None, or a Followed"),
    ],
)
def test_an_answer_of_another_form_fails_the_requests_of_the_call_and_not_the_engine(
    hook: str, answer: Any, expected: str
) -> None:
    ahead = hook in ("waits", "take_again", "quiet_steps", "attachment", "repeated")
    core = SteppedCore(executor_class=ReadsMarksAhead if ahead else ReadsMarks, async_scheduling=ahead)
    if hook == "cut":
        core.loop.scheduler.add_feature(Guessing())
    is_again = hook in ("attachment", "take_again")
    said = AnsweringAgain(hook, answer) if is_again else answer
    name = "repeated" if is_again else hook
    feature: StepFeature = type("Answering", (StepFeature,), {name: lambda *_: said})()
    core.loop.scheduler.add_feature(contain(feature, "lab"))
    client = core.open()
    for slot in range(3):
        client.add(slot, [5, 6 + slot], max_tokens=25, ignore_eos=True)
    core.run_until_idle()
    ends = client.finishes()
    told = [end.failure.message for end in ends if end.reason is FinishReason.FAILED and end.failure is not None]
    assert len(ends) == 3
    assert all(f"lab failed in {name}: TypeError(" in each and f"expected: {expected}" in each for each in told)
    assert told or (hook, ahead) == ("take_again", True)
    core.loop.scheduler.check()


@pytest.mark.parametrize(
    ("method", "answer"), [("wants", None), ("wants", [True]), ("propose", [9]), ("propose", None)]
)
def test_a_drafter_of_a_feature_with_answers_of_another_form_drafts_nothing(method: str, answer: Any) -> None:
    plain = answers(SteppedCore(async_scheduling=False))
    feature = Guessing()
    feature.drafter = type("Answering", (AlwaysTwo,), {method: lambda *_: answer})()
    core = SteppedCore(executor_class=Noting, async_scheduling=False)
    core.loop.scheduler.add_feature(contain(feature, "lab"))
    assert answers(core) == plain


def with_attachments(*found: Any, **others: Any) -> Any:
    return lambda plan: msgspec.structs.replace(plan, attachments=(*plan.attachments, *found), **others)


class Unknown(Attachment, frozen=True):
    """A kind that is not registered."""


def marks(numbers: Any) -> Marks:
    return Marks(numbers=numbers)


@pytest.mark.parametrize(
    ("sealed", "why"),
    [
        (with_attachments(Unknown()), "it attached Unknown(), whose kind is none of those in `attaches`"),
        (with_attachments("text"), "it attached 'text', whose kind is none of those"),
        (with_attachments(marks(np.arange(3)), marks(np.arange(3))), "it attached two of a kind"),
        (with_attachments(rows=np.array([2, 1, 0], np.int32)), "it changed the plan's rows; it may add"),
        (lambda plan: msgspec.structs.replace(plan, attachments=[]), "it changed the plan's attachments; it may add"),
        (with_attachments(marks([1, 2, 3])), "Marks has a field of another type than it declares"),
        (with_attachments(marks(np.array([object()]))), "Marks has a field of another type than it declares"),
        (with_attachments(marks(np.arange(3, dtype=np.uint64))), "Marks has a field of another type than it declares"),
    ],
)
def test_a_plan_with_what_it_may_not_have_is_not_submitted(sealed: Any, why: str) -> None:
    """Its rows would be computed for others, or no rank could read it."""

    class Sealing(StepFeature):
        attaches = (Marks,)

        def seal(self, plan: StepPlan) -> StepPlan:
            found: StepPlan = plan if len(plan.rows) < 3 else sealed(plan)
            return found

    told, core = told_of_three(Sealing())
    assert len(told) == 3
    assert all(each.startswith("the step feature lab failed in seal: TypeError(") and why in each for each in told)
    plans = cast(ReadsMarks, core.executor).plans
    assert all(not plan.attachments and plan.rows.tolist() == sorted(plan.rows.tolist()) for plan in plans)


@pytest.mark.parametrize(
    ("attached", "why"),
    [
        (Unknown(), "expected: None, NOTHING_NOW, or an attachment of a kind that it attaches (Marks)"),
        (marks([1, 2, 3]), "Marks has a field of another type than it declares"),
    ],
)
def test_a_repeated_plan_with_what_it_may_not_have_is_not_submitted(attached: Attachment, why: str) -> None:
    class Again(StepFeature):
        attaches = (Marks,)

        def repeated(self, plan: StepPlan) -> Repeated:
            return AnsweringAgain("attachment", attached)

    told, core = told_of_three(Again())
    assert len(told) == 3
    assert all(each.startswith("the step feature lab failed in repeated: TypeError(") and why in each for each in told)
    assert not any(plan.attachments for plan in cast(ReadsMarks, core.executor).plans)


def told_of_three(feature: StepFeature) -> tuple[list[str], SteppedCore]:
    """What requests of three are told that fail with an installed feature."""
    core = SteppedCore(executor_class=ReadsMarks, async_scheduling=False)
    core.loop.scheduler.add_feature(contain(feature, "lab"))
    client = core.open()
    for slot in range(3):
        client.add(slot, [5, 6 + slot], max_tokens=25, ignore_eos=True)
    core.run_until_idle()
    told = [end.failure.message for end in client.finishes() if end.failure is not None]
    core.loop.scheduler.check()
    return told, core


def test_what_is_computed_later_is_left_alone_when_an_attachment_is_checked() -> None:
    def never() -> np.ndarray:
        raise AssertionError("it is read as late as possible")

    assert not problem_of_attachment(Marks(numbers=LazyArray(never)))  # type: ignore[arg-type]
    assert not problem_of_attachment(Marks(numbers=np.arange(6).reshape(2, 3)))


class NotBound(StepFeature):
    """It keeps nothing of its own `bind`, and fails later."""

    def bind(self, context: Any) -> None:
        pass

    def seal(self, plan: StepPlan) -> StepPlan:
        raise KeyError("seal")


def test_a_feature_that_keeps_no_context_fails_its_requests_alone() -> None:
    core = SteppedCore(async_scheduling=False)
    core.loop.scheduler.add_feature(contain(NotBound(), "lab"))
    client = core.open()
    client.add(0, [5, 6], max_tokens=3)
    core.run_until_idle()
    (end,) = client.finishes()
    assert end.failure is not None
    assert end.failure.message == "the step feature lab failed in seal: KeyError('seal')"


def test_a_feature_that_cannot_be_bound_is_named() -> None:
    feature: StepFeature = type("Raising", (StepFeature,), {"bind": lambda *_: 1 / 0})()
    with pytest.raises(OptionError, match=r"the step feature lab failed in bind: ZeroDivisionError\("):
        SteppedCore().loop.scheduler.add_feature(contain(feature, "lab"))


@attachment(most_returned_bytes=lambda sizes: 64)
class Selected(Attachment, frozen=True):
    """Answers `select` with what it is told."""

    answer: str

    def select(self, kept: np.ndarray) -> Any:
        return {"none": None, "other": Marks(numbers=kept)}[self.answer]


@pytest.mark.parametrize(("answer", "why"), [("none", "it returned None"), ("other", r"Marks\("), ("x", "KeyError")])
def test_an_attachment_that_cannot_be_selected_from_fails_the_rows_that_are_left(answer: str, why: str) -> None:
    result = StepResult(
        step=3,
        rows=np.array([1, 4, 5], np.int32),
        token_ids=np.array([10, 11, 12], np.int32),
        attachments=(Selected(answer=answer), Marks(numbers=np.arange(3))),
    )
    left = result.only(lambda rows: rows != 4)
    assert not len(left.rows)
    assert [each.row for each in left.failures] == [1, 5]
    where = f"the step attachment {__name__}.Selected failed in select: "
    assert all(where in each.failure.message for each in left.failures)
    assert left.get(Selected) is None


@pytest.mark.parametrize("size", [lambda sizes: None, lambda sizes: -1, lambda sizes: sizes.nothing])
def test_a_size_of_an_attachment_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch, size: Any) -> None:
    sizes = StepSizes(num_rows=8, num_tokens=100, num_positions=8, vocab_size=1000)
    for most, made in ((attachment_bytes, (size, None)), (returned_bytes, (None, size))):
        monkeypatch.setitem(step._MOST_BYTES, "Marks", made)
        with pytest.raises(OptionError, match=rf"the step attachment {__name__}.Marks (has|failed in) most_"):
            most(sizes)


class AttachesText(StepFeature):
    attaches = ("Marks",)  # type: ignore[assignment]


class DraftsByFunction(StepFeature):
    drafter = len  # type: ignore[assignment]


@pytest.mark.parametrize(("name", "words"), [("AttachesText", "has attaches="), ("DraftsByFunction", "has drafter=")])
def test_a_wrong_declaration_of_a_feature_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    install(tmp_path, f"lab = {__name__}:{name}", monkeypatch)
    with pytest.raises(OptionError, match=f"the step feature lab, {__name__}:{name}, {words}.*; it must be"):
        features_of(make_plan()[0])


class OfLongPrompts(StepFeature):
    def __init__(self) -> None:
        self.sealed: list[list[int]] = []
        self.left: list[int] = []

    def needed_by(self, request: Request) -> bool:
        return request.num_prompt_tokens > 2

    def seal(self, plan: StepPlan) -> StepPlan:
        self.sealed.append(plan.rows.tolist())
        return plan

    def leave(self, row: int) -> None:
        self.left.append(row)


def test_a_feature_is_called_from_the_first_request_on_that_needs_it_and_for_all_rows() -> None:
    plain = answers(SteppedCore(async_scheduling=False))
    core, feature = SteppedCore(async_scheduling=False), OfLongPrompts()
    core.loop.scheduler.add_feature(feature)
    assert answers(core) == plain
    assert not feature.sealed
    assert not feature.left
    client = core.open()
    client.add(0, [5, 6], max_tokens=9, ignore_eos=True)
    for _ in range(4):
        core.loop.turn()
    client.add(1, [5, 6, 7], max_tokens=9, ignore_eos=True)
    core.run_until_idle()
    assert {len(rows) for rows in feature.sealed} == {1, 2}
    assert len(feature.left) == 2


def test_a_feature_of_ones_own_may_draft() -> None:
    plain = answers(SteppedCore(async_scheduling=False))
    core = SteppedCore(executor_class=Noting, async_scheduling=False)
    core.loop.scheduler.add_feature(Guessing())
    assert answers(core) == plain
    assert any(plan.attachments for plan in cast(Noting, core.executor).plans)


@pytest.mark.parametrize("rank", [NullExecutor, CpuRank])
def test_a_rank_that_does_not_read_a_kind_refuses_the_plan_in_words(rank: Any) -> None:
    plan, _ = make_plan()
    words = "steps carry Marks, which this executor does not read; it reads Drafts, .*TokenMasks. Install a handler"
    with pytest.raises(AttachmentError, match=words):
        rank.check_attachments(rank.__new__(rank), msgspec.structs.replace(plan, attachments=("Marks", "Drafts")))
    core = SteppedCore(async_scheduling=False)  # of a scheduler that attaches what it does not declare
    core.loop.scheduler.add_feature(Marking())
    client = core.open()
    client.add(0, [5, 6], max_tokens=3)
    with pytest.raises(AttachmentError, match=words):
        core.run_until_idle()


def test_a_step_feature_that_is_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, f"marks = {__name__}:Marks", monkeypatch)
    with pytest.raises(OptionError, match=r"the step feature marks, test_step_features:Marks, .* derived from"):
        features_of(make_plan()[0])


def test_a_name_that_two_packages_give_their_features_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, f"marks = {__name__}:Marking", monkeypatch)
    installed_packages.install(tmp_path, "other", f"[headrace.step_features]\nmarks = {__name__}:Guessing\n", files={})
    plugins._installed_on.cache_clear()
    with pytest.raises(OptionError, match=r"two packages have a step feature marks: .*lab.*other|.*other.*lab"):
        features_of(make_plan()[0])


def test_a_kind_has_a_size_and_a_name_of_its_own_and_travels_as_it_is() -> None:
    sizes = StepSizes(num_rows=8, num_tokens=100, num_positions=8, vocab_size=1000)
    assert attachment_bytes(sizes)["Marks"] == 8 * 8 + 64
    with pytest.raises(TypeError, match="two kinds of step attachments are called Marks"):

        @attachment(most_bytes=lambda sizes: 1)
        class Marks(Attachment, frozen=True):
            pass

    plan = msgspec.structs.replace(plan_of_two(), attachments=(globals()["Marks"](numbers=np.arange(3)),))
    data = StepCodec(StepPlan).encode(plan)
    found = StepCodec(StepPlan).decode(data)
    assert [type(each) for each in found.attachments] == [globals()["Marks"]]
    assert found.attachments[0].numbers.tolist() == [0, 1, 2]  # type: ignore[attr-defined]


@pytest.mark.parametrize("form", [bytes, bytearray])
def test_a_decoded_steps_arrays_can_be_written(form: Any) -> None:
    """Else torch warns of them, once in each worker that gets a step too large for its ring."""
    found = StepCodec(StepPlan).decode(form(StepCodec(StepPlan).encode(plan_of_two())))
    assert found.rows.flags.writeable
    assert found.num_computed_tokens.flags.writeable


def test_a_process_that_does_not_know_a_kind_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = msgspec.structs.replace(plan_of_two(), attachments=(Marks(numbers=np.arange(3)),))
    data = StepCodec(StepPlan).encode(plan)
    for name in ("Marks", "Selected"):
        monkeypatch.delitem(KINDS, name)
    with pytest.raises(
        CodecError, match=r"a kind that this process does not know \(it knows Drafts, StateSnapshots, TokenMasks\)"
    ):
        StepCodec(StepPlan).decode(data)


def test_a_repeated_decode_does_not_go_on_with_a_kind_that_it_would_ignore() -> None:
    plan = plan_of_two()
    assert ContinuedDecode(cast(Any, None), plan, 16).goes_on(plan)
    marked = msgspec.structs.replace(plan, attachments=(Marks(numbers=np.arange(2)),))
    assert not ContinuedDecode(cast(Any, None), plan, 16).goes_on(marked)
    assert not ContinuedDecode(cast(Any, None), marked, 16).goes_on(marked)


def plan_of_two() -> StepPlan:
    """A decode of two rows."""
    none = np.zeros(0, np.int32)
    return StepPlan(
        step=3,
        released_rows=none,
        new_rows=(),
        block_tables=none,
        block_ids=none,
        rows=np.array([0, 1], np.int32),
        num_tokens=np.ones(2, np.int32),
        num_computed_tokens=np.array([4, 5], np.int32),
        sampled=np.ones(2, bool),
        total_tokens=2,
    )


def test_a_request_is_not_postponed_while_no_row_runs() -> None:
    class Postponing(StepFeature):
        """Waits for others, of which there are none."""

        def postpones(self, *_: Any) -> bool:
            return True

    plain = answers(SteppedCore(async_scheduling=False))
    core = SteppedCore(async_scheduling=False)
    core.loop.scheduler.add_feature(contain(Postponing(), "lab"))
    assert answers(core) == plain
