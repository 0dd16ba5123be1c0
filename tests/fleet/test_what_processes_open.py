"""Every kind of process and placement: what it listens on, which files it makes and for whom, and that no secret is in
the arguments or environment of the processes that it starts."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from socket import create_server, inet_aton

import psutil
import pytest
import tiny_models
from http_server import HERE, null_engine_arguments

pytestmark = pytest.mark.system

SECRET = "sk-OnlyTheUserKnowsThis"
CLUSTER_SECRET = "TheClustersOwnKey-0123456789abcdef"
NULL = null_engine_arguments()
ENGINE = ("-m", "headrace.core.process.daemon")
SERVE = ("-m", "headrace", "serve")
READY = r"ready: \S+/v1"
HELD = "import sys; print('ready', flush=True); sys.stdin.read()"
OWN = f"from headrace import LLM\nif __name__ == '__main__':\n    llm = LLM({{model!r}}, {{options}})\n    {HELD}\n"
COORDINATOR = (
    "from headrace.core.process.child import start_coordinator\n"
    f"coordinator = start_coordinator()\ncoordinator.wait_ready(100)\n{HELD}"
)
START_TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Case:
    """Commands that are started one after the other, each when the one before is there."""

    commands: tuple[tuple[str, ...], ...]
    ready: tuple[str, ...]
    """What each prints when it is there."""
    has_port: bool = False
    """Whether a TCP port was asked for, on loopback."""
    environment: tuple[tuple[str, str], ...] = ()
    has_ports: bool = False
    """Whether it listens at ports of its own, on loopback too: ranks that meet through gloo and torch's store."""
    has_ray: bool = False
    """Whether it starts a Ray, whose processes and library listen everywhere, behind Ray's token (docs/security.md);
    engines listen at their host's own address then."""
    writes: Path | None = None
    """Where `ready` stands, if the command does not print it."""


def script(options: str, model: str = "null") -> tuple[str, ...]:
    return ("-c", OWN.format(model=model, options=options))


def batch(folder: Path) -> Case:
    """A batch file whose first line ends at once and whose second one goes on for minutes."""
    bodies = ({"model": "null", "prompt": [5], "max_tokens": number, "ignore_eos": True} for number in (1, 30_000))
    lines = (
        json.dumps({"custom_id": f"line-{at}", "method": "POST", "url": "/v1/completions", "body": body})
        for at, body in enumerate(bodies)
    )
    (folder / "in.jsonl").write_text("\n".join(lines))
    results = folder / "made" / "out.jsonl"
    slow = null_engine_arguments(step_delay_s=0.02)
    command = ("-m", "headrace", "run-batch", "-i", str(folder / "in.jsonl"), "-o", str(results), "--as-completed")
    return Case(((*command, "--model", *slow),), ("line-0",), writes=results)


def cases(folder: Path, port: int) -> dict[str, Case]:
    keys, web = str(folder / "api.keys"), ("--host", "127.0.0.1", "--port", str(port))
    serve = (*SERVE, *NULL, *web, "--api-key-file", keys)
    small = ("--max-model-len", "64", "--kv-cache-memory-bytes", "2097152", "--dtype", "float32")
    ranks = (*SERVE, "MODEL", *web, "--api-key-file", keys, "-tp", "2", *small)
    null = "distributed_executor_backend='null_with_tokenizer:TokenizingNullExecutor'"
    nodes = ("--model=MODEL", "--nnodes=2", f"--master-port={port}", "-tp=2", *small)
    engine = (*ENGINE, "--model", "null", *NULL[1:])
    made = folder / "made"
    stores = ("--response-store", str(made / "responses.sqlite"), "--file-store", str(made / "files"))
    return {
        "an engine in the program": Case((script(f"in_process=True, {null}"),), ("ready",)),
        "a program's own engine": Case((script(null),), ("ready",)),
        "serve": Case((serve,), (READY,), True),
        "serve with several HTTP processes": Case(((*serve, "--api-server-count", "2"),), (READY,), True),
        "serve -dp 2": Case(((*serve, "-dp", "2"),), (READY,), True),
        "serve -tp 2": Case((ranks,), (READY,), True),
        "serve -tp 2 without a compiler": Case(
            (ranks,),
            (READY,),
            True,
            (("CXX", "/nonexistent"), ("HEADRACE_CACHE", str(folder / "empty"))),
            has_ports=True,
        ),
        "engine-core over ipc": Case((engine,), ("ready at ipc://",)),
        "engine-core over tcp": Case(
            ((*engine, "--address", f"tcp://127.0.0.1:{port}"),), ("ready at tcp://127.0.0.1",), True
        ),
        "run-batch": batch(folder),
        "serve with stores": Case(((*serve, *stores),), (READY,), True),
        "engine-core -tp 2 under Ray": Case(
            ((*ENGINE, "--model=MODEL", "-tp=2", "--distributed-executor-backend=ray", *small),),
            ("ready at ipc://",),
            has_ray=True,
        ),
        "serve -dp 2 under Ray": Case(
            ((*serve, "-dp", "2", "--data-parallel-backend", "ray"),), (READY,), True, has_ray=True
        ),
        "coordinator": Case((("-c", COORDINATOR),), ("ready",)),
        "two nodes": Case(
            ((*ENGINE, *nodes, "--node-rank=0", "--master-addr=127.0.0.1"), (*ENGINE, *nodes, "--node-rank=1")),
            ("", "ready at ipc://"),
            True,
            (("HEADRACE_CLUSTER_KEY", CLUSTER_SECRET),),
            has_ports=True,
        ),
    }


with tempfile.TemporaryDirectory() as nowhere:
    NAMES = tuple(cases(Path(nowhere), 0))


def free_port() -> int:
    with create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


@contextmanager
def running(case: Case, environment: dict[str, str], logs: Path) -> Iterator[list[psutil.Process]]:
    """All processes of a case, the commands' own first."""
    with ExitStack() as stack:
        started = []
        for number, command in enumerate(case.commands):
            log = stack.enter_context(open(logs / f"log-{number}", "w+b"))
            process = subprocess.Popen(
                [sys.executable, *command], env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log
            )
            stack.callback(end, process)
            started.append((process, log))
        for (process, log), pattern in zip(started, reversed(case.ready), strict=True):
            wait_for(process, case.writes or Path(log.name), pattern, Path(log.name))
        own = [psutil.Process(process.pid) for process, _ in started]
        yield own + [child for each in own for child in each.children(recursive=True)]


def wait_for(process: subprocess.Popen[bytes], where: Path, pattern: str, log: Path) -> None:
    end_s = time.monotonic() + START_TIMEOUT_S
    while not (where.exists() and re.search(pattern, where.read_text(errors="replace"))):
        assert process.poll() is None, log.read_text(errors="replace")
        assert time.monotonic() < end_s, f"no {pattern!r}: {log.read_text(errors='replace')}"
        time.sleep(0.1)


def end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def sockets_of(process: psutil.Process) -> set[str]:
    """The inodes of a process's sockets."""
    found = set()
    for name in os.listdir(f"/proc/{process.pid}/fd"):
        try:
            target = os.readlink(f"/proc/{process.pid}/fd/{name}")
        except OSError:  # just closed
            continue
        found.add(target.removeprefix("socket:[").removesuffix("]"))
    return found


def listening(processes: list[psutil.Process]) -> tuple[set[str], set[str]]:
    """The addresses of TCP sockets that listen, as /proc has them (hexadecimal, with the port), and the names of
    listening Unix sockets."""
    inodes = set().union(*map(sockets_of, processes))
    tcp, unix = set(), set()
    for file in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{file}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                tcp.add(words[1])
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if int(words[3], 16) & 0x10000 and words[6] in inodes:  # __SO_ACCEPTCON
            unix.add(words[7] if words[7:] else "")
    return tcp, unix


LOOPBACK = "0100007F"


def own_address() -> str:
    """The address by which Ray calls this host, as /proc has it."""
    from ray.util import get_node_ip_address

    return bytes(reversed(inet_aton(get_node_ip_address()))).hex().upper()


def has_rays_library(process: psutil.Process) -> bool:
    """Ray's own processes, and those of ours that talk to it."""
    name = process.name()
    return name in ("raylet", "gcs_server") or "/site-packages/ray/" in Path(f"/proc/{process.pid}/maps").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_nothing_listens_beyond_what_was_asked_and_no_secret_or_file_is_open(
    name: str, tmp_path: Path, cache: Path
) -> None:
    with tempfile.TemporaryDirectory(prefix="hr-") as short:
        check(name, Path(short), tmp_path, cache)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder of these cases' own, so that the first of them fills it."""
    return tmp_path_factory.mktemp("cache")


def check(name: str, folder: Path, logs: Path, cache: Path) -> None:
    port = free_port()
    case = cases(folder, port)[name]
    (folder / "api.keys").write_text(SECRET + "\n")
    (folder / "api.keys").chmod(0o600)
    if any("MODEL" in word for command in case.commands for word in command):
        tiny_models.save("llama", logs / "model", tokenizer=True)
        named = [tuple(word.replace("MODEL", str(logs / "model")) for word in command) for command in case.commands]
        case = replace(case, commands=tuple(named))
    for each in ("run", "tmp"):
        (folder / each).mkdir(mode=0o700)
    for each in ("made", "home"):
        (folder / each).mkdir(mode=0o755)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])),
        "HEADRACE_RUNTIME_DIR": str(folder / "run"),
        "TMPDIR": str(folder / "tmp"),
        "HEADRACE_CACHE": str(cache),
        "OMP_NUM_THREADS": "1",
        **({"HOME": str(folder / "home")} if case.has_ray else {}),
        **dict(case.environment),
    }
    memory_before, mask = set(os.listdir("/dev/shm")), os.umask(0)  # modes are ours, not the umask's
    try:
        with running(case, environment, logs) as processes:
            with_ray = [each for each in processes if has_rays_library(each)]
            assert bool(with_ray) == case.has_ray
            own = [each for each in processes if each not in with_ray]
            tcp, unix = listening(own)
            hosts = {each.partition(":")[0] for each in tcp}
            assert hosts <= ({LOOPBACK, own_address()} if case.has_ray else {LOOPBACK}), "beyond what was asked"
            ports = {int(each.partition(":")[2], 16) for each in tcp}
            asked = {port} if case.has_port else set()
            assert ports == asked or (case.has_ports and asked < ports) or case.has_ray
            for path in unix:
                assert path.startswith((f"{folder}/", "@headrace", "@")), path
            if case.has_ray:
                assert stat.S_IMODE((folder / "home" / ".ray" / "auth_token").stat().st_mode) == 0o600
            else:
                assert not set(os.listdir("/dev/shm")) - memory_before, "shared memory has no names"
            roots = [folder / each for each in ("run", "tmp", "made")]
            private = [
                each for root in roots for each in open_to_others(root, 0o077) if f"{folder}/tmp/ray/" not in each
            ]
            assert not private + list(open_to_others(cache, 0o022)), "what is cached may be read, and not written"
            assert not [told for process in processes[len(case.commands) :] for told in secrets_told(process)]
    finally:
        os.umask(mask)


def open_to_others(root: Path, mask: int) -> Iterator[str]:
    """The files below a folder that another user could use in one of the mask's ways, if all above were open; sockets
    are behind their folder, which only this user enters."""
    for path in (root, *root.rglob("*")):
        try:
            status = path.lstat()
        except OSError:  # just removed
            continue
        mode = stat.S_IMODE(status.st_mode)
        if status.st_uid != os.geteuid():
            yield f"{path} belongs to {status.st_uid}"
        if stat.S_ISREG(status.st_mode) and mode & mask and is_open(path.parent, root):
            yield f"{path} has mode {mode:04o}"


def is_open(folder: Path, root: Path) -> bool:
    """Whether others can enter a folder, with all folders below the root."""
    above = [each for each in (folder, *folder.parents) if each.is_relative_to(root) and each != root]
    return all(each.stat().st_mode & 0o011 for each in above)


def secrets_told(process: psutil.Process) -> Iterator[str]:
    """Secrets in a child's arguments, or in its environment beyond what the user put there: a key from a file."""
    for file in ("cmdline", "environ"):
        try:
            content = Path(f"/proc/{process.pid}/{file}").read_text(errors="replace")
        except OSError:  # it has just ended
            continue
        told = [SECRET] + ([CLUSTER_SECRET] if file == "cmdline" else [])
        if any(secret in content for secret in told):
            yield f"{file} of {process.pid}: {content[:200]!r}"
