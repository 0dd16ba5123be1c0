"""The adapters that a rank has loaded, by slot."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from headrace.core.options.adapters import AdapterLimits
from headrace.executor.adapters.adapter import Adapter
from headrace.executor.adapters.gguf_files import gguf_of, read_gguf
from headrace.executor.adapters.layers import AdaptableLayers, ReadBase
from headrace.executor.adapters.peft_files import read_peft
from headrace.executor.checkpoints.declared_weights import as_declared
from headrace.executor.checkpoints.weights import WeightSource
from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.sizes import weight_elements
from headrace.executor.parallel.rank_place import RankCoordinates
from headrace.ipc.adapters import AdapterFacts
from headrace.ipc.failure import ModelError

ON_THE_DEVICE = (
    "adapters can on a CPU alone so far (device=cpu): on a GPU they change linear layers, and no experts, embeddings, "
    "heads or compressed keys and values"
)


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


@dataclass(frozen=True, eq=False)
class _Loaded:
    packed: Mapping[str, Any]
    """By the name of the layer's first matrix."""
    adapter: Adapter | None
    """What was read, if `packed` depends on the model's weights too, as DoRA's magnitudes and whole biases do."""

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.packed.values()) + (0 if self.adapter is None else self.adapter.nbytes)


class _Target(NamedTuple):
    """The model that adapters are loaded for."""

    layers: AdaptableLayers
    tables: Mapping[str, AdapterTable]
    why_not_all: str
    """Why what is in no table cannot be changed, as the end of a sentence."""


class PreparedSlots(NamedTuple):
    """What is loaded, for a model that will take the present one's place."""

    target: _Target
    packed: Mapping[_Loaded, Mapping[str, Any]]
    """Of those that depend on the model's weights."""


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
        self._limits, self._place, self._heads = limits, place, heads
        self._target = self._target_of(model, read)
        self._loaded: dict[int, _Loaded] = {}
        self._lock = threading.Lock()
        self._is_away = False

    def _target_of(self, model: AdaptableModel, read: ReadBase) -> _Target:
        spec, limits = model.unpadded, self._limits

        def read_base() -> WeightSource:
            return as_declared(spec, read())

        layers = AdaptableLayers(spec, model.spec, self._place, model.prefix, read_base, limits.target_modules)
        why = ON_THE_DEVICE if limits.in_device_memory else "adapters cannot here"
        return _Target(layers, {**model.adapter_tables, **self._heads}, why)

    def load(self, slot: int, path: str) -> AdapterFacts:
        """Raises ModelError, and leaves the slot empty."""
        self.drop(slot)
        spec, most_rank = self._target.layers.spec, self._limits.max_rank
        if (file := gguf_of(path)) is not None:
            adapter = read_gguf(file, spec, most_rank, weight_elements(spec))
        else:
            adapter = read_peft(path, most_rank, weight_elements(spec))
        while (loaded := self._put_into(slot, adapter)) is None:
            pass  # the model was replaced meanwhile
        return AdapterFacts(
            identity=adapter.identity,
            rank=adapter.rank,
            num_bytes=loaded.nbytes,
            invocation_tokens=adapter.config.invocation_tokens,
            task_name=adapter.task_name,
            prompt_prefix=adapter.prompt_prefix,
        )

    def _put_into(self, slot: int, adapter: Adapter) -> _Loaded | None:
        """None, and nothing is done, if the model was replaced meanwhile."""
        target = self._target
        loaded = _packed(adapter, target)
        with self._lock:
            if self._target is not target:
                return None
            self._put(slot, loaded.packed)
            self._loaded[slot] = loaded
        return loaded

    def drop(self, slot: int) -> None:
        with self._lock:
            if (loaded := self._loaded.pop(slot, None)) is not None:
                self._put(slot, dict.fromkeys(loaded.packed))

    def prepared_for(self, model: AdaptableModel, read: ReadBase) -> PreparedSlots:
        """Computes anew what depends on the model's weights, from another checkpoint, beside loads and steps."""
        target = self._target_of(model, read)
        with self._lock:
            loaded = list(self._loaded.values())
        again = {each: _packed(each.adapter, target).packed for each in loaded if each.adapter is not None}
        return PreparedSlots(target, again)

    def move_to(self, prepared: PreparedSlots) -> None:
        """Puts what is loaded into the model, which takes the place of the present one."""
        target = prepared.target
        with self._lock:
            self._target = target
            for slot, loaded in self._loaded.items():
                if loaded.adapter is not None:
                    again = prepared.packed.get(loaded) or _packed(loaded.adapter, target).packed  # loaded since
                    loaded = self._loaded[slot] = _Loaded(again, loaded.adapter)
                self._put(slot, loaded.packed)

    def go_away(self) -> None:
        """The tables' memory is about to be freed: nothing is put into them until `come_back`. Loads go on."""
        with self._lock:
            self._is_away = True

    def come_back(self) -> None:
        """Fills all slots of the tables, whose memory is there again, with what is loaded now."""
        with self._lock:
            if not self._is_away:
                return
            self._is_away = False
            for slot in range(self._limits.slots):
                loaded = self._loaded.get(slot)
                packed = {} if loaded is None else loaded.packed
                _put(self._target, slot, {name: packed.get(name) for name in self._target.tables})

    def _put(self, slot: int, packed: Mapping[str, Any]) -> None:
        if not self._is_away:
            _put(self._target, slot, packed)


def _packed(adapter: Adapter, target: _Target) -> _Loaded:
    """Raises ModelError for what the model does not have."""
    deltas, reads_base = target.layers.deltas(adapter)
    for name in deltas:
        if name not in target.tables:
            raise ModelError(f"the adapter {adapter.path} changes {name} and its like, which {target.why_not_all}")
    try:
        packed = {name: target.tables[name].pack(delta) for name, delta in deltas.items()}
    except ValueError as error:
        raise ModelError(f"the adapter {adapter.path}: {error}") from error
    return _Loaded(packed, adapter if reads_base else None)


def _put(target: _Target, slot: int, packed: Mapping[str, Any]) -> None:
    for name, each in packed.items():
        target.tables[name].put(slot, each)
