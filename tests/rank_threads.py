"""Ranks as threads of the test process, talking through the memory that ranks in processes share."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from headrace.executor.place import Place, World, collectives_bytes, mark_failed, open_collectives

DEADLINE_S = 60


def run_ranks(world: World, body: Callable[[Place], Any], layer_partition: tuple[int, ...] = ()) -> list[Any]:
    """What `body` returns on every rank. When one raises, the others stop waiting for it, and its error is raised."""
    fd = os.memfd_create("test")
    errors: list[BaseException] = []

    def one(rank: int) -> Any:
        try:
            link = open_collectives(fd, world, rank, deadline_s=DEADLINE_S)
            try:
                return body(Place.of(rank, world.tp_size, world.pp_size, layer_partition).with_collectives(link))
            finally:
                link.close()
        except BaseException as error:
            errors.append(error)
            mark_failed(fd, rank)
            raise

    try:
        os.ftruncate(fd, collectives_bytes(world))
        with ThreadPoolExecutor(world.size) as pool:
            futures = [pool.submit(one, rank) for rank in range(world.size)]
        if errors:
            raise errors[0]
        return [future.result() for future in futures]
    finally:
        os.close(fd)
