"""What to type for an extra is said by where Headrace came from."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from headrace.ipc.extras import command_for, how_to_install


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ({}, "pip install 'PATH[otel]'"),
        (
            {"url": "https://example.com/headrace-1.0-py3-none-any.whl", "archive_info": {}},
            "pip install 'headrace[otel] @ https://example.com/headrace-1.0-py3-none-any.whl'",
        ),
        (
            {"url": "https://example.com/headrace.git", "vcs_info": {"vcs": "git", "commit_id": "0" * 40}},
            "pip install 'headrace[otel] @ git+https://example.com/headrace.git'",
        ),
        ({"url": "file:///not/here/headrace-1.0-py3-none-any.whl"}, "pip install 'PATH[otel]'"),
    ],
)
def test_a_package_from_an_index_or_an_address_is_installed_from_there(origin: dict[str, Any], command: str) -> None:
    assert command_for("otel", origin).endswith(command)


@pytest.mark.parametrize("name", ["clone", "a clone", "it's"])
@pytest.mark.parametrize("is_editable", [False, True])
def test_a_file_or_folder_is_named_with_its_extra(tmp_path: Path, name: str, is_editable: bool) -> None:
    (tmp_path / name).mkdir()
    origin = {"url": (tmp_path / name).as_uri(), "dir_info": {"editable": True} if is_editable else {}}
    editable = ["-e"] if is_editable else []
    assert shlex.split(command_for("engine", origin)) == ["pip", "install", *editable, f"{tmp_path / name}[engine]"]


def test_this_installation_says_where_it_came_from() -> None:
    command = how_to_install("otel")
    assert shlex.split(command)[-1].endswith("[otel]")
