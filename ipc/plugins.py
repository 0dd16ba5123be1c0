"""What other packages put beside or in place of ours: entry points of the group `headrace.plugins`, and named classes.

    [project.entry-points."headrace.plugins"]          # in the other package's pyproject.toml
    tiny = "tiny_family:FAMILY"                         # a Family: models of its architectures are served
    gentle = "gentle.scheduler:GentleScheduler"         # a class: scheduler_cls=gentle
    lab = "lab.executor:LabExecutor"                    # a class: distributed_executor_backend=lab

    [project.entry-points."headrace.logits_processors"] # a class that every engine makes (executor/sampling);
    calm = "calm.processor:Calm"                        # so it does of the group "vllm.logits_processors"

A plugin is loaded when it is asked for by name, families when a model is of no architecture of ours. What is wrong with
one is said where it is missed; the others are served.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import sys
import types
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from headrace.ipc.failure import OptionError

GROUP = "headrace.plugins"
VLLM_GROUP = "vllm.general_plugins"
LOGITS_PROCESSORS_GROUPS = ("headrace.logits_processors", "vllm.logits_processors")
"""Ours, and that of packages made for vLLM, whose interface is the same."""
logger = logging.getLogger(__name__)


def plugins() -> dict[str, EntryPoint]:
    """Those installed, by name. Raises OptionError where two packages use one name."""
    found: dict[str, EntryPoint] = {}
    for entry in sorted(_installed(GROUP), key=lambda entry: entry.name):
        other = found.setdefault(entry.name, entry)
        if other != entry:
            raise OptionError(
                f"two packages have a plugin {entry.name}: {_package(other)} and {_package(entry)}; uninstall one"
            )
    return found


def has_logits_processors(named: Sequence[str]) -> bool:
    """Whether an engine that names these classes has any."""
    return bool(named or logits_processor_entries())


def logits_processor_entries() -> list[EntryPoint]:
    """Those installed, by name; a class that a package registers in both groups once."""
    found: dict[str, EntryPoint] = {}
    for group in LOGITS_PROCESSORS_GROUPS:
        for entry in _installed(group):
            found.setdefault(entry.value, entry)
    return sorted(found.values(), key=lambda entry: entry.name)


def _installed(group: str) -> list[EntryPoint]:
    return _installed_on(tuple(sys.path))[group]


@functools.lru_cache(maxsize=1)
def _installed_on(path: tuple[str, ...]) -> dict[str, list[EntryPoint]]:
    """Of all groups, by one look for each `sys.path`: it reads a file of every package that is installed.

    An engine asks several times as it starts, and so does each of its ranks.
    """
    installed = entry_points()
    return {group: list(installed.select(group=group)) for group in (GROUP, VLLM_GROUP, *LOGITS_PROCESSORS_GROUPS)}


def load_plugin(entry: EntryPoint) -> Any:
    """What it names. Raises OptionError, naming plugin and package, when that cannot be had."""
    try:
        return entry.load()
    except Exception as error:  # whatever the module does when it is imported
        raise OptionError(
            f"the plugin {entry.name} of {_package(entry)} ({entry.value}) cannot be loaded: "
            f"{type(error).__name__}: {error}"
        ) from error


def load_plugins(kind: type) -> tuple[list[Any], list[str]]:
    """Every plugin that is a `kind`, and a sentence for each that cannot be loaded, or is neither that nor a class."""
    found, problems = [], []
    for entry in plugins().values():
        try:
            loaded = load_plugin(entry)
        except OptionError as error:
            problems.append(str(error))
            continue
        if isinstance(loaded, kind):
            found.append(loaded)
        elif not isinstance(loaded, type):
            problems.append(
                f"the plugin {entry.name} of {_package(entry)} ({entry.value}) is a {type(loaded).__name__}; "
                f"a {kind.__name__} or a class is expected"
            )
    return found, problems


def warn_of_vllm_plugins() -> None:
    """Says why vLLM's plugins that are installed do nothing here."""
    for entry in _installed(VLLM_GROUP):
        logger.warning(
            "the plugin %s of %s is registered for vLLM (%s): it changes vLLM's own modules, which are not in use "
            "here; a package registers families, schedulers and executors for Headrace under %s",
            entry.name,
            _package(entry),
            VLLM_GROUP,
            GROUP,
        )


def load_class(option: str, name: str, base: type | None = None) -> Any:
    """The class that `option` names as module:Class, as module.Class, or by a plugin's name.

    Raises OptionError, in one sentence, when there is none or when it is not derived from `base`.
    """
    module, colon, attribute = name.partition(":")
    if not colon:
        module, _, attribute = name.rpartition(".")
    if entry := plugins().get(name) if not module else None:
        found = load_plugin(entry)
    else:
        found = _named(option, name, module, attribute)
    if not isinstance(found, type):
        raise OptionError(f"{option}={name} is a {type(found).__name__}; it must be a class")
    if base is not None and not issubclass(found, base):
        raise OptionError(f"{option}={name} must be derived from {base.__module__}.{base.__qualname__}")
    return found


def _named(option: str, name: str, module: str, attribute: str) -> Any:
    if not module or not attribute:
        installed = ", ".join(plugins())
        raise OptionError(
            f"{option} is {name!r}; it must name a class, as module:Class or module.Class"
            + (f", or a plugin, of which there are {installed}" if installed else "")
        )
    try:
        loaded = _script(module) if module.endswith(".py") else importlib.import_module(module)
        return getattr(loaded, attribute)
    except Exception as error:  # whatever the module does when it is imported
        hint = "; the engine is a process of its own: put the class into a module that it can import"
        raise OptionError(
            f"{option}={name} cannot be loaded: {type(error).__name__}: {error}{hint if module == '__main__' else ''}"
        ) from error


SCRIPT = "__mp_main__"
"""A script's name where it is loaded for its classes. multiprocessing uses it too: what a script does under
`if __name__ == "__main__"` is not done."""


def _script(file: str) -> types.ModuleType:
    loaded = sys.modules.get(SCRIPT)
    if loaded is not None and loaded.__file__ == file:
        return loaded
    spec = importlib.util.spec_from_file_location(SCRIPT, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = sys.modules[SCRIPT] = importlib.util.module_from_spec(spec)
    module.__dict__[_LOADING] = True
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[SCRIPT]
        raise
    module.__dict__[_LOADING] = False
    return module


_LOADING = "__headrace_loading__"


def is_loading_script() -> bool:
    """Whether a script is being loaded for its classes, and is not to start engines of its own."""
    return bool(getattr(sys.modules.get(SCRIPT), _LOADING, False))


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "an unknown package"
