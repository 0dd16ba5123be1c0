"""Chooses the device, and explains why a requested one cannot be used: collects facts, then words the messages."""

from __future__ import annotations

import ctypes
import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.executor.gpu.hardware.visible_gpus import check_device_option, too_few_gpus
from headrace.ipc.failure import OptionError

logger = logging.getLogger(__name__)
BFLOAT16_CAPABILITY = (8, 0)
"""Lower compute capabilities have no bf16 arithmetic (NVIDIA's CUDA programming guide, compute capabilities)."""
LEAST_CAPABILITY = (7, 5)
"""The lowest compute capability that CUDA builds of torch 2.11 and later support."""
HOW_TO_HAVE_CUDA = (
    "a GPU needs an NVIDIA driver and a torch built for CUDA (`pip install torch` from PyPI installs one on Linux, the "
    "CPU index does not); --device cpu runs the model without"
)
LOCAL_RANK, LOCAL_WORLD_SIZE = "LOCAL_RANK", "LOCAL_WORLD_SIZE"
"""Environment variables in which torchrun and others give a rank its number on its host, and the ranks' count."""


@dataclass(frozen=True)
class GpuFacts:
    """One GPU, before the engine has allocated anything on it."""

    name: str
    capability: tuple[int, int]
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class CudaFacts:
    """The CUDA support found on this machine."""

    torch_version: str
    torch_cuda: str | None
    """The CUDA version that torch was built for, such as 12.8; None for a build without CUDA."""
    driver_cuda: str | None
    """The newest CUDA version that the driver runs; None without a driver."""
    num_devices: int
    error: str = ""
    """Why torch could not start CUDA, as torch reports it."""


def cuda_facts() -> CudaFacts:
    """Queries the driver's library and torch. Never raises; takes under a millisecond where there is no driver."""
    built_for, driver = torch.version.cuda, _driver_cuda()
    if built_for is None or driver is None:
        return CudaFacts(torch.__version__, built_for, driver, 0)
    try:
        torch.cuda.init()
        return CudaFacts(torch.__version__, built_for, driver, torch.cuda.device_count())
    except RuntimeError as error:
        first_line, _, _ = str(error).partition("\n")
        return CudaFacts(torch.__version__, built_for, driver, 0, first_line)


def gpu_facts(device: torch.device) -> GpuFacts:
    """Queries the GPU. Raises OptionError when even its amount of memory cannot be read."""
    properties = torch.cuda.get_device_properties(device)
    try:
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    except RuntimeError as error:
        first_line, _, _ = str(error).partition("\n")
        raise OptionError(
            f"{device} ({properties.name}) cannot be used: {first_line}",
            hint="another process may hold all of its memory, or hold it in exclusive mode; nvidia-smi shows which",
        ) from error
    return GpuFacts(properties.name, (properties.major, properties.minor), total_bytes, free_bytes)


def choose_device(asked: str, facts: Callable[[], CudaFacts] = cuda_facts) -> torch.device:
    """The device for the option's value: auto, cpu, cuda or cuda:INDEX.

    auto is the first GPU if one can be used, else the CPU (with a warning where there is a GPU's driver). Raises
    OptionError when an explicitly requested device is not available.
    """
    if asked == "cpu":
        return torch.device("cpu")
    match = re.fullmatch(r"cuda(?::(\d+))?", asked)
    if asked != "auto" and match is None:
        raise OptionError(f"device={asked!r} is unknown; allowed: auto, cpu, cuda and cuda:INDEX")
    found = facts()
    reason = _why_no_cuda(found)
    if match is None:
        if reason and found.driver_cuda is not None:
            logger.warning("the model runs on the CPU, though there is a GPU's driver: %s", reason)
        return torch.device("cpu") if reason else torch.device("cuda", 0)
    if reason:
        raise OptionError(f"device={asked} cannot be used: {reason}", hint=HOW_TO_HAVE_CUDA)
    index = int(match[1] or 0)
    if index >= found.num_devices:
        known = (
            "cuda:0 is the only one" if found.num_devices == 1 else f"there are cuda:0 to cuda:{found.num_devices - 1}"
        )
        raise OptionError(f"device={asked} does not exist: {known}")
    return torch.device("cuda", index)


def check_gpu(device: torch.device, dtype: torch.dtype, facts: GpuFacts) -> None:
    """Raises OptionError for a GPU that is too old for torch's builds, or for the dtype."""
    version = ".".join(map(str, facts.capability))
    if facts.capability < LEAST_CAPABILITY:
        raise OptionError(
            f"{device} ({facts.name}) has compute capability {version}, and at least "
            f"{LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} is needed; device=cpu runs the model without it"
        )
    if dtype is torch.bfloat16 and facts.capability < BFLOAT16_CAPABILITY:
        raise OptionError(
            f"bfloat16 needs compute capability {BFLOAT16_CAPABILITY[0]}.{BFLOAT16_CAPABILITY[1]}, and {device} "
            f"({facts.name}) has {version}; ask for dtype=float16 or dtype=float32"
        )


def check_free_memory(device: torch.device, facts: GpuFacts, needed_bytes: int, what: str) -> None:
    """Raises OptionError, before anything is read, when `what` does not fit the free memory of the GPU."""
    if needed_bytes <= facts.free_bytes:
        return
    held_bytes = facts.total_bytes - facts.free_bytes
    others = f"; other processes hold {gib(held_bytes)}" if held_bytes > facts.total_bytes // 20 else ""
    raise OptionError(
        f"{what} needs {gib(needed_bytes)}, and {gib(facts.free_bytes)} of the {gib(facts.total_bytes)} of {device} "
        f"({facts.name}) are free{others}",
        hint="nvidia-smi shows which processes they are" if others else "a smaller model or dtype fits",
    )


def gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.2f} GiB"


def _why_no_cuda(facts: CudaFacts) -> str:
    """A sentence without its full stop; "" when torch can use at least one GPU."""
    if facts.torch_cuda is None:
        driver = (
            f"the driver runs CUDA {facts.driver_cuda}" if facts.driver_cuda else "there is no NVIDIA driver either"
        )
        return f"this torch ({facts.torch_version}) is built without CUDA; {driver}"
    if facts.driver_cuda is None:
        return f"there is no NVIDIA driver (libcuda.so.1), which torch's CUDA {facts.torch_cuda} needs"
    if facts.error:
        if int(facts.driver_cuda.partition(".")[0]) < int(facts.torch_cuda.partition(".")[0]):
            return (
                f"the NVIDIA driver is too old: it runs CUDA up to {facts.driver_cuda}, and this torch "
                f"({facts.torch_version}) is built for CUDA {facts.torch_cuda}; update the driver, or install a torch "
                f"built for CUDA {facts.driver_cuda}"
            )
        return f"CUDA does not start: {facts.error}"
    if facts.num_devices == 0:
        return "the NVIDIA driver shows no GPU to this process (is CUDA_VISIBLE_DEVICES empty?)"
    return ""


def _driver_cuda() -> str | None:
    try:
        library = ctypes.CDLL("libcuda.so.1")
        version = ctypes.c_int()
        if library.cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def rank_device(asked: str, facts: Callable[[], CudaFacts] = cuda_facts) -> torch.device:
    """The device of this process's rank; the environment gives the rank's number on its host.

    Raises OptionError for a device that cannot be used and, with the numbers, where there are fewer GPUs than ranks.
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
