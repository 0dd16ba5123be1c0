"""How large a result becomes, told from the operands before an operation of a chat template runs.

All estimates are upper bounds but for escapes: a character may become up to 12 in JSON.
"""

from __future__ import annotations

import re
from collections.abc import Callable, ItemsView, KeysView, Mapping, ValuesView
from typing import Any, NoReturn

import jinja2
from jinja2.runtime import Namespace

MOST_IN_PRODUCT = 1 << 20
"""Largest result of * and ** in bits, characters or items; largest list; largest width of a formatted value."""
MOST_CHARACTERS = 1 << 24
"""Longest text that a template may build, and longest output. The longest request body is half as long by default."""
_LARGEST_PRECISION = 1 << 10
_ITEM_CHARACTERS = 32
"""As many as a number, or a name and its punctuation, may take."""
_WIDTHS = re.compile(r"%[#0\- +]*(\*|[0-9]+)?(?:\.(\*|[0-9]+))?")
_WIDTHS_AFTER_NAMES = re.compile(r"[%)][#0\- +]*(\*|[0-9]+)?(?:\.(\*|[0-9]+))?")
"""A name may hold parentheses itself."""
_LINE_ENDS = ("\n", "\r", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029")


def refuse(what: str, bound: int, unit: str) -> NoReturn:
    """Raises TemplateError."""
    raise jinja2.TemplateError(f"the result of {what} is larger than {bound} {unit}")


def check_characters(size: int, what: str) -> None:
    """Raises TemplateError for a text that is too long."""
    if size > MOST_CHARACTERS:
        refuse(what, MOST_CHARACTERS, "characters")


def check_items(num_items: int, what: str) -> None:
    """Raises TemplateError for a list that is too long."""
    if num_items > MOST_IN_PRODUCT:
        refuse(what, MOST_IN_PRODUCT, "items")


def text_size(value: Any) -> int:
    """At least the length of the value as text. Raises TemplateError if it has too many items to tell."""
    return len(value) if isinstance(value, str) else _measure(value)[0]


def _measure(value: Any) -> tuple[int, int, int]:
    """At least the length of the value as text or JSON; how many items it has; how deep they are nested.

    Counts an item as often as it is printed: a list that holds itself twice, 30 times over, has 2^30.
    """
    size, num_items, depth = 0, 0, 0
    layer: list[Any] | tuple[Any, ...] = (value,)
    while layer:
        num_items += len(layer)
        if num_items > MOST_IN_PRODUCT:
            raise jinja2.TemplateError(f"a value with more than {MOST_IN_PRODUCT} items cannot become text")
        texts = [each for each in layer if type(each) is str]
        size += sum(map(len, texts))
        below: list[Any] = []
        for each in layer if len(texts) < len(layer) else ():
            kind = type(each)
            if kind is str:
                continue
            if kind is dict:
                below += each
                below += each.values()
            elif kind is list or kind is tuple:
                below += each
            elif isinstance(each, str):
                size += len(each) + 16
            elif isinstance(each, int):
                size += each.bit_length()
            elif each is not None and kind is not float:
                below += _items_of(each)
            if len(below) > MOST_IN_PRODUCT:
                break  # the next look at the number refuses them
        layer, depth = below, depth + 1
    return size + _ITEM_CHARACTERS * num_items, num_items, depth


def _items_of(value: Any) -> list[Any] | tuple[Any, ...]:
    if isinstance(value, Namespace):
        value = object.__getattribute__(value, "_Namespace__attrs")
    if isinstance(value, Mapping):
        return [item for pair in value.items() for item in pair]
    if isinstance(value, list | tuple):
        return value
    return list(value) if isinstance(value, KeysView | ValuesView | ItemsView) else ()


def _num_lines(text: str) -> int:
    """As str.splitlines counts them, or more."""
    return 1 + sum(text.count(end) for end in _LINE_ENDS)


# The estimates: of a method's or filter's result in characters, from the same arguments. 0: not larger than they are.


def _padded(text: Any, width: Any = 80, *_: Any) -> int:
    return max(text_size(text), width) if isinstance(width, int) else 0


def _expanded(text: str, tabsize: Any = 8) -> int:
    return len(text) + text.count("\t") * tabsize if isinstance(tabsize, int) else 0


def _replaced(text: Any, old: Any, new: Any, count: Any = None) -> int:
    size = text_size(text)
    text, old, new_size = str(text) if size <= MOST_CHARACTERS else "", str(old), text_size(new)
    times = text.count(old) if new_size > len(old) else 0
    if isinstance(count, int) and count >= 0:
        times = min(times, count)
    return size + times * (new_size - len(old))


def _indented(text: Any, width: Any = 4, first: Any = False, blank: Any = False) -> int:
    size = text_size(text)
    indentation = len(width) if isinstance(width, str) else width
    return size + _num_lines(text) * indentation if isinstance(text, str) and isinstance(indentation, int) else size


def _joined(texts: Any, d: Any = "", attribute: Any = None) -> int:
    if isinstance(texts, str):
        check_items(len(texts), "join")
        return len(texts) * (1 + text_size(d))
    if not isinstance(texts, list | tuple):
        return _measure(texts)[0]
    size = sum(len(text) if type(text) is str else text_size(text) for text in texts)
    return size + len(texts) * text_size(d)


def size_of_formatted(pattern: Any, *args: Any, **named: Any) -> int:
    """Of `pattern % args`."""
    values: Any = named or args
    if not isinstance(pattern, str):
        return text_size(pattern) + text_size(values)
    num_values = pattern.count("%")
    check_items(num_values, "%")
    widths, takes_widths = 0, False
    for found in (_WIDTHS_AFTER_NAMES if "%(" in pattern else _WIDTHS).finditer(pattern):
        for width in filter(None, found.groups()):
            takes_widths |= width == "*"
            widths += 0 if width == "*" else int(width)
    if takes_widths and isinstance(values, tuple):
        widths += sum(abs(value) for value in values if isinstance(value, int))
    if isinstance(values, tuple) and not (len(values) == 1 and isinstance(values[0], Mapping)):
        return len(pattern) + widths + sum(map(text_size, values)) + 400 * num_values  # a float's digits
    return len(pattern) + widths + num_values * text_size(values)


def _as_json(
    value: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, sort_keys: Any = False
) -> int:
    size, num_items, depth = _measure(value)
    if isinstance(separators, list | tuple):
        size += num_items * sum(map(text_size, separators))
    indentation = len(indent) if isinstance(indent, str) else indent
    return size + num_items * depth * indentation if isinstance(indentation, int) else size


def _batched(values: Any, *args: Any, **kwargs: Any) -> int:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int):
            check_items(value, "batch or slice")
    return 0


def _rounded(value: Any, precision: Any = 0, method: Any = "common") -> int:
    if isinstance(precision, int) and abs(precision) > _LARGEST_PRECISION:
        raise jinja2.TemplateError(f"a precision is larger than {_LARGEST_PRECISION}")
    return 0


def _pieces(text: Any, sep: Any = None, maxsplit: Any = -1) -> int:
    if isinstance(maxsplit, int) and 0 <= maxsplit <= MOST_IN_PRODUCT:
        return 0
    if len(text) > MOST_IN_PRODUCT:
        # Splitting at white space makes one piece of many spaces; counting those would need the list.
        check_items(len(text) // 4 if sep is None else text.count(sep), "split")
    return 0


def _lines(text: Any, keepends: Any = False) -> int:
    if len(text) > MOST_IN_PRODUCT:
        check_items(_num_lines(text), "splitlines")
    return 0


def text_of_first(value: Any, *args: Any, **kwargs: Any) -> int:
    """For what makes a text of its first argument."""
    size = text_size(value)
    return size + sum(map(text_size, (*args, *kwargs.values()))) if args or kwargs else size


def _per_character(value: Any, *_: Any, **__: Any) -> int:
    size = text_size(value)
    check_items(size, "a filter that handles characters or words one by one")
    return size


def _ordered(value: Any, *_: Any, **__: Any) -> int:
    """For what compares the items: it makes copies of them in lower case."""
    return _per_character(value) if isinstance(value, str) else _measure(value)[0]


def _listed(value: Any, *_: Any, **__: Any) -> int:
    if isinstance(value, str):
        check_items(len(value), "list")
    return 0


Estimate = Callable[..., int]
TEXT_METHODS: dict[str, Estimate] = {
    "center": _padded,
    "expandtabs": _expanded,
    "join": lambda separator, texts: _joined(texts, separator),
    "ljust": _padded,
    "replace": _replaced,
    "rjust": _padded,
    "rsplit": _pieces,
    "split": _pieces,
    "splitlines": _lines,
    "zfill": _padded,
}
FILTERS: dict[str, Estimate] = {
    **dict.fromkeys(
        ("capitalize", "e", "escape", "forceescape", "float", "int", "lower", "safe", "string"), text_of_first
    ),
    **dict.fromkeys(("trim", "truncate", "upper"), text_of_first),
    **dict.fromkeys(("title", "urlencode", "wordcount"), _per_character),
    **dict.fromkeys(("dictsort", "groupby", "max", "min", "sort", "unique"), _ordered),
    **dict.fromkeys(("batch", "slice"), _batched),
    "center": _padded,
    "format": size_of_formatted,
    "indent": _indented,
    "join": _joined,
    "list": _listed,
    "replace": _replaced,
    "round": _rounded,
    "tojson": _as_json,
}


def size_of_product(operator: str, left: Any, right: Any) -> int:
    """Estimated size of the operation's result: bits of a number, or items of a text or list."""
    if isinstance(left, int) and isinstance(right, int):
        return left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
    for items, times in ((left, right), (right, left)):
        if isinstance(items, str | list | tuple) and isinstance(times, int):
            return len(items) * times
    return 0
