"""Makes the rank of a place, for the device that the options name or that is found."""

from __future__ import annotations

from headrace.core.options.engine_options import Options
from headrace.executor.library_caches import trust_library_caches
from headrace.executor.parallel.rank_place import RankCoordinates
from headrace.executor.rank import Rank
from headrace.ipc.plugins import load_class
from headrace.ipc.process.deferred_imports import import_deferred


def make_rank(options: Options, place: RankCoordinates) -> Rank:
    """The rank of this place: for the device assigned to it, or of the class that `worker_cls` names.

    Raises OptionError if the device cannot be used, or if there is no such class.
    """
    trust_library_caches()
    if options.worker_cls != "auto":
        rank: Rank = load_class("worker_cls", options.worker_cls)(options, place=place)
        return rank
    from headrace.executor.gpu.hardware.device import choose_device, rank_device

    device = choose_device(options.device) if place.world_size == 1 else rank_device(options.device)
    if device.type == "cpu":
        from headrace.executor.cpu.rank import CpuRank, check_no_gpu_options, tell_no_graphs

        check_no_gpu_options(options)
        if place.rank == 0:
            tell_no_graphs(options)
        return CpuRank(options, place)
    import_deferred()  # of torch's compiler, some of whose parts only register themselves
    from headrace.executor.gpu.rank import GpuRank

    return GpuRank(options, device, place=place)
