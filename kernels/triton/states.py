"""What kernels of layers that keep a state per sequence share: where a state lies, and what a step does with it, as
`kernels/reference/states.py` describes both."""

# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
# Functions under triton.jit handle types that mypy does not know.

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.reference.states import KeptUnits, StateBatch

STEP = (
    *("query_start", "rows", "pages", "sources", "has_source", "replayed", "committed"),
    *("snapshot_start", "snapshot_ends", "snapshot_pages", "page_stride", "flag_stride"),
)
"""Parameters of every kernel, in the order of `step_arguments`. Their alignment and values differ from step to step, so
that no kernel may be compiled for them: each has them in its do_not_specialize."""


def step_arguments(batch: StateBatch) -> tuple[Any, ...]:
    """Raises ValueError if the parts of a step are not side by side alike."""
    page_stride, flag_stride = batch.pages.stride(0), batch.has_source.stride(0)
    by_page, flags = (batch.sources, batch.snapshot_pages), (batch.replayed, batch.committed, batch.snapshot_ends)
    if not all(_has_stride(each, page_stride) for each in by_page) or not all(
        _has_stride(each, flag_stride) for each in flags
    ):
        raise ValueError("the pages of a step's states have one stride, and so have the other parts")
    return (
        *(batch.query_start, batch.rows, batch.pages, batch.sources, batch.has_source, batch.replayed),
        *(batch.committed, batch.snapshot_start, batch.snapshot_ends, batch.snapshot_pages, page_stride, flag_stride),
    )


def _has_stride(tensor: Tensor, stride: int) -> bool:
    return len(tensor) < 2 or tensor.stride(0) == stride


def unit_arguments(units: KeptUnits) -> tuple[Any, ...]:
    """memory, unit_pages, unit_offsets and page_elements, as kernels take them."""
    return units.memory, units.page, units.offset, units.memory.shape[1]


@triton.jit
def unit_at(memory, unit_pages, unit_offsets, page_elements, pages, unit):
    """Where a unit of a state, or each of several, begins. pages: of the sequence."""
    number = tl.load(pages + tl.load(unit_pages + unit)).to(tl.int64)
    return memory + number * page_elements + tl.load(unit_offsets + unit)
