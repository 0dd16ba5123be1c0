"""The ops: a torch reference, fast versions, and what each version supports. See README.md."""

from headrace.kernels.registry import Choice, Op, Version, choose, choose_reference, ops

__all__ = ["Choice", "Op", "Version", "choose", "choose_reference", "ops"]
