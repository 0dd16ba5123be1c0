"""What scripts ask vLLM's `current_platform`: which kind of device an engine here would take."""

from __future__ import annotations

import functools
import platform

from headrace.frontend.vllm.unsupported import NamesWhatIsMissing


class Platform(NamesWhatIsMissing):
    """This machine's device, as the option device=auto finds it. Nothing of the device is opened or loaded."""

    @property
    def device_type(self) -> str:
        return "cuda" if self.is_cuda() else "cpu"

    @property
    def device_name(self) -> str:
        return self.device_type

    @functools.cache  # noqa: B019 - there is one object, for as long as the process
    def is_cuda(self) -> bool:
        return _num_gpus() > 0

    def is_cuda_alike(self) -> bool:
        return self.is_cuda()

    def is_cpu(self) -> bool:
        return not self.is_cuda()

    def is_rocm(self) -> bool:
        return False

    def is_xpu(self) -> bool:
        return False

    def is_tpu(self) -> bool:
        return False

    def is_out_of_tree(self) -> bool:
        return False

    def is_unspecified(self) -> bool:
        return False

    def get_device_name(self, device_id: int = 0) -> str:
        """The GPU's name, or the kind of the processor. Raises ValueError for a GPU that is not there."""
        if self.is_cpu():
            return platform.processor() or platform.machine()
        if not 0 <= device_id < _num_gpus():
            raise ValueError(f"device_id={device_id}: there are {_num_gpus()} GPUs, from 0 on")
        import pynvml

        pynvml.nvmlInit()
        try:
            name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(device_id))
        finally:
            pynvml.nvmlShutdown()
        return name.decode() if isinstance(name, bytes) else str(name)

    def device_count(self) -> int:
        return _num_gpus() or 1

    def seed_everything(self, seed: int | None = None) -> None:
        from headrace.frontend.vllm.helpers import set_random_seed

        set_random_seed(seed)


def _num_gpus() -> int:
    import pynvml  # package nvidia-ml-py

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver
        return 0
    try:
        return int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()


current_platform = Platform()
