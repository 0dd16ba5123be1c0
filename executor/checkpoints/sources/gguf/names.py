"""Maps a GGUF file's tensors to the names that a model declares, by the gguf package's tables read in reverse.

Fused matrices (mostly of queries, keys and values) are fused in a file too, but with their parts one after the other;
they are split here. Experts, which a file stacks, become one tensor each.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from headrace.executor.checkpoints.sources.gguf.header import GGUFHeader, TensorRecord

if TYPE_CHECKING:
    from headrace.executor.checkpoints.sources.gguf.architecture import GGUFArchitecture
    from headrace.executor.models.arch import ArchSpec

# Tensors that are read into the config of a model that rotates.
OF_ROTATION = re.compile(r"rope_freqs\.weight|rope_factors_(long|short)\.weight")
EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down|gate_up)_exps\.(weight|bias)")
ONE_EXPERT = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)\.(\d+)\.(weight|bias)")
LAYER = re.compile(r"blk\.(\d+)\.")
OF_PREDICTION = re.compile(r"blk\.(\d+)\.nextn\.")
# Weights of one number per layer, which a file has in its metadata.
METADATA_WEIGHTS = {"xielu.alpha_p": "mlp.act_fn.alpha_p", "xielu.alpha_n": "mlp.act_fn.alpha_n"}
# Fused tensors whose rows the converter leaves in their groups.
LEFT_IN_GROUPS = re.compile(r"blk\.\d+\.(ssm_ba|ssm_in|attn_q)")
# Halves of latent attention's up-projection, which `split_latent.py` joins.
LATENT_HALVES = ("k_b_proj", "v_b_proj")


def records_by_name(
    header: GGUFHeader, tensors: Mapping[str, TensorRecord], spec: ArchSpec, architecture: GGUFArchitecture
) -> dict[str, TensorRecord]:
    """The file's tensors by the names that the model declares. A tensor that the model does not declare keeps its name,
    and the decoder refuses it unless it may ignore it."""
    places, found = _Places(header, spec, architecture), dict[str, TensorRecord]()
    for name, record in tensors.items():
        if (spec.ropes and OF_ROTATION.fullmatch(name)) or places.is_beyond(name):
            continue
        if match := EXPERTS.fullmatch(name):
            found |= places.experts(int(match[1]), match[2], match[3], record)
        elif match := ONE_EXPERT.fullmatch(name):
            found[places.expert(int(match[1]), match[2], match[4], int(match[3]))] = record
        elif spec.classifier is not None and name.rpartition(".")[0] in architecture.heads:
            stem, _, kind = name.rpartition(".")
            is_row = kind == "weight" and len(record.shape) == 1
            found[f"{architecture.heads[stem]}.{kind}"] = (
                replace(record, shape=(1, *record.shape)) if is_row else record
            )
        else:
            found |= places.plain(name, record)
    found |= places.of_metadata(next(iter(tensors.values())))
    return {name: _with_shape(record, places.shapes.get(name)) for name, record in found.items()}


class _Places:
    """The model's name for each tensor of a file."""

    def __init__(self, header: GGUFHeader, spec: ArchSpec, architecture: GGUFArchitecture) -> None:
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        from headrace.executor.models.sizes import model_weights

        own = header.metadata["general.architecture"]
        kind = next(key for key, name in MODEL_ARCH_NAMES.items() if name == own)
        self._header, self._spec = header, spec
        self._others, self._stacks = architecture.names, architecture.stacks
        self._prefix = spec.names.prefixes[0]
        self._table = get_tensor_name_map(kind, spec.num_layers)
        self._predicting = {int(match[1]) for name in header.tensors if (match := OF_PREDICTION.match(name))}
        self.shapes = {weight.name: weight.shape for weight in model_weights(spec)}
        if spec.names.sublayers > 1:  # whose names in checkpoints lack the second number
            numbers = re.compile(rf"^({re.escape(self._prefix + spec.names.layers)}\.\d+\.)\d+\.")
            self.shapes |= {numbers.sub(r"\1", name): shape for name, shape in self.shapes.items()}
        self._stacked = dict[str, str]()
        """For tensors that stack several weights of one shape: the weights' name, with {} for the number."""
        self._declared = dict(self._plain_names())
        self._fused = {
            own: (start, fused)
            for index, start in enumerate(map(self._start, range(spec.num_layers)))
            for fused in spec.fused_in(index)
            if (own := self._own_name(start + fused.name))
        }

    def _start(self, layer: int) -> str:
        return self._spec.names.layer(self._prefix, layer)

    def _block(self, index: int) -> str:
        """The prefix of what a block of the file has, which may be several layers."""
        return f"{self._prefix}{self._spec.names.layers}.{index}."

    def _own_name(self, stem: str) -> str | None:
        """The file's name for a weight, or None. The tables have some families with another prefix, or without one."""
        rest = stem.removeprefix(self._prefix)
        tried = [stem, *(prefix + rest for prefix in self._spec.names.prefixes if stem.startswith(self._prefix))]
        return next((own for each in tried if (own := self._table.get_name(each))), None)

    def _plain_names(self) -> Iterator[tuple[str, str]]:
        """(the file's name, the model's name) of all weights except experts; fills `_stacked`."""
        each_expert = f".{self._spec.names.experts}."
        for name in self.shapes:
            if each_expert in name:
                continue
            stem, _, kind = name.rpartition(".")
            together, _, number = stem.rpartition(".")
            if number.isdecimal() and (own := self._own_name(together)):
                self._stacked[f"{own}.{kind}"] = f"{together}.{{}}.{kind}"
                continue
            if kind not in ("weight", "bias"):  # a complete name, such as that of a parameter outside a module
                stem, kind = (name.removesuffix("_bias"), "bias") if name.endswith("_bias") else (name, "weight")
            for each in (stem, name, f"{stem}_proj"):  # the tables have some biases by another name
                if own := self._own_name(each):
                    yield f"{own}.{kind}", name
                    yield own, name
                    break

    def is_beyond(self, name: str) -> bool:
        """Whether a tensor belongs to a layer beyond the last that is for multi-token prediction, as others of its
        tensors show."""
        match = LAYER.match(name)
        return match is not None and int(match[1]) >= self._spec.num_layers and int(match[1]) in self._predicting

    def expert(self, layer: int, matrix: str, kind: str, number: int) -> str:
        names = self._spec.names
        part = {"gate": names.expert_gate, "up": names.expert_up, "down": names.expert_down}[matrix]
        return f"{self._start(layer)}{names.experts}.{number}.{part}.{kind}"

    def experts(self, layer: int, matrix: str, kind: str, record: TensorRecord) -> dict[str, TensorRecord]:
        """The experts' weights in a tensor [num_experts, ...]. matrix: gate, up, down or gate_up."""
        found: dict[str, TensorRecord] = {}
        for number, part in enumerate(_unstacked(record)):
            if matrix == "gate_up":
                half = part.shape[0] // 2
                found[self.expert(layer, "gate", kind, number)] = _rows(part, 0, half)
                found[self.expert(layer, "up", kind, number)] = _rows(part, half, part.shape[0])
            else:
                found[self.expert(layer, matrix, kind, number)] = part
        return found

    def plain(self, name: str, record: TensorRecord) -> dict[str, TensorRecord]:
        stem, _, kind = name.rpartition(".")
        if stem in self._fused:
            start, fused = self._fused[stem]
            stops = np.cumsum([count * fused.groups for _, count in fused.parts]).tolist()
            if fused.groups > 1 and LEFT_IN_GROUPS.fullmatch(stem):
                return {f"{start}{fused.name}.{kind}": record}
            if record.shape[0] == stops[-1]:
                return {
                    f"{start}{part}.{kind}": _rows(record, first, last)
                    for (part, _), first, last in zip(fused.parts, [0, *stops], stops, strict=False)
                }
        if name in self._declared:
            return {self._declared[name]: record}
        if name in self._stacked:
            return {self._stacked[name].format(number): part for number, part in enumerate(_unstacked(record))}
        match = LAYER.match(name)
        vectors = () if match is None else self._stacks.get(name[match.end() :], ())
        if match is not None and record.shape[0] == len(vectors):
            start = self._block(int(match[1]))
            return {f"{start}{each}": part for each, part in zip(vectors, _unstacked(record), strict=True)}
        return {self._other(stem, kind) or self._latent_half(name) or name: record}

    def _other(self, stem: str, kind: str) -> str | None:
        if (match := LAYER.match(stem)) is None:
            return None
        start, rest = self._block(int(match[1])), stem[match.end() :]
        if (whole := self._others.get(f"{rest}.{kind}")) is not None:
            return start + whole
        return f"{start}{self._others[rest]}.{kind}" if rest in self._others else None

    def _latent_half(self, name: str) -> str | None:
        match = re.fullmatch(r"blk\.(\d+)\.attn_([kv])_b\.weight", name)
        if match is None:
            return None
        up = self._spec.names.latent_up.rpartition(".")[0]
        return f"{self._start(int(match[1]))}{up}.{match[2]}_b_proj.weight"

    def of_metadata(self, any_record: TensorRecord) -> dict[str, TensorRecord]:
        found: dict[str, TensorRecord] = {}
        for key, name in METADATA_WEIGHTS.items():
            values = self._header.metadata.get(key)
            if not isinstance(values, np.ndarray) or values.dtype != np.float32:
                continue
            for layer in range(len(values)):
                found[self._start(layer) + name] = TensorRecord(
                    key, (1,), 0, "F32", 1, 4, values[layer : layer + 1].view(np.uint8).reshape(1, -1), any_record.pages
                )
        return found


def _unstacked(record: TensorRecord) -> list[TensorRecord]:
    """Each expert's part of a tensor [num_experts, ...]."""
    count, *shape = record.shape
    return [replace(record, shape=tuple(shape), data=part) for part in np.split(record.data, count)]


def _rows(record: TensorRecord, first: int, last: int) -> TensorRecord:
    """Rows of a matrix, or elements of a vector."""
    if len(record.shape) > 1:
        return replace(record, shape=(last - first, *record.shape[1:]), data=record.data[first:last])
    size = record.block_bytes // record.block_size
    return replace(record, shape=(last - first,), data=record.data[:, first * size : last * size])


def _with_shape(record: TensorRecord, declared: tuple[int, ...] | None) -> TensorRecord:
    """The record in the shape that the model declares: converters add and drop dimensions of size 1, and write vectors
    of several groups with a row for each, or those groups as one vector."""
    if declared is None or declared == record.shape or math.prod(declared) != math.prod(record.shape):
        return record
    if record.block_size == 1 and 1 in (len(declared), len(record.shape)):
        return replace(record, shape=declared, data=record.data.reshape(math.prod(declared[:-1]), -1))
    same = [size for size in declared if size > 1] == [size for size in record.shape if size > 1]
    return replace(record, shape=declared) if same and declared[-1] == record.shape[-1] else record
