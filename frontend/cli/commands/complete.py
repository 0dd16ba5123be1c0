"""Complete a text, and print the output while it is generated."""

from __future__ import annotations

import argparse
import sys

from headrace.frontend.cli.engine_arguments import (
    add_engine_arguments,
    add_server_arguments,
    check_sampling,
    check_text,
    open_engine_or_server,
    sampling_params,
)
from headrace.ipc.failure import OptionError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "texts",
        nargs="*",
        metavar="[MODEL] PROMPT",
        help="The model, and the text to continue as it is: no chat template is applied. One alone is the text; none "
        "takes what stdin holds",
    )
    add_server_arguments(parser)
    add_engine_arguments(parser, positional_model=False)


def run(arguments: argparse.Namespace) -> int:
    check_sampling(arguments)
    if len(arguments.texts) > 2:
        raise OptionError(f"[MODEL] PROMPT are two at most, not {len(arguments.texts)}: put the text in quotes")
    arguments.model_argument = arguments.texts[0] if len(arguments.texts) == 2 else None
    prompt = arguments.texts[-1] if arguments.texts else _prompt_from_stdin()
    check_text("PROMPT", prompt)
    with open_engine_or_server(arguments) as llm:
        params = sampling_params(arguments, llm.get_default_sampling_params())
        with llm.stream(prompt, params) as stream:
            for output in stream:
                print(output.outputs[0].text, end="", flush=True)
    print()
    return 0


def _prompt_from_stdin() -> str:
    """The text on stdin without its last newline. Raises OptionError if it is empty or a terminal."""
    try:
        text = "" if sys.stdin.isatty() else sys.stdin.read()
    except UnicodeDecodeError:
        raise OptionError("PROMPT, read from stdin, is not valid UTF-8") from None
    if not text:
        raise OptionError("PROMPT is missing: give the text to continue, or pipe it in")
    return text.removesuffix("\n")
