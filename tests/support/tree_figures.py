"""Prints figures of the tree that are looked at and not enforced; `make lint` runs it.

An import runs back up if it leads to a room from which its own room is imported. Rooms are the folders directly below a
top folder, and the files beside them. Counted are the pairs of rooms that no order of the rooms can avoid.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Set
from pathlib import Path

import source_tree as tree

SCHEDULER = Path("core/schedule/scheduler.py")
FEATURES = re.compile(r"draft|grammar|mask|specul", re.IGNORECASE)
MANY_FILES = 20
Edges = Set[tuple[str, str]]


def rooms_imported(top: str) -> set[tuple[str, str]]:
    """(room, the room that it imports) of a top folder, with imports inside functions."""
    edges = set()
    for path in tree.python_files(top):
        for found in tree.imports(path):
            parts = found.name.split(".")[1:]
            if parts[:1] == [top] and len(parts) > 1 and (room := _room(path)) != parts[1]:
                edges.add((room, parts[1]))
    return edges


def _room(path: Path) -> str:
    return path.parts[1].removesuffix(".py")


def num_back_up(edges: Edges) -> int:
    """The least number of edges that lead up, over all orders of the rooms."""
    below: dict[str, set[str]] = {}
    for room, imported in edges:
        below.setdefault(room, set()).add(imported)
    return sum(_least_up(circle, edges) for circle in _circles(below))


def _circles(below: dict[str, set[str]]) -> set[frozenset[str]]:
    """The sets of rooms that import each other, directly or not."""
    reached = {room: _reached(room, below) for room in below}
    circles = {room: frozenset(each for each in reached[room] if room in reached.get(each, ())) for room in below}
    return {circle for circle in circles.values() if circle}


def _reached(room: str, below: dict[str, set[str]]) -> set[str]:
    seen, left = set[str](), list(below[room])
    while left:
        if (each := left.pop()) not in seen:
            seen.add(each)
            left += below.get(each, ())
    return seen


def _least_up(circle: frozenset[str], edges: Edges) -> int:
    """Dynamic programming over sets of rooms that lie below all others (Held and Karp)."""
    outside = {room: {to for start, to in edges if start == room and to in circle} for room in circle}
    least = {frozenset[str](): 0}
    for _ in circle:
        longer: dict[frozenset[str], int] = {}
        for placed, up in least.items():
            for room in circle - placed:
                cost = up + len(outside[room] - placed)
                longer[placed | {room}] = min(cost, longer.get(placed | {room}, cost))
        least = longer
    return least[circle]


def main() -> None:
    lines = {path: (tree.ROOT / path).read_text(encoding="utf-8") for path in tree.python_files()}
    product = [path for path in lines if path.parts[0] in tree.FOLDERS]
    scheduler = lines[SCHEDULER]
    print(f"product: {sum(lines[path].count(chr(10)) for path in product)} lines in {len(product)} files")
    print(
        f"{SCHEDULER}: {scheduler.count(chr(10))} lines, {len(FEATURES.findall(scheduler))} mentions of step features"
    )
    for top in tree.FOLDERS:
        edges = rooms_imported(top)
        print(f"{top}: {num_back_up(edges)} of {len(edges)} imports between its rooms run back up")
    folders = Counter(path.parent for path in product if path.name != "__init__.py")
    many = [f"{folder} {count}" for folder, count in folders.most_common() if count > MANY_FILES]
    print(f"folders of more than {MANY_FILES} files: {', '.join(many)}")


if __name__ == "__main__":
    main()
