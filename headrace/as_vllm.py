"""`import headrace.as_vllm` first, and `import vllm` and `from vllm... import ...` mean Headrace from then on.

For scripts that are not to be changed; a module that vLLM has and Headrace has not is told with the reason when it is
imported. Raises ImportError where vLLM itself is imported already.
"""

import importlib
import sys

import headrace
from headrace.vllm_modules import MODULES

_loaded = sys.modules.get("vllm")
if _loaded is not None and _loaded is not headrace:
    raise ImportError(f"vllm is imported already, from {_loaded.__file__}: import headrace.as_vllm before it")
sys.modules["vllm"] = headrace
for _name in MODULES:
    sys.modules[f"vllm.{_name}"] = importlib.import_module(f"headrace.{_name}")
