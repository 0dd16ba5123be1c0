"""Tools that Anthropic defines and clients run: a request names their type alone, and the models know the rest.

Other models are shown a description and a schema like any tool's.
"""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from typing import Any


def _schema(*required: str, **properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*required]}


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


_EDITING: Mapping[str, dict[str, Any]] = types.MappingProxyType(
    {
        "path": _text("Absolute path of a file or folder"),
        "file_text": _text("For create: the file's text"),
        "old_str": _text("For str_replace: text that occurs once in the file"),
        "new_str": _text("For str_replace: the text to put in its place"),
        "insert_line": {"type": "integer", "description": "For insert: the line to insert after; 0 is the beginning"},
        "insert_text": _text("For insert: the text"),
        "view_range": {
            "type": "array",
            "items": {"type": "integer"},
            "description": "For view: the first and the last line, from 1; -1 is the end",
        },
    }
)


def _commands(*names: str) -> dict[str, Any]:
    return {"type": "string", "enum": [*names]}


_EDITS = ("view", "create", "str_replace", "insert")
_TOOLS: Mapping[str, tuple[str, dict[str, Any]]] = types.MappingProxyType(
    {
        "bash": (
            "Runs a command in a bash session that lasts between calls.",
            _schema(command=_text("The command"), restart={"type": "boolean", "description": "Begins a new session"}),
        ),
        "text_editor": (
            "Shows, creates and edits files.",
            _schema("command", "path", command=_commands(*_EDITS), **_EDITING),
        ),
        "memory": (
            "Keeps what is worth remembering as files below /memories. Look there before you begin.",
            _schema(
                "command",
                command=_commands(*_EDITS, "delete", "rename"),
                **_EDITING,
                old_path=_text("For rename: the path as it is"),
                new_path=_text("For rename: the path as it shall be"),
            ),
        ),
    }
)
_DATED = re.compile(r"(\w+)_\d{8}")


def known_tool(kind: str) -> tuple[str, dict[str, Any]] | None:
    """The description and the schema of a tool of this type, such as bash_20250124; None for one that is not known, or
    that runs on Anthropic's servers."""
    dated = _DATED.fullmatch(kind)
    return _TOOLS.get(dated.group(1)) if dated else None
