"""APIs are rooms: each is found by its folder. The server's base knows none, and neither knows of processes."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from server_here import serving_here
from source_tree import python_files, tree

from headrace.frontend.http import apis, process

README = Path(apis.__path__[0], "README.md").read_text(encoding="utf-8")
(ECHO,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    """Of a server that has a folder more below apis/: the README's example."""
    room = tmp_path / "echo"
    room.mkdir()
    (room / "__init__.py").write_text("")
    (room / "routes.py").write_text(ECHO)
    monkeypatch.setattr(apis, "__path__", [*apis.__path__, str(tmp_path)])
    with serving_here() as server, server.client() as client:
        yield client


def test_a_folder_with_a_route_is_an_api(client: httpx.Client) -> None:
    answer = client.post("/echo", json={"text": "hello"})
    assert answer.status_code == 200, answer.text
    (said,) = answer.json().values()
    plain = client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 3, "add_special_tokens": False})
    assert said == plain.json()["choices"][0]["text"] != ""
    assert client.post("/echo", json={"text": 3}).json()["error"]["param"] == "text"
    assert client.post("/echo", json={"text": "hi", "model": "other"}).json()["error"]["code"] == "model_not_found"
    assert "/echo" in client.get("/openapi.json").json()["paths"]


@pytest.mark.parametrize("name", [path.parent.name for path in Path(apis.__path__[0]).glob("*/__init__.py")])
def test_every_folder_is_an_api_with_routes(name: str) -> None:
    api = apis.load(name)
    assert api.routes
    assert len({(route.method, route.path, route.header) for route in api.routes}) == len(api.routes)


HTTP = [path for path in python_files("frontend") if path.is_relative_to("frontend/http")]
BASE = [path for path in HTTP if path.is_relative_to("frontend/http/server")]


def _imports(path: Path, package: str) -> list[int]:
    """The lines at which a file imports something of the package."""
    found = (node for node in ast.walk(tree(path)) if isinstance(node, ast.ImportFrom))
    return [
        node.lineno
        for node in found
        if any(f"{node.module}.{alias.name}.".startswith(f"{package}.") for alias in node.names)
    ]


def test_the_servers_base_imports_no_api() -> None:
    """Neither at any place of its own files nor by way of what they import."""
    assert not [f"{path}:{line}" for path in BASE for line in _imports(path, apis.__name__)]
    modules = [".".join(("headrace", *path.with_suffix("").parts)) for path in BASE]
    check = f"import sys, {', '.join(modules)}; sys.exit({apis.__name__!r} in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_only_the_processes_themselves_know_of_processes() -> None:
    """Options, the server's base and the APIs are the same in one process and in several."""
    others = [path for path in HTTP if not path.is_relative_to("frontend/http/process")]
    assert not [f"{path}:{line}" for path in others for line in _imports(path, process.__name__)]
