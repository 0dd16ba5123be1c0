"""APIs are rooms: each is found by its folder, and the server's base knows none."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from server_here import serving_here
from source_tree import python_files, tree

from headrace.frontend.http import apis

ECHO = '''
"""An API with one route, which answers with what the model makes of a text."""

import msgspec

from headrace.frontend.request.prompts import Prompt
from headrace.frontend.request.parameters.sampling_params import SamplingParams
from headrace.frontend.http.server.access import Access
from headrace.frontend.http.server.generation import Answer, PreparedRequest
from headrace.frontend.http.server.route_spec import GENERATION, post


class EchoRequest(msgspec.Struct):
    text: str
    model: str | None = None
    request_id: str | None = None


class EchoResponse(msgspec.Struct):
    echo: str


class EchoAnswer(Answer):
    def whole(self):
        (stream,) = self.streams
        output = stream.sequences[0].read(delta=False, tokenizer=stream.tokenizer)
        return [msgspec.json.encode(EchoResponse(output.text))]


async def echo(state, exchange):
    def prepare(request, engine, name):
        token_ids = engine.client.tokenizer.encode(request.text, False)
        prompt, params = Prompt(text=request.text, token_ids=token_ids), SamplingParams(max_tokens=3)
        return PreparedRequest(engine, name, [prompt], [params], EchoAnswer())

    await state.generate(exchange, lambda body: state.decoder.decode(body, EchoRequest), prepare)


ROUTES = (post("/echo", echo, "Echo a text", EchoRequest, EchoResponse, GENERATION, access=Access.CLIENT),)
'''


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    """Of a server that has a folder more below apis/."""
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


BASE = [path for path in python_files("frontend") if path.is_relative_to("frontend/http/server")]


def test_the_servers_base_imports_no_api() -> None:
    """Neither at any place of its own files nor by way of what they import."""
    for path in BASE:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                assert not [name for name in names if name.startswith(apis.__name__)], f"{path}:{node.lineno}"
    modules = [".".join(("headrace", *path.with_suffix("").parts)) for path in BASE]
    check = f"import sys, {', '.join(modules)}; sys.exit({apis.__name__!r} in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)
