"""What holds prompts, answers or keys belongs to its user alone, from its first byte on and whatever the umask."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_server import Server, ask, serving
from patience import wait_until

from headrace.core.engine.timeline import Timeline
from headrace.core.options.parsing import read_config
from headrace.frontend.http.apis.files.store import FileStore
from headrace.frontend.http.apis.responses.store import ResponseStore
from headrace.frontend.http.options import ServeOptions
from headrace.ipc.process import private_files
from headrace.ipc.process.private_files import private_opener, warn_of_open_secret


@pytest.fixture(params=[0o000, 0o022, 0o777])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.lstat().st_mode) for path in folder.rglob("*")}


def test_stores_are_their_users_alone(umask: None, tmp_path: Path) -> None:
    responses = ResponseStore(str(tmp_path / "responses.sqlite"), 1 << 20)
    files = FileStore(str(tmp_path / "files"), 1 << 20)
    id = files.new_id()
    files.append(id, b"prompt")
    asyncio.run(responses._database.run(lambda: responses._database.execute("delete from responses")))
    found = modes(tmp_path)
    assert found.pop("files") & 0o077 == 0
    assert {"responses.sqlite", "responses.sqlite-wal", "index.sqlite", "index.sqlite-wal", f"{id}.data"} <= set(found)
    assert set(found.values()) == {0o600}, {name: oct(mode) for name, mode in found.items()}
    responses.close()
    files.close()


def test_a_file_has_its_mode_before_its_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only once it has been changed: in between, another user could open it."""
    monkeypatch.setattr(private_files.os, "fchmod", lambda *_: pytest.fail("the file was made with another mode"))
    before = os.umask(0)
    try:
        with open(tmp_path / "new", "wb", opener=private_opener) as file:
            assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == 0o600
    finally:
        os.umask(before)


def test_files_of_an_earlier_version_are_tightened(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "files"
    store = FileStore(str(folder), 1 << 20)
    id = store.new_id()
    store.append(id, b"prompt")
    response_store = ResponseStore(str(tmp_path / "responses.sqlite"), 1 << 20)
    for path in (*folder.iterdir(), *tmp_path.glob("responses.sqlite*")):
        path.chmod(0o644)
    folder.chmod(0o755)
    again = FileStore(str(folder), 1 << 20), ResponseStore(str(tmp_path / "responses.sqlite"), 1 << 20)
    found = modes(tmp_path)
    assert found.pop("files") == 0o755, "a folder that the user has made is not changed"
    assert "others may enter this folder (mode 755): chmod 700 it" in caplog.text
    assert set(found.values()) == {0o600}
    for each in (store, response_store, *again):
        each.close()


def test_a_file_that_is_not_ours_to_change_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError

    (tmp_path / "store").touch(0o644)
    monkeypatch.setattr(private_files.os, "fchmod", refused)
    with open(tmp_path / "store", "ab", opener=private_opener):
        assert "others may read it (mode 644)" in caplog.text


def test_a_device_keeps_its_mode() -> None:
    before = os.stat(os.devnull).st_mode
    with open(os.devnull, "wb", opener=private_opener):
        assert os.stat(os.devnull).st_mode == before


def test_profiles_are_their_users_alone(umask: None, tmp_path: Path) -> None:
    Timeline().write(tmp_path / "profile.json")
    assert modes(tmp_path) == {"profile.json": 0o600}


@pytest.mark.parametrize(
    ("mode", "owner", "is_open"),
    [
        (0o600, None, False),
        (0o400, None, False),
        (0o644, None, True),
        (0o604, None, True),
        (0o602, None, True),
        (0o640, 0, False),
        (0o440, 0, False),
        (0o660, 0, True),
        (0o640, 1234, True),
    ],
)
def test_secrets_that_others_may_read_are_warned_of(
    mode: int, owner: int | None, is_open: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    path.write_text("secret")
    path.chmod(mode)
    if owner is not None:
        if os.getuid() != 0:
            pytest.skip("only root gives files to others")
        os.chown(path, owner, 1234)
    with caplog.at_level(logging.WARNING):
        warn_of_open_secret("api_key_file", str(path))
        warn_of_open_secret("api_key_file", None)
        warn_of_open_secret("api_key_file", str(tmp_path / "none"))
    assert (f"api_key_file={path}: others may read this secret (mode {mode:o}): chmod 600 it" in caplog.text) is is_open
    assert ("others may" in caplog.text) is is_open


def test_a_secret_is_not_to_be_closed_to_its_reader(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container it is often root's, and read by a user without rights."""
    path = tmp_path / "keys"
    path.write_text("secret")
    path.chmod(0o644)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1000)
    warn_of_open_secret("api_key_file", str(path))
    assert f"api_key_file={path}: others may read this secret (mode 644): let a group of its readers" in caplog.text
    assert "chmod 600" not in caplog.text


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files to others")
def test_a_secret_of_another_user_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys"
    path.write_text("secret")
    path.chmod(0o600)
    os.chown(path, 1234, 1234)
    warn_of_open_secret("api_key_file", str(path))
    assert f"api_key_file={path}: this secret belongs to user 1234" in caplog.text


@pytest.mark.parametrize(
    ("line", "mode", "is_warned_of"),
    [
        ("api-key: [secret]", 0o644, True),
        ("admin_api_key: [secret]", 0o604, True),
        ("api-key: [secret]", 0o600, False),
        ("port: 1", 0o644, False),
        ("api-key: []", 0o644, False),
    ],
)
def test_a_config_file_with_keys_is_a_secret(
    line: str, mode: int, is_warned_of: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(line + "\n")
    path.chmod(mode)
    read_config(path, ServeOptions)
    assert ("others may read this secret" in caplog.text) is is_warned_of
    assert "[secret]" not in caplog.text


def test_a_server_leaves_nothing_that_others_may_read(tmp_path: Path) -> None:
    """Of two processes, with a batch, a stored response, a profile and a key file that is too open."""
    keys, stores = tmp_path / "keys", tmp_path / "stores"
    keys.write_text("secret\n")
    keys.chmod(0o644)
    profiler = json.dumps({"profiler": "torch", "torch_profiler_dir": str(stores / "profiles")})
    stores.mkdir(mode=0o700)
    before = os.umask(0)
    try:
        server = Server(
            *("--response-store", str(stores / "responses.sqlite"), "--file-store", str(stores / "files")),
            *("--api-server-count", "2", "--api-key-file", str(keys), "--admin-api-key", "admin", "--server-dev-mode"),
            *("--profiler-config", profiler),
        )
    finally:
        os.umask(before)
    try:
        server.wait_ready()
        assert server.log.count(f"api_key_file={keys}: others may read this secret (mode 644)") == 1
        with server.client(headers={"authorization": "Bearer admin"}) as client:
            assert client.post("/start_profile").status_code == 200
            ask(client, "/v1/responses", input="x", max_output_tokens=2)
            line = b'{"custom_id":"1","method":"POST","url":"/v1/completions","body":{"prompt":[5],"max_tokens":2}}\n'
            file = client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("x.jsonl", line)}).json()
            asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
            batch = ask(client, "/v1/batches", **asked)
            wait_until(
                lambda: client.get(f"/v1/batches/{batch['id']}").json()["output_file_id"] is not None, 30, "its answers"
            )
            assert client.post("/stop_profile").status_code == 200
            found = modes(stores)
        folders = {path.name for path in stores.rglob("*") if path.is_dir()}
        assert {found.pop(name) for name in folders} == {0o700}
        assert len([name for name in found if name.endswith(".data")]) == 2
        assert any(name.startswith("core-") for name in found)
        assert set(found.values()) == {0o600}, {name: oct(mode) for name, mode in found.items()}
    finally:
        server.close()


@pytest.mark.system
def test_a_key_file_of_ones_own_is_not_warned_of(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.touch(0o600)
    keys.write_text("secret\n")
    with serving("--api-key-file", str(keys), null_model={}) as server:
        assert "others may" not in server.log
