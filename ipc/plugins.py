"""Extensions from other packages: entry points of the group `headrace.plugins`, and classes that options name.

    [project.entry-points."headrace.plugins"]          # in the other package's pyproject.toml
    tiny = "tiny_family:FAMILY"                         # a Family: models of its architectures are served
    gentle = "gentle.scheduler:GentleScheduler"         # a class: scheduler_cls=gentle
    lab = "lab.executor:LabExecutor"                    # a class: distributed_executor_backend=lab

    [project.entry-points."headrace.logits_processors"] # a class that every engine creates (executor/sampling);
    calm = "calm.processor:Calm"                        # the group "vllm.logits_processors" has the same effect

    [project.entry-points."headrace.step_features"]     # a class that every engine creates
    echo = "echo.feature:Echo"                          # (core/schedule/features/feature.py)

    [project.entry-points."headrace.step_handlers"]     # a class that every rank with a model creates: the rank's side
    echo = "echo.rank:EchoHandler"                      # of a step feature (executor/step/handlers.py)

    [project.entry-points."headrace.row_inputs"]        # a class: a kind of input in the place of tokens
    chart = "chart.input:Chart"                         # (ipc/row_inputs.py)

    [project.entry-points."headrace.cache_kinds"]       # a class under the name that a mixer's `cache_kind` has:
    chunks = "chunked.cache:Chunks"                     # (core/schedule/groups/group.py)

    [project.entry-points."headrace.lora_resolvers"]    # a class or object that finds adapters by name
    shelf = "shelf.resolver:Shelf"                      # (frontend/adapters/resolver.py)

A plugin is loaded when an option names it; plugins that are families are loaded when Headrace has no family for a
model's architecture. A broken plugin is reported where it is needed, and does not affect the others.
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
from typing import Any, TypeVar

from headrace.ipc.failure import OptionError, let_interrupts_pass
from headrace.ipc.process.deferred_imports import import_deferred
from headrace.ipc.process.program import follow_user_path

GROUP = "headrace.plugins"
VLLM_GROUP = "vllm.general_plugins"
LOGITS_PROCESSORS_GROUPS = ("headrace.logits_processors", "vllm.logits_processors")
"""Headrace's own group, and the one of packages made for vLLM, whose interface is the same."""
STEP_FEATURES_GROUP = "headrace.step_features"
STEP_HANDLERS_GROUP = "headrace.step_handlers"
ROW_INPUTS_GROUP = "headrace.row_inputs"
CACHE_KINDS_GROUP = "headrace.cache_kinds"
LORA_RESOLVERS_GROUP = "headrace.lora_resolvers"
logger = logging.getLogger(__name__)
T = TypeVar("T")


def plugins() -> dict[str, EntryPoint]:
    """Installed plugins by name. Raises OptionError if two packages use the same name."""
    return _by_name(GROUP, "plugin")


def _by_name(group: str, what: str) -> dict[str, EntryPoint]:
    """What is installed under the group, sorted by name. Raises OptionError if two packages use the same name."""
    found: dict[str, EntryPoint] = {}
    for entry in sorted(_installed(group), key=lambda entry: entry.name):
        other = found.setdefault(entry.name, entry)
        if other != entry:
            raise OptionError(
                f"two packages have a {what} {entry.name}: {_package(other)} and {_package(entry)}; uninstall one"
            )
    return found


def has_logits_processors(named: Sequence[str]) -> bool:
    """Whether an engine with these classes in its options has any logits processors, installed ones included."""
    return bool(named or logits_processor_entries())


def logits_processor_entries() -> list[EntryPoint]:
    """Installed logits processors, sorted by name. A class that is registered in both groups is listed once."""
    found: dict[str, EntryPoint] = {}
    for group in LOGITS_PROCESSORS_GROUPS:
        for entry in _installed(group):
            found.setdefault(entry.value, entry)
    return sorted(found.values(), key=lambda entry: entry.name)


def step_feature_entries() -> list[EntryPoint]:
    """Installed step features, sorted by name. Raises OptionError if two packages use the same name."""
    return list(_by_name(STEP_FEATURES_GROUP, "step feature").values())


def step_handler_entries() -> list[EntryPoint]:
    """Installed handlers of attachments, sorted by name. Raises OptionError if two packages use the same name."""
    return list(_by_name(STEP_HANDLERS_GROUP, "step handler").values())


def row_input_entries() -> list[EntryPoint]:
    """Installed kinds of row inputs, sorted by name."""
    return sorted(_installed(ROW_INPUTS_GROUP), key=lambda entry: entry.name)


def cache_kind_entries() -> dict[str, EntryPoint]:
    """Installed kinds of cache groups by name. Raises OptionError if two packages use the same name."""
    return _by_name(CACHE_KINDS_GROUP, "cache kind")


def lora_resolver_entries() -> list[EntryPoint]:
    """Installed resolvers of LoRA adapters, sorted by name. Raises OptionError if two packages use the same name."""
    return list(_by_name(LORA_RESOLVERS_GROUP, "LoRA resolver").values())


def _installed(group: str) -> list[EntryPoint]:
    return _installed_on(tuple(sys.path))[group]


@functools.lru_cache(maxsize=1)
def _installed_on(path: tuple[str, ...]) -> dict[str, list[EntryPoint]]:
    """Entry points of all groups, cached per `sys.path`: the search reads a file of every installed package.

    An engine asks for them several times at its start, and so does each of its ranks.
    """
    installed = entry_points()
    return {
        group: list(installed.select(group=group))
        for group in (
            *(GROUP, VLLM_GROUP, STEP_FEATURES_GROUP, STEP_HANDLERS_GROUP, ROW_INPUTS_GROUP, CACHE_KINDS_GROUP),
            *(LORA_RESOLVERS_GROUP, *LOGITS_PROCESSORS_GROUPS),
        )
    }


def load_plugin(entry: EntryPoint) -> Any:
    """Imports the object that the entry names. Raises OptionError, naming plugin and package, if that fails."""
    import_deferred()
    try:
        return entry.load()
    except BaseException as error:  # importing the module may raise anything
        let_interrupts_pass(error)
        raise OptionError(
            f"the plugin {entry.name} of {_package(entry)} ({entry.value}) cannot be loaded: "
            f"{type(error).__name__}: {error}"
        ) from error


def installed_class(entry: EntryPoint, what: str, base: type[T]) -> type[T]:
    """The class that an entry of a `what` names, derived from `base`. Raises OptionError, naming entry and package."""
    found = load_plugin(entry)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise OptionError(
            f"the {what} {entry.name}, {entry.value}, is {found!r}; it must be a class derived from "
            f"{base.__module__}.{base.__qualname__}"
        )
    return found


def made(entry: EntryPoint, what: str, base: type[T]) -> T:
    """One of `installed_class`. Raises OptionError."""
    kind = installed_class(entry, what, base)
    try:
        return kind()
    except BaseException as error:
        let_interrupts_pass(error)
        raise OptionError(
            f"the {what} {entry.name}, {entry.value}, cannot be made without arguments: {error!r}"
        ) from error


def load_plugins(kind: type) -> tuple[list[Any], list[str]]:
    """All plugins of type `kind`, and a message for each that cannot be loaded or is neither a `kind` nor a class."""
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
    """Logs why installed plugins of vLLM have no effect."""
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
    """The class that `option` names as module:Class, as module.Class, or by the name of a plugin.

    Raises OptionError if there is no such class, or if it is not derived from `base`.
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
        return getattr(import_users_module(module), attribute)
    except BaseException as error:  # importing the module may raise anything
        let_interrupts_pass(error)
        hint = ""
        if module == "__main__":
            hint = "; the engine is a process of its own: put the class into a module that it can import"
        elif isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            hint = "; modules are looked for beside your script, in PYTHONPATH and among what is installed"
        raise OptionError(f"{option}={name} cannot be loaded: {type(error).__name__}: {error}{hint}") from error


def import_users_module(module: str) -> types.ModuleType:
    """A module that the user names, or the file of a script. Whatever importing it raises comes out.

    Unless it is Headrace's own, it is also looked for where the program that the user started looks for modules.
    Raises ModuleNotFoundError, which names the folders that were left out because everybody may write there.
    """
    left_out = []
    if module.partition(".")[0] != "headrace":
        import_deferred()
        left_out = follow_user_path()
    try:
        return _script(module) if module.endswith(".py") else importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not left_out:
            raise
        raise ModuleNotFoundError(
            f"{error} (not looked for in {', '.join(left_out)}: everybody may write there)", name=error.name
        ) from error


SCRIPT = "__mp_main__"
"""Module name of a user's script that is imported for its classes. As with multiprocessing, which uses the same name,
code under `if __name__ == "__main__"` does not run."""


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
    """Whether a script is being imported for its classes, and so must not start engines itself."""
    return bool(getattr(sys.modules.get(SCRIPT), _LOADING, False))


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "an unknown package"
