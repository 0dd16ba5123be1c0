"""Compiles the C++ of this folder once for this machine, with the system's compiler, and loads it through ctypes.

A library is cached as `<cache>/kernels/cpu-<sources>-<machine>.so`. The first part of the name is a digest of sources,
flags and architecture, the second of the instruction set: the level's flags and, of native ones, the CPU. So an edited
source or a cache copied from another machine leads to a new file, never to the use of a wrong one. No compiler needs to
be asked: a library that was made before, here or in a container's image (`SHARED_CACHE`), is loaded without one. If
there is none for just this CPU and none can be compiled, one is taken whose instructions this CPU has.

    ELF file | what it was made for and by, as JSON | length of the JSON (4 bytes) | SHA-256 of all before (32 bytes)

An ELF loader ignores bytes after the sections. By the digest a truncated or damaged file is detected and rebuilt. It is
written under a temporary name and renamed, so two processes may build at once. A library is code: only one that nobody
but this user and root can have written is loaded (`ipc/process/trusted_files.py`).

    python -m headrace.kernels.cpu.build [LEVEL]        compiles all libraries into the cache, as for an image

The sources select code paths by the compiler's macros (`__AVX512BF16__`, `__ARM_FEATURE_BF16` ...). The instruction
set that they are compiled for is chosen here, at run time, from the features of the CPU. `level` asks for a lower one,
so that a capable machine can test every path.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import json
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.ipc.cache import cache_folder as users_cache
from headrace.ipc.failure import HeadraceError
from headrace.ipc.process.own_folder import temporary_folder
from headrace.ipc.process.trusted_files import (
    UntrustedFileError,
    read_trusted,
    trusted_folder,
    trusted_path,
    warn_of,
)
from headrace.kernels.cpu.units import CORE, LIBRARIES, Unit, sources
from headrace.kernels.cpu.units import units as units_of

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
SHARED_CACHE = Path("/var/cache/headrace")
"""Where a container's image or an administrator may keep libraries for all users."""
COMPILE_TIMEOUT_S = 120.0
ROOM_BYTES = 64 << 20
"""With less free space than this the cache is not used: a build that fills the disk would fail, which leaves only the
slow reference."""
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

# Instruction-set levels: the compiler's flags, and the features that /proc/cpuinfo must list.
LEVELS: dict[str, dict[str, tuple[tuple[str, ...], frozenset[str]]]] = {
    "x86_64": {
        "native": (("-march=native",), frozenset()),
        "avx512": (
            ("-march=x86-64-v3", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mtune=native"),
            frozenset({"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq"}),
        ),
        "avx2": (("-march=x86-64-v3", "-mtune=native"), frozenset({"avx2", "fma", "f16c", "bmi2"})),
        "portable": ((), frozenset()),
    },
    "aarch64": {
        "native": (("-mcpu=native",), frozenset()),
        "portable": ((), frozenset()),
    },
}


class BuildError(Exception):
    """The reason why a library could not be built, in a sentence for the user."""


@dataclass(frozen=True)
class Library:
    """A loaded library: its functions are attributes of `dll`."""

    dll: ctypes.CDLL
    level: str
    path: str
    """The file that it was loaded from; already deleted if the cache could not be used."""
    compiled: bool
    """Whether this call compiled it; False if it came from the cache."""


@functools.cache
def attempt(level: str = "native", folder: Path = FOLDER, part: str = CORE) -> Library | str:
    """The library, or the reason why it cannot be built; tried once per process, with one warning if it fails."""
    try:
        return build(level, folder, part)
    except BuildError as error:
        logger.warning("The CPU kernels are not used, the torch reference is: %s", error)
        return str(error)


def load(level: str = "native", part: str = CORE) -> Library | None:
    """This process's library for an instruction-set level, or None, with one warning, if it cannot be built."""
    found = attempt(level, FOLDER, part)
    return found if isinstance(found, Library) else None


def why_not(level: str = "native", part: str = CORE) -> str | None:
    """The reason why `load` returns None, in a sentence; None if it returns a library."""
    found = attempt(level, FOLDER, part)
    return found if isinstance(found, str) else None


def build(level: str = "native", folder: Path = FOLDER, part: str = CORE) -> Library:
    """Finds the library of a part of the C++ files in `folder` in the caches, or compiles it, and loads it.

    Raises BuildError."""
    name = library_name(folder, level, part)
    passed_over: list[str] = []
    for place in _places():
        if found := _load(place / name, level, passed_over):
            return found
    try:
        return _build(level, folder, part, name)
    except BuildError as error:
        if level == "native" and (found := _load_other(folder, part, error, passed_over)):
            return found
        if not passed_over:
            raise
        raise BuildError(f"{error} What is in the cache does not fit: {'; '.join(passed_over)}.") from None


def _build(level: str, folder: Path, part: str, name: str) -> Library:
    compiler, units = find_compiler(), units_of(folder, part)
    flags = ("-I", str(folder), "-I", str(FOLDER), *_level_flags(level))
    made_for = {"level": level, "features": sorted(_needed_features(level)), "compiler": _compiler_version(compiler)}
    cache = cache_folder()
    if cache is not None and _has_room(cache):
        path = cache / name
        with _lock(path.with_suffix(".lock")):
            found = _load(path, level, [])  # another process may have built it while we waited
            if found is None:
                _compile(units, compiler, flags, path, made_for)
        return found or Library(_open(path), level, str(path), compiled=True)
    where = _kernels_of_user() or "a home folder, as there is none (HEADRACE_CACHE names another)"
    logger.warning("The CPU kernels are compiled at every start: nothing can be kept in %s.", where)
    # No usable cache: the private folder is deleted once the file is mapped.
    try:
        private = tempfile.TemporaryDirectory(prefix="headrace-kernels-", dir=temporary_folder())
    except OSError as error:
        raise BuildError(f"there is no folder to compile the CPU kernels in: {error}") from error
    with private:
        try:
            path = trusted_folder(private.name) / name
        except OSError as error:
            raise BuildError(f"there is no folder to compile the CPU kernels in: {error}") from error
        _compile(units, compiler, flags, path, made_for)
        return Library(_open(path), level, str(path), compiled=True)


def _load(path: Path, level: str, passed_over: list[str]) -> Library | None:
    """The library at a path, if it is whole and may be believed. The reason why not is added to `passed_over`."""
    try:
        if _content(path) is None:
            passed_over.append(f"{path} is damaged")
            return None
        library = Library(_open(path), level, str(path), compiled=False)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UntrustedFileError as error:
        warn_of(str(error), f"The CPU kernels in {path.parent} are not loaded.")
        passed_over.append(str(error))
        return None
    except (OSError, BuildError) as error:  # of another system's C library, for example
        passed_over.append(f"{path}: {error}")
        return None
    logger.info("The CPU kernels of %s are loaded.", path)
    return library


def _load_other(folder: Path, part: str, why: BuildError, passed_over: list[str]) -> Library | None:
    """A library of the same sources that was compiled for other CPUs, if this one has all the features that it needs;
    of several the one that uses most."""
    candidates = []
    for place in _places():
        for path in sorted(place.glob(f"cpu-{_sources_key(folder, part)}-*.so")):
            try:
                made_for = _content(path)
            except OSError:
                continue  # `_load` says why, of the one that is looked for
            if made_for is None or (made_for["level"] == "native" and not made_for["features"]):
                continue  # damaged, or nobody knows for which CPUs
            if missing := sorted(set(made_for["features"]) - cpu_features()):
                passed_over.append(f"{path} needs {', '.join(missing[:5])}{' ...' if missing[5:] else ''}")
            else:
                candidates.append((len(made_for["features"]), path))
    for _, path in sorted(candidates, reverse=True):
        if library := _load(path, "native", passed_over):
            logger.warning("The CPU kernels are those of %s, not for just this CPU, as %s", path, why)
            return library
    return None


def cache_folder() -> Path | None:
    """The `kernels` folder of the user's cache, or None if it cannot be written or others may write there."""
    folder = _kernels_of_user()
    if folder is None:
        return None
    try:
        folder = trusted_folder(folder)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except UntrustedFileError as error:
        warn_of(str(error), "The CPU kernels are compiled for this process alone; HEADRACE_CACHE names another folder.")
        return None
    except OSError:
        return None


def _kernels_of_user() -> Path | None:
    """None where there is neither a home nor another folder of the user."""
    try:
        return users_cache() / "kernels"
    except HeadraceError:
        return None


def _places() -> list[Path]:
    """The folders in which libraries may be, writable or not."""
    own = _kernels_of_user()
    return [*([own] if own is not None else []), SHARED_CACHE / "kernels"]


def _has_room(folder: Path) -> bool:
    """Whether there is free space for a build, its intermediate files included."""
    try:
        return shutil.disk_usage(folder).free >= ROOM_BYTES
    except OSError:
        return True


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


def cpu_features() -> frozenset[str]:
    """This CPU's features as /proc/cpuinfo names them; empty where there is no such file."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def cpu_model() -> str:
    """The lines of /proc/cpuinfo that, besides the features, determine what `-march=native` means."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    wanted = {"vendor_id", "cpu family", "model", "stepping", "CPU implementer", "CPU part", "CPU variant"}
    first_cpu = text.split("\n\n", 1)[0].splitlines()
    return "\n".join(line for line in first_cpu if line.partition(":")[0].strip() in wanted)


def library_name(folder: Path, level: str, part: str = CORE) -> str:
    """The name of a library's file. Raises BuildError for a level that this CPU lacks, and if there are no sources."""
    digest = hashlib.sha256()
    cpu = (*sorted(cpu_features()), cpu_model()) if level == "native" else ()
    for word in (*_level_flags(level), *cpu):
        digest.update(word.encode() + b"\0")
    return f"cpu-{_sources_key(folder, part)}-{digest.hexdigest()[:16]}.so"


def _sources_key(folder: Path, part: str) -> str:
    """A digest of what libraries of one part and architecture share: sources and flags."""
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


def _needed_features(level: str) -> frozenset[str]:
    """What a CPU must have to run a library that is compiled here for a level."""
    if level == "native":
        return cpu_features()
    return LEVELS[platform.machine()][level][1] if platform.machine() in LEVELS else frozenset()


def _level_flags(level: str) -> tuple[str, ...]:
    levels = LEVELS.get(platform.machine(), {"native": ((), frozenset()), "portable": ((), frozenset())})
    if level not in levels:
        raise BuildError(f"instruction-set level {level!r} is unknown here; there are {', '.join(levels)}.")
    flags, needed = levels[level]
    missing = needed - cpu_features()
    if missing:
        raise BuildError(f"this CPU lacks {', '.join(sorted(missing))}, which level {level!r} needs.")
    return flags


def _compiler_version(compiler: tuple[str, ...]) -> str:
    return _run([*compiler, "--version"], "asking for its version")


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


def _compile(
    units: list[Unit], compiler: tuple[str, ...], flags: tuple[str, ...], target: Path, made_for: dict[str, Any]
) -> None:
    """Compiles all units in parallel, links them, appends what the file was made for and the checksum, and renames the
    file to its final name."""
    _sweep(target.parent)
    try:
        with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as scratch:
            alone = [unit for unit in units if unit.alone]
            small = [unit for unit in units if not unit.alone]
            jobs = [(unit.name.replace("/", "_"), [unit]) for unit in alone]  # longest first
            jobs += [("small", small)] if small else []
            objects = [os.path.join(scratch, f"{name}.o") for name, _ in jobs]

            def compile_units(name: str, together: list[Unit], output: str) -> None:
                source = Path(scratch) / f"{name}.cpp"
                source.write_text("".join(unit.text for unit in together), encoding="utf-8")
                level = ("-O3",) if any(unit.unrolled for unit in together) else ()
                doing = f"compiling {', '.join(unit.name for unit in together)}"
                _run([*compiler, *BASE_FLAGS, *level, *flags, "-c", str(source), "-o", output], doing)

            compiling = [
                _compilers(os.getpid()).submit(compile_units, *job, output)
                for job, output in zip(jobs, objects, strict=True)
            ]
            wait(compiling)  # none may still write when an error deletes the folder
            for done in compiling:
                done.result()
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


def _sweep(folder: Path) -> None:
    """Removes the folders of builds that were killed. A running compiler writes its next file sooner than the age
    checked here."""
    for leftover in folder.glob(".build-*"):
        with suppress(OSError):
            if time.time() - leftover.stat().st_mtime > 2 * COMPILE_TIMEOUT_S:
                shutil.rmtree(leftover, ignore_errors=True)


def _content(path: Path) -> dict[str, Any] | None:
    """What a library was made for; None if the file is damaged. Raises OSError, and UntrustedFileError if others can
    have written it."""
    content = read_trusted(path)
    if len(content) <= 36 or hashlib.sha256(content[:-32]).digest() != content[-32:]:
        return None
    length = int.from_bytes(content[-36:-32], "little")
    made_for: dict[str, Any] = json.loads(content[-36 - length : -36])
    return made_for


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(trusted_path(path)))
    except OSError as error:
        raise BuildError(f"the library {path} could not be loaded: {error}") from error


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Admits one builder at a time if the file system has locks. The system releases the lock if its holder dies."""
    with ExitStack() as stack:
        with suppress(OSError):
            file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            stack.callback(os.close, file)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> int:
    level = sys.argv[1] if sys.argv[1:] else "native"
    for part in LIBRARIES:
        try:
            print(build(level, FOLDER, part).path)
        except BuildError as error:
            sys.stderr.write(f"{error}\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
