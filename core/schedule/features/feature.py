"""The protocol of step features.

The scheduler decides which tokens of which rows a step computes. Everything else that a step does belongs to a feature:
draft tokens (`drafts.py`), grammar masks (`grammar_masks.py`), and those of other packages. The scheduler calls the
hooks of all its features, in the order in which they were added, and knows none of them by name:

    a request is queued
                needed_by  whether it needs the feature, whose other hooks are not called before one does
    schedule    bars       whether the next request cannot run beside the rows that run
                postpones  whether it had better be admitted later
                enter      a request has got a row
                waits      which decodes cannot be planned while a step is in flight
                propose    lengthen the decodes of the plan that is being built
                seal       attach data for the ranks to the finished plan
                quiet_steps, repeated
                           how long the same decode can be repeated, and what each of those steps carries
    advance     follow     which new tokens end their rows
                take       see a step's result once its tokens are in the table
    a row is freed
                leave      forget it

What a feature attaches is a kind of `ipc.step.Attachment` of its own, registered with its largest size. What the ranks
do with it is the kind's handler there (`executor/step/handlers.py:Handler`); a rank refuses plans with kinds that it
does not read (`executor/rank.py:ModelHost.reads`). What a handler gives back comes with the step's result
(`StepResult.get`), which `take` sees; a feature that waits for it has no `repeated`, as repeated steps call no `take`.

Another package adds a feature as an entry point of the group `headrace.step_features`, which names a class derived from
`StepFeature` (`chosen.py`), and its handler under `headrace.step_handlers`. Where a hook of such a feature raises, the
requests that it was called for fail, and the engine goes on (`contained.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from headrace.core.schedule.block_hashes import BlockHash
from headrace.core.schedule.block_tables import BlockTables
from headrace.core.schedule.groups.group import PrefixHit
from headrace.core.schedule.plan_builder import PlanBuilder
from headrace.core.schedule.requests import Request, RowTable
from headrace.ipc.step import Attachment, StepPlan, StepResult

if TYPE_CHECKING:
    from headrace.core.schedule.drafters.drafter import Drafter


class Context(NamedTuple):
    """The scheduler's state, which features read. They may change none of it, but take blocks of `tables.pool` when a
    plan is sealed, name them, and be one of its holders and observers."""

    rows: RowTable
    tables: BlockTables
    features: Sequence[StepFeature]
    """All features of the scheduler, this one included, as far as they have been added."""
    hashes: Callable[[int, int], list[BlockHash]]
    """A row, a number of blocks -> hashes of at least the row's first so many blocks, whose tokens must be known."""
    fail: Callable[[Request, str], object]
    """Ends a request that cannot go on, and says why, with the next result."""


class Followed(NamedTuple):
    """A feature's answer to new tokens."""

    completes: np.ndarray
    """[num_tokens] bool: tokens that complete their row's answer."""
    problems: dict[int, str]
    """Index of a token after which its row cannot continue -> reason."""


def together(answers: Iterable[Followed | None]) -> Followed | None:
    """The answers of several features to the same tokens as one. None if there is none."""
    found = [each for each in answers if each is not None]
    if len(found) <= 1:
        return found[0] if found else None
    problems = {index: why for each in reversed(found) for index, why in each.problems.items()}
    return Followed(np.logical_or.reduce([each.completes for each in found]), problems)


NOTHING_NOW = Attachment()
"""Of `Repeated.attachment`: the next plan carries nothing of this feature."""


class Repeated:
    """A feature's part in repeated decodes: plans of the same rows, each one token further."""

    def attachment(self, num_in_flight: int) -> Attachment | None:
        """What the next plan carries, or NOTHING_NOW. None: this plan cannot be a repeated one."""
        raise NotImplementedError

    def take(self, token_ids: np.ndarray) -> Followed | None:
        """Sees one new token of each row, [num_rows]. None if they end nothing."""
        return None


class StepFeature:
    """Base class: a feature that does nothing."""

    attaches: ClassVar[tuple[type[Attachment], ...]] = ()
    """The kinds of attachments that its plans may carry."""
    drafter: Drafter | None = None
    """Draft tokens that this feature can predict. They are tried before those of other drafters. Of this drafter only
    `wants`, `look_up`, `propose` and `judged` are called: the feature's own hooks see plans, results and rows."""

    def bind(self, context: Context) -> None:
        """Called once, before any other hook."""
        self.context = context

    def needed_by(self, request: Request) -> bool:
        """Whether the feature has anything to do for the request. Its other hooks are called from the first such
        request on, also for the rows that run then, whose `enter` it has not seen."""
        return True

    # --- planning -----------------------------------------------------------------------------------------------

    def waits(self, rows: np.ndarray) -> np.ndarray | None:
        """[num_rows] bool: rows that cannot be planned before the result of a step in flight. None: no row waits."""
        return None

    def bars(self, request: Request) -> bool:
        """Whether the next request cannot be admitted as long as none of the rows leaves; a request alone never is
        barred. Others pass it meanwhile, a bounded number of times."""
        return False

    def postpones(self, request: Request, hit: PrefixHit) -> bool:
        """Whether the next request, of which this much is in the cache, is better admitted in a later step, while
        others pass it. That must end by itself, as the rows that run now go on: not asked while there are none."""
        return False

    def enter(self, row: int) -> None:
        """A request was admitted to a row, which the table holds."""

    def propose(self, builder: PlanBuilder) -> None:
        """Lengthens decodes of the plan (`PlanBuilder.lengthen`)."""

    def cut(self, rows: Sequence[int], drafts: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """Of each row's draft, [num_drafts] int32, the longest prefix that this feature allows. Called once for all
        rows of a step, and again for those that get another draft since nothing was left of theirs."""
        return drafts

    def seal(self, plan: StepPlan) -> StepPlan:
        """The plan with this feature's attachment, if it has one. The table counts the plan's tokens already."""
        return plan

    def quiet_steps(self, plan: StepPlan) -> int | None:
        """How many plans, each with one more token of each of this plan's rows, may follow before this feature has
        something to do. None: any number. Called after `seal`, on plans that compute only decodes."""
        return None

    def repeated(self, plan: StepPlan) -> Repeated | None:
        """What this feature adds to plans that repeat this one. None: nothing."""
        return None

    # --- results ------------------------------------------------------------------------------------------------

    def follow(self, row_of: np.ndarray, token_ids: np.ndarray, ends: np.ndarray) -> Followed | None:
        """Sees new tokens before they are in the table. All arrays are [num_tokens]; tokens of a row are adjacent and
        in order, and those after one that `ends` its row do not count. None: no row has anything to do with it."""
        return None

    def take(self, result: StepResult) -> None:
        """Sees a result whose tokens are in the table, up to those that end their rows. Rows that ended are still
        active."""

    def leave(self, row: int) -> None:
        """A row's request finished, ended early or is preempted; the table still holds it."""
