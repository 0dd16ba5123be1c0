"""The command that installs an extra of Headrace, from where Headrace itself has come."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import msgspec


def how_to_install(extra: str) -> str:
    """A command for a shell, such as pip install 'FOLDER[otel]', or words where there is none."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        said = distribution("headrace").read_text("direct_url.json")
    except PackageNotFoundError:
        said = None
    try:
        origin = msgspec.json.decode(said or "{}", type=dict[str, Any])
    except msgspec.DecodeError:
        origin = {}
    return command_for(extra, origin)


def command_for(extra: str, origin: dict[str, Any]) -> str:
    """origin: what pip noted when it installed Headrace from a file, a folder or an address (PEP 610); empty, it came
    by other means. In the public index the name is another project's, so no command asks for it there."""
    again = f"install the wheel or clone of Headrace again, with its extra: pip install 'PATH[{extra}]'"
    url = str(origin.get("url", ""))
    if not url:
        return again
    if not url.startswith("file://"):
        system = (origin.get("vcs_info") or {}).get("vcs")
        return f"pip install {shlex.quote(f'headrace[{extra}] @ ' + (f'{system}+' if system else '') + url)}"
    from urllib.parse import unquote, urlsplit

    place = Path(unquote(urlsplit(url).path))
    if not place.exists():
        return again
    editable = "-e " if (origin.get("dir_info") or {}).get("editable") else ""
    return f"pip install {editable}{shlex.quote(f'{place}[{extra}]')}"
