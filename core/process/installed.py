"""Whether what runs models is installed, or the client library alone."""

from __future__ import annotations

import importlib.util

from headrace.ipc.extras import how_to_install
from headrace.ipc.failure import EngineStartError


def client_alone(missing: str) -> str:
    """What to say where these packages are not installed, which models need."""
    return f"this is Headrace's client alone, without {missing}; to run models here: {how_to_install('engine')}"


def check_engine_is_installed(*needed: str) -> None:
    """Raises EngineStartError unless these packages can be imported; by default those of every engine core."""
    missing = [name for name in needed or ("numpy",) if importlib.util.find_spec(name) is None]
    if missing:
        raise EngineStartError(client_alone(" and ".join(missing)))
