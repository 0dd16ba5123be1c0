"""Keys, TLS, sockets, cross-origin rules, and clients that send too much or too slowly."""

from __future__ import annotations

import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from http_server import Server, connection, metric, read_all, serving
from patience import wait_until, within
from thinned import every

from headrace.frontend.cli.main import main
from headrace.frontend.http.options import ServeOptions, check_serve_options
from headrace.frontend.http.process.server import check_files
from headrace.ipc.failure import OptionError

COMPLETIONS = "/v1/completions"
BODY = {"prompt": [5], "max_tokens": 2}
READ_TIMEOUT_S = 1.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("# two tenants\nthird\nfourth\n")
    with serving(
        *("--api-key", "first", "--api-key", "second", "--api-key-file", str(keys)),
        *("--allowed-origins", "https://app.example", "--max-body-bytes", "100k"),
        *("--read-timeout", str(READ_TIMEOUT_S), "--request-timeout", "1"),
        null_model={"step_delay_s": 0.002},
    ) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client(headers={"authorization": "Bearer first"}) as client:
        yield client


@pytest.mark.parametrize("key", ["first", "second", "third", "fourth"])
def test_every_key_opens(server, key):
    with server.client(headers={"authorization": f"Bearer {key}"}) as client:
        assert client.post(COMPLETIONS, json=BODY).status_code == 200


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Bearer", "Bearer firs", "Basic first", "first", "Bearer é"])
@pytest.mark.parametrize("path", ["/v1/models", "/docs", "/openapi.json", "/load", "/nowhere"])
def test_without_a_key_all_but_health_and_metrics_is_closed(server, header, path):
    headers = {} if header is None else {"authorization": header.encode()}
    with server.client() as client:
        refused = client.get(path, headers=headers)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        assert refused.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready", "/health/progress", "/ping"])
def test_health_needs_no_key(server, path):
    with server.client() as client:
        assert client.get(path).status_code == 200


def test_cached_prefixes_are_not_shared_between_keys(client, server):
    body = {"prompt": [7] * 64, "max_tokens": 1}

    def cached(client: httpx.Client) -> int:
        answer = client.post(COMPLETIONS, json=body).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    with server.client(headers={"authorization": "Bearer second"}) as other:
        assert [cached(client), cached(client), cached(other), cached(other)] == [0, 48, 0, 48]


@pytest.mark.parametrize("origin", ["localhost:3000", "{}", "app.example", "https://app.example/", "https://a.b/c", ""])
def test_an_origin_that_no_browser_sends_is_refused_at_the_start(origin):
    with pytest.raises(OptionError, match=r"allowed_origins has .* SCHEME://HOST"):
        check_serve_options(ServeOptions(allowed_origins=("https://app.example", origin)))


def test_origins_that_browsers_send_are_taken():
    check_serve_options(
        ServeOptions(
            allowed_origins=("*", "null", "http://[::1]:3000", "https://app.example", "chrome-extension://abc")
        )
    )


@pytest.mark.parametrize("template", ["{%if", "{% for m in messages %}{{ m.content }", "{% frobnicate %}", "{{ 1 + }}"])
def test_a_server_does_not_start_with_a_template_that_is_none(template, tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text(template)
    for given in (template, str(file)):
        with pytest.raises(OptionError, match=r"chat_template.*: the chat template is not valid: .*line 1"):
            check_files(ServeOptions(chat_template=given))


def test_only_allowed_origins_may_read(client):
    def allowed(origin: str) -> str | None:
        return client.get("/v1/models", headers={"origin": origin}).headers.get("access-control-allow-origin")

    assert allowed("https://app.example") == "https://app.example"
    assert allowed("https://evil.example") is None
    preflight = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    refused = client.options(COMPLETIONS, headers=preflight)
    assert (refused.status_code, refused.headers["content-type"]) == (400, "application/json")
    assert refused.json()["error"]["code"] == "origin"
    assert "Disallowed CORS origin" in refused.json()["error"]["message"]
    assert "--allowed-origins" in refused.json()["error"]["message"]
    assert int(refused.headers["content-length"]) == len(refused.content)
    of_ours = preflight | {"origin": "https://app.example"}
    assert client.options(COMPLETIONS, headers=of_ours).status_code == 200
    wrong = client.options(COMPLETIONS, headers=of_ours | {"access-control-request-method": "BREW"})
    assert "Disallowed CORS method" in wrong.json()["error"]["message"]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large_is_refused_while_it_comes(client, chunked):
    part = b"x" * 10_000
    content = (part for _ in range(200)) if chunked else part * 200
    refused = client.post(COMPLETIONS, content=content, headers={"content-type": "application/json"})
    assert refused.status_code == 413
    assert "max_body_bytes" in refused.json()["error"]["message"]
    assert client.post(COMPLETIONS, json=BODY).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_100_megabytes_takes_no_memory(server, client, chunked):
    """All of it is sent, as a client would that does not look at the answer before it is through."""
    process, part = psutil.Process(server.process.pid), b'"' + b"x" * (1 << 20)
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer first\r\ncontent-type: application/json\r\n"
    )
    with connection(server) as sock:
        before_bytes = process.memory_info().rss
        sock.sendall(
            head + (b"transfer-encoding: chunked\r\n\r\n" if chunked else b"content-length: 104857700\r\n\r\n")
        )
        for _ in range(100):
            sock.sendall(b"%x\r\n%b\r\n" % (len(part), part) if chunked else part)
        if chunked:
            sock.sendall(b"0\r\n\r\n")
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 413"), answer[:200]
    assert process.memory_info().rss - before_bytes < 16 << 20
    assert client.post(COMPLETIONS, json=BODY).status_code == 200


def test_a_client_that_waits_to_be_told_to_go_on_sends_no_large_body(server):
    with connection(server) as sock:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer first\r\nexpect: 100-continue\r\n"
        sock.sendall(head + b"content-type: application/json\r\ncontent-length: 100000000\r\n\r\n")
        assert sock.recv(65536).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    ("sent", "status"),
    every(2, [
        (b"", b""),
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-a", b"408"),
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer first\r\n"
         b'content-type: application/json\r\ncontent-length: 100\r\n\r\n{"pro', b"408"),
        (b"GET / HTTP/1.1\r\nx-a: " + b"a" * 70_000, b"431"),
        (b"\x16\x03\x01 not http\r\n\r\n", b"400"),
    ]),
)  # fmt: skip
def test_a_client_that_sends_slowly_or_nonsense_is_let_go(server, client, sent, status):
    with connection(server) as sock:
        began_s = time.monotonic()
        sock.sendall(sent)
        answer = read_all(sock)
        assert time.monotonic() - began_s < READ_TIMEOUT_S + within(6)
        assert answer.split(b" ")[1:2] == ([status] if status else [])
    assert client.get("/health").status_code == 200


def test_a_client_that_does_not_read_is_let_go_and_holds_nobody_up(server, client):
    body = b'{"prompt":[[5]%b],"max_tokens":400,"stream":true,"ignore_eos":true,"logprobs":20}' % (b",[6]" * 60)
    with connection(server) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer first\r\n"
        sock.sendall(head + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: metric(client, "headrace:num_requests_running") > 0, 30, "its start")
        assert client.post(COMPLETIONS, json=BODY).status_code == 200
        wait_until(lambda: metric(client, "headrace:requests_in_flight") == 1, 30, "letting it go")


def test_a_request_that_takes_too_long_is_ended(client):
    slow = {"prompt": [5], "max_tokens": 30_000, "ignore_eos": True}
    whole = client.post(COMPLETIONS, json=slow)
    assert whole.status_code == 504
    assert whole.json()["error"]["code"] == "timeout"
    with client.stream("POST", COMPLETIONS, json={**slow, "stream": True}) as response:
        lines = [line for line in response.iter_lines() if line]
    assert '"code":"timeout"' in lines[-2]
    assert lines[-1] == "data: [DONE]"
    wait_until(lambda: metric(client, "headrace:num_requests_running") == 0, 30, "freeing it")


def test_a_silent_stream_is_kept_open():
    with (
        serving("--sse-keep-alive", "1", null_model={"step_delay_s": 1.2}) as server,
        server.client() as client,
        client.stream("POST", COMPLETIONS, json={**BODY, "stream": True}) as response,
    ):
        lines = [line for line in response.iter_lines() if line]
    assert ": keep-alive" in lines
    assert lines[-1] == "data: [DONE]"


def test_a_unix_socket(tmp_path):
    path = tmp_path / "server.sock"
    server = Server("--uds", str(path))
    try:
        server.wait_log("ready: ")
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://server") as client:
            assert client.post(COMPLETIONS, json=BODY).status_code == 200
        server.signal()
        assert server.wait_exit() == 0
        assert not path.exists()
    finally:
        server.close()


@pytest.mark.system
def test_behind_a_proxy_that_takes_its_prefix_off_or_leaves_it_on():
    with serving("--root-path", "/llm", "--api-key", "first") as server, httpx.Client() as client:
        assert server.url.endswith("/llm")
        bare = server.url.removesuffix("/llm")
        for url in (server.url, bare):
            assert client.get(f"{url}/health").status_code == 200
            assert client.get(f"{url}/v1/models").status_code == 401
            assert client.post(url + COMPLETIONS, json=BODY).status_code == 401
            answer = client.post(url + COMPLETIONS, json=BODY, headers={"authorization": "Bearer first"})
            assert answer.status_code == 200
        assert client.get(f"{bare}/llm/llm/v1/models", headers={"authorization": "Bearer first"}).status_code == 404


def test_tls(tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*make.split(), *names, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    with serving("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)) as server:
        assert server.url.startswith("https://")
        context = ssl.create_default_context(cafile=str(certificate))
        with (
            server.client(verify=context) as client,
            client.stream("POST", COMPLETIONS, json={**BODY, "stream": True}) as response,
        ):
            assert [line for line in response.iter_lines() if line][-1] == "data: [DONE]"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--uds", "x.sock", "--api-server-count", "2"), "belongs to one process"),
        (("--uds", "nowhere/x.sock"), "there is no folder nowhere"),
        (("--uds", __file__), "there is something else than a socket; choose another path"),
        (("--host", "nowhere.invalid"), "cannot listen at nowhere.invalid:"),
        (("--ssl-keyfile", "key.pem"), "give ssl_certfile too"),
        (("--ssl-certfile", "nothing.pem"), "ssl_certfile=nothing.pem: there is no such file"),
        (("--ssl-certfile", __file__, "--ssl-keyfile", "nothing.pem"), "ssl_keyfile=nothing.pem: there is no such"),
        (("--ssl-certfile", __file__), "must be a PEM file"),
        (("--ssl-certfile", "nothing.pem", "--api-server-count", "2"), "ssl_certfile=nothing.pem: there is no such"),
        (("--api-key-file", "nothing"), "cannot be read"),
        (("--chat-template", "nothing.jinja"), "nothing.jinja"),
        (("--root-path", "api"), "must begin with /"),
        (("--metrics-prefix", "a-b"), "letters"),
        (("--max-body-byte", "1"), "did you mean --max-body-bytes"),
        (("--dp", "2"), "unknown option --dp; did you mean -dp?"),
        (("--port", "99999"), "65,535"),
        (("--config", "nothing.yaml"), "the config file nothing.yaml cannot be read"),
    ],
)
def test_options_that_cannot_be_are_named(arguments, said, capsys, monkeypatch, tmp_path):
    """Before anything is attached to, so that there need be no engine."""
    monkeypatch.chdir(tmp_path)
    where = () if "--uds" in arguments or "--port" in arguments else ("--port", "0")
    try:
        status = main(["serve", "--engine", "ipc:///nowhere.sock", *where, *arguments])
    except SystemExit as refused:
        status = int(str(refused.code))
    told = capsys.readouterr().err
    assert status == 2, told
    assert said in told


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_port_that_is_taken_is_named(processes, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        arguments = ("--engine", "ipc:///nowhere.sock", "--port", str(port), "--api-server-count", processes)
        assert main(["serve", *arguments]) == 2
        assert f"127.0.0.1:{port}: another program does; choose another --port" in capsys.readouterr().err


def test_a_config_file_that_is_no_yaml_is_named(tmp_path, capsys):
    config = tmp_path / "config.yaml"
    for text, said in (("model: [x\n", "config.yaml"), ("modl: x\n", "did you mean model"), ("text\n", "must map")):
        config.write_text(text)
        assert main(["serve", "--config", str(config)]) == 2
        assert said in capsys.readouterr().err


def test_the_config_file_holds_options_of_both_kinds(tmp_path: Path):
    config = tmp_path / "config.yaml"
    config.write_text("max-model-len: 128\napi-key: secret\nenable-log-requests: true\nport: 0\n")
    server = Server("--config", str(config), "--port", "0")
    try:
        server.wait_ready()
        with server.client(headers={"authorization": "Bearer secret"}) as client:
            assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 128
        server.wait_log("GET /v1/models: done")
    finally:
        server.close()
