"""Step features of other packages: entry points of the group `headrace.step_features`.

[project.entry-points."headrace.step_features"]     # in the other package's pyproject.toml
echo = "echo.feature:Echo"                          # a class derived from StepFeature; every engine makes one
"""

from __future__ import annotations

from headrace.core.options.plan import Plan
from headrace.core.schedule.features.contained import contain
from headrace.core.schedule.features.drafts import Drafting
from headrace.core.schedule.features.feature import StepFeature
from headrace.core.schedule.features.grammar_masks import GrammarMasks
from headrace.core.schedule.features.state_snapshots import KeepingStates, keeps_states
from headrace.ipc.failure import OptionError, let_interrupts_pass
from headrace.ipc.plugins import load_plugin, step_feature_entries


def installed_features() -> list[StepFeature]:
    """One of each installed class, in the order of the names of their entry points. Raises OptionError, naming entry
    and package."""
    return [_made(load_plugin(entry), entry.name, entry.value) for entry in step_feature_entries()]


def attached_kinds(plan: Plan | None = None) -> tuple[str, ...]:
    """The names of the kinds of attachments that an engine's steps may carry, with this plan."""
    features: list[type[StepFeature]] = [Drafting, GrammarMasks, *map(type, installed_features())]
    if plan is not None and keeps_states(plan):
        features.append(KeepingStates)
    return tuple(sorted({kind.__name__ for feature in features for kind in feature.attaches}))


def _made(found: object, name: str, value: str) -> StepFeature:
    if not (isinstance(found, type) and issubclass(found, StepFeature)):
        raise OptionError(
            f"the step feature {name}, {value}, is {found!r}; it must be a class derived from "
            "headrace.core.schedule.features.feature.StepFeature"
        )
    try:
        return contain(found(), name)
    except BaseException as error:
        let_interrupts_pass(error)
        raise OptionError(f"the step feature {name}, {value}, cannot be made without arguments: {error!r}") from error
