"""Sharded state: a model's weights in one file per rank. `--load-format sharded_state` reads it; `save` writes it.

    model-rank-0-part-0.safetensors     the parts that rank 0 reads, each under the name NAME|rows|columns
    model-rank-1-part-0.safetensors     ...
    config.json, tokeniser files        copies of those of the original checkpoint

So each rank reads one file sequentially, and nothing else. Each file's header has the parallel sizes that it was made
for, and the shapes of all weights.
"""

from __future__ import annotations

import json
import shutil
import sys
from functools import cached_property, partial
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from headrace.core.options.engine_options import Options
from headrace.executor.checkpoints.checkpoint import Checkpoint, open_checkpoint
from headrace.executor.checkpoints.sources.safetensors_weights import Strategy, open_files, prefetch
from headrace.executor.checkpoints.weights import Numbers, StoredTensor, Weights, WeightSource, bounds
from headrace.executor.models.decoder import Decoder
from headrace.executor.models.families import spec_from_config
from headrace.executor.parallel.rank_place import RankCoordinates
from headrace.ipc.failure import HeadraceError, ModelError, OptionError
from headrace.ipc.struct_types import threadsafe
from headrace.kernels.registry import choose_reference

FILE_NAME = "model-rank-{rank}-part-0.safetensors"
HEADER = "headrace_sharded_state"
NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".safetensors.index.json", ".bin.index.json")


class SavedWorld(msgspec.Struct, frozen=True):
    """The parallel sizes and the rank's layers that a file was made for."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    layers: tuple[int, int]
    """The rank's first layer, and its last + 1."""

    @classmethod
    def of(cls, place: RankCoordinates, num_layers: int) -> SavedWorld:
        own = place.layers(num_layers)
        return cls(place.tp_size, place.pp_size, (own.start, own.stop))


class Header(msgspec.Struct, frozen=True):
    """The JSON in each file's metadata under `HEADER`."""

    world: SavedWorld
    shapes: dict[str, tuple[int, ...]]
    """Whole shape of every weight of the model."""


class ShardedWeights(WeightSource):
    """The parts that one rank reads; it has no others.

    Raises ModelError if the rank's file is missing, of another format, or for other parallel sizes.
    """

    def __init__(self, folder: Path, place: RankCoordinates, num_layers: int, strategy: Strategy = "lazy") -> None:
        from safetensors import SafetensorError

        self._path = folder / FILE_NAME.format(rank=place.rank)
        try:
            (self._file,) = open_files([self._path], strategy)
            self._header = msgspec.json.decode(self._file.metadata()[HEADER], type=threadsafe(Header))
        except (SafetensorError, OSError, KeyError, msgspec.MsgspecError) as error:
            raise ModelError(
                f"{self._path} is not what rank {place.rank} of a sharded state should be: {error}",
                hint="headrace save-sharded-state writes it anew",
            ) from error
        wanted = SavedWorld.of(place, num_layers)
        if self._header.world != wanted:
            raise ModelError(
                f"{folder} was saved for {_sizes(self._header.world)}, not for {_sizes(wanted)}; load it as it was "
                "saved, or save it anew"
            )
        self._keys = self._file.names
        if strategy == "prefetch":
            prefetch(self, [self._path], 0, 1)

    def names(self) -> frozenset[str]:
        return frozenset(self._header.shapes)

    def stored(self, name: str) -> StoredTensor:
        shape = self._header.shapes[name]
        return StoredTensor.plain(shape, self._formats.get(name, "(other ranks')"), partial(self._part, name, shape))

    @cached_property
    def _formats(self) -> dict[str, str]:
        """By name of the whole tensor, of those of which this rank has a part."""
        return {key.partition("|")[0]: self._file.stored(key).format for key in self._keys}

    def _part(self, name: str, shape: tuple[int, ...], rows: slice | None, columns: slice | None) -> Tensor:
        key = part_name(name, shape, rows, columns)
        if key not in self._keys:
            raise ModelError(f"{self._path} holds no {key}: it was saved by another version; save it anew")
        return self._file.get(key)


def _noted(source: Weights, parts: dict[str, Tensor]) -> Weights:
    """The weights, of which every part that is read is put into `parts`."""

    def stored(name: str) -> StoredTensor:
        found = source.stored(name)

        def part(rows: slice | None, columns: slice | None) -> Tensor:
            read = found.numbers.part(rows, columns)
            parts[part_name(name, found.shape, rows, columns)] = read
            return read

        return found.reading(Numbers(part, found.numbers.packed))

    return source.then("parts that are read are noted", source.names(), stored)


def part_name(name: str, shape: tuple[int, ...], rows: slice | None, columns: slice | None) -> str:
    """The name of a part in a file: equal for all slices that mean the same part."""
    if not shape:
        return name
    first, last = bounds(rows, shape[0])
    begin, end = bounds(columns, shape[-1]) if len(shape) > 1 else (0, 0)
    return f"{name}|{first}:{last}|{begin}:{end}"


def save(options: Options, folder: Path) -> list[Path]:
    """Writes the model's sharded state for the options' parallel sizes, and copies the files beside its weights.
    Returns the files of weights.

    Needs memory for one rank's part at a time. Raises OptionError and ModelError.
    """
    from safetensors.torch import save_file

    checkpoint = open_checkpoint(options)
    if checkpoint.format not in ("safetensors", "pt"):
        reason = ", of which each rank reads its own rows and blocks alone as it is" if checkpoint.gguf else ""
        raise OptionError(
            f"a sharded state is made of a folder of safetensors or PyTorch files, and {checkpoint.path} is "
            f"{checkpoint.format}{reason}"
        )
    if checkpoint.quantisation is not None:
        raise OptionError(
            f"a sharded state is of floats, and {checkpoint.path} is stored as {checkpoint.quantisation.names[0]}, of "
            "which each rank reads its own groups"
        )
    if checkpoint.as_loaded is not None:
        raise OptionError(f"a sharded state is of floats, and quantization={checkpoint.as_loaded.name} makes none")
    if folder.resolve() == checkpoint.path.resolve():
        raise OptionError(f"{folder} is the model's own folder; name another for the sharded state")
    spec = spec_from_config(checkpoint.config)
    source = checkpoint.weights()
    shapes = {name: tuple(source.shape(name)) for name in sorted(source.names())}
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for rank in range(options.tensor_parallel_size * options.pipeline_parallel_size):
        place = RankCoordinates.of_options(rank, options)
        noted = dict[str, Tensor]()
        # On the meta device, so that only the recorded parts take memory.
        Decoder(spec, _noted(source, noted), torch.float32, "meta", place, choose=choose_reference)
        header = Header(SavedWorld.of(place, spec.num_layers), shapes)
        path = folder / FILE_NAME.format(rank=rank)
        parts = {name: part.contiguous().clone() for name, part in noted.items()}
        save_file(parts, path, metadata={HEADER: msgspec.json.encode(header).decode(), "format": "pt"})
        written.append(path)
    _copy_rest(checkpoint, folder)
    return written


def _copy_rest(checkpoint: Checkpoint, folder: Path) -> None:
    for file in sorted(checkpoint.path.iterdir()):
        if file.is_file() and not file.name.endswith(NOT_COPIED):
            shutil.copyfile(file, folder / file.name)


def _sizes(world: SavedWorld) -> str:
    first, stop = world.layers
    return (
        f"tensor_parallel_size={world.tensor_parallel_size} and pipeline_parallel_size={world.pipeline_parallel_size} "
        f"with layers {first} to {stop - 1} on this rank"
    )


def main() -> int:
    """`python -m headrace.executor.checkpoints.sources.sharded_state FOLDER`, with Options as JSON on stdin."""
    try:
        options = msgspec.json.decode(sys.stdin.buffer.read(), type=threadsafe(Options))
        for path in save(options, Path(sys.argv[1])):
            print(f"{path} ({path.stat().st_size:,} bytes)")
    except HeadraceError as error:
        print(json.dumps({"error": str(error), "hint": error.hint}), file=sys.stderr)
        return 1
    except OSError as error:
        said = f"the sharded state cannot be written to {sys.argv[1]}: {error.strerror or error}"
        print(json.dumps({"error": said, "hint": ""}), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
