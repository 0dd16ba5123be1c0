"""Compiles the C++ of a folder into one library file, with the system's compiler, for a level of instruction sets.

    ELF file | what it was made for and by, as JSON | length of the JSON (4 bytes) | SHA-256 of all before (32 bytes)

An ELF loader ignores bytes after the sections; by the digest a truncated or damaged file is detected. A file is called
`cpu-<sources>-<machine>.so`: a digest of sources, flags and architecture, and one of the level's flags and, of native
libraries, the CPU.

    python -m headrace.kernels.cpu.compiler FOLDER [KEPT]      compiles the libraries that a wheel contains

KEPT is a folder for the libraries from build to build: what it has is not compiled again.

Imports nothing that a build of the package would have to install.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from headrace.kernels.cpu.units import LIBRARIES, Unit, sources
from headrace.kernels.cpu.units import units as units_of

FOLDER = Path(__file__).parent
COMPILE_TIMEOUT_S = 600.0
"""Enough on a machine that much else keeps busy, too."""
EXIT_NO_COMPILER = 3
WHILE_PARENT_LIVES = """
exec 3<&0 </dev/null
(read -r nothing <&3; kill -s KILL 0) >/dev/null 2>&1 &
watcher=$!
"$@" 3<&-
status=$?
kill -s KILL $watcher
exit $status
"""
"""Runs a command in a process group that is killed when the pipe at its stdin closes. Without it the processes of a
compiler would outlive a killed parent by many seconds."""
BASE_FLAGS = (
    "-std=c++17", "-O2", "-fPIC", "-fno-exceptions", "-fno-rtti", "-fno-math-errno", "-fno-trapping-math",
    "-fno-plt", "-fvisibility=hidden", "-pthread",
)  # fmt: skip
LINK_FLAGS = ("-shared", "-pthread", "-Wl,-z,defs")


class BuildError(Exception):
    """The reason why a library could not be built, in a sentence for the user."""


@dataclass(frozen=True)
class Level:
    """Instruction sets that the sources are compiled for."""

    flags: tuple[str, ...] = ()
    features: frozenset[str] = frozenset()
    """What /proc/cpuinfo must list; of the native level, what this CPU has."""
    in_wheels: bool = False


def _level(beyond: Level, flags: str, features: str) -> Level:
    return Level((*beyond.flags, *flags.split()), beyond.features | set(features.split()), in_wheels=True)


_AVX2 = _level(Level(), "-march=x86-64-v3", "abm avx avx2 bmi1 bmi2 f16c fma movbe")
_AVX512 = _level(_AVX2, "-mavx512f -mavx512bw -mavx512vl -mavx512dq", "avx512f avx512bw avx512vl avx512dq")  # Skylake
_AVX512_VNNI = _level(_AVX512, "-mavx512vnni", "avx512_vnni")  # Cascade Lake, Ice Lake
_AVX512_BF16 = _level(_AVX512_VNNI, "-mavx512vbmi -mavx512bf16", "avx512vbmi avx512_bf16")  # Zen 4, Cooper Lake
_AMX = _level(_AVX512_BF16, "-mamx-tile -mamx-bf16 -mamx-int8", "amx_tile amx_bf16 amx_int8")  # Sapphire Rapids
_LEVELS = {
    "x86_64": {
        "native": Level(("-march=native",)),
        "amx": _AMX,
        "avx512_bf16": _AVX512_BF16,
        "avx512_vnni": _AVX512_VNNI,
        "avx512": _AVX512,
        "avx2": _AVX2,
        "portable": Level(),
    },
    "aarch64": {"native": Level(("-mcpu=native",)), "portable": Level()},
}


def levels() -> dict[str, Level]:
    """The levels of this architecture by name."""
    return _LEVELS.get(platform.machine(), {"native": Level(), "portable": Level()})


def find_compiler() -> tuple[str, ...]:
    """The compiler's command: `$CXX` if set, else the first that exists of g++, clang++, c++. Raises BuildError."""
    asked = os.environ.get("CXX")
    if asked:
        try:
            command = tuple(shlex.split(asked))
        except ValueError as error:
            raise BuildError(f"CXX={asked!r} is not a command line: {error}.") from error
        if not command or shutil.which(command[0]) is None:
            raise BuildError(f"CXX={asked!r} was not found; set CXX to a C++17 compiler or unset it.")
        return command
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name):
            return (name,)
    raise BuildError("no C++ compiler was found; install g++ or clang++ (or set CXX) to get the fast CPU kernels.")


def file_name(sources_key: str, level: Level, cpu: Sequence[str] = ()) -> str:
    """The name of a library's file. cpu: what the native level depends on."""
    digest = hashlib.sha256()
    for word in (*level.flags, *cpu):
        digest.update(word.encode() + b"\0")
    return f"cpu-{sources_key}-{digest.hexdigest()[:16]}.so"


def sources_key(folder: Path, part: str) -> str:
    """A digest of what libraries of one part and architecture share: sources and flags. Raises BuildError if there are
    no sources."""
    digest = hashlib.sha256()
    files = [(folder, path) for path in sources(folder)]
    if not files:
        raise BuildError(f"no C++ sources in {folder}; the installation is incomplete.")
    if folder != FOLDER:  # another package's kernels include our headers
        files += [(FOLDER, path) for path in sources(FOLDER) if path.suffix == ".h"]
    for base, path in files:
        name = path.relative_to(base).as_posix()
        digest.update(name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    texts = [unit.text for unit in units_of(folder, part)]
    for words in ((part, platform.machine()), texts, BASE_FLAGS, LINK_FLAGS):
        digest.update("\0".join(words).encode() + b"\1")
    return digest.hexdigest()[:24]


def compile_library(folder: Path, part: str, level: str, target: Path, features: frozenset[str]) -> None:
    """Compiles a part of the C++ in `folder` in parallel, links it, appends what the file was made for and the
    checksum, and renames the file to its final name. Raises BuildError.

    features: what a CPU must have to run it.
    """
    compiler = find_compiler()
    made_for = {
        "level": level,
        "features": sorted(features),
        "compiler": _run([*compiler, "--version"], "asking for its version"),
    }
    _sweep(target.parent)
    try:
        with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as scratch:
            flags = (*BASE_FLAGS, "-I", str(folder), "-I", str(FOLDER), *levels()[level].flags)
            if "amx_bf16" not in features:  # the system may not permit what the CPU has
                flags = (*flags, "-DHEADRACE_NO_AMX")
            objects = _compile_units(units_of(folder, part), [*compiler, *flags], Path(scratch))
            linked = os.path.join(scratch, "linked.so")
            _run([*compiler, *LINK_FLAGS, *objects, "-o", linked], "linking")
            with open(linked, "r+b") as file:
                code, made = file.read(), json.dumps(made_for).encode()
                tail = made + len(made).to_bytes(4, "little")
                file.write(tail + hashlib.sha256(code + tail).digest())
                file.flush()
                os.fchmod(file.fileno(), 0o644)  # whatever the umask: nobody else may write what we load
                os.fsync(file.fileno())
            os.replace(linked, target)
    except OSError as error:
        raise BuildError(f"the library could not be written to {target.parent}: {error}") from error


def _compile_units(units: list[Unit], command: list[str], scratch: Path) -> list[str]:
    """Returns the object files."""
    small = [unit for unit in units if not unit.alone]
    jobs = [(unit.name.replace("/", "_"), [unit]) for unit in units if unit.alone]  # longest first
    jobs += [("small", small)] if small else []
    objects = [str(scratch / f"{name}.o") for name, _ in jobs]

    def compile_together(name: str, together: list[Unit], output: str) -> None:
        source = scratch / f"{name}.cpp"
        source.write_text("".join(unit.text for unit in together), encoding="utf-8")
        optimised = ("-O3",) if any(unit.unrolled for unit in together) else ()
        doing = f"compiling {', '.join(unit.name for unit in together)}"
        _run([*command, *optimised, "-c", str(source), "-o", output], doing)

    compiling = [
        _compilers(os.getpid()).submit(compile_together, *job, output)
        for job, output in zip(jobs, objects, strict=True)
    ]
    wait(compiling)  # none may still write when an error deletes the folder
    for done in compiling:
        done.result()
    return objects


def _run(command: list[str], doing: str) -> str:
    read_end, write_end = os.pipe()
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", WHILE_PARENT_LIVES, "sh", *command],
            stdin=read_end,
            start_new_session=True,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMPILE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the C++ compiler {command[0]} failed at {doing}: {error}") from error
    finally:
        os.close(write_end)
        os.close(read_end)
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines()
        first = next((line for line in lines if "error" in line.lower()), lines[0] if lines else "it said nothing")
        raise BuildError(f"the C++ compiler {command[0]} failed at {doing} (status {done.returncode}): {first}")
    return done.stdout


@functools.cache
def _compilers(pid: int) -> ThreadPoolExecutor:
    """The threads that wait for compilers, one per core for all libraries together; jobs run in order of submission.

    Keyed by the process, since a forked child inherits none of the threads.
    """
    return ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0)))


def _sweep(folder: Path) -> None:
    """Removes the folders of builds that were killed. A running compiler writes its next file sooner than the age
    checked here."""
    for leftover in folder.glob(".build-*"):
        with suppress(OSError):
            if time.time() - leftover.stat().st_mtime > 2 * COMPILE_TIMEOUT_S:
                shutil.rmtree(leftover, ignore_errors=True)


def for_wheels() -> dict[str, tuple[str, str]]:
    """The libraries that a wheel contains, by file name: each one's level and part."""
    return {
        file_name(sources_key(FOLDER, part), level): (name, part)
        for name, level in levels().items()
        if level.in_wheels
        for part in LIBRARIES
    }


def compile_for_wheel(names: Sequence[str], folder: Path) -> None:
    """Compiles these of `for_wheels` into a folder, which is not among the sources. Raises BuildError."""
    wanted = for_wheels()
    with ThreadPoolExecutor(max_workers=len(names) or 1) as builds:
        started = []
        for name in names:
            level, part = wanted[name]
            features = levels()[level].features
            started.append(builds.submit(compile_library, FOLDER, part, level, folder / name, features))
        for done in started:
            done.result()


def main() -> int:
    target, kept = Path(sys.argv[1]), Path(sys.argv[-1])
    for folder in (target, kept):
        folder.mkdir(parents=True, exist_ok=True)
    names = list(for_wheels())
    if missing := [name for name in names if not (kept / name).exists()]:
        try:
            find_compiler()
        except BuildError as error:
            print(error, file=sys.stderr)
            return EXIT_NO_COMPILER
        compile_for_wheel(missing, kept)
    for name in names if kept != target else ():
        shutil.copyfile(kept / name, target / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
