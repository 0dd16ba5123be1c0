"""Create the keys with which engines and clients on several hosts authenticate each other.

    headrace keys deployment.keys                                    new keys: copy the file to every host, by scp
    headrace keys deployment.keys --client alice --out alice.keys    keys of one client, which engines then accept

`engine-core --keys FILE`, `headrace serve --keys FILE` and HEADRACE_KEYS=FILE use them. To refuse a client from its
next connection on, remove its line in [clients] of the engines' file.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", type=Path, metavar="FILE", help="The deployment's key file; only its owner may read it")
    parser.add_argument(
        "--client", metavar="NAME", help="Create the keys of a client with this name, and add it to FILE"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="With --client: path of the client's key file")


def run(arguments: argparse.Namespace) -> int:
    from headrace.ipc.failure import OptionError
    from headrace.ipc.transport.keys import add_client, make_key_file

    if (arguments.client is None) != (arguments.out is None):
        raise OptionError("--client NAME and --out FILE belong together")
    if arguments.client is None:
        make_key_file(arguments.file)
        print(f"the keys of a deployment are in {arguments.file}; engine-core --keys and HEADRACE_KEYS take it")
    else:
        add_client(arguments.file, arguments.client, arguments.out)
        print(f"the keys of {arguments.client} are in {arguments.out}; engines with {arguments.file} admit them")
    return 0
