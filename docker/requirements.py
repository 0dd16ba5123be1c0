"""Prints what pyproject.toml asks for, one requirement a line: an image's layer of dependencies needs no sources.

python3 requirements.py [EXTRA ...] [--without NAME ...]
"""

import argparse
import re
import tomllib
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("extras", nargs="*")
    parser.add_argument("--without", nargs="+", default=[])
    arguments = parser.parse_args()
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [*project["dependencies"]]
    for extra in arguments.extras:
        asked += project["optional-dependencies"][extra]
    for each in asked:
        if re.match(r"[\w.-]+", each)[0] not in arguments.without:
            print(each)


if __name__ == "__main__":
    main()
