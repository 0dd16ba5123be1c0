"""Runs the cases of `triton_cases_*.py` under Triton's interpreter, which must be chosen before triton is imported.

`python tests/triton_cases.py` prints one line of JSON for each case: its name, the seconds it took, and what failed.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

Case = Callable[[], None]


def why_not_interpreted() -> str:
    """Why Triton's interpreter is of no use here, without importing it; "" where it is."""
    if importlib.util.find_spec("triton") is None:
        return "triton has no build for this platform"
    triton, numpy = (tuple(map(int, metadata.version(name).split(".")[:2])) for name in ("triton", "numpy"))
    if triton < (3, 7) and numpy >= (2, 4):
        return "Triton 3.6's interpreter makes numbers of arrays with one element, which NumPy 2.4 refuses"
    return ""


def find_cases() -> dict[str, Case]:
    """Every function `case_*` of the case files, by file and name."""
    found: dict[str, Case] = {}
    for path in sorted(Path(__file__).parent.glob("triton_cases_*.py")):
        module = importlib.import_module(path.stem)
        for name, function in vars(module).items():
            if name.startswith("case_"):
                found[f"{path.stem.removeprefix('triton_cases_')}.{name.removeprefix('case_')}"] = function
    return found


def case_names() -> list[str]:
    """The same names without importing a case file, which would import triton."""
    names = []
    for path in sorted(Path(__file__).parent.glob("triton_cases_*.py")):
        for line in path.read_text().splitlines():
            if line.startswith("def case_"):
                name = line.removeprefix("def case_").partition("(")[0]
                names.append(f"{path.stem.removeprefix('triton_cases_')}.{name}")
    return names


def main() -> None:
    import torch

    torch.set_num_threads(1)
    # The interpreter computes with numpy, which warns where a GPU's arithmetic silently gives infinity or wraps.
    warnings.simplefilter("ignore", RuntimeWarning)
    chosen = sys.argv[1:]
    for name, case in find_cases().items():
        if chosen and not any(part in name for part in chosen):
            continue
        torch.manual_seed(0)
        begin = time.monotonic()
        try:
            case()
            failure = ""
        except Exception:
            failure = traceback.format_exc()
        print(json.dumps({"name": name, "seconds": time.monotonic() - begin, "failure": failure}), flush=True)


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    main()
