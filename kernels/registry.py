"""An op is a reference, fast versions of it, and for each version a record that answers why not in a sentence.

A fast version lives in a sub-package (`kernels/cpu/`, `kernels/triton/`) in a module with a constant `VERSIONS`,
a tuple of `Version`. Adding one is adding that file: `ops()` finds it. A sub-package whose modules are costly to
import lists its versions in a module `versions`, and nothing else of it is imported. References are found in the
same way: the modules of `reference/` each have a table `REFERENCES`.
"""

from __future__ import annotations

import functools
import importlib
import logging
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

logger = logging.getLogger(__name__)
VERSION_PACKAGES: Mapping[str, str] = MappingProxyType({"cpu": "cpu", "triton": "cuda"})
"""The device type that a sub-package's versions are made for: elsewhere it is no news that they do not serve."""


@dataclass(frozen=True)
class Version:
    """One fast implementation of an op, with the reference's signature."""

    op: str
    name: str
    """Such as `cpu_avx512`; unique within the op."""
    function: Callable[..., Any]
    why_not: Callable[..., str]
    """Given the facts of `Op.choose` as keywords, the sentence that says why this version cannot serve; "" if it can.

    Facts that it does not know are to be ignored (`**_`); a fact it needs and does not get is a reason."""
    device_type: str = ""
    """What it is made for; "" is any. Set by `ops()`."""
    refusal: str = ""
    """What a warning says where it cannot serve, before the reason; "" where that is worth a line of the log only."""


@dataclass(frozen=True)
class Choice:
    """What serves, and why the versions that come before it do not."""

    name: str
    function: Callable[..., Any]
    refused: tuple[tuple[str, str], ...]
    """(version, its reason), in order of preference"""


@dataclass(frozen=True)
class Op:
    name: str
    reference: Callable[..., Any]
    versions: tuple[Version, ...] = ()
    """Best first."""

    def choose(self, **facts: Any) -> Choice:
        """The first version without a reason against it, else the reference.

        Facts are what is known when a layer is built: `device` (a torch.device), `dtype` (a torch.dtype) always, and
        what the op adds, such as `head_dim`. Versions made for this device that do not serve are logged, each reason
        once.
        """
        refused: list[tuple[str, str]] = []
        for version in self.versions:
            reason = version.why_not(**facts)
            if not reason:
                return Choice(version.name, version.function, tuple(refused))
            refused.append((version.name, reason))
            device = facts.get("device")
            if device is None or version.device_type in ("", device.type):
                _log_refusal(version, reason)
        return Choice("reference", self.reference, tuple(refused))


@functools.cache
def _log_refusal(version: Version, reason: str) -> None:
    """Once for each reason: a model asks for the same op in every layer."""
    if version.refusal:
        logger.warning("%s: %s", version.refusal, reason)
    else:
        logger.info("the %s version of %s is not used: %s", version.name, version.op, reason)


@functools.cache
def ops() -> Mapping[str, Op]:
    """Every op by name, with the versions that the sub-packages offer."""
    versions = _find_versions()
    table = _find_references()
    if unknown := sorted({version.op for version in versions} - table.keys()):
        raise ValueError(f"versions of ops that have no reference: {', '.join(unknown)}")
    found = {
        name: Op(name, function, tuple(version for version in versions if version.op == name))
        for name, function in table.items()
    }
    return MappingProxyType(found)


def choose(name: str, **facts: Any) -> Callable[..., Any]:
    """The function that serves op `name` under these facts (see `Op.choose`)."""
    return ops()[name].choose(**facts).function


def choose_reference(name: str, **_: Any) -> Callable[..., Any]:
    """The reference of op `name`, whatever else could serve: for comparisons, and where nothing may be compiled."""
    return ops()[name].reference


def _find_references() -> dict[str, Callable[..., Any]]:
    package = importlib.import_module("headrace.kernels.reference")
    found: dict[str, Callable[..., Any]] = {}
    for module in sorted(pkgutil.iter_modules(package.__path__), key=lambda module: module.name):
        found |= importlib.import_module(f"{package.__name__}.{module.name}").REFERENCES
    return found


def _find_versions() -> list[Version]:
    versions: list[Version] = []
    parent = importlib.import_module("headrace.kernels")
    present = {module.name for module in pkgutil.iter_modules(parent.__path__)}
    for package_name, device_type in VERSION_PACKAGES.items():
        if package_name not in present:
            continue
        package = importlib.import_module(f"headrace.kernels.{package_name}")
        names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
        for name in ["versions"] if "versions" in names else names:
            if not name.startswith("_"):
                imported = importlib.import_module(f"{package.__name__}.{name}")
                found: tuple[Version, ...] = getattr(imported, "VERSIONS", ())
                versions.extend(replace(version, device_type=device_type) for version in found)
    return versions
