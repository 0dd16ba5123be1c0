"""A server in the surroundings of containers: it starts and answers, and leaves others' files alone."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
import tiny_models
from containers import IN_CONTAINER, needs_containers
from patience import wait_until

pytestmark = [needs_containers, pytest.mark.system]
NULL = ("--distributed-executor-backend", "headrace.executor.testing.null:NullExecutor", "--skip-tokenizer-init")
BODY = {"prompt": [5, 6, 7], "max_tokens": 4}
READ_ONLY = "mount -o remount,ro,bind /; if touch /etc/written 2> /dev/null; then exit 9; fi"
SURROUNDINGS = {
    "process 1": "",
    "read-only root": (f"{READ_ONLY}; mount -t tmpfs tmpfs /tmp; mkdir -p -m 700 $HEADRACE_RUNTIME_DIR; mkdir -p $RUN"),
    "read-only root and temporary folders": (
        f"{READ_ONLY}; mount -t tmpfs -o mode=0700 tmpfs $HEADRACE_RUNTIME_DIR; mkdir $RUN; "
        "mount -t tmpfs -o ro tmpfs /dev/shm"
    ),
    "no /proc/sys": "mount -t tmpfs tmpfs /proc/sys",
    "hidden processes of others": "mount -o remount,hidepid=2 /proc || mount -t proc -o hidepid=2 proc /proc",
    "small shared memory": "mount -t tmpfs -o size=64m tmpfs /dev/shm",
    "no shared memory": "mount -t tmpfs -o ro,size=4k tmpfs /dev/shm",
    "few files": "ulimit -n 128",
    "no home": "unset HOME USER LOGNAME; export HOME=/nonexistent",
}


@contextmanager
def serving_in(
    prelude: str,
    run: Path,
    *arguments: str,
    name: str = "server",
    extra: tuple[str, ...] = (),
    model: tuple[str, ...] = ("null", *NULL),
) -> Iterator[httpx.Client]:
    """A server whose surroundings the shell's prelude has made, and a client on its Unix socket."""
    run.mkdir(exist_ok=True, mode=0o700)
    (run / "http").mkdir(exist_ok=True)
    socket, logged = run / "http" / f"{name}.sock", run / f"{name}.log"
    script = f'{prelude}\nexec "$@"'
    program = [sys.executable, "-m", "headrace", "serve", *model, "--uds", str(socket), *arguments]
    environment = {**os.environ, "RUN": str(run / "http"), "HEADRACE_RUNTIME_DIR": str(run), "OMP_NUM_THREADS": "1"}
    with logged.open("wb") as log:
        outer = subprocess.Popen(
            [*IN_CONTAINER, *extra, "sh", "-ec", script, "sh", *program], stdout=log, stderr=log, env=environment
        )
    try:

        def is_ready() -> bool:
            assert outer.poll() is None, logged.read_text()
            return "ready: " in logged.read_text()

        wait_until(is_ready, 120, "the server to start")
        (first,) = psutil.Process(outer.pid).children()
        # Through process 1's root, which has mounts of its own.
        transport = httpx.HTTPTransport(uds=f"/proc/{first.pid}/root{socket}")
        with httpx.Client(transport=transport, base_url="http://server", timeout=60) as client:
            yield client
        first.terminate()
        assert outer.wait(60) == 0, logged.read_text()
    finally:
        for each in psutil.Process(outer.pid).children() if outer.poll() is None else ():
            each.kill()
        outer.wait(30)


@pytest.fixture
def run() -> Iterator[Path]:
    """A runtime directory with a short path: a client reaches its sockets through /proc, which makes theirs longer."""
    with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
        yield Path(folder) / "run"


def answers(client: httpx.Client) -> bool:
    done = client.post("/v1/completions", json=BODY)
    assert done.status_code == 200, done.text
    return bool(done.json()["usage"]["completion_tokens"] == 4)


@pytest.mark.parametrize("surroundings", SURROUNDINGS)
def test_a_server_starts_and_answers_in_the_surroundings_of_containers(surroundings: str, run: Path) -> None:
    # Uploaded files and stored responses need a folder that can be written.
    kept = ("--file-store-bytes", "0") if "temporary" in surroundings else ()
    with serving_in(SURROUNDINGS[surroundings], run, *kept) as client:
        assert answers(client)


@pytest.mark.parametrize("surroundings", ["small shared memory", "no shared memory"])
def test_ranks_of_a_server_need_no_shared_memory_of_the_container(surroundings: str, run: Path, tmp_path: Path) -> None:
    model = tiny_models.save("llama", tmp_path, tokenizer=True)
    arguments = ("-tp", "2", "-dp", "2", "--max-model-len", "256", "--num-gpu-blocks-override", "64")
    with serving_in(SURROUNDINGS[surroundings], run, *arguments, model=(str(model),)) as client:
        assert answers(client)


def _others_may_run(program: str) -> bool:
    places = (Path(program).resolve(), *Path(program).resolve().parents)
    return all(each.stat().st_mode & stat.S_IXOTH for each in places)


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None or not _others_may_run(sys.executable),
    reason="only root becomes another user, who must reach the interpreter",
)
def test_a_user_id_that_no_file_knows_serves(tmp_path: Path) -> None:
    command = ["setpriv", "--reuid", "12345", "--regid", "12345", "--clear-groups", sys.executable, "-m", "headrace"]
    environment = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    logged = tmp_path / "log"
    with logged.open("wb") as log:
        server = subprocess.Popen(
            [*command, "serve", "null", *NULL, "--port", "0"], stdout=log, stderr=log, env=environment, cwd="/"
        )
    try:

        def is_ready() -> bool:
            assert server.poll() is None, logged.read_text()
            return "ready: " in logged.read_text()

        wait_until(is_ready, 120, "the server to start")
        found = re.search(r"ready: (\S+)/v1", logged.read_text())
        assert found is not None
        with httpx.Client(base_url=found.group(1), timeout=60) as client:
            assert answers(client)
        server.terminate()
        assert server.wait(60) == 0, logged.read_text()
        assert "Traceback" not in logged.read_text()
    finally:
        server.kill()


def test_a_server_without_a_network_answers_on_its_socket(run: Path) -> None:
    with serving_in("", run, extra=("unshare", "--net")) as client:
        assert answers(client)


def test_a_server_of_a_user_without_a_name_and_a_home_starts_and_answers(run: Path) -> None:
    """The namespace maps no user but this one, which its passwd file does not know."""
    prelude = "mount --bind /dev/null /etc/passwd; unset HOME USER LOGNAME"
    with serving_in(prelude, run) as client:
        assert answers(client)


def test_a_second_container_on_one_runtime_folder_leaves_the_sockets_of_the_first(run: Path) -> None:
    with serving_in("", run, "--restart-engine", "0") as first:
        before = set(run.glob("*.sock"))
        assert before
        with serving_in("", run, name="second") as second:
            assert before < set(run.glob("*.sock"))
            assert answers(second)
        assert before <= set(run.glob("*.sock"))
        assert answers(first)
