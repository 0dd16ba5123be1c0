"""Which of data_parallel_size engines a server starts, and how it finds the others.

internal    all of them here, or some: those of other hosts are started there by `headrace serve --headless`, and
            found through a coordinator at data_parallel_address
headless    the engines of such a host, without HTTP
hybrid      only the engines of this host; an external load balancer distributes requests to the hosts
external    only one engine; an external load balancer distributes requests to the engines
"""

from __future__ import annotations

import msgspec

from headrace.core.coordinator.announcer import reachable
from headrace.core.options.engine_options import Options
from headrace.frontend.http.options import ServeOptions
from headrace.ipc.failure import OptionError
from headrace.ipc.transport.hosts import host_port
from headrace.ipc.transport.sockets import is_loopback, new_ipc_address

_LOOPBACK = "127.0.0.1"
_ANY_HOST = "tcp://0.0.0.0:*"


class Ranks(msgspec.Struct, frozen=True):
    """The engines that this host starts."""

    here: range
    """Their data_parallel_ranks."""
    coordinator: str = ""
    """The coordinator's address, where engines of several hosts announce themselves; empty for those of one host."""
    has_coordinator: bool = False
    """The coordinator is to be started on this host."""
    unused: tuple[str, ...] = ()
    """Options that were given but have no effect."""

    @property
    def is_on_loopback(self) -> bool:
        """The coordinator, and so the engines, are reachable from this host alone."""
        return is_loopback(self.coordinator.removeprefix("tcp://").rpartition(":")[0].strip("[]"))

    def new_address(self) -> str:
        """An address for one of these engines to listen at. A Unix socket's has this process's id, so it is not swept
        away as unused while this process lives, and a restarted engine can listen there again."""
        return reachable(_ANY_HOST, self.coordinator) if self.coordinator else new_ipc_address("engine-core")


def why_fixed(engine: Options, ranks: Ranks, num_processes: int) -> str:
    """Why the number of a server's engines cannot be changed while it runs; empty if it can."""
    if not ranks.here:
        return "this server's engines are somebody else's: start or drain them where they run, and it finds them"
    if engine.data_parallel_backend == "ray":
        return (
            "the engines run in a placement group of Ray, which has as many places as data_parallel_size and cannot "
            "grow: start the server with another data_parallel_size, or several servers behind a load balancer"
        )
    if engine.data_parallel_meeting:
        return "the engines divide the experts among them (enable_expert_parallel), so their number is fixed"
    if len(ranks.here) != engine.data_parallel_size or ranks.coordinator:
        return "the engines are those of several hosts, each of which starts its own: their number is fixed"
    if len(ranks.here) == 1 and num_processes > 1:
        return (
            "several HTTP processes share the one engine that this server was started with, and only several engines "
            "are announced to them: start it with data_parallel_size=2 or more, or with api_server_count=1"
        )
    return ""


def ranks_of(engine: Options, server: ServeOptions) -> Ranks:
    """Raises OptionError for options that contradict each other."""
    size, here = engine.data_parallel_size, engine.num_engines_here
    start, is_external, is_hybrid = (
        server.data_parallel_start_rank,
        server.data_parallel_external_lb,
        server.data_parallel_hybrid_lb,
    )
    if here > size:
        raise OptionError(f"data_parallel_size_local={here} is more than data_parallel_size={size}")
    spans_hosts = bool(server.data_parallel_address) or server.headless or here < size or start > 0
    if not (spans_hosts or is_external or is_hybrid):
        return Ranks(range(size))
    if engine.shares_experts:
        raise OptionError("enable_expert_parallel divides experts among engines of one machine: leave -dpl, -dpa out")
    if engine.data_parallel_backend == "ray":
        raise OptionError("data_parallel_backend=ray places engines on hosts by itself: leave -dpl, -dpr and -dpa out")
    if engine.nnodes > 1 or engine.node_rank:
        raise OptionError("an engine of several hosts (nnodes) is started by engine-core, on each with its --node-rank")
    if is_external and (is_hybrid or server.headless):
        raise OptionError("data_parallel_rank selects external load balancing, which excludes hybrid and headless")
    if is_external:
        if engine.data_parallel_size_local not in (None, 1):
            raise OptionError("data_parallel_rank starts a single engine: leave data_parallel_size_local out")
        start, here = start or engine.data_parallel_rank, 1
    if is_hybrid and server.headless:
        raise OptionError("data_parallel_hybrid_lb serves HTTP on each host, and headless on none: choose one")
    if start + here > size:
        asked = f"rank {start}" if here == 1 else f"ranks {start} to {start + here - 1}"
        there = "rank 0 alone" if size == 1 else f"ranks 0 to {size - 1}"
        raise OptionError(f"{asked} would be started here, and data_parallel_size={size} has {there}")
    given = tuple(each for each in ("data_parallel_address",) if getattr(server, each))
    if is_external or is_hybrid:
        if not here:
            raise OptionError("data_parallel_size_local=0: hybrid balancing is among engines of this host")
        return Ranks(range(start, start + here), unused=given)
    if server.headless and not here:
        raise OptionError("headless is for hosts that start engines: data_parallel_size_local is 0")
    host = server.data_parallel_address or _LOOPBACK
    coordinator = f"tcp://{host_port(host, server.data_parallel_rpc_port)}"
    return Ranks(range(start, start + here), coordinator, has_coordinator=not server.headless)
