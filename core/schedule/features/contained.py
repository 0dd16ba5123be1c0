"""Features of other packages: a hook that raises does nothing, and the requests that it was called for fail. So does
one whose answer is not what the hook has to return: the stages that read it trust it.

Their answers may depend on what the hook would have done, so none goes on without it; later requests have the feature
as before. Answers do not depend on drafts, so a drafter that raises drafts nothing. The log has each hook's first
traceback.
"""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from headrace.core.schedule.drafters.drafter import Drafter
from headrace.core.schedule.features.feature import NOTHING_NOW, Context, Followed, Repeated, StepFeature
from headrace.core.schedule.requests import Request
from headrace.ipc.failure import OptionError, let_interrupts_pass
from headrace.ipc.step import Attachment, StepPlan, problem_of_attachment

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


def _is_truth(found: Any, *_: Any) -> bool:
    return found is None or isinstance(found, int | np.bool_)


def _is_mask(found: Any, size: int) -> bool:
    return isinstance(found, np.ndarray) and found.dtype == bool and found.shape == (size,)


def _is_draft(found: Any, most: int) -> bool:
    return isinstance(found, np.ndarray) and found.dtype.kind in "iu" and found.ndim == 1 and len(found) <= most


def _is_followed(found: Any, token_ids: np.ndarray) -> bool:
    if found is None:
        return True
    return (
        isinstance(found, Followed)
        and _is_mask(found.completes, len(token_ids))
        and isinstance(found.problems, dict)
        and all(isinstance(at, int | np.integer) and 0 <= at < len(token_ids) for at in found.problems)
        and all(isinstance(why, str) for why in found.problems.values())
    )


def _is_sealed(kinds: Sequence[type[Attachment]], found: Any, plan: StepPlan) -> bool:
    """Whether this is a plan. Raises TypeError for one that is not this plan, with at most one more attachment of each
    of these kinds."""
    if found is plan or not isinstance(found, StepPlan):
        return found is plan
    for name in StepPlan.__struct_fields__:
        if name != "attachments" and getattr(found, name) is not getattr(plan, name):
            raise TypeError(f"it changed the plan's {name}; it may add attachments alone")
    before, after = plan.attachments, found.attachments
    if not isinstance(after, tuple) or len(after) < len(before) or any(map(operator.is_not, before, after)):
        raise TypeError("it changed the plan's attachments; it may add to the tuple alone")
    for each in after[len(before) :]:
        if not _is_attachment(kinds, each):
            raise TypeError(f"it attached {each!r:.100}, whose kind is none of those in `attaches`")
    if len({*map(type, after)}) < len(after):
        raise TypeError("it attached two of a kind")
    return True


def _is_attachment(kinds: Sequence[type[Attachment]], found: Any) -> bool:
    """Whether it is of one of these kinds. Raises TypeError for one that no other process could read."""
    if type(found) not in kinds:
        return False
    if problem := problem_of_attachment(found):
        raise TypeError(problem)
    return True


def _is_repeated(kinds: Sequence[type[Attachment]], found: Any) -> bool:
    return found is None or found is NOTHING_NOW or _is_attachment(kinds, found)


def _are_cut(found: Any, rows: Sequence[int], drafts: Sequence[np.ndarray]) -> bool:
    return (
        isinstance(found, Sequence)
        and len(found) == len(drafts)
        and all(_is_draft(each, len(draft)) for each, draft in zip(found, drafts, strict=True))
    )


Answer = tuple[str, Callable[..., bool]]
"""What an answer has to be, in words, and whether one, with the arguments of its call, is that."""
_FOLLOWED = "None, or a Followed with a mask of the tokens and the reasons by their indexes"
_ANSWERS: dict[str, Answer] = {
    "needed_by": ("True or False", _is_truth),
    "bars": ("True or False", _is_truth),
    "postpones": ("True or False", _is_truth),
    "waits": ("None, or a mask of the rows", lambda found, rows: found is None or _is_mask(found, len(rows))),
    "cut": ("a prefix of each draft", _are_cut),
    "quiet_steps": (
        "None, or a whole number of at least 0",
        lambda found, plan: found is None or (isinstance(found, int | np.integer) and int(found) >= 0),
    ),
    "repeated": ("None or a Repeated", lambda found, plan: found is None or isinstance(found, Repeated)),
    "follow": (_FOLLOWED, lambda found, row_of, token_ids, ends: _is_followed(found, token_ids)),
}
"""Of the hooks whose answers are read; that of `seal` depends on the kinds that the feature attaches."""
_OF_DRAFTERS: dict[str, Answer | None] = {
    "wants": ("a mask of the rows", lambda found, rows: _is_mask(found, len(rows))),
    "look_up": None,
    "propose": ("an array of at most so many tokens", lambda found, row, limit, *_: _is_draft(found, limit)),
    "judged": None,
}
"""What is called of a feature's drafter, and the answers."""


def _checked(found: Any, given: Sequence[Any], answer: Answer | None) -> Any:
    """The answer of a call. Raises TypeError if it is no such answer."""
    if answer is not None and not answer[1](found, *given):
        raise TypeError(f"it returned {found!r:.100}; expected: {answer[0]}")
    return found


def contain(feature: StepFeature, name: str) -> StepFeature:
    """The feature, which is called `name`, with hooks that do not raise and whose answers have the declared form."""
    told, kinds, bind = set[str](), feature.attaches, feature.bind
    names = ", ".join(each.__name__ for each in kinds) or "none"
    answers: dict[str, Answer] = {
        **_ANSWERS,
        "seal": ("the plan", functools.partial(_is_sealed, kinds)),
    }
    again: Answer = (
        f"None, NOTHING_NOW, or an attachment of a kind that it attaches ({names})",
        functools.partial(_is_repeated, kinds),
    )
    contexts = list[Context]()  # that of `bind`, which the feature need not keep

    def bound(context: Context) -> None:
        contexts.append(context)
        try:
            bind(context)
        except BaseException as error:
            let_interrupts_pass(error)
            raise OptionError(f"the step feature {name} failed in bind: {error!r}") from error

    def fail(hook: str, error: BaseException, concerned: Iterable[int | Request]) -> None:
        let_interrupts_pass(error)
        why = f"the step feature {name} failed in {hook}: {error!r}"
        if hook not in told:
            told.add(hook)
            logger.exception("%s", why)
        for each in concerned:
            request = each if isinstance(each, Request) else contexts[0].rows.requests[int(each)]
            if request is not None:
                contexts[0].fail(request, why)

    def guard(
        owner: object, base: type, hook: str, concerned: Callable[..., Iterable[int | Request]], answer: Answer | None
    ) -> None:
        own, does_nothing = getattr(owner, hook), getattr(base, hook)

        def guarded(*given: Any) -> Any:
            try:
                found = _checked(own(*given), given, answer)
            except BaseException as error:
                fail(hook, error, concerned(*given))
                return does_nothing(owner, *given)
            return _ContainedRepeated(found, given[0], fail, again) if isinstance(found, Repeated) else found

        if getattr(type(owner), hook) is not does_nothing:  # hooks that a feature does not have are not called
            setattr(owner, hook, guarded)

    feature.bind = bound  # type: ignore[method-assign]
    for hook, concerned in CONCERNED.items():
        guard(feature, StepFeature, hook, concerned, answers.get(hook))
    for hook, answer in _OF_DRAFTERS.items() if feature.drafter is not None else ():
        guard(feature.drafter, Drafter, hook, lambda *_: (), answer)
    return feature


class _ContainedRepeated(Repeated):
    def __init__(self, own: Repeated, plan: StepPlan, fail: Callable[..., None], answer: Answer) -> None:
        """answer: of `attachment`."""
        self._own, self._plan, self._fail, self._answer = own, plan, fail, answer

    def attachment(self, num_in_flight: int) -> Attachment | None:
        try:
            found: Attachment | None = _checked(self._own.attachment(num_in_flight), (), self._answer)
            return found
        except BaseException as error:
            self._fail("repeated", error, self._plan.rows)
            return None

    def take(self, token_ids: np.ndarray) -> Followed | None:
        try:
            found = self._own.take(token_ids)
            _checked(found, (token_ids,), (_FOLLOWED, _is_followed))
            return found
        except BaseException as error:
            self._fail("repeated", error, self._plan.rows)
            return None
