"""Cache kinds of other packages: where a hook raises, or answers in another form, the error names kind and hook.

What is asked about a waiting request alone fails that request (`Scheduler._look_up`): nothing has changed yet. A hook
that changes what rows hold may have stopped halfway, and which blocks are free is not known then, so its error ends the
engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from headrace.core.schedule.blocks import BlockPool
from headrace.core.schedule.groups.group import GroupBlocks
from headrace.ipc.failure import InconsistentError, let_interrupts_pass

logger = logging.getLogger(__name__)


class CacheKindError(InconsistentError):
    """A cache kind of another package failed."""


def _is_count(found: Any) -> bool:
    return isinstance(found, int) and not isinstance(found, bool) and found >= 0


def _is_end(found: Any, hashes: Sequence[Any]) -> bool:
    return _is_count(found) and found <= len(hashes)


def _are_blocks(found: Any, pool: BlockPool) -> bool:
    return isinstance(found, list) and all(_is_count(each) and each < pool.num_blocks for each in found)


def _are_cached(found: Any, pool: BlockPool) -> bool:
    return _are_blocks(found, pool) and all(map(pool.has_name, found))


def _answers(part: GroupBlocks) -> dict[str, tuple[str, Callable[..., bool]]]:
    """Of the hooks whose answers are counts or blocks: what they have to be, in words, and whether one, with the
    arguments of its call, is that."""

    def are_blocks(found: Any, *_: Any) -> bool:
        return _are_blocks(found, part.pool)

    def is_hit(found: Any, hashes: Sequence[Any]) -> bool:
        is_pair = isinstance(found, tuple) and len(found) == 2
        return is_pair and _is_end(found[0], hashes) and _are_cached(found[1], part.pool)

    return {
        "num_missing": ("a number of blocks", lambda found, *_: _is_count(found)),
        "held": ("a list of blocks", are_blocks),
        "leaving": ("a list of blocks", are_blocks),
        "longest": ("a number of the blocks that were given", _is_end),
        "known": ("a number of the blocks that were given", _is_end),
        "needed": ("a list of cached blocks", lambda found, *_: _are_cached(found, part.pool)),
        "find": ("a number of the blocks that were given, and a list of cached blocks", is_hit),
    }


_HOOKS = (
    "num_missing",
    "held",
    "leaving",
    "longest",
    "known",
    "needed",
    "find",
    "enter",
    "all_held",
    "give_back",
    "clear",
    "named",
    "may_go_on",
    "filled",
)


def contain(part: GroupBlocks, name: str) -> GroupBlocks:
    """The part of a kind that is called `name`, whose hooks raise no other error than CacheKindError."""
    told, answers = set[str](), _answers(part)

    def guard(hook: str, own: Callable[..., Any]) -> None:
        expected, is_right = answers.get(hook, ("", None))

        def guarded(*given: Any) -> Any:
            try:
                found = own(*given)
                if hook == "all_held":
                    found = list(found)
                if is_right is not None and not is_right(found, *given):
                    raise TypeError(f"it returned {found!r:.100}; expected: {expected}")
            except CacheKindError:  # of a hook that it calls itself
                raise
            except BaseException as error:
                let_interrupts_pass(error)
                kind = f"{type(part).__module__}.{type(part).__qualname__}"
                why = f"the cache kind {name}, {kind}, failed in {hook}: {error!r:.200}"
                if hook not in told:
                    told.add(hook)
                    logger.exception("%s", why)
                raise CacheKindError(why) from error
            return found

        setattr(part, hook, guarded)

    for hook in _HOOKS:
        if getattr(type(part), hook) is not getattr(GroupBlocks, hook):
            guard(hook, getattr(part, hook))
    return part
