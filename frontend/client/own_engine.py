"""For an engine that a frontend starts itself: its options, and running it on a thread of this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.ipc.failure import OptionError
from headrace.ipc.plugins import is_loading_script

if TYPE_CHECKING:
    from headrace.core.engine.engine import EngineThread
    from headrace.core.options.engine_options import Options

STOP_DEADLINE_S = 5.0
CAUSE_GRACE_S = 1.0
"""How long after a lost connection to wait for the supervisor to report how the core ended."""


def run_in_process(model: str | None, options: dict[str, Any]) -> EngineThread:
    """Starts the engine on a thread of this process. Raises the start's errors."""
    from headrace.core.process.installed import check_engine_is_installed

    check_engine_is_installed()
    from headrace.core.engine.engine import EngineThread

    parsed = parse_own(model, options)
    if parsed.data_parallel_size > 1:
        raise OptionError(f"data_parallel_size={parsed.data_parallel_size} needs processes: leave in_process out")
    return EngineThread(parsed)


def parse_own(model: str | None, options: dict[str, Any]) -> Options:
    """Parses a user's options. Raises OptionError, also for those that an engine found by a coordinator already has."""
    from headrace.core.options.parsing import check_model_named, parse_options

    if is_loading_script():
        raise OptionError(
            "this script is loaded for the classes that an engine asked for: put its calls under "
            'if __name__ == "__main__"'
        )
    check_model_named(model)
    given = options if model is None else {"model": model, **options}
    parsed = parse_options(**given)
    if parsed.coordinator and (needless := [name for name in given if name not in ("coordinator", "peer_timeout")]):
        raise OptionError(f"coordinator finds engines, which have their options: leave out {', '.join(needless)}")
    return parsed
