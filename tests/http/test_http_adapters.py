"""LoRA adapters over HTTP: named as `model` on every route, loaded and unloaded while the server runs, and found."""

from __future__ import annotations

import asyncio
import io
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import psutil
import pytest
from http_server import engines_of, metric, serving
from null_adapters import write
from patience import wait_until
from server_here import MODEL, ServerHere, serving_here

from headrace import InvalidRequestError, LoRARequest
from headrace.executor.testing.null import NullExecutor
from headrace.frontend.adapters.resolver import LoRAResolver, LoRAResolverRegistry, installed_resolvers
from headrace.frontend.http.apis.health.routes import health, ready
from headrace.frontend.http.options import ServeOptions
from headrace.frontend.http.server.adapters import AdapterFinder
from headrace.frontend.http.server.errors import ApiError, UnknownModelError
from headrace.ipc import plugins
from headrace.ipc.adapters import AdapterFacts
from headrace.ipc.failure import MissingAdapterError, ModelError, OptionError

HI = [{"role": "user", "content": "hi"}]
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ENGINE: dict[str, Any] = {"enable_lora": True, "max_loras": 4, "max_cpu_loras": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for name in ("sql", "chat", "late"):
        write(folder / name, name)
    for name in ("found", "team/found"):
        write(folder / "shelf" / name, name)
    write(folder / "shelf" / "broken", "broken", r="no number")
    write(folder / "shelf" / "elsewhere", "elsewhere", base_model_name_or_path="another/model")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerHere]:
    modules = (f"sql={folder}/sql", json.dumps({"name": "chat", "path": f"{folder}/chat", "base_model_name": "Base"}))
    options = ServeOptions(
        port=0,
        lora_modules=modules,
        allow_runtime_lora_updating=True,
        lora_resolver_cache_dir=str(folder / "shelf"),
        enable_log_requests=True,
    )
    with serving_here(options, **ENGINE) as server:
        yield server


@pytest.fixture
def client(server: ServerHere) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def test_a_server_without_adapters_says_so(folder: Path) -> None:
    options = ServeOptions(port=0, allow_runtime_lora_updating=True)
    with serving_here(options) as server, server.client() as client:
        for path, body in (
            (LOAD, {"lora_name": "sql", "lora_path": f"{folder}/sql"}),
            (UNLOAD, {"lora_name": "sql"}),
            ("/adapters", {"name": "sql", "src": f"{folder}/sql"}),
        ):
            assert "--enable-lora" in error_of(client.post(path, json=body), 400)["message"]
        assert "--enable-lora" in error_of(client.delete("/adapters/sql"), 400)["message"]
        assert client.get("/lora-adapters").json() == []


def completed(client: httpx.Client, model: str | None = None, **fields: Any) -> str:
    body = {"prompt": "a", "max_tokens": 8, "temperature": 0, **fields}
    answer = client.post("/v1/completions", json=body if model is None else {"model": model, **body})
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def test_a_server_is_not_ready_before_its_adapters_are_loaded() -> None:
    """Engines answer before: probes would send requests for adapters that get a 404."""
    pool: Any = SimpleNamespace(answers=True, names=["null"])
    finder = AdapterFinder(pool, ServeOptions(lora_modules=("sql=/nowhere",)))
    state: Any = SimpleNamespace(pool=pool, finder=finder, draining=False)
    unused: Any = None
    for probe in (health, ready):
        with pytest.raises(ApiError, match="still loading") as refused:
            asyncio.run(probe(state, unused))
        assert refused.value.status == 503
    with pytest.raises(ApiError, match="still loading"):
        asyncio.run(finder.find(UnknownModelError("sql", "the model 'sql' does not exist")))
    AdapterFinder(pool, ServeOptions()).check_loaded()


def test_the_log_names_the_adapter_of_a_request(client: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="headrace"):
        for name in ("sql", None):
            completed(client, name, request_id=f"of-{name}")
        wait_until(lambda: "id=of-None" in caplog.text, 20, "the line")
    told = [each.getMessage() for each in caplog.records if "id=of-" in each.getMessage()]
    assert [re.search(r"model=(\S+) (?:adapter=(\S+) )?prompt", each).groups() for each in told] == [  # type: ignore[union-attr]
        (MODEL, "sql"),
        (MODEL, None),
    ]


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_models_have_a_card_for_each_adapter(client: httpx.Client, folder: Path) -> None:
    cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
    assert list(cards)[:3] == [MODEL, "sql", "chat"], "the model is the default, so it comes first"
    assert (cards[MODEL]["parent"], cards["sql"]["parent"], cards["chat"]["parent"]) == (None, MODEL, "Base")
    assert cards["sql"]["root"] == f"{folder}/sql"
    assert client.get("/v1/models/sql").json() == cards["sql"]
    ids = [each["id"] for each in client.get("/v1/models", headers={"anthropic-version": "1"}).json()["data"]]
    assert ids == list(cards)
    assert "sql" in {each["name"] for each in client.get("/api/tags").json()["models"]}


def test_the_official_client_gets_other_answers_by_model(server: ServerHere) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        answers = {
            model.id: client.completions.create(model=model.id, prompt="a", max_tokens=8, temperature=0)
            for model in client.models.list()
            if model.id in (MODEL, "sql", "chat")
        }
    assert [answer.model for answer in answers.values()] == [MODEL, "sql", "chat"]
    assert len({answer.choices[0].text for answer in answers.values()}) == 3


ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 8},
    "/v1/chat/completions": {"messages": HI, "max_tokens": 8},
    "/v1/chat/completions/batch": {"messages": [HI, HI], "max_tokens": 8},
    "/v1/responses": {"input": "hi", "max_output_tokens": 16},
    "/v1/messages": {"messages": HI, "max_tokens": 8},
    "/api/chat": {"messages": HI, "stream": False, "options": {"num_predict": 8}},
    "/api/generate": {"prompt": "hi", "stream": False, "options": {"num_predict": 8}},
    "/invocations": {"prompt": "a", "max_tokens": 8},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
    "/v1/messages/count_tokens": {"messages": HI},
    "/v1/responses/input_tokens": {"input": "hi"},
}


@pytest.mark.parametrize("path", ROUTES)
def test_every_route_takes_an_adapter_as_its_model(server: ServerHere, client: httpx.Client, path: str) -> None:
    for model, name in ((MODEL, ""), ("sql", "sql"), (f"{MODEL}:chat", "chat"), ("team/found", "team/found")):
        del server.sent[:]
        answer = client.post(path, json={"model": model, **ROUTES[path]})
        assert answer.status_code == 200, answer.text
        assert all([each.name for each in request.adapters] == [name] * bool(name) for request in server.requests())
        assert answer.json().get("model", model) == model
    assert error_of(client.post(path, json={"model": "nobody", **ROUTES[path]}), 404)


def test_ollamas_tag_is_of_adapters_too(server: ServerHere, client: httpx.Client) -> None:
    del server.sent[:]
    assert client.post("/api/chat", json={"model": "sql:latest", **ROUTES["/api/chat"]}).status_code == 200
    (request,) = server.requests()
    assert [each.name for each in request.adapters] == ["sql"]


def test_sagemakers_header_names_an_adapter(server: ServerHere, client: httpx.Client) -> None:
    del server.sent[:]
    header = {"X-Amzn-SageMaker-Adapter-Identifier": "sql"}
    assert client.post("/invocations", json={"messages": HI, "max_tokens": 2}, headers=header).status_code == 200
    (request,) = server.requests()
    assert [each.name for each in request.adapters] == ["sql"]


def test_an_adapter_is_loaded_used_and_unloaded(client: httpx.Client, folder: Path) -> None:
    asked = {"lora_name": "late", "lora_path": f"{folder}/late"}
    answer = client.post(LOAD, json=asked)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'late' added successfully.")
    assert answer.headers["content-type"].startswith("text/plain")
    assert completed(client, "late") != completed(client)
    error = error_of(client.post(LOAD, json=asked), 400)
    assert error["type"] == "InvalidUserInput"
    assert error["message"] == (
        "The lora adapter 'late' has already been loaded. If you want to load the adapter in place, set 'load_inplace'"
        " to True."
    )
    answer = client.post(UNLOAD, json={"lora_name": "late", "lora_int_id": 1})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'late' removed successfully.")
    assert error_of(client.post("/v1/completions", json={"model": "late", "prompt": "a"}), 404)["param"] == "model"
    error = error_of(client.post(UNLOAD, json={"lora_name": "late"}), 404)
    assert (error["type"], error["message"]) == ("NotFoundError", "The lora adapter 'late' cannot be found.")


def test_an_adapter_is_loaded_in_place(client: httpx.Client, tmp_path: Path) -> None:
    path = write(tmp_path / "a", "first")
    assert client.post(LOAD, json={"lora_name": "a", "lora_path": path}).status_code == 200
    first = completed(client, "a")
    write(tmp_path / "a", "second")
    assert completed(client, "a") == first
    assert client.post(LOAD, json={"lora_name": "a", "lora_path": path, "load_inplace": True}).status_code == 200
    assert completed(client, "a") not in (first, completed(client))
    assert client.post(UNLOAD, json={"lora_name": "a"}).status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "kind", "message"),
    [
        ({"lora_name": "a"}, 400, "InvalidUserInput", "Both 'lora_name' and 'lora_path' must be provided."),
        ({"lora_path": "/a"}, 400, "InvalidUserInput", "Both 'lora_name' and 'lora_path' must be provided."),
        ({"lora_name": MODEL, "lora_path": "/a"}, 400, "InvalidUserInput", "has the name of the model itself"),
        ({"lora_name": "a", "lora_path": "/no/where"}, 404, "NotFoundError", "No adapter found for /no/where"),
        ({"lora_name": "a", "lora_path": "/a\0"}, 400, "InvalidUserInput", "'lora_path' has a NUL character"),
        ({"lora_name": "a", "lora_path": "SHELF/broken"}, 500, "InternalServerError", "could not be loaded"),
        ({"lora_name": 7, "lora_path": "/a"}, 400, "invalid_request_error", "lora_name"),
    ],
)
def test_a_load_that_fails_says_why(
    client: httpx.Client, folder: Path, body: dict[str, Any], status: int, kind: str, message: str
) -> None:
    before = client.get("/v1/models").json()
    given = {
        name: str(value).replace("SHELF", f"{folder}/shelf") if name == "lora_path" else value
        for name, value in body.items()
    }
    error = error_of(client.post(LOAD, json=given), status)
    assert error["type"] == kind
    assert message in error["message"]
    assert client.get("/v1/models").json() == before


def test_the_engines_say_whether_there_is_an_adapter(
    client: httpx.Client, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be on hosts of their own: what this process sees at the path does not matter."""
    monkeypatch.setattr(NullExecutor, "load_adapter", elsewhere)
    there = {"lora_name": "a", "lora_path": f"{folder}/late"}
    assert "No adapter found for" in error_of(client.post(LOAD, json=there), 404)["message"]
    elsewhere_only = {"lora_name": "a", "lora_path": "/engines/broken"}
    assert "it is truncated" in error_of(client.post(LOAD, json=elsewhere_only), 500)["message"]


def elsewhere(executor: NullExecutor, slot: int, path: str, *, is_3d: bool = False) -> AdapterFacts:
    """Loads as an engine does that has /engines/broken and no other adapter."""
    raise ModelError("it is truncated") if path == "/engines/broken" else MissingAdapterError(f"{path} is not there")


def test_an_unload_needs_a_name(client: httpx.Client) -> None:
    error = error_of(client.post(UNLOAD, json={}), 400)
    assert error["message"] == "'lora_name' needs to be provided to unload a LoRA adapter."


def test_sagemakers_routes_are_the_same(client: httpx.Client, folder: Path) -> None:
    assert client.post("/adapters", json={"name": "late", "src": f"{folder}/late", "pin": True}).status_code == 200
    assert completed(client, "late") != completed(client)
    assert error_of(client.post("/adapters", json={"name": "late", "src": f"{folder}/late"}), 400)
    assert client.delete("/adapters/late").status_code == 200
    assert error_of(client.delete("/adapters/late"), 404)


def test_llama_cpps_field_scales_several_adapters(server: ServerHere, client: httpx.Client) -> None:
    listed = client.get("/lora-adapters").json()
    assert [(each["id"], Path(each["path"]).name, each["scale"]) for each in listed[:2]] == [
        (0, "sql", 0.0),
        (1, "chat", 0.0),
    ]
    base, sql = completed(client), completed(client, "sql")
    assert completed(client, lora=[]) == completed(client, lora=[{"id": 0, "scale": 0}]) == base
    assert completed(client, lora=[{"id": 0, "scale": 1}]) == sql
    del server.sent[:]
    both = [{"id": 0, "scale": 0.5}, {"id": 1, "scale": -2}]
    assert completed(client, lora=both) not in (base, sql)
    (request,) = server.requests()
    assert {each.name: each.scale for each in request.adapters} == {"sql": 0.5, "chat": -2.0}
    chat = client.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 2, "lora": both})
    assert chat.status_code == 200
    error = error_of(client.post("/v1/completions", json={"prompt": "a", "lora": [{"id": 99, "scale": 1}]}), 400)
    assert error["param"] == "lora"
    assert "lora[0].id is 99; the ids are 0 to " in error["message"]
    assert "lora" in error_of(client.post("/v1/completions", json={"prompt": "a", "lora": [{"id": 0}]}), 400)["message"]


def test_scales_that_are_posted_apply_to_requests_without_the_field(client: httpx.Client) -> None:
    base, sql = completed(client), completed(client, "sql")
    assert client.post("/lora-adapters", json=[{"id": 0, "scale": 1.0}]).json()[0]["scale"] == 1.0
    assert completed(client) == sql
    assert completed(client, lora=[]) == base
    assert client.post("/lora-adapters", json=[]).status_code == 200
    assert completed(client) == base
    assert error_of(client.post("/lora-adapters", json=[{"id": 99, "scale": 1}]), 400)
    for scale in (1e300, -1e39):
        body = [{"id": 0, "scale": scale}]
        assert "body[0].scale" in error_of(client.post("/lora-adapters", json=body), 400)["message"]
        assert (
            "lora[0].scale"
            in error_of(client.post("/v1/completions", json={"prompt": "a", "lora": body}), 400)["message"]
        )
    assert completed(client) == base


def test_scales_of_more_adapters_than_a_request_may_have_are_refused(client: httpx.Client, tmp_path: Path) -> None:
    base = completed(client)
    names = [f"more-{number}" for number in range(5)]
    for name in names:
        path = write(tmp_path / name, name)
        assert client.post(LOAD, json={"lora_name": name, "lora_path": path}).status_code == 200
    ids = {Path(each["path"]).name: each["id"] for each in client.get("/lora-adapters").json()}
    all_five = [{"id": ids[name], "scale": 0.5} for name in names]
    said = error_of(client.post("/lora-adapters", json=all_five), 400)["message"]
    assert "5 adapters (more-0, more-1, " in said
    assert "max_loras is 4" in said
    assert completed(client) == base
    four = [*all_five[:4], {"id": ids[names[4]], "scale": 0}]
    assert client.post("/lora-adapters", json=four).status_code == 200
    assert completed(client) not in (base, "")
    said = error_of(client.post("/v1/completions", json={"prompt": "a", "model": names[4]}), 400)["message"]
    assert "the request has 5 adapters (more-0, " in said
    assert client.post("/lora-adapters", json=[]).status_code == 200
    for name in names:
        assert client.post(UNLOAD, json={"lora_name": name}).status_code == 200


def test_lists_have_what_a_file_says_of_its_adapter(client: httpx.Client, tmp_path: Path) -> None:
    said = {"task_name": "sql", "prompt_prefix": "query: ", "alora_invocation_tokens": [5, 6]}
    path = write(tmp_path / "told", "told", **said)
    assert client.post(LOAD, json={"lora_name": "told", "lora_path": path}).status_code == 200
    listed = client.get("/lora-adapters").json()
    (told,) = (each for each in listed if each["path"] == path)
    assert {key: told[key] for key in said} == said
    assert all("alora_invocation_tokens" not in each for each in listed if each is not told)
    assert client.post(UNLOAD, json={"lora_name": "told"}).status_code == 200


def test_an_unknown_model_is_looked_for(client: httpx.Client) -> None:
    assert completed(client, "found") != completed(client)
    assert "found" in {card["id"] for card in client.get("/v1/models").json()["data"]}
    for name in ("elsewhere", "missing", "../sql", "shelf/../../sql", "/etc/passwd"):
        error = error_of(client.post("/v1/completions", json={"model": name, "prompt": "a"}), 404)
        assert error["code"] == "model_not_found"
    for _ in range(2):
        error = error_of(client.post("/v1/completions", json={"model": "broken", "prompt": "a"}), 400)
        assert error["message"].startswith("LoRA adapter 'broken' was found but could not be loaded: ")
        assert "/" not in error["message"].partition(": ")[2]


def test_a_resolver_of_ones_own_is_asked_too(
    client: httpx.Client, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []

    class Mine(LoRAResolver):
        async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
            asked.append((base_model_name, lora_name))
            if lora_name == "fails":
                raise InvalidRequestError("the shelf fell down")
            if lora_name == "exits":
                raise SystemExit(3)
            if lora_name == "seven":
                return 7  # type: ignore[return-value]
            return LoRARequest(lora_name, 1, f"{folder}/sql") if lora_name == "mine" else None

    monkeypatch.setattr(LoRAResolverRegistry, "resolvers", {"mine": Mine()})
    assert completed(client, "mine") == completed(client, "sql"), "the same content"
    assert completed(client, "mine") == completed(client, "sql")
    assert error_of(client.post("/v1/completions", json={"model": "a/" * 5000 + "a", "prompt": "a"}), 404)
    assert asked == [(MODEL, "mine")], "it was asked once"
    error = error_of(client.post("/v1/completions", json={"model": "fails", "prompt": "a"}), 400)
    assert error["message"] == (
        "LoRA adapter 'fails' could not be resolved: the resolver mine failed: the shelf fell down"
    )
    error_of(client.post("/v1/completions", json={"model": "exits", "prompt": "a"}), 400)
    error = error_of(client.post("/v1/completions", json={"model": "seven", "prompt": "a"}), 400)
    assert error["message"].endswith(
        "the resolver mine failed: resolve_lora returned 7; expected: a LoRARequest or None"
    )
    assert client.post(UNLOAD, json={"lora_name": "mine"}).status_code == 200


RESOLVER = """
from headrace.lora.resolver import LoRAResolver
from headrace import LoRARequest

class Shelf(LoRAResolver):
    async def resolve_lora(self, base_model_name, lora_name):
        return LoRARequest(lora_name, 1, "SQL") if lora_name == "shelved" else None
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Installs a package with a module `shelf` of this text, and one entry point."""

    def install(text: str, entry_point: str) -> None:
        (tmp_path / "shelf.py").write_text(text)
        package = tmp_path / "shelf-1.0.dist-info"
        package.mkdir()
        (package / "METADATA").write_text("Metadata-Version: 2.1\nName: shelf\nVersion: 1.0\n")
        (package / "entry_points.txt").write_text(f"[headrace.lora_resolvers]\n{entry_point}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        plugins._installed_on.cache_clear()

    yield install
    monkeypatch.undo()
    plugins._installed_on.cache_clear()
    sys.modules.pop("shelf", None)


def test_a_resolver_of_an_installed_package_is_asked(install: Callable[[str, str], None], folder: Path) -> None:
    install(RESOLVER.replace("SQL", f"{folder}/sql"), "shelf = shelf:Shelf")
    with serving_here(ServeOptions(port=0), **ENGINE) as server, server.client() as client:
        assert completed(client, "shelved") != completed(client)
        assert client.get("/lora-adapters").json()[0]["path"] == f"{folder}/sql"
        error_of(client.post("/v1/completions", json={"model": "elsewhere", "prompt": "a"}), 404)


LATE = """
import asyncio
from headrace.lora.resolver import LoRAResolver

class Shelf(LoRAResolver):
    async def resolve_lora(self, base_model_name, lora_name):
        if lora_name == "cancels":
            raise asyncio.CancelledError
        await asyncio.Event().wait()
"""


def test_a_resolver_that_does_not_end_or_ends_as_if_cancelled_is_named(install: Callable[[str, str], None]) -> None:
    install(LATE, "shelf = shelf:Shelf")
    with serving_here(ServeOptions(port=0, request_timeout=0.5), **ENGINE) as server, server.client() as client:
        body = {"model": "cancels", "prompt": "a", "max_tokens": 1}
        error = error_of(client.post("/v1/completions", json=body), 400)
        assert error["message"].endswith("could not be resolved: the resolver shelf failed: CancelledError")
        error = error_of(client.post("/v1/completions", json={**body, "model": "waits"}), 504)
        assert error["message"].endswith("the resolver shelf failed: it took longer than 0.5 s")


def test_an_installed_resolver_without_its_method_is_named(install: Callable[[str, str], None]) -> None:
    install("class Shelf: ...", "shelf = shelf:Shelf")
    with pytest.raises(OptionError, match=r"shelf \(shelf:Shelf\) is a Shelf without resolve_lora"):
        installed_resolvers()


def test_an_installed_resolver_that_cannot_be_made_is_named(install: Callable[[str, str], None]) -> None:
    install("class Shelf:\n    def __init__(self):\n        raise SystemExit(3)", "shelf = shelf:Shelf")
    with pytest.raises(OptionError, match=r"shelf \(shelf:Shelf\) cannot be made: SystemExit\(3\)"):
        installed_resolvers()


@pytest.mark.parametrize("field", ["lora_name", "lora_path"])
def test_a_text_that_is_too_long_is_the_callers_fault(client: httpx.Client, folder: Path, field: str) -> None:
    body = {"lora_name": "long", "lora_path": f"{folder}/sql", field: "x" * 5000}
    error = error_of(client.post(LOAD, json=body), 400)
    assert field in error["message"]
    assert len(error["message"]) < 1000


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_a_name_that_is_too_long_to_unload_is_the_callers_fault(client: httpx.Client, method: str) -> None:
    name = "x" * 5000
    if method == "POST":
        answer = client.post(UNLOAD, json={"lora_name": name})
    else:
        answer = client.delete(f"/adapters/{name}")
    assert error_of(answer, 400)["message"] == "'lora_name' has 5000 characters, and at most 4096 are taken."


def test_batch_files_name_adapters_too(server: ServerHere) -> None:
    lines = [
        {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": name, "prompt": "a", "max_tokens": 4},
        }
        for name in (MODEL, "sql", "team/found", "nobody")
    ]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        text = io.BytesIO(b"\n".join(json.dumps(each).encode() for each in lines))
        file = client.files.create(file=("in.jsonl", text), purpose="batch")
        del server.sent[:]
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", 60, "the end of the batch")
        counts = client.batches.retrieve(batch.id).request_counts
    assert counts is not None
    assert (counts.completed, counts.failed) == (3, 1)
    asked = [[each.name for each in request.adapters] for request in server.requests()]
    assert sorted(asked) == [[], ["sql"], ["team/found"]]


def test_an_adapter_whose_files_are_gone_fails_with_the_cause(client: httpx.Client, tmp_path: Path) -> None:
    """It was evicted by others, so it has to be read again."""
    path = write(tmp_path / "gone", "gone")
    assert client.post(LOAD, json={"lora_name": "gone", "lora_path": path}).status_code == 200
    shutil.rmtree(path)
    names = [f"filler{number}" for number in range(8)]
    for name in names:
        asked = {"lora_name": name, "lora_path": write(tmp_path / name, name)}
        assert client.post(LOAD, json=asked).status_code == 200
    error = error_of(client.post("/v1/completions", json={"model": "gone", "prompt": "a"}), 500)
    assert "adapter gone" in error["message"]
    assert "could not be loaded" in error["message"]
    assert completed(client, names[0]) != completed(client)
    for name in ("gone", *names):
        assert client.post(UNLOAD, json={"lora_name": name}).status_code == 200


def test_metrics_tell_of_adapters(client: httpx.Client) -> None:
    completed(client, "sql")
    text = client.get("/metrics").text
    assert 'max_lora="4"' in next(line for line in text.splitlines() if line.startswith("headrace:lora_requests_info{"))
    assert metric(client, "headrace:adapters_registered") >= 2
    assert metric(client, "headrace:adapter_loads_total") >= 2


def test_without_permission_nothing_changes_and_lists_stay(folder: Path) -> None:
    with (
        serving_here(ServeOptions(port=0, lora_modules=(f"sql={folder}/sql",)), **ENGINE) as server,
        server.client() as client,
    ):
        for path, body in (
            (LOAD, {"lora_name": "a", "lora_path": f"{folder}/chat"}),
            (UNLOAD, {"lora_name": "sql"}),
            ("/adapters", {"name": "a", "src": f"{folder}/chat"}),
            ("/lora-adapters", [{"id": 0, "scale": 1}]),
        ):
            assert "--allow-runtime-lora-updating" in error_of(client.post(path, json=body), 404)["message"]
        assert error_of(client.delete("/adapters/sql"), 404)
        assert len(client.get("/lora-adapters").json()) == 1
        assert completed(client, "sql") != completed(client)


def test_an_engine_without_adapters_names_the_option(folder: Path) -> None:
    with serving_here(ServeOptions(port=0, allow_runtime_lora_updating=True)) as server, server.client() as client:
        error = error_of(client.post(LOAD, json={"lora_name": "a", "lora_path": f"{folder}/sql"}), 400)
        assert "--enable-lora" in error["message"]
        assert error_of(client.post("/v1/completions", json={"model": "a", "prompt": "a"}), 404)
        assert error_of(client.post("/v1/completions", json={"prompt": "a", "lora": [{"id": 0, "scale": 1}]}), 400)
        assert client.post("/v1/completions", json={"prompt": "a", "lora": [], "max_tokens": 1}).status_code == 200
        assert client.get("/lora-adapters").json() == []


@pytest.mark.system
def test_several_processes_and_engines_serve_each_load_at_once_and_a_killed_engine_changes_nothing(
    folder: Path,
) -> None:
    """Each connection is dealt out to one of the HTTP processes, and each request to one of the engines."""
    options = ("-dp", "2", "--api-server-count", "2", "--enable-lora", "--max-loras", "4", "--server-dev-mode")
    with serving(*options, "--lora-modules", f"sql={folder}/sql", null_model={"step_delay_s": 0.02}) as server:

        def answers(**body: Any) -> set[tuple[int, str]]:
            found = set()
            for rank in (0, 1):
                for _ in range(6):
                    with server.client() as each:
                        asked = {"prompt": [5], "max_tokens": 4, "data_parallel_rank": rank, **body}
                        answer = each.post("/v1/completions", json=asked)
                        found.add((answer.status_code, answer.text.partition('"text":')[2][:40]))
            return found

        def load(path: str, **body: Any) -> None:
            with server.client() as each:
                answer = each.post(path, json=body)
                assert answer.status_code == 200, answer.text

        (base,), (sql,) = answers(), answers(model="sql")
        load(LOAD, lora_name="late", lora_path=f"{folder}/late")
        (late,) = answers(model="late")
        load(LOAD, lora_name="chat", lora_path=f"{folder}/chat")
        (chat,) = answers(model="chat")
        assert {status for status, _ in (base, sql, late, chat)} == {200}
        assert len({base, sql, late, chat}) == 4
        load(UNLOAD, lora_name="late")
        assert {status for status, _ in answers(model="late")} == {404}
        with server.client() as each:
            assert each.post("/lora-adapters", json=[{"id": 0, "scale": 1.0}]).json()[0]["scale"] == 1.0
        wait_until(lambda: answers() == {sql}, 30, "every process to know the scales")
        with server.client() as each:
            assert each.post("/lora-adapters", json=[]).status_code == 200
        wait_until(lambda: answers() == {base}, 30, "every process to know the scales")

        def whole(model: str, rank: int) -> tuple[int, str]:
            body = {"model": model, "prompt": [7], "max_tokens": 200, "ignore_eos": True, "data_parallel_rank": rank}
            with server.client() as each:
                answer = each.post("/v1/completions", json=body)
                return answer.status_code, answer.json()["choices"][0]["text"]

        expected = {model: whole(model, 0) for model in ("sql", "chat")}
        with ThreadPoolExecutor(2) as pool, server.client() as each:
            running = {model: pool.submit(whole, model, 0) for model in expected}
            wait_until(lambda: metric(each, "headrace:num_requests_running", engine="0") == 2, 30, "both to run")
            sorted(engines_of(server), key=psutil.Process.create_time)[0].kill()
            assert {model: told.result(60) for model, told in running.items()} == expected
            server.wait_log(r"moved from engine 0 to engine 1")
        wait_until(lambda: len(engines_of(server)) == 2, 60, "the engine's return")
        wait_until(lambda: answers(model="chat") == {chat}, 60, "its adapters")
