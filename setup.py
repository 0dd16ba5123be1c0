"""What pyproject.toml cannot say: the version, which is git's tag, the packages, which are the folders with Python
files, and the compiled kernels of a wheel.

A wheel contains the CPU kernels for each level of instruction sets (`kernels/cpu/compiler.py`), so it is for one
platform; and for all versions of Python, since the kernels are plain C++ that ctypes loads. Without a compiler, or with
HEADRACE_WHEEL_KERNELS=none, it contains only their sources, which are compiled on first use, and is for all platforms.
HEADRACE_WHEEL_KERNELS=FOLDER keeps compiled kernels in a folder, from which later builds of the same kernels take them.
An editable install compiles nothing.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from email.parser import Parser
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError

ROOT = Path(__file__).parent
FIRST_VERSION = "0.1.0"
PREBUILT = Path("headrace", "kernels", "cpu", "prebuilt")
NO_COMPILER = 3
"""The status of the compiling program where there is none."""


def version() -> str:
    """1.2.3 at the tag v1.2.3, and 1.2.4.dev5+gabc five commits later. Without git 0.1.0.dev0.

    Not setuptools-scm's: an install without network has no build isolation, and would need it beside setuptools.
    HEADRACE_VERSION is for trees that have lost their git folder, as in the build of an image.
    """
    if given := os.environ.get("HEADRACE_VERSION"):
        return given
    unpacked = ROOT / "PKG-INFO"  # of an sdist
    if unpacked.exists():
        return str(Parser().parsestr(unpacked.read_text(encoding="utf-8"))["Version"])
    if (ROOT / ".git").exists():  # not of a repository that contains a copy of ours
        described = re.fullmatch(r"v(.+)-(\d+)-(g\w+)", git("describe", "--tags", "--long", "--match", "v[0-9]*"))
        if described:
            tag, distance, commit = described.groups()
            return tag if distance == "0" else f"{following(tag)}.dev{distance}+{commit}"
        if count := git("rev-list", "--count", "HEAD"):
            return f"{FIRST_VERSION}.dev{count}+g{git('rev-parse', '--short', 'HEAD')}"
    return f"{FIRST_VERSION}.dev0"


def following(tag: str) -> str:
    """1.2.4 after 1.2.3, and 2.0rc2 after 2.0rc1."""
    return re.sub(r"\d+$", lambda last: str(int(last[0]) + 1), tag)


def git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


class BuildWithKernels(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        folder = Path(self.build_lib) / PREBUILT
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier build in the same tree
        kept = os.environ.get("HEADRACE_WHEEL_KERNELS")
        if kept == "none":
            return
        with tempfile.TemporaryDirectory() as compiled:
            command = [sys.executable, "-P", "-m", "headrace.kernels.cpu.compiler", compiled]
            command += [os.path.abspath(kept)] if kept else []
            done = subprocess.run(command, env={**os.environ, "PYTHONPATH": self.build_lib}, check=False)
            if done.returncode == NO_COMPILER:
                self.warn("the wheel contains no compiled kernels: they are compiled on first use")
            elif done.returncode:
                raise CompileError("the kernels were not compiled; HEADRACE_WHEEL_KERNELS=none leaves them out")
            else:
                shutil.copytree(compiled, folder)


class PlatformWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        """Called once everything is built."""
        libraries = list((Path(self.bdist_dir) / PREBUILT).glob("*.so"))
        if not libraries:
            return super().get_tag()
        self.root_is_pure = False
        _, _, platform = super().get_tag()
        # PEP 600's name follows from the versions of the C library's symbols, as they need little of the C++ library's.
        needed = [int(minor) for path in libraries for minor in re.findall(rb"GLIBC_2\.(\d+)", path.read_bytes())]
        return "py3", "none", platform.replace("linux_", f"manylinux_2_{max(needed)}_") if needed else platform


def packages() -> list[str]:
    """All folders with Python files, and the stubs of vLLM's module names, which are for type checkers."""
    found = {Path("headrace"), Path("headrace-stubs")}
    for room in ("core", "executor", "frontend", "ipc", "kernels"):
        found |= {Path("headrace") / path.parent for path in Path(room).rglob("*.py")}
    return sorted(".".join(folder.parts) for folder in found)


setup(version=version(), packages=packages(), cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel})
