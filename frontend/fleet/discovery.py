"""Adds the engines that coordinators report to a pool, and removes those that leave.

Requests go directly from frontend to engine. A frontend reconnects to a coordinator that dies; in the meantime requests
are served as before.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.frontend.client.transport import Transport, ZmqTransport
from headrace.frontend.fleet.directory import Change, Directory, Found, Left, Loads
from headrace.frontend.fleet.sources import Discovered, Source
from headrace.ipc.coordination import Denied, EngineEntry, FromCoordinator, Members, Unfollow
from headrace.ipc.failure import Failure, let_interrupts_pass
from headrace.ipc.transport.sockets import is_ipv6

logger = logging.getLogger(__name__)
LOOK_EVERY_S = 1.0


class Fleet(Protocol):
    """The part of EnginePool that Discovery uses."""

    def add(self, source: Source, rank: int | None = None) -> object: ...
    def let_go(self, address: str, *, may_return: bool) -> None: ...
    def note_loads(self, loads: Loads) -> None: ...


class Discovery:
    """Subscribes to coordinators, in a frontend's asyncio loop."""

    def __init__(
        self,
        coordinators: Sequence[str],
        peer_timeout_s: float | None = None,
        *,
        connect: Callable[[str], Transport] | None = None,
        source_of: Callable[[str], Source] | None = None,
        forgotten_return: bool = False,
    ) -> None:
        """peer_timeout_s: how long engines and coordinators may be silent. connect, source_of: make the transport to a
        coordinator and the source of an engine from an address; by default both use ZeroMQ. forgotten_return: engines
        that coordinators hear no more of are started again, for which they may need longer than they are remembered."""
        self.coordinators = tuple(coordinators)
        self.directory = Directory(coordinators)
        self._connect_to, self._peer_timeout_s = connect or self._dial, peer_timeout_s
        self._resolves_names = connect is None
        self._ipv6: dict[str, bool] = {}  # coordinators not connected to, and whether they are reached by IPv6
        self._source_of = source_of or functools.partial(Discovered, peer_timeout_s=peer_timeout_s)
        self._forgotten_return = forgotten_return
        self._transports: dict[str, Transport] = {}
        self._fleet: Fleet | None = None
        self._task: asyncio.Task[None] | None = None
        self._denied: set[str] = set()  # reasons already logged
        self._missed: set[str] = set()  # addresses of coordinators that are unreachable

    def start(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for transport in self._transports.values():
            transport.send(Unfollow())
            transport.close()

    def carry_out(self, change: Change) -> None:
        """Applies a change of the directory to the pool."""
        fleet = self._fleet
        assert fleet is not None, "it has started"
        match change:
            case Found(entry):
                fleet.add(self._source_of(entry.address), entry.rank)
                # A draining engine tells its clients itself; an entry's is_draining might be of a life that is over.
            case Left(entry):
                fleet.let_go(entry.address, may_return=self._forgotten_return and not change.withdrew)
            case Loads():
                fleet.note_loads(change)
        if not isinstance(change, Loads):
            logger.info("%s", _said(change))

    async def _run(self) -> None:
        while True:
            if self._resolves_names:
                await self._resolve()
            try:
                for change in self.directory.tick(time.monotonic()):
                    self.carry_out(change)
            except BaseException as error:  # without this task no engine would ever be found again
                let_interrupts_pass(error)
                logger.exception("what a coordinator reported could not be applied")
            self._follow()
            await asyncio.sleep(LOOK_EVERY_S)

    async def _resolve(self) -> None:
        """Beside the loop, as a name server may take seconds to answer."""
        for address in self.coordinators:
            if address not in self._transports:
                self._ipv6[address] = await asyncio.to_thread(is_ipv6, address)

    def _follow(self) -> None:
        for address, message in self.directory.follow(time.monotonic()):
            try:
                if address not in self._transports:
                    self._connect(address)
                self._transports[address].send(message)
            except BaseException as error:  # no more files, or a key file that is away for a moment
                let_interrupts_pass(error)
                self.directory.lost(address)
                self._say_missing(address, f"the coordinator at {address} cannot be asked: {error}")

    def _dial(self, address: str) -> Transport:
        return ZmqTransport(
            address,
            self._peer_timeout_s,
            receives=FromCoordinator,
            leaving=Unfollow,
            listener="coordinator",
            ipv6=self._ipv6.get(address),
        )

    def _connect(self, address: str) -> None:
        transport = self._connect_to(address)
        transport.open(
            lambda message: self._on_message(address, message), lambda failure: self._on_closed(address, failure)
        )
        self._transports[address] = transport

    def _on_message(self, address: str, message: FromCoordinator) -> None:
        if isinstance(message, Denied):
            if message.why not in self._denied:
                self._denied.add(message.why)
                logger.error("%s", message.why)
            return
        if not isinstance(message, Members):
            return  # it is for engines
        if address in self._missed:
            self._missed.discard(address)
            logger.info("the coordinator at %s is connected again", address)
        for change in self.directory.take(address, message, time.monotonic()):
            self.carry_out(change)
        self._follow()

    def _on_closed(self, address: str, failure: Failure) -> None:
        """The next `_follow` reconnects."""
        del self._transports[address]
        self.directory.lost(address)
        self._say_missing(address, failure.message)

    def _say_missing(self, address: str, why: str) -> None:
        if address not in self._missed:
            self._missed.add(address)
            logger.warning("%s; the engines that are known stay in use", why)


def _said(change: Found | Left) -> str:
    entry: EngineEntry = change.entry
    which = f"the engine of rank {entry.rank} at {entry.address} ({entry.model})"
    if isinstance(change, Found):
        return f"{which} is {'draining' if entry.is_draining else 'there'}"
    return f"{which} has left" if change.withdrew else f"{which} is forgotten: no coordinator has told of it of late"
