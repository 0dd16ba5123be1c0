"""Other people's programs and libraries, as installed from PyPI, on a tiny model: each runs unchanged.

    python benchmarks/programs/run_programs.py [--work DIR] [--only NAME ...] [--out FILE]

Each of the scripts beside this one runs under `headrace.as_vllm` in an environment of its own below DIR (a temporary
folder unless one is given, in which case environments are kept), with Headrace installed from this tree, and gets the
model's folder and the address of a server. Writes versions, seconds and the last lines of what failed. Exit status 1
when one fails. Needs PyPI.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE.parent), str(ROOT / "tests" / "support")]

import tiny_models  # noqa: E402
from http_overhead import free_port, wait_ready  # noqa: E402
from report import write_report  # noqa: E402

PROGRAMS = {
    "notebook": ("nbclient", "ipykernel", "ipywidgets"),
    "outlines": ("outlines", "openai"),
    "ray_data": ("ray[data]", "pandas", "pyarrow", "datasets"),
    "dspy": ("dspy",),
    "trl": ("trl",),
    "web": ("flask", "django", "celery", "gunicorn"),
}
RUN_S = 900.0
CONTEXT_TOKENS = 2048


def environment(folder: Path, packages: tuple[str, ...]) -> Path:
    """The Python of an environment with the packages, and with Headrace as this tree has it."""
    python = folder / "bin" / "python"
    steps = [["--no-deps", "--force-reinstall", str(ROOT)]]
    if not python.exists():
        venv.create(folder, with_pip=True)
        steps = [["torch==2.13.0"], [f"{ROOT}[engine]"], [*packages, "psutil", "pytest"]]
    for wanted in steps:
        subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True)
    return python


@contextlib.contextmanager
def served(python: Path, model: Path, log: Path) -> Iterator[str]:
    port = free_port()
    command = [python, "-m", "headrace", "serve", model, "--served-model-name", "tiny", "--dtype", "float32"]
    command += ["--max-model-len", str(CONTEXT_TOKENS), "--port", str(port)]
    command += ["--hf-overrides.max_position_embeddings", str(CONTEXT_TOKENS)]
    with log.open("w") as output:
        server = subprocess.Popen(list(map(str, command)), stdout=output, stderr=subprocess.STDOUT, cwd=model)
    try:
        wait_ready(server, f"http://127.0.0.1:{port}", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(60)


def run(name: str, python: Path, model: Path) -> dict[str, Any]:
    frozen = subprocess.run([python, "-m", "pip", "freeze"], capture_output=True, text=True, check=True).stdout
    named = {each.partition("[")[0].lower() for each in PROGRAMS[name]}
    versions = dict(line.split("==") for line in frozen.splitlines() if line.partition("==")[0].lower() in named)
    with served(python, model, model.with_suffix(".log")) as url:
        began = time.monotonic()
        command = [python, "-m", "headrace.as_vllm", HERE / f"{name}_program.py", model, url]
        arguments = list(map(str, command))  # run elsewhere, since this tree has a folder headrace
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=RUN_S, check=False, cwd=model)
    found = {"passed": done.returncode == 0, "seconds": round(time.monotonic() - began, 1), "versions": versions}
    return found if found["passed"] else {**found, "said": (done.stdout + done.stderr)[-2000:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "programs.json")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = (asked.work or Path(temporary)).resolve()
        model = tiny_models.save("llama", Path(temporary) / "model", tokenizer=True)
        results = {name: run(name, environment(work / name, PROGRAMS[name]), model) for name in asked.only}
    for name, found in results.items():
        print(f"{name}: {'passed' if found['passed'] else 'FAILED'} in {found['seconds']} s, {found['versions']}")
    write_report(asked.out, "programs", results)
    sys.exit(not all(found["passed"] for found in results.values()))


if __name__ == "__main__":
    main()
