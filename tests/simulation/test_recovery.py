"""An engine that was slow for a while and is well again, on virtual time: which part of the requests it gets."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from simulation.engines import EngineShape, SimulatedEngine
from simulation.virtual_time import run_virtually
from simulation.world import EngineSource
from thinned import every

from headrace.frontend.fleet.pool import EnginePool
from headrace.frontend.request.checks import check
from headrace.frontend.request.parameters.sampling_params import SamplingParams
from headrace.frontend.request.prompts import Prompt

SHAPE = EngineShape(max_num_seqs=64, step_s=0.004, row_s=0.0004)
WAVE = 60
FAIR = range(25, 36)
"""Which part of a wave each of two equal engines should get."""


class Fleet:
    """Two engines, and the HTTP processes before them. Make and use it in a virtual loop."""

    def __init__(self, *, num_frontends: int = 1) -> None:
        self.engines = [SimulatedEngine(f"engine-{rank}", SHAPE, random.Random(rank)) for rank in range(2)]
        self._loop = asyncio.get_running_loop()
        self.chance, self._numbers = random.Random(3), iter(range(1 << 30))
        links = random.Random(4)
        self.pools = [
            EnginePool([EngineSource(each, links) for each in self.engines], chance=random.Random(index))
            for index in range(num_frontends)
        ]

    async def start(self) -> None:
        for pool in self.pools:
            pool.start()
            await pool.started.wait()

    async def close(self) -> None:
        for pool in self.pools:
            await pool.close(0.0)

    async def wave(self, num_tokens: int = 32) -> int:
        """Sends equal requests at once, and waits for their answers. Returns how many the first engine was sent."""
        sent: Counter[str] = Counter()
        streams = []
        for number in range(WAVE):
            pool = self.pools[number % len(self.pools)]
            prompt = [self.chance.randrange(10, 30_000) for _ in range(24)]
            params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, detokenize=False)
            streams.append(pool.submit(check(f"{next(self._numbers)}", Prompt(token_ids=prompt), params, pool)))
            sent[streams[-1].route.member.facts.name] += 1
        await asyncio.gather(*(each.final() for each in streams))
        return sent["engine 0"]

    async def waves(self, seconds: float, *, num_tokens: int = 32, every_s: float = 0.0) -> list[int]:
        """Waves for so long, with a pause of `every_s` after each. Returns the first engine's part of each."""
        parts, end_s = [], self._loop.time() + seconds
        while self._loop.time() < end_s:
            parts.append(await self.wave(num_tokens))
            await asyncio.sleep(every_s)
        return parts

    async def stop_and_continue(self, seconds: float) -> None:
        """Stops the first engine (SIGSTOP) for most of the time, while requests arrive."""
        load, end_s = asyncio.ensure_future(self.waves(seconds)), self._loop.time() + seconds
        while self._loop.time() < end_s:
            self.engines[0].freeze()
            await asyncio.sleep(0.8)
            self.engines[0].thaw()
            await asyncio.sleep(0.02)
        await load

    async def slow_down(self, seconds: float, times: float) -> None:
        """Makes the first engine slower while requests arrive."""
        self.engines[0].slowness = times
        await self.waves(seconds)
        self.engines[0].slowness = 1.0


@contextlib.asynccontextmanager
async def fleet_of(num_frontends: int = 1) -> AsyncIterator[Fleet]:
    """Before which each engine has had its part of some waves."""
    fleet = Fleet(num_frontends=num_frontends)
    await fleet.start()
    assert (await fleet.waves(1.0, every_s=0.5))[0] in FAIR
    yield fleet
    await fleet.close()


@pytest.mark.parametrize("num_frontends", [pytest.param(1, marks=pytest.mark.system), 2])
@pytest.mark.parametrize(("num_tokens", "every_s"), every(3, [(6, 0.5), (6, 3.0), (32, 3.0), (128, 4.0)]))
def test_an_engine_that_was_stopped_again_and_again_gets_its_part_half_a_minute_later(
    num_frontends: int, num_tokens: int, every_s: float
) -> None:
    async def run() -> tuple[list[int], list[int]]:
        async with fleet_of(num_frontends) as fleet:
            await fleet.stop_and_continue(25.0)
            return (
                await fleet.waves(30.0, num_tokens=num_tokens, every_s=every_s),
                await fleet.waves(12.0, num_tokens=num_tokens, every_s=every_s),
            )

    before, after = run_virtually(run())
    assert before[0] <= 5, "or the test shows nothing"
    assert all(each in FAIR for each in after), (before, after)


@pytest.mark.parametrize("num_frontends", [1, 2])
def test_it_gets_its_part_of_the_first_requests_after_a_time_without_any(num_frontends: int) -> None:
    async def run() -> list[int]:
        async with fleet_of(num_frontends) as fleet:
            await fleet.stop_and_continue(25.0)
            await asyncio.sleep(40.0)
            return await fleet.waves(10.0, every_s=1.5)

    parts = run_virtually(run())
    assert all(each in FAIR for each in parts), parts


@pytest.mark.parametrize("times", [6.0, 10.0])
def test_what_short_waves_measure_of_an_engine_that_gets_few_counts(times: float) -> None:
    """Each wave is over before a second tick, and the next one begins after more than a second."""

    async def run() -> list[int]:
        async with fleet_of() as fleet:
            await fleet.slow_down(25.0, times)
            return await fleet.waves(20.0, num_tokens=6, every_s=2.0)

    parts = run_virtually(run())
    assert parts[0] < 20, "or the test shows nothing"
    assert all(each in FAIR for each in parts[-2:]), parts


@pytest.mark.parametrize(("times", "most"), [(3.0, 20), (10.0, 8)])
def test_an_engine_that_is_slow_all_the_time_gets_less_all_the_time(times: float, most: int) -> None:
    async def run() -> list[int]:
        async with fleet_of() as fleet:
            fleet.engines[0].slowness = times
            return await fleet.waves(60.0, every_s=5.0)

    parts = run_virtually(run())
    assert max(parts[2:]) <= most, parts


def test_bursts_do_not_find_out_again_and_again_that_an_engine_is_slow() -> None:
    async def run() -> list[int]:
        async with fleet_of() as fleet:
            fleet.engines[0].slowness = 3.0
            return await fleet.waves(280.0, every_s=40.0)

    parts = run_virtually(run())
    assert parts[1] in FAIR, "it may be well again"
    assert max(parts[-2:]) <= 22, parts
