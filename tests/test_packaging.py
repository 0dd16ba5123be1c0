"""The wheel and the installs: every package is listed, resolves under its import name, and the client stays thin."""

from __future__ import annotations

import configparser
import itertools
import re
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
FOLDERS = ("core", "executor", "frontend", "ipc", "kernels")
NOT_IN_A_CLIENT = {"torch", "numpy", "transformers", "triton", "safetensors", "gguf"}


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def package_files() -> dict[str, str]:
    """Where each tracked file of a package must be in the wheel, by its place in the repository."""
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "headrace", *FOLDERS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    endings = (".py", ".cpp", ".h", ".toml", "py.typed")
    kept = [name for name in tracked if name.endswith(endings) and (ROOT / name).is_file()]
    return {name: name if name.startswith("headrace/") else f"headrace/{name}" for name in kept}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built once, from a copy so that the working tree gets no build outputs."""
    folder = tmp_path_factory.mktemp("packaging")
    source = folder / "source"
    for name in (*package_files(), "pyproject.toml", "README.md"):
        copy = source / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--wheel-dir", str(folder), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_every_folder_with_python_files_is_a_listed_package() -> None:
    folders = {Path(name).parent for name in package_files().values() if name.endswith(".py")}
    listed = project()["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(".".join(folder.parts) for folder in folders)


def test_the_wheel_holds_every_file_of_every_package_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == set(package_files().values())


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
        version = pins[requirement.name.lower().replace("_", "-")]
        assert requirement.specifier.contains(version), f"{requirement} does not allow {version}, which is tested"


def test_no_text_tells_anybody_to_install_headrace_from_an_index_where_the_name_is_not_ours() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    texts = [name for name in tracked if name.endswith((".py", ".md", ".toml", ".yaml")) and (ROOT / name).is_file()]
    told = re.compile(r"pip install [-\w \"']*headrace\b(?!\.whl)")
    found = [name for name in texts if told.search((ROOT / name).read_text(encoding="utf-8"))]
    assert found == []
