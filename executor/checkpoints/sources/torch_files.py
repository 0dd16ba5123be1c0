"""Files that torch.save wrote."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.executor.checkpoints.sources.held_weights import TensorWeights
from headrace.executor.checkpoints.sources.mapped_pages import MappedFile
from headrace.executor.checkpoints.sources.unreadable_files import unreadable
from headrace.executor.checkpoints.weights import StoredTensor
from headrace.ipc.failure import ModelError
from headrace.ipc.process.log import printable
from headrace.ipc.process.regular_files import require_file


class TorchWeights(TensorWeights):
    """Tensors of one or more files that torch.save wrote, memory-mapped where their format allows it.

    A pickle can call any function, so only plain tensors are loaded (torch's weights_only). Raises ModelError for a
    pickle that needs more, for a file that is truncated or of another format, and for a weight in two files if the
    index (from names to files) chooses neither.
    """

    def __init__(self, files: Sequence[Path], weight_map: Mapping[str, str] | None = None) -> None:
        found, chosen = dict[str, Tensor](), weight_map or {}
        self._mapped: dict[str, MappedFile] = {}
        for file in files:
            mapped = _mapped(file)
            loaded = _load_torch(file)
            held = {name: value for name, value in loaded.items() if isinstance(value, Tensor)}
            for name, value in held.items():
                _check_stored(file, name, value)
            if not held:
                raise ModelError(
                    f"{file} holds no tensors by name, only {', '.join(map(str, list(loaded)[:5])) or 'nothing'}"
                )
            held = {name: value for name, value in held.items() if chosen.get(name, file.name) == file.name}
            if twice := found.keys() & held.keys():
                raise ModelError(f"{file} and another file beside it both hold the weight {min(twice)}")
            found |= held
            self._mapped |= dict.fromkeys(held, mapped)
        try:
            super().__init__(found)
        except ModelError as error:
            raise ModelError(f"{', '.join(map(str, files[:3]))}: {error}") from None

    def stored(self, name: str) -> StoredTensor:
        """Raises ModelError if its file has become shorter."""
        self._mapped[name].require_whole()
        return super().stored(name)


def _mapped(file: Path) -> MappedFile:
    try:
        return MappedFile(file)
    except OSError as error:
        raise unreadable(file, "a whole file of torch.save", str(error)) from error


def _load_torch(file: Path) -> dict[Any, Any]:
    try:
        require_file(file)
        _require_stored(file)
        try:
            loaded = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        except RuntimeError as error:
            if "mmap can only be used" not in str(error):
                raise
            loaded = torch.load(file, map_location="cpu", weights_only=True)  # the format before torch 1.6
    except pickle.UnpicklingError as error:
        wanted = _wanted_global(str(error))
        if wanted:
            raise ModelError(
                f"{file} wants to run Python code ({wanted}) while it is loaded, which is refused; "
                "use a safetensors version of this checkpoint"
            ) from error
        raise unreadable(file, "a whole file of torch.save", _unpickling_reason(str(error))) from error
    except Exception as error:  # torch's reader checks little of what a damaged file says
        raise unreadable(file, "a whole file of torch.save", str(error) or type(error).__name__) from error
    if not isinstance(loaded, dict):
        raise ModelError(f"{file} holds a {type(loaded).__name__}; a mapping of names to tensors is expected")
    return loaded


def _check_stored(file: Path, name: object, tensor: Tensor) -> None:
    """Raises ModelError for a tensor whose name is no text, or that repeats numbers to have more than are stored."""
    if not isinstance(name, str) or not _is_text(name):
        raise ModelError(f"{file} holds a tensor under the name {name!r:.80}, and a text is expected")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        return  # refused with the others that are not dense
    stored = tensor.untyped_storage().nbytes()
    if tensor.numel() * tensor.itemsize > stored:
        raise ModelError(
            f"{file}: the weight {printable(name)} of shape {list(tensor.shape)} repeats the {stored} bytes that are "
            "stored; a dense tensor is expected"
        )


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # half of a pair
        return False
    return True


def _require_stored(file: Path) -> None:
    """Raises ValueError for an archive with compressed parts, which torch.save does not write: a few bytes of them
    could fill the memory."""
    if not zipfile.is_zipfile(file):
        return
    with zipfile.ZipFile(file) as archive:
        for part in archive.infolist():
            if part.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"its part {part.filename!r:.80} is compressed")


def _wanted_global(text: str) -> str:
    """The function in torch's message `Unsupported global: GLOBAL posix.mkdir was not an allowed global`; else ""."""
    match = re.search(r"GLOBAL\s+([A-Za-z_][\w.]*)", text)
    return match[1] if match else ""


def _unpickling_reason(text: str) -> str:
    """The cause in torch's message, without its advice to load the file with weights_only=False."""
    match = re.search(r"WeightsUnpickler error:\s*(.+)", text)
    return match[1] if match else text
