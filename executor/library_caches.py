"""Caches from which the libraries that ranks use load compiled code or run Python: each is this user's, or private.

The libraries themselves believe whatever is there. torch's compiler has its cache in the temporary folder under a name
that everybody can guess; it gets a folder in Headrace's cache instead.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from headrace.ipc.cache import cache_folder
from headrace.ipc.failure import HeadraceError
from headrace.ipc.process.own_folder import private_folder
from headrace.ipc.process.trusted_files import warn_of, why_untrusted_tree

_MODULES = "HF_MODULES_CACHE"


def trust_library_caches() -> None:
    """Points the environment variable of each cache that other users can have written to a private folder, with a
    warning. Called before a rank imports the libraries."""
    for variable, folder in _folders().items():
        reason = why_untrusted_tree(folder)
        if not reason:
            if variable == "TORCHINDUCTOR_CACHE_DIR":
                os.environ[variable] = str(folder)
            continue
        private = str(private_folder(variable.lower()).path)
        warn_of(reason, f"{variable} is a folder of this process alone instead.")
        os.environ[variable] = private
        if variable == _MODULES:
            _change_loaded(private)


def _folders() -> dict[str, Path]:
    """Each variable, and the folder that its library would use."""
    environment = os.environ
    home = Path(os.path.expanduser("~"))
    xdg = Path(environment.get("XDG_CACHE_HOME") or home / ".cache")
    hub = Path(environment.get("HF_HOME") or xdg / "huggingface")
    defaults = {
        "TRITON_CACHE_DIR": Path(environment.get("TRITON_HOME") or home) / ".triton" / "cache",
        "TORCH_EXTENSIONS_DIR": xdg / "torch_extensions",
        "PYTORCH_KERNEL_CACHE_PATH": xdg / "torch" / "kernels",
        "CUDA_CACHE_PATH": home / ".nv" / "ComputeCache",
        _MODULES: hub / "modules",
    }
    try:
        defaults["TORCHINDUCTOR_CACHE_DIR"] = cache_folder() / "torchinductor"
    except HeadraceError:  # there is nowhere to keep anything
        defaults["TORCHINDUCTOR_CACHE_DIR"] = private_folder("torchinductor_cache_dir").path
    return {variable: Path(environment.get(variable) or folder).expanduser() for variable, folder in defaults.items()}


def _change_loaded(folder: str) -> None:
    """transformers reads the variable when it is imported, as a user's program may have done."""
    for name in ("transformers.utils.hub", "transformers.utils", "transformers.dynamic_module_utils"):
        module = sys.modules.get(name)
        if module is not None and hasattr(module, _MODULES):
            setattr(module, _MODULES, folder)
