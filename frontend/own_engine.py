"""An engine-core child of one's own, started from the options a user gave."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.core.supervisor import Child

START_TIMEOUT_S = 3600.0
"""A large model may have to be downloaded first."""
STOP_DEADLINE_S = 5.0
CAUSE_GRACE_S = 1.0
"""How long the supervisor may take to say how the core ended, once its connection is lost."""


def start_own_engine(model: str | None, options: dict[str, Any]) -> Child:
    """Starts it; `wait_ready` says when and where it listens. Raises OptionError for options that cannot be."""
    from headrace.core.option_parsing import parse_options
    from headrace.core.supervisor import start_engine

    if model is not None:
        options = {"model": model, **options}
    return start_engine(parse_options(**options))
