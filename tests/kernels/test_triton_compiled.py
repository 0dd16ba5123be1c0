"""Triton's kernels compile for sm_80 and sm_90 without a GPU, and fit: registers and shared memory are on record."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton has no build for this platform", allow_module_level=True)

ROOT = Path(__file__).parents[2]
MOST_SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
PROGRAM = """
import json, sys, warnings
warnings.simplefilter("ignore")
from dataclasses import asdict
import triton_resources as recorded
from triton_compile import compile_launch, digest_of, record
found = []
for name, architecture in (("attention Llama mixed", 90), ("attention Qwen mixed", 80), ("rotary_and_write", 90)):
    for launch in record(recorded.all_cases()[name], architecture):
        resources = asdict(compile_launch(launch, architecture))
        found.append({"kernel": launch.function.__name__, "digest": digest_of(launch, architecture), **resources})
digests = [digest_of(launch, architecture) for _, architecture, launch in recorded.launches()]
print(json.dumps({"digests": digests, "compiled": found}))
"""

EARLY_PROGRAM = """
import json, re, warnings
warnings.simplefilter("ignore")
import triton_resources as recorded
from triton_compile import compile_kernel, record
found = {}
for architecture in (80, 90):
    (launch,) = record(recorded.all_cases()["linear before an activation"], architecture)
    ptx = compile_kernel(launch, architecture).asm["ptx"]
    marks = r"griddepcontrol\\.(wait|launch_dependents)|(ld\\.global)|(st\\.global)"
    found[architecture] = [match[1] or match[2] or match[3] for match in re.finditer(marks, ptx)]
print(json.dumps(found))
"""


RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return json.loads((RESULTS / "triton_resources.json").read_text())["results"]


@pytest.mark.system
def test_compiling_anew_gives_kernels_without_spills(record: dict[str, Any]) -> None:
    report = compiled_by(PROGRAM)
    on_record = [entry["digest"] for entry in record["kernels"]]
    assert report["digests"] == on_record, "run benchmarks/triton_resources.py: the kernels or their launches changed"
    kernels = [entry["kernel"] for entry in report["compiled"]]
    assert kernels.count("attend_kernel") == 4
    assert "rotary_cache_kernel" in kernels
    for entry in report["compiled"]:
        assert entry["spilled_bytes"] == 0, entry
        assert entry["digest"] in on_record
        if entry["kernel"] == "attend_kernel":
            assert entry["tensor_core_instructions"] > 0, entry


def test_a_launch_before_the_last_ends_reads_weights_alone_until_that_has_ended() -> None:
    found = compiled_by(EARLY_PROGRAM, HEADRACE_PDL="1")
    assert set(found["80"]) == {"ld.global", "st.global"}, "it has no such launches"
    marks = found["90"]
    assert marks.count("wait") == marks.count("launch_dependents") == 1
    waits = marks.index("wait")
    assert marks[:waits] == ["ld.global"] * 8, "the first weights of each of 8 rows, and nothing else"
    assert "ld.global" in marks[waits:]
    assert marks.index("launch_dependents") < marks.index("st.global")


def compiled_by(program: str, **variables: str) -> Any:
    """What the program prints, in a process of its own, which triton has not been told to interpret in."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT / "benchmarks"), **variables}
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False, env=environment
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_every_kernel_is_on_record_for_both_architectures_and_fits(record: dict[str, Any]) -> None:
    launched = set()
    for path in (ROOT / "kernels" / "triton").glob("*.py"):
        launched |= set(re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.M))
    for architecture, most in MOST_SHARED_BYTES.items():
        entries = [entry for entry in record["kernels"] if entry["architecture"] == architecture]
        assert {entry["kernel"] for entry in entries} == launched
        for entry in entries:
            check_fits(entry, most)


def test_the_oldest_triton_that_serves_spills_nothing_on_hopper_and_a_few_registers_on_an_a100() -> None:
    """As it was recorded: 3.6 is not installed here. `triton_resources.py --out` records it anew."""
    report = json.loads((RESULTS / "triton_resources_3_6.json").read_text())
    assert report["versions"]["triton"].startswith("3.6.")
    entries = report["results"]["kernels"]
    assert {entry["architecture"] for entry in entries} == set(MOST_SHARED_BYTES)
    for entry in entries:
        architecture = entry["architecture"]
        check_fits(entry, MOST_SHARED_BYTES[architecture], most_spilled_bytes={80: 32, 90: 0}[architecture])


def check_fits(entry: dict[str, Any], most_shared_bytes: int, most_spilled_bytes: int = 0) -> None:
    assert entry["spilled_bytes"] <= most_spilled_bytes, entry
    assert entry["shared_bytes"] <= most_shared_bytes, entry
    assert entry["num_registers"] * entry["num_threads"] <= 65536, entry
