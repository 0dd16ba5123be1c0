"""Which step features an engine has: ours as its plan asks for them, then those of other packages.

[project.entry-points."headrace.step_features"]     # in the other package's pyproject.toml
echo = "echo.feature:Echo"                          # a class derived from StepFeature; every engine makes one
"""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

from headrace.core.options.plan import Plan
from headrace.core.schedule.drafters.drafter import Drafter
from headrace.core.schedule.features.adapter_limit import AdapterLimit
from headrace.core.schedule.features.contained import contain
from headrace.core.schedule.features.drafts import Drafting
from headrace.core.schedule.features.feature import StepFeature
from headrace.core.schedule.features.grammar_masks import GrammarMasks
from headrace.core.schedule.features.state_snapshots import KeepingStates, keeps_states
from headrace.ipc.failure import OptionError
from headrace.ipc.plugins import made, step_feature_entries
from headrace.ipc.step import KINDS, attachment


def features_of(plan: Plan) -> list[StepFeature]:
    """The features of an engine with this plan, besides drafts and grammar masks, which its loop makes. Raises
    OptionError, naming entry and package."""
    features = list[StepFeature]()
    if keeps_states(plan):
        features.append(KeepingStates())
    if plan.adapters is not None:
        features.append(AdapterLimit(plan.adapters.max_loras))
    return features + [_installed(each) for each in step_feature_entries()]


def _installed(entry: EntryPoint) -> StepFeature:
    feature = made(entry, "step feature", StepFeature)
    what = f"the step feature {entry.name}, {entry.value}, has"
    kinds: Any = feature.attaches
    if not (isinstance(kinds, tuple) and all(each in KINDS.values() for each in kinds)):
        raise OptionError(
            f"{what} attaches={kinds!r:.100}; it must be a tuple of classes that {attachment.__module__}.attachment "
            "has registered"
        )
    if not (feature.drafter is None or isinstance(feature.drafter, Drafter)):
        raise OptionError(f"{what} drafter={feature.drafter!r:.100}; it must be None or a {Drafter.__module__}.Drafter")
    return contain(feature, entry.name)


def attached_kinds(plan: Plan) -> tuple[str, ...]:
    """The names of the kinds of attachments that an engine's steps may carry, with this plan."""
    features: list[type[StepFeature]] = [Drafting, GrammarMasks, *map(type, features_of(plan))]
    return tuple(sorted({kind.__name__ for feature in features for kind in feature.attaches}))
