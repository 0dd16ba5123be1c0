"""Continue a text and print it as it comes."""

from __future__ import annotations

import argparse

from headrace.frontend.command_engine import add_engine_arguments, open_engine, sampling_params


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="The text to continue, as it is: no chat template is applied")
    add_engine_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    with open_engine(arguments) as llm:
        params = sampling_params(arguments, llm.get_default_sampling_params())
        for output in llm.stream(arguments.prompt, params):
            print(output.outputs[0].text, end="", flush=True)
    print()
    return 0
