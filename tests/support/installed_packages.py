"""Packages that plugins bring, as pip would have installed them: it takes two seconds to say so.

`models/test_own_ops.py` has one installed by pip.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def install(folder: Path, name: str, entry_points: str, files: Mapping[str, str]) -> Path:
    """Writes the files into the folder, which is for PYTHONPATH, with what is recorded of the package."""
    record = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (record / "entry_points.txt").write_text(entry_points)
    for path, text in files.items():
        (folder / path).write_text(text)
    return folder
