"""Programs of ours import nothing from the folder that they happen to be started in, and a user's modules from where
the user's own program would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from http_server import Server, serving
from tiny_models import save

from headrace.ipc.process import program

NULL = ("--distributed-executor-backend", "headrace.executor.testing.null:NullExecutor", "--skip-tokenizer-init")
STRANGERS = (
    *("random", "secrets", "torch", "numpy", "msgspec", "zmq", "llguidance", "uvloop", "headrace", "pip", "json"),
    *("jinja2", "tokenizers", "uvicorn", "starlette", "httptools", "psutil", "yaml", "sitecustomize", "usercustomize"),
)
"""Modules that our programs import, and those that Python does by itself."""
NULL_LLM = """
import sys
from headrace import LLM, SamplingParams
options = {"distributed_executor_backend": sys.argv[1], "skip_tokenizer_init": True}
with LLM("null", **options) as llm:
    (output,) = llm.generate([{"prompt_token_ids": [5]}], SamplingParams(max_tokens=2), use_tqdm=False)
    print(len(output.outputs[0].token_ids), "tokens")
"""
MINE = """
from headrace.executor.testing.null import NullExecutor

class Mine(NullExecutor):
    pass
"""


@pytest.fixture
def strangers(tmp_path: Path) -> Path:
    """A folder with modules under the names of those that our programs import. Each leaves a mark and fails."""
    folder = tmp_path / "strangers"
    folder.mkdir()
    for name in STRANGERS:
        (folder / f"{name}.py").write_text(f"open(__file__ + '.ran', 'w').close()\nraise SystemExit('{name} ran')\n")
    return folder


def ran(strangers: Path) -> list[str]:
    return [path.name for path in strangers.glob("*.ran")]


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300, check=False
    )


def installed(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def test_a_script_of_another_folder_imports_nothing_from_the_current_one(strangers: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(NULL_LLM)
    done = run(sys.executable, str(script), NULL[1], cwd=strangers)
    assert (done.stdout, done.returncode) == ("2 tokens\n", 0), done.stderr
    assert ran(strangers) == []


def test_a_module_beside_the_script_that_hides_one_of_pythons_is_named(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("X = 1\n")
    script = tmp_path / "script.py"
    script.write_text("from headrace import LLM\n")
    failed = run(sys.executable, str(script), cwd=tmp_path)
    assert "ImportError: headrace.LLM cannot be imported: module 'json' has no attribute" in failed.stderr


def test_an_empty_entry_of_a_path_is_not_the_current_folder(strangers: Path, tmp_path: Path) -> None:
    """`PYTHONPATH=$PYTHONPATH:/mine` leaves one where the variable was not set."""
    script = tmp_path / "script.py"
    added = "os.environ['PYTHONPATH'] = ':' + os.environ['PYTHONPATH'] + ':'"
    script.write_text(f"import os\n{added}\n{NULL_LLM}")
    done = run(sys.executable, str(script), NULL[1], cwd=strangers, PYTHONPATH=str(tmp_path))
    assert (done.stdout, done.returncode) == ("2 tokens\n", 0), done.stderr
    assert ran(strangers) == []


@pytest.mark.parametrize("name", program.SEARCHED)
def test_programs_are_given_paths_without_empty_entries(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, ":/usr/bin::/bin:")
    assert program.child_environment()[name] == program.own_environment()[name] == "/usr/bin:/bin"
    monkeypatch.delenv(name)
    assert name not in program.own_environment()


def test_commands_import_nothing_from_the_current_folder(strangers: Path) -> None:
    null = ("null", *NULL)
    for command in (
        (installed("headrace"), "bench", "latency", "--model", *null, "--num-iters", "1", "--num-iters-warmup", "0"),
        (sys.executable, "-m", "headrace", "options"),
    ):
        environment = {} if command[0] != sys.executable else {"PYTHONSAFEPATH": "1"}
        done = run(*command, cwd=strangers, **environment)
        assert done.returncode == 0, done.stderr
        assert ran(strangers) == [], command


@pytest.mark.system
def test_no_process_of_a_server_imports_from_the_current_folder(
    strangers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HTTP processes, engines, their coordinator, and the helper that renders templates."""
    monkeypatch.chdir(strangers)
    monkeypatch.setattr(Server, "program", (installed("headrace"),))
    with serving("-dp", "2", "--api-server-count", "2") as server, server.client() as client:
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
        assert client.post("/v1/chat/completions", json=chat).status_code == 200
    assert ran(strangers) == []


def test_the_command_runs_beside_a_folder_with_the_packages_name(tmp_path: Path) -> None:
    """As a clone is: Python takes such a folder for a package without content."""
    (tmp_path / "headrace" / "core").mkdir(parents=True)
    done = run(sys.executable, "-m", "headrace", "version", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("headrace ")


def test_workers_and_a_grammars_trial_import_nothing_from_the_current_folder(strangers: Path, tmp_path: Path) -> None:
    folder = save("llama", tmp_path / "model", tokenizer=True)
    script = tmp_path / "script.py"
    script.write_text(
        "from headrace import LLM, SamplingParams\n"
        "from headrace.sampling_params import StructuredOutputsParams\n"
        f"with LLM({str(folder)!r}, tensor_parallel_size=2, max_model_len=64) as llm:\n"
        "    form = StructuredOutputsParams(regex='(a|b){3}')\n"
        "    params = SamplingParams(max_tokens=3, structured_outputs=form)\n"
        "    print(len(llm.generate(['x'], params, use_tqdm=False)))\n"
    )
    done = run(sys.executable, str(script), cwd=strangers)
    assert (done.stdout, done.returncode) == ("1\n", 0), done.stderr
    assert ran(strangers) == []


def test_an_isolated_interpreters_engine_is_isolated_too(strangers: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(NULL_LLM)
    done = run(sys.executable, "-I", str(script), NULL[1], cwd=tmp_path, PYTHONPATH=str(strangers))
    assert (done.stdout, done.returncode) == ("2 tokens\n", 0), done.stderr
    assert ran(strangers) == []


def test_a_class_that_an_option_names_is_found_beside_the_users_script(strangers: Path, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "mine.py").write_text(MINE)
    (folder / "script.py").write_text(NULL_LLM)
    done = run(sys.executable, str(folder / "script.py"), "mine:Mine", cwd=strangers)
    assert (done.stdout, done.returncode) == ("2 tokens\n", 0), done.stderr
    assert ran(strangers) == []


def test_a_class_is_not_loaded_from_a_folder_in_which_everybody_may_write(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "mine.py").write_text(MINE)
    (folder / "script.py").write_text(NULL_LLM)
    folder.chmod(0o777)
    done = run(sys.executable, str(folder / "script.py"), "mine:Mine", cwd=tmp_path)
    assert done.returncode == 1
    assert f"not looked for in {folder}: everybody may write there" in done.stderr


def test_an_engine_starts_where_the_current_folder_has_been_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    script = tmp_path / "script.py"
    script.write_text(f"import os\nos.rmdir({str(folder)!r})\n{NULL_LLM}")
    done = run(sys.executable, str(script), NULL[1], cwd=folder)
    assert (done.stdout, done.returncode) == ("2 tokens\n", 0), done.stderr
