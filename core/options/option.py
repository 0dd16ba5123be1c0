"""The declaration of an option (`Option`), and the type of options whose values must not be shown (`Secret`)."""

from __future__ import annotations

from typing import Any

import msgspec

HIDDEN = "(hidden)"


class Secret(msgspec.Struct, frozen=True):
    """A secret option's value, in `value`. Printing or formatting the object shows only HIDDEN."""

    value: str

    def __repr__(self) -> str:
        return HIDDEN

    __str__ = __repr__

    def __format__(self, _: str) -> str:
        return HIDDEN

    def __rich_repr__(self) -> Any:
        yield HIDDEN


def secret_text(text: str) -> str:
    """A secret as it is meant, without the line break that files and volumes end in, and without a byte order mark."""
    return text.strip().strip("\ufeff").strip()


def secret_bytes(text: str) -> bytes:
    """A secret as it is compared and sent: in UTF-8, and bytes of an environment that are none as they are."""
    return text.encode("utf-8", "surrogateescape")


class Option(msgspec.Struct, frozen=True):
    """The declaration of an option, except for its name, type and default."""

    group: str
    help: str
    unit: str = ""
    """The unit of a number. Numbers of tokens and bytes may be written with a suffix, as in 8k or 4GiB."""
    minimum: float | None = None
    maximum: float | None = None
    forms: tuple[str, ...] = ()
    """Allowed forms of a text; INDEX in a form stands for a whole number. Empty: any text."""
    words: dict[str, Any] = {}
    """Words that stand for a value, such as {"auto": None}."""
    default_text: str = ""
    """Description of the default, if its value does not explain it."""
    short: str = ""
    """An additional single-dash name."""
    repeated: bool = False
    """A list whose flag takes one value and is repeated for more, so that a positional argument may follow."""
    alone: str = ""
    """The option's value if the flag is given without one. Empty: a value is required."""
