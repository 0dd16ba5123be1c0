"""Third-party readers of safetensors files (`--load-format runai_streamer`, `fastsafetensors`). They read all tensors
into memory with several threads, for storage that one thread cannot saturate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from types import MappingProxyType

from torch import Tensor

from headrace.executor.checkpoints.sources.held_weights import TensorWeights
from headrace.executor.checkpoints.weights import WeightSource
from headrace.ipc.extras import how_to_install
from headrace.ipc.failure import ModelError, OptionError


@dataclass(frozen=True)
class ReaderLibrary:
    package: str
    """The module's name; the extra in pyproject.toml has the load format's name."""
    tensors: Callable[[Sequence[Path]], Iterator[tuple[str, Tensor]]]
    """Reads all tensors of files. Each tensor is a copy that the library does not change later."""


def _by_runai(files: Sequence[Path]) -> Iterator[tuple[str, Tensor]]:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files([str(file) for file in files])
        for name, tensor in streamer.get_tensors():
            yield name, tensor.clone()  # the library reuses its buffer


def _by_fastsafetensors(files: Sequence[Path]) -> Iterator[tuple[str, Tensor]]:
    import torch
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), torch.device("cpu"), nogds=True)
    try:
        loader.add_filenames({0: [str(file) for file in files]})
        held = loader.copy_files_to_device()
        try:
            for name in list(held.key_to_rank_lidx):
                yield name, held.get_tensor(name).clone()  # close() frees the memory
        finally:
            held.close()
    finally:
        loader.close()


LIBRARIES: Mapping[str, ReaderLibrary] = MappingProxyType(
    {
        "runai_streamer": ReaderLibrary("runai_model_streamer", _by_runai),
        "fastsafetensors": ReaderLibrary("fastsafetensors", _by_fastsafetensors),
    }
)
"""The libraries, by load format."""


def check_installed(load_format: str) -> None:
    """Raises OptionError, with the command that installs it, if a load format's library is missing."""
    require(LIBRARIES[load_format].package, load_format)


def require(package: str, load_format: str) -> None:
    """Raises OptionError, with the command that installs it, if a package that a load format needs is missing."""
    if util.find_spec(package) is None:
        raise OptionError(
            f"load_format={load_format} needs {package}, which is not installed: {how_to_install(load_format)}"
        )


class LibraryWeights(TensorWeights):
    """The tensors of `stored`, read by a library. Raises ModelError if the library fails, or if names or shapes differ
    from those of `stored`."""

    def __init__(self, load_format: str, files: Sequence[Path], stored: WeightSource) -> None:
        found = dict[str, Tensor]()
        try:
            for name, tensor in LIBRARIES[load_format].tensors(files):
                found[name] = tensor
        except Exception as error:  # whatever the library raises
            raise ModelError(f"{load_format} cannot read {files[0].parent}: {error}") from error
        for name in sorted(stored.names()):
            own = found.get(name)
            if own is None or tuple(own.shape) != stored.shape(name):
                shape = "nothing" if own is None else tuple(own.shape)
                where, due = files[0].parent, stored.shape(name)
                raise ModelError(f"{load_format} reads {shape} as {name} of {where}, whose files have {due}")
        super().__init__({name: found[name] for name in stored.names()})
