"""Triton's interpreter puts its own functions in the place of `triton.language`'s: here once, for a whole process."""

from __future__ import annotations

from types import FunctionType, ModuleType


class Lasting:
    """Of what the interpreter has put in place: it would take that back after each launch."""

    def restore(self) -> None:
        pass


def stay_interpreted() -> None:
    """For a process that compiles nothing. What to replace is looked for anew at each launch and each call of one
    device function by another, which takes longer than to interpret the kernels of our cases."""
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
