"""The ops: a torch reference, fast versions, and what each version supports. See README.md."""

from headrace.kernels.registry import ChosenVersion, Op, Version, choose, choose_reference, ops

__all__ = ["ChosenVersion", "Op", "Version", "choose", "choose_reference", "ops"]
