"""The adapters that a rank has loaded, by slot."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from headrace.core.options.adapters import AdapterLimits
from headrace.executor.adapters.layers import AdaptableLayers, ReadBase
from headrace.executor.adapters.peft_files import read_adapter
from headrace.executor.checkpoints.declared_weights import as_declared
from headrace.executor.checkpoints.weights import WeightSource
from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.sizes import weight_elements
from headrace.executor.parallel.rank_place import RankCoordinates
from headrace.ipc.adapters import AdapterFacts
from headrace.ipc.failure import ModelError


class AdapterTable(Protocol):
    """The slots of one linear layer, in the form that its kernels read."""

    def pack(self, delta: Any) -> Any:
        """An adapter's part of the layer, a LowRank or EmbeddingDelta. The result has `nbytes`."""

    def put(self, slot: int, packed: Any) -> None:
        """packed: a result of `pack`; None empties the slot."""


class AdaptableModel(Protocol):
    """A model, or one rank's part of it."""

    @property
    def unpadded(self) -> ArchSpec: ...

    @property
    def spec(self) -> ArchSpec:
        """With padding."""

    @property
    def prefix(self) -> str:
        """Of the names in the checkpoint."""

    @property
    def adapter_tables(self) -> Mapping[str, AdapterTable]:
        """By the name of the layer's first matrix."""


class _Loaded(NamedTuple):
    packed: Mapping[str, Any]
    """By the name of the layer's first matrix."""


class AdapterSlots:
    """Loads adapters on one thread, beside steps on another that use other slots."""

    def __init__(
        self,
        limits: AdapterLimits,
        model: AdaptableModel,
        place: RankCoordinates,
        read: ReadBase,
        heads: Mapping[str, AdapterTable] = MappingProxyType({}),
    ) -> None:
        """read: the model's checkpoint; heads: of the layers behind the pooling, by name."""
        self._limits, self._heads = limits, heads
        self._tables: Mapping[str, AdapterTable] = {**model.adapter_tables, **heads}
        spec = model.unpadded

        def read_base() -> WeightSource:
            return as_declared(spec, read())

        self._layers = AdaptableLayers(spec, model.spec, place, model.prefix, read_base, limits.target_modules)
        self._loaded: dict[int, _Loaded] = {}
        self._lock = threading.Lock()

    def load(self, slot: int, path: str) -> AdapterFacts:
        """Raises ModelError, and leaves the slot empty."""
        self.drop(slot)
        adapter = read_adapter(path, self._limits.max_rank, weight_elements(self._layers.spec))
        deltas = self._layers.deltas(adapter)
        for name in deltas:
            if name not in self._tables:
                raise ModelError(f"the adapter {path} changes {name} and its like, which adapters cannot here")
        packed = {name: self._tables[name].pack(delta) for name, delta in deltas.items()}
        with self._lock:
            self._put(slot, packed)
            self._loaded[slot] = _Loaded(packed)
        num_bytes = sum(each.nbytes for each in packed.values())
        return AdapterFacts(
            identity=adapter.identity,
            rank=adapter.rank,
            num_bytes=num_bytes,
            invocation_tokens=adapter.config.invocation_tokens,
        )

    def drop(self, slot: int) -> None:
        with self._lock:
            if (loaded := self._loaded.pop(slot, None)) is not None:
                self._put(slot, dict.fromkeys(loaded.packed))

    def move_to(self, model: AdaptableModel) -> None:
        """Puts what is loaded into a model with other weights that takes the place of the present one."""
        with self._lock:
            self._tables = {**model.adapter_tables, **self._heads}
            for slot, loaded in self._loaded.items():
                self._put(slot, loaded.packed)

    def _put(self, slot: int, packed: Mapping[str, Any]) -> None:
        for name, each in packed.items():
            self._tables[name].put(slot, each)
