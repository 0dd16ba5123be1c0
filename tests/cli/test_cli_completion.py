"""`headrace completion`: the scripts, run by the shells themselves."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from debian_programs import program

from headrace.frontend.cli.commands import completion
from headrace.frontend.cli.main import commands


@pytest.fixture(scope="module")
def words() -> completion.Words:
    return completion.words()


def in_bash(script: Path, line: str, function: str = "_headrace") -> set[str]:
    typed = line.split(" ")
    code = (
        'source "$1"; COMP_WORDS=("${@:2}"); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); '
        f'{function}; echo "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", code, "bash", script, *typed], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stderr == ""
    return set(done.stdout.split())


def test_bash_completes_commands_options_and_values(words: completion.Words, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text(completion.bash(words))
    assert in_bash(script, "headrace ") >= set(commands())
    assert in_bash(script, "headrace se") == {"serve"}
    assert in_bash(script, "headrace serve --max-num-s") == {"--max-num-seqs"}
    assert in_bash(script, "headrace serve --dtype b") == {"bfloat16"}
    assert in_bash(script, "headrace serve --model ") == set(), "a file, which bash completes"
    assert in_bash(script, "headrace bench ") >= {"serve", "latency", "plot"}
    assert in_bash(script, "headrace bench serve --request-r") == {"--request-rate"}
    assert in_bash(script, "headrace models rem") == {"remove"}
    assert in_bash(script, "headrace completion ") >= {"bash", "zsh", "fish"}


def test_engine_core_has_a_script_of_its_own(tmp_path: Path) -> None:
    own = completion.words("engine-core")
    scripts = [make(own, "engine-core") for make in (completion.bash, completion.zsh, completion.fish)]
    script = tmp_path / "script"
    script.write_text(scripts[0])
    assert in_bash(script, "engine-core --max-num-s", "_engine_core") == {"--max-num-seqs"}
    assert in_bash(script, "engine-core --dtype b", "_engine_core") == {"bfloat16"}
    assert not [each for each in scripts if "-F _headrace" in each or "-c headrace" in each]


def test_every_command_is_in_every_script(words: completion.Words) -> None:
    assert {chain[0] for chain in words if chain} == set(commands())
    for make in (completion.bash, completion.zsh, completion.fish):
        script = make(words)
        assert not [name for name in commands() if name not in script]
    assert "--request-rate" in {word.text for word in words["bench", "serve"]}


@pytest.mark.system
def test_fish_completes(words: completion.Words, tmp_path: Path) -> None:
    (tmp_path / "headrace.fish").write_text(completion.fish(words))
    fish = program("fish", "usr/bin/fish")
    functions = Path(program("fish-common", "usr/share/fish/functions/alias.fish")).parent
    libraries = Path(program("libpcre2-32-0", "usr/lib/x86_64-linux-gnu/libpcre2-32.so.0")).parent
    environment = {"HOME": str(tmp_path), "LD_LIBRARY_PATH": str(libraries)}

    def completed(line: str) -> set[str]:
        code = f"set fish_function_path {functions}; source {tmp_path}/headrace.fish; complete -C '{line}'"
        done = subprocess.run(
            [fish, "-N", "-c", code], capture_output=True, text=True, timeout=60, check=True, env=environment
        )
        return {each.split("\t")[0] for each in done.stdout.splitlines()}

    assert completed("headrace ser") == {"serve"}
    assert completed("headrace serve --max-num-s") == {"--max-num-seqs"}
    assert completed("headrace serve --dtype b") == {"bfloat16"}
    assert completed("headrace bench lat") == {"latency"}


@pytest.mark.system
def test_zsh_takes_the_script(words: completion.Words, tmp_path: Path) -> None:
    (tmp_path / "script").write_text(completion.zsh(words))
    zsh = program("zsh", "bin/zsh")
    code = (
        f"autoload -Uz compinit && compinit -D; source {tmp_path}/script; "
        "COMP_WORDS=(headrace serve --max-num-s); COMP_CWORD=2; _headrace_words serve serve; print -- $found"
    )
    done = subprocess.run([zsh, "-f", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "--max-num-seqs" in done.stdout.split(), done.stderr
