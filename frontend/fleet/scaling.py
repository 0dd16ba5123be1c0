"""Changes the number of a server's own engines while they serve. New engines get requests as soon as they are ready;
removed ones finish their requests, or hand them over to others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from headrace.frontend.fleet.engine import Engine
from headrace.frontend.fleet.pool import EnginePool
from headrace.frontend.fleet.sources import EngineChild, Owned
from headrace.frontend.fleet.start import of_rank
from headrace.ipc.failure import EngineStartError, HeadraceError, OptionError
from headrace.ipc.process.host import host_memory, usable_cores
from headrace.ipc.process.proc import anonymous_bytes

if TYPE_CHECKING:
    from headrace.core.options.engine_options import Options

MOST_ENGINES = 1024
ENGINES_PER_CORE = 4
"""Beyond so many for each core of this machine, engines only wait for one another."""
DRAIN_GRACE_S = 30.0
"""Additional time for engines to exit, after their time to finish requests."""
_LOOK_S = 0.05


class Scaler(Protocol):
    pool: EnginePool | None
    """Set before the scaler is used."""

    async def scale(self, size: int, drain_timeout_s: float) -> None:
        """Waits until there are `size` engines. Raises HeadraceError with the reason if that fails."""
        ...


class OwnScaler:
    """Scales engines that are child processes of this process."""

    def __init__(self, options: Options, restarts: int) -> None:
        """The arguments with which the first engines were started."""
        self._options, self._restarts = options, restarts
        self.pool: EnginePool | None = None
        self._scaling = asyncio.Lock()

    async def scale(self, size: int, drain_timeout_s: float) -> None:
        """Returns once `size` engines serve. Engines that have ended for good do not count, and go first; then those
        that are being restarted; then those of the highest ranks."""
        pool = self.pool
        assert pool is not None, "it serves"
        async with self._scaling:
            await check_room(size, pool, self._options.data_parallel_size)
            for engine in [each for each in _own(pool) if each.has_ended]:
                await pool.remove(engine)
            own = _own(pool)
            if len(own) < size:
                await self._grow(pool, own, size)
            elif len(own) > size:
                by_state = sorted(own, key=lambda engine: (not _serves(engine), engine.index))
                await self._shrink(pool, by_state[size:], drain_timeout_s)
            await self._until_all_serve(pool, size)

    async def _grow(self, pool: EnginePool, own: list[Engine], size: int) -> None:
        """Adds engines one after another, as starting engines share the machine's disk and cores. One that does not
        start is not kept."""
        taken = {engine.index for engine in own}
        weights_path = next((each.source.weights_path for each in own if isinstance(each.source, Owned)), "")
        for rank in [each for each in range(size) if each not in taken][: size - len(own)]:
            options = of_rank(msgspec.structs.replace(self._options, data_parallel_size=size), rank)
            try:
                source = await asyncio.to_thread(_start, options, self._restarts, weights_path)
            except HeadraceError as error:
                raise _not_started(pool, rank, str(error)) from error
            engine = pool.add(source, rank)
            while not engine.usable:
                if engine.failure is not None or engine.has_ended:
                    why = engine.failure.message if engine.failure is not None else "it ended"
                    await pool.remove(engine)
                    raise _not_started(pool, rank, why)
                await asyncio.sleep(_LOOK_S)

    async def _shrink(self, pool: EnginePool, leaving: list[Engine], drain_timeout_s: float) -> None:
        """Drains those that serve, and ends those that do not. One that does not leave in time is ended too."""
        draining = []
        for engine in leaving:
            if engine.usable and isinstance(engine.source, Owned):
                engine.source.drain(drain_timeout_s)
                draining.append(engine)
            else:
                await pool.remove(engine)  # it is being restarted, and has no requests
        end_s = time.monotonic() + drain_timeout_s + DRAIN_GRACE_S
        while left := [each for each in draining if each in pool.engines]:
            for engine in left:
                if engine.has_ended or time.monotonic() > end_s:  # killed before it said that it leaves; or it hangs
                    await pool.remove(engine)
            await asyncio.sleep(_LOOK_S)

    async def _until_all_serve(self, pool: EnginePool, size: int) -> None:
        """Waits for engines that are being restarted. Raises HeadraceError, with the number there is, if they do not
        serve in time or have ended for good."""
        end_s = time.monotonic() + self._options.startup_timeout
        while _num_serving(pool) != size:
            if time.monotonic() > end_s or any(each.has_ended for each in _own(pool)) or len(_own(pool)) != size:
                why = next((each.failure.message for each in _own(pool) if each.failure is not None), "one has ended")
                raise HeadraceError(f"{there_are(_num_serving(pool))}, and not {size}: {why}")
            await asyncio.sleep(_LOOK_S)


def _own(pool: EnginePool) -> list[Engine]:
    return [engine for engine in pool.engines if isinstance(engine.source, Owned)]


def _num_serving(pool: EnginePool) -> int:
    return sum(map(_serves, _own(pool)))


def _serves(engine: Engine) -> bool:
    """It takes requests, and its process has not ended, also where the connection's end is not noticed yet."""
    return engine.usable and isinstance(engine.source, Owned) and engine.source.runs


def _not_started(pool: EnginePool, rank: int, why: str) -> EngineStartError:
    return EngineStartError(f"the engine of rank {rank} did not start, so {there_are(_num_serving(pool))}: {why}")


def there_are(num_engines: int) -> str:
    """Tells a client how many engines serve."""
    return f"there are {num_engines} engines" if num_engines != 1 else "there is 1 engine"


async def check_room(size: int, pool: EnginePool, num_at_start: int) -> None:
    """Raises OptionError if this machine has not the cores or the memory for so many engines. As many as it was started
    with may always be there."""
    clients = [engine.client for engine in pool.engines if engine.client is not None and engine.usable]
    most = max(num_at_start, ENGINES_PER_CORE * usable_cores())
    if size > most:
        raise OptionError(
            f"new_data_parallel_size is {size}; the {usable_cores()} cores of this machine take at most {most} engines"
        )
    num_more = size - len(clients)
    if num_more > 0 and size > num_at_start:
        pids = [client.welcome.pid for client in clients]
        await asyncio.to_thread(_check_memory, size, num_more, pids)


def _check_memory(size: int, num_more: int, pids: Sequence[int]) -> None:
    each_bytes = max(map(anonymous_bytes, pids), default=0)
    available_bytes = host_memory().available_bytes
    if num_more * each_bytes > available_bytes:
        raise OptionError(
            f"new_data_parallel_size is {size}; {num_more} more engines take {num_more * each_bytes / 1e9:.1f} GB of "
            f"memory, if each takes as much as the largest one now, and this machine has {available_bytes / 1e9:.1f} GB"
        )


def _start(options: Options, restarts: int, weights_path: str) -> Owned:
    from headrace.core.process.child import start_engine

    def start(path: str) -> EngineChild:
        return start_engine(options, weights_path=path)

    return Owned(start, start(weights_path), restarts=restarts)
