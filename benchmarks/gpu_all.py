"""Runs all GPU benchmarks in one command that fits a short lease: tests first, then benchmarks by their value.

    python benchmarks/gpu_all.py --out DIR [--budget-s 540] [--only decode ...] [--resume DIR] [--wheels FOLDER]
        [--archive FILE] [--dry]
    python benchmarks/gpu_all.py --table [--out DIR]     # the README's table anew, from the JSON in DIR

Needs a checkout, and a Python with torch, triton and transformers; the package itself need not be installed, and
`--wheels FOLDER` installs other missing packages from files, without a network. Each benchmark is a program of its own
with a limit in seconds, so one that fails or hangs does not affect the others, and writes its JSON after each case.
Benchmarks that no longer fit the budget are skipped and named. `--resume DIR` copies the results of an earlier call's
DIR and runs the rest: first those that were never started, then those that failed. `--archive FILE` writes one .tar.gz
of the results and of the kernels that Triton has compiled, after each job, for a machine that starts bare each time and
returns few files; --resume accepts it in place of a folder. Only the standard library is imported here.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import PIPE
from typing import Any

from gpu_table import DRY_RUN, table, write_readme

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FOLDERS = ("core", "executor", "frontend", "ipc", "kernels")
NEEDED = ("torch", "numpy", "safetensors", "transformers", "msgspec", "zmq", "psutil", "yaml", "jinja2", "tokenizers")
ALSO = ("gguf", "xxhash", "tqdm", "uvloop", "prometheus_client", "starlette", "uvicorn", "httptools")
"""Optional packages that parts of the package import."""
OUT = "{out}"
"""Placeholder for --out in a command."""
KEPT_LINES = 1000
SHOWN_LINES = 15
LINE_CHARACTERS = 240
RECORD = "gpu_all.json"
KERNELS = "triton"
"""The folder in --out for Triton's compiled kernels, where there is an archive."""
MOST_PACKED_BYTES = 14 << 20
"""Size of an archive from which on no kernel is added: a file larger than 16 MiB may not be returned at all."""
ALL_SKIPPED = re.compile(r"=+ \d+ skipped")
"""The last line of a pytest run in which nothing passed, which must be reported first."""
LAST_S = 8.0
"""Time kept back for the table, and for ending jobs that hang."""


@dataclass(frozen=True)
class Job:
    name: str
    file: str
    """Name of the JSON file; jobs may share one."""
    command: tuple[str, ...]
    most_s: float
    least_s: float
    """With less time left the job is not started."""


@dataclass
class Outcome:
    name: str
    status: str
    seconds: float
    output: list[str]
    """The last lines of its output."""
    errors: list[str]
    """The last lines of errors of a job that failed."""


def script(name: str, file: str, most_s: float, least_s: float, *arguments: str, kind: str = "") -> Job:
    """kind: a suffix of the JSON file's name that distinguishes jobs of the same program."""
    json_file = f"{file}{kind}.json"
    command = (sys.executable, str(ROOT / "benchmarks" / f"{file}.py"), *arguments, "--out", f"{OUT}/{json_file}")
    return Job(name, json_file, command, most_s, least_s)


PYTEST = (sys.executable, "-m", "pytest", str(ROOT / "tests" / "gpu" / "test_gpu_device.py"), "-vv", "--tb=short")
TESTS = (*PYTEST, "-o", "timeout=90", "--maxfail=12", "--durations=5", "-p", "no:cacheprovider")
SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
UNCACHED = ("env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1")  # so that memory beyond a tensor is not mostly another's
MEMCHECK = (*UNCACHED, SANITIZER, "--tool", "memcheck", "--error-exitcode", "9", *TESTS, "-k", "chosen_tokens_are")
"""For the sampling kernels, which gather at computed indices."""
COMPILE = (sys.executable, str(ROOT / "benchmarks" / "gpu_compile.py"))
JOBS = (  # in order of value, after the job that saves the others compilation
    Job("compile", "", COMPILE, 80, 20),
    Job("tests", "", TESTS, 140, 30),
    script("decode", "gpu_decode", 170, 45),
    script("prefill", "gpu_prefill", 60, 25),
    script("kernels", "gpu_kernels", 140, 40, "--sweep"),
    script("greedy", "gpu_greedy", 80, 40),
    Job("memcheck", "", MEMCHECK, 60, 30),
    script("startup", "gpu_startup", 130, 70),
    script("nano", "gpu_serving", 240, 60, "--case", "nano", "--peer-seconds", "80"),  # ours is kept once both are done
    script("full", "gpu_serving", 270, 150, "--case", "full"),
    script("linear", "gpu_linear", 90, 30, "--sweep"),
    script("early", "gpu_decode", 80, 45, "--launch-early", "--weights", "bf16", "--batch", "1", kind="_early"),
    script("mixed", "gpu_decode", 80, 45, "--beside", "100000", "--weights", "bf16", "--batch", "40", kind="_mixed"),
)


def missing(names: Sequence[str]) -> list[str]:
    return [name for name in names if importlib.util.find_spec(name) is None]


def is_importable() -> bool:
    """Whether the package is installed; a folder with its name is not enough."""
    try:
        return importlib.util.find_spec("headrace.core") is not None
    except ImportError:
        return False


def environment(folder: Path, wheels: Path | None) -> dict[str, str]:
    """The jobs' environment, in which `headrace` can be imported whether it is installed or not.

    If it is not, a tree of links has each folder under its import name. Raises SystemExit where packages are missing.
    """
    paths = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    if wheels is not None:
        site, files = folder / "site", sorted(map(str, wheels.glob("*.whl")))
        if not files:
            raise SystemExit(f"--wheels {wheels} holds no .whl file; docs/benchmarks.md says how to fetch them")
        options = ("--no-index", "--no-deps", "--no-compile", "--upgrade", "--quiet", "--target", str(site))
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *files], check=True)
        sys.path.insert(0, str(site))
        paths.insert(0, str(site))
    if absent := missing(NEEDED):
        raise SystemExit(
            f"missing here: {', '.join(absent)}; bring their wheels in a folder and name it with --wheels "
            "(docs/benchmarks.md says how to fetch them)"
        )
    if absent := missing(ALSO):
        print(f"also missing, and perhaps not needed: {', '.join(absent)}")
    if not is_importable():
        paths.insert(0, str(link_tree(folder / "tree")))
    fixed = {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TRITON_STORE_BINARY_ONLY": "1"}
    fixed |= {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0"}  # some images set it, which makes float32 inexact
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **fixed}


LINKED_VERSION = "0.1.0.dev0"
"""Of a checkout that is not installed, as setup.py names it without git."""


def link_tree(tree: Path) -> Path:
    """Imitates an installation: links under the import names, and the metadata with the version."""
    package, about = tree / "headrace", tree / f"headrace-{LINKED_VERSION}.dist-info"
    for made in (package, about):
        made.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: headrace\nVersion: {LINKED_VERSION}\n")
    for file in (ROOT / "headrace").glob("*.*"):
        (package / file.name).symlink_to(file)
    for name in FOLDERS:
        (package / name).symlink_to(ROOT / name)
    return tree


def check_gpu(variables: dict[str, str], most_s: float) -> None:
    """Raises SystemExit without a usable GPU, after a child has reported why: torch is not imported here."""
    command = [sys.executable, "-c", "import gpu_common; gpu_common.device_of(False, 'cuda')"]
    try:
        found = subprocess.run(command, env=variables, cwd=ROOT / "benchmarks", timeout=most_s, check=False)
    except subprocess.TimeoutExpired:
        raise SystemExit(f"torch did not say within {most_s:.0f} s whether there is a GPU") from None
    if found.returncode:
        raise SystemExit(1)


def check_folders(arguments: argparse.Namespace) -> None:
    """Raises SystemExit where --resume is not an earlier call's, or it or --out is of the other kind of run.

    A dry run's record must neither be taken for a real one's nor overwrite it.
    """
    if arguments.resume is not None and not (arguments.resume / RECORD).exists():
        raise SystemExit(f"--resume {arguments.resume} holds no {RECORD}; name the --out of an earlier call")
    kinds = ("a real run", "a dry run")
    for folder in (arguments.resume, arguments.out):
        if folder is None or not (folder / RECORD).exists():
            continue
        was_dry = json.loads((folder / RECORD).read_text()).get("dry", False)
        if was_dry != arguments.dry:
            raise SystemExit(f"{folder}: that is {kinds[was_dry]}; {kinds[arguments.dry]} needs another folder")


def unpacked(resume: Path, folder: Path) -> Path:
    """The folder with the files of --resume, unpacked into `folder` if it is an archive. Raises SystemExit."""
    if not resume.is_file():
        return resume
    try:
        with tarfile.open(resume) as archive:
            archive.extractall(folder, filter="data")
    except (tarfile.TarError, OSError, EOFError) as error:
        raise SystemExit(f"--resume {resume} is neither a folder nor a .tar.gz of --archive: {error}") from None
    if not (folder / RECORD).exists():
        raise SystemExit(f"--resume {resume} holds no {RECORD}; name the --archive of an earlier call")
    return folder


def pack(out: Path, file: Path) -> None:
    """Packs results and compiled kernels of --out into one file; if interrupted, the previous file stays.

    Kernels are small (some 20 KB each), and the oldest are packed first; those for which there is no room will be
    compiled again.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f"{file.name}.part")
    kernels = sorted((out / KERNELS).glob("*"), key=lambda path: path.stat().st_mtime)
    with beside.open("wb") as packed, tarfile.open(fileobj=packed, mode="w:gz", compresslevel=6) as archive:
        for each in [*sorted(out.glob("gpu_*.json")), *kernels]:
            if each.suffix != ".json" and packed.tell() > MOST_PACKED_BYTES:
                print("the archive has no room for all kernels; the next call compiles the rest", flush=True)
                break
            archive.add(each, str(each.relative_to(out)))
    beside.replace(file)


def run(job: Job, arguments: argparse.Namespace, variables: dict[str, str], most_s: float) -> Outcome:
    """Runs a job. Passes its output on line by line, and its errors only if it fails."""
    command = [part.replace(OUT, str(arguments.out)) for part in job.command]
    command += ["--dry"] if arguments.dry and job.file else []
    began_s, shown = time.monotonic(), deque[str](maxlen=KEPT_LINES)
    with tempfile.TemporaryFile("w+") as log:
        child = subprocess.Popen(
            command, stdout=PIPE, stderr=log, text=True, env=variables, cwd=arguments.out, start_new_session=True
        )
        reader = threading.Thread(target=pass_on, args=(child.stdout, shown), daemon=True)
        reader.start()
        try:
            code = child.wait(most_s)
            status = f"ended with status {code}"
        except subprocess.TimeoutExpired:
            status = f"stopped after {most_s:.0f} s"
        finally:
            end(child)
        reader.join(LAST_S / 2)  # processes that it started may hold the pipe a little longer
        if status == "ended with status 0":
            status = "skipped: every test was" if shown and ALL_SKIPPED.match(shown[-1]) else "done"
        log.seek(0)
        errors = deque((line.rstrip()[:LINE_CHARACTERS] for line in log), maxlen=KEPT_LINES)
    return Outcome(job.name, status, time.monotonic() - began_s, list(shown), [] if status == "done" else list(errors))


def pass_on(lines: Iterable[str], kept: deque[str]) -> None:
    for line in lines:
        kept.append(line.rstrip()[:LINE_CHARACTERS])
        print(kept[-1], flush=True)


def end(child: subprocess.Popen[str]) -> None:
    """Ends the process and its group; engines that it started end with their parent."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def is_done(job: Job, outcomes: list[dict[str, Any]]) -> bool:
    return any(each["name"] == job.name and each["status"] == "done" for each in outcomes)


def take_over(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The outcomes of an earlier call, whose files are copied."""
    if arguments.resume is None:
        return []
    if arguments.resume.resolve() != arguments.out.resolve():
        for file in arguments.resume.glob("gpu_*.json"):
            shutil.copy(file, arguments.out)
        if (arguments.resume / KERNELS).is_dir():
            shutil.copytree(arguments.resume / KERNELS, arguments.out / KERNELS, dirs_exist_ok=True)
    found: list[dict[str, Any]] = json.loads((arguments.out / RECORD).read_text())["jobs"]
    return found


def run_all(arguments: argparse.Namespace, variables: dict[str, str], began_s: float) -> list[dict[str, Any]]:
    outcomes = take_over(arguments)
    tried = {each["name"] for each in outcomes if each["seconds"]}
    for job in sorted(JOBS, key=lambda job: job.name in tried):
        if arguments.dry and not job.file:  # jobs without a dry run
            continue
        if (arguments.only and job.name not in arguments.only) or (not arguments.only and is_done(job, outcomes)):
            continue
        if job.file and not Path(job.command[1]).exists():
            continue
        left_s = arguments.budget_s - LAST_S - (time.monotonic() - began_s)
        if left_s < job.least_s and not arguments.dry:
            outcome = Outcome(
                job.name, f"skipped: {left_s:.0f} s were left, and it takes {job.least_s:.0f}", 0.0, [], []
            )
        else:
            print(f"=== {job.name} (at most {min(left_s, job.most_s):.0f} s)", flush=True)
            outcome = run(job, arguments, variables, min(left_s, job.most_s))
        for line in outcome.errors[-SHOWN_LINES:]:
            print(f"  | {line}")
        print(f"=== {job.name}: {outcome.status}, {outcome.seconds:.0f} s", flush=True)
        outcomes = [each for each in outcomes if each["name"] != job.name] + [asdict(outcome)]
        record = {"benchmark": "gpu_all", "dry": arguments.dry, "jobs": outcomes}
        (arguments.out / RECORD).write_text(json.dumps(record, indent=1))
        if arguments.archive is not None:
            try:
                pack(arguments.out, arguments.archive)
            except OSError as error:  # the previous archive remains, and the next one may succeed
                print(f"no archive: {error}", flush=True)
    return outcomes


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="a folder for the JSON; default benchmarks/results")
    parser.add_argument("--budget-s", type=float, default=540.0, help="seconds in all")
    parser.add_argument("--only", action="append", choices=[job.name for job in JOBS], help="repeatable")
    parser.add_argument("--resume", type=Path, help="--out or --archive of an earlier call, to do the rest")
    parser.add_argument("--archive", type=Path, help="a .tar.gz of results and compiled kernels, after each job")
    parser.add_argument("--wheels", type=Path, help="a folder of .whl files to install for this run")
    parser.add_argument("--table", action="store_true", help="run nothing: write the README's table anew")
    parser.add_argument("--dry", action="store_true", help="tiny models on the CPU, to see that the scripts work")
    arguments = parser.parse_args()
    if arguments.dry and arguments.only == ["tests"]:
        parser.error("--only tests: the tests of a GPU have no dry run")
    if arguments.archive is not None and not arguments.archive.name.endswith(".tar.gz"):
        parser.error(f"--archive {arguments.archive}: its name must end in .tar.gz")
    arguments.out = arguments.out.resolve()
    return arguments


def main() -> None:
    began_s, arguments = time.monotonic(), parse()
    if arguments.table:
        write_readme(ROOT / "README.md", arguments.out)
        return
    with tempfile.TemporaryDirectory(prefix="headrace-gpu-") as folder:
        if arguments.resume is not None:
            arguments.resume = unpacked(arguments.resume, Path(folder) / "earlier")
        check_folders(arguments)
        variables = environment(Path(folder), arguments.wheels)
        if arguments.archive is not None:
            variables["TRITON_CACHE_DIR"] = str(arguments.out / KERNELS)
        if not arguments.dry:
            check_gpu(variables, arguments.budget_s)
        arguments.out.mkdir(parents=True, exist_ok=True)
        outcomes = run_all(arguments, variables, began_s)
    print("", *(f"{each['name']:9} {each['seconds']:5.0f} s  {each['status']}" for each in outcomes), "", sep="\n")
    print(DRY_RUN if arguments.dry else table(arguments.out))
    if any(each["status"] != "done" for each in outcomes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
