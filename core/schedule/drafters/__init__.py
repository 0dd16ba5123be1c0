"""Drafters: where draft tokens come from, one file each (`drafter.Drafter` is their protocol)."""

from __future__ import annotations

from headrace.core.options.speculation import NgramSpeculation, Speculation, SuffixSpeculation
from headrace.core.schedule.drafters.drafter import Drafter
from headrace.core.schedule.drafters.ngram import NgramDrafter
from headrace.core.schedule.drafters.suffix import SuffixDrafter


def drafter_of(speculation: Speculation) -> Drafter:
    """The drafter of the method that speculative_config names."""
    match speculation:
        case NgramSpeculation():
            return NgramDrafter(speculation)
        case SuffixSpeculation():
            return SuffixDrafter(speculation)
