"""Features of other packages: a hook that raises does nothing, and the requests that it was called for fail.

Their answers may depend on what the hook would have done, so none goes on without it; later requests have the feature
as before. Answers do not depend on drafts, so a drafter that raises drafts nothing. The log has each hook's first
traceback.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from headrace.core.schedule.drafters.drafter import Drafter
from headrace.core.schedule.features.feature import Followed, Repeated, StepFeature
from headrace.core.schedule.requests import Request
from headrace.ipc.failure import let_interrupts_pass
from headrace.ipc.step import Attachment, StepPlan

logger = logging.getLogger(__name__)
CONCERNED: dict[str, Callable[..., Iterable[int | Request]]] = {
    "needed_by": lambda request: (request,),
    "bars": lambda request: (request,),
    "postpones": lambda request, hit: (request,),
    "enter": lambda row: (row,),
    "waits": lambda rows: rows,
    "propose": lambda builder: builder.decodes,
    "cut": lambda rows, drafts: rows,
    "seal": lambda plan: plan.rows,
    "quiet_steps": lambda plan: plan.rows,
    "repeated": lambda plan: plan.rows,
    "follow": lambda row_of, token_ids, ends: row_of,
    "take": lambda result: result.rows,
    "leave": lambda row: (),  # it ends or waits again, whatever the feature does
}
"""The hooks of a step, and the rows or requests that a call of each concerns."""
_OF_DRAFTERS = ("wants", "look_up", "propose", "judged")
"""What is called of a feature's drafter."""


def contain(feature: StepFeature, name: str) -> StepFeature:
    """The feature, which is called `name`, with hooks that do not raise."""
    told: set[str] = set()

    def fail(hook: str, error: BaseException, concerned: Iterable[int | Request]) -> None:
        let_interrupts_pass(error)
        why = f"the step feature {name} failed in {hook}: {error!r}"
        if hook not in told:
            told.add(hook)
            logger.exception("%s", why)
        for each in concerned:
            request = each if isinstance(each, Request) else feature.context.rows.requests[int(each)]
            if request is not None:
                feature.context.fail(request, why)

    def guard(owner: object, base: type, hook: str, concerned: Callable[..., Iterable[int | Request]]) -> None:
        own, does_nothing = getattr(owner, hook), getattr(base, hook)

        def guarded(*given: Any) -> Any:
            try:
                found = own(*given)
            except BaseException as error:
                fail(hook, error, concerned(*given))
                return does_nothing(owner, *given)
            return _ContainedRepeated(found, given[0], fail) if isinstance(found, Repeated) else found

        if getattr(type(owner), hook) is not does_nothing:  # hooks that a feature does not have are not called
            setattr(owner, hook, guarded)

    for hook, concerned in CONCERNED.items():
        guard(feature, StepFeature, hook, concerned)
    for hook in _OF_DRAFTERS if feature.drafter is not None else ():
        guard(feature.drafter, Drafter, hook, lambda *_: ())
    return feature


class _ContainedRepeated(Repeated):
    def __init__(self, own: Repeated, plan: StepPlan, fail: Callable[..., None]) -> None:
        self._own, self._plan, self._fail = own, plan, fail

    def attachment(self, num_in_flight: int) -> Attachment | None:
        try:
            return self._own.attachment(num_in_flight)
        except BaseException as error:
            self._fail("repeated", error, self._plan.rows)
            return None

    def take(self, token_ids: np.ndarray) -> Followed | None:
        try:
            return self._own.take(token_ids)
        except BaseException as error:
            self._fail("repeated", error, self._plan.rows)
            return None
