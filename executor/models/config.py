"""`Config`: a model's config that records which of its keys are read, so that a key that nothing reads is noticed.

Config(file) --section("text_config")--> Config      reads are recorded in one place for all views of a file:
    |  config | {...}, {...} | config, renamed            unread() lists what no view was asked for
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headrace.ipc.failure import ModelError


class Config(Mapping[str, Any]):
    """The fields of a config file, or a view of it with some fields replaced or added. A field that is null counts as
    missing wherever a default is given."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = dict(fields)
        self._stored = self._fields
        """The file's own fields."""
        self._read: set[str] = set()
        self._sections: dict[str, Config] = {}
        self._replaced: frozenset[str] = frozenset()
        """Fields of this view whose values are not the file's; reading them reads nothing of the file."""
        self.own_names: Mapping[str, str] = {}
        """From a common name to the file's own."""
        self.warns = True
        """Whether a warning names keys that nothing reads: one reader of several says so."""

    def __getitem__(self, key: str) -> Any:
        value = self._fields[key]
        if key not in self._replaced:
            self._read.add(key)
            own = self.own_names.get(key)
            if own is not None and self._stored.get(own) is not None:
                self._read.add(own)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __or__(self, fields: Mapping[str, Any]) -> Config:
        """A view with these fields instead of its own."""
        return self._view({**self._fields, **fields}, self._replaced | fields.keys(), self.own_names)

    def __ror__(self, defaults: Mapping[str, Any]) -> Config:
        """A view with these fields where its own are missing or null."""
        own = {key: value for key, value in self._fields.items() if value is not None}
        return self._view({**defaults, **own}, self._replaced | (defaults.keys() - own.keys()), self.own_names)

    def renamed(self, **names: str) -> Config:
        """A view in which fields can also be read under common names: common_name=own_name. Raises ModelError if the
        file has a field under both, with different values."""
        for common, own in names.items():
            two = [self._fields.get(key) for key in (common, own)]
            if None not in two and two[0] != two[1] and common not in self._replaced:
                said = f"the config's {own} is {two[1]!r:.80} and its {common} {two[0]!r:.80}"
                raise ModelError(f"{said}; it is one field")
        found = {common: self._fields[own] for common, own in names.items() if self._fields.get(own) is not None}
        return self._view({**self._fields, **found}, self._replaced, {**self.own_names, **names})

    def _view(self, fields: Mapping[str, Any], replaced: frozenset[str], own_names: Mapping[str, str]) -> Config:
        view = Config(fields)
        view._stored, view._read, view._sections = self._stored, self._read, self._sections
        view._replaced, view.own_names, view.warns = replaced, own_names, self.warns
        return view

    def stores(self, key: str) -> bool:
        """Whether the field has a value that is the file's."""
        return self._fields.get(key) is not None and key not in self._replaced

    def section(self, key: str) -> Config:
        """The object in a field; empty if there is none. Raises ModelError if the field is of another type."""
        given = self._fields.get(key)
        if not isinstance(given, Mapping):
            if given is not None:
                raise ModelError(f"the config's {key} must be a mapping, got {given!r:.200}")
            return Config({})
        if key in self._replaced:
            return Config(given)
        return self._sections.setdefault(key, Config(given))

    def unread(self) -> Iterator[tuple[str, str, Any]]:
        """(path, name, value) of each of the file's fields that no view was asked for."""
        for name, value in self._stored.items():
            if name in self._sections:
                yield from ((f"{name}.{path}", key, each) for path, key, each in self._sections[name].unread())
            elif name not in self._read:
                yield name, name, value

    def pass_over(self, *beginnings: str) -> None:
        """Counts fields whose names begin so as read: they are of a kind of layer of which this model has none, and
        configs have their defaults all the same."""
        self._read.update(name for name in self._stored if name.startswith(beginnings))

    def section_at(self, path: Sequence[str]) -> Config:
        """The section of a section that these keys lead to."""
        found = self
        for key in path:
            found = found._sections[key]
        return found

    def stored(self, key: str) -> Any:
        """The file's own value, without reading it."""
        return self._stored.get(key)

    def has_read(self, key: str) -> bool:
        return key in self._read
