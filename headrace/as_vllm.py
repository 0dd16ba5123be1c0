"""After `import headrace.as_vllm`, `import vllm` and `from vllm... import ...` import Headrace instead.

`python -m headrace.as_vllm SCRIPT [ARGUMENTS]` runs a script unchanged, and `python -m headrace.as_vllm -m MODULE
[ARGUMENTS]` a module. The replacement also applies to processes that the program starts, by multiprocessing or as
programs (HEADRACE_AS_VLLM and PYTHONPATH in the environment). `vllm.__version__` and importlib.metadata tell the
version of vLLM whose interface Headrace follows. Importing a module of vLLM that Headrace lacks raises an error with
the reason. Raises ImportError if vLLM itself has been imported already. `import headrace` alone replaces nothing.
"""

import os
import runpy
import sys

from headrace.frontend.vllm.as_vllm import VLLM_VERSION, VLLM_VERSION_TUPLE, install

__all__ = ["VLLM_VERSION", "VLLM_VERSION_TUPLE", "install"]

install()
if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1:] == ["-m"]:
        sys.exit(
            "usage: python -m headrace.as_vllm SCRIPT [ARGUMENTS], or python -m headrace.as_vllm -m MODULE [ARGUMENTS]"
        )
    if sys.argv[1] == "-m":
        del sys.argv[:2]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        del sys.argv[0]
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")
