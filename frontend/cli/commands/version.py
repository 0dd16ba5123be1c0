"""Print the version."""

from __future__ import annotations

import argparse

import headrace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no arguments."""


def run(arguments: argparse.Namespace) -> int:
    from headrace.ipc.messages import SCHEMA_HASH, WIRE_VERSION

    print(f"headrace {headrace.__version__} (wire version {WIRE_VERSION}, messages {SCHEMA_HASH})")
    return 0
