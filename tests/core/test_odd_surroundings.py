"""Engines start, or say what is wrong, in the surroundings that daemons, containers and careless shells give them."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import tiny_models
from thinned import every

from headrace.core.process.daemon import EXIT_START_FAILED
from headrace.frontend.http.apis.files.store import FileStore
from headrace.ipc.cache import cache_folder
from headrace.ipc.extras import command_for, how_to_install
from headrace.ipc.failure import OptionError
from headrace.ipc.process import own_folder
from headrace.ipc.process.own_folder import OwnFolder
from headrace.ipc.process.resources import what_limits
from headrace.ipc.process.runtime_directory import AddressError, runtime_directory
from headrace.kernels.cpu import build

NULL = ("--distributed-executor-backend", "headrace.executor.testing.null:NullExecutor", "--skip-tokenizer-init")
NULL_LLM = """
import os, sys
from headrace import LLM, SamplingParams
{before}
options = {{"distributed_executor_backend": "headrace.executor.testing.null:NullExecutor", "skip_tokenizer_init": True}}
with LLM("null", **options) as llm:
    (output,) = llm.generate([{{"prompt_token_ids": [5]}}], SamplingParams(max_tokens=2), use_tqdm=False)
    with open(sys.argv[1], "w") as file:
        file.write(f"{{len(output.outputs[0].token_ids)}} tokens")
"""
WITHOUT_ENGINE = """
from importlib.machinery import PathFinder

find = PathFinder.find_spec
absent = ("numpy", "torch")
PathFinder.find_spec = classmethod(
    lambda cls, name, *where: None if name.partition(".")[0] in absent else find(name, *where)
)
"""


def installed(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, **environment}
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(
    "closed", [*(pytest.param(each, marks=pytest.mark.system) for each in ((0,), (0, 1))), (0, 1, 2)]
)
def test_an_engine_starts_where_standard_descriptors_are_closed(closed: tuple[int, ...], tmp_path: Path) -> None:
    script, out = tmp_path / "script.py", tmp_path / "out"
    script.write_text(NULL_LLM.format(before=f"for number in {closed}:\n    os.close(number)"))
    done = run(sys.executable, str(script), str(out))
    assert out.read_text() == "2 tokens", done.stderr


def test_an_engine_serves_though_its_address_cannot_be_printed() -> None:
    with Path("/dev/full").open("w") as full:
        command = [installed("engine-core"), "null", *NULL]
        with subprocess.Popen(command, stdout=full, stderr=subprocess.PIPE, text=True) as engine:
            assert engine.stderr is not None
            told = next(line for line in engine.stderr if "ready at" in line)
            assert "standard output cannot be written: no space left on device" in told
            engine.send_signal(signal.SIGTERM)
            engine.communicate(timeout=60)
    assert engine.returncode == 0


@pytest.mark.parametrize(
    "command",
    every(
        2,
        [
            ((sys.executable, "-c", "from headrace import LLM; LLM('null')"),),
            ((sys.executable, "-c", "from headrace import LLM; LLM('null', in_process=True)"),),
            ((installed("headrace"), "complete", "x"),),
            ((installed("headrace"), "serve", "null", "--port", "0"),),
            ((installed("headrace"), "save-sharded-state", "null", "-o", "x"),),
            ((installed("engine-core"), "--help"),),
        ],
    ),
    ids=["LLM", "in_process", "complete", "serve", "save-sharded-state", "engine-core"],
)
def test_the_client_alone_says_what_runs_models(command: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_ENGINE)
    done = run(*command, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "this is Headrace's client alone, without numpy" in done.stderr
    # A child that hides packages hides what they say of where Headrace came from, too.
    assert how_to_install("engine") in done.stderr or command_for("engine", {}) in done.stderr
    assert "Traceback" not in done.stderr or command[0] == sys.executable


def test_a_long_temporary_folder_leaves_room_for_sockets_elsewhere(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    script, out = tmp_path / "script.py", tmp_path / "out"
    script.write_text(NULL_LLM.format(before="del os.environ['HEADRACE_RUNTIME_DIR']"))
    done = run(sys.executable, str(script), str(out), TMPDIR=str(long), HEADRACE_RUNTIME_DIR="x")
    assert out.read_text() == "2 tokens", done.stderr


@pytest.fixture
def no_temporary_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No folder for temporary files can be written; the current folder, which is returned, can."""
    monkeypatch.delenv("HEADRACE_RUNTIME_DIR", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    monkeypatch.setattr(own_folder, "SYSTEMS_FOLDERS", ())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_without_a_temporary_folder_the_error_says_what_to_set(no_temporary_folder: Path) -> None:
    with pytest.raises(AddressError, match=r"there is no folder for sockets: set HEADRACE_RUNTIME_DIR .* or TMPDIR"):
        runtime_directory()
    with pytest.raises(OSError, match="no folder for temporary files that can be written: set TMPDIR"):
        OwnFolder("files")
    with pytest.raises(OptionError, match=r"file_store: no folder that can be used .*; file_store_bytes=0 keeps none"):
        FileStore(None, 1)
    assert list(no_temporary_folder.iterdir()) == [], "the current folder is no temporary folder"


def test_a_file_store_that_is_turned_off_needs_no_folder(no_temporary_folder: Path) -> None:
    FileStore(None, 0).close()


def test_a_runtime_directory_that_another_user_has_taken_is_left_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = tempfile.mkdtemp(dir="/tmp")
    monkeypatch.delenv("HEADRACE_RUNTIME_DIR", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(own_folder, "SYSTEMS_FOLDERS", ())
    monkeypatch.setenv("TMPDIR", short)
    monkeypatch.delenv("TEMP", raising=False)
    monkeypatch.delenv("TMP", raising=False)
    taken = Path(short) / f"headrace-{os.getuid()}"
    taken.mkdir(mode=0o777)
    taken.chmod(0o777)
    made = runtime_directory()
    assert made != taken
    assert made.parent == taken.parent
    assert made.stat().st_mode & 0o777 == 0o700
    assert runtime_directory() == made, "engines and `headrace ps` meet in it"
    shutil.rmtree(short)


def test_a_user_without_a_home_has_a_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HEADRACE_CACHE", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    monkeypatch.setenv("HEADRACE_RUNTIME_DIR", str(tmp_path / "run"))
    assert cache_folder() == tmp_path / "run" / "cache"
    assert build.cache_folder() == tmp_path / "run" / "cache" / "kernels"


CPU_ENGINE = """
import sys
from headrace import LLM
try:
    LLM(sys.argv[1], skip_tokenizer_init=True, use_tqdm_on_load=False)
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


def under(limit: str, folder: Path) -> str:
    """What the start of an engine says under a limit of the shell's."""
    command = f"ulimit {limit}; exec {sys.executable} -c '{CPU_ENGINE}' {folder}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300, check=False)
    return done.stdout + done.stderr


@pytest.mark.parametrize("limit_kib", every(3, [800_000, 500_000, 850_000]))
def test_an_address_space_that_is_too_small_for_the_libraries_is_named(limit_kib: int, tmp_path: Path) -> None:
    said = under(f"-v {limit_kib}", tiny_models.save("llama", tmp_path))
    words = (
        f"this process may have {limit_kib >> 10:,} MiB of address space (`ulimit -v`), and torch cannot be loaded in"
    )
    assert said.startswith(f"OptionStartError: {words} what is left of it")
    assert "pip install" not in said
    assert "Fatal Python error" not in said


ALONE = """
import errno, os, sys
from headrace.core.engine.engine import EngineCore
from headrace.core.process.daemon import main
def start(core, on_phase, *rest):
    on_phase("load weights", 0.0)
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
EngineCore.start = start
sys.argv = ["engine-core", sys.argv[1], "--address", sys.argv[2]]
main()
"""
"""`engine-core` on a system that refuses memory while it loads, which depends on the machine to a megabyte."""


def test_an_engine_that_runs_alone_names_the_limit_of_its_memory(tmp_path: Path) -> None:
    model = tiny_models.save("llama", tmp_path / "model")
    command = f"ulimit -v 100000000; exec {sys.executable} -c '{ALONE}' {model} ipc://{tmp_path}/core.sock"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300, check=False)
    assert done.stderr.endswith(
        "engine-core: this process may have 97,656 MiB of address space (`ulimit -v`), which does not suffice: "
        "[Errno 12] Cannot allocate memory\n  during load weights\n"
    ), done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == EXIT_START_FAILED


def test_a_limit_of_open_files_that_is_too_low_is_named(tmp_path: Path) -> None:
    said = under("-n 16", tiny_models.save("llama", tmp_path))
    assert said.startswith(
        "OptionStartError: this process may have 16 open files, which do not suffice; raise `ulimit -n`"
    )
    assert "Traceback" not in said


def test_an_engine_raises_its_limit_of_open_files_and_a_users_process_keeps_its_own(tmp_path: Path) -> None:
    folder = tiny_models.save("llama", tmp_path)
    words = "this process may have 16 open files, which do not suffice; raise `ulimit -n`"
    assert under("-Sn 16", folder) == f"OptionError: {words}\n", "of the client: the engine has started"
    assert under("-Sn 48", folder) == ""


def test_what_no_limit_has_caused_is_told_as_it_is() -> None:
    assert what_limits(MemoryError()) is None, "no limit is set"
    assert what_limits(ImportError("failed to map segment from shared object")) is None
    assert what_limits(FileNotFoundError(errno.ENOENT, "none")) is None
