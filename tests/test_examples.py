"""The programs of `examples/` run as they are, with the demo model, and print what they are there to show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from http_server import serving

EXAMPLES = Path(__file__).parents[1] / "examples"
SHOWS = {
    "generate.py": "'The sky is' -> ",
    "chat.py": "prompt tokens were in the cache",
    "stream.py": "short: stopped",
    "structured.py": " and speaks ",
    "serve.py": "(40 tokens)",
    "attach.py": "another process: ",
    "several_engines.py": "both together have generated",
    "batch.py": "Oslo -> ",
    "embeddings.py": "576 numbers a text, of length 1.0\n",
    "logits_processor.py": "{'no_repeats': 40} -> ",
}
WITH_A_SERVER = {"tools.py": "the model calls get_weather("}
MOST_LINES = 40
WITH_AN_ADAPTER = {"adapters.py"}  # tests/http/test_trained_adapter.py runs it

pytestmark = [pytest.mark.demo_model, pytest.mark.usefixtures("demo_model_path")]


def printed(name: str, *arguments: str) -> str:
    folder = Path(sys.executable).parent  # with `engine-core` in it, whose PATH a reader's shell need not have
    path = os.pathsep.join(each for each in os.environ["PATH"].split(os.pathsep) if Path(each) != folder)
    away = {**os.environ, "PATH": path}
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    ran = subprocess.run(command, env=away, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_each_program_is_tried_and_described() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == SHOWS.keys() | WITH_A_SERVER.keys() | WITH_AN_ADAPTER
    described = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert not [name for name in names if f"`{name}`" not in described]
    assert not [name for name in names if len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) > MOST_LINES]


@pytest.mark.system
@pytest.mark.parametrize("name", SHOWS)
def test_it_runs(name: str) -> None:
    assert SHOWS[name] in printed(name)


@pytest.mark.system
def test_it_runs_with_a_server(demo_model_path: Path) -> None:
    with serving(str(demo_model_path), attached=True) as server:
        for name, text in WITH_A_SERVER.items():
            assert text in printed(name, f"{server.url}/v1")
