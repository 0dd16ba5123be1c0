"""Random histories of events for `SteppedCore`: requests that arrive and are aborted, turns of the loop, and resets of
the prefix cache."""

from __future__ import annotations

from typing import Any

from engine_parts import LAYERS, SteppedClient, SteppedCore
from hypothesis import strategies as st

from headrace.ipc.messages import Abort, ResetPrefixCache

REQUEST = {
    "prompt": st.lists(st.integers(3, 6), min_size=1, max_size=40),  # few token ids, so that prefixes repeat
    "max_tokens": st.integers(1, 30),
    "ignore_eos": st.booleans(),
    "logprobs": st.sampled_from([None, None, 2]),
    "prompt_logprobs": st.sampled_from([None, None, None, 0]),
    "output_interval": st.sampled_from([1, 1, 3, 99]),
}
LIMITS = {
    "num_blocks": st.integers(17, 40),
    "windows": st.sampled_from(LAYERS),
    "state_pages": st.sampled_from([1, 3]),
    "max_num_seqs": st.integers(1, 8),
    "max_num_batched_tokens": st.sampled_from([8, 16, 64]),
    "enable_prefix_caching": st.booleans(),
}


def events(max_size: int, most_turns: int = 5, **request: Any) -> Any:
    """A strategy for lists of (event, detail). `request` adds or replaces fields of REQUEST."""
    add = st.tuples(st.just("add"), st.fixed_dictionaries(REQUEST | request))
    return st.lists(
        st.one_of(
            add,
            add,
            st.tuples(st.just("turn"), st.integers(1, most_turns)),
            st.tuples(st.just("abort"), st.integers(0, 20)),
            st.tuples(st.just("reset"), st.none()),
        ),
        max_size=max_size,
    )


def play(core: SteppedCore, history: list[tuple[str, Any]]) -> tuple[SteppedClient, int, set[int]]:
    """Runs a history until the engine is idle, and checks that all blocks are free again.

    Returns the client, the number of requests that it sent, and the slots that it aborted."""
    client, num_added, aborted = core.open(), 0, set()
    for event, detail in history:
        if event == "add":
            client.add(num_added, **detail)
            num_added += 1
        elif event == "abort":
            client.send(Abort(slots=(detail,)))
            aborted.add(detail)
        elif event == "reset":
            client.send(ResetPrefixCache(call=1))
        else:
            for _ in range(detail):
                if not core.inbox.empty() or core.loop.has_work:
                    core.loop.turn()
                    core.loop.scheduler.check()
    core.run_until_idle()
    pool = core.loop.scheduler.pool
    assert pool.num_available == pool.num_blocks - 1
    return client, num_added, aborted
