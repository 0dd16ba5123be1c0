"""Models with recurrent layers: what rows hold, which states are kept, and that no row ever computes from a wrong one.

The null executor imitates states exactly (`executor/testing/state_check.py`): a state that is stale, of other tokens or
overwritten is an error when a step reads it.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from engine_parts import EOS, STATE, VOCAB_SIZE, SteppedClient, SteppedCore

from headrace.executor.testing.null import NullExecutor, NullModel
from headrace.ipc.messages import Abort, ResetPrefixCache

MODELS = ((None, STATE), (STATE,), (None, 9, STATE), (5, STATE))


class TwoSteps(NullExecutor):
    max_steps_in_flight = 2
    async_by_default = True


def core_of(windows: tuple[Any, ...] = (None, STATE), **changes: Any) -> SteppedCore:
    values = {"num_blocks": 400, "max_model_len": 400, "max_num_batched_tokens": 64, "windows": windows, **changes}
    return SteppedCore(**values)


def text(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, count).tolist()


def answer(core: SteppedCore, client: SteppedClient, slot: int, prompt: list[int], **sampling: Any) -> int:
    """Runs one request; returns how many of its tokens were found in the cache."""
    client.add(slot, prompt, **{"max_tokens": 1, "ignore_eos": True, **sampling})
    core.run_until_idle()
    return client.cached()[slot]


# --- what is found ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("windows", MODELS)
@pytest.mark.parametrize("pages", [1, 3])
def test_the_same_prompt_is_found_but_for_its_last_block(windows: tuple[Any, ...], pages: int) -> None:
    core = core_of(windows, state_pages=pages)
    client = core.open()
    for slot, (length, cached) in enumerate([(50, 48), (52, 48), (53, 52), (4, 0), (5, 4)]):
        assert answer(core, client, 2 * slot, text(length, length)) == 0
        assert answer(core, client, 2 * slot + 1, text(length, length)) == cached


# --- exactness --------------------------------------------------------------------------------------------------


class Conversations:
    """Requests that begin as others did: with a shared part, with all of an earlier request, or with its answer too."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._stems = [text(seed + each, 40) for each in range(3)]
        self.prompts: list[list[int]] = []

    def next(self, answers: dict[int, list[int]]) -> list[int]:
        rng = self._random
        if self.prompts and rng.random() < 0.4:
            slot = rng.randrange(len(self.prompts))
            begin = self.prompts[slot] + answers.get(slot, [])
        else:
            begin = rng.choice(self._stems)
        begin = begin[: rng.randint(1, len(begin))] if rng.random() < 0.5 else begin
        prompt = (begin + text(rng.randrange(1000), rng.randint(0, 9)))[:60]
        self.prompts.append(prompt)
        return prompt


def play(core: SteppedCore, seed: int, num_requests: int, num_resets: int = 1) -> SteppedClient:
    """Requests arrive and are aborted at random while steps run. Everything is audited after each step."""
    rng, conversations, client = random.Random(seed), Conversations(seed), core.open()
    while len(conversations.prompts) < num_requests:
        for _ in range(rng.choice([0, 1, 1, 3])):
            slot, prompt = len(conversations.prompts), conversations.next(client.tokens())
            client.add(slot, prompt, max_tokens=rng.choice([1, 5, 40]), ignore_eos=rng.random() < 0.5)
        if rng.random() < 0.05:
            client.send(Abort(slots=(rng.randrange(len(conversations.prompts) or 1),)))
        if rng.random() < num_resets / num_requests:
            client.send(ResetPrefixCache(call=1))
        for _ in range(rng.randint(1, 8)):
            if not core.inbox.empty() or core.loop.has_work:
                core.loop.turn()
                core.loop.scheduler.check()
    core.run_until_idle()
    pool = core.loop.scheduler.pool
    assert pool.num_available == pool.num_blocks - 1
    return client


@pytest.mark.parametrize("executor", [NullExecutor, TwoSteps])
@pytest.mark.parametrize("windows", MODELS)
def test_no_row_computes_from_a_state_that_is_not_its_own(
    windows: tuple[Any, ...], executor: type[NullExecutor]
) -> None:
    cached = preempted = 0
    for seed, speculation in enumerate(("none", "ngram", "suffix", "rank")):
        core = random_core(windows, executor, seed, speculation)
        play(core, seed, 25)
        cached += core.loop.scheduler.num_cached_prompt_tokens
        preempted += core.loop.scheduler.num_preemptions
    assert cached > 0
    assert preempted > 0 or None not in windows


def random_core(windows: tuple[Any, ...], executor: type[NullExecutor], seed: int, speculation: str) -> SteppedCore:
    """An engine whose cache holds few requests, with limits by chance."""
    rng = random.Random(seed)
    model = NullModel(
        vocab_size=VOCAB_SIZE,
        eos_token_id=EOS,
        check=True,
        eos_after_tokens=rng.choice([0, 3]),
        cycle_tokens=0 if speculation == "none" else 3,
        num_drafts=3 if speculation == "rank" else 0,
    )
    options: dict[str, Any] = {"num_blocks": rng.choice([17, 25, 40]), "state_pages": rng.choice([1, 3])}
    options |= {"max_num_batched_tokens": rng.choice([8, 16, 64]), "max_num_seqs": rng.choice([2, 8])}
    if speculation in ("ngram", "suffix"):
        options["speculative_config"] = {"method": speculation, "num_speculative_tokens": 4}
    return SteppedCore(model, executor, windows=windows, **options)
