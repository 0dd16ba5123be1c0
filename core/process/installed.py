"""Whether what runs models is installed, or the client library alone."""

from __future__ import annotations

import importlib.util

from headrace.ipc.failure import EngineStartError

CLIENT_ALONE = (
    "this is Headrace's client alone, without {missing}; to run models here: pip install '.[engine]' in its clone"
)


def check_engine_is_installed(*needed: str) -> None:
    """Raises EngineStartError unless these packages can be imported; by default those of every engine core."""
    missing = [name for name in needed or ("numpy",) if importlib.util.find_spec(name) is None]
    if missing:
        raise EngineStartError(CLIENT_ALONE.format(missing=" and ".join(missing)))
