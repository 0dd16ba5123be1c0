"""Headrace in the place of the package `vllm`, for this process and those that it starts: `install()`."""

import importlib
import importlib.machinery
import os
import sys
import types
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path

import headrace
from headrace.frontend.vllm.modules import MODULES, ModulePath

VLLM_VERSION = "0.33.0"
"""The version of vLLM whose interface Headrace follows: scripts check the installed version against it."""
VLLM_VERSION_TUPLE = tuple(int(part) for part in VLLM_VERSION.split("."))
_VERSIONS = {"__version__": VLLM_VERSION, "__version_tuple__": VLLM_VERSION_TUPLE}
_ON_PATH = str(Path(__file__).with_name("on_path"))
"""A folder with a package `vllm` that imports this module."""


class VllmPackage(types.ModuleType):
    """The package `vllm`: Headrace's names, with vLLM's version."""

    def __init__(self) -> None:
        super().__init__("vllm", headrace.__doc__)
        self.__path__ = ModulePath()
        self.__spec__ = importlib.machinery.ModuleSpec("vllm", None, origin=headrace.__file__, is_package=True)
        self.__file__ = headrace.__file__
        self.__all__ = headrace.__all__
        vars(self).update(_VERSIONS)

    def __getattr__(self, name: str) -> object:
        found: object = sys.modules.get(f"vllm.{name}") or getattr(headrace, name)
        return found

    def __dir__(self) -> Iterable[str]:
        return dir(headrace)


class _Vllm(Distribution):
    """The metadata that `importlib.metadata` returns for vLLM, as if it were installed."""

    def read_text(self, filename: str) -> str | None:
        return {
            "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}\n",
            "top_level.txt": "vllm\n",
        }.get(filename)

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        return Path(headrace.__file__).parent / path


_ALL = DistributionFinder.Context()


class _Finder(DistributionFinder):
    """Finds the distribution `vllm`, but no modules: those are in `sys.modules`."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        return None

    def find_distributions(self, context: DistributionFinder.Context = _ALL) -> Iterator[_Vllm]:
        if context.name is None or context.name.lower() == "vllm":
            yield _Vllm()


def _version_module() -> types.ModuleType:
    module = types.ModuleType("vllm.version", "The version of vLLM whose interface Headrace follows.")
    vars(module).update(_VERSIONS)
    return module


def install() -> None:
    """From now on, `import vllm` and `from vllm... import ...` import Headrace. Raises ImportError if vLLM itself has
    been imported already."""
    loaded = sys.modules.get("vllm")
    if isinstance(loaded, VllmPackage):
        return
    if loaded is not None and not (loaded.__file__ or "").startswith(_ON_PATH):
        raise ImportError(f"vllm is imported already, from {loaded.__file__}: import headrace.as_vllm before it")
    sys.modules["vllm"] = VllmPackage()
    sys.meta_path.insert(0, _Finder())
    for name in MODULES:
        module = _version_module() if name == "version" else importlib.import_module(f"headrace.{name}")
        sys.modules[f"vllm.{name}"] = module
    # Processes of multiprocessing get this path, and programs the environment.
    if _ON_PATH not in sys.path:
        sys.path.insert(1, _ON_PATH)
    os.environ["HEADRACE_AS_VLLM"] = "1"
    before = os.environ.get("PYTHONPATH", "")
    if _ON_PATH not in before.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_ON_PATH, before)))
