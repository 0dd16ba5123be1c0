"""What an engine says when its coordinator does not hear it, and a coordinator to those who take it for an engine."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from engine_parts import make_plan, welcome_of
from http_server import wait_until

from headrace import LLM
from headrace.core.coordinator.announcer import Announcer, State
from headrace.core.coordinator.program import Coordinator
from headrace.core.engine.sessions import Inbox, Sessions
from headrace.core.engine.zmq_port import ZmqPort
from headrace.ipc.coordination import EngineEntry
from headrace.ipc.failure import EngineDeadError
from headrace.ipc.messages import Load
from headrace.ipc.transport.keys import VARIABLE, make_key_file

ENTRY = EngineEntry(
    address="tcp://127.0.0.1:9",
    life="1",
    model="m",
    served_model_names=("m",),
    rank=0,
    host="here",
    pid=1,
    max_num_seqs=1,
    max_waiting_requests=1,
    block_size=16,
)


@contextmanager
def coordinator(address: str = "tcp://127.0.0.1:*") -> Iterator[Coordinator]:
    running = Coordinator(address)
    thread = threading.Thread(target=running.run)
    thread.start()
    try:
        yield running
    finally:
        running.stop()
        thread.join()
        running.close()


@contextmanager
def announcer(address: str) -> Iterator[None]:
    running = Announcer(ENTRY, [address], lambda: State(Load(num_running=0, num_waiting=0)), patience_s=0.05)
    try:
        yield
    finally:
        running.close()


def test_an_engine_says_once_that_its_coordinator_is_not_there_and_that_it_is(caplog: pytest.LogCaptureFixture) -> None:
    with coordinator() as gone:
        address = gone.address
    with caplog.at_level(logging.WARNING), announcer(address):
        wait_until(lambda: f"no coordinator listens at {address}; this engine" in caplog.text, 30, "the warning")
        with coordinator(address) as back:
            wait_until(lambda: bool(list(back.registry.addresses)), 20, "the engine to be known")
            wait_until(lambda: f"the coordinator at {address} is there" in caplog.text, 30, "the good news")
    assert caplog.text.count("no coordinator listens") == 1


def test_an_engine_says_that_its_coordinator_has_other_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("ours", "theirs"):
        make_key_file(tmp_path / name)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "theirs"))
    with coordinator() as other:
        monkeypatch.setenv(VARIABLE, str(tmp_path / "ours"))
        with caplog.at_level(logging.WARNING), announcer(other.address):
            said = f"or has other keys than {tmp_path / 'ours'}, or none; this engine"
            wait_until(lambda: said in caplog.text, 30, "the warning")
        assert not list(other.registry.addresses)


def test_an_engine_and_a_coordinator_are_not_taken_for_each_other(caplog: pytest.LogCaptureFixture) -> None:
    with coordinator() as running, pytest.raises(EngineDeadError, match="is no engine-core of this version"):
        LLM.connect(running.address, timeout_s=60)
    port = ZmqPort("tcp://127.0.0.1:*")
    try:
        port.serve(Sessions(Inbox(), welcome_of(*make_plan()), None))
        with caplog.at_level(logging.WARNING), announcer(port.address):
            said = f"what listens at {port.address} is no coordinator of this version; this engine"
            wait_until(lambda: said in caplog.text, 30, "the warning")
    finally:
        port.close()
