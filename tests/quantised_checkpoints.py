"""Tiny quantised checkpoints, written by the published layouts, and the transformers model of their exact values.

A writer takes a matrix [n, k] float32 and gives its tensors under the format's names, and what they stand for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tiny_models
import torch
from safetensors.torch import save_file
from torch import Tensor

Written = tuple[dict[str, Tensor], Tensor]
"""Tensors by what follows the module's name, and the values [n, k] float32."""
Writer = Callable[[str, Tensor], Written]


def write(
    folder: Path, model: Any, quantization_config: Mapping[str, Any], writer: Writer, skip: tuple[str, ...] = ()
) -> Any:
    """Writes the checkpoint with every linear layer but `skip` (parts of names) stored by `writer`; returns the model,
    in float64, with the values that it holds."""
    state, stored = tiny_models.state_of(model), dict[str, Tensor]()
    exact = dict(model.state_dict())
    for name, tensor in state.items():
        module = name.removesuffix(".weight")
        is_linear = tensor.dim() == 2 and ("proj" in name or ".experts." in name)
        if not is_linear or any(part in name for part in skip):
            stored[name] = tensor.contiguous().clone()
            continue
        tensors, values = writer(module, tensor.float())
        stored |= {f"{module}{suffix}": each.contiguous() for suffix, each in tensors.items()}
        _put(exact, name, values)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    config["quantization_config"] = dict(quantization_config)
    (folder / "config.json").write_text(json.dumps(config))
    model.load_state_dict(exact)
    model.config._experts_implementation = "eager"  # the others compute no float64
    return model.double()


def _put(state: dict[str, Tensor], name: str, values: Tensor) -> None:
    """Into a model's state dict, where experts are stacked."""
    if name in state:
        state[name] = values
        return
    start, index, kind, _ = name.rsplit(".", 3)
    stack = state[f"{start}.{'down_proj' if kind == 'down_proj' else 'gate_up_proj'}"]
    if kind == "down_proj":
        stack[int(index)] = values
    else:
        half = stack.shape[1] // 2
        stack[int(index), slice(0, half) if kind == "gate_proj" else slice(half, None)] = values


def affine(
    weight: Tensor, bits: int, group: int, *, symmetric: bool, order: Tensor | None = None
) -> tuple[Tensor, ...]:
    """codes [n, k] int64, scales [n, groups] float16, zeros [n, groups] int64, and the values; `order`: the inputs in
    the order in which they are grouped."""
    n, k = weight.shape
    group = k if group == -1 else group
    placed = weight if order is None else weight[:, order]
    groups, top = placed.view(n, -1, group), (1 << bits) - 1
    if symmetric:
        scales = groups.abs().amax(-1) / ((top - 1) / 2)
        zeros = torch.full(scales.shape, 1 << (bits - 1))
    else:
        least, most = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = (most - least) / top
        zeros = (-least / scales).round().long().clamp(1, top)
    scales = scales.half()
    wide = scales.float()[..., None]
    codes = ((groups / wide).round().long() + zeros[..., None]).clamp(0, top)
    values = ((codes - zeros[..., None]) * wide).view(n, k)
    codes = codes.view(n, k)
    if order is not None:
        back = torch.argsort(order)
        codes, values = codes[:, back], values[:, back]
    return codes, scales, zeros, values


def packed(codes: Tensor, bits: int) -> Tensor:
    """[rows, count] -> [rows, count * bits / 32] int32, one behind the other, lowest bits first."""
    places = torch.arange(bits)
    stream = (codes[..., None] >> places & 1).flatten(1).view(len(codes), -1, 32)
    words = (stream << torch.arange(32)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def gptq(
    bits: int = 4, group: int = 32, *, symmetric: bool = True, desc_act: bool = False, v2: bool = False
) -> tuple[dict[str, Any], Writer]:
    def writer(module: str, weight: Tensor) -> Written:
        k = weight.shape[1]
        size = k if group == -1 else group
        # The same order for all matrices of one input, as their Hessian is the same.
        order = torch.randperm(k, generator=torch.Generator().manual_seed(k)) if desc_act else None
        codes, scales, zeros, values = affine(weight, bits, group, symmetric=symmetric, order=order)
        g_idx = torch.arange(k) // size
        if order is not None:
            g_idx = g_idx[torch.argsort(order)]
        n = weight.shape[0]
        tensors = {
            ".qweight": packed(codes, bits).T,
            ".qzeros": packed((zeros - (0 if v2 else 1)).T, bits),
            ".scales": scales.T,
            ".g_idx": g_idx.to(torch.int32),
            ".bias": torch.zeros(n, dtype=torch.float16),
        }
        return tensors, values

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": desc_act, "sym": symmetric}
    return config | {"checkpoint_format": "gptq_v2" if v2 else "gptq"}, writer


def awq(group: int = 32) -> tuple[dict[str, Any], Writer]:
    def words(codes: Tensor) -> Tensor:
        in_order = codes.unflatten(-1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(-2)
        return packed(in_order, 4)

    def writer(module: str, weight: Tensor) -> Written:
        codes, scales, zeros, values = affine(weight, 4, group, symmetric=False)
        return {".qweight": words(codes.T), ".qzeros": words(zeros.T), ".scales": scales.T}, values

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return config, writer
