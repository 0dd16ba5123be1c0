"""List the engine's options with their types and defaults."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no arguments."""


def run(arguments: argparse.Namespace) -> int:
    from headrace.core.options.document import options_text

    print(options_text())
    return 0
