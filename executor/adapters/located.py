"""Where an adapter's files are on this machine: at its path, or fetched from the hub if that is a repository's name."""

from __future__ import annotations

import os
import re
from dataclasses import replace

from headrace.core.options.engine_options import Options
from headrace.executor.checkpoints.hub import HubChoice, locate
from headrace.ipc.failure import MissingAdapterError, ModelError

REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def located(path: str, options: Options) -> str:
    """Raises MissingAdapterError for a repository that is not there, or cannot be fetched."""
    path = os.path.expanduser(path)
    if os.path.lexists(path) or not REPOSITORY.fullmatch(path):
        return path
    try:
        return os.fspath(locate(path, replace(HubChoice.of(options).beside(), load_format="auto")))
    except ModelError as error:
        what = f"the adapter {path} does not exist here, nor as a repository: {error.__cause__ or error}"
        raise MissingAdapterError(what, hint=error.hint) from error
