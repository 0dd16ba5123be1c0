"""`FleetClient`: several engine-cores as one, with the interface of a `CoreClient`, for LLM and AsyncLLM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.frontend.client.client import CoreClient
from headrace.frontend.client.control import QUICK_S, AsyncControls, Call
from headrace.frontend.client.own_engine import STOP_DEADLINE_S
from headrace.frontend.client.request import RequestStream
from headrace.frontend.fleet.decisions import ANYWHERE, Affinity, RouterOptions
from headrace.frontend.fleet.discovery import Discovery
from headrace.frontend.fleet.pool import HELD_S, EnginePool
from headrace.frontend.fleet.sources import EngineProcess, Owned, Source
from headrace.frontend.request.parameters.pooling_params import PoolingParams
from headrace.frontend.request.parameters.sampling_params import SamplingParams
from headrace.frontend.request.parameters.thinking import check_reasoning
from headrace.frontend.request.prompts import Prompt
from headrace.frontend.text.tokenizer import Tokenizer
from headrace.ipc.control import ExtensionAnswers
from headrace.ipc.failure import EngineDeadError, Failure, HeadraceError, OptionError
from headrace.ipc.messages import EngineStats, ExpertBalance, GetStats, Welcome

if TYPE_CHECKING:
    from headrace.core.options.engine_options import Options

logger = logging.getLogger(__name__)
_LOOK_S = 0.1
RESTARTS = 10
"""How often in a row a dead engine is restarted, if there are several."""


def with_meeting(options: Options) -> Options:
    """Adds a name by which engines that share experts find each other, now and after restarts. Only for engines that
    all run on this machine."""
    shares = options.data_parallel_size > 1 and options.enable_expert_parallel
    if not shares or options.data_parallel_meeting or options.data_parallel_backend == "ray":
        return options
    return msgspec.structs.replace(options, data_parallel_meeting=secrets.token_hex(8))


def start_ranks(
    options: Options, ranks: Sequence[int] | None = None, new_address: Callable[[], str] = lambda: ""
) -> list[EngineProcess]:
    """Starts all engines of data_parallel_size, or those of `ranks`; they divide this machine among them.

    new_address: returns the address for each to listen at; "" lets the engine choose. Raises OptionError for options
    that only a frontend can check, and EngineStartError.
    """
    check_reasoning(options)
    if ranks is None and options.num_engines_here != options.data_parallel_size:
        raise OptionError(
            f"data_parallel_size_local={options.data_parallel_size_local}: all of data_parallel_size are started here; "
            "`headrace serve` can start some of them, and find those of other hosts"
        )
    if ranks is None and options.data_parallel_rank:
        raise OptionError(
            f"data_parallel_rank={options.data_parallel_rank}: all of data_parallel_size are started here; "
            "`headrace serve` and engine-core start one by its rank, and a request names the one that it is for"
        )
    if options.data_parallel_backend == "ray":
        from headrace.core.process.ray_engines import RayFleet

        fleet = RayFleet(options)
        return [fleet.start(rank) for rank in range(options.data_parallel_size)]
    from headrace.core.process.child import start_engine

    children: list[EngineProcess] = []
    try:
        for rank in range(options.data_parallel_size) if ranks is None else ranks:
            children.append(start_engine(of_rank(options, rank), new_address()))
    except BaseException:
        for child in children:
            child.kill()
        raise
    return children


def of_rank(options: Options, rank: int) -> Options:
    """The options of the engine of this rank."""
    return msgspec.structs.replace(options, data_parallel_rank=rank)


def owned_ranks(
    options: Options, children: Sequence[EngineProcess], restarts: int, ranks: Sequence[int] | None = None
) -> list[Owned]:
    """The sources of started engines; each restarts its engine under the same rank."""
    from headrace.core.process.child import start_engine
    from headrace.core.process.ray_engines import RayEngine

    def starter(rank: int, first: EngineProcess) -> Callable[[str], EngineProcess]:
        if isinstance(first, RayEngine):
            return first.again
        return lambda weights_path: start_engine(of_rank(options, rank), weights_path=weights_path)

    of_children = zip(range(len(children)) if ranks is None else ranks, children, strict=True)
    return [Owned(starter(rank, child), child, restarts=restarts, rank=rank) for rank, child in of_children]


class FleetClient(AsyncControls):
    """Everything runs in one asyncio loop. Commands go to every engine."""

    def __init__(
        self,
        sources: Sequence[Source],
        options: RouterOptions | None = None,
        coordinators: Sequence[str] = (),
        peer_timeout_s: float | None = None,
    ) -> None:
        """coordinators: addresses of coordinators whose engines are used in addition to those of `sources`."""
        self._sources, self._options = sources, options
        self._coordinators, self._peer_timeout_s = coordinators, peer_timeout_s
        self._pool: EnginePool | None = None
        self._last_client: CoreClient | None = None

    async def start(self, timeout_s: float | None = None) -> None:
        """Waits until all engines are ready, or, with coordinators, the first one.

        Raises HeadraceError if an engine does not start, or none is found in time; all engines are stopped then.
        """
        discovery = Discovery(self._coordinators, self._peer_timeout_s) if self._coordinators else None
        self._pool = pool = EnginePool(self._sources, self._options, discovery=discovery)
        pool.on_death, pool.on_return = _say_ended, _say_returned
        pool.start()
        waits = [asyncio.create_task(event.wait()) for event in (pool.started, pool.dead)]
        try:
            limit_s = timeout_s if self._coordinators else None
            await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if not pool.started.is_set():
                if not pool.dead.is_set():
                    at = ", ".join(self._coordinators)
                    raise EngineDeadError(f"no engine was found within {limit_s:g} s by the coordinator at {at}")
                assert pool.failure is not None, "it is dead for a reason"
                are_own = any(source.is_own for source in self._sources)
                raise (HeadraceError if are_own else EngineDeadError).from_failure(pool.failure)
            self._last_client = next((each.client for each in pool.engines if each.client is not None), None)
        except BaseException:
            await self.close()
            raise
        finally:
            for wait in waits:
                wait.cancel()

    @property
    def pool(self) -> EnginePool:
        if self._pool is None:
            raise EngineDeadError("the engines have not started")
        return self._pool

    @property
    def _by_rank(self) -> dict[int, CoreClient]:
        clients = {engine.index: engine.client for engine in self.pool.engines if engine.client and engine.usable}
        if not clients:
            raise EngineDeadError.from_failure(self.failure or Failure(message="no engine is there now"))
        return clients

    @property
    def _clients(self) -> list[CoreClient]:
        return list(self._by_rank.values())

    @property
    def _some_client(self) -> CoreClient:
        """An engine's client, of one that has gone if none is there now but may be again. Raises EngineDeadError."""
        try:
            self._last_client = self._clients[0]
        except EngineDeadError:
            if self._last_client is None or self.failure is not None:
                raise
        return self._last_client

    @property
    def welcome(self) -> Welcome:
        """Of the first available engine; all accept the same requests. Of the last one while none is there."""
        return self._some_client.welcome

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._some_client.tokenizer

    @property
    def failure(self) -> Failure | None:
        """Why no engine is left and none will return; None while there is one, or one may return."""
        return self._pool.failure if self._pool is not None else None

    @property
    def is_usable(self) -> bool:
        """Whether an engine is there now."""
        return any(engine.usable for engine in self.pool.engines)

    async def until_usable(self) -> None:
        """Waits until an engine is there, as long as requests that had one do (HELD_S), and while one may return."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HELD_S):
                while not self.is_usable and any(engine.source.waits_alone for engine in self.pool.engines):
                    await asyncio.sleep(_LOOK_S)

    def submit(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        priority: int = 0,
        *,
        max_tokens: int | None = None,
        rank: int | None = None,
    ) -> RequestStream:
        """As CoreClient.submit, to the engine of this data_parallel_rank, or to any."""
        affinity = ANYWHERE if rank is None else Affinity(rank=rank)
        stream = self.pool.submit(
            request_id, prompt, params, priority, model=self.pool.names[0], max_tokens=max_tokens, affinity=affinity
        )
        if self.request_counts is not None:
            engine = self.pool.engine_of(stream)
            self.request_counts.follow(stream, engine.index if engine is not None else 0)
        return stream

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """Ends these requests with finish_reason `abort`; ids that are not running are ignored."""
        self.pool.abort([request_ids] if isinstance(request_ids, str) else list(request_ids))

    def abort_stream(self, stream: RequestStream) -> None:
        self.pool.abort_stream(stream)

    def check_alive(self) -> None:
        """Raises EngineDeadError if no engine accepts requests."""
        self._clients[0].check_alive()

    async def engine(self) -> Welcome:
        return self.welcome

    async def call(self, kind: type[Call], timeout_s: float | None = QUICK_S, **fields: Any) -> Any:
        """Calls every engine and combines the answers: counts are summed, and workers' lists joined by rank."""
        answers = await asyncio.gather(*(client.call(kind, timeout_s, **fields) for client in self._clients))
        if kind is GetStats:
            return _summed(answers)
        if isinstance(answers[0], ExtensionAnswers):
            payloads = [payload for answer in answers for payload in answer.payloads]
            return msgspec.structs.replace(answers[0], payloads=tuple(payloads))
        return answers[0]

    async def stats_by_engine(self) -> dict[int, EngineStats]:
        clients = self._by_rank
        answers = await asyncio.gather(*(client.get_stats() for client in clients.values()))
        return dict(zip(clients, answers, strict=True))

    async def close(self) -> None:
        """Aborts running requests, and stops the engines. May be called again."""
        if self._pool is not None:
            await self._pool.close(STOP_DEADLINE_S)


def _say_ended(failure: Failure) -> None:
    logger.warning("an engine has ended: %s", failure.message)


def _say_returned(address: str) -> None:
    logger.warning("the engine at %s is there again", address)


def _summed(answers: Sequence[EngineStats]) -> EngineStats:
    total: EngineStats = _sum(answers)
    return total


def _sum(values: Sequence[Any]) -> Any:
    values = [value for value in values if value is not None]
    if not values:
        return None
    first = values[0]
    if isinstance(first, ExpertBalance):
        return min(values, key=lambda balance: balance.avg)  # the engine whose ranks are least balanced
    if isinstance(first, bool):
        return any(values)
    if isinstance(first, msgspec.Struct):
        names = first.__struct_fields__
        return type(first)(**{name: _sum([getattr(each, name) for each in values]) for name in names})
    if isinstance(first, dict):
        keys = dict.fromkeys(key for each in values for key in each)
        return {key: sum(each.get(key, 0) for each in values) for key in keys}
    if isinstance(first, tuple):
        return tuple(map(sum, zip(*values, strict=True)))
    return sum(values)
