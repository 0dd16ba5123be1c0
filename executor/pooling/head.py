"""The layers between pooled hidden states and vectors or logits, in float32, and the functions that end them.

Vectors come and go as numpy arrays, and what most models end with, `normalized`, needs no torch: after a forward pass
little of torch is in a core's cache, and each of its operations then takes longer than the numbers of a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from headrace import kernels
from headrace.executor.adapters.heads import HeadTable, SlotScales
from headrace.executor.checkpoints.sources.safetensors_weights import SafetensorsWeights
from headrace.executor.checkpoints.sources.torch_files import TorchWeights
from headrace.executor.checkpoints.weights import WeightSource
from headrace.executor.models.heads import (
    HeadLayer,
    HeadLinear,
    HeadNorm,
    HeadTokens,
    HeadUnitLength,
    HeadVocabulary,
)
from headrace.ipc.failure import ModelError

F = torch.nn.functional
Function = Callable[[Tensor], Tensor]
Step = Callable[[Tensor, SlotScales], Tensor]
TokenId = Callable[[str], int | None]
"""From a token as the vocabulary spells it to its id."""
FUNCTIONS: MappingProxyType[str, Function] = MappingProxyType(
    {
        "identity": lambda x: x,
        "tanh": torch.tanh,
        "relu": F.relu,
        "gelu": F.gelu,
        "gelu_tanh": partial(F.gelu, approximate="tanh"),
        "silu": F.silu,
        "sigmoid": torch.sigmoid,
        "softmax": partial(torch.softmax, dim=-1),
        "log1p_relu": lambda x: torch.log1p(F.relu(x)),
        "log1p_log1p_relu": lambda x: torch.log1p(torch.log1p(F.relu(x))),
    }
)
"""Of rows. They are computed in float64 (see `exact`)."""


def exact(function: str, x: Tensor) -> Tensor:
    """The function of float32 rows, computed in float64: so a row's bits do not depend on where it is among the others,
    since torch computes what fills a vector register in another way than the rest."""
    return x if function == "identity" else FUNCTIONS[function](x.double()).float()


def activated(function: str, vectors: np.ndarray) -> np.ndarray:
    """[num_rows, values] float32: what ends an output, `normalize` or one of FUNCTIONS, of such rows."""
    if function == "normalize":
        return normalized(vectors)
    values: np.ndarray = exact(function, torch.from_numpy(vectors)).numpy()
    return values


def normalized(vectors: np.ndarray) -> np.ndarray:
    """Rows [num_rows, values] float32 divided by their lengths, in float64, which sums each row by itself."""
    wide = vectors.astype(np.float64)
    lengths = np.sqrt(np.add.reduce(wide * wide, axis=1, keepdims=True))
    return (wide / np.maximum(lengths, 1e-12)).astype(np.float32)


class Head:
    """The layers with their weights. A row's bits do not depend on the others."""

    def __init__(
        self,
        layers: Sequence[HeadLayer],
        checkpoint: WeightSource | None,
        prefixes: Sequence[str] = (),
        token_id: TokenId = lambda token: None,
        adapters: Mapping[str, HeadTable] = MappingProxyType({}),
    ) -> None:
        """checkpoint: None if no layer is in it; adapters: of the layers that they may change, by name. Raises
        ModelError, naming the weight, for one that is missing or of another shape."""
        self._steps: list[Step] = []
        for layer in layers:
            if isinstance(layer, HeadUnitLength):
                self._steps.append(lambda x, adapters: torch.from_numpy(normalized(x.numpy())))
                continue
            if isinstance(layer, HeadTokens):
                assert checkpoint is not None, "it has the output matrix"
                self._steps.append(_linear(_rows(layer, checkpoint, prefixes, token_id), None, "identity"))
                continue
            if isinstance(layer, HeadVocabulary):
                assert checkpoint is not None, "it has the matrix"
                self._steps.append(_vocabulary(layer, checkpoint, prefixes))
                continue
            source = _beside(Path(layer.folder)) if layer.folder else checkpoint
            assert source is not None, "a layer without a folder is in the checkpoint"
            table = None if layer.folder else adapters.get(layer.name)
            self._steps.append(_step(layer, source, "" if layer.folder else None, prefixes, table))

    @torch.inference_mode()
    def __call__(self, x: np.ndarray, adapters: SlotScales = ()) -> np.ndarray:
        """x [num_rows, width] float32 -> [num_rows, values] float32; adapters: of all rows"""
        values = torch.from_numpy(x)
        for step in self._steps:
            values = step(values, adapters)
        return values.numpy()


def _step(
    layer: HeadLinear | HeadNorm,
    source: WeightSource,
    prefix: str | None,
    prefixes: Sequence[str],
    table: HeadTable | None,
) -> Step:
    held, found = source.names(), list[Tensor]()
    for name, shape in layer.weights():
        tried = [f"{each}{name}" for each in ("", *prefixes)] if prefix is None else [prefix + name]
        full = next((each for each in tried if each in held), None)
        if full is None:
            raise ModelError(f"the checkpoint has no weight {name}; expected one of shape {list(shape)}")
        if source.shape(full) != shape:
            raise ModelError(f"weight {full} has shape {list(source.shape(full))}, but {list(shape)} is expected")
        found.append(_floats(source, full))
        held -= {full}
    if layer.folder and held:
        raise ModelError(f"{layer.folder} holds weights that its layer has no place for: {', '.join(sorted(held)[:5])}")
    if isinstance(layer, HeadLinear):
        own = _linear(found[0], found[1] if layer.bias else None, layer.activation, table)
        if not layer.residual:
            return own
        beside = _linear(found[-1], None, "identity") if layer.rows != layer.columns else None
        return lambda x, adapters: own(x, adapters) + (x if beside is None else beside(x, ()))
    weight, bias = found[0], found[1] if len(found) > 1 else None
    size, eps = (layer.size,), layer.eps
    wide, offset = weight.double(), None if bias is None else bias.double()

    def step(x: Tensor, adapters: SlotScales) -> Tensor:
        y = F.layer_norm(x.double(), size, wide, offset, eps).float()
        return y if table is None else table.added(x, y, adapters)

    return step


def _floats(source: WeightSource, name: str, rows: slice | None = None) -> Tensor:
    """A weight or some rows of it, float32. Raises ModelError for integers."""
    stored = source.get(name, rows=rows)
    if not stored.is_floating_point():
        kind = str(stored.dtype).removeprefix("torch.")
        raise ModelError(f"the weight {name} is stored as {kind}; a type of floats is expected")
    return stored.float()


def _linear(weight: Tensor, bias: Tensor | None, activation: str, table: HeadTable | None = None) -> Step:
    choice = kernels.choose(
        "linear", device=torch.device("cpu"), dtype=torch.float32, shape=tuple(weight.shape), role="matrix"
    )
    linear = choice(weight, bias)

    def step(x: Tensor, adapters: SlotScales) -> Tensor:
        y = linear.apply(x.contiguous())
        return exact(activation, y if table is None else table.added(x, y, adapters))

    return step


def _matrix(layer: HeadTokens | HeadVocabulary, checkpoint: WeightSource, prefixes: Sequence[str]) -> str:
    """The name of the output matrix."""
    held = checkpoint.names()
    names = [f"{prefix}{name}.weight" for name in layer.matrices for prefix in ("", *prefixes)]
    name = next((each for each in names if each in held), None)
    if name is None or checkpoint.shape(name) != (layer.vocab_size, layer.columns):
        raise ModelError(f"the checkpoint has no output matrix of shape {[layer.vocab_size, layer.columns]}")
    return name


def _vocabulary(layer: HeadVocabulary, checkpoint: WeightSource, prefixes: Sequence[str]) -> Step:
    weight, bias = _floats(checkpoint, _matrix(layer, checkpoint, prefixes)), None
    if layer.biases:
        name = next((each for each in layer.biases if each in checkpoint.names()), None)
        if name is None:
            raise ModelError(f"the checkpoint has no weight {layer.biases[0]}, of the layer over the vocabulary")
        bias = _floats(checkpoint, name)
    return _linear(weight, bias, "identity")


def _rows(layer: HeadTokens, checkpoint: WeightSource, prefixes: Sequence[str], token_id: TokenId) -> Tensor:
    """[1, columns]"""
    name, rows = _matrix(layer, checkpoint, prefixes), []
    for token in layer.tokens:
        number = token if isinstance(token, int) else token_id(token)
        if number is None or number >= layer.vocab_size:
            raise ModelError(f"the tokenizer has no token {token!r}, whose logit is to be the score")
        rows.append(_floats(checkpoint, name, slice(number, number + 1)))
    return rows[0] if len(rows) == 1 else rows[0] - rows[1]


def _beside(folder: Path) -> WeightSource:
    """The weights of one of sentence-transformers' modules, or of one file."""
    if folder.suffix == ".pt":
        return TorchWeights([folder])
    if (file := folder / "model.safetensors").is_file():
        return SafetensorsWeights([file])
    if (file := folder / "pytorch_model.bin").is_file():
        return TorchWeights([file])
    raise ModelError(f"{folder} has neither model.safetensors nor pytorch_model.bin")
