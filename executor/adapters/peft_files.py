"""An adapter's files: https://huggingface.co/docs/peft/developer_guides/checkpoint."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from headrace.executor.adapters.adapter import (
    Adapter,
    AdapterModule,
    check_elements,
    check_factors,
    identity_of,
    read_whole,
)
from headrace.executor.adapters.peft_config import AdapterConfig, read_config
from headrace.executor.checkpoints.sources.torch_files import TorchWeights
from headrace.executor.checkpoints.sources.unreadable_files import unreadable
from headrace.ipc.adapters import CONFIG_NAME
from headrace.ipc.failure import MissingAdapterError, ModelError
from headrace.ipc.process.log import printable

SAFETENSORS, TORCH = "adapter_model.safetensors", ("adapter_model.bin", "adapter_model.pt")
PREFIX = "base_model.model."
FACTORS = re.compile(
    r"(?P<module>.+)\.(?P<kind>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.default)?(?P<end>\.weight|\.bias|)"
)
KINDS = {
    ("lora_A", ".weight"): "a",
    ("lora_B", ".weight"): "b",
    ("lora_B", ".bias"): "b_bias",
    ("lora_embedding_A", ""): "embedding_a",
    ("lora_embedding_B", ""): "embedding_b",
    ("lora_magnitude_vector", ""): "magnitude",
    ("lora_magnitude_vector", ".weight"): "magnitude",
}
"""Fields of an `AdapterModule`, by what `FACTORS` finds."""
WHOLE = re.compile(r"(?P<module>.+?)(?:\.base_layer|\.modules_to_save(?:\.default)?)?\.(?P<kind>weight|bias)")
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def read_peft(path: str, max_rank: int, most_elements: int) -> Adapter:
    """Raises ModelError, with the file and the cause, for a folder without a sound adapter, for a higher rank, and for
    more than most_elements values in all its tensors."""
    folder = Path(path)
    if not folder.is_dir():
        if folder.exists():
            hint = f"give its folder, {folder.parent}" if (folder.parent / CONFIG_NAME).exists() else ""
            raise ModelError(f"the adapter {path} is neither a folder nor a .gguf file", hint=hint)
        raise MissingAdapterError(f"the adapter {path} does not exist: it should have {CONFIG_NAME} and {SAFETENSORS}")
    config = read_config(folder)
    for what, rank in (("r", config.rank), *(("rank_pattern", each) for each in config.rank_pattern.values())):
        if rank > max_rank:
            raise ModelError(f"the adapter {path} has {what} {rank}, which is greater than max_lora_rank, {max_rank}")
    tensors = list(_tensors(folder, most_elements))
    described = [(f"{name} {tensor.dtype} {list(tensor.shape)}", content) for name, tensor, content in tensors]
    hashed = identity_of(config.canonical, described)
    modules = _modules({name: tensor for name, tensor, _ in tensors}, path)
    for each in modules.values():
        _check(each, config, path)
    rank = max(config.rank, *config.rank_pattern.values(), 0)
    return Adapter(folder, config, modules, hashed, rank)


def _tensors(folder: Path, most_elements: int) -> Iterator[tuple[str, Tensor, bytes | bytearray | memoryview]]:
    """All tensors of an adapter with their bytes, in the order of their names."""
    if (file := folder / SAFETENSORS).exists():
        yield from _of_safetensors(file, str(folder), most_elements)
        return
    for name in TORCH:
        if (file := folder / name).exists():
            source = TorchWeights([file])
            check_elements(str(folder), sum(math.prod(source.shape(each)) for each in source.names()), most_elements)
            for each in sorted(source.names()):
                tensor = source.get(each).clone().contiguous()
                yield each, tensor, tensor.flatten().view(torch.uint8).numpy().data
            return
    raise ModelError(f"the adapter {folder} has neither {SAFETENSORS} nor {' nor '.join(TORCH)}")


def _of_safetensors(file: Path, path: str, most_elements: int) -> Iterator[tuple[str, Tensor, bytearray]]:
    from safetensors import SafetensorError, deserialize

    try:
        found = deserialize(read_whole(file, most_elements))
    except (SafetensorError, OSError) as error:
        raise unreadable(file, "a whole safetensors file", str(error)) from error
    check_elements(path, sum(math.prod(each["shape"]) for _, each in found), most_elements)
    for name, each in sorted(found, key=lambda pair: pair[0]):
        dtype, content = DTYPES.get(each["dtype"]), each["data"]
        if dtype is None:
            raise _not_float(path, name, each["dtype"])
        flat = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
        yield name, flat.view(each["shape"]), content


def _not_float(path: str, name: str, kind: object) -> ModelError:
    return ModelError(f"the adapter {path}: {printable(name)} is stored as {kind}, and floats are expected")


def _modules(tensors: dict[str, Tensor], path: str) -> dict[str, AdapterModule]:
    if not tensors:
        raise ModelError(f"the adapter {path} has no tensors")
    found = dict[str, dict[str, Tensor]]()
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise _not_float(path, name, tensor.dtype)
        module, kind = _meaning(name, path)
        if found.setdefault(module, {}).setdefault(kind, tensor) is not tensor:
            raise ModelError(f"the adapter {path} has two tensors for {kind} of {printable(module)}")
    return {name: AdapterModule(name, **each) for name, each in found.items()}


def _meaning(name: str, path: str) -> tuple[str, str]:
    """The module that a tensor is for, and which field of an `AdapterModule` it is."""
    own = name.removeprefix(PREFIX)
    if (found := FACTORS.fullmatch(own)) is not None:
        kind = KINDS.get((found["kind"], found["end"]))
    elif (found := WHOLE.fullmatch(own)) is not None:
        kind = found["kind"]
    else:
        kind = None
    if found is None or kind is None:
        raise ModelError(f"the adapter {path}: a tensor {printable(name)} means nothing in a LoRA adapter")
    return found["module"], kind


def _check(module: AdapterModule, config: AdapterConfig, path: str) -> None:
    check_factors(module, path)
    about = f"the adapter {path}: {printable(module.name)}"
    rows = next((len(b) for _, b in module.pairs), 0)
    if (not rows and module.magnitude is not None) or (module.b is None and module.b_bias is not None):
        raise ModelError(f"{about} has a magnitude or bias, and no factors")
    if (module.magnitude is not None) != (config.dora and rows > 0):
        has = "a" if module.magnitude is not None else "no"
        raise ModelError(f"{about} has {has} magnitude, and use_dora is {config.dora}")
    for what, vector in (("magnitude", module.magnitude), ("bias of lora_B", module.b_bias)):
        if vector is not None and vector.numel() != rows:
            raise ModelError(f"{about} has a {what} of {vector.numel()} values, and its lora_B has {rows} rows")
