"""The regression gate: compares the cost of hot paths with the previous commit, by counting instructions.

    make bench-check                       # against HEAD~1, or, with uncommitted changes, against HEAD
    python benchmarks/check.py --base REV  # against any commit

On a shared machine, times vary by more than a regression would change them; the number of executed instructions does
not. Callgrind counts the instructions of each case in this checkout and in a worktree of the other commit, both run by
this file. Each count is the difference between a long and a short run, so that imports and start-up cancel out. Cases
that callgrind cannot count (kernels, which use every core and instructions that callgrind lacks) are timed: the two
commits run alternately, and the confidence interval of their ratio decides.

It fails (status 1) when a case became slower by more than its limit.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from report import write_report

from headrace.frontend.bench.results.compare import welch
from headrace.frontend.bench.results.metrics import columns, number

ROOT = Path(__file__).parent.parent
CASES = Path("benchmarks/check_cases.py")
FOLDERS = ("core", "executor", "frontend", "ipc", "kernels")
COUNTED = ("scheduler step", "ring", "codec", "detokeniser", "answer reader", "arguments reader")
COUNT_LIMIT = 0.03
"""Counts of one commit repeat to about 0.1%, apart from the effect of string hashes, whose seed is fixed here."""
TIME_LIMIT = 0.05
ROUNDS = 7
CASE_TIMEOUT_S = 300.0


NO_OTHER_CHECKOUT = """\
import sys
sys.meta_path[:] = [each for each in sys.meta_path if not getattr(each, "__module__", "").startswith("__editable__")]
"""
"""Removes the finder of an editable install, which would import this checkout's modules in another commit's place."""


class Verdict(NamedTuple):
    case: str
    unit: str
    before: float
    now: float
    interval: tuple[float, float] | None
    """95% confidence interval of the ratio, of timed cases."""
    is_worse: bool

    @property
    def ratio(self) -> float:
        return self.now / self.before


def judge_count(case: str, before: float, now: float) -> Verdict:
    return Verdict(case, "instructions", before, now, None, now > before * (1 + COUNT_LIMIT))


def judge_times(case: str, before: Sequence[float], now: Sequence[float]) -> Verdict:
    """Worse if the whole interval is beyond the limit: a difference that may be noise does not fail."""
    interval = welch(before, now)
    return Verdict(
        case, "us", statistics.median(before), statistics.median(now), interval, interval[0] > 1 + TIME_LIMIT
    )


@contextmanager
def worktree(revision: str) -> Iterator[Path]:
    """A worktree of another commit, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="headrace-check-") as folder:
        path = Path(folder) / "tree"
        git("worktree", "add", "--detach", "--quiet", str(path), revision)
        try:
            yield path
        finally:
            git("worktree", "remove", "--force", str(path))


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def layout(tree: Path, folder: Path) -> Path:
    """Fills a folder for the import path: `headrace`, with links to the tree's folders."""
    package = folder / "headrace"
    package.mkdir(parents=True)
    for entry in (tree / "headrace").iterdir():
        (package / entry.name).symlink_to(entry)
    for name in FOLDERS:
        (package / name).symlink_to(tree / name)
    (folder / "sitecustomize.py").write_text(NO_OTHER_CHECKOUT)
    return folder


class Side(NamedTuple):
    """One of the two compared commits."""

    tree: Path
    variables: dict[str, str]
    """Environment variables for its code."""

    def program(self, case: str) -> Path:
        """The program for the case: this checkout's, or the commit's own if modules have moved since. Raises
        CaseError."""
        try:
            _run([sys.executable, str(ROOT / CASES), case, "1"], self.variables)
        except CaseError:
            _run([sys.executable, str(self.tree / CASES), case, "1"], self.variables)
            return self.tree / CASES
        return ROOT / CASES


def side_of(tree: Path, path: Path) -> Side:
    """path: the result of `layout` for the tree."""
    variables = {
        **os.environ,
        # Commits from before tests/ had subfolders keep helpers in tests/ itself.
        "PYTHONPATH": os.pathsep.join(map(str, (path, tree / "tests" / "support", tree / "tests"))),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    return Side(tree, variables)


def count(program: Path, case: str, repeats: int, variables: dict[str, str]) -> int:
    """Instructions of a whole process that repeats the case `repeats` times. Raises CaseError."""
    with tempfile.TemporaryDirectory(prefix="headrace-callgrind-") as folder:
        # Per process, not per thread: the ring's reader is a thread of the same process.
        out = Path(folder) / "out"
        command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", sys.executable, str(program), case]
        text = _run([*command, str(repeats)], variables)
    found = re.search(r"Collected : (\d+)", text)
    if found is None:
        raise CaseError(f"callgrind counted nothing: {text[-500:]}")
    return int(found.group(1))


def counted(case: str, side: Side) -> float:
    """Instructions of one repetition."""
    few, many = (20, 120) if case == "scheduler step" else (200, 1200)
    program = side.program(case)
    return (count(program, case, many, side.variables) - count(program, case, few, side.variables)) / (many - few)


def timed(program: Path, side: Side) -> dict[str, float]:
    """Microseconds of each kernel, by name."""
    text = _run([sys.executable, str(program), "kernels", "1"], side.variables)
    found: dict[str, float] = json.loads(text.strip().splitlines()[-1])
    return found


class CaseError(Exception):
    """A case cannot run, for example because the other commit lacks something that it uses."""


def _run(command: list[str], variables: dict[str, str]) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, env=variables, timeout=CASE_TIMEOUT_S, cwd="/", check=False
    )
    if done.returncode:
        said = [line for line in done.stderr.strip().splitlines() if not line.startswith("==")]  # not Callgrind's own
        raise CaseError((said or ["no reason given"])[-1])
    return done.stdout if done.stdout.strip() else done.stderr


def check(base: str, only: Sequence[str], rounds: int) -> tuple[list[Verdict], list[str]]:
    """The verdicts, and the cases that could not be compared."""
    verdicts: list[Verdict] = []
    skipped: list[str] = []
    with worktree(base) as other, tempfile.TemporaryDirectory(prefix="headrace-layout-") as folder:
        sides = [side_of(tree, layout(tree, Path(folder) / name)) for name, tree in (("before", other), ("now", ROOT))]
        for case in COUNTED:
            if only and case not in only:
                continue
            try:
                if not shutil.which("valgrind"):
                    raise CaseError("valgrind is not installed")
                verdicts.append(judge_count(case, *(counted(case, side) for side in sides)))
            except CaseError as error:
                skipped.append(f"{case}: {error}")
        if not only or "kernels" in only:
            try:
                verdicts += kernel_verdicts(sides, rounds)
            except CaseError as error:
                skipped.append(f"kernels: {error}")
    return verdicts, skipped


def kernel_verdicts(sides: Sequence[Side], rounds: int) -> list[Verdict]:
    """Runs both sides alternately, in another order each round, so that drift of the machine affects both."""
    programs = [side.program("kernels") for side in sides]
    samples: list[dict[str, list[float]]] = [{}, {}]
    for round_number in range(rounds):
        for side in (0, 1) if round_number % 2 else (1, 0):
            for name, micros in timed(programs[side], sides[side]).items():
                samples[side].setdefault(name, []).append(micros)
    return [judge_times(name, samples[0][name], values) for name, values in samples[1].items() if name in samples[0]]


def report(verdicts: Sequence[Verdict], skipped: Sequence[str], base: str) -> str:
    rows = [["", "unit", base, "now", "ratio", "95% interval", ""]]
    for each in verdicts:
        interval = "-" if each.interval is None else f"{each.interval[0]:.3f} - {each.interval[1]:.3f}"
        row = [each.case, each.unit, number(each.before), number(each.now), f"{each.ratio:.3f}", interval]
        rows.append([*row, "WORSE" if each.is_worse else "ok"])
    return "\n".join([columns(rows, indent=0), *(f"not compared: {line}" for line in skipped)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", help="the commit to compare with")
    parser.add_argument("--only", action="append", choices=[*COUNTED, "kernels"], help="repeatable")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of the timed cases")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    arguments = parser.parse_args()
    changed = git("status", "--porcelain", "--untracked-files=no", "--", *FOLDERS)
    base = arguments.base or ("HEAD" if changed else "HEAD~1")
    verdicts, skipped = check(base, arguments.only or (), arguments.rounds)
    print(report(verdicts, skipped, base))
    if arguments.out:
        rows: list[dict[str, Any]] = [{**each._asdict(), "ratio": each.ratio} for each in verdicts]
        write_report(arguments.out, "check", {"base": git("rev-parse", base), "verdicts": rows, "skipped": skipped})
    if not verdicts:
        return 1  # nothing was compared, so the gate has not passed
    return 1 if any(each.is_worse for each in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
