"""Print a script that completes the commands and options of `headrace`, or of `engine-core`, in bash, zsh or fish.

bash:  headrace completion bash > ~/.local/share/bash-completion/completions/headrace
zsh:   headrace completion zsh > ~/.headrace.zsh, and `source ~/.headrace.zsh` in ~/.zshrc, after compinit
fish:  headrace completion fish > ~/.config/fish/completions/headrace.fish

`--program engine-core` prints that of `engine-core`, for a file of its own.
The script knows the options of this version and starts no Python: print it again after an upgrade.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

SHELLS = ("bash", "zsh", "fish")
HEADRACE, ENGINE_CORE = "headrace", "engine-core"


class Word(NamedTuple):
    """An option of a command, or a command below it."""

    text: str
    help: str
    choices: tuple[str, ...] = ()
    takes_value: bool = False


Words = Mapping[tuple[str, ...], list[Word]]
"""What may come after each chain of commands: (), ("serve",), ("bench", "serve")."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="Shell that the script is for")
    parser.add_argument("--program", choices=(HEADRACE, ENGINE_CORE), default=HEADRACE, help="Whose words to complete")


def run(arguments: argparse.Namespace) -> int:
    script = {"bash": bash, "zsh": zsh, "fish": fish}[arguments.shell]
    print(script(words(arguments.program), arguments.program))
    return 0


def words(program: str = HEADRACE) -> Words:
    found: dict[tuple[str, ...], list[Word]] = {}
    _collect(_parser_of(program), (), found)
    return found


def _parser_of(program: str) -> argparse.ArgumentParser:
    if program == ENGINE_CORE:
        from headrace.core.process import daemon

        return daemon.make_parser()
    from headrace.frontend.cli.main import commands, make_parser

    return make_parser(list(commands()))


def _collect(parser: argparse.ArgumentParser, chain: tuple[str, ...], found: dict[tuple[str, ...], list[Word]]) -> None:
    own = found[chain] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            texts = {each.dest: each.help or "" for each in action._choices_actions}
            for name, below in action.choices.items():
                own.append(Word(name, texts.get(name, "")))
                _collect(below, (*chain, name), found)
        elif action.help != argparse.SUPPRESS:
            shown = action.metavar if isinstance(action.metavar, str) and action.metavar.startswith("{") else ""
            choices = tuple(map(str, action.choices or filter(None, shown.strip("{}").split(","))))
            text = " ".join((action.help or "").split()).partition(". ")[0].replace("%%", "%")
            flags = action.option_strings or choices
            has_value = bool(action.option_strings) and action.nargs != 0
            own += [Word(flag, text, choices if action.option_strings else (), has_value) for flag in flags]


def bash(words: Words, program: str = HEADRACE) -> str:
    """A value that is one of a few is completed, any other as a file."""
    return _BASH.format(
        program=program,
        function=f"_{program.replace('-', '_')}",
        commands="|".join(f"'{' '.join(chain)}'" for chain in words if chain) or "''",
        words="\n".join(f"    '{' '.join(chain)}') found='{_texts(own)}' ;;" for chain, own in words.items()),
        choices="\n".join(
            f"    '{' '.join((*chain, word.text))}') found='{' '.join(word.choices)}'; return ;;"
            for chain, word in _options(words)
            if word.choices
        ),
        values="|".join(sorted({word.text for _, word in _options(words) if word.takes_value})),
    )


_BASH = """\
{function}_words() {{  # COMMANDS PREVIOUS: sets found; nothing where a file is to be named
    found=''
    case "$1${{1:+ }}$2" in
{choices}
    esac
    case "$2" in
    {values}) return ;;
    esac
    case "$1" in
{words}
    esac
}}
{function}() {{
    local found chain='' longer index
    for ((index = 1; index < COMP_CWORD; index++)); do
        longer="$chain${{chain:+ }}${{COMP_WORDS[index]}}"
        case "$longer" in {commands}) chain="$longer" ;; esac
    done
    {function}_words "$chain" "${{COMP_WORDS[COMP_CWORD - 1]}}"
    COMPREPLY=($(compgen -W "$found" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F {function} {program}"""


def zsh(words: Words, program: str = HEADRACE) -> str:
    """bash's functions, which zsh runs: the words are the same."""
    return f"autoload -U +X bashcompinit && bashcompinit\n{bash(words, program)}"


def fish(words: Words, program: str = HEADRACE) -> str:
    lines = [f"# headrace completion fish, of {program}", f"complete -c {program} -e"]
    for chain, own in words.items():
        below = [word.text for word in own if not word.text.startswith("-")]
        conditions = [f"__fish_seen_subcommand_from {name}" for name in chain]
        conditions += [f"not __fish_seen_subcommand_from {' '.join(below)}"] if below else []
        condition = f" -n {_quoted('; and '.join(conditions))}" if conditions else ""
        for word in own:
            line = f"complete -c {program}{condition} -d {_quoted(word.help)}"
            if not word.text.startswith("-"):
                lines.append(f"{line} -f -a {_quoted(word.text)}")
                continue
            name = word.text.lstrip("-")
            kind = "-l" if word.text.startswith("--") else "-s" if len(name) == 1 else "-o"
            value = f" -x -a {_quoted(' '.join(word.choices))}" if word.choices else " -r" if word.takes_value else ""
            lines.append(f"{line} {kind} {name}{value}")
    return "\n".join(lines)


def _options(words: Words) -> Iterator[tuple[tuple[str, ...], Word]]:
    return itertools.chain.from_iterable(
        ((chain, word) for word in own if word.text.startswith("-")) for chain, own in words.items()
    )


def _texts(own: list[Word]) -> str:
    return " ".join(word.text for word in own)


def _quoted(text: str) -> str:
    """For fish."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
