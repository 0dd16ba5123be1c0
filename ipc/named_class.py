"""Classes that options name: how users put their own in place of ours."""

from __future__ import annotations

import importlib
from typing import Any

from headrace.ipc.failure import OptionError


def load_class(option: str, name: str, base: type | None = None) -> Any:
    """The class that `option` names as module:Class, or as module.Class.

    Raises OptionError, in one sentence, when there is none or when it is not derived from `base`.
    """
    module, colon, attribute = name.partition(":")
    if not colon:
        module, _, attribute = name.rpartition(".")
    if not module or not attribute:
        raise OptionError(f"{option} is {name!r}; it must name a class, as module:Class or module.Class")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever the module does when it is imported
        raise OptionError(f"{option}={name} cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(found, type):
        raise OptionError(f"{option}={name} is a {type(found).__name__}; it must be a class")
    if base is not None and not issubclass(found, base):
        raise OptionError(f"{option}={name} must be derived from {base.__module__}.{base.__qualname__}")
    return found
