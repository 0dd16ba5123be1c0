"""More or fewer engines of one's own, while they serve: those that come take requests as soon as they are ready, those
that leave finish what they have, or hand it on to others."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Protocol

import msgspec

from headrace.frontend.fleet.client import of_rank
from headrace.frontend.fleet.pool import Engine, EnginePool
from headrace.frontend.fleet.sources import Owned
from headrace.ipc.failure import EngineStartError, HeadraceError, OptionError

if TYPE_CHECKING:
    from headrace.core.options.engine_options import Options

MOST_ENGINES = 1024
DRAIN_GRACE_S = 30.0
"""How much longer than they have to finish their requests engines may take to leave."""
_LOOK_S = 0.05


class Scaler(Protocol):
    pool: EnginePool | None
    """Set before it is used."""

    async def scale(self, size: int, drain_timeout_s: float) -> None:
        """Until there are so many engines. Raises HeadraceError with the reason where there are not."""
        ...


class OwnScaler:
    """Of engines that are children of this process."""

    def __init__(self, options: Options, restarts: int) -> None:
        """As the engines that it began with were started."""
        self._options, self._restarts = options, restarts
        self.pool: EnginePool | None = None
        self._scaling = asyncio.Lock()

    async def scale(self, size: int, drain_timeout_s: float) -> None:
        pool = self.pool
        assert pool is not None, "it serves"
        check_size(size)
        async with self._scaling:
            own = [engine for engine in pool.engines if isinstance(engine.source, Owned)]
            if len(own) < size:
                await self._grow(pool, own, size)
            elif len(own) > size:
                await self._shrink(pool, own[size:], drain_timeout_s)

    async def _grow(self, pool: EnginePool, own: list[Engine], size: int) -> None:
        """Engines are added one after another: they share the machine's disk and cores while they start."""
        taken = {engine.index for engine in own}
        for rank in [each for each in range(size) if each not in taken]:
            options = of_rank(msgspec.structs.replace(self._options, data_parallel_size=size), rank)
            source = await asyncio.to_thread(_start, options, self._restarts)
            engine = pool.add(source, rank)
            while not engine.usable:
                if engine.task is None or engine.task.done():
                    why = engine.failure.message if engine.failure is not None else "it ended"
                    raise EngineStartError(f"the engine of rank {rank} did not start: {why}")
                await asyncio.sleep(_LOOK_S)

    async def _shrink(self, pool: EnginePool, leaving: list[Engine], drain_timeout_s: float) -> None:
        for engine in leaving:
            assert isinstance(engine.source, Owned), "the caller has chosen"
            engine.source.drain(drain_timeout_s)
        end_s = time.monotonic() + drain_timeout_s + DRAIN_GRACE_S
        while any(each in pool.engines for each in leaving) and time.monotonic() < end_s:
            await asyncio.sleep(_LOOK_S)
        left = [each.name for each in leaving if each in pool.engines]
        if left:
            raise HeadraceError(f"{', '.join(left)} did not leave within {drain_timeout_s + DRAIN_GRACE_S:g} s")


def check_size(size: int) -> None:
    """Raises OptionError."""
    if not 1 <= size <= MOST_ENGINES:
        raise OptionError(f"new_data_parallel_size is {size}; it must be 1 to {MOST_ENGINES}")


def _start(options: Options, restarts: int) -> Owned:
    from headrace.core.process.supervisor import start_engine

    return Owned(lambda: start_engine(options), start_engine(options), restarts=restarts)
