"""Adapters from a checkpoint's config to an `ArchSpec`. A new family is one new module with a constant `FAMILY`."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from headrace.executor.models.arch import ArchSpec
from headrace.ipc.failure import ModelError

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    architectures: tuple[str, ...]
    """As in the config's `architectures`."""
    build: Callable[[Config], ArchSpec]
    """Takes the config with `architectures` set. What it returns may hold blocks of the family's own. Raises
    ModelError naming the field that is missing or wrong."""


@functools.cache
def families() -> Mapping[str, Family]:
    """Every family by architecture name."""
    found: dict[str, Family] = {}
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
        if not module.name.startswith("_"):
            family: Family = importlib.import_module(f"{__name__}.{module.name}").FAMILY
            found.update(dict.fromkeys(family.architectures, family))
    return MappingProxyType(found)


def spec_from_config(config: Config) -> ArchSpec:
    """The model that a Hugging Face `config.json` describes.

    Raises ModelError when the architecture is unknown (listing the known ones), a field is missing or of the wrong
    kind, the numbers do not fit together, or the weights are stored in a quantised form.
    """
    named = config.get("architectures")
    if not isinstance(named, list | tuple) or not named or not isinstance(named[0], str):
        raise ModelError(f'the config has no "architectures"; one of {", ".join(families())} is expected')
    family = families().get(named[0])
    if family is None:
        raise ModelError(f"the architecture {named[0]} is not supported; known are {', '.join(families())}")
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else quantization
        raise ModelError(
            f"this checkpoint's weights are quantised ({method}), which is not supported; "
            "use the unquantised checkpoint or a GGUF file of it"
        )
    return family.build(config)
