"""List the models that this machine keeps, fetch others, remove them.

Models are kept in the Hugging Face hub's cache; the demo model is kept in Headrace's own. `headrace serve` fetches what
is missing by itself.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.executor.checkpoints.hub.kept import KeptModel

HEADER = ("MODEL", "SIZE", "USED", "PATH")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="Print a JSON list instead of a table")
    actions = parser.add_subparsers(dest="models_command", metavar="ACTION", title="actions")
    fetch = actions.add_parser("fetch", help="Download a model, so that a later start needs no network")
    fetch.add_argument("model", help="OWNER/NAME on the hub, OWNER/NAME:FILE.gguf, or the demo model's name")
    fetch.add_argument("--revision", help="Branch, tag or commit")
    fetch.add_argument("--download-dir", help="Folder for downloaded hub models")
    remove = actions.add_parser("remove", help="Delete downloaded models")
    remove.add_argument("models", nargs="+", metavar="model", help="Names of models, as `headrace models` lists them")
    remove.add_argument("-y", "--yes", action="store_true", help="Do not ask for confirmation")


def run(arguments: argparse.Namespace) -> int:
    from headrace.core.process.installed import check_engine_is_installed

    check_engine_is_installed("huggingface_hub")
    from headrace.executor.checkpoints.hub.kept import fetch, kept_models, remove

    if arguments.models_command == "fetch":
        print(fetch(arguments.model, arguments.revision, arguments.download_dir))
        return 0
    if arguments.models_command == "remove":
        for name in arguments.models:
            if not arguments.yes and not _agreed(name):
                continue
            print(f"removed {name}: {_size(remove(name).size_bytes)} freed")
        return 0
    _show(kept_models(), as_json=arguments.json)
    return 0


def _show(models: list[KeptModel], *, as_json: bool) -> None:
    from headrace.frontend.client.engine_watch import duration, table

    if as_json:
        import json

        said = [
            {"model": each.name, "size_bytes": each.size_bytes, "used_s": each.used_s, "path": str(each.path)}
            for each in models
        ]
        print(json.dumps(said, indent=2))
        return
    rows = [
        (each.name, _size(each.size_bytes), f"{duration(max(0.0, time.time() - each.used_s))} ago", str(each.path))
        for each in models
    ]
    print(*table(HEADER, rows), sep="\n")
    if models:
        print(f"{_size(sum(each.size_bytes for each in models))} in all")


def _agreed(name: str) -> bool:
    if not sys.stdin.isatty():
        return True  # a script says what it means
    return input(f"Remove {name}? [y/N] ").strip().lower() in ("y", "yes")


def _size(size_bytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size_bytes < 1000:
            return f"{size_bytes:.0f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.1f} GB"
