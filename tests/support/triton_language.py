"""Spares Triton's interpreter what it does anew at every launch and for every tensor."""

from __future__ import annotations

import functools
from types import FunctionType, ModuleType
from typing import Any


class Lasting:
    """Stands for the interpreter's patch, which it would undo after each launch; undoing does nothing here."""

    def restore(self) -> None:
        pass


def stay_interpreted() -> None:
    """Patches permanently, for a process that compiles nothing. The interpreter would search for what to patch at each
    launch and each call between device functions, which takes longer than interpreting the kernels of the tests."""
    from triton import language
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    seen, patched = set[FunctionType](), set[str]()

    def patch_once(function: FunctionType) -> Lasting:
        if function not in seen:
            seen.add(function)
            modules = [value for value in function.__globals__.values() if isinstance(value, ModuleType)]
            names = {each.__name__ for each in (language, language.core) if each in modules}
            if not names or not names <= patched:
                patch(function)
                patched.update(names)
        return Lasting()

    interpreter._patch_lang = patch_once

    dtype_of = interpreter._get_np_dtype
    cached = functools.cache(dtype_of)

    def found(kind: language.dtype) -> Any:
        """It makes a table of all types at each call, except for pointers, which have no hash."""
        element = kind.scalar
        return dtype_of(element) if isinstance(element, language.pointer_type) else cached(element)

    interpreter._get_np_dtype = found
