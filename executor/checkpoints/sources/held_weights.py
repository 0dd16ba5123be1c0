"""Tensors in memory."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from headrace.executor.checkpoints.weights import StoredTensor, WeightSource, dtype_name, take_part
from headrace.ipc.failure import ModelError


def dense(tensor: Tensor, name: str) -> Tensor:
    """The tensor, if it is plain numbers in memory, as every weight must be. Raises ModelError for one that is on the
    meta device, sparse, nested, of torch's own quantised types, complex or without its storage."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        reason = f"is stored with the layout {'nested' if tensor.is_nested else tensor.layout}"
    elif tensor.device.type not in ("cpu", "cuda"):
        reason = f"is on the device {tensor.device}, where it has no numbers"
    elif tensor.is_quantized or tensor.is_complex():
        reason = f"is of type {tensor.dtype}"
    elif tensor.numel() and not tensor.data_ptr():
        reason = "has lost its numbers"
    else:
        return tensor.detach().resolve_neg()
    raise ModelError(f"the weight {name} {reason}; dense tensors of real numbers are expected")


class TensorWeights(WeightSource):
    """Tensors in memory, by name. Raises ModelError for a tensor that is not dense."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = {name: dense(tensor, name) for name, tensor in tensors.items()}

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def stored(self, name: str) -> StoredTensor:
        tensor = self._tensors[name]
        shape = tuple(tensor.shape)
        return StoredTensor.plain(shape, dtype_name(tensor.dtype), partial(take_part, tensor, shape))
