"""What pages in a real browser can do: those whose name is re-bound to this machine, those of other sites, and allowed
ones."""

from __future__ import annotations

import html
import http.client
import http.server
import json
import re
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from browser import FLAGS, program
from http_server import Server, metric, serving

pytestmark = pytest.mark.system
ALLOWED = "allowed.example"
PAGE = """<!doctype html><meta charset=utf-8><pre id=out></pre><script>
const server = SERVER, completion = JSON.stringify({prompt: [5], max_tokens: 1});
const attempts = {
  read: () => fetch(server + "/v1/models").then(each => each.text()),
  metrics: () => fetch(server + "/metrics").then(each => each.text()),
  files: () => fetch(server + "/v1/files").then(each => each.text()),
  generate: () => fetch(server + "/v1/completions",
    {method: "POST", headers: {"content-type": "application/json"}, body: completion}).then(each => each.text()),
  simple: () => fetch(server + "/api/generate", {method: "POST", mode: "no-cors", body: completion}),
  pause: () => fetch(server + "/pause", {method: "POST", mode: "no-cors"}),
  scale: () => fetch(server + "/scale_elastic_ep", {method: "POST", mode: "no-cors",
    headers: {"content-type": "text/plain"}, body: JSON.stringify({new_data_parallel_size: 2})}),
  beacon: async () => String(navigator.sendBeacon(server + "/resume", "")),
  upload: () => { const form = new FormData(); form.append("purpose", "batch");
    form.append("file", new Blob(["{}"]), "x.jsonl");
    return fetch(server + "/v1/files", {method: "POST", mode: "no-cors", body: form}); },
  script: () => new Promise((done, failed) => { const tag = document.createElement("script");
    tag.onload = () => done("loaded"); tag.onerror = () => failed("no script"); tag.src = server + "/v1/models";
    document.head.append(tag); }),
};
(async () => {
  const seen = {};
  for (const [name, run] of Object.entries(attempts)) {
    try { const answer = await run(); seen[name] = typeof answer === "string" ? answer : answer.type; }
    catch (error) { seen[name] = "refused: " + error; }
  }
  document.getElementById("out").textContent = JSON.stringify(seen);
})();
</script>"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Without keys, on the loopback interface: as a developer starts it."""
    with serving("--server-dev-mode", "--allowed-origins", f"http://{ALLOWED}:1", null_model={}) as server:
        yield server


@contextmanager
def site(target: str, port: int = 0, rebinds_to: str | None = None) -> Iterator[int]:
    """A web site whose page makes all attempts at the target; "" is the site's own name. Yields its port.

    rebinds_to: where the site's name leads once the page is loaded: the browser's requests arrive there as they are.
    """
    page = PAGE.replace("SERVER", json.dumps(target)).encode()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/" and rebinds_to is not None:
                self._pass_on(rebinds_to)
            else:
                self._answer(200, "text/html", page)

        def do_POST(self) -> None:
            assert rebinds_to is not None, "only a server is asked so"
            self._pass_on(rebinds_to)

        def _pass_on(self, address: str) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            connection = http.client.HTTPConnection(address, timeout=30)
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            self._answer(answer.status, answer.headers.get("content-type", ""), answer.read())
            connection.close()

        def _answer(self, status: int, content_type: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-type", content_type)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Logs nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler) as own:
        thread = threading.Thread(target=own.serve_forever)
        thread.start()
        try:
            yield own.server_address[1]
        finally:
            own.shutdown()
            thread.join()


def browse(url: str, folder: Path, *rules: str) -> str:
    """The document that Chromium has made of the page. rules: where it finds names of hosts."""
    command = [
        *(program(), "--headless=new", *FLAGS),
        *(f"--user-data-dir={folder}", f"--host-resolver-rules={', '.join(rules)}"),
        *("--virtual-time-budget=20000", "--timeout=60000", "--dump-dom", url),
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def attempts_of(document: str) -> dict[str, str]:
    found = re.search(r"<pre id=\"out\">(\{.*?\})</pre>", document, re.DOTALL)
    assert found is not None, document[-2000:]
    seen: dict[str, str] = json.loads(html.unescape(found[1]))
    return seen


def is_untouched(server: Server) -> None:
    """Nothing was generated, paused, uploaded or scaled."""
    with server.client() as client:
        assert client.get("/is_paused").json() == {"is_paused": False}
        assert client.get("/v1/files").json()["data"] == []
        assert metric(client, "headrace:engine_up") == 1
        assert metric(client, "headrace:generation_tokens_total") == 0


def test_a_page_of_another_site_reads_and_does_nothing(server: Server, tmp_path: Path) -> None:
    with site(server.url) as port:
        seen = attempts_of(browse(f"http://evil.example:{port}/", tmp_path, "MAP evil.example 127.0.0.1"))
    for name in ("read", "metrics", "files", "generate", "script"):
        assert seen[name].startswith("refused:"), seen
    is_untouched(server)


def test_a_page_whose_name_is_re_bound_reads_and_does_nothing(server: Server, tmp_path: Path) -> None:
    """For the browser the server has become the page's own origin, so it hides no answer from it."""
    address = server.url.removeprefix("http://")
    with site("", rebinds_to=address) as port:
        seen = attempts_of(browse(f"http://evil.example:{port}/", tmp_path / "p", "MAP evil.example 127.0.0.1"))
    for name in ("read", "metrics", "files", "generate", "simple", "pause", "scale", "upload"):
        assert "host_not_allowed" in seen[name] or seen[name] in ("basic", "opaque"), seen
    assert all("host_not_allowed" in seen[name] for name in ("read", "metrics", "files", "generate")), seen
    assert seen["script"].startswith("refused:"), seen
    is_untouched(server)
    rebound = f"http://evil.example:{address.rpartition(':')[2]}"
    for number, path in enumerate(("/docs", "/v1/models", "/metrics", "/health")):
        document = browse(rebound + path, tmp_path / str(number), "MAP evil.example 127.0.0.1")
        assert "host_not_allowed" in document, document


def test_the_servers_own_page_is_shown_by_each_of_its_names(server: Server, tmp_path: Path) -> None:
    port = server.url.rpartition(":")[2]
    for host in ("localhost", "127.0.0.1"):
        assert "/v1/chat/completions" in browse(f"http://{host}:{port}/docs", tmp_path / host)


def test_a_page_of_an_allowed_origin_reads_and_generates(tmp_path: Path) -> None:
    with socket.socket() as free:  # the origin is named before the server starts
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    origin = f"http://{ALLOWED}:{port}"
    with serving("--server-dev-mode", "--allowed-origins", origin, null_model={}) as server:
        with site(server.url, port):
            seen = attempts_of(browse(f"{origin}/", tmp_path, f"MAP {ALLOWED} 127.0.0.1"))
        assert '"object":"list"' in seen["read"], seen
        assert "completion_tokens" in seen["generate"], seen
        with server.client() as client:
            assert metric(client, "headrace:generation_tokens_total") >= 1
