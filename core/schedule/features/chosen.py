"""Which step features an engine has: ours as its plan asks for them, then those of other packages.

[project.entry-points."headrace.step_features"]     # in the other package's pyproject.toml
echo = "echo.feature:Echo"                          # a class derived from StepFeature; every engine makes one
"""

from __future__ import annotations

from headrace.core.options.plan import Plan
from headrace.core.schedule.features.adapter_limit import AdapterLimit
from headrace.core.schedule.features.contained import contain
from headrace.core.schedule.features.drafts import Drafting
from headrace.core.schedule.features.feature import StepFeature
from headrace.core.schedule.features.grammar_masks import GrammarMasks
from headrace.core.schedule.features.state_snapshots import KeepingStates, keeps_states
from headrace.ipc.plugins import made, step_feature_entries


def features_of(plan: Plan) -> list[StepFeature]:
    """The features of an engine with this plan, besides drafts and grammar masks, which its loop makes. Raises
    OptionError, naming entry and package."""
    features = list[StepFeature]()
    if keeps_states(plan):
        features.append(KeepingStates())
    if plan.adapters is not None:
        features.append(AdapterLimit(plan.adapters.max_loras))
    return features + [contain(made(each, "step feature", StepFeature), each.name) for each in step_feature_entries()]


def attached_kinds(plan: Plan) -> tuple[str, ...]:
    """The names of the kinds of attachments that an engine's steps may carry, with this plan."""
    features: list[type[StepFeature]] = [Drafting, GrammarMasks, *map(type, features_of(plan))]
    return tuple(sorted({kind.__name__ for feature in features for kind in feature.attaches}))
