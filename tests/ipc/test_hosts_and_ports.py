"""Whatever takes an address takes IPv6 ones, with brackets and without, and names."""

from __future__ import annotations

import contextlib
import socket

import httpx
import pytest
from http_server import HERE, serving
from test_http_restart import engine_at
from thinned import pairs

from headrace.core.coordinator.announcer import reachable
from headrace.core.options.parsing import parse_options
from headrace.frontend.api.llm import connect
from headrace.frontend.bench.options import TargetOptions
from headrace.frontend.bench.serve import target_of
from headrace.frontend.http.options import ServeOptions
from headrace.frontend.http.process.ranks import ranks_of
from headrace.ipc.failure import HeadraceError
from headrace.ipc.transport.hosts import bare_host, host_port, listening, needs_ipv6
from headrace.ipc.transport.sockets import check_address


def free_port(host: str) -> int:
    """One that is free at the other loopback address too: what another test's server has there is nobody's engine."""
    other = "127.0.0.1" if ":" in host else "::1"
    while True:
        with listening(host, 0) as sock:
            port: int = sock.getsockname()[1]
            with contextlib.suppress(OSError), listening(other, port):
                return port


@pytest.mark.parametrize(
    ("written", "url_host"),
    [
        pytest.param("[::1]", "[::1]", marks=pytest.mark.system),
        ("::", "[::1]"),
        pytest.param("::1", "[::1]", marks=pytest.mark.system),
        pytest.param("*", "[::1]", marks=pytest.mark.system),
    ],
)
def test_a_server_listens_at_ipv6_addresses_and_prints_them_with_brackets(written, url_host, ipv6):
    with serving("--host", written) as server:
        assert server.url.startswith(f"http://{url_host}:")
        port = httpx.URL(server.url).port
        for host in ("[::1]", *(["127.0.0.1"] if written in ("::", "*") else [])):
            assert httpx.get(f"http://{host}:{port}/health", timeout=30).status_code == 200
        assert ("from this machine alone" in server.log) == (written not in ("::", "*"))


def test_engine_and_clients_meet_at_ipv6_addresses_however_they_are_written(monkeypatch, ipv6):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    port = free_port("::1")
    with engine_at(f"tcp://::1:{port}") as engine:
        assert engine.ready is not None
        assert engine.ready.address == f"tcp://[::1]:{port}"
        for address in (f"tcp://::1:{port}", f"tcp://[::1]:{port}"):
            with connect(address) as llm:
                assert llm.generate([[5, 6]])[0].outputs[0].token_ids
            named = (f"--engine={address}",)
            with serving(*named, attached=True) as server, server.client() as client:
                assert client.get("/health").status_code == 200


def test_an_engine_at_all_addresses_is_reached_by_ipv4_and_ipv6(monkeypatch, ipv6):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.setenv("HEADRACE_INSECURE", "1")
    port = free_port("::1")
    with engine_at(f"tcp://*:{port}"):
        for host in ("127.0.0.1", "[::1]", "localhost"):
            with connect(f"tcp://{host}:{port}") as llm:
                assert llm.generate([[5, 6]])[0].outputs[0].token_ids


@pytest.mark.parametrize(("host", "reconnect"), pairs(("127.0.0.1", "[::1]"), (False, True)))
def test_localhost_reaches_an_engine_at_either_loopback_address(host, reconnect, monkeypatch, ipv6):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    port = free_port(bare_host(host))
    with engine_at(f"tcp://{host}:{port}"), connect(f"tcp://localhost:{port}", reconnect=reconnect) as llm:
        assert llm.generate([[5, 6]])[0].outputs[0].token_ids


def test_addresses_and_ports_are_written_as_urls_have_them():
    assert [bare_host(each) for each in ("::1", "[::1]", "a.b", "10.0.0.1")] == ["::1", "::1", "a.b", "10.0.0.1"]
    assert [host_port(each, 80) for each in ("::1", "[::1]", "a.b")] == ["[::1]:80", "[::1]:80", "a.b:80"]
    assert check_address("tcp://::1:5400") == check_address("tcp://[::1]:5400") == "tcp://[::1]:5400"
    assert check_address("tcp://localhost:*") == "tcp://localhost:*"
    assert [needs_ipv6(each) for each in ("::", "fd00::1", "127.0.0.1")] == [True, True, False]
    with pytest.raises(HeadraceError, match="is no loopback address"):
        check_address("tcp://[fd00::1]:5400")
    assert reachable("tcp://[::]:5400", "tcp://[::1]:5560") == "tcp://[::1]:5400"


@pytest.mark.parametrize("written", ["::1", "[::1]"])
def test_options_that_name_hosts_take_brackets(written):
    options = parse_options(model="null", data_parallel_size=2, data_parallel_size_local=1)
    assert ranks_of(options, ServeOptions(data_parallel_address=written)).coordinator == "tcp://[::1]:29550"
    target = target_of(TargetOptions(host=written, port=8000))
    assert (target.host, target.port) == ("::1", 8000)


def test_a_name_without_an_ipv4_address_is_reached_by_ipv6(monkeypatch):
    """As names are in a cluster that has IPv6 alone."""
    asked = []

    def getaddrinfo(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        asked.append(host)
        return [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::1", 0, 0, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert needs_ipv6("headrace-engine-0.headrace-engine")
    assert asked == ["headrace-engine-0.headrace-engine"]
