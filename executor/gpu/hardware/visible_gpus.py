"""Counts the GPUs that this process may use, through the driver's library, before anything else starts. No torch."""

from __future__ import annotations

import os

from headrace.ipc.failure import OptionError


def check_gpus(asked: str, num_ranks: int, count: int | None) -> None:
    """Raises OptionError, with the numbers, where the ranks of this host cannot each have a GPU as asked for.

    asked: the option device; count: `visible_gpus()`, or None, in which case each rank checks for itself.
    """
    check_device_option(asked, num_ranks)
    if asked.startswith("cuda") and count is not None and count < num_ranks:
        raise too_few_gpus(asked, num_ranks, count)


def check_device_option(asked: str, num_ranks: int) -> None:
    """Raises OptionError where several ranks are asked to use one GPU by its number."""
    if num_ranks > 1 and asked.startswith("cuda:"):
        raise OptionError(
            f"device={asked} is one GPU, and {num_ranks} ranks compute on this host: ask for device=cuda; "
            "CUDA_VISIBLE_DEVICES says which GPUs they take"
        )


def too_few_gpus(asked: str, num_ranks: int, count: int) -> OptionError:
    there = "there is 1" if count == 1 else f"there are {count}"
    return OptionError(
        f"device={asked}: {num_ranks} ranks on this host (tensor_parallel_size times pipeline_parallel_size, over "
        f"nnodes) need a GPU each, and {there} for this process to use",
        hint="lower the parallel sizes, look at CUDA_VISIBLE_DEVICES, or compute with device=cpu",
    )


def visible_gpus() -> int | None:
    """The number of GPUs that CUDA_VISIBLE_DEVICES leaves to this process; None without an answer of the driver.

    Querying NVML creates no context on any GPU.
    """
    import pynvml  # package nvidia-ml-py

    try:
        pynvml.nvmlInit()
        try:
            count = pynvml.nvmlDeviceGetCount()
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
    return left_visible(os.environ.get("CUDA_VISIBLE_DEVICES"), count)


def left_visible(variable: str | None, count: int) -> int:
    """How many of `count` GPUs the variable leaves: numbers or UUIDs, up to the first invalid one (CUDA's guide)."""
    if variable is None:
        return count
    visible = 0
    for entry in map(str.strip, variable.split(",")):
        is_number = entry.isdecimal() and int(entry) < count
        if not is_number and not entry.startswith(("GPU-", "MIG-")):
            break
        visible += 1
    return visible
