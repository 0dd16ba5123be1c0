"""The addresses of tensors that C++ reads and writes."""

from __future__ import annotations

import torch
from torch import Tensor


def pointer(tensor: Tensor) -> int:
    """The address of a tensor's first element. Raises ValueError for a tensor whose elements do not lie in this
    process's memory, element after element: on another device, on none (meta), sparse, or with its storage freed."""
    address = tensor.data_ptr() if tensor.is_cpu and tensor.layout is torch.strided else 0
    if not address and tensor.numel():
        raise ValueError(
            f"a tensor {list(tensor.shape)} is on {tensor.device} with the layout {tensor.layout}; the CPU kernels "
            "take dense tensors in the CPU's memory"
        )
    return address
