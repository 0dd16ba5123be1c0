"""What the cache holds, as routers are told it: names of runs of blocks, in step with the pool."""

from __future__ import annotations

from typing import Any

import pytest
from engine_parts import SteppedCore

from headrace.core.schedule import prefix_events
from headrace.core.schedule.prefix_events import PrefixObserver
from headrace.ipc.codec import Tensor
from headrace.ipc.messages import FollowPrefixes
from headrace.ipc.messages import PrefixEvents as Told
from headrace.ipc.prefix_names import PrefixKey, chunk_tokens, prefix_names


def settle(core: SteppedCore) -> None:
    """As when the loop has nothing to do, and is about to wait."""
    core.run_until_idle()
    core.loop._followers.tell()


def names(prompt: list[int], core: SteppedCore, salt: str = "") -> list[int]:
    chunk = chunk_tokens(core.loop.scheduler.config.block_size)
    key = PrefixKey(salt, core.loop._admission._version_of_weights)
    return prefix_names(bytes(Tensor.of("int32", prompt).data), key, chunk)


def told_to(client: Any) -> set[int]:
    """What a follower thinks is held after all that it was told."""
    held: set[int] = set()
    for message in client.heard:
        if isinstance(message, Told):
            held -= set(message.evicted.tolist())
            held |= set(message.stored.tolist())
    return held


def test_followers_are_told_what_is_stored_and_what_is_evicted() -> None:
    core = SteppedCore(num_blocks=81, max_model_len=256)
    client, early = core.open(), [3] * 130
    client.add(0, early, max_tokens=2, ignore_eos=True)
    settle(core)
    client.send(FollowPrefixes())
    settle(core)
    client.add(1, [4] * 130, max_tokens=2, ignore_eos=True)
    settle(core)
    assert set(names([4] * 130, core)) <= told_to(client)
    assert not told_to(client) & set(names(early, core)), "nobody has named it yet"
    client.add(2, early, max_tokens=2, ignore_eos=True)  # found in the cache, and named as it is asked for
    settle(core)
    assert set(names(early, core)) <= told_to(client)
    for slot in range(3, 9):
        client.add(slot, [2 + slot] * 130, max_tokens=2, ignore_eos=True)
        settle(core)
    pool, known = core.loop.scheduler.pool, core.loop._followers._events
    assert known is not None
    assert told_to(client) == set(known.held())
    assert not set(names(early, core)) <= told_to(client), "the cache has no room for all"
    pool.reset_cache()
    core.loop._followers.tell()
    assert told_to(client) == set()


def test_a_later_follower_is_told_all_and_the_first_goes_on() -> None:
    core = SteppedCore(num_blocks=200, max_model_len=256)
    first, second = core.open(), core.open()
    first.send(FollowPrefixes())
    first.add(0, [5] * 100, max_tokens=2, ignore_eos=True)
    settle(core)
    second.send(FollowPrefixes())
    settle(core)
    assert told_to(first) == told_to(second) != set()
    assert names([5] * 100, core, "salt") != names([5] * 100, core)


def test_what_nobody_takes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_events, "MOST_UNTAKEN", 3)
    core = SteppedCore(num_blocks=200, max_model_len=512)
    events = PrefixObserver(core.loop.scheduler.pool, core.loop.scheduler.hasher)
    core.open().add(0, [3 + each % 30 for each in range(400)], max_tokens=2, ignore_eos=True)
    settle(core)
    assert len(events) == 3
    assert events.num_left_out > 0
    assert len(events.take()[0]) == 3
    assert len(events) == 0
