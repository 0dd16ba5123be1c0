"""Models of other packages: registered by a call, or by an entry point of `headrace.plugins`. Imports no torch.

    from headrace import ModelRegistry
    ModelRegistry.register_model("TinyForCausalLM", "tiny_models:FAMILY")        # a Family: blocks of this package
    ModelRegistry.register_model("OtherForCausalLM", "tiny_models:OtherModel")   # a class for transformers

What is registered by a call is known to the engines that this process starts: their processes inherit its environment.
"""

from __future__ import annotations

import importlib
import json
import os
from typing import Any

from headrace.ipc.failure import OptionError
from headrace.ipc.plugins import load_plugins

VARIABLE = "HEADRACE_REGISTERED_MODELS"
"""JSON: by architecture, module:name of what computes it."""


class ModelRegistry:
    """vLLM's spelling."""

    @staticmethod
    def register_model(model_arch: str, model_cls: str | type[Any] | Any) -> None:
        """From now on models of this architecture (as in a config's `architectures`) are computed by `model_cls`, a
        Family or a class derived from transformers' PreTrainedModel, or module:name of one. It comes before what this
        package has for the architecture.

        Raises OptionError for what a process of its own could not import.
        """
        if not isinstance(model_arch, str) or not model_arch:
            raise OptionError(f"model_arch must be an architecture's name, got {model_arch!r}")
        registered = _registered()
        registered[model_arch] = model_cls if isinstance(model_cls, str) else _path_of(model_arch, model_cls)
        module, colon, name = registered[model_arch].partition(":")
        if not (module and colon and name):
            raise OptionError(f"{model_arch} is registered as {model_cls!r}; module:name is expected")
        os.environ[VARIABLE] = json.dumps(registered)

    @staticmethod
    def get_supported_archs() -> frozenset[str]:
        """Those that this package has, and what is registered."""
        from headrace.executor.models.families import Family, families

        plugins = [name for family in load_plugins(Family)[0] for name in family.architectures]
        return frozenset([*families(), *_registered(), *plugins])


def registered_model(architecture: str) -> Any:
    """The Family or class that is registered for it by a call; None without. Raises OptionError when it cannot be
    loaded, or is neither."""
    from headrace.executor.models.families import Family

    path = _registered().get(architecture)
    if path is None:
        return None
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the module does when it is imported
        raise OptionError(
            f"{architecture} is registered as {path}, which cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(found, Family | type):
        raise OptionError(
            f"{architecture} is registered as {path}, a {type(found).__name__}; a Family or a class derived from "
            "transformers' PreTrainedModel is expected"
        )
    return found


def class_of_plugin(architecture: str) -> type | None:
    """A class of this name that a plugin brings."""
    return next((found for found in load_plugins(type)[0] if found.__name__ == architecture), None)


def _registered() -> dict[str, str]:
    found: dict[str, str] = json.loads(os.environ.get(VARIABLE) or "{}")
    return found


def _path_of(architecture: str, model: Any) -> str:
    """module:name of a class, or of a Family that is a constant of the module that built it."""
    source = model if isinstance(model, type) else getattr(model, "build", None)
    module = getattr(source, "__module__", None)
    if module in (None, "__main__"):
        raise OptionError(
            f"{architecture} is registered as an object that an engine's process cannot import; put it into a module "
            "and register module:name"
        )
    if isinstance(model, type):
        return f"{module}:{model.__qualname__}"
    name = next((key for key, value in vars(importlib.import_module(module)).items() if value is model), None)
    if name is None:
        raise OptionError(f"{architecture} is registered as an object that has no name in {module}")
    return f"{module}:{name}"
