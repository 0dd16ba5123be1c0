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
import null_adapters
import pytest
import torch
from http_server import Server, address_of_engine, serving
from null_with_tokenizer import VOCAB_SIZE
from source_tree import ROOT
from thinned import every, thinned

from headrace.core.process.daemon import make_parser
from headrace.executor.testing.null import INPUT_WIDTH
from headrace.frontend.cli import main as cli
from headrace.ipc.failure import HeadraceError

COMMANDS = doc_blocks.commands()
CURLS = [(page, line) for page, line in COMMANDS if line.startswith("curl ")]
OTHERS = [(page, line) for page, line in COMMANDS if not line.startswith("curl ")]


ADAPTER = "adapters/sql"
"""Where pages say that an adapter named sql is."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """It pools, and takes embeddings and adapters, which pages ask of servers of other models."""
    adapter = null_adapters.write(tmp_path_factory.mktemp("pages") / ADAPTER, "a")
    options = ("--tool-call-parser", "hermes", "--enable-prompt-embeds", "--enable-lora", "--lora-modules")
    named = ("--served-model-name", doc_blocks.MODEL, "--max-model-len", "2048")
    with serving(*named, *options, f"sql={adapter}", null_model={"vector_width": 8}) as server:
        yield server


def write_files_that_pages_read(folder: Path) -> None:
    null_adapters.write(folder / ADAPTER, "a")
    torch.save(torch.ones(3, INPUT_WIDTH), folder / "prompt.pt")


@pytest.mark.parametrize(("page", "command"), every(2, CURLS))
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
    assert kinds <= {
        "",
        "python",
        "sh",
        "bash",
        "console",
        "toml",
        "yaml",
        "nginx",
    }  # tests/http/test_behind_nginx.py runs the last kind
    told = sum((ROOT / page).read_text(encoding="utf-8").count("\ncurl ") for page in doc_blocks.PAGES)
    not_run = sum(
        block.text.count("curl ") for page in doc_blocks.PAGES for block in doc_blocks.blocks(page) if block.why_not
    )
    assert told == len(doc_blocks.repeated("curl ")) + not_run
    assert len(OTHERS) > 40


def is_kept(case: tuple[str, str]) -> bool:
    page, _ = case
    return "tutorials/" not in page and page != "docs/prompt-embeds.md"  # which imports torch


@pytest.mark.parametrize(
    ("page", "script"), thinned(doc_blocks.scripts(), is_kept), ids=lambda text: text if "\n" not in text else ""
)
def test_the_scripts_of_a_page_run(server: Server, page: str, script: str, tmp_path: Path) -> None:
    """One after the other: the later use what the first has made."""
    write_files_that_pages_read(tmp_path)
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


ENGINE = ("--engine", doc_blocks.ADDRESS)
RUNS: dict[str, tuple[str, ...]] = {
    "bench": (
        *("--base-url", doc_blocks.URL, "--num-prompts", "2", "--request-rate", "inf", "--random-output-len", "4"),
        *("--random-vocab-size", str(VOCAB_SIZE)),
    ),
    "chat": ENGINE,
    "collect-env": (),
    "complete": ENGINE,
    "completion": (),
    "doctor": ("--port", "0"),
    "keys": (),
    "models": (),
    "options": (),
    "ps": (),
    "run-batch": ENGINE,
    "top": (*ENGINE, "--once", "--interval", "0.1"),
}
"""The commands that are run as they are written, with more arguments, of which the last one counts, that lead to the
tests' server and make them short. Others start what the pages' reader has: tests of each command do that."""
SHOWS = {"bench": "2 of 2 requests completed", "ps": doc_blocks.MODEL, "top": "RUNNING"}
BATCH = {"custom_id": "1", "method": "POST", "url": "/v1/completions"}
BODY = {"model": doc_blocks.MODEL, "prompt": "The sky is", "max_tokens": 4}


def runnable() -> dict[str, list[str]]:
    """The command lines of each page that has some of RUNS."""
    found: dict[str, list[str]] = {}
    for page, command in OTHERS:
        if command.split()[:1] == ["headrace"] and command.split()[1] in RUNS:
            found.setdefault(page, []).append(command)
    return found


@pytest.mark.parametrize("page", thinned(runnable(), lambda page: page == "docs/serving.md"))
def test_the_commands_of_a_page_run(server: Server, page: str, tmp_path: Path) -> None:
    """One after the other, in one folder: the later use what the first have made."""
    (tmp_path / "in.jsonl").write_text(json.dumps({**BATCH, "body": BODY}) + "\n")
    for command in runnable()[page]:
        name = command.split()[1]
        more = () if "--url" in command else RUNS[name]
        words = [
            each.replace(doc_blocks.URL, server.url).replace(doc_blocks.ADDRESS, address_of_engine(server))
            for each in [*shlex.split(command)[1:], *more]
        ]
        done = subprocess.run(
            [sys.executable, "-m", "headrace", *words],
            input="Hello\n",
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            cwd=tmp_path,
        )
        assert done.returncode == 0, f"{command}: {done.stdout} {done.stderr}"
        assert SHOWS.get(name, "") in done.stdout
        assert done.stdout or name in ("keys", "run-batch"), command
    if any("run-batch" in command for command in runnable()[page]):
        assert json.loads((tmp_path / "out.jsonl").read_text())["response"]["status_code"] == 200
