"""What is compiled into each of the libraries: the C++ files of a folder, and the units that are written by its table.

The kernels are three libraries. Those for quantised weights, of GGUF files (PACKED) and of other checkpoints (GROUPED),
are built when the first such weight is packed: most models have none, and compiling dominates a start with an empty
cache. `units.toml` says what belongs where.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CORE, PACKED, GROUPED = "core", "packed", "grouped"
LIBRARIES = (CORE, PACKED, GROUPED)
TABLE = "units.toml"


@dataclass(frozen=True)
class Unit:
    """Text that is compiled into libraries."""

    name: str
    """Of a file its path within the folder, without the ending."""
    text: str
    libraries: tuple[str, ...] = (CORE,)
    alone: bool = False
    """Not together with others: it takes seconds to compile."""
    unrolled: bool = False


def sources(folder: Path) -> list[Path]:
    """All files that make a difference to what is compiled, sorted by path."""
    return sorted(path for pattern in ("*.cpp", "*.h", TABLE) for path in folder.rglob(pattern))


def units(folder: Path, library: str) -> list[Unit]:
    """The units of one library. What is compiled alone takes longest and comes first."""
    path = folder / TABLE
    table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    found = [*_files(folder, table), *_written(table.get("tiles", []))]
    return sorted((unit for unit in found if library in unit.libraries), key=lambda unit: not unit.alone)


def _files(folder: Path, table: dict[str, Any]) -> list[Unit]:
    found = []
    for path in sources(folder):
        if path.suffix == ".cpp":
            name = path.relative_to(folder).with_suffix("").as_posix()
            libraries = LIBRARIES if name in table.get("in_all", ()) else (CORE,)
            alone, unrolled = (name in table.get(kind, ()) for kind in ("alone", "unrolled"))
            found.append(Unit(name, f'#include "{name}.cpp"\n', libraries, alone, unrolled))
    return found


def _written(rows: list[dict[str, Any]]) -> list[Unit]:
    """A unit for the tiles of some types, for each row of the table, and one that chooses for each library."""
    found = []
    choices: dict[str, list[str]] = {}
    for row in rows:
        for name, types in row["units"].items():
            cases = [
                f"    case WeightType::{each}: return &kTilesOf<{row['kernel']}<WeightType::{each}>>;" for each in types
            ]
            text = _TILES.format(header=row["header"], name=name, cases="\n".join(cases))
            found.append(Unit(name, text, (row["library"],), alone=row["library"] != CORE))
            is_rounded = "true" if row.get("rounded") else "false"
            for each in types:
                choice = f"  if (type == WeightType::{each} && rounded == {is_rounded}) return tiles_of_{name}(type);"
                choices.setdefault(row["library"], []).append(choice)
    for library, lines in choices.items():
        names = [unit.name for unit in found if unit.libraries == (library,)]
        declared = "\n".join(f"const Tiles* tiles_of_{name}(WeightType type);" for name in names)
        text = _CHOICE.format(declared=declared, choices="\n".join(lines))
        found.append(Unit(f"tiles_of_{library}", text, (library,)))
    return found


_TILES = """\
#include "experts/driver.h"
#include "{header}"
namespace headrace {{
const Tiles* tiles_of_{name}(WeightType type) {{
  switch (type) {{
{cases}
    default: return nullptr;
  }}
}}
}}  // namespace headrace
"""
_CHOICE = """\
#include "linear/linear.h"
namespace headrace {{
{declared}
}}  // namespace headrace
// For PackedWeight.tiles; null for a type whose tiles are in another library.
HR_EXPORT const headrace::Tiles* hr_tiles(int32_t number, bool rounded) {{
  using namespace headrace;
  const auto type = static_cast<WeightType>(number);
{choices}
  return nullptr;
}}
"""
