"""Hosts of one engine that are asked to end: what runs is finished first, and nothing waits for ever."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from socket import create_server

import pytest
from http_server import HERE, Server, engine_of
from patience import within
from test_http_lifecycle import streaming

NUM_STREAMS = 6
OPTIONS = [
    *("null", "--worker-cls", "null_rank:NullRank", "--skip-tokenizer-init", "--distributed-executor-backend", "mp"),
    *("--nnodes", "2", "--hf-overrides", json.dumps({"step_delay_s": 0.01})),
]


class Hosts:
    """`headrace serve` on one host and `engine-core` on the other, with streams that run."""

    def __init__(self, stack: contextlib.ExitStack, *sizes: str, processes: int = 1, num_tokens: int = 100) -> None:
        with create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        options = [*OPTIONS, "--master-port", str(port), *sizes]
        self.server = Server(*options, "--api-server-count", str(processes), attached=True)
        stack.callback(self.server.close)
        program = [sys.executable, "-m", "headrace.core.process.daemon"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
        command = [*program, *options, "--node-rank", "1"]
        self.node = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment)
        stack.callback(self._end_node)
        self.server.wait_ready()
        clients = [stack.enter_context(self.server.client()) for _ in range(NUM_STREAMS)]
        self.streams = [stack.enter_context(streaming(client, max_tokens=num_tokens)) for client in clients]

    def _end_node(self) -> None:
        if self.node.poll() is None:
            self.node.kill()
        self.node.wait()

    def are_whole(self) -> bool:
        """Reads the streams to their ends."""
        ends = [[line for line in lines if line][-2:] for lines in self.streams]
        return all('"finish_reason":"length"' in last and done == "data: [DONE]" for last, done in ends)


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.mark.parametrize(
    ("sizes", "processes", "number"),
    [
        pytest.param(("-tp", "2"), 1, signal.SIGTERM, marks=pytest.mark.system),
        pytest.param(("-pp", "2"), 1, signal.SIGTERM, marks=pytest.mark.system),
        (("-tp", "2"), 2, signal.SIGINT),
    ],
)
def test_hosts_that_are_told_at_once_finish_what_runs(sizes, processes, number, stack):
    """As Kubernetes ends the pods of a group, in any order."""
    hosts = Hosts(stack, *sizes, processes=processes)
    hosts.node.send_signal(number)
    hosts.server.signal(number)
    assert hosts.are_whole()
    assert hosts.server.wait_exit(30) == 0
    assert hosts.node.wait(within(30)) == 0


@pytest.mark.system
@pytest.mark.parametrize("address", ["::1", "[::1]", "localhost"])
def test_hosts_meet_at_addresses_of_either_kind(address, stack, ipv6):
    hosts = Hosts(stack, "-tp", "2", "--master-addr", address)
    assert hosts.are_whole()
    hosts.server.signal()
    assert hosts.server.wait_exit(30) == 0
    assert hosts.node.wait(within(30)) == 0


@pytest.mark.system
def test_a_node_that_is_told_alone_has_its_engine_finish_what_runs(stack):
    hosts = Hosts(stack, "-tp", "2")
    hosts.node.send_signal(signal.SIGTERM)
    assert hosts.are_whole()
    assert hosts.node.wait(within(30)) == 0
    hosts.server.wait_exit(30)
    assert "node 1 was asked to end: this engine finishes its requests and ends" in hosts.server.log


@pytest.mark.system
def test_a_node_that_is_told_twice_ends_at_once(stack):
    hosts = Hosts(stack, "-tp", "2", num_tokens=30_000)
    hosts.node.send_signal(signal.SIGTERM)
    hosts.server.wait_log("node 1 was asked to end")
    hosts.node.send_signal(signal.SIGTERM)
    assert hosts.node.wait(within(30)) == 128 + signal.SIGTERM
    ends = [[line for line in lines if line][-2] for lines in hosts.streams]
    assert all(re.search(r"node 1 .* is gone", end) for end in ends), ends
    hosts.server.wait_exit(30)


@pytest.mark.system
def test_a_node_that_waits_for_a_drain_ends_with_its_leader(stack):
    hosts = Hosts(stack, "-tp", "2", num_tokens=30_000)
    hosts.node.send_signal(signal.SIGTERM)
    hosts.server.wait_log("node 1 was asked to end")
    engine_of(hosts.server).kill()
    assert hosts.node.wait(within(30)) == 70
    hosts.server.wait_exit(30)


@pytest.mark.system
def test_a_drain_that_takes_too_long_ends_both_hosts_at_its_time_limit(stack):
    hosts = Hosts(stack, "-tp", "2", "--shutdown-timeout", "0.5", num_tokens=30_000)
    hosts.node.send_signal(signal.SIGTERM)
    for lines in hosts.streams:
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert hosts.node.wait(within(30)) == 0
    hosts.server.wait_exit(30)
