"""A limit of what runs at once, for which the tenants that wait take turns."""

from __future__ import annotations

import asyncio
import collections


class Turns:
    """As asyncio.Semaphore, but a tenant with much to do waits for one of each other tenant between two of its own."""

    def __init__(self, most: int) -> None:
        self._num_free = most
        self._waiting: collections.OrderedDict[str, collections.deque[asyncio.Future[None]]] = collections.OrderedDict()
        """By tenant; the one whose turn is next comes first, and none is empty."""

    def of(self, tenant: str) -> OfTenant:
        return OfTenant(self, tenant)

    async def acquire(self, tenant: str) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, collections.deque()).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():  # it was given to a waiter that has gone
                self.release()
            raise

    def release(self) -> None:
        while self._waiting:
            tenant, places = self._waiting.popitem(last=False)
            place = places.popleft()
            if places:
                self._waiting[tenant] = places
            if not place.done():
                place.set_result(None)
                return
        self._num_free += 1


class OfTenant:
    """The limit as one tenant sees it."""

    def __init__(self, turns: Turns, tenant: str) -> None:
        self._turns, self._tenant = turns, tenant

    async def acquire(self) -> None:
        await self._turns.acquire(self._tenant)

    def release(self) -> None:
        self._turns.release()
