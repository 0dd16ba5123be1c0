"""Runs the cases of `triton_cases_*.py` under Triton's interpreter: `python FILE [PART OF A NAME ...]`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

from case_process import cases_of, run_cases
from triton_language import stay_interpreted

FILES = sorted(Path(__file__).parent.glob("triton_cases_*.py"))


def why_not_interpreted() -> str:
    """The reason why Triton's interpreter cannot be used here, found without importing it; "" if it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton has no build for this platform"
    triton, numpy = (tuple(map(int, metadata.version(name).split(".")[:2])) for name in ("triton", "numpy"))
    if triton < (3, 7) and numpy >= (2, 4):
        return "Triton 3.6's interpreter makes numbers of arrays with one element, which NumPy 2.4 refuses"
    return ""


def full_name(path: Path, name: str) -> str:
    return f"{path.stem.removeprefix('triton_cases_')}.{name}"


def sum_dots_alike() -> None:
    """Makes each row of the interpreter's matrix products independent of the number of rows.

    On some processors BLAS sums in another order for other shapes, which no GPU's tile does. With sums in float64 the
    order does not change the float32 result; sums that a kernel makes in pieces are still rounded piece by piece.
    """
    import numpy as np
    from triton.runtime import interpreter

    product = np.matmul

    def matmul(a: Any, b: Any, *, dtype: Any = None) -> Any:
        if dtype != np.float32:
            return product(a, b, dtype=dtype)
        return product(a.astype(np.float64), b.astype(np.float64)).astype(np.float32)

    numpy_here = types.SimpleNamespace(**vars(np))
    numpy_here.matmul = matmul
    interpreter.np = numpy_here


def main() -> None:
    import torch

    torch.set_num_threads(1)
    stay_interpreted()
    sum_dots_alike()
    # The interpreter computes with numpy, which warns where a GPU's arithmetic silently gives infinity or wraps.
    warnings.simplefilter("ignore", RuntimeWarning)
    cases = {
        full_name(path, name): case
        for path in FILES
        for name, case in cases_of(importlib.import_module(path.stem)).items()
    }
    run_cases(cases, sys.argv[1:])


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    main()
