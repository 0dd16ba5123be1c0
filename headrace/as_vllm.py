"""After `import headrace.as_vllm`, `import vllm` and `from vllm... import ...` import Headrace instead.

`python -m headrace.as_vllm SCRIPT [ARGUMENTS]` runs a script unchanged. The replacement also applies to processes that
the script starts (HEADRACE_AS_VLLM in the environment). `importlib.metadata.version("vllm")` is the version of vLLM
whose interface Headrace follows; `vllm.__version__` is Headrace's own version. Importing a module of vLLM that Headrace
lacks raises an error with the reason. Raises ImportError if vLLM itself has been imported already.
"""

import importlib
import os
import runpy
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path

import headrace
from headrace.vllm_modules import MODULES

VLLM_VERSION = "0.33.0"
"""The version of vLLM whose interface Headrace follows: scripts check the installed version against it."""


class _Vllm(Distribution):
    """The metadata that `importlib.metadata` returns for vLLM, as if it were installed."""

    def read_text(self, filename: str) -> str | None:
        return f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}\n" if filename == "METADATA" else None

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


_loaded = sys.modules.get("vllm")
if _loaded is not None and _loaded is not headrace:
    raise ImportError(f"vllm is imported already, from {_loaded.__file__}: import headrace.as_vllm before it")
sys.modules["vllm"] = headrace
sys.meta_path.insert(0, _Finder())
os.environ["HEADRACE_AS_VLLM"] = "1"
for _name in MODULES:
    sys.modules[f"vllm.{_name}"] = importlib.import_module(f"headrace.{_name}")

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m headrace.as_vllm SCRIPT [ARGUMENTS]")
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
