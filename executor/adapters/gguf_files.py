"""An adapter in a GGUF file, as llama.cpp's convert_lora_to_gguf.py writes it.

    blk.0.attn_q.weight.lora_a [rank, in_features]   blk.0.attn_q.weight.lora_b [out_features, rank]

What the converter changes of a matrix's rows it changes of B's, so that a B is read as the model's own matrix of a GGUF
file would be: rows of rotary pairs, parts of fused matrices and stacked experts go back to their places.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from headrace.executor.adapters.adapter import (
    SHOWN,
    Adapter,
    AdapterModule,
    check_elements,
    check_factors,
    identity_of,
    read_whole,
)
from headrace.executor.adapters.peft_config import MOST, MOST_INVOCATION_TOKENS
from headrace.executor.checkpoints.sources.gguf.config import ARCHITECTURES, architecture_of
from headrace.executor.checkpoints.sources.gguf.file import GGUFWeights
from headrace.executor.checkpoints.sources.gguf.header import GGUFHeader, TensorRecord, shown
from headrace.executor.checkpoints.sources.gguf.names import records_by_name
from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import families
from headrace.ipc.adapters import CONFIG_NAME
from headrace.ipc.failure import ModelError
from headrace.ipc.process.log import printable

ALPHA, TOKENS = "adapter.lora.alpha", "adapter.alora.invocation_tokens"
TASK_NAME, PROMPT_PREFIX = "adapter.lora.task_name", "adapter.lora.prompt_prefix"
KNOWN = frozenset(("adapter.type", ALPHA, TOKENS, TASK_NAME, PROMPT_PREFIX))
"""Keys about the adapter."""
MOST_TEXT = 4096
"""Characters of a text that lists of adapters show."""
PAIR = re.compile(r"(.+)\.lora_([ab])")
ALSO: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "chatglm": ("GlmForCausalLM",),
        "deepseek2": (
            "DeepseekV2ForCausalLM",
            "DeepseekV3ForCausalLM",
            "Glm4MoeLiteForCausalLM",
            "Mistral4ForCausalLM",
        ),
        "granitehybrid": ("BambaForCausalLM",),
        "llama": ("MistralForCausalLM", "MistralConsolidated", "MixtralForCausalLM", "InternLM3ForCausalLM"),
        "mamba": ("FalconMambaForCausalLM",),
        "mistral3": ("MistralForCausalLM",),
        "olmo2": ("Olmo3ForCausalLM",),
    }
)
"""Architectures that the converter writes under these names besides that of `ARCHITECTURES`."""
TURNED = ("qwen35", "qwen35moe")
"""Of these the converter reorders the heads of gated delta networks."""


@dataclass(frozen=True)
class GGUFScaling:
    """`Scaling` of a GGUF file."""

    alpha: float
    """0: products are not scaled."""
    invocation_tokens: tuple[int, ...]
    dora: bool = False
    peft_version: tuple[int, ...] = ()

    def scaling(self, module: str, rank: int) -> float:
        return self.alpha / rank if self.alpha else 1.0

    def rank_of(self, module: str) -> None:
        return None


def gguf_of(path: str) -> Path | None:
    """The GGUF file that a path means: the file, or the only one of a folder without peft's configuration."""
    found = Path(path)
    if found.is_dir() and not (found / CONFIG_NAME).exists():
        beside = sorted(found.glob("*.gguf"))
        return beside[0] if len(beside) == 1 else None
    return found if found.suffix == ".gguf" and found.exists() else None


def read_gguf(file: Path, spec: ArchSpec, max_rank: int, most_elements: int) -> Adapter:
    """spec: of the model, without padding. Raises ModelError, with the file and the cause, for what is no sound adapter
    of this model, for a higher rank, and for more than most_elements values in all its tensors."""
    try:
        content = np.frombuffer(read_whole(file, most_elements), np.uint8)
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror or error}") from error
    header = GGUFHeader(file, content)
    config = _scaling(header)
    check_elements(str(file), sum(math.prod(each.shape) for each in header.tensors.values()), most_elements)
    described = (
        (f"{name} {record.type_name} {record.shape}", np.ascontiguousarray(record.data).data)
        for name, record in sorted(header.tensors.items())
    )
    hashed = identity_of(f"{config} {header.metadata.get('general.architecture')}".encode(), described)
    modules = _modules(header, spec)
    for each in modules.values():
        check_factors(each, str(file))
    rank = max((len(a) for each in modules.values() for a, _ in each.pairs), default=0)
    if rank > max_rank:
        raise ModelError(
            f"the adapter {file} has factors of rank {rank}, which is greater than max_lora_rank, {max_rank}"
        )
    is_turned = header.metadata["general.architecture"] in TURNED
    task_name, prompt_prefix = (_text(header, key) for key in (TASK_NAME, PROMPT_PREFIX))
    return Adapter(file, config, modules, hashed, rank, is_turned, task_name, prompt_prefix)


def _scaling(header: GGUFHeader) -> GGUFScaling:
    metadata, path = header.metadata, header.path
    if (kind := metadata.get("general.type")) != "adapter":
        raise ModelError(f"{path} is no adapter: its general.type is {kind!r:.80}, and adapter is expected")
    if (kind := metadata.get("adapter.type")) != "lora":
        raise ModelError(f"the adapter {path} has the adapter.type {kind!r:.80}, and lora is supported")
    unknown = sorted(key for key in metadata if key.startswith("adapter.") and key not in KNOWN)
    if unknown:
        raise ModelError(f"the adapter {path} has unknown keys {printable(', '.join(unknown))[:200]}")
    alpha, tokens = metadata.get(ALPHA, 0.0), metadata.get(TOKENS, np.zeros(0, np.uint32))
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 <= alpha <= MOST:
        raise ModelError(f"the adapter {path}: {ALPHA} is {alpha!r:.80}; a number from 0 to {MOST} is expected")
    if not isinstance(tokens, np.ndarray) or tokens.dtype.kind not in "iu" or (tokens.astype(np.int64) < 0).any():
        raise ModelError(f"the adapter {path}: {TOKENS} is no list of token ids")
    if len(tokens) > MOST_INVOCATION_TOKENS:
        raise ModelError(f"the adapter {path}: {TOKENS} has {len(tokens)} tokens, over {MOST_INVOCATION_TOKENS}")
    return GGUFScaling(float(alpha), tuple(tokens.tolist()))


def _text(header: GGUFHeader, key: str) -> str:
    value = header.metadata.get(key, "")
    if not isinstance(value, str) or len(value) > MOST_TEXT:
        raise ModelError(
            f"the adapter {header.path}: {key} is {shown(value)}; a text of at most {MOST_TEXT} characters is expected"
        )
    return value


def _modules(header: GGUFHeader, spec: ArchSpec) -> dict[str, AdapterModule]:
    """By the model's names."""
    firsts, seconds = _pairs(header)
    own = records_by_name(header, seconds, spec, architecture_of(header)) if _fits(header, spec) else {}
    if unknown := sorted(name for name, record in own.items() if name == record.name.removesuffix(".lora_b")):
        named = ", ".join(unknown[:SHOWN]) + (f" and {len(unknown) - SHOWN} more" if unknown[SHOWN:] else "")
        raise ModelError(
            f"the adapter {header.path}: {spec.architecture} has no matrices that adapters change under the names "
            f"{printable(named)}"
        )
    of_a = {name: _first(firsts[record.name.removesuffix(".lora_b")], name, spec) for name, record in own.items()}
    a, b = GGUFWeights(header.path, of_a, {}, {}), GGUFWeights(header.path, own, _permuted(header, spec), {})
    found = dict[str, AdapterModule]()
    for name in own:
        if any(re.search(each, name) for each in spec.names.ignorable):
            continue  # as RWKV-7's first layer, for which the converter repeats another matrix
        module, _, kind = name.rpartition(".")
        if kind != "weight":
            raise ModelError(f"the adapter {header.path} has factors for {printable(name)}, which is no matrix")
        pair = a.get(name), b.get(name)
        keys: tuple[str, ...] = "a", "b"
        if module.endswith(spec.names.embedding):
            pair, keys = (pair[0].T, pair[1]), ("embedding_a", "embedding_b")
        found[module] = AdapterModule(module, **dict(zip(keys, pair, strict=True)))
    return found


def _pairs(header: GGUFHeader) -> tuple[dict[str, TensorRecord], dict[str, TensorRecord]]:
    """A's and B's by the name of the model's tensor."""
    found: dict[str, dict[str, TensorRecord]] = {"a": {}, "b": {}}
    for name, record in header.tensors.items():
        if (match := PAIR.fullmatch(name)) is None:
            raise ModelError(f"the adapter {header.path}: a tensor {printable(name)} means nothing in a LoRA adapter")
        found[match[2]][match[1]] = record
    if alone := sorted(found["a"].keys() ^ found["b"].keys()):
        raise ModelError(f"the adapter {header.path}: {printable(alone[0])} has one of its two factors only")
    if not found["a"]:
        raise ModelError(f"the adapter {header.path} has no tensors")
    return found["a"], found["b"]


def _first(record: TensorRecord, name: str, spec: ArchSpec) -> TensorRecord:
    """The A that belongs to the B of a matrix of the model: the whole tensor, or an expert's part of it."""
    expert = re.search(rf"\.{re.escape(spec.names.experts)}\.(\d+)\.", name)
    if len(record.shape) == 2 or expert is None:
        return record
    count, *shape = record.shape
    rows = len(record.data) // count
    number = int(expert[1]) if count > 1 else 0  # the converter keeps one A for all where they are the same
    return replace(record, shape=tuple(shape), data=record.data[number * rows : (number + 1) * rows])


def _fits(header: GGUFHeader, spec: ArchSpec) -> bool:
    """Raises ModelError for an adapter of another architecture than the model's."""
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise ModelError(f"the adapter {header.path} has no general.architecture, which says for what models it is")
    if name == "falcon-h1":
        raise ModelError(
            f"the adapter {header.path}: models of falcon-h1 have multipliers that a GGUF file's matrices contain, so "
            "that its adapters are not read; PEFT's folder is"
        )
    if name in ARCHITECTURES:
        known = families()
        own = ARCHITECTURES[name].architecture, *ALSO.get(name, ())
        family = known.get(spec.architecture)
        if family is not None and family in map(known.get, own):
            return True
    raise ModelError(
        f"the adapter {header.path} is for models of llama.cpp's architecture {printable(name)}, and this one is a "
        f"{spec.architecture}"
    )


def _permuted(header: GGUFHeader, spec: ArchSpec) -> Mapping[str, int]:
    """As `GGUFWeights` takes them."""
    if not architecture_of(header).permuted:
        return {}
    found: Any = next(layer.mixer for layer in spec.layers if layer.mixer.cache is not None)
    if found.rope is not None and found.rope.interleaved:
        return {}  # the model's own file has the rows in this order too
    return dict.fromkeys((spec.names.query, spec.names.key), found.cache.key_size)
