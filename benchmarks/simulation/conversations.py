"""Simulates conversations of several turns at a fleet, to compare routing policies: prefix cache hit rate and balance.

A conversation begins with one of a few system prompts, and each turn sends all previous ones. The hit rate is compared
with that of a single unbounded cache, which holds every prompt that was sent to any engine.
"""

from __future__ import annotations

import asyncio
import random

import msgspec

from headrace.frontend.fleet.decisions import RouterOptions
from headrace.frontend.fleet.pool import EnginePool
from headrace.frontend.request.checks import check
from headrace.frontend.request.parameters.sampling_params import RequestOutputKind, SamplingParams
from headrace.frontend.request.prompts import Prompt
from headrace.ipc.codec import Tensor
from headrace.ipc.prefix_names import CHUNK_TOKENS, PrefixKey, prefix_names
from simulation.engines import MODEL, EngineShape, SimulatedEngine
from simulation.policies import POLICIES
from simulation.virtual_time import run_virtually
from simulation.world import EngineSource

_VOCABULARY = 30_000


class Conversations(msgspec.Struct, frozen=True, kw_only=True):
    """A scenario. Lengths are means in tokens, times are in virtual seconds."""

    num_engines: int = 16
    num_frontends: int = 4
    num_users: int = 1600
    """Each user has one conversation after another."""
    seconds: float = 100.0
    turns: int = 6
    system_prompts: int = 20
    """Their number. The k-th is chosen in proportion to 1 / k (Zipf)."""
    system_tokens: int = 1024
    user_tokens: int = 100
    answer_tokens: int = 200
    thinking_s: float = 8.0
    """Mean time from an answer to the next turn."""
    engine: EngineShape = EngineShape(max_num_seqs=64, step_s=0.015, row_s=0.0002, prompt_tokens_per_s=10_000.0)
    """Roughly a model of 8 billion parameters on one GPU."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    policy: str
    seed: int
    num_requests: int
    hit_rate: float
    """Share of prompt tokens that came from the engines' prefix caches."""
    infinite_hit_rate: float
    """The same for a single unbounded cache."""
    share: float
    """hit_rate / infinite_hit_rate."""
    busiest: float
    """The busiest engine's computing time as a multiple of the mean."""
    mean_answer_s: float
    """Mean time from a turn's submission to its end."""


def converse(policy: str, seed: int, scenario: Conversations) -> Outcome:
    """Runs one simulation. Equal arguments give equal outcomes."""
    return run_virtually(_Talk(policy, seed, scenario).run())


class _Talk:
    def __init__(self, policy: str, seed: int, scenario: Conversations) -> None:
        self._policy, self._seed, self._scenario = policy, seed, scenario
        self._seen: set[int] = set()
        self._num_seen_tokens = self._num_requests = 0
        self._answers_s = 0.0
        chance = random.Random(f"{seed} system")
        self._systems = [_tokens(chance, scenario.system_tokens) for _ in range(scenario.system_prompts)]
        self._weights = [1 / (number + 1) for number in range(scenario.system_prompts)]

    async def run(self) -> Outcome:
        scenario, self._loop = self._scenario, asyncio.get_running_loop()
        engines = [
            SimulatedEngine(f"engine-{index}", scenario.engine, random.Random(f"{self._seed} engine {index}"))
            for index in range(scenario.num_engines)
        ]
        self._pools = []
        for index in range(scenario.num_frontends):
            chance = random.Random(f"{self._seed} link {index}")
            pool = EnginePool([EngineSource(engine, chance) for engine in engines])
            pool.router = POLICIES[self._policy](RouterOptions(), random.Random(f"{self._seed} router {index}"))
            pool.start()
            await pool.started.wait()
            self._pools.append(pool)
        self._end_s = self._loop.time() + scenario.seconds
        await asyncio.gather(*(self._use(number) for number in range(scenario.num_users)))
        for pool in self._pools:
            await pool.close(0.0)
        num_tokens = sum(each.num_prompt_tokens for each in engines)
        busy_s = [each.busy_s for each in engines]
        hits, seen = (
            sum(each.num_cached_tokens for each in engines) / num_tokens,
            self._num_seen_tokens / num_tokens,
        )
        return Outcome(
            policy=self._policy,
            seed=self._seed,
            num_requests=self._num_requests,
            hit_rate=hits,
            infinite_hit_rate=seen,
            share=hits / seen,
            busiest=max(busy_s) / (sum(busy_s) / len(busy_s)),
            mean_answer_s=self._answers_s / self._num_requests,
        )

    async def _use(self, user: int) -> None:
        scenario, chance = self._scenario, random.Random(f"{self._seed} user {user}")
        await asyncio.sleep(chance.uniform(0.0, 2 * scenario.thinking_s))
        number = 0
        while self._loop.time() < self._end_s:
            said = list(chance.choices(self._systems, self._weights)[0])
            for _ in range(chance.randint(1, 2 * scenario.turns - 1)):
                said += _tokens(chance, chance.randint(1, 2 * scenario.user_tokens))
                said += await self._turn(f"{user}-{number}", said, chance)
                number += 1
                if self._loop.time() >= self._end_s:
                    return
                await asyncio.sleep(chance.expovariate(1 / scenario.thinking_s))

    async def _turn(self, request_id: str, prompt: list[int], chance: random.Random) -> list[int]:
        params = SamplingParams(
            max_tokens=chance.randint(1, 2 * self._scenario.answer_tokens),
            seed=chance.getrandbits(40),
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
            detokenize=False,
        )
        self._note(prompt)
        pool, began_s = chance.choice(self._pools), self._loop.time()  # a load balancer without session affinity
        stream = pool.submit(check(request_id, Prompt(token_ids=list(prompt)), params, pool), model=MODEL)
        output = await stream.final()
        self._answers_s += self._loop.time() - began_s
        self._num_requests += 1
        return list(output.outputs[0].token_ids)

    def _note(self, prompt: list[int]) -> None:
        """Counts the prompt's tokens that the unbounded cache has, and adds the prompt to it."""
        keys = prefix_names(bytes(Tensor.of("int32", prompt).data), PrefixKey(), CHUNK_TOKENS)
        known = 0
        while known < len(keys) and keys[known] in self._seen:
            known += 1
        self._num_seen_tokens += min(known * CHUNK_TOKENS, len(prompt) - 1)
        self._seen.update(keys)


def _tokens(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(10, _VOCABULARY) for _ in range(count)]
