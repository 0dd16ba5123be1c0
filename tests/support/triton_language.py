"""Makes Triton's interpreter patch `triton.language` once per process instead of at every launch."""

from __future__ import annotations

from types import FunctionType, ModuleType


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
