"""What a declaration says of an option (`Option`), and the type of options whose values nobody may see (`Secret`)."""

from __future__ import annotations

from typing import Any

import msgspec

HIDDEN = "(hidden)"


class Secret(msgspec.Struct, frozen=True):
    """The value of a secret option: `value` has it, and whatever prints or formats it shows that it is hidden."""

    value: str

    def __repr__(self) -> str:
        return HIDDEN

    __str__ = __repr__

    def __format__(self, _: str) -> str:
        return HIDDEN

    def __rich_repr__(self) -> Any:
        yield HIDDEN


class Option(msgspec.Struct, frozen=True):
    """What an option needs besides its name, type and default."""

    group: str
    help: str
    unit: str = ""
    """What a number counts. Numbers of tokens and bytes may be written with a suffix, as in 8k or 4GiB."""
    minimum: float | None = None
    maximum: float | None = None
    forms: tuple[str, ...] = ()
    """What a text may be; INDEX in one stands for a whole number."""
    words: dict[str, Any] = {}
    """Values with a name of their own, such as {"auto": None}."""
    default_text: str = ""
    """What the default means, where the value does not say it."""
    short: str = ""
    """A single-dash name besides."""
    repeated: bool = False
    """A list whose flag takes one value and is given once for each, so that a positional argument may follow."""
    alone: str = ""
    """The value that the flag has where none follows it; empty where one must."""
