"""The ops: a torch reference, fast versions, and what each version supports. See README.md."""

from headrace.kernels.registry import Choice, Op, Version, choose, ops

__all__ = ["Choice", "Op", "Version", "choose", "ops"]
