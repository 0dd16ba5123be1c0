"""How a rank finds the other ranks of its world. Imports no torch."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.executor.parallel.rank_place import Collectives, World, open_collectives

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(frozen=True)
class Rendezvous:
    world: World
    rank: int
    host_ranks: range
    """The ranks on this host or, where Ray placed ranks one by one, of this agent."""
    memory_fd: int
    """Memory shared by this host's ranks; in a world of one host they join through it."""
    deadline_s: float
    address: tuple[str, int] | None = None
    """Address for a world of several hosts, at which rank 0 listens."""
    host: str = ""
    """This host's address, as the others reach it."""
    listen_fd: int | None = None
    """Rank 0's socket that already listens at `address`."""
    opens_store: bool | None = None
    """Whether this rank opens the store at `address`; None: rank 0 does."""

    @property
    def _opens(self) -> bool:
        return self.rank == 0 if self.opens_store is None else self.opens_store

    def link(self) -> Collectives:
        """Joins the other ranks, for tensors in host memory. Raises PeerError when not all joined in time."""
        world, rank, deadline_s = self.world, self.rank, self.deadline_s
        if self.address is None:
            return open_collectives(self.memory_fd, world, rank, deadline_s=deadline_s)
        from headrace.executor.parallel.gloo import open_gloo  # imports torch

        return open_gloo(
            self.address,
            world,
            rank,
            host=self.host,
            listen_fd=self.listen_fd,
            opens_store=self._opens,
            deadline_s=deadline_s,
        )

    def store(self) -> dist.Store:
        """The store that rank 0 opens, for other kinds of collectives. Raises PeerError if it is not reached in
        time."""
        if self.address is None:
            from headrace.executor.parallel.collectives import loopback_store

            return loopback_store(mmap.mmap(self.memory_fd, 0), self.rank, self.deadline_s)
        from headrace.executor.parallel.gloo import open_store

        return open_store(
            self.address, self.rank, listen_fd=self.listen_fd, opens=self._opens, deadline_s=self.deadline_s
        )
