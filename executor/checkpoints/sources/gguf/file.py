"""Weights of a GGUF file under Hugging Face names, with their shapes and row order: dequantised by parts, or packed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.executor.checkpoints.sentence_folder import SentenceFolder
from headrace.executor.checkpoints.sources.gguf.config import architecture_of, config_from_gguf, sampling_from_gguf
from headrace.executor.checkpoints.sources.gguf.encoders import YES_NO_SCORE, pooling_of
from headrace.executor.checkpoints.sources.gguf.header import GGUFHeader, TensorRecord, shown
from headrace.executor.checkpoints.sources.gguf.names import records_by_name
from headrace.executor.checkpoints.sources.gguf.regrouped import REGROUPED
from headrace.executor.checkpoints.sources.gguf.split_latent import joined_latent
from headrace.executor.checkpoints.weights import Numbers, Packed, StoredTensor, Weights, WeightSource, bounds
from headrace.ipc.failure import ModelError

UNQUANTISED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class GGUFFile:
    """A GGUF file, or a split model given by its first file: config, generation defaults and weights.

    Opening reads headers only. Raises ModelError, naming file, tensor and numbers, if a file is truncated, not GGUF, of
    an architecture that is not supported, or has a tensor of an unknown type.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header = GGUFHeader(path)
        self.architecture = architecture_of(self.header)
        self.tensors: dict[str, TensorRecord] = dict(self.header.tensors)
        others = _other_parts(self.header)
        self.files = [path, *others]
        for index, other in enumerate(others, 1):
            self._add_part(GGUFHeader(other), index)
        self._check_count()
        self.header.tensors = self.tensors

    def _add_part(self, part: GGUFHeader, index: int) -> None:
        """Raises ModelError for a file of another model's parts, or another part of this one."""
        for key, expected in (("split.no", index), ("split.count", self.header.metadata["split.count"])):
            if part.metadata.get(key, expected) != expected:
                raise ModelError(
                    f"{part.path} is no part of {self.path}: its metadata key {key} is {shown(part.metadata[key])}; "
                    f"{expected} is expected"
                )
        if twice := sorted(part.tensors.keys() & self.tensors.keys()):
            raise ModelError(f"{part.path} has the tensor {twice[0]}, which another part of {self.path} has too")
        self.tensors |= part.tensors

    def _check_count(self) -> None:
        expected = self.header.metadata.get("split.tensors.count", len(self.tensors))
        if len(self.files) > 1 and expected != len(self.tensors):
            raise ModelError(
                f"{self.path} and the other parts have {len(self.tensors)} tensors, and by the metadata key "
                f"split.tensors.count there are {shown(expected)}; fetch them again"
            )

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content of the equivalent Hugging Face config.json."""
        return config_from_gguf(self.header)

    @property
    def generation_config(self) -> dict[str, Any]:
        return sampling_from_gguf(self.header)

    @property
    def dtype_name(self) -> str:
        """The type of most of the file's bytes: float32, float16, bfloat16, or a quantised type such as Q4_1."""
        sizes: dict[str, int] = {}
        for record in self.tensors.values():
            sizes[record.type_name] = sizes.get(record.type_name, 0) + record.nbytes
        most = max(sizes, key=lambda name: sizes[name])
        return UNQUANTISED.get(most, most)

    @property
    def kept_bytes(self) -> int:
        """Memory of the packed weights, in bytes."""
        return sum(_kept_bytes(record) for record in self.tensors.values())

    def weights(self) -> Weights:
        from headrace.executor.models.families import spec_from_config
        from headrace.executor.models.sizes import model_weights

        config = self.config
        spec = spec_from_config(config)
        permuted = {}
        if self.architecture.permuted:
            permuted = dict.fromkeys((spec.names.query, spec.names.key), config["head_dim"])
        records = records_by_name(self.header, self.tensors, spec, self.architecture)
        offsets = {each.name: each.offset for each in model_weights(spec) if self.architecture.offset_norms}
        weights = Weights(GGUFWeights(self.path, records, permuted, offsets))
        return _with_score(joined_latent(spec, weights)) if config.get(YES_NO_SCORE) else joined_latent(spec, weights)

    @cached_property
    def pooling(self) -> SentenceFolder | None:
        """What the file says of the vectors of texts."""
        return pooling_of(self.header)


def _with_score(weights: Weights) -> Weights:
    """One row in the place of those for yes and no."""
    name = "score.weight"
    columns = weights.shape(name)[-1]

    def stored(_: str) -> StoredTensor:
        def part(rows: slice | None, wanted: slice | None) -> Tensor:
            yes, no = weights.get(name).to(torch.float32)
            return (yes - no)[None][:, slice(*bounds(wanted, columns))]

        return StoredTensor.plain((1, columns), "float32", part)

    return weights.then("the logit of yes less that of no", frozenset({name}), stored)


def _kept_bytes(record: TensorRecord) -> int:
    form = REGROUPED.get(record.type_name)
    return record.nbytes if form is None else form.num_bytes(math.prod(record.shape))


def _other_parts(header: GGUFHeader) -> list[Path]:
    """The other files of a split model. Raises ModelError if the header is not that of its first file, or if a file is
    missing."""
    count = header.metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return []
    match = _SPLIT_NAME.fullmatch(header.path.name)
    if match is None or header.metadata.get("split.no", 0) != 0:
        raise ModelError(
            f"{header.path} is part of a model split into {count} files; give the first, NAME-00001-of-{count:05}.gguf"
        )
    if int(match[3]) != count:
        raise ModelError(
            f"{header.path} is one of {int(match[3])} files by its name, and of {count} by its split.count"
        )
    parts = [header.path.with_name(f"{match[1]}-{index:05}-of-{count:05}.gguf") for index in range(2, count + 1)]
    if missing := [part.name for part in parts if not part.is_file()]:
        named = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if missing[5:] else "")
        raise ModelError(f"{header.path} is the first of {count} files; {named} should lie beside it")
    return parts


class GGUFWeights(WeightSource):
    """A file's tensors. Parts of quantised ones are float32, of others of their own type."""

    def __init__(
        self, path: Path, records: Mapping[str, TensorRecord], permuted: Mapping[str, int], offsets: Mapping[str, float]
    ) -> None:
        """records: by Hugging Face name. permuted: rows of a head of each projection whose rows are reordered,
        by its name relative to a layer's prefix. offsets: what was added to weights, by their names."""
        self._path, self._records = path, dict(records)
        self._permuted, self._offsets = permuted, {name: offset for name, offset in offsets.items() if offset}
        self._check_types()

    def _check_types(self) -> None:
        from gguf.quants import _type_traits

        readable = {kind.name for kind in _type_traits} | set(UNQUANTISED)
        for record in self._records.values():
            if record.type_name not in readable:
                raise ModelError(
                    f"{self._path}: tensor {record.name} is of type {record.type_name} ({record.type_number}), which "
                    f"cannot be turned into numbers; readable are {', '.join(sorted(readable))}"
                )

    def names(self) -> frozenset[str]:
        return frozenset(self._records)

    def stored(self, name: str) -> StoredTensor:
        record, part = self._records[name], partial(self._part, name)
        if record.type_name in UNQUANTISED:
            return StoredTensor.plain(record.shape, UNQUANTISED[record.type_name], part)
        form = REGROUPED.get(record.type_name)
        stays = len(record.shape) == 2 and name not in self._offsets
        group = record.block_size if form is None else form.group
        numbers = Numbers(part, partial(self._packed, name) if stays else None)
        return StoredTensor.unpadded(record.shape, record.type_name, group, numbers)

    def _part(self, name: str, rows: slice | None, columns: slice | None) -> Tensor:
        """The tensor or a part of it; only the bytes of these rows and blocks are read."""
        record = self._read(name)
        order = self._row_order(name)
        if len(record.shape) == 1:
            vector = _decode(record, record.data).reshape(-1)
            vector = vector if order is None else vector[torch.from_numpy(order)]
            start, stop = bounds(rows, record.shape[0])
            return self._restored(name, vector[start:stop])
        start, stop = bounds(rows, record.data.shape[0])
        data = record.data[start:stop] if order is None else record.data[order[start:stop]]
        first, last = bounds(columns, record.shape[-1])
        first_block, last_block = first // record.block_size, -(-last // record.block_size)
        part = _decode(record, data[:, first_block * record.block_bytes : last_block * record.block_bytes])
        skipped = first_block * record.block_size
        part = part[:, first - skipped : last - skipped]
        if len(record.shape) > 2 and columns is None and (rows is None or math.prod(record.shape[1:-1]) == 1):
            part = part.reshape(-1, *record.shape[1:])
        return self._restored(name, part)

    def _packed(self, name: str) -> Packed:
        """The weight as stored, (type, [rows, bytes of a row] uint8), with rows in Hugging Face's order. If rows are
        not reordered it is a read-only view of the memory map. Types in `REGROUPED` become codes with group scales.
        """
        record, order = self._read(name), self._row_order(name)
        rows = record.data if order is None else record.data[order]
        if form := REGROUPED.get(record.type_name):
            return form.take_apart(record.type_name, rows)
        return record.type_name, rows

    def _read(self, name: str) -> TensorRecord:
        """The tensor's record. Call before reading its data, so that its pages can be released."""
        record = self._records[name]
        record.pages.read(record.data.ctypes.data, record.nbytes)
        return record

    def _row_order(self, name: str) -> np.ndarray | None:
        """[rows] int64: for each row in Hugging Face's order, its index in the file; None if the orders are equal.

        In a head of d rows, rows i and i + d/2 are rotated together; the file has them at 2i and 2i + 1.
        """
        stem = name.rpartition(".")[0]
        size = next((rows for each, rows in self._permuted.items() if stem.endswith(f".{each}")), None)
        if size is None:
            return None
        num_rows = self._records[name].shape[0]
        if size % 2 or num_rows % size:
            raise ModelError(f"{self._path}: {name} has {num_rows} rows, which are no pairs in heads of {size}")
        return np.arange(num_rows).reshape(-1, size // 2, 2).swapaxes(1, 2).reshape(-1)

    def _restored(self, name: str, tensor: Tensor) -> Tensor:
        if name.endswith(".A_log"):  # stored as -exp of it
            return (-tensor.to(torch.float32)).log()
        return tensor.to(torch.float32) - self._offsets[name] if name in self._offsets else tensor


def _decode(record: TensorRecord, data: np.ndarray) -> Tensor:
    """Dequantises whole blocks, data [rows, bytes] uint8 -> [rows, elements], a copy."""
    if record.type_name in UNQUANTISED:
        owned = torch.from_numpy(np.array(data))
        return owned.view(getattr(torch, UNQUANTISED[record.type_name]))
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    values = dequantize(np.ascontiguousarray(data), GGMLQuantizationType(record.type_number))
    return torch.from_numpy(np.asarray(values, dtype=np.float32))
