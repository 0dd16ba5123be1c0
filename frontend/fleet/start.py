"""Starts the engines of data_parallel_size on this machine, as sources of a pool, or finds those of coordinators."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from headrace.ipc.failure import OptionError

if TYPE_CHECKING:  # what speaks with an engine is imported while it starts
    from headrace.core.options.engine_options import Options
    from headrace.core.process.supervisor import SupervisedChild
    from headrace.frontend.client.request_metrics import Meters
    from headrace.frontend.fleet.decisions import RouterOptions
    from headrace.frontend.fleet.pool import EnginePool
    from headrace.frontend.fleet.sources import Owned

RESTARTS = 10
"""How often in a row a dead engine is restarted, if there are several: the others do its work meanwhile."""


def pool_of(options: Options, routing: RouterOptions | None = None, meters: Meters | None = None) -> EnginePool:
    """A pool, not opened yet, of engines that are started with these options or, where they name coordinators, found by
    them. Raises as `start_ranks`."""
    options = with_meeting(options)
    children = [] if options.coordinator else start_ranks(options)
    try:
        from headrace.frontend.fleet.discovery import Discovery  # imported while the engines start
        from headrace.frontend.fleet.pool import EnginePool

        found = Discovery(options.coordinator, options.peer_timeout) if options.coordinator else None
        return EnginePool(owned_ranks(options, children), routing, discovery=found, meters=meters)
    except BaseException:
        for child in children:
            child.kill()
        raise


def with_meeting(options: Options) -> Options:
    """Adds a name by which engines that share experts find each other, now and after restarts. Only for engines that
    all run on this machine."""
    shares = options.data_parallel_size > 1 and options.enable_expert_parallel
    if not shares or options.data_parallel_meeting or options.data_parallel_backend == "ray":
        return options
    return msgspec.structs.replace(options, data_parallel_meeting=secrets.token_hex(8))


def start_ranks(
    options: Options, ranks: Sequence[int] | None = None, new_address: Callable[[], str] = lambda: ""
) -> list[SupervisedChild]:
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

    children: list[SupervisedChild] = []
    try:
        for rank in range(options.data_parallel_size) if ranks is None else ranks:
            children.append(start_engine(of_rank(options, rank), new_address()))
    except BaseException:
        for child in children:
            child.kill()
        raise
    return children


def check_reasoning(options: Options) -> None:
    """Raises OptionError where an engine's options name a format of reasoning that there is none of here."""
    for option in ("reasoning_config", "structured_outputs_config"):
        name = getattr(options, option).get("reasoning_parser")
        if not isinstance(name, str) or not name:  # what is no text is for the engine to tell
            continue
        from headrace.frontend.text.formats.declaration import FormatError, load_format

        try:
            declared = load_format(name)
        except FormatError as error:
            raise OptionError(f"{option} has reasoning_parser={name!r}: {error}") from None
        if declared.reasoning is None and declared.channels is None:
            raise OptionError(f"{option} has reasoning_parser={name!r}: that format has no reasoning")


def of_rank(options: Options, rank: int) -> Options:
    """The options of the engine of this rank."""
    return msgspec.structs.replace(options, data_parallel_rank=rank)


def default_restarts(num_engines: int) -> int:
    """How often in a row each of so many engines is restarted."""
    return RESTARTS if num_engines > 1 else 0


def owned_ranks(
    options: Options,
    children: Sequence[SupervisedChild],
    restarts: int | None = None,
    ranks: Sequence[int] | None = None,
) -> list[Owned]:
    """The sources of started engines; each restarts its engine under the same rank, by default if there are others."""
    from headrace.core.process.child import start_engine
    from headrace.core.process.ray_engines import RayEngine
    from headrace.frontend.fleet.sources import Owned

    def starter(rank: int, first: SupervisedChild) -> Callable[[str], SupervisedChild]:
        if isinstance(first, RayEngine):
            return first.again
        return lambda weights_path: start_engine(of_rank(options, rank), weights_path=weights_path)

    if restarts is None:
        restarts = default_restarts(len(children))
    of_children = zip(range(len(children)) if ranks is None else ranks, children, strict=True)
    return [Owned(starter(rank, child), child, restarts=restarts, rank=rank) for rank, child in of_children]
