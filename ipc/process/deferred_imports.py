"""Modules of large libraries that are imported when one of their names is first asked for.

`import torch` runs a thousand modules, of which a third (its exporter, quantisation for training, distributions, what
its compiler knows of operators) serve nothing that the engine does, and take a third of the import's time. A program of
ours that imports torch for itself alone puts them off; whoever asks for a name of theirs, as transformers' models or
code of others may do, gets it as ever. So does whoever imports a module of the library that `import torch` has not
imported: the library's modules import one another in circles, out of which they find where all of them are there.

A module that registers something when it is imported, and of which nobody need ask for a name, is imported by
`import_deferred`, which is called before code of others runs in the program.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

OF_TORCH = (
    "torch._meta_registrations",
    "torch.ao",
    "torch.distributed._meta_registrations",
    "torch.distributions",
    "torch.export",
    "torch.masked",
    "torch.nn.intrinsic",
    "torch.nn.qat",
    "torch.nn.quantizable",
    "torch.nn.quantized",
    "torch.quantization",
    "torch.utils.data",
)
"""Modules that torch imports for others' sake alone."""
_OF_THE_IMPORT = frozenset({"__class__", "__file__", "__loader__", "__name__", "__package__", "__spec__"})
"""What the import system reads of a module that there is already: no reason to import it."""


class DeferredModule(ModuleType):
    """In the place of a module until one of its names is asked for. Thread-safe."""

    def __getattribute__(self, name: str) -> Any:
        if name not in _OF_THE_IMPORT:
            _import(self)
        return ModuleType.__getattribute__(self, name)  # it is no DeferredModule any more


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that are put off, and imports them before any that their library has not imported itself."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        # While one of those put off is imported, what it imports comes at once; and another thread, which holds the
        # lock of what it imports, does not wait for that one, which may need it.
        if _deferred and not _importing and _is_complete(name.partition(".")[0]):
            _import_all()
        if target is None and name in sys.modules:  # importing those that were put off has imported it as well
            return _Imported(sys.modules[name]).spec
        if name not in self.names:
            return None
        self.names.discard(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return DeferredModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None, "the import system has made the module"
        module.__spec__.loader = module.__loader__ = self._loader
        _deferred[module.__name__] = threading.RLock()


class _Imported(importlib.abc.Loader):
    """Of a module that there is already."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__
        self.spec = module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, self)
        # The module has it as well, since the import system takes the module's own where that appeared as it looked.

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


_finder = _Finder()
_deferred: dict[str, threading.RLock] = {}
"""A lock for each module that there is and that has not been imported, in the order in which they would have been."""
_importing: set[str] = set()


def defer(names: Iterable[str] = OF_TORCH) -> None:
    """Puts off the import of those of these modules that have not been imported yet."""
    _finder.names.update(name for name in names if name not in sys.modules)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def import_deferred() -> None:
    """Imports all that was put off, and puts off nothing more."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    _import_all()


def _is_complete(library: str) -> bool:
    """Whether modules of this library are put off, and the library has been imported but for them."""
    if not any(name.startswith(library + ".") for name in _deferred):
        return False
    return not getattr(sys.modules[library].__spec__, "_initializing", False)


def _import_all() -> None:
    _finder.names.clear()
    for name in list(_deferred):
        _import_one(sys.modules[name])


def _import(module: ModuleType) -> None:
    """Imports the module, and before it those that would have been there: what they import may go in a circle, out of
    which it finds in this order alone."""
    for name in list(_deferred) if module.__name__ in _deferred else ():
        _import_one(sys.modules[name])
        if name == module.__name__:
            break


def _import_one(module: ModuleType) -> None:
    name = module.__name__
    lock = _deferred.get(name)
    if lock is None:
        return
    with lock:
        if name not in _deferred or name in _importing:  # another thread has imported it; or this one does just now
            return
        _importing.add(name)
        try:
            assert module.__spec__ is not None, "deferred modules have one"
            assert module.__spec__.loader is not None, "deferred modules have one"
            module.__spec__.loader.exec_module(module)
        finally:
            _importing.discard(name)
        del _deferred[name]
        if type(module) is DeferredModule:
            object.__setattr__(module, "__class__", ModuleType)
