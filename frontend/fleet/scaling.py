"""Changes the number of a server's own engines while they serve. New engines get requests as soon as they are ready;
removed ones finish their requests, or hand them over to others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import msgspec

from headrace.frontend.fleet.engine import Engine
from headrace.frontend.fleet.pool import EnginePool
from headrace.frontend.fleet.sources import Owned
from headrace.frontend.fleet.start import of_rank
from headrace.ipc.failure import EngineStartError, Failure, HeadraceError, OptionError
from headrace.ipc.process.host import host_memory, usable_cores
from headrace.ipc.process.proc import anonymous_bytes

if TYPE_CHECKING:
    from headrace.core.options.engine_options import Options
    from headrace.core.process.supervisor import Supervised, SupervisedChild

ENGINES_PER_CORE = 4
"""Beyond so many for each core of this machine, engines only wait for one another."""
DRAIN_GRACE_S = 30.0
"""Additional time for engines to exit, after their time to finish requests."""
_LOOK_S = 0.05


class Scaler(Protocol):
    """Changes the number of engines for an HTTP process."""

    async def scale(self, size: int, drain_timeout_s: float) -> None:
        """Waits until there are `size` engines. Raises HeadraceError with the reason if that fails, and OptionError for
        a number that cannot be."""
        ...


class OwnEngine(Protocol):
    """An engine of this program, among those that it scales."""

    @property
    def index(self) -> int:
        """Its data_parallel_rank."""
        ...

    @property
    def process(self) -> Supervised[Any]: ...
    @property
    def usable(self) -> bool:
        """It takes requests, as far as is known."""
        ...

    @property
    def has_ended(self) -> bool:
        """For good, or it has left as it was asked to."""
        ...

    @property
    def failure(self) -> Failure | None:
        """Why it does not serve, or did not start; None before that."""
        ...


E = TypeVar("E", bound=OwnEngine)


class OwnEngines(Protocol[E]):
    """A table of them, which forgets an engine that has left."""

    @property
    def engines(self) -> Sequence[E]: ...
    def add(self, options: Options, weights_path: str) -> E:
        """Begins to start an engine of these options."""
        ...

    async def remove(self, engine: E) -> None:
        """Ends its process if there is one, and forgets it."""
        ...


def serves(engine: OwnEngine) -> bool:
    """It takes requests, and its process has not ended, also where nothing has noticed its end yet."""
    return engine.usable and engine.process.runs


class EngineScaler(Generic[E]):
    """Changes the number of this program's engines, one change after another."""

    def __init__(self, table: OwnEngines[E], options: Options) -> None:
        """options: those with which the first engines were started."""
        self._table, self._options = table, options
        self._scaling = asyncio.Lock()
        self.on_begin: Callable[[int], None] = lambda size: None
        """Called with each number that there is room for, before anything is changed."""

    async def scale(self, size: int, drain_timeout_s: float) -> None:
        """Returns once `size` engines serve. Engines that have ended for good do not count, and go first; then those
        that are being restarted; then those of the highest ranks. Raises as a Scaler."""
        async with self._scaling:
            pids = [engine.process.pid for engine in self._table.engines if serves(engine)]
            await check_room(size, pids, self._options.data_parallel_size)
            self.on_begin(size)
            for engine in [each for each in self._table.engines if each.has_ended]:
                await self._table.remove(engine)
            own = list(self._table.engines)
            if len(own) < size:
                await self._grow(own, size)
            elif len(own) > size:
                by_state = sorted(own, key=lambda engine: (not serves(engine), engine.index))
                await self._shrink(by_state[size:], drain_timeout_s)
            await self._until_all_serve(size)

    async def _grow(self, own: Sequence[E], size: int) -> None:
        """Adds engines one after another, as starting engines share the machine's disk and cores. One that does not
        start is not kept."""
        taken = {engine.index for engine in own}
        weights_path = next((engine.process.weights_path for engine in own), "")
        for rank in [each for each in range(size) if each not in taken][: size - len(own)]:
            options = of_rank(msgspec.structs.replace(self._options, data_parallel_size=size), rank)
            engine = self._table.add(options, weights_path)
            while not serves(engine):
                if engine.failure is not None or engine.has_ended:
                    why = "it ended" if engine.failure is None else engine.failure.message
                    await self._table.remove(engine)
                    there = there_are(self._num_serving())
                    raise EngineStartError(f"the engine of rank {rank} did not start, so {there}: {why}")
                await asyncio.sleep(_LOOK_S)

    async def _shrink(self, leaving: Sequence[E], drain_timeout_s: float) -> None:
        """Drains those that serve, and ends those that do not. One that does not leave in time is ended too."""
        draining = [engine for engine in leaving if engine.usable]
        for engine in leaving:
            if engine in draining:
                await engine.process.drain(drain_timeout_s)
            else:
                await self._table.remove(engine)  # it is being restarted, and has no requests
        end_s = time.monotonic() + drain_timeout_s + DRAIN_GRACE_S
        while left := [each for each in draining if each in self._table.engines]:
            for engine in left:
                if engine.has_ended or time.monotonic() > end_s:  # killed before it said that it leaves; or it hangs
                    await self._table.remove(engine)
            await asyncio.sleep(_LOOK_S)

    async def _until_all_serve(self, size: int) -> None:
        """Waits for engines that are being restarted. Raises HeadraceError, with the number there is, if they do not
        serve in time or have ended for good."""
        end_s = time.monotonic() + self._options.startup_timeout
        while (num_serving := self._num_serving()) != size:
            own = self._table.engines
            if time.monotonic() > end_s or any(each.has_ended for each in own) or len(own) != size:
                why = next((each.failure.message for each in own if each.failure is not None), "one has ended")
                raise HeadraceError(f"{there_are(num_serving)}, and not {size}: {why}")
            await asyncio.sleep(_LOOK_S)

    def _num_serving(self) -> int:
        return sum(map(serves, self._table.engines))


class PoolEngines:
    """Engines that a pool of this process owns."""

    def __init__(self, pool: EnginePool, restarts: int) -> None:
        """restarts: how often in a row an engine is restarted."""
        self._pool, self._restarts = pool, restarts

    @property
    def engines(self) -> list[Engine]:
        return [engine for engine in self._pool.engines if isinstance(engine.source, Owned)]

    def add(self, options: Options, weights_path: str) -> Engine:
        from headrace.core.process.child import start_engine

        def start(path: str) -> SupervisedChild:
            return start_engine(options, weights_path=path)

        source = Owned(start, restarts=self._restarts, weights_path=weights_path)
        return self._pool.add(source, options.data_parallel_rank)

    async def remove(self, engine: Engine) -> None:
        await self._pool.remove(engine)


def there_are(num_engines: int) -> str:
    """Tells a client how many engines serve."""
    return f"there are {num_engines} engines" if num_engines != 1 else "there is 1 engine"


async def check_room(size: int, pids: Sequence[int], num_at_start: int) -> None:
    """Raises OptionError if this machine has not the cores or the memory for so many engines. As many as it was started
    with may always be there. pids: the engines that serve."""
    most = max(num_at_start, ENGINES_PER_CORE * usable_cores())
    if size > most:
        raise OptionError(
            f"new_data_parallel_size is {size}; the {usable_cores()} cores of this machine take at most {most} engines"
        )
    num_more = size - len(pids)
    if num_more > 0 and size > num_at_start:
        await asyncio.to_thread(_check_memory, size, num_more, pids)


def _check_memory(size: int, num_more: int, pids: Sequence[int]) -> None:
    each_bytes = max(map(anonymous_bytes, pids), default=0)
    available_bytes = host_memory().available_bytes
    if num_more * each_bytes > available_bytes:
        raise OptionError(
            f"new_data_parallel_size is {size}; {num_more} more engines take {num_more * each_bytes / 1e9:.1f} GB of "
            f"memory, if each takes as much as the largest one now, and this machine has {available_bytes / 1e9:.1f} GB"
        )
