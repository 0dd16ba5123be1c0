"""The layout of the memory that the ranks of one host share. Imports no torch.

    header     one page: see `Header` in kernels/cpu/runtime/collectives.h
    lines      64 bytes a rank: its barrier's count, and which ranks sleep on it
    parts      for each stage, two turns of tp_size slots: each rank's summand of an all-reduce
    logits     for the last stage: [max_seqs, vocab_size] float32
    pipes      for each rank but the last stage's: two slots of hidden states for the next stage
    tokens     TOKEN_SLOTS of sampled tokens of steps, from the last stage's first rank to the other stages' ranks

Every area begins on a page of its own. Each place has a single writer, or its writers take turns, and likewise its
readers, so no lock is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from headrace.executor.parallel.rank_place import World

PAGE_BYTES = 4096
LINE_BYTES = 64
PIPE_SLOTS = 2
TOKEN_SLOTS = 64
"""More than the steps ever in flight: a rank takes all published tokens before each step."""
SLOT_HEADER_BYTES = 64
HIDDEN_TENSORS = 2
"""The residual stream, and the part that is not yet added to it."""


def _paged(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True)
class SharedLayout:
    """Offsets and sizes in bytes."""

    world: World

    @cached_property
    def part_bytes(self) -> int:
        """Size of one rank's slot: the float32 hidden states of a whole step."""
        return _paged(self.world.max_tokens * self.world.hidden_size * 4)

    @cached_property
    def pipe_slot_bytes(self) -> int:
        return _paged(SLOT_HEADER_BYTES + HIDDEN_TENSORS * self.world.max_tokens * self.world.hidden_size * 4)

    @cached_property
    def token_slot_bytes(self) -> int:
        return SLOT_HEADER_BYTES + 2 * 4 * -(-self.world.max_seqs // 16) * 16

    @property
    def lines_at(self) -> int:
        return PAGE_BYTES

    @cached_property
    def parts_at(self) -> int:
        return self.lines_at + _paged(self.world.size * LINE_BYTES)

    def stage_parts_at(self, pp_rank: int) -> int:
        return self.parts_at + pp_rank * self._stage_parts_bytes

    @cached_property
    def _stage_parts_bytes(self) -> int:
        return 0 if self.world.tp_size == 1 else 2 * self.world.tp_size * self.part_bytes

    @cached_property
    def logits_at(self) -> int:
        return self.stage_parts_at(self.world.pp_size)

    @cached_property
    def pipes_at(self) -> int:
        world = self.world
        return self.logits_at + (0 if world.tp_size == 1 else _paged(4 * world.max_seqs * world.vocab_size))

    def pipe_at(self, pp_rank: int, tp_rank: int) -> int:
        """The pipe out of that rank. Its first page has its two counts, each on its own cache line."""
        return self.pipes_at + (pp_rank * self.world.tp_size + tp_rank) * (
            PAGE_BYTES + PIPE_SLOTS * self.pipe_slot_bytes
        )

    @cached_property
    def tokens_at(self) -> int:
        """One page of counts (the writer's, then each reader's), then the slots."""
        return self.pipe_at(self.world.pp_size - 1, 0)

    @cached_property
    def total_bytes(self) -> int:
        counts_bytes = _paged((1 + self.world.size) * LINE_BYTES)
        return self.tokens_at + (
            0 if self.world.pp_size == 1 else counts_bytes + _paged(TOKEN_SLOTS * self.token_slot_bytes)
        )

    @cached_property
    def token_slots_at(self) -> int:
        return self.tokens_at + _paged((1 + self.world.size) * LINE_BYTES)
