"""An adapter's files: https://huggingface.co/docs/peft/developer_guides/checkpoint. All are read once, and whole."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.executor.adapters.peft_config import AdapterConfig, read_config
from headrace.executor.checkpoints.sources.safetensors_weights import SafetensorsWeights
from headrace.executor.checkpoints.sources.torch_files import TorchWeights
from headrace.executor.checkpoints.weights import WeightSource
from headrace.ipc.failure import MissingAdapterError, ModelError
from headrace.ipc.process.log import printable

SAFETENSORS, TORCH = "adapter_model.safetensors", ("adapter_model.bin", "adapter_model.pt")
PREFIX = "base_model.model."
FACTORS = re.compile(
    r"(?P<module>.+)\.(?P<kind>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.default)?(?P<end>\.weight|\.bias|)"
)
WHOLE = re.compile(r"(?P<module>.+?)(?:\.base_layer|\.modules_to_save(?:\.default)?)?\.(?P<kind>weight|bias)")
SHOWN = 5
"""Names in a message."""


@dataclass(frozen=True, eq=False)
class AdapterModule:
    """What an adapter has for one module of the model. None: it has none."""

    name: str
    """As in the checkpoint, without `.weight`."""
    a: Tensor | None = None  # [rank, in_features]
    b: Tensor | None = None  # [out_features, rank]
    b_bias: Tensor | None = None  # [out_features]
    embedding_a: Tensor | None = None  # [rank, vocab_size]
    embedding_b: Tensor | None = None  # [width, rank]
    magnitude: Tensor | None = None  # [out_features]
    weight: Tensor | None = None
    """In the place of the model's."""
    bias: Tensor | None = None
    """In the place of the model's."""

    @property
    def factors(self) -> tuple[Tensor, Tensor] | None:
        return None if self.a is None or self.b is None else (self.a, self.b)


@dataclass(frozen=True, eq=False)
class Adapter:
    path: Path
    config: AdapterConfig
    modules: Mapping[str, AdapterModule] = field(repr=False)
    identity: str
    """sha256, in hexadecimal, of configuration and tensors."""

    @property
    def rank(self) -> int:
        """The largest of its modules."""
        return max(self.config.rank, *self.config.rank_pattern.values(), 0)


def read_adapter(path: str, max_rank: int, most_elements: int) -> Adapter:
    """Raises ModelError, with the file and the cause, for a folder without a sound adapter, for a higher rank, and for
    more than most_elements values in all its tensors, before any is read."""
    folder = Path(path)
    if not folder.is_dir():
        there = folder.exists()
        file = "is a file in GGUF, which is not read" if folder.suffix == ".gguf" else "is no folder"
        what, kind = (file, ModelError) if there else ("does not exist", MissingAdapterError)
        raise kind(f"the adapter {path} {what}: it should have adapter_config.json and {SAFETENSORS}")
    config, source = read_config(folder), _open(folder)
    for what, rank in (("r", config.rank), *(("rank_pattern", each) for each in config.rank_pattern.values())):
        if rank > max_rank:
            raise ModelError(f"the adapter {path} has {what} {rank}, and max_lora_rank is {max_rank}")
    elements = sum(math.prod(source.shape(name)) for name in source.names())
    if elements > most_elements:
        raise ModelError(f"the adapter {path} has {elements} values, and the model itself {most_elements}")
    digest = hashlib.sha256(config.canonical)
    modules: dict[str, AdapterModule] = {}
    for name in sorted(source.names()):
        stored = source.stored(name)
        # A copy, since the file may change once it has been read.
        tensor = stored.numbers.part(None, None).clone().contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
        _take(modules, name, tensor, path)
    if not modules:
        raise ModelError(f"the adapter {path} has no tensors")
    for each in modules.values():
        _check(each, config, path)
    return Adapter(folder, config, modules, digest.hexdigest())


def _open(folder: Path) -> WeightSource:
    if (file := folder / SAFETENSORS).exists():
        return SafetensorsWeights([file])
    for name in TORCH:
        if (file := folder / name).exists():
            return TorchWeights([file])
    raise ModelError(f"the adapter {folder} has neither {SAFETENSORS} nor {' nor '.join(TORCH)}")


def _take(modules: dict[str, AdapterModule], name: str, tensor: Tensor, path: str) -> None:
    if not tensor.is_floating_point():
        raise ModelError(f"the adapter {path}: {printable(name)} is stored as {tensor.dtype}, and floats are expected")
    own = name.removeprefix(PREFIX)
    found = FACTORS.fullmatch(own)
    kind = ""
    if found is not None:
        kind = {
            ("lora_A", ".weight"): "a",
            ("lora_B", ".weight"): "b",
            ("lora_B", ".bias"): "b_bias",
            ("lora_embedding_A", ""): "embedding_a",
            ("lora_embedding_B", ""): "embedding_b",
            ("lora_magnitude_vector", ""): "magnitude",
            ("lora_magnitude_vector", ".weight"): "magnitude",
        }.get((found["kind"], found["end"]), "")
    elif (found := WHOLE.fullmatch(own)) is not None:
        kind = found["kind"]
    if found is None or not kind:
        raise ModelError(f"the adapter {path}: a tensor {printable(name)} means nothing in a LoRA adapter")
    module = modules.get(found["module"], AdapterModule(found["module"]))
    if getattr(module, kind) is not None:
        raise ModelError(f"the adapter {path} has two tensors for {kind} of {printable(found['module'])}")
    changed: dict[str, Any] = {kind: tensor}
    modules[found["module"]] = replace(module, **changed)


def _check(module: AdapterModule, config: AdapterConfig, path: str) -> None:
    about = f"the adapter {path}: {printable(module.name)}"
    for one, other in (("a", "b"), ("embedding_a", "embedding_b")):
        if (getattr(module, one) is None) != (getattr(module, other) is None):
            raise ModelError(f"{about} has one of its two factors only")
    if module.b is None and (module.b_bias is not None or module.magnitude is not None):
        raise ModelError(f"{about} has a magnitude or bias, and no factors")
    if (module.magnitude is not None) != (config.dora and module.a is not None):
        has = "a" if module.magnitude is not None else "no"
        raise ModelError(f"{about} has {has} magnitude, and use_dora is {config.dora}")
    for a, b in ((module.a, module.b), (module.embedding_a, module.embedding_b)):
        if a is None or b is None:
            continue
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1] or 0 in (*a.shape, *b.shape):
            raise ModelError(f"{about} has factors of {list(a.shape)} and {list(b.shape)}, which do not go together")
