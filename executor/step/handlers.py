"""What a rank does with a step's attachments: a handler for each kind, the rank's side of a step feature. No torch.

The hooks of a kind's handler are called in the steps that carry it, on every rank:

    begin     the rows are those of the plan, and the forward pass comes next; in every stage of a pipeline
    change    logits are there, and no token is chosen yet; in the last stage
    end       the result is assembled: what comes back to the core with it; in the last stage

Headrace's own kinds have one, too (`own_handlers.py`), as far as they need no code between the hooks. Another package
adds a handler as an entry point of the group `headrace.step_handlers`, which names a class derived from `Handler`;
every rank that has a model makes one. Where a hook of such a handler raises, or returns what it may not, the requests
of the step fail, and where `change` leaves NaN or infinities, those of the rows; the engine goes on. `begin` in a stage
that is not a pipeline's last has no result to say so with, and ends the engine.

[project.entry-points."headrace.step_handlers"]     # in the other package's pyproject.toml
echo = "echo.rank:EchoHandler"                      # beside its step feature, under headrace.step_features
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np

from headrace.executor.parallel.rank_place import RankCoordinates
from headrace.ipc.failure import InconsistentError, OptionError, let_interrupts_pass
from headrace.ipc.plugins import made, step_handler_entries
from headrace.ipc.step import KINDS, Attachment, RowFailure, StepPlan, StepResult, problem_of_attachment

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.executor.sampling.sampler import ChangeLogits
    from headrace.executor.step.batch import BatchState

logger = logging.getLogger(__name__)
A = TypeVar("A", bound=Attachment)


class RankParts(NamedTuple):
    """What a handler of another package may use of its rank."""

    batch: BatchState
    """The rows. Where steps are in flight on a device, they may be those of a later plan when a step ends."""
    cache: Any
    """The pages of keys, values and states (`executor/models/kv_cache.py:KVCache`)."""
    place: RankCoordinates


class Handler(Generic[A]):
    """Base class: does nothing with attachments of a kind. What it does to logits must be the same on all ranks, since
    each chooses the tokens for itself."""

    kind: ClassVar[type[Attachment]]
    parts: RankParts

    def bind(self, parts: RankParts) -> None:
        """Called once, before any other hook, on a handler of another package."""
        self.parts = parts

    def begin(self, attached: A, plan: StepPlan) -> None:
        """Called before the forward pass."""

    def change(self, attached: A, logits: Tensor, rows: np.ndarray, num_tokens: np.ndarray) -> None:
        """Changes logits, [num_positions, vocab_size] float32 on the rank's device, in place, before bias, penalties
        and truncation. rows: [num_positions], whose they are; a row with drafts occurs once for each position.
        num_tokens: [num_positions], how many of the row's tokens come before the one to choose."""

    def end(self, attached: A, plan: StepPlan, result: StepResult) -> Attachment | None:
        """What comes back with the step's result, of a kind registered with `most_returned_bytes`. None: nothing. That
        of one rank does, whose `place.replies` is true."""
        return None


class Handlers:
    """Those of one rank."""

    def __init__(self, own: Iterable[Handler[Any]]) -> None:
        self._by_kind: dict[type[Attachment], Handler[Any]] = {each.kind: each for each in own}
        self._names: dict[Handler[Any], str] = {}  # of other packages'
        self._changing = self._that_change()
        self._failed: dict[int, str] = {}  # step -> why its requests cannot go on
        self._told: set[str] = set()

    def install(self, handlers: Iterable[tuple[str, Handler[Any]]], parts: RankParts) -> None:
        """Adds those of other packages, with their names. Raises OptionError."""
        for name, each in handlers:
            try:
                each.bind(parts)
            except BaseException as error:
                let_interrupts_pass(error)
                raise OptionError(f"the step handler {name} cannot be bound to its rank: {error!r}") from error
            self._by_kind[each.kind], self._names[each] = each, name
        self._changing = self._that_change()

    def _that_change(self) -> frozenset[type[Attachment]]:
        return frozenset(kind for kind, each in self._by_kind.items() if type(each).change is not Handler.change)

    def begin(self, plan: StepPlan) -> None:
        """Called on every plan with attachments, once its rows are entered."""
        for each in plan.attachments:
            self._call("begin", each, plan, plan)

    def change_logits(self, plan: StepPlan, besides: Collection[type[Attachment]] = ()) -> bool:
        """Whether a handler changes the step's logits, apart from those of the kinds `besides`."""
        return not self._changing.difference(besides).isdisjoint(map(type, plan.attachments))

    def change_of(self, plan: StepPlan) -> ChangeLogits | None:
        """What changes the step's logits; None if nothing does."""
        return functools.partial(self._change, plan) if plan.attachments and self.change_logits(plan) else None

    def _change(self, plan: StepPlan, logits: Tensor, rows: np.ndarray, num_tokens: np.ndarray) -> dict[int, str]:
        from headrace.executor.sampling.logits_processors import is_usable  # which imports torch

        problems = dict[int, str]()
        for each in plan.attachments:
            if type(each) not in self._changing:
                continue
            name = self._names.get(self._by_kind[type(each)])
            usable = None if name is None else is_usable(logits, logits.amax(1))
            given = logits if name is None else logits.view(logits.shape)  # it may change its tensor's shape
            self._call("change", each, plan, given, rows, num_tokens)
            if usable is None:
                continue
            best = logits.amax(1)  # the sampler says of -inf what may have forbidden every token
            for index in (usable & ~is_usable(logits, best) & ~best.isneginf()).nonzero()[:, 0].tolist():
                what = "NaN" if best[index].isnan() else "infinities"
                problems.setdefault(index, f"the step handler {name} wrote {what} in change")
        return problems

    def end(self, plan: StepPlan, result: StepResult) -> StepResult:
        """The result with what comes back. Called on every result of a plan with attachments, in the last stage."""
        found = list(result.attachments)
        for each in plan.attachments:
            if (back := self._call("end", each, plan, plan, result)) is not None:
                if type(back) in map(type, found):
                    self._fail(plan, each, "end", TypeError(f"a {type(back).__name__} comes back already"))
                found.append(back)
        if why := self._failed.pop(plan.step, ""):
            return _failed(plan, result, why)
        return result if not found else msgspec.structs.replace(result, attachments=tuple(found))

    def _call(self, hook: str, attached: Attachment, plan: StepPlan, *given: Any) -> Attachment | None:
        handler = self._by_kind.get(type(attached))
        if handler is None:  # a rank of another class reads it
            return None
        name = self._names.get(handler)
        if name is None:
            found: Attachment | None = getattr(handler, hook)(attached, *given)
            return found
        if plan.step in self._failed:
            return None
        try:
            found = getattr(handler, hook)(attached, *given)
            if found is not None and (hook != "end" or (problem := problem_of_attachment(found))):
                raise TypeError(problem if hook == "end" else f"it returned {found!r:.100}; expected: None")
        except BaseException as error:
            let_interrupts_pass(error)
            if not handler.parts.place.is_last_stage:
                where = "in a stage of the pipeline that has no result to say so with"
                raise InconsistentError(f"the step handler {name} failed in {hook}, {where}: {error!r}") from error
            self._fail(plan, attached, hook, error)
            return None
        return found

    def _fail(self, plan: StepPlan, attached: Attachment, hook: str, error: BaseException) -> None:
        """The step's requests cannot go on, since a handler of another package failed."""
        name = self._names[self._by_kind[type(attached)]]
        self._failed[plan.step] = why = f"the step handler {name} failed in {hook}: {error!r}"
        if f"{name} {hook}" not in self._told:
            self._told.add(f"{name} {hook}")
            logger.error("%s", why, exc_info=error)


def _failed(plan: StepPlan, result: StepResult, why: str) -> StepResult:
    """The result of a step whose requests all fail."""
    return StepResult(
        step=plan.step,
        rows=result.rows[:0],
        token_ids=result.token_ids[:0],
        failures=tuple(RowFailure.of(row, why, "StepHandlerError") for row in plan.rows.tolist()),
        began_s=result.began_s,
        ended_s=result.ended_s,
    )


def installed_handlers() -> list[tuple[str, Handler[Any]]]:
    """One of each installed class, after its name, in the order of the names. Raises OptionError, naming entry and
    package."""
    found = list[tuple[str, Handler[Any]]]()
    handled = dict[type[Attachment], str]()
    for entry in step_handler_entries():
        handler: Handler[Any] = made(entry, "step handler", Handler)
        kind: Any = getattr(handler, "kind", None)
        if kind not in KINDS.values():
            raise OptionError(
                f"the step handler {entry.name}, {entry.value}, has kind={kind!r}; it must be a registered kind of "
                "attachments (headrace.ipc.step.attachment)"
            )
        whose = "Headrace" if kind.__module__ == Attachment.__module__ else handled.setdefault(kind, entry.name)
        if whose != entry.name:
            raise OptionError(f"the step handler {entry.name} is for {kind.__name__}, which {whose} handles already")
        found.append((entry.name, handler))
    return found
