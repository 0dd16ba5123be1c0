"""Libraries that read safetensors files in ways of their own (`--load-format runai_streamer`, `fastsafetensors`): all
tensors into memory at once, by several threads, for storage that one thread does not keep busy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from types import MappingProxyType

from torch import Tensor

from headrace.executor.checkpoints.weights import WeightSource, take_part
from headrace.ipc.failure import ModelError, OptionError


@dataclass(frozen=True)
class Library:
    package: str
    """As it is imported; the extra of pyproject.toml is called as the load format."""
    tensors: Callable[[Sequence[Path]], Iterator[tuple[str, Tensor]]]
    """Each is the caller's own: what the library does next leaves it as it is."""


def _by_runai(files: Sequence[Path]) -> Iterator[tuple[str, Tensor]]:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files([str(file) for file in files])
        for name, tensor in streamer.get_tensors():
            yield name, tensor.clone()  # of a buffer that is used again


def _by_fastsafetensors(files: Sequence[Path]) -> Iterator[tuple[str, Tensor]]:
    import torch
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), torch.device("cpu"), nogds=True)
    try:
        loader.add_filenames({0: [str(file) for file in files]})
        held = loader.copy_files_to_device()
        try:
            for name in list(held.key_to_rank_lidx):
                yield name, held.get_tensor(name).clone()  # of memory that goes with `held`
        finally:
            held.close()
    finally:
        loader.close()


LIBRARIES: Mapping[str, Library] = MappingProxyType(
    {
        "runai_streamer": Library("runai_model_streamer", _by_runai),
        "fastsafetensors": Library("fastsafetensors", _by_fastsafetensors),
    }
)
"""By load format."""


def check_installed(load_format: str) -> None:
    """Raises OptionError, with the line that installs it."""
    package = LIBRARIES[load_format].package
    if util.find_spec(package) is None:
        raise OptionError(
            f"load_format={load_format} needs {package}, which is not installed: "
            f"in Headrace's clone, pip install '.[{load_format}]'"
        )


class LibraryWeights:
    """The tensors that `stored` has, read by a library. Raises ModelError where both disagree about the files."""

    def __init__(self, load_format: str, files: Sequence[Path], stored: WeightSource) -> None:
        self._names, self._tensors = stored.names(), dict[str, Tensor]()
        try:
            for name, tensor in LIBRARIES[load_format].tensors(files):
                self._tensors[name] = tensor
        except Exception as error:  # whatever the library raises
            raise ModelError(f"{load_format} cannot read {files[0].parent}: {error}") from error
        for name in sorted(self._names):
            found = self._tensors.get(name)
            if found is None or tuple(found.shape) != stored.shape(name):
                shape = "nothing" if found is None else tuple(found.shape)
                where, due = files[0].parent, stored.shape(name)
                raise ModelError(f"{load_format} reads {shape} as {name} of {where}, whose files have {due}")

    def names(self) -> frozenset[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def get(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        return take_part(self._tensors[name], self.shape(name), rows, columns)
