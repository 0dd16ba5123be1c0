"""Asking for a GPU: which device is chosen, and the sentence when it cannot be used."""

from __future__ import annotations

import logging

import pytest
import torch

from headrace.core.engine.engine import load_executor
from headrace.core.options.engine_options import Options
from headrace.executor.cpu.rank import CpuRank
from headrace.executor.gpu.hardware import device as gpu_device
from headrace.executor.gpu.hardware.device import CudaFacts, GpuFacts, check_free_memory, check_gpu, choose_device
from headrace.executor.placement.in_process import InProcessExecutor
from headrace.ipc.failure import HeadraceError, OptionError

GIB = 1 << 30
CUDA = torch.device("cuda", 0)
GOOD = CudaFacts("2.13.0+cu128", "12.8", "12.9", 2)


def facts(**changes: object) -> CudaFacts:
    return CudaFacts(**{**vars(GOOD), **changes})


def test_auto_takes_the_first_gpu_and_else_the_cpu(caplog: pytest.LogCaptureFixture) -> None:
    assert choose_device("auto", lambda: GOOD) == CUDA
    assert choose_device("cuda", lambda: GOOD) == CUDA
    assert choose_device("cuda:1", lambda: GOOD) == torch.device("cuda", 1)
    assert choose_device("cpu", lambda: pytest.fail("nobody asked for a GPU")) == torch.device("cpu")
    with caplog.at_level(logging.WARNING):
        assert choose_device("auto", lambda: facts(driver_cuda=None, num_devices=0)) == torch.device("cpu")
        assert choose_device("auto", lambda: facts(torch_cuda=None, driver_cuda=None)) == torch.device("cpu")
    assert not caplog.records, "a machine without a GPU is not worth a warning"
    old = facts(driver_cuda="11.4", num_devices=0, error="The NVIDIA driver on your system is too old")
    with caplog.at_level(logging.WARNING):
        assert choose_device("auto", lambda: old) == torch.device("cpu")
    assert "it runs CUDA up to 11.4, and this torch (2.13.0+cu128) is built for CUDA 12.8" in caplog.text


@pytest.mark.parametrize(
    ("asked", "found", "expected"),
    [
        ("cuda:2", GOOD, "device=cuda:2 does not exist: there are cuda:0 to cuda:1"),
        ("cuda:1", facts(num_devices=1), "device=cuda:1 does not exist: cuda:0 is the only one"),
        ("cuda", facts(driver_cuda=None), "there is no NVIDIA driver (libcuda.so.1), which torch's CUDA 12.8 needs"),
        ("cuda", facts(num_devices=0), "the NVIDIA driver shows no GPU to this process"),
        ("cuda", facts(error="CUDA unknown error"), "CUDA does not start: CUDA unknown error"),
        (
            "cuda:0",
            facts(driver_cuda="11.4", error="The NVIDIA driver on your system is too old (found version 11040)."),
            "too old: it runs CUDA up to 11.4, and this torch (2.13.0+cu128) is built for CUDA 12.8",
        ),
        ("cuda", facts(torch_cuda=None), "is built without CUDA; the driver runs CUDA 12.9"),
        ("gpu", GOOD, "device='gpu' is unknown; allowed: auto, cpu, cuda and cuda:INDEX"),
    ],
)
def test_a_device_that_cannot_be_used_is_refused_in_a_sentence(asked: str, found: CudaFacts, expected: str) -> None:
    with pytest.raises(OptionError) as error:
        choose_device(asked, lambda: found)
    assert expected in str(error.value)
    assert ("pip install torch" in error.value.hint) == ("cannot be used" in str(error.value))


def test_an_old_gpu_and_its_missing_bf16_are_named_with_numbers() -> None:
    turing = GpuFacts("Tesla T4", (7, 5), 16 * GIB, 15 * GIB)
    check_gpu(CUDA, torch.float16, turing)
    with pytest.raises(OptionError, match=r"bfloat16 needs compute capability 8\.0, and cuda:0 \(Tesla T4\) has 7\.5"):
        check_gpu(CUDA, torch.bfloat16, turing)
    with pytest.raises(OptionError, match=r"Tesla P100\) has compute capability 6\.0, and at least 7\.5 is needed"):
        check_gpu(CUDA, torch.float32, GpuFacts("Tesla P100", (6, 0), 16 * GIB, 15 * GIB))


def test_memory_that_another_process_holds_is_named_with_numbers() -> None:
    held = GpuFacts("NVIDIA H200", (9, 0), 140 * GIB, 10 * GIB)
    check_free_memory(CUDA, held, 10 * GIB, "a model")
    with pytest.raises(OptionError) as error:
        check_free_memory(CUDA, held, 16 * GIB, "a model")
    assert str(error.value) == (
        "a model needs 16.00 GiB, and 10.00 GiB of the 140.00 GiB of cuda:0 (NVIDIA H200) are free; "
        "other processes hold 130.00 GiB"
    )
    free = GpuFacts("NVIDIA H200", (9, 0), 140 * GIB, 139 * GIB)
    with pytest.raises(OptionError) as error:
        check_free_memory(CUDA, free, 160 * GIB, "a model")
    assert "other processes" not in str(error.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, so asking for one is no mistake")
def test_on_this_machine_a_gpu_is_refused_before_a_model_is_looked_for() -> None:
    with pytest.raises(OptionError, match="device=cuda cannot be used: "):
        load_executor(Options(device="cuda", model="/no/such/model"))
    executor = load_executor(Options())
    assert isinstance(executor, InProcessExecutor)
    assert isinstance(executor.rank, CpuRank)
    assert gpu_device.cuda_facts().num_devices == 0


@pytest.mark.parametrize("options", [{"cudagraph_capture_sizes": (1, 2)}, {"max_cudagraph_capture_size": 8}])
def test_options_for_graphs_are_told_to_have_no_effect_on_a_cpu(
    options: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        executor = load_executor(Options(device="cpu", **options))
    assert isinstance(executor, InProcessExecutor)
    assert isinstance(executor.rank, CpuRank)
    (told,) = [each.getMessage() for each in caplog.records]
    assert (
        told
        == f"{next(iter(options))} has no effect: it is for CUDA graphs, and the model runs on the CPU (device=cpu)"
    )


@pytest.mark.system
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, so asking for two is another mistake")
def test_several_workers_do_not_ignore_that_a_gpu_was_asked_for() -> None:
    executor = load_executor(Options(device="cuda", tensor_parallel_size=2, model="/no/such/model"))
    try:
        with pytest.raises(HeadraceError, match="device=cuda cannot be used: "):
            executor.describe(lambda phase: None)
    finally:
        executor.stop()
