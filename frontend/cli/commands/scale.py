"""Change the number of engines of a running server, without interrupting it.

    headrace serve MODEL -dp 2
    headrace scale 4

New engines take requests as soon as they are ready. Engines that are removed finish their requests; those that remain
after --timeout continue on other engines.
"""

from __future__ import annotations

import argparse
import os


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("size", type=int, metavar="N", help="Number of data parallel engines to scale to")
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="URL of the server (default: http://127.0.0.1:8000)"
    )
    parser.add_argument(
        "--api-key",
        help="An admin key of the server (--admin-api-key), if it has keys; default: the environment's "
        "HEADRACE_ADMIN_API_KEY, else HEADRACE_API_KEY",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="How long engines that are removed may finish their requests (default: 120)",
    )


def run(arguments: argparse.Namespace) -> int:
    from headrace.frontend.cli.remote import RemoteLLM

    server = RemoteLLM(arguments.url, arguments.api_key or os.environ.get("HEADRACE_ADMIN_API_KEY"))
    body = {"new_data_parallel_size": arguments.size, "drain_timeout": arguments.timeout}
    print(server.post("/scale_elastic_ep", body)["message"])
    return 0
