"""Models from other packages, registered by a call or by an entry point `headrace.plugins`. Imports no torch.

    from headrace import ModelRegistry
    ModelRegistry.register_model("TinyForCausalLM", "tiny_models:FAMILY")        # a Family: Headrace's decoder runs it
    ModelRegistry.register_model("OtherForCausalLM", "tiny_models:OtherModel")   # a class: transformers' code runs it

A call's registration reaches the engines that this process starts through an environment variable of theirs.
"""

from __future__ import annotations

import importlib
import json
import os
from typing import Any

from headrace.ipc.failure import OptionError, let_interrupts_pass
from headrace.ipc.plugins import import_users_module, load_plugins
from headrace.ipc.process.program import FOR_PROGRAMS

VARIABLE = "HEADRACE_REGISTERED_MODELS"
"""Environment variable: a JSON object from architecture to module:name of its Family or class."""


class ModelRegistry:
    """Named as in vLLM."""

    @staticmethod
    def register_model(model_arch: str, model_cls: str | type[Any] | Any) -> None:
        """Registers `model_cls` for models whose config's `architectures` names `model_arch`: a Family, a class derived
        from transformers' PreTrainedModel, or module:name of one. It takes precedence over Headrace's own family.

        Raises OptionError if another process could not import it.
        """
        if not isinstance(model_arch, str) or not model_arch:
            raise OptionError(f"model_arch must be an architecture's name, got {model_arch!r}")
        registered = _registered()
        registered[model_arch] = model_cls if isinstance(model_cls, str) else _path_of(model_arch, model_cls)
        module, colon, name = registered[model_arch].partition(":")
        if not (module and colon and name):
            raise OptionError(f"{model_arch} is registered as {model_cls!r}; module:name is expected")
        FOR_PROGRAMS[VARIABLE] = json.dumps(registered)

    @staticmethod
    def get_supported_archs() -> frozenset[str]:
        """The architectures of Headrace's families, of registrations and of plugins."""
        from headrace.executor.models.families import Family, families

        plugins = [name for family in load_plugins(Family)[0] for name in family.architectures]
        return frozenset([*families(), *_registered(), *plugins])


def registered_model(architecture: str) -> Any:
    """The Family or class that a call registered for the architecture; None if there is none. Raises OptionError if it
    cannot be imported, or is neither."""
    from headrace.executor.models.families import Family

    path = _registered().get(architecture)
    if path is None:
        return None
    module, _, name = path.partition(":")
    try:
        found = getattr(import_users_module(module), name)
    except BaseException as error:  # whatever the module does when it is imported
        let_interrupts_pass(error)
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
    """The class with this name that a plugin provides; None if there is none."""
    return next((found for found in load_plugins(type)[0] if found.__name__ == architecture), None)


def _registered() -> dict[str, str]:
    found: dict[str, str] = json.loads(FOR_PROGRAMS.get(VARIABLE) or os.environ.get(VARIABLE) or "{}")
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
