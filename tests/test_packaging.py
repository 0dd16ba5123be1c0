"""The wheel and the installs: every package is in it, resolves under its import name, and the client stays thin."""

from __future__ import annotations

import configparser
import itertools
import json
import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
from dependency_versions import TESTS, small_dependencies
from packaging.requirements import Requirement

import headrace
from headrace.frontend.vllm.stubs import FOLDER, stubs

ROOT = Path(__file__).parents[1]
FOLDERS = ("core", "executor", "frontend", "ipc", "kernels")
MOVED_PROGRAM = ROOT / "tests" / "support" / "moved_program.py"
NOT_IN_A_CLIENT = {"torch", "numpy", "transformers", "triton", "safetensors", "gguf"}


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def package_files() -> dict[str, str]:
    """Where each tracked file of a package must be in the wheel, by its place in the repository."""
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "headrace", "headrace-stubs", *FOLDERS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    endings = (".py", ".pyi", ".cpp", ".h", ".toml", "py.typed")
    kept = [name for name in tracked if name.endswith(endings) and (ROOT / name).is_file()]
    return {name: name if name.startswith(("headrace/", "headrace-stubs/")) else f"headrace/{name}" for name in kept}


def copy_of_sources(folder: Path) -> None:
    for name in (*package_files(), "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md"):
        copy = folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / name).read_bytes())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built once, from a copy so that the working tree gets no build outputs."""
    folder = tmp_path_factory.mktemp("packaging")
    source = folder / "source"
    copy_of_sources(source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--wheel-dir", str(folder), str(source)]
    environment = {**os.environ, "HEADRACE_WHEEL_KERNELS": "none"}
    built = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    assert path.name.endswith("-py3-none-any.whl"), "it has no compiled code"
    return path


def test_the_wheel_holds_every_file_of_every_package_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == set(package_files().values())


def test_the_wheel_says_under_which_licence_it_may_be_used(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (licence,) = [name for name in archive.namelist() if name.endswith("/licenses/LICENSE")]
        assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        assert Parser().parsestr(archive.read(metadata).decode())["License-Expression"] == "Apache-2.0"


def version_of(folder: Path, **environment: str) -> str:
    (folder / "setup.py").write_bytes((ROOT / "setup.py").read_bytes())
    command = [sys.executable, "setup.py", "--version"]
    given = os.environ | environment
    return subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, check=True).stdout.split()[-1]


def test_the_version_is_that_of_the_last_tag_and_there_is_one_without_any(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = [
            "-c",
            "user.name=a",
            "-c",
            "user.email=a@b",
            "-c",
            "commit.gpgsign=false",
            "-c",
            "tag.gpgsign=false",
        ]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, capture_output=True, check=True)

    assert version_of(tmp_path) == "0.1.0.dev0"
    assert version_of(tmp_path, HEADRACE_VERSION="1.2.3") == "1.2.3", "an image is built without the git folder"
    git("init")
    git("commit", "--allow-empty", "-m", "one")
    assert re.fullmatch(r"0\.1\.0\.dev1\+g[0-9a-f]+", version_of(tmp_path))
    git("tag", "v0.1.0")
    git("tag", "nightly")
    assert version_of(tmp_path) == "0.1.0"
    git("commit", "--allow-empty", "-m", "two")
    assert re.fullmatch(r"0\.1\.1\.dev1\+g[0-9a-f]+", version_of(tmp_path))
    git("tag", "v1.0rc1")
    assert version_of(tmp_path) == "1.0rc1"
    git("commit", "--allow-empty", "-m", "three")
    assert re.fullmatch(r"1\.0rc2\.dev1\+g[0-9a-f]+", version_of(tmp_path))
    (tmp_path / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: headrace\nVersion: 3.2.1\n")
    assert version_of(tmp_path) == "3.2.1"


def test_import_names_resolve_from_the_unpacked_wheel(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import headrace, headrace.ipc.messages;"
        "import headrace.core.schedule.scheduler;"
        "import importlib.util;"
        "names = ['headrace', 'headrace.core.schedule.scheduler', "
        "'headrace.executor.models.families', 'headrace.kernels.cpu'];"
        "print(*(importlib.util.find_spec(name).origin for name in names))"
    )
    # -I -S: no current folder and no site-packages, where the editable install would answer for us.
    paths = [str(Path(module.__file__ or "").parents[1]) for module in map(__import__, ("msgspec", "zmq", "numpy"))]
    start = f"import sys; sys.path[:0] = {paths}; "
    result = subprocess.run(
        [sys.executable, "-I", "-S", "-c", start + code, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    expected = [
        "__init__.py",
        "core/schedule/scheduler.py",
        "executor/models/families/__init__.py",
        "kernels/cpu/__init__.py",
    ]
    assert result.stdout.split() == [str(tmp_path / "headrace" / name) for name in expected]


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment in which the wheel is installed, for type checkers to look at."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    zipfile.ZipFile(wheel).extractall(packages)
    (packages / "others.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    return folder / "bin" / "python"


WRONG = """\
from headrace import LLM, SamplingParams
from headrace.engine.arg_utils import EngineArgs, NoSuchName  # wrong
from headrace.outputs import ScoringOutput

LLM("m", max_num_seqs=4, enable_lora=False, swap_space=8, kv_cache_memory=1 << 30)
LLM("m", max_num_sequences=4)  # wrong
LLM("m", max_num_seqs="many")  # wrong
EngineArgs("m", enable_lora="yes")  # wrong
SamplingParams(temprature=1.0)  # wrong
ScoringOutput("high", 1, 2, 3)  # wrong
LLM("m").generate("a")[0].outputs[0].txt  # wrong
"""


def wrong_lines() -> set[int]:
    return {number for number, line in enumerate(WRONG.splitlines(), 1) if line.endswith("# wrong")}


@pytest.mark.system
def test_mypy_resolves_the_modules_of_a_moved_program_and_checks_its_calls(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--cache-dir", str(tmp_path / "cache")]
    command += ["--python-executable", str(installed), str(MOVED_PROGRAM), str(tmp_path / "wrong.py")]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=550, check=False, cwd=tmp_path)
    found = re.findall(r"^(\S+?):(\d+): error", checked.stdout, re.MULTILINE)
    assert {(Path(file).name, int(line)) for file, line in found} == {("wrong.py", line) for line in wrong_lines()}, (
        checked.stdout + checked.stderr
    )


@pytest.fixture(scope="module")
def pyright(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program of Node's: its package on PyPI fetches both."""
    folder = tmp_path_factory.mktemp("pyright")
    venv.create(folder, with_pip=True)
    subprocess.run([folder / "bin" / "pip", "install", "--quiet", "pyright[nodejs]"], check=True, timeout=200)
    return folder / "bin" / "pyright"


@pytest.mark.system
def test_pyright_resolves_the_modules_of_a_moved_program_and_checks_its_calls(
    pyright: Path, installed: Path, tmp_path: Path
) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    (tmp_path / "moved.py").write_bytes(MOVED_PROGRAM.read_bytes())
    examples = [path for path in (ROOT / "examples").glob("*.py") if path.name != "tools.py"]  # it is OpenAI's types
    for path in examples:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"strict": ["*.py"], "include": ["*.py"]}))
    command = [pyright, "--outputjson", "--pythonpath", str(installed)]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=550, check=False, cwd=tmp_path)
    report = json.loads(checked.stdout)
    assert report["summary"]["filesAnalyzed"] == len(examples) + 2
    found = [each for each in report["generalDiagnostics"] if each["severity"] == "error"]
    lines = {(Path(each["file"]).name, each["range"]["start"]["line"] + 1) for each in found}
    assert lines == {("wrong.py", line) for line in wrong_lines()}, checked.stdout


PUBLIC = re.compile(r"headrace\.(\w+|frontend\.(api|request)\.\S+|ipc\.failure\.\S+)")
"""What the package gives, and the modules that define it."""


@pytest.mark.system
def test_every_type_of_the_public_names_is_known_to_pyright(pyright: Path, installed: Path, tmp_path: Path) -> None:
    command = [pyright, "--verifytypes", "headrace", "--ignoreexternal", "--outputjson"]
    there = {**os.environ, "VIRTUAL_ENV": str(installed.parents[1])}
    there["PATH"] = f"{installed.parent}{os.pathsep}{there['PATH']}"
    done = subprocess.run(command, cwd=tmp_path, env=there, capture_output=True, text=True, timeout=550, check=False)
    symbols = [
        each for each in json.loads(done.stdout)["typeCompleteness"]["symbols"] if PUBLIC.fullmatch(each["name"])
    ]
    told = {name for name in headrace.__all__ if not name.startswith("__")}  # pyright 1.1.414 lists no others
    assert {f"headrace.{name}" for name in told} <= {each["name"] for each in symbols}
    # What pyright infers, as the type of an attribute, is known; "ambiguous" says that other checkers may differ.
    unknown = [each for each in symbols if not each["isTypeKnown"] and not each["isTypeAmbiguous"]]
    assert [(each["name"], [why["message"] for why in each["diagnostics"]]) for each in unknown] == []


def test_the_generated_stubs_are_up_to_date() -> None:
    found = {str(path.relative_to(FOLDER)): path.read_text() for path in FOLDER.rglob("*") if path.is_file()}
    assert found == stubs(), "run make docs"


def test_the_commands_are_declared_and_can_be_found(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (entry,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    parser = configparser.ConfigParser()
    parser.read_string(archive.read(entry).decode())
    commands = dict(parser["console_scripts"])
    assert commands == {
        "headrace": "headrace.programs:headrace",
        "engine-core": "headrace.programs:engine_core",
    }
    for target in commands.values():
        module, _, function = target.partition(":")
        assert f"\ndef {function}(" in archive.read(module.replace(".", "/") + ".py").decode()


def test_the_base_install_is_the_client_alone(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
    fields = Parser().parsestr(archive.read(metadata).decode())
    required = [Requirement(text) for text in fields.get_all("Requires-Dist", [])]
    base = {r.name for r in required if r.marker is None or r.marker.evaluate({"extra": ""})}
    engine = {r.name for r in required if r.marker is not None and r.marker.evaluate({"extra": "engine"})}
    assert not base & NOT_IN_A_CLIENT
    assert engine >= NOT_IN_A_CLIENT - {"triton"}
    assert "triton" not in engine, "torch's builds for CUDA bring theirs, and a CPU needs none"
    assert {"torch"} <= {r.name for r in required if r.name == "torch" and "2.11" in r.specifier}


def test_ranges_hold_what_is_pinned_and_every_dependency_is_pinned() -> None:
    pins = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            pin = Requirement(line)
            ((_, version),) = [(spec.operator, spec.version) for spec in pin.specifier]
            pins[pin.name.lower().replace("_", "-")] = version
    settings = project()["project"]
    declared = [*settings["dependencies"], *itertools.chain(*settings["optional-dependencies"].values())]
    for requirement in map(Requirement, declared):
        if requirement.name == "headrace":  # an extra made of others
            assert requirement.extras <= settings["optional-dependencies"].keys()
            continue
        version = pins[requirement.name.lower().replace("_", "-")]
        assert requirement.specifier.contains(version), f"{requirement} does not allow {version}, which is tested"


def test_each_small_dependency_has_tests_for_its_lowest_and_highest_version() -> None:
    assert {each.name for each in small_dependencies()} == set(TESTS)
    assert [name for names in TESTS.values() for name in names if not (ROOT / "tests" / name).is_file()] == []


def test_no_text_tells_anybody_to_install_headrace_from_an_index_where_the_name_is_not_ours() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    texts = [name for name in tracked if name.endswith((".py", ".md", ".toml", ".yaml")) and (ROOT / name).is_file()]
    told = re.compile(r"pip install [-\w \"']*headrace\b(?!\.whl|\[\w+\] @ )")
    found = [name for name in texts if told.search((ROOT / name).read_text(encoding="utf-8"))]
    assert found == []
