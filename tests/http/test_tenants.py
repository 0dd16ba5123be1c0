"""Each API key is a tenant: it sees nothing of others, and cannot use up what is theirs. What errors tell of the
server, and which bodies are JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from server_here import ServerHere, serving_here

from headrace.core.options.option import Secret
from headrace.frontend.http.apis.files import store as files
from headrace.frontend.http.apis.files.store import BatchObject, FileObject, FileStore, FullError, RequestCounts
from headrace.frontend.http.apis.files.turns import Turns
from headrace.frontend.http.apis.responses.routes import BackgroundRuns
from headrace.frontend.http.apis.responses.store import ResponseStore, Stored
from headrace.frontend.http.options import ServeOptions
from headrace.frontend.http.server.access import Keys
from headrace.frontend.http.server.errors import ApiError, without_own_names
from headrace.frontend.http.server.exchange import LargeBodies
from headrace.ipc.failure import EngineDeadError, HeadraceError, RequestFailedError

STORE_BYTES = 4000


@pytest.fixture(scope="module")
def server() -> Iterator[ServerHere]:
    options = ServeOptions(
        port=0, api_key=(Secret("a"), Secret("b")), file_store_bytes=STORE_BYTES, response_store_bytes=STORE_BYTES
    )
    with serving_here(options) as server:
        yield server


@pytest.fixture
def tenants(server: ServerHere) -> Iterator[list[httpx.Client]]:
    clients = [server.client() for _ in "ab"]
    for client, key in zip(clients, "ab", strict=True):
        client.headers["authorization"] = f"Bearer {key}"
    yield clients
    for client in clients:
        client.close()


def upload(client: httpx.Client, data: bytes) -> httpx.Response:
    return client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("x.jsonl", data)})


def test_a_tenant_fills_its_own_share_of_files_alone(tenants: list[httpx.Client]) -> None:
    first, second = tenants
    kept = [upload(first, b"x" * num_bytes).status_code for num_bytes in (900, 900, 900)]
    assert kept == [200, 200, 413]
    full = upload(first, b"x" * STORE_BYTES)
    assert (full.status_code, full.json()["error"]["code"]) == (413, "file_store_full")
    assert f"{STORE_BYTES // 2} bytes of files of each key" in full.json()["error"]["message"]
    theirs = upload(second, b"y" * (STORE_BYTES // 2))
    assert theirs.status_code == 200, theirs.text
    id = theirs.json()["id"]
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        assert first.request(method, f"/v1/files/{id}{path}").status_code == 404
    assert id not in first.get("/v1/files").text
    assert second.get(f"/v1/files/{id}/content").content == b"y" * (STORE_BYTES // 2)
    asked = {"input_file_id": id, "endpoint": "/v1/completions", "completion_window": "24h"}
    assert first.post("/v1/batches", json=asked).status_code == 404


def test_a_tenant_evicts_its_own_responses_alone(tenants: list[httpx.Client]) -> None:
    first, second = tenants
    asked = {"input": "x" * 100, "max_output_tokens": 1}
    theirs = second.post("/v1/responses", json=asked).json()["id"]
    own = [first.post("/v1/responses", json=asked).json()["id"] for _ in range(12)]
    assert second.get(f"/v1/responses/{theirs}").status_code == 200
    assert first.get(f"/v1/responses/{own[0]}").status_code == 404, "the first has made room"
    assert first.get(f"/v1/responses/{own[-1]}").status_code == 200
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        assert first.request(method, f"/v1/responses/{theirs}{path}").status_code == 404
    follows = first.post("/v1/responses", json={**asked, "previous_response_id": theirs})
    assert follows.status_code == 404


def stored(id: str, size: int) -> Stored:
    return Stored(id, "in_progress", None, b"x" * size, b"")


def test_what_keys_that_are_gone_have_left_makes_room_first(tmp_path: Any) -> None:
    path = str(tmp_path / "responses.sqlite")

    async def fill() -> None:
        before = ResponseStore(path, 1000, ("gone",))
        await before.add("gone", stored("old", 500))
        await before.add("gone", stored("older", 400))
        before.close()
        store = ResponseStore(path, 1000, ("a", "b"))
        await store.add("b", stored("b1", 450))
        assert await store.get("gone", "old") is None
        assert await store.get("gone", "older") is not None, "no more than is needed"
        for each in range(4):
            await store.add("a", stored(f"a{each}", 240))
        assert await store.get("gone", "older") is None
        assert await store.get("b", "b1") is not None
        assert [await store.get("a", f"a{each}") is not None for each in range(4)] == [False, False, True, True]
        store.close()

    asyncio.run(fill())


def batch(id: str, status: Any) -> BatchObject:
    return BatchObject(
        id=id,
        endpoint="/v1/completions",
        input_file_id="file-1",
        completion_window="24h",
        status=status,
        created_at=1,
        expires_at=2,
        request_counts=RequestCounts(),
    )


def test_batches_and_files_are_counted_by_tenant(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_BATCHES", 4)
    monkeypatch.setattr(files, "MOST_FILES", 4)

    async def fill() -> None:
        store = FileStore(str(tmp_path), 1 << 20, num_tenants=2)
        await store.add_batch("b", batch("b1", "in_progress"))
        await store.put_batch("b", batch("b1", "completed"))
        for each in range(6):
            await store.add_batch("a", batch(f"a{each}", "in_progress"))
            await store.put_batch("a", batch(f"a{each}", "completed"))
        assert [each.id for each in await store.batches("a")] == ["a4", "a5"]
        assert [each.id for each in await store.batches("b")] == ["b1"]
        await store.add_batch("a", batch("a6", "in_progress"))
        await store.add_batch("a", batch("a7", "in_progress"))
        with pytest.raises(FullError, match="2 batches are running"):
            await store.add_batch("a", batch("a8", "in_progress"))
        await store.add_batch("b", batch("b2", "in_progress"))
        for each in range(2):
            file = FileObject(id=store.new_id(), bytes=0, created_at=1, filename=str(each), purpose="batch")
            await store.run(lambda file=file: store.grow("a", file.id, 0))
            await store.add("a", file)
        with pytest.raises(FullError, match="2 files of each key"):
            await store.run(lambda: store.grow("a", store.new_id(), 0))
        await store.run(lambda: store.grow("b", store.new_id(), 0))
        store.close()

    asyncio.run(fill())


def test_tenants_take_turns() -> None:
    """One with a hundred lines that wait does not hold up one with a single line."""
    order = []

    async def work(turns: Turns, tenant: str) -> None:
        await turns.of(tenant).acquire()
        order.append(tenant)
        await asyncio.sleep(0)
        turns.of(tenant).release()

    async def run() -> None:
        turns = Turns(2)
        tasks = [asyncio.create_task(work(turns, tenant)) for tenant in "a" * 10 + "bbb" + "c"]
        await asyncio.sleep(0)
        cancelled = asyncio.create_task(work(turns, "d"))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.gather(*tasks)
        await asyncio.gather(cancelled, return_exceptions=True)
        for _ in range(2):  # none is lost
            async with asyncio.timeout(5):
                await turns.acquire("a")

    asyncio.run(run())
    assert sorted(order) == sorted("a" * 10 + "bbb" + "c")
    assert "c" in order[:6]
    assert order.index("b") < 6


def test_bodies_in_memory_are_divided() -> None:
    bodies = LargeBodies(1 << 10, num_tenants=2)
    for _ in range(4):
        bodies.reserve(1 << 10, "a")
    with pytest.raises(ApiError, match="the bodies of other requests") as refused:
        bodies.reserve(1, "a")
    assert refused.value.status == 429
    for _ in range(4):
        bodies.reserve(1 << 10, "b")
    bodies.release(1 << 10, "a")
    bodies.reserve(1 << 10, "a")
    many = LargeBodies(1 << 10, num_tenants=100)
    many.reserve(1 << 10, "a")
    bodies.close()
    many.close()


def test_a_piece_of_a_body_that_is_larger_than_the_memory_for_all_is_too_large_and_not_to_be_tried_again() -> None:
    with serving_here(ServeOptions(port=0, max_body_bytes=1000)) as server, server.client() as client:
        refused = client.post(
            "/v1/completions", content=iter([b" " * 50_000]), headers={"content-type": "application/json"}
        )
        assert (refused.status_code, "retry-after" in refused.headers) == (413, False), refused.text
        assert client.post("/v1/completions", json={"prompt": [5], "max_tokens": 1}).status_code == 200


def test_events_of_background_responses_are_divided() -> None:
    class Log:
        num_bytes = 6 << 20

    async def run() -> None:
        runs = BackgroundRuns(2)
        for tenant, id in (("b", "b1"), ("a", "a1"), ("a", "a2"), ("a", "a3")):
            runs._tasks[tenant, id] = asyncio.create_task(asyncio.sleep(0))
            runs._logs[tenant, id] = Log()  # type: ignore[assignment]
            runs._ended((tenant, id))
        assert runs.log("b", "b1") is not None
        assert [runs.log("a", f"a{each}") is not None for each in (1, 2, 3)] == [False, False, True]

    asyncio.run(run())


def test_a_tenant_is_named_by_its_keys_hash() -> None:
    keys = Keys(["a", "b"], ["b", "admin"])
    assert len(set(keys.tenants)) == len(keys.tenants) == 3
    assert not any(each == "a" or "admin" in each for each in keys.tenants)
    assert Keys([], ["admin"]).tenants == ("",)
    both = keys.find(b"b")
    assert both is not None
    assert (both.is_admin, both.tenant in keys.tenants) == (True, True)


# --- what errors tell ------------------------------------------------------------------------------------------------

HIDDEN = (
    *("ipc:///run/user/0/headrace/engine-7-ab.sock", "tcp://gpu-7:5400", "tcp://[fe80::1%eth0]:5400", "10.0.0.7:5400"),
    *("http://10.0.0.7/mcp?token=x", "gpu-7.lan:5400", "localhost:8080", "[fe80::1]:5400", "192.168.0.9"),
    *("/models/llama/model-00001-of-2.safetensors", "~/.cache/headrace/x", "/tmp/headrace-0-x/y", "/srv/a"),
)


@pytest.mark.parametrize("name", HIDDEN)
@pytest.mark.parametrize("form", ["the engine at {} is gone", "{}: no such file", "it failed ('{}')", "see {}.", "{}"])
def test_addresses_and_paths_are_the_servers_own(name: str, form: str) -> None:
    told = without_own_names(form.format(name))
    assert told == form.format("[...]"), told


@pytest.mark.parametrize(
    "text",
    [
        "the engine has said nothing for 5.2 s and/or was stopped",
        "POST /tokenize gives 3/4 of 1,024 tokens; 12:30",
        "headrace 0.1.0 with message schema 3f:2a, torch 2.13.0",
        "frontend: method rank0.step of headrace.core raised ValueError: a/b",
    ],
)
def test_other_words_of_a_cause_stay(text: str) -> None:
    assert without_own_names(text) == text


@pytest.mark.parametrize("kind", [EngineDeadError, RequestFailedError, HeadraceError])
def test_no_failure_names_what_is_the_servers_own(kind: type[HeadraceError]) -> None:
    answer = ApiError.of(kind("the engine at tcp://10.0.0.7:5400 could not read /models/x/config.json\nTraceback"))
    assert answer.body.message == "the engine at [...] could not read [...]"


def test_tools_that_cannot_be_listed_tell_no_address() -> None:
    pytest.importorskip("mcp")
    asked = {"type": "mcp", "server_label": "tools", "require_approval": "never"}
    with (
        serving_here(ServeOptions(port=0, tool_server=("tools=http://127.0.0.1:9/inner/mcp",))) as server,
        server.client() as client,
    ):
        refused = client.post("/v1/responses", json={"input": "x", "max_output_tokens": 1, "tools": [asked]})
    assert refused.status_code == 424
    assert "the tools of tools could not be listed" in refused.json()["error"]["message"]
    assert not any(word in refused.text for word in ("127.0.0.1", "inner", "http://"))


# --- which bodies are JSON -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content_type", "is_json"),
    [
        ("application/json", True),
        ("Application/JSON; charset=utf-8", True),
        ("application/json;charset=utf-8; x=y", True),
        ("application/vnd.api+json", True),
        ("application/problem+json; charset=utf-8", True),
        ("text/json", True),
        ("text/plain+json", False),
        ("multipart/form-data+json", False),
        ("application/x-www-form-urlencoded+json", True),
        ("image/x+json", False),
        ("application/+json", False),
        ("application/jsonp", False),
        ("application/json+x", False),
        ("application/json, text/plain", False),
        ("text/plain; application/json", False),
        ("text/plain;+json", False),
        ("application/json x", False),
        ("+json", False),
        ("json", False),
        ("", False),
    ],
)
def test_which_media_types_are_json(tenants: list[httpx.Client], content_type: str, is_json: bool) -> None:
    body = b'{"prompt":[5],"max_tokens":1}'
    answer = tenants[0].post("/v1/completions", content=body, headers={"content-type": content_type})
    assert answer.status_code == (200 if is_json else 400), answer.text


def test_two_content_types_are_json_only_if_both_are(tenants: list[httpx.Client]) -> None:
    body = b'{"prompt":[5],"max_tokens":1}'
    both = [("content-type", "application/json"), ("content-type", "text/plain")]
    headers = [("authorization", "Bearer a"), *both]
    assert tenants[0].post("/v1/completions", content=body, headers=headers).status_code == 400
