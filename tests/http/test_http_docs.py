"""What the pages tell a reader to type: every command and script runs against a live server, word for word."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import doc_blocks
import pytest
from http_server import Server, address_of_engine, serving
from source_tree import ROOT

from headrace.core.process.daemon import make_parser
from headrace.frontend.cli import main as cli
from headrace.ipc.failure import HeadraceError

COMMANDS = doc_blocks.commands()
CURLS = [(page, line) for page, line in COMMANDS if line.startswith("curl ")]
OTHERS = [(page, line) for page, line in COMMANDS if not line.startswith("curl ")]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    hermes = ("--tool-call-parser", "hermes")
    with serving("--served-model-name", doc_blocks.MODEL, "--max-model-len", "2048", *hermes) as server:
        yield server


@pytest.mark.parametrize(("page", "command"), CURLS)
def test_a_documented_curl_command_is_answered(server: Server, page: str, command: str) -> None:
    assert doc_blocks.URL in command
    words = shlex.split(command.replace(doc_blocks.URL, server.url))
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


def test_every_block_and_command_is_found() -> None:
    """A block of a language that is not tried, and a curl command outside a block, would not be noticed."""
    kinds = {block.kind for page in doc_blocks.PAGES for block in doc_blocks.blocks(page)}
    assert kinds <= {"", "python", "sh", "bash", "console", "toml", "yaml"}
    told = sum((ROOT / page).read_text(encoding="utf-8").count("\ncurl ") for page in doc_blocks.PAGES)
    not_run = sum(
        block.text.count("curl ") for page in doc_blocks.PAGES for block in doc_blocks.blocks(page) if block.why_not
    )
    assert told == len(doc_blocks.repeated("curl ")) + not_run
    assert len(OTHERS) > 40


@pytest.mark.parametrize(("page", "script"), doc_blocks.scripts(), ids=lambda text: text if "\n" not in text else "")
def test_the_scripts_of_a_page_run(server: Server, page: str, script: str, tmp_path: Path) -> None:
    """One after the other: the later use what the first has made."""
    places = {doc_blocks.URL: server.url, doc_blocks.ADDRESS: address_of_engine(server)}
    for written, meant in places.items():
        script = script.replace(written, meant)
    command = [sys.executable, "-c", doc_blocks.RUN, page, address_of_engine(server), server.url]
    done = subprocess.run(
        command, input=script, capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout or "print(" not in script


@pytest.mark.parametrize(("page", "command"), OTHERS)
def test_a_documented_command_line_is_understood(page: str, command: str) -> None:
    """Its options exist and take what is said; what the rest does is for the tests of each command."""
    program, *words = shlex.split(command)
    if program == "make":
        targets = {line.partition(":")[0] for line in (ROOT / "Makefile").read_text().splitlines() if ":" in line}
        assert words[0] in {name for each in targets for name in each.split()}
        return
    try:
        if program == "engine-core":
            make_parser().parse_args(words)
            return
        parsed = cli.make_parser(words).parse_args(words)
    except (SystemExit, HeadraceError) as refused:
        pytest.fail(f"{command}: {refused}")
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
def test_commands_of_the_readme_attach_to_a_running_server(server: Server, line: str, shown: str) -> None:
    if "--once" not in line:
        assert ("README.md", line) in COMMANDS
    words = shlex.split(line)[1:]
    if words[0] != "ps":
        words += ["--engine", address_of_engine(server)]
    command = [sys.executable, "-m", "headrace", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert shown in done.stdout
