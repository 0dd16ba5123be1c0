"""Names, versions and slots of adapters: plain state, used by one thread."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator

from headrace.ipc.adapters import AdapterFacts, AdapterInfo


class Adapter:
    """A name with a path. Reloading it in place makes another object, whose content may differ."""

    __slots__ = (
        "base_model_name",
        "default_scale",
        "facts",
        "is_3d",
        "is_loading",
        "is_pinned",
        "is_registered",
        "name",
        "path",
        "version",
    )

    def __init__(self, name: str, path: str, *, is_3d: bool = False, base_model_name: str = "") -> None:
        self.name, self.path, self.is_3d, self.base_model_name = name, path, is_3d, base_model_name
        self.version: Version | None = None
        """Its content in memory, if it is there."""
        self.facts: AdapterFacts | None = None
        """Of the version that was loaded last."""
        self.is_loading = self.is_pinned = self.is_registered = False
        self.default_scale = 0.0

    @property
    def info(self) -> AdapterInfo:
        facts = self.facts or AdapterFacts(identity="", rank=0, num_bytes=0)
        return AdapterInfo(
            name=self.name,
            path=self.path,
            state="registered" if self.version is None else "loaded",
            identity=facts.identity,
            rank=facts.rank,
            num_bytes=facts.num_bytes,
            pinned=self.is_pinned,
            base_model_name=self.base_model_name,
            invocation_tokens=facts.invocation_tokens,
            is_3d=self.is_3d,
            default_scale=self.default_scale,
            task_name=facts.task_name,
            prompt_prefix=facts.prompt_prefix,
        )

    def __str__(self) -> str:
        return f"adapter {self.name} ({self.path})"


class Version:
    """The content of an adapter in a slot of every rank."""

    __slots__ = ("adapter", "facts", "num_users", "number", "slot", "used_until_step")

    def __init__(self, adapter: Adapter, slot: int, facts: AdapterFacts, number: int) -> None:
        self.adapter, self.slot, self.facts, self.number = adapter, slot, facts, number
        self.num_users = 0
        """Requests that hold it."""
        self.used_until_step = -1
        """The last step that may compute a row of a request that held it."""


class Registry:
    """All adapters, by name and path; and the versions in memory, the least recently used first."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        """Without those that are lost."""
        self._free = list(range(num_slots - 1, -1, -1))
        self._versions: OrderedDict[Version, None] = OrderedDict()
        self._by_key: dict[tuple[str, str], Adapter] = {}
        self._by_name: dict[str, Adapter] = {}
        self._num_loaded = 0

    # --- names --------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Adapter]:
        return iter(self._by_key.values())

    def find(self, name: str, path: str = "") -> Adapter | None:
        return self._by_key.get((name, path)) if path else self._by_name.get(name)

    def of_identity(self, identity: str) -> Adapter | None:
        """An adapter with this content in memory, even if its name is no longer registered."""
        return next((each.adapter for each in self._versions if each.facts.identity == identity), None)

    def add(self, adapter: Adapter) -> None:
        """Registers an adapter under its name and path. The name alone stays with the first of its paths."""
        adapter.is_registered = True
        self._by_key[adapter.name, adapter.path] = adapter
        self._by_name.setdefault(adapter.name, adapter)

    def remove(self, name: str, path: str = "") -> list[Adapter]:
        """Forgets a name, or one path of it. Returns the adapters that are registered no longer."""
        gone = [each for each in self if each.name == name and path in ("", each.path)]
        for each in gone:
            each.is_registered = False
            del self._by_key[each.name, each.path]
        if self._by_name.get(name) in gone:
            del self._by_name[name]
            for other in self:
                if other.name == name:
                    self._by_name.setdefault(name, other)
        return gone

    # --- versions -----------------------------------------------------------------------------------------------

    @property
    def versions(self) -> Iterable[Version]:
        """The least recently used first."""
        return self._versions

    @property
    def num_pinned(self) -> int:
        return sum(each.adapter.is_pinned for each in self._versions)

    def take_slot(self, keep: Container[Adapter], is_unused: Callable[[Version], bool]) -> tuple[int, Version | None]:
        """A slot to load into, and the version that was evicted for it, if one was: the least recently used one that
        is not pinned nor of `keep`. The slot is -1 if there is none."""
        if self._free:
            return self._free.pop(), None
        for version in self._versions:
            if not version.adapter.is_pinned and version.adapter not in keep and is_unused(version):
                return self.remove_version(version), version
        return -1, None

    def put(self, adapter: Adapter, slot: int, facts: AdapterFacts) -> Version:
        """The slot has the adapter's content from now on."""
        self._num_loaded += 1
        version = Version(adapter, slot, facts, self._num_loaded)
        adapter.version, adapter.facts = version, facts
        self._versions[version] = None
        return version

    def remove_version(self, version: Version) -> int:
        """Returns the slot that it had."""
        del self._versions[version]
        version.adapter.version = None
        return version.slot

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    def touch(self, version: Version) -> None:
        self._versions.move_to_end(version)
