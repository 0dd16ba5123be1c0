"""Finds the compiled C++ of this folder for this machine, or compiles it once, and loads it through ctypes.

A library that is compiled here is cached under a name with digests of the sources, flags and CPU (`compiler.py`), so an
edited source or a cache copied from another machine leads to a new file, never to the use of a wrong one. A wheel
contains the libraries for several levels of instruction sets, in `prebuilt/`. What is loaded is the first of

    what was compiled for just this CPU, here or in a container's image (`SHARED_CACHE`)
    of the wheel's libraries the one with most of this CPU's instructions
    what the compiler makes of the sources now; a clone has only these
    a library that was compiled for another CPU, whose instructions this one has

and without any the torch reference computes, with a warning. It is written under a temporary name and renamed, so two
processes may build at once. A library is code: of a cache, only one that nobody but this user and root can have written
is loaded (`ipc/process/trusted_files.py`).

    python -m headrace.kernels.cpu.build [LEVEL]        compiles all libraries into the cache, as for an image

The sources select code paths by the compiler's macros (`__AVX512BF16__`, `__ARM_FEATURE_BF16` ...). `level` asks for
other instruction sets than this CPU's, so that a capable machine can test every path.
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
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.ipc.cache import cache_folder as users_cache
from headrace.ipc.failure import HeadraceError
from headrace.ipc.process.own_folder import temporary_folder
from headrace.ipc.process.trusted_files import UntrustedFileError, read_trusted, trusted_folder, trusted_path, warn_of
from headrace.kernels.cpu.compiler import (
    FOLDER,
    BuildError,
    Level,
    compile_library,
    file_name,
    find_compiler,
    levels,
    sources_key,
)
from headrace.kernels.cpu.units import CORE, LIBRARIES

logger = logging.getLogger(__name__)

SHARED_CACHE = Path("/var/cache/headrace")
"""Where a container's image or an administrator may keep libraries for all users."""
ROOM_BYTES = 64 << 20
"""With less free space than this the cache is not used: a build that fills the disk would fail, which leaves only the
slow reference."""
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA = 158, 0x1023, 18
PREBUILT = "prebuilt"
"""The folder, beside the sources, of the libraries that a wheel contains."""


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
    if found := _load_compiled(level, folder, part, name, passed_over):
        return found
    try:
        return _build(level, folder, part, name)
    except BuildError as error:
        if level == "native" and (found := _load_fitting(_places(), folder, part, passed_over)):
            logger.warning("The CPU kernels are those of %s, not for just this CPU, as %s", found.path, error)
            return found
        if not passed_over:
            raise
        raise BuildError(f"{error} What is there does not fit: {'; '.join(passed_over)}.") from None


def find(level: str = "native", folder: Path = FOLDER, part: str = CORE) -> Library | None:
    """As `build`, but None where something would have to be compiled."""
    return _load_compiled(level, folder, part, library_name(folder, level, part), [])


def _load_compiled(level: str, folder: Path, part: str, name: str, passed_over: list[str]) -> Library | None:
    for place in (*_places(), folder / PREBUILT):
        if found := _load(place / name, level, passed_over):
            return found
    return _load_fitting([folder / PREBUILT], folder, part, []) if level == "native" else None


def _build(level: str, folder: Path, part: str, name: str) -> Library:
    find_compiler()  # before anything is made
    features = cpu_features() if level == "native" else _level(level).features
    cache = cache_folder()
    if cache is not None and _has_room(cache):
        path = cache / name
        with _lock(path.with_suffix(".lock")):
            found = _load(path, level, [])  # another process may have built it while we waited
            if found is None:
                compile_library(folder, part, level, path, features)
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
        compile_library(folder, part, level, path, features)
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


def _load_fitting(places: Iterable[Path], folder: Path, part: str, passed_over: list[str]) -> Library | None:
    """A library of the same sources that was compiled for other CPUs, if this one has all the features that it needs;
    of several the one that uses most."""
    candidates = []
    for place in places:
        for path in sorted(place.glob(f"cpu-{sources_key(folder, part)}-*.so")):
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
    loaded = (_load(path, "native", passed_over) for _, path in sorted(candidates, reverse=True))
    return next((library for library in loaded if library), None)


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


def cpu_features() -> frozenset[str]:
    """This CPU's features as /proc/cpuinfo names them, of which this process may use all; empty without such a file."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            features = frozenset(value.split())
            return features if _may_use_tiles() else features - {each for each in features if each.startswith("amx_")}
    return frozenset()


@functools.cache
def _may_use_tiles() -> bool:
    """Asks Linux for the tile registers of AMX, which a process may use from then on, with all of its threads."""
    if platform.machine() != "x86_64":
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA) == 0


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
    cpu = (*sorted(cpu_features()), cpu_model()) if level == "native" else ()
    return file_name(sources_key(folder, part), _level(level), cpu)


def _level(name: str) -> Level:
    """Raises BuildError for a level that this CPU lacks."""
    if name not in levels():
        raise BuildError(f"instruction-set level {name!r} is unknown here; there are {', '.join(levels())}.")
    level = levels()[name]
    if missing := level.features - cpu_features():
        raise BuildError(f"this CPU lacks {', '.join(sorted(missing))}, which level {name!r} needs.")
    return level


def _content(path: Path) -> dict[str, Any] | None:
    """What a library was made for; None if the file is damaged. Raises OSError, and UntrustedFileError if others can
    have written it."""
    content = path.read_bytes() if _is_installed(path) else read_trusted(path)
    if len(content) <= 36 or hashlib.sha256(content[:-32]).digest() != content[-32:]:
        return None
    length = int.from_bytes(content[-36:-32], "little")
    made_for: dict[str, Any] = json.loads(content[-36 - length : -36])
    return made_for


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path if _is_installed(path) else trusted_path(path)))
    except OSError as error:
        raise BuildError(f"the library {path} could not be loaded: {error}") from error


def _is_installed(path: Path) -> bool:
    """Whether a library is a wheel's: whoever can write there can change this module, too."""
    return path.parent == FOLDER / PREBUILT


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
