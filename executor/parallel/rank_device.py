"""Which device a rank computes on: the GPU of its number among the ranks of its host."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from headrace.executor.gpu.device import CudaFacts, choose_device, cuda_facts
from headrace.executor.gpu.visible_gpus import check_device_option, too_few_gpus

LOCAL_RANK, LOCAL_WORLD_SIZE = "LOCAL_RANK", "LOCAL_WORLD_SIZE"
"""Environment variables by which launchers such as torchrun tell a rank its number on its host, and of how many."""


def rank_device(asked: str, facts: Callable[[], CudaFacts] = cuda_facts) -> torch.device:
    """The device of this process's rank for the option's value; the environment has its place on the host.

    Raises OptionError for a device that cannot be used, and with the numbers where there are fewer GPUs than ranks.
    """
    rank, size = int(os.environ.get(LOCAL_RANK, "0")), int(os.environ.get(LOCAL_WORLD_SIZE, "1"))
    check_device_option(asked, size)
    if asked == "cpu":
        return torch.device("cpu")
    found = facts()
    device = choose_device(asked, lambda: found)
    if device.type == "cpu" or size == 1:
        return device
    if size > found.num_devices:
        raise too_few_gpus(asked, size, found.num_devices)
    return torch.device("cuda", rank)
