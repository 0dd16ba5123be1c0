r"""Rewrites regular expressions so that every library reads them as Python's `re` does.

Libraries differ from `re` and from each other: one reads `[[:alpha:]]` as letters, another ignores the anchor in `a$b`
or reads `\Z` as a Z. Syntax that a library would read differently is rewritten, or refused with what to write instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import msgspec

_PART = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]{1,6}\}|U[0-9a-fA-F]{8}|[pP](?:\{[^}]*\}|[A-Za-z])|.)"
    r"|\(\?(?:P?<[A-Za-z_]\w*>|[a-zA-Z-]*[:)])|\{(?:\d+(?:,\d*)?|,\d*)\}|[^\\\[(){|^$*+?.]+|.",
    re.DOTALL,
)
_IN_SET = re.compile(_PART.pattern.split("|\\(", maxsplit=1)[0] + "|.", re.DOTALL)
_CODE = re.compile(r"\\[xuU]\{?([0-9a-fA-F]+)")
_ESCAPES = frozenset("dDwWsSnrtfvapP")
_CONTROLS: Mapping[str, int] = MappingProxyType({"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "a": 7, "b": 8})
_WRITE: Mapping[str, str] = MappingProxyType(
    {
        "A": "write ^",
        "Z": "write $",
        "z": "write $",
        "b": "word boundaries are not followed",
        "B": "word boundaries are not followed",
        "x": r"write two digits, as \x41",
        "u": r"write four digits, as \u0041",
        "U": r"write eight digits, as \U00000041",
    }
)
_GROUPS = (
    (("(?=", "(?!"), "lookaheads are not followed"),
    (("(?<=", "(?<!"), "lookbehinds are not followed"),
    (("(?P=",), "references to groups are not followed"),
    (("(?>",), "atomic groups are not followed: write (?:"),
    (("(?#",), "comments are not followed"),
    (("(?(",), "conditions are not followed"),
)
_UNICODE_CLASS = r"\\[pP](?:\{[^}]*\}|[A-Za-z])"
_NUL_WITHOUT_QUOTE = re.compile(r"\\p\{?(?i:C|Cc|Other|Control|cntrl)\}?|\\P\{?(?i:P|Po|\w*Punctuation|punct)\}?")
"""Classes of characters that contain NUL, but not the quote."""
_FROM_NUL = re.compile(r"(?:\\x00|\\u0000|\\u\{0+\}|\\U0{8}|\x00)(?=-[^\]])(?!-(?:\\x00|\\u0000|\x00))")
"""NUL at the start of a range of a set."""
_OF_BOTH: Mapping[str, str] = MappingProxyType(
    {"w": r"0-9A-Za-z_\p{L}\p{N}", "d": r"0-9\p{Nd}", "s": r"\s\x1c-\x1f\x85\ufeff\p{Z}"}
)
"""In a set: the characters of a class in ASCII and in Unicode."""
_FLAGS = frozenset("ims-")
_REPEATS = ("*", "+", "?", "{")
_OPERATIONS = ("&&", "--", "~~")


class ExpressionPart(msgspec.Struct):
    """A part of an expression: the start or end of a group, `|`, an anchor, a repeat, or (a set of) characters."""

    text: str
    at: int
    ranges: tuple[tuple[int, int], ...] = ()
    """Ranges of code points (first, last) of the characters that it names."""
    classes: frozenset[str] = frozenset()
    r"""Letters of the class escapes in it, such as d for \d."""
    is_negated: bool = False

    @property
    def is_repeat(self) -> bool:
        return self.text.startswith(_REPEATS)


def parts_of(pattern: str) -> list[ExpressionPart]:
    """Parses an expression. Raises ValueError, with the place, for syntax that not every library reads as `re` does."""
    found, at = list[ExpressionPart](), 0
    while at < len(pattern):
        text = _PART.match(pattern, at)[0]  # type: ignore[index]  # its last alternative is any character
        if text == "[":
            part, at = _set_at(pattern, at)
        else:
            part = _part(pattern, text, at)
            at += len(text)
        if part.is_repeat and found and found[-1].is_repeat and part.text != "?":
            raise _wrong(
                part, "it repeats a repeat; possessive ones are not followed, and others are written as (?:a+)+"
            )
        found.append(part)
    _check_anchors(found)
    _check_anchors(found[::-1], opening=")", closing="(", anchor="$", where="end")
    return found


def written(parts: Iterable[ExpressionPart]) -> str:
    return "".join(each.text for each in parts)


def in_common_words(pattern: str) -> str:
    """The expression in syntax that every library reads as `re` does. Raises ValueError."""
    return written(parts_of(pattern))


def in_json(pattern: str) -> str:
    r"""Like `in_common_words`, for an expression of a JSON string.

    Classes of JSON Schema's expressions are of ASCII, those of validators in Python of Unicode: what \W and [^\w] leave
    out is left out in both. llguidance treats a set that contains NUL as if it also contained the quote: [^"] would
    allow \". So NUL is removed from sets that contain it but not the quote. Raises ValueError.
    """
    parts = parts_of(pattern)
    for part in parts:
        _leave_out_all_of_class(part)
        _leave_out_nul(part)
    return written(parts)


def leading_assertions(pattern: str) -> tuple[list[str], str]:
    """Splits an expression that begins with ^ and lookaheads into expressions of which a text must match each, and the
    rest behind ^. A lookahead that no expression without one can say, and what follows it, stays in the rest."""
    found, at = list[str](), 1
    while pattern.startswith(("(?=", "(?!"), at):
        end = _end_of_group(pattern, at)
        inner = pattern[at + 3 : end - 1]
        positive = f"^(?:{inner})" if pattern[at + 2] == "=" else _unlike(inner)
        if not positive:
            break
        found.append(positive)
        at = end
    rest = pattern[at:]
    return ([], pattern) if _has_alternatives(rest) else (found, rest)


_ONE = r"\\[^a-zA-Z0-9]|[^\\\[\](){}|^$*+?.]"
"""One character of an expression, perhaps escaped."""
_NOT_ALL = re.compile(r"\^?\[(?P<set>[^\^\]\\](?:[^\]\\]|\\.)*)\]\*\$")
_NOT_FIRST = re.compile(_ONE)
_NOT_WITHIN = re.compile(rf"\.\*(?:{_ONE})")
_NOT_TWICE = re.compile(rf"\.\*(?P<one>{_ONE})(?P=one)")


def _unlike(inner: str) -> str:
    """What a text matches if no text of the expression `inner` begins it; "" for most expressions."""
    if (found := _NOT_ALL.fullmatch(inner)) is not None:
        return f"[^{found['set']}]"
    if _NOT_FIRST.fullmatch(inner) is not None:
        return f"^(?:$|[^{inner}])"
    if _NOT_WITHIN.fullmatch(inner) is not None:
        return f"^[^{inner[2:]}]*$"
    if (found := _NOT_TWICE.fullmatch(inner)) is not None:
        one = found["one"]
        return f"^{one}?(?:[^{one}]+{one})*[^{one}]*$"
    return ""


def _end_of_group(pattern: str, at: int) -> int:
    """The index after the group that begins at `at`."""
    depth = 0
    while at < len(pattern):
        text = _PART.match(pattern, at)[0]  # type: ignore[index]  # its last alternative is any character
        if text == "[":
            at = _set_at(pattern, at)[1]
            continue
        depth += text.startswith("(") - text.startswith(")")
        at += 1 if text.startswith(("(", ")")) else len(text)
        if not depth:
            break
    return at


def _has_alternatives(pattern: str) -> bool:
    """Whether | stands outside of all groups."""
    at = 0
    while at < len(pattern):
        if pattern[at] == "|":
            return True
        if pattern[at] == "(":
            at = _end_of_group(pattern, at)
        elif pattern[at] == "[":
            at = _set_at(pattern, at)[1]
        else:
            at += 2 if pattern[at] == "\\" else 1
    return False


def _leave_out_all_of_class(part: ExpressionPart) -> None:
    is_set = part.text.startswith("[")

    def wide(found: re.Match[str]) -> str:
        own = _OF_BOTH.get(found[0][1].lower(), "") if found[0].startswith("\\") else ""
        if not own or found[0][1].isupper() == part.is_negated:
            return found[0]
        return own if part.is_negated else f"[^{own}]"

    if is_set or part.classes & {"W", "D", "S"}:
        part.text = re.sub(r"\\.", wide, part.text, flags=re.DOTALL)


def _leave_out_nul(part: ExpressionPart) -> None:
    if part.classes & {"p", "P"} and not part.text.startswith("["):
        part.text = rf"[^\x00\{'P' if 'p' in part.classes else 'p'}{part.text[2:]}]"
    elif part.text.startswith("[^"):
        if not any(first == 0 for first, _ in part.ranges):
            rest = part.text[2:]
            part.text = rf"[^\x00{chr(92) if rest.startswith('-') else ''}{rest}"
    elif part.text.startswith("["):
        if any(_NUL_WITHOUT_QUOTE.fullmatch(found) for found in re.findall(_UNICODE_CLASS, part.text)):
            raise _wrong(part, r"a class that has NUL is not followed in a set of JSON: write its characters")
        if not any(first <= ord('"') <= last for first, last in part.ranges):
            part.text = _FROM_NUL.sub(r"\\x01", part.text)


def _part(pattern: str, text: str, at: int) -> ExpressionPart:
    if text.startswith("\\"):
        return _escape(text, at)
    if text == "\\":
        raise _wrong(ExpressionPart(text, at), "it escapes nothing")
    if text == "{":  # a literal brace
        return ExpressionPart(r"\{", at, ((ord("{"),) * 2,))
    if text.startswith("{,"):
        return ExpressionPart(f"{{0{text[1:]}", at)
    if text.startswith("(?"):
        if not text.endswith(">") and not set(text[2:-1]) <= _FLAGS:
            raise _wrong(ExpressionPart(text, at), "one of its flags is not followed; i, m and s are")
        return ExpressionPart(text, at)
    if text == "(" and pattern.startswith("(?", at):
        for beginnings, why in _GROUPS:
            if found := next((each for each in beginnings if pattern.startswith(each, at)), ""):
                raise _wrong(ExpressionPart(found, at), why)
        raise _wrong(ExpressionPart(pattern[at : at + 3], at), "such groups are not followed")
    if text[0] in "()|^$*+?.{":
        return ExpressionPart(text, at)
    return ExpressionPart(text, at, tuple((ord(each), ord(each)) for each in sorted(set(text))))


def _escape(text: str, at: int, *, in_set: bool = False) -> ExpressionPart:
    if len(text) == 1:
        raise _wrong(ExpressionPart(text, at), "it escapes nothing")
    letter = text[1]
    if code := _CODE.match(text):
        return ExpressionPart(text, at, ((int(code[1], 16),) * 2,))
    if letter in _CONTROLS and (letter != "b" or in_set):
        text = rf"\x{_CONTROLS[letter]:02x}" if letter == "b" else text
        return ExpressionPart(text, at, ((_CONTROLS[letter],) * 2,))
    if letter in _ESCAPES:
        return ExpressionPart(text, at, classes=frozenset(letter))
    if letter.isdigit():
        raise _wrong(
            ExpressionPart(text, at), r"neither references to groups nor octal digits are followed; write \x0a"
        )
    if letter.isalpha():
        raise _wrong(ExpressionPart(text, at), _WRITE.get(letter, "Python's re has no such escape"))
    return ExpressionPart(
        letter if letter in "<>" else text, at, ((ord(letter),) * 2,)
    )  # \< is a word's start for some


def _set_at(pattern: str, at: int) -> tuple[ExpressionPart, int]:
    """The set of characters that begins at `at`, and the index after it."""
    start, is_negated = at, pattern.startswith("[^", at)
    at += 1 + is_negated
    first, items = at, list[ExpressionPart]()
    while at < len(pattern):
        if pattern[at] == "]" and at > first:
            ranges = tuple(_ranges(items))
            classes = frozenset().union(*(each.classes for each in items))
            text = f"[{'^' if is_negated else ''}{written(items)}]"
            return ExpressionPart(text, start, ranges, classes, is_negated), at + 1
        if pattern.startswith("[:", at) and ":]" in pattern[at : at + 12]:
            raise _wrong(
                ExpressionPart(pattern[at : pattern.index(":]", at) + 2], at),
                "Python's re has no such class: write its characters, as A-Za-z",
            )
        if pattern.startswith(_OPERATIONS, at):
            text = pattern[at : at + 2]
            raise _wrong(ExpressionPart(text, at), rf"some libraries compute with sets there: write \{text[0]}")
        text = _IN_SET.match(pattern, at)[0]  # type: ignore[index]
        if text.startswith("\\"):
            item = _escape(text, at, in_set=True)
        else:
            item = ExpressionPart(f"\\{text}" if text in "[]" else text, at, ((ord(text),) * 2,))
        items.append(item)
        at += len(text)
    raise _wrong(ExpressionPart("[", start), r"it is not closed; for the character write \[")


def _ranges(items: Sequence[ExpressionPart]) -> Iterator[tuple[int, int]]:
    at = 0
    while at < len(items):
        is_range = at + 2 < len(items) and items[at + 1].text == "-"
        if is_range and (items[at].classes or items[at + 2].classes):
            items[at + 1].text, is_range = r"\-", False  # as in JSON Schema's expressions; an error for re
        if is_range:
            yield items[at].ranges[0][0], items[at + 2].ranges[0][1]
        else:
            yield from items[at].ranges
        at += 3 if is_range else 1


def _check_anchors(
    parts: Sequence[ExpressionPart], opening: str = "(", closing: str = ")", anchor: str = "^", where: str = "beginning"
) -> None:
    """Checks that each ^ is at the beginning of the expression, with nothing before it, and is not repeated. Raises
    ValueError.

    For $ it is called with the parts reversed, so that the end is the beginning, and with `opening` and `closing`
    swapped."""
    # For each open group: whether it begins at the edge, and the number of anchors before it.
    is_at_edge, opened = True, list[tuple[bool, int]]()
    num_anchors = 0
    for index, part in enumerate(parts):
        following = parts[index + 1] if index + 1 < len(parts) else None
        repeat = following.text if following is not None and following.is_repeat else ""
        is_flag = part.text.startswith("(?") and part.text.endswith(")")
        if part.text.startswith(opening) and not is_flag:
            opened.append((is_at_edge, num_anchors))
        elif part.text.startswith(closing) and not is_flag:
            is_at_edge = False
            if opened and opened.pop()[1] < num_anchors and repeat not in ("", "?"):
                raise _wrong(part, f"it ends a group that has {anchor} and is repeated, which is not followed")
        elif part.text == "|":
            is_at_edge = opened[-1][0] if opened else True
        elif part.text == anchor:
            num_anchors += 1
            if not is_at_edge or (anchor == "^" and repeat):
                raise _wrong(part, f"it is followed at the {where} of the whole alone, and something stands between")
        elif not is_flag and part.text not in ("^", "$"):
            is_at_edge = False


def _wrong(part: ExpressionPart, why: str) -> ValueError:
    shown = part.text if part.text.isprintable() else repr(part.text)
    return ValueError(f"{shown} at {part.at}: {why}")
