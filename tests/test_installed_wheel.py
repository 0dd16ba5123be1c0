"""What `python -m build` makes, installed into bare virtual environments away from the clone."""

from __future__ import annotations

import os
import re
import subprocess
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
from test_packaging import ROOT, copy_of_sources

from headrace.ipc.cache import cache_folder
from headrace.kernels.cpu.compiler import levels
from headrace.kernels.cpu.units import LIBRARIES

pytestmark = pytest.mark.system
MOST_CLIENT_BYTES = 25_000_000
LIMIT_S = 900
NOWHERE = "http://127.0.0.1:9"


class Built(NamedTuple):
    wheel: Path
    sdist: Path


def run(command: list[str | Path], **environment: str) -> str:
    away = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        command, cwd="/", env=away | environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def new_environment(folder: Path, *packages: str | Path) -> Path:
    """The folder of the programs of a new virtual environment with these packages."""
    venv.create(folder, with_pip=True)
    if packages:
        run([folder / "bin" / "python", "-m", "pip", "install", "--quiet", *packages])
    return folder / "bin"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("built")
    copy_of_sources(folder / "source")
    programs = new_environment(folder / "environment", "build")
    # What this user's other runs have compiled; each file has its name by its sources and level.
    kernels = {"HEADRACE_WHEEL_KERNELS": str(cache_folder() / "kernels")}
    run([programs / "python", "-m", "build", "--outdir", folder / "dist", folder / "source"], **kernels)
    (wheel,) = (folder / "dist").glob("*.whl")
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    return Built(wheel, sdist)


def test_the_wheel_holds_the_kernels_for_each_level_and_says_on_which_systems_they_run(built: Built) -> None:
    archive = zipfile.ZipFile(built.wheel)
    libraries = [archive.read(name) for name in archive.namelist() if name.endswith(".so")]
    in_wheels = [name for name, level in levels().items() if level.in_wheels]
    assert len(libraries) == len(in_wheels) * len(LIBRARIES)
    for name in in_wheels:
        assert sum(f'"level": "{name}"'.encode() in each for each in libraries) == len(LIBRARIES)
    (minor,) = re.findall(r"-py3-none-manylinux_2_(\d+)_\w+\.whl$", built.wheel.name)
    needed = [int(each) for content in libraries for each in re.findall(rb"GLIBC_2\.(\d+)", content)]
    assert max(needed) <= int(minor)
    of_compiler = {each for content in libraries for each in re.findall(rb"(?:GLIBCXX|CXXABI)_[\d.]+", content)}
    assert of_compiler <= {b"GLIBCXX_3.4", b"CXXABI_1.3", b"CXXABI_1.3.11"}, "of GCC 7, which every such system has"


def test_the_sdist_holds_what_the_wheel_is_made_from(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= {"setup.py", "LICENSE", "CHANGELOG.md", "kernels/cpu/units.toml", "kernels/cpu/attention/tile.h"}
    assert not [name for name in names if name.endswith(".so")]


def test_make_image_builds_this_tree_under_its_version(tmp_path: Path) -> None:
    """Also where a new environment has a setuptools that is too old to say the version, as Python 3.11's."""
    make = ["make", "--silent", "-C", str(ROOT), "image", "TARGET=client", "BUILDER=echo"]
    printed = run([*make, f"VENV={tmp_path / 'environment'}"])
    (version,) = re.findall(r"--target client --build-arg HEADRACE_VERSION=(\S+) ", printed)
    assert f"--tag headrace:{version.replace('+', '-')}-client ." in printed


def test_constraints_fit_the_package_indexs_own_torch(tmp_path: Path) -> None:
    """Which is the build for CUDA, and asks for one version of triton. That for CPUs asks for none."""
    programs = new_environment(tmp_path / "environment")
    index = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
    run([programs / "pip", "install", "--quiet", "--upgrade", "pip"], **index)  # older ones download what they look at
    together: list[str | Path] = ["--constraint", ROOT / "constraints.txt", "torch", "triton"]
    assert "Would install" in run([programs / "pip", "install", "--dry-run", *together], **index)


def test_the_demo_runs_from_the_wheel_without_a_compiler_and_the_second_time_offline(
    built: Built, tmp_path: Path
) -> None:
    constraints = ROOT / "constraints.txt"
    pins = [line for line in constraints.read_text().splitlines() if line.startswith("torch==")]
    programs = new_environment(tmp_path / "environment", *pins, "--constraint", constraints, f"{built.wheel}[engine]")
    cache = tmp_path / "cache"
    given = {"HEADRACE_CACHE": str(cache), "CXX": "/nonexistent"}
    command: list[str | Path] = [programs / "headrace", "demo", "--max-tokens", "8"]
    assert "time to first token" in run(command, **given)
    offline = {"PIP_NO_INDEX": "1", "HF_HUB_OFFLINE": "1", "http_proxy": NOWHERE, "https_proxy": NOWHERE}
    assert "time to first token" in run(command, **given, **offline)
    assert not list(cache.rglob("*.so")), "compiled although the wheel has them"
    assert "prebuilt" in run([programs / "headrace", "doctor", "--port", "0"], **given, **offline)


def test_the_client_alone_is_a_small_download(built: Built, tmp_path: Path) -> None:
    programs = new_environment(tmp_path / "environment")
    run([programs / "pip", "download", "--quiet", "--dest", tmp_path / "downloaded", built.wheel])
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "downloaded").iterdir()}
    assert sum(sizes.values()) < MOST_CLIENT_BYTES, sizes
    run([programs / "pip", "install", "--quiet", "--no-index", *(tmp_path / "downloaded").iterdir()])
    assert "serve" in run([programs / "headrace", "--help"])
    assert "loaded" in run(
        [
            programs / "python",
            "-c",
            "import headrace, sys; headrace.AsyncLLM; assert 'numpy' not in sys.modules; print('loaded')",
        ]
    )
