"""Full attention: a row holds the blocks of all of its tokens."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.schedule.block_hashes import BlockHash
from headrace.core.schedule.groups.group import GroupBlocks, group_kind


@group_kind("full")
class FullBlocks(GroupBlocks):
    def find(self, hashes: Sequence[BlockHash]) -> tuple[int, list[int]]:
        found = self.pool.find(hashes)
        return len(found), found

    def longest(self, hashes: Sequence[BlockHash]) -> int:
        suffix, named = self.suffix, self.pool.named
        return next((i for i, each in enumerate(hashes) if not named(each + suffix)), len(hashes))

    def needed(self, hashes: Sequence[BlockHash]) -> list[int]:
        return [self.named(each) for each in hashes]

    def may_go_on(self, token_hash: BlockHash) -> bool:
        return bool(self.named(token_hash))
