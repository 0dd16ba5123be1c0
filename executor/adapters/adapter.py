"""What an adapter's files say, whatever their form: its modules' factors under the model's names. Files are read once,
and whole, since they may change once they have been read."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from headrace.ipc.failure import ModelError
from headrace.ipc.process.log import printable
from headrace.ipc.process.regular_files import open_file

SHOWN = 5
"""Names in a message."""
BYTES_OF_VALUE, MOST_HEADER_BYTES = 8, 100 << 20
"""Most bytes of a value, and of what a file has besides them."""


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

    @property
    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(A, B) of a linear layer, and of an embedding."""
        for a, b in ((self.a, self.b), (self.embedding_a, self.embedding_b)):
            if a is not None and b is not None:
                yield a, b

    @property
    def tensors(self) -> Iterator[Tensor]:
        own = (getattr(self, name) for name in self.__dataclass_fields__ if name != "name")
        return (each for each in own if each is not None)

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.tensors)


class Scaling(Protocol):
    """What an adapter's configuration says of its factors."""

    @property
    def dora(self) -> bool: ...

    @property
    def invocation_tokens(self) -> tuple[int, ...]: ...

    @property
    def peft_version(self) -> tuple[int, ...]:
        """Empty: it does not say."""

    def scaling(self, module: str, rank: int) -> float:
        """By which the product with both factors is multiplied. rank: of the module's factors."""

    def rank_of(self, module: str) -> int | None:
        """None: it does not say."""


@dataclass(frozen=True, eq=False)
class Adapter:
    path: Path
    config: Scaling
    modules: Mapping[str, AdapterModule] = field(repr=False)
    hashed: Future[str] = field(repr=False)
    """`identity_of` configuration and tensors."""
    rank: int
    """The largest of its modules."""
    turned: bool = False
    """Whether its factors for gated delta networks are for heads in the order of GGUF files."""
    task_name: str = ""
    """As its file says, for lists of adapters; so is the next."""
    prompt_prefix: str = ""

    @property
    def identity(self) -> str:
        return self.hashed.result()

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.modules.values())


def read_whole(file: Path, most_elements: int) -> bytes:
    """Raises ModelError, before anything is read, for a file that is larger than most_elements values need. Raises
    OSError."""
    size, most = file.stat().st_size, most_elements * BYTES_OF_VALUE + MOST_HEADER_BYTES
    if size > most:
        raise ModelError(
            f"the adapter {file} has {size} bytes, more than the {most_elements} values of the model itself need"
        )
    with open_file(file) as opened:
        return opened.read()


def check_elements(path: str, elements: int, most_elements: int) -> None:
    if elements > most_elements:
        raise ModelError(f"the adapter {path} has {elements} values, and the model itself {most_elements}")


def identity_of(config: bytes, tensors: Iterable[tuple[str, bytes | bytearray | memoryview]]) -> Future[str]:
    """sha256, in hexadecimal, of a configuration and of each tensor's description and content. Computed beside what the
    caller does meanwhile, since it takes as long as the rest of a load."""

    def computed() -> str:
        digest = hashlib.sha256(config)
        for description, content in tensors:
            digest.update(description.encode())
            digest.update(content)
        return digest.hexdigest()

    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapter-identity")
    try:
        return thread.submit(computed)
    finally:
        thread.shutdown(wait=False)


def check_factors(module: AdapterModule, path: str) -> None:
    """Raises ModelError unless its factors come in pairs of one rank, and its values are finite."""
    about = f"the adapter {path}: {printable(module.name)}"
    for one, other in (("a", "b"), ("embedding_a", "embedding_b")):
        if (getattr(module, one) is None) != (getattr(module, other) is None):
            raise ModelError(f"{about} has one of its two factors only")
    for a, b in module.pairs:
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1] or 0 in (*a.shape, *b.shape):
            raise ModelError(f"{about} has factors of {list(a.shape)} and {list(b.shape)}, which do not go together")
    if not all(map(_is_finite, module.tensors)):
        raise ModelError(
            f"{about} has values that are no finite numbers: its training has failed, or the file is damaged"
        )


def _is_finite(values: Tensor) -> bool:
    """In one pass, without a tensor of flags: the least and the greatest are not a number if any value is not."""
    if not values.numel():
        return True
    read = values if values.itemsize > 1 else values.float()
    return all(map(math.isfinite, torch.stack(torch.aminmax(read)).tolist()))
