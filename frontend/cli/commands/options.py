"""List the engine's options, what they take and their defaults."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It takes none."""


def run(arguments: argparse.Namespace) -> int:
    from headrace.core.options.document import options_text

    print(options_text())
    return 0
