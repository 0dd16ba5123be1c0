"""What the pages tell a reader to type: every command and script runs against a live server, word for word."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_server import Server, address_of_engine, serving

from headrace.frontend.cli import main as cli

ROOT = Path(__file__).parents[2]
DOCUMENTED = "http://127.0.0.1:8000"


def blocks(page: str, language: str = r"\w*") -> list[str]:
    """The fenced ones."""
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def curl_commands() -> list[str]:
    text = "\n".join(blocks("docs/server.md", "sh")).replace("\\\n", "")
    return [line for line in text.splitlines() if line.startswith("curl ")]


def headrace_commands(page: str) -> list[str]:
    """Of fenced and of indented blocks, without their comments."""
    indented = re.findall(r"^    (.*)$", (ROOT / page).read_text(), re.MULTILINE)
    lines = [*indented, *"".join(blocks(page)).splitlines()]
    return [line.partition("#")[0].strip() for line in lines if line.startswith("headrace ")]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--served-model-name", "MODEL", "--max-model-len", "512") as server:
        yield server


@pytest.mark.parametrize("command", curl_commands())
def test_a_documented_curl_command_is_answered(server, command):
    assert DOCUMENTED in command
    words = shlex.split(command.replace(DOCUMENTED, server.url))
    done = subprocess.run(
        [*words, "--silent", "--show-error", "--fail"], capture_output=True, text=True, check=False, timeout=30
    )
    assert done.returncode == 0, done.stderr
    if "stream" in command:
        assert done.stdout.startswith("data: {")
        assert done.stdout.endswith("data: [DONE]\n\n")
    elif "/metrics" in command:
        assert "headrace:generation_tokens_total" in done.stdout
    else:
        assert json.loads(done.stdout)


def test_all_curl_commands_are_found():
    assert len(curl_commands()) >= 7
    assert (ROOT / "docs/server.md").read_text().count("\ncurl ") == len(curl_commands())


def test_the_documented_scripts_run(server):
    """One after the other: the later use what the first has made."""
    script = "\n".join(blocks("docs/server.md", "python"))
    script = script.replace(DOCUMENTED, server.url)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 10


@pytest.mark.parametrize("command", [*headrace_commands("README.md"), *headrace_commands("docs/server.md")])
def test_a_documented_command_line_is_understood(command):
    """Its options exist and take what is said; what the rest does is for the tests of each command."""
    words = shlex.split(command)[1:]
    try:
        parsed = cli.make_parser(words).parse_args(words)
    except SystemExit as refused:
        pytest.fail(f"{command}: exit status {refused.code}")
    assert isinstance(parsed, argparse.Namespace)
    assert parsed.command in cli.commands()


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ('headrace complete "The sky is" --max-tokens 20', ""),
        ("headrace ps", "MODEL"),
        ("headrace top --once --interval 0.1", "RUNNING"),
    ],
)
def test_commands_of_the_readme_attach_to_a_running_server(server, line, shown):
    if "--once" not in line:
        assert line in headrace_commands("README.md")
    words = shlex.split(line)[1:]
    if words[0] != "ps":
        words += ["--engine", address_of_engine(server)]
    command = [sys.executable, "-m", "headrace", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert shown in done.stdout
