"""Recording what a worker computes: torch's profiler, with the runner's phases as ranges, between two commands.

The ranges are NVTX ranges too where there is CUDA, so that Nsight Systems shows them beside the kernels.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from headrace.executor.gpu.step_times import StepTimes
from headrace.ipc.failure import HeadraceError


class WorkerProfile:
    """Starts and stops torch's profiler for this process; one at a time."""

    def __init__(self, folder: str | None, rank: int, times: StepTimes | None = None) -> None:
        """folder: profiler_config's torch_profiler_dir; times: whose phases become ranges."""
        self._folder, self._rank, self._times = folder, rank, times
        self._profiler: torch.profiler.profile | None = None
        self._prefix = ""

    def start(self, prefix: str = "") -> None:
        """Raises HeadraceError without a folder, or when a profile is being recorded."""
        if self._folder is None:
            raise HeadraceError("there is no folder for profiles: profiler_config has no torch_profiler_dir")
        if self._profiler is not None:
            raise HeadraceError("a profile is being recorded already; stop it first")
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._prefix = f"{prefix}-" if prefix else ""
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()
        if self._times is not None:
            self._times.as_ranges = True

    def stop(self) -> str:
        """The file that was written. Raises HeadraceError when nothing is recorded, or it cannot be written."""
        if self._profiler is None or self._folder is None:
            raise HeadraceError("no profile is being recorded; start one first")
        profiler, self._profiler = self._profiler, None
        if self._times is not None:
            self._times.as_ranges = False
        profiler.stop()
        path = Path(self._folder).absolute() / f"{self._prefix}rank{self._rank}-{os.getpid()}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            raise HeadraceError(f"the profile {path} cannot be written: {error}") from error
        return str(path)
