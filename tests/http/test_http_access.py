"""Who may call which route: admin keys, callers on this machine, names of hosts, and web pages."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_server import Server, read_all, serving
from served_routes import ALL_ROUTES, DEVELOPMENT_ROUTES
from server_here import ServerHere, serving_here
from source_tree import ROOT

from headrace.core.options.option import Secret
from headrace.frontend.http.options import ServeOptions, check_serve_options
from headrace.frontend.http.process.keys import read_admin_keys
from headrace.frontend.http.server.access import Access, KnownHosts, is_local
from headrace.frontend.http.server.errors import ApiError
from headrace.ipc.failure import OptionError

COMPLETIONS = "/v1/completions"
ASKED = {"prompt": [5], "max_tokens": 2}
CLIENT, ADMIN = {"authorization": "Bearer client"}, {"x-api-key": "admin"}
EVIL = "https://evil.example"


def path_of(path: str) -> str:
    """A path of the route, with something in the place of its parameters."""
    return re.sub(r"\{\w+(:\w+)?\}", "none", path)


@pytest.fixture(scope="module")
def open_server() -> Iterator[ServerHere]:
    """Without keys."""
    options = ServeOptions(
        port=0, server_dev_mode=True, allowed_origins=("https://app.example",), allowed_hosts=("App.example.", "*.lan")
    )
    with serving_here(options) as server:
        yield server


@pytest.fixture(scope="module")
def guarded() -> Iterator[ServerHere]:
    options = ServeOptions(
        port=0, server_dev_mode=True, api_key=(Secret("client"),), admin_api_key=(Secret("admin"), Secret("second"))
    )
    with serving_here(options) as server:
        yield server


@pytest.fixture(scope="module")
def clients_only() -> Iterator[ServerHere]:
    options = ServeOptions(port=0, server_dev_mode=True, api_key=(Secret("client"),))
    with serving_here(options) as server:
        yield server


@pytest.fixture(scope="module")
def admins_only() -> Iterator[ServerHere]:
    with serving_here(ServeOptions(port=0, server_dev_mode=True, admin_api_key=(Secret("admin"),))) as server:
        yield server


# --- kinds of routes -------------------------------------------------------------------------------------------------


def test_what_changes_the_server_is_declared_so():
    """A new route of theirs belongs to administrators; RouteSpec has no default, so every route says it."""
    admin = {route.path for route in ALL_ROUTES if route.access is Access.ADMIN}
    of_adapters = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/adapters", "/adapters/{adapter_name:path}"}
    posted = {"/lora-adapters"}  # its list is for clients
    own = {"/scale_elastic_ep", *of_adapters, *posted}
    assert admin == {*own, *(route.path for route in DEVELOPMENT_ROUTES)}
    assert {route.path for route in ALL_ROUTES if route.access is Access.STATISTICS} == {"/version", "/metrics"}
    public = {route.path for route in ALL_ROUTES if route.access is Access.PUBLIC}
    files = {f"/ui/{file.name}" for file in (ROOT / "frontend/http/apis/page/static").iterdir()}
    assert public - files == {*("/", "/health", "/health/live", "/health/ready", "/health/progress", "/ping")}


def call(client: httpx.Client, route: Any, headers: dict[str, str]) -> int:
    return client.request(route.method, path_of(route.path), headers=headers).status_code


def test_every_route_asks_for_the_key_of_its_kind(guarded: ServerHere) -> None:
    """Bodies are missing or wrong, so nothing is changed: what is refused for its key answers 401 or 403 before."""
    with guarded.client() as client:
        for route in ALL_ROUTES:
            if route.path in ("/sleep", "/pause", "/wake_up", "/resume", "/stop_profile", "/start_profile"):
                headers = [CLIENT, {}]  # an administrator's call would carry it out
            else:
                headers = [CLIENT, {}, ADMIN, {"authorization": "Bearer second"}]
            statuses = [call(client, route, each) for each in headers]
            is_open = route.access in (Access.PUBLIC, Access.STATISTICS)
            assert (statuses[1] == 401) is not is_open, (route.path, statuses)
            assert (statuses[0] == 403) is (route.access is Access.ADMIN), (route.path, statuses)
            assert not {401, 403} & set(statuses[2:]), (route.path, statuses)
        assert client.post("/pause", headers=ADMIN).json() == {"status": "paused"}
        assert client.post("/resume", headers=ADMIN).json() == {"status": "resumed"}
        assert client.post(COMPLETIONS, json=ASKED, headers=ADMIN).status_code == 200


def test_a_refused_key_is_told_in_the_form_of_the_route_that_would_have_answered(guarded: ServerHere) -> None:
    """Of routes with one path, a header tells which: clients read errors in their own API's form alone."""
    with guarded.client() as client:
        for route in ALL_ROUTES:
            if route.access in (Access.CLIENT, Access.ADMIN):
                asked = {} if route.header is None else {route.header.decode(): "1"}
                refused = client.request(route.method, path_of(route.path), headers=asked)
                wanted = json.loads(route.error_body(ApiError(401, "", code="")))
                assert refused.json().keys() == wanted.keys(), (route.path, asked)
        refused = client.get("/v1/models", headers={"anthropic-version": "2023-06-01"})
        assert refused.json()["error"]["type"] == "authentication_error"


def test_without_an_admin_key_no_client_changes_the_server(clients_only: ServerHere) -> None:
    with clients_only.client() as client:
        for route in ALL_ROUTES:
            if route.access is Access.ADMIN:
                refused = client.request(route.method, path_of(route.path), headers=CLIENT)
                assert refused.status_code == 403, route.path
                assert "--admin-api-key" in refused.json()["error"]["message"]
                assert call(client, route, {}) == 401
        assert client.post(COMPLETIONS, json=ASKED, headers=CLIENT).status_code == 200


def test_an_admin_key_alone_leaves_other_routes_open(admins_only: ServerHere) -> None:
    with admins_only.client() as client:
        for route in ALL_ROUTES:
            if route.access is Access.ADMIN:
                assert call(client, route, {}) == 401, route.path
                assert call(client, route, CLIENT) == 401, route.path
        assert client.get("/is_paused", headers=ADMIN).status_code == 200
        assert client.post(COMPLETIONS, json=ASKED).status_code == 200
        assert client.get("/v1/models", headers={"host": "evil.example"}).status_code == 403


OF_PROXIES = (
    "x-forwarded-for",
    "forwarded",
    "via",
    "x-real-ip",
    "x-forwarded-host",
    "x-forwarded-port",
    "x-original-host",
)


@pytest.mark.parametrize("name", OF_PROXIES)
def test_without_keys_what_a_proxy_passes_on_changes_nothing(open_server: ServerHere, name: str) -> None:
    with open_server.client() as client:
        assert client.get("/is_paused").json() == {"is_paused": False}
        for value in ("127.0.0.1", "for=127.0.0.1", "localhost"):
            refused = client.post("/pause", headers={name: value})
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_key_required")
            assert "--admin-api-key" in refused.json()["error"]["message"]
            assert client.post(COMPLETIONS, json=ASKED, headers={name: value}).status_code == 200
        assert client.get("/is_paused").json() == {"is_paused": False}


class _Transport:
    def __init__(self, peer: Any, family: int) -> None:
        self.peername, self.socket = peer, socket.socket(family)
        self.socket.close()

    def get_extra_info(self, name: str) -> Any:
        return getattr(self, name)


@pytest.mark.parametrize(
    ("peer", "family", "expected"),
    [
        (("127.0.0.1", 5), socket.AF_INET, True),
        (("127.9.9.9", 5), socket.AF_INET, True),
        (("::1", 5, 0, 0), socket.AF_INET6, True),
        (("::ffff:127.0.0.1", 5, 0, 0), socket.AF_INET6, True),
        ("", socket.AF_UNIX, True),
        (("10.0.0.7", 5), socket.AF_INET, False),
        (("::ffff:10.0.0.7", 5, 0, 0), socket.AF_INET6, False),
        (("fe80::1%eth0", 5, 0, 2), socket.AF_INET6, False),
        (None, socket.AF_INET, False),
    ],
)
def test_who_is_on_this_machine(peer: Any, family: int, expected: bool) -> None:
    class Connected:
        transport = _Transport(peer, family)

    assert is_local([], Connected()) is expected  # type: ignore[arg-type]
    for name in (
        b"x-forwarded-for",
        b"x-forwarded-server",
        b"x-forwarded-prefix",
        b"cf-connecting-ip",
        b"true-client-ip",
    ):
        assert is_local([(name, b"127.0.0.1")], Connected()) is False  # type: ignore[arg-type]


def test_admin_keys_come_from_options_a_file_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADRACE_ADMIN_API_KEY", raising=False)
    assert read_admin_keys(ServeOptions()) == []
    file = tmp_path / "keys"
    file.write_text("# administrators\nthird\n")
    given = ServeOptions(admin_api_key=(Secret("one"), Secret("two\n")), admin_api_key_file=str(file))
    assert read_admin_keys(given) == ["one", "two", "third"]
    monkeypatch.setenv("HEADRACE_ADMIN_API_KEY", "of the environment\n")
    assert read_admin_keys(ServeOptions()) == ["of the environment"]
    assert read_admin_keys(given) == ["one", "two", "third"]
    monkeypatch.setenv("HEADRACE_ADMIN_API_KEY", "")
    with pytest.raises(OptionError, match="HEADRACE_ADMIN_API_KEY is set and empty"):
        read_admin_keys(ServeOptions())
    file.write_text("# nothing\n")
    with pytest.raises(OptionError, match=r"admin_api_key_file=.* holds no key"):
        read_admin_keys(ServeOptions(admin_api_key_file=str(file)))


# --- names of hosts --------------------------------------------------------------------------------------------------

TAKEN = (
    *("localhost", "LOCALHOST", "localhost.", "localhost:8000", "LocalHost.:8000", "127.0.0.1", "127.0.0.1:8000"),
    *("10.1.2.3:80", "[::1]", "[::1]:8000", "[FE80::1]:1", "[::ffff:127.0.0.1]", "0.0.0.0:8000", "127.0.0.1."),
    *("app.example", "APP.example:443", "app.example.", "a.lan", "a.b.LAN:1"),
)
REFUSED = (
    *("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "evil.example.", ""),
    *("localhost@evil.example", "localhost,evil.example", "localhost evil", "evil.example:80:80", "x.app.example"),
    *(
        "lan",
        "evillan",
        "notlocalhost",
        "127.0.0.1.nip.io",
        "[::1].evil.example",
        "[evil.example]",
        "::1",
        "[127.0.0.1",
    ),
    *("127.0.0.256", "127.0.0.1/evil", "localhost:evil", "evil.example#localhost", "xn--localhost"),
)


@pytest.mark.parametrize("host", TAKEN)
def test_hosts_that_mean_this_server(open_server: ServerHere, host: str) -> None:
    with open_server.client() as client:
        assert client.get("/v1/models", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("host", REFUSED)
def test_other_hosts_are_refused(open_server: ServerHere, host: str) -> None:
    with open_server.client() as client:
        refused = client.get("/v1/models", headers={"host": host})
        assert refused.status_code in (400, 403)
        if refused.status_code == 403:
            assert refused.json()["error"]["code"] == "host_not_allowed"
            assert "--allowed-hosts" in refused.json()["error"]["message"]


def test_a_name_that_is_re_bound_gets_nothing_from_any_route(open_server: ServerHere) -> None:
    with open_server.client() as client:
        for route in ALL_ROUTES:
            for more in ({}, {"x-forwarded-host": "localhost"}, {"origin": "http://evil.example:8000"}):
                headers = {"host": "evil.example:8000", **more}
                assert client.request(route.method, path_of(route.path), headers=headers).status_code == 403, route
        for method, path in (("GET", "/nowhere"), ("DELETE", "/health"), ("HEAD", "/health"), ("OPTIONS", COMPLETIONS)):
            assert client.request(method, path, headers={"host": "evil.example"}).status_code == 403
        preflight = {"host": "evil.example", "origin": "https://app.example", "access-control-request-method": "POST"}
        assert client.options(COMPLETIONS, headers=preflight).status_code == 403
        assert client.get("/is_paused").json() == {"is_paused": False}


def raw(server: ServerHere, request: bytes) -> bytes:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as sock:
        sock.sendall(request)
        return read_all(sock)


@pytest.mark.parametrize(
    ("request_head", "status"),
    [
        (b"GET /v1/models HTTP/1.0\r\n", b"200"),
        (b"GET /v1/models HTTP/1.0\r\nhost: evil.example\r\n", b"403"),
        (b"GET /v1/models HTTP/1.1\r\n", b"400"),
        (b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\n", b"400"),
        (b"GET http://localhost/v1/models HTTP/1.1\r\nhost: localhost\r\n", b"200"),
        (b"GET http://evil.example/v1/models HTTP/1.1\r\nhost: localhost\r\n", b"403"),
        (b"GET http://evil.example/v1/models HTTP/1.0\r\n", b"403"),
        (b"GET http://localhost@evil.example/v1/models HTTP/1.1\r\nhost: localhost\r\n", b"403"),
        (b"GET HTTP://EVIL.example:80/v1/models HTTP/1.1\r\nhost: localhost\r\n", b"403"),
        (b"GET http://localhost/v1/models HTTP/1.1\r\nhost: evil.example\r\n", b"403"),
        (b"GET /v1/models?at=http://evil.example/ HTTP/1.1\r\nhost: localhost\r\n", b"200"),
        (b"GET /v1/models HTTP/1.1\r\nHOST:   localhost  \r\n", b"200"),
        (b"GET /v1/models HTTP/1.1\r\nhost: evil.example\r\nupgrade: websocket\r\n", b"403"),
    ],
)
def test_the_host_is_found_in_every_form_of_a_request(
    open_server: ServerHere, request_head: bytes, status: bytes
) -> None:
    answer = raw(open_server, request_head + b"connection: close\r\n\r\n")
    assert answer.split(b" ")[1] == status, answer


def test_with_keys_every_host_is_taken(guarded: ServerHere) -> None:
    with guarded.client() as client:
        assert client.get("/v1/models", headers={**CLIENT, "host": "evil.example"}).status_code == 200
        assert client.get("/health", headers={"host": "evil.example"}).status_code == 200
        assert client.get("/v1/models", headers={"host": "evil.example"}).status_code == 401


def test_the_servers_own_host_is_one_of_its_names() -> None:
    names = KnownHosts(["GPU-7.lan", "bücher.example"])
    assert names.have("gpu-7.lan:8000")
    assert names.have("xn--bcher-kva.example")
    assert not names.have("gpu-8.lan")
    assert KnownHosts(["*"]).have("anything.example")


@pytest.mark.parametrize("host", ["", "http://a.example", "a.example:80", "a/b", "a b", "*.*", "a@b"])
def test_an_allowed_host_that_is_no_name_is_refused_at_the_start(host: str) -> None:
    with pytest.raises(OptionError, match=r"allowed_hosts has .* without a scheme"):
        check_serve_options(ServeOptions(allowed_hosts=("app.example", host)))


def test_at_a_unix_socket_any_host_is_taken_but_of_a_proxy(tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    server = Server("--uds", str(path), "--server-dev-mode")
    try:
        server.wait_log("ready: ")
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://server") as client:
            assert client.get("/v1/models").status_code == 200
            assert client.get("/is_paused").status_code == 200
            through = {"via": "1.1 proxy"}
            assert client.get("/is_paused", headers={"host": "localhost", **through}).status_code == 403
            assert client.get("/v1/models", headers={"host": "evil.example", **through}).status_code == 403
            assert client.get("/v1/models", headers={"host": "localhost", **through}).status_code == 200
    finally:
        server.close()


# --- web pages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": EVIL},
        {"origin": "null"},
        {"origin": "http://localhost:3000"},
        {"origin": "http://127.0.0.1"},
        {"origin": "file://"},
        {"origin": ""},
        {"origin": "https://app.example.evil.example"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"},
        {"sec-fetch-site": "same-site"},
        {"origin": EVIL, "sec-fetch-site": "same-origin"},
    ],
)
def test_a_page_of_another_site_can_do_nothing(open_server: ServerHere, headers: dict[str, str]) -> None:
    with open_server.client() as client:
        for route in ALL_ROUTES:
            refused = client.request(route.method, path_of(route.path), headers=headers)
            assert (refused.status_code, refused.headers.get("access-control-allow-origin")) == (403, None), route.path
        text = {"content-type": "text/plain", **headers}
        for path in (COMPLETIONS, "/api/generate", "/pause", "/scale_elastic_ep", "/v1/files"):
            assert client.post(path, content=b'{"new_data_parallel_size": 9}', headers=text).status_code == 403
        assert client.get("/is_paused").json() == {"is_paused": False}


def test_own_pages_allowed_ones_and_links_are_served(open_server: ServerHere) -> None:
    with open_server.client() as client:
        allowed = {"origin": "https://app.example", "sec-fetch-site": "cross-site"}
        answer = client.post(COMPLETIONS, json=ASKED, headers=allowed)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        port = open_server.url.rpartition(":")[2]
        for host in (f"localhost:{port}", f"127.0.0.1:{port}", "app.example", "[::1]:80"):
            for origin in (f"http://{host}", *([] if ":" in host else [f"https://{host}"])):
                own = {"host": host, "origin": origin, "sec-fetch-site": "same-origin"}
                assert client.post(COMPLETIONS, json=ASKED, headers=own).status_code == 200, own
        link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
        assert client.get("/docs", headers=link).status_code == 200
        assert client.post("/resume", headers=link).status_code == 403
        assert client.get("/docs", headers={"sec-fetch-site": "none"}).status_code == 200


def test_with_keys_a_page_needs_one(guarded: ServerHere) -> None:
    with guarded.client() as client:
        page = {"origin": EVIL, "content-type": "text/plain"}
        assert client.post(COMPLETIONS, content=b"{}", headers=page).status_code == 401
        assert client.get("/health", headers=page).status_code == 200
        answer = client.post(COMPLETIONS, json=ASKED, headers={**CLIENT, "origin": EVIL})
        assert (answer.status_code, answer.headers.get("access-control-allow-origin")) == (200, None)


def test_all_origins_may_be_allowed() -> None:
    with serving("--allowed-origins", "*", null_model={}) as server, server.client() as client:
        assert client.post(COMPLETIONS, json=ASKED, headers={"origin": EVIL}).status_code == 200
