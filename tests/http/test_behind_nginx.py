"""Servers behind nginx, with the configuration of docs/deploy: restarted in turn they lose no request, streams come as
they are made, keys pass through, and Prometheus watches both."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from debian_programs import program
from http_server import Server, engine_of, metric, serving
from patience import wait_until
from prometheus import prometheus

DEPLOY = Path(__file__).parents[2] / "docs" / "deploy"
COMPLETIONS = "/v1/completions"
ENDLESS = {"prompt": [5, 6], "max_tokens": 30_000, "ignore_eos": True, "stream": True}
SHORT = json.dumps({"prompt": [5, 6], "max_tokens": 3, "ignore_eos": True}).encode()
KEY = "a-key-of-clients"
MOST_REQUESTS = 20_000
NUM_REQUESTS = 1_000


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextlib.contextmanager
def nginx(folder: Path, text: str) -> Iterator[None]:
    """Runs it with this configuration."""
    (folder / "nginx.conf").write_text(text)
    command = [program("nginx", "usr/sbin/nginx"), "-p", str(folder), "-c", "nginx.conf", "-e", "error.log"]
    process = subprocess.Popen([*command, "-g", "daemon off;"], stderr=subprocess.PIPE)
    try:
        yield
    finally:
        process.terminate()
        process.communicate(timeout=60)


def nginx_conf(ports: tuple[int, int], port: int) -> str:
    """The configuration of docs/deploy for these servers."""
    text = (DEPLOY / "nginx.conf").read_text()
    for number, each in enumerate(ports, 1):
        assert f"10.0.0.{number}:8000" in text
        text = text.replace(f"10.0.0.{number}:8000", f"127.0.0.1:{each}")
    assert "listen 8080;" in text
    return text.replace("listen 8080;", f"listen 127.0.0.1:{port};").replace("auto;", "1;")


def plain_conf(ports: tuple[int, int], port: int) -> str:
    """nginx's own defaults."""
    servers = "".join(f"server 127.0.0.1:{each};" for each in ports)
    server = f"server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://headrace; }} }}"
    return in_folder(f"pid nginx.pid; events {{}} http {{ upstream headrace {{ {servers} }} {server} }}")


def in_folder(text: str) -> str:
    """With bodies and logs in the test's folder."""
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = " ".join(f"{kind}_temp_path {kind};" for kind in kinds)
    return text.replace("http {", f"http {{ access_log off; {paths}", 1)


class Load:
    """Clients that ask one request after the other, streaming and not, over connections that they keep."""

    def __init__(self, url: str, num_clients: int, key: str = "") -> None:
        self.url = url
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.num_right, self.wrong = 0, list[str]()
        self._lock, self._over = threading.Lock(), threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(num_clients)]

    def __enter__(self) -> Load:
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for each in self._threads:
            each.join(60)

    def _ask(self, number: int) -> None:
        with httpx.Client(base_url=self.url, timeout=60, verify=False, headers=self._headers) as client:
            while not self._over.is_set():
                number += 1
                try:
                    what = self._one(client, streams=number % 2 == 0)
                except httpx.HTTPError as error:
                    what = repr(error)
                with self._lock:
                    self.num_right += not what
                    if what:
                        self.wrong.append(what)
                if self.num_right + len(self.wrong) > MOST_REQUESTS:
                    return

    @staticmethod
    def _one(client: httpx.Client, *, streams: bool) -> str:
        """What was wrong with the answer; empty if nothing was."""
        body = {"prompt": [5, 6], "max_tokens": 8, "ignore_eos": True, "stream": streams}
        answer = client.post(COMPLETIONS, json=body)
        is_whole = '"finish_reason":"length"' in answer.text and (not streams or answer.text.endswith("[DONE]\n\n"))
        return "" if answer.status_code == 200 and is_whole else f"{answer.status_code} {answer.text[-200:]}"


def answers(client: httpx.Client) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return client.get("/health/ready").status_code == 200
    return False


@pytest.mark.system
def test_two_servers_behind_nginx_are_restarted_in_turn_and_no_request_is_lost(tmp_path):
    ports, port = (free_port(), free_port()), free_port()
    model = {"step_delay_s": 0.002, "load_delay_s": 1.0}  # so long it answers 503

    def start(at: int) -> Server:
        return Server("--port", str(at), "--api-key", KEY, null_model=model)

    servers = [start(each) for each in ports]
    try:
        for each in servers:
            each.wait_ready()
        with nginx(tmp_path, nginx_conf(ports, port)), httpx.Client(base_url=f"http://127.0.0.1:{port}") as probe:
            wait_until(lambda: answers(probe), 20, "nginx to answer")
            assert probe.post(COMPLETIONS, content=SHORT).status_code == 401
            with Load(f"http://127.0.0.1:{port}", 6, KEY) as load:
                restarts = 0
                while restarts < 2 or load.num_right < NUM_REQUESTS:
                    which = restarts % 2
                    before = load.num_right
                    wait_until(lambda at=before: load.num_right > at + 50 or bool(load.wrong), 60, "requests")
                    servers[which].signal()
                    assert servers[which].wait_exit(40) == 0
                    servers[which] = start(ports[which]).wait_ready()
                    restarts += 1
                    assert not load.wrong, load.wrong[:5]
        assert load.wrong == []
        assert load.num_right >= NUM_REQUESTS
    finally:
        for each in servers:
            each.close()


@pytest.mark.system
def test_a_server_that_stops_behind_nginx_as_it_comes_loses_no_request(tmp_path):
    """Its connections are refused from the first signal on, so nginx takes the other server, also for a POST."""
    ports, port = (free_port(), free_port()), free_port()
    with contextlib.ExitStack() as stack:
        first, _ = (
            stack.enter_context(
                serving("--port", str(each), "--allowed-hosts", "headrace", null_model={"step_delay_s": 0.002})
            )
            for each in ports
        )
        stack.enter_context(nginx(tmp_path, plain_conf(ports, port)))
        probe = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}"))
        wait_until(lambda: answers(probe), 20, "nginx to answer")
        held = stack.enter_context(first.client())
        with Load(f"http://127.0.0.1:{port}", 6) as load:
            wait_until(lambda: load.num_right > 100, 60, "requests")
            with held.stream("POST", COMPLETIONS, json={**ENDLESS, "max_tokens": 500}) as response:
                lines = response.iter_lines()
                assert next(lines).startswith("data: ")
                first.signal()
                assert [line for line in lines if line][-1] == "data: [DONE]"  # it drains for a second
            assert first.wait_exit(40) == 0
            before = load.num_right
            wait_until(lambda: load.num_right > before + 100 or bool(load.wrong), 60, "requests")
        assert load.wrong == []


def test_a_stream_comes_through_nginx_event_by_event(tmp_path):
    """While the engine is stopped in the middle of an answer, what it has made is there."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving("--api-key", KEY, null_model={"step_delay_s": 0.5}))
        at = int(server.url.rpartition(":")[2])
        stack.enter_context(nginx(tmp_path, nginx_conf((at, at), port)))
        direct = stack.enter_context(server.client())
        client = stack.enter_context(
            httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, headers={"Authorization": f"Bearer {KEY}"})
        )
        wait_until(lambda: answers(client), 20, "nginx to answer")
        most, engine = 12, engine_of(server)
        with client.stream("POST", COMPLETIONS, json={**ENDLESS, "max_tokens": most}) as response:
            wait_until(lambda: metric(direct, "headrace:generation_tokens_total") >= 1, 30, "a token")
            engine.suspend()
            try:
                lines = response.iter_lines()
                assert next(lines).startswith("data: ")
                made = metric(direct, "headrace:generation_tokens_total")
                assert made < most, "the answer was whole already"
            finally:
                engine.resume()
            assert [line for line in lines if line][-1] == "data: [DONE]"


@pytest.mark.system
def test_the_block_for_one_server_serves_it_by_tls(tmp_path: Path) -> None:
    """As in a folder of blocks that an nginx includes, which is how Debian's package has it."""
    port = free_port()
    (block,) = re.findall(r"^```nginx\n(.*?)^```", (DEPLOY / "nginx.md").read_text(), re.M | re.S)
    pair = {"/etc/ssl/private/llm.key": tmp_path / "llm.key", "/etc/ssl/llm.pem": tmp_path / "llm.pem"}
    key, certificate = pair.values()
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=llm.example.org"]
    subprocess.run([*made, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving("--api-key", KEY))
        at = {"127.0.0.1:8000": server.url.removeprefix("http://"), "listen 443": f"listen 127.0.0.1:{port}"}
        for written, used in {**pair, **at}.items():
            assert written in block
            block = block.replace(written, str(used))
        (tmp_path / "conf.d").mkdir()
        (tmp_path / "conf.d" / "headrace.conf").write_text(block)
        # Its workers write long bodies into this folder, which is root's alone where root runs the tests.
        own = in_folder("user root; pid nginx.pid; events {} http { include conf.d/*.conf; }")
        stack.enter_context(nginx(tmp_path, own))
        client = stack.enter_context(
            httpx.Client(
                base_url=f"https://127.0.0.1:{port}",
                headers={"Authorization": f"Bearer {KEY}"},
                timeout=60,
                verify=False,
            )
        )
        wait_until(lambda: answers(client), 20, "nginx to answer")
        with client.stream("POST", COMPLETIONS, json={**ENDLESS, "max_tokens": 3}) as response:
            assert [line for line in response.iter_lines() if line][-1] == "data: [DONE]"
        long = {"prompt": [5] * 600_000, "max_tokens": 1}  # over nginx's 1 MB, and over the model's length
        assert "context" in client.post(COMPLETIONS, json=long).json()["error"]["message"]


@pytest.mark.system
def test_prometheus_watches_both_servers_while_they_are_restarted_in_turn(tmp_path):
    """By compose's configuration, with a key; what clients got is what it counts."""
    ports, port = (free_port(), free_port()), free_port()
    key_file = tmp_path / "api_key"
    key_file.write_text(KEY)
    key_file.chmod(0o600)
    config = (DEPLOY / "compose" / "prometheus.yml").read_text().replace("/run/secrets/api_key", str(key_file))
    config = config.replace('"server:8000"', ", ".join(f'"127.0.0.1:{each}"' for each in ports))
    config = config.replace("scrape_interval: 5s", "scrape_interval: 1s")
    assert len(yaml.safe_load(config)["scrape_configs"][0]["static_configs"][0]["targets"]) == 2

    def start(at: int) -> Server:
        guarded = ("--api-key-file", str(key_file), "--guard-metrics")
        return Server("--port", str(at), *guarded, null_model={"step_delay_s": 0.01})

    servers = [start(each) for each in ports]
    try:
        for each in servers:
            each.wait_ready()
        with (
            nginx(tmp_path, nginx_conf(ports, port)),
            prometheus(tmp_path, config) as ask,
            httpx.Client(base_url=f"http://127.0.0.1:{port}") as probe,
        ):

            def states() -> set[str]:
                return {each["value"][1] for each in ask('up{job="headrace"}')}

            def finished() -> float:
                (found,) = ask("sum(headrace:request_success_total)") or [{"value": (0, "0")}]
                return float(found["value"][1])

            wait_until(lambda: answers(probe), 20, "nginx to answer")
            wait_until(lambda: len(ask("up")) == 2 and states() == {"1"}, 60, "both to be scraped")
            with Load(f"http://127.0.0.1:{port}", 2, KEY) as load:
                wait_until(lambda: load.num_right > 50, 60, "requests")
                for which, at in enumerate(ports):
                    servers[which].signal()
                    assert servers[which].wait_exit(40) == 0
                    wait_until(lambda: "0" in states(), 60, "its absence to be seen")
                    servers[which] = start(at).wait_ready()
                    wait_until(lambda: states() == {"1"}, 60, "its return to be seen")
                served = load.num_right
                wait_until(lambda: load.num_right > served + 50, 60, "requests")
            assert load.wrong == []
            now = sum(counted(each) for each in servers)
            assert now > 50
            wait_until(lambda: finished() == now, 60, "the last scrape")
    finally:
        for each in servers:
            each.close()


def counted(server: Server) -> float:
    with server.client(headers={"Authorization": f"Bearer {KEY}"}) as client:
        return metric(client, "headrace:request_success_total")
