"""Print versions, machine and settings, to go with a bug report.

Values of environment variables that may be secret are not shown.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="Print JSON instead of text")


def run(arguments: argparse.Namespace) -> int:
    from headrace.frontend.cli.environment import collect

    report = collect()
    if arguments.json:
        import json

        print(json.dumps(report, indent=2))
        return 0
    for section, entries in report.items():
        print(f"{section}:")
        width = max((len(name) for name in entries), default=0)
        for name, value in entries.items():
            print(f"  {name + ':':<{width + 1}} {_text(value)}")
        if not entries:
            print("  none")
    return 0


def _text(value: object) -> str:
    if value is None:
        return "unknown"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
