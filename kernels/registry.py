"""The registry of ops: a reference, its fast versions, and for each version a check that gives the reason against it.

A fast version is an entry of the constant `VERSIONS`, a tuple of `Version`, in a module of a sub-package
(`kernels/cpu/`, `kernels/triton/`) or below it. Adding one means adding such a file: `ops()` finds it. A sub-package
whose modules are costly to import lists its versions in a module `versions`, and only that module is imported.
References are found in the same way: each module of `reference/` has a table `REFERENCES`.
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
"""Each sub-package and the device type of its versions. On other devices their refusals are not logged."""


@dataclass(frozen=True)
class Version:
    """One fast implementation of an op, with the reference's signature."""

    op: str
    name: str
    """For example `cpu_avx512`; unique within the op."""
    function: Callable[..., Any]
    why_not: Callable[..., str]
    """Takes the facts of `Op.choose` as keywords and returns the reason why this version does not apply, "" if it does.

    It ignores facts that it does not know (`**_`); the lack of a fact that it needs is a reason."""
    device_type: str = ""
    """The device type that it is made for, "" for any. Set by `ops()`."""
    refusal: str = ""
    """The beginning of the warning that is logged if it does not apply, before the reason; "" logs at info level."""


@dataclass(frozen=True)
class ChosenVersion:
    """The chosen version of an op, and why the versions preferred to it do not apply."""

    name: str
    function: Callable[..., Any]
    refused: tuple[tuple[str, str], ...]
    """(version, reason against it), in order of preference"""


@dataclass(frozen=True)
class Op:
    name: str
    reference: Callable[..., Any]
    versions: tuple[Version, ...] = ()
    """In order of preference, best first."""

    def choose(self, **facts: Any) -> ChosenVersion:
        """Chooses the first version without a reason against it, or else the reference.

        Facts describe the layer that is being built: always `device` (a torch.device) and `dtype` (a torch.dtype), and
        those that the op's reference lists, such as `head_dim`. Refusals of versions made for this device are logged,
        each reason once.
        """
        refused: list[tuple[str, str]] = []
        for version in self.versions:
            reason = version.why_not(**facts)
            if not reason:
                return ChosenVersion(version.name, version.function, tuple(refused))
            refused.append((version.name, reason))
            device = facts.get("device")
            if device is None or version.device_type in ("", device.type):
                _log_refusal(version, reason)
        return ChosenVersion("reference", self.reference, tuple(refused))


@functools.cache
def _log_refusal(version: Version, reason: str) -> None:
    """Cached to log each reason once: a model chooses the same op in every layer."""
    if version.refusal:
        logger.warning("%s: %s", version.refusal, reason)
    else:
        logger.info("the %s version of %s is not used: %s", version.name, version.op, reason)


@functools.cache
def ops() -> Mapping[str, Op]:
    """Every op by name, with the versions of all sub-packages. Raises ValueError for a version without a reference."""
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
    """The reference of op `name`, even if a version applies: for comparisons, and where nothing may be compiled."""
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
        listed = f"{package.__name__}.versions"
        names = sorted(module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."))
        for name in [listed] if listed in names else names:
            if not name.rpartition(".")[2].startswith("_"):
                imported = importlib.import_module(name)
                found: tuple[Version, ...] = getattr(imported, "VERSIONS", ())
                versions.extend(replace(version, device_type=device_type) for version in found)
    return versions
