"""Engines over tcp:// with keys: who has one of theirs is served, nobody else is, and each refusal says why."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engine_parts import make_plan, welcome_of
from thinned import every
from zmtp_greeting import wants_keys

import headrace
from headrace.core.coordinator.program import Coordinator
from headrace.core.engine.sessions import Inbox, Sessions
from headrace.core.engine.zmq_port import ZmqPort
from headrace.frontend.cli.main import main
from headrace.frontend.client.client import CoreClient
from headrace.frontend.client.transport import ZmqTransport
from headrace.ipc.failure import EngineDeadError
from headrace.ipc.messages import Hello
from headrace.ipc.process.runtime_directory import AddressError
from headrace.ipc.transport.keys import KeyFileError, add_client, make_key_file, make_own_keys, read_keys, use_own_keys
from headrace.ipc.transport.sockets import check_address


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "deployment.keys"
    make_key_file(path)
    return path


@pytest.fixture(params=["127.0.0.1", "[::1]"])
def address(keys: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    """Of a port that listens with `keys`, in an environment that names none."""
    with monkeypatch.context() as patched:
        patched.setenv("HEADRACE_KEYS", str(keys))
        port = ZmqPort(f"tcp://{request.param}:*")
        port.serve(Sessions(Inbox(), welcome_of(*make_plan()), None))
    yield port.address
    port.close()


def greet(address: str, keys: Path | None) -> str:
    """The model that the engine at `address` welcomes us with."""

    async def attach() -> str:
        client = CoreClient(ZmqTransport(address, keys=keys))
        await client.start(10.0, with_tokenizer=False)
        model = client.welcome.model
        await client.close()
        return model

    return asyncio.run(attach())


def test_a_client_with_the_deployments_keys_is_welcomed(
    address: str, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert greet(address, keys)
    monkeypatch.setenv("HEADRACE_KEYS", str(keys))
    assert greet(address, None)


def recorded(address: str, keys: Path) -> bytes:
    """What a client sends that is welcomed, byte for byte."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    sent = bytearray()

    def pass_on(source: socket.socket, sink: socket.socket, note: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                note += data
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(3) as pool:

        def stand_between() -> None:
            client, _ = listener.accept()
            with client, socket.create_connection((host.strip("[]"), int(port))) as engine:
                back = pool.submit(pass_on, engine, client, bytearray())
                pass_on(client, engine, sent)
                back.result()

        between = pool.submit(stand_between)
        greet(f"tcp://127.0.0.1:{listener.getsockname()[1]}", keys)
        between.result()
    return bytes(sent)


def test_what_a_client_has_sent_opens_no_session_when_somebody_sends_it_again(
    address: str, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    greetings: list[Hello] = []
    greet_one = Sessions.greet

    def noted(sessions: Sessions, hello: Hello) -> Any:
        greetings.append(hello)
        return greet_one(sessions, hello)

    monkeypatch.setattr(Sessions, "greet", noted)
    session = recorded(address, keys)
    assert len(greetings) == 1
    assert b"CURVE" in session
    assert b"MESSAGE" in session, "all of it, and not the handshake alone"
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=60) as again:
        again.sendall(session)
        with contextlib.suppress(ConnectionResetError):
            while again.recv(65536):  # the engine's half of a handshake, and then it hangs up
                pass
    assert greet(address, keys)
    assert len(greetings) == 2


def test_a_client_without_keys_is_told_that_the_engine_wants_some(address: str) -> None:
    with pytest.raises(EngineDeadError, match="wants keys"):
        greet(address, None)


def test_a_client_with_another_deployments_keys_is_refused(address: str, tmp_path: Path) -> None:
    make_key_file(tmp_path / "other.keys")
    with pytest.raises(EngineDeadError, match=r"other keys than .*other\.keys"):
        greet(address, tmp_path / "other.keys")


def test_a_client_with_keys_tells_of_an_engine_without(keys: Path) -> None:
    port = ZmqPort("tcp://127.0.0.1:*")
    try:
        port.serve(Sessions(Inbox(), welcome_of(*make_plan()), None))
        with pytest.raises(EngineDeadError, match="or none"):
            greet(port.address, keys)
    finally:
        port.close()


def test_a_clients_own_keys_work_from_when_they_are_added_until_their_line_goes(
    address: str, keys: Path, tmp_path: Path
) -> None:
    alice = tmp_path / "alice.keys"
    assert main(["keys", str(keys), "--client", "alice", "--out", str(alice)]) == 0
    assert not read_keys(alice).engine.secret_key
    assert greet(address, alice)
    keys.write_text("".join(line for line in keys.read_text().splitlines(True) if not line.startswith("alice")))
    with pytest.raises(EngineDeadError, match=r"admits no client with the keys of .*alice\.keys"):
        greet(address, alice)
    assert greet(address, keys), "the others are still admitted"


def test_an_engine_whose_key_file_was_damaged_admits_nobody(
    address: str, keys: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (copy := tmp_path / "copy.keys").write_text(keys.read_text())
    copy.chmod(0o600)
    keys.write_text("[engine")
    with pytest.raises(EngineDeadError, match="admits no client"):
        greet(address, copy)
    assert "no client is admitted" in caplog.text


def test_a_clients_keys_do_not_open_an_engine(keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_client(keys, "alice", tmp_path / "alice.keys")
    monkeypatch.setenv("HEADRACE_KEYS", str(tmp_path / "alice.keys"))
    with pytest.raises(KeyFileError, match="is a client's"):
        ZmqPort("tcp://127.0.0.1:*")


@pytest.mark.parametrize(
    "bad", ["", "[engine]\n", '[engine]\npublic_key = "short"\n[client]\npublic_key = ""\n', "\xff"]
)
def test_what_is_no_key_file_is_named(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "bad.keys"
    path.write_text(bad, encoding="latin-1")
    path.chmod(0o600)
    with pytest.raises(KeyFileError, match=r"bad\.keys"):
        read_keys(path)


def test_a_key_file_that_others_may_read_is_refused(keys: Path) -> None:
    keys.chmod(0o644)
    with pytest.raises(KeyFileError, match="chmod 600"):
        read_keys(keys)


def test_keys_are_never_written_over(keys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = keys.read_text()
    assert main(["keys", str(keys)]) == 1
    assert "exists already" in capsys.readouterr().err
    assert main(["keys", str(keys), "--client", "alice", "--out", str(keys)]) == 1
    assert keys.read_text() == before
    assert main(["keys", str(keys), "--client", "no name", "--out", "elsewhere"]) == 1
    assert main(["keys", str(keys), "--client", "alice"]) == 2


@pytest.mark.parametrize(
    "address", ["tcp://10.0.0.1:5000", "tcp://*:5000", "tcp://gpu-7.example:5000", "tcp://[fd00::1]:5000"]
)
def test_an_address_that_other_hosts_reach_wants_keys_or_a_plain_word(
    address: str, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AddressError, match="headrace keys"):
        check_address(address)
    assert check_address(address, keys) == address
    monkeypatch.setenv("HEADRACE_INSECURE", "1")
    assert check_address(address) == address
    monkeypatch.setenv("HEADRACE_INSECURE", "0")
    with pytest.raises(AddressError):
        check_address(address)


def test_connect_takes_a_key_file(address: str, keys: Path) -> None:
    with headrace.connect(address, keys=str(keys)) as llm:
        assert llm.get_default_sampling_params() is not None


@pytest.mark.parametrize("by_option", every(2, [True, False]), ids=["--keys", "HEADRACE_KEYS"])
@pytest.mark.parametrize("command", [["serve", "null"], ["complete", "x"], ["top", "--once"], ["ps"], ["coordinator"]])
def test_a_key_file_that_is_not_there_is_told_before_anything_starts(
    command: list[str],
    by_option: bool,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing = tmp_path / "none.keys"
    if command[0] == "complete":
        monkeypatch.setenv("HEADRACE_KEYS", str(missing))
        given = [*command, "--engine", "tcp://127.0.0.1:9"]
    elif by_option:
        given = [*command, "--keys", str(missing)]
    else:
        monkeypatch.setenv("HEADRACE_KEYS", str(missing))
        given = command
    assert main(given) in (1, 2)
    gc.collect()
    told = capfd.readouterr().err
    assert f"the key file {missing} cannot be read: no such file or directory" in told
    assert "never retrieved" not in told


def test_this_users_own_keys_are_made_once_and_by_one(runtime_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_KEYS", raising=False)
    before = os.umask(0)
    try:
        with ThreadPoolExecutor(4) as pool:
            made = list(pool.map(lambda _: make_own_keys(), range(8)))
    finally:
        os.umask(before)
    (path,) = set(made)
    assert os.listdir(runtime_directory) == [path.name]
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_keys(path).engine.secret_key
    monkeypatch.setenv("HEADRACE_KEYS", "")
    assert use_own_keys() == path
    assert os.environ["HEADRACE_KEYS"] == str(path)
    assert use_own_keys() is None, "keys are named now"


def test_nobody_gets_own_keys_who_asks_for_none(runtime_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_KEYS", "")
    monkeypatch.setenv("HEADRACE_INSECURE", "1")
    assert use_own_keys() is None
    assert not os.listdir(runtime_directory)


def test_an_engine_with_own_keys_serves_its_user_and_nobody_else(
    runtime_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its record in the runtime directory, which only this user can enter, names them."""
    monkeypatch.setenv("HEADRACE_KEYS", "")
    use_own_keys()
    port = ZmqPort("tcp://127.0.0.1:*")
    monkeypatch.setenv("HEADRACE_KEYS", "")
    port.serve(Sessions(Inbox(), welcome_of(*make_plan()), None))
    try:
        assert "is open to every user" not in caplog.text
        assert wants_keys(port.address)
        assert greet(port.address, None)
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir(mode=0o700)
        monkeypatch.setenv("HEADRACE_RUNTIME_DIR", str(elsewhere))
        with pytest.raises(EngineDeadError, match="wants keys"):
            greet(port.address, None)
    finally:
        monkeypatch.setenv("HEADRACE_RUNTIME_DIR", str(runtime_directory))
        port.close()


@pytest.mark.parametrize("opens", [ZmqPort, Coordinator], ids=["engine", "coordinator"])
def test_a_listener_without_keys_says_who_may_use_it(
    opens: Any, runtime_directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HEADRACE_KEYS", "")
    for address, insecure, warns in (
        ("tcp://127.0.0.1:*", "", True),
        ("tcp://127.0.0.1:*", "1", False),
        ("", "", False),
    ):
        caplog.clear()
        monkeypatch.setenv("HEADRACE_INSECURE", insecure)
        opens(address).close()
        assert ("is open to every user of this machine" in caplog.text) == warns
