"""Write a model's weights as one file per rank, for `--load-format sharded_state`.

Each rank then reads only its own file, from beginning to end, which takes load off a network file system.
"""

from __future__ import annotations

import argparse

from headrace.core.options.engine_options import Options
from headrace.core.options.parsing import parse_options
from headrace.core.process.installed import check_engine_is_installed
from headrace.ipc.failure import ModelError
from headrace.ipc.process.program import child_environment, python_command

TIMEOUT_S = 24 * 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="A folder of safetensors or PyTorch files, or the name of a model on the hub")
    parser.add_argument(
        "-o", "--output", required=True, metavar="FOLDER", help="Folder to write to; it is created if it does not exist"
    )
    parser.add_argument("-tp", "--tensor-parallel-size", type=int, default=1, metavar="RANKS")
    parser.add_argument("-pp", "--pipeline-parallel-size", type=int, default=1, metavar="STAGES")
    parser.add_argument(
        "--pipeline-layer-partition",
        default=(),
        metavar="LAYERS",
        help="Number of layers in each pipeline stage, such as 14,16",
    )
    parser.add_argument("--revision", help="Branch, tag or commit of a hub model")
    parser.add_argument("--download-dir", help="Folder for downloaded hub models")


def run(arguments: argparse.Namespace) -> int:
    import json
    import subprocess

    import msgspec

    given = {name: value for name, value in vars(arguments).items() if name in Options.__struct_fields__}
    options = parse_options(**given)
    check_engine_is_installed("numpy", "torch")
    # A separate process: reading weights needs torch, which must not be loaded here.
    command = python_command("-m", "headrace.executor.checkpoints.sources.sharded_state", arguments.output)
    done = subprocess.run(
        command,
        input=msgspec.json.encode(options),
        stderr=subprocess.PIPE,
        timeout=TIMEOUT_S,
        env=child_environment(),
        check=False,
    )
    if done.returncode == 0:
        return 0
    text = done.stderr.decode(errors="replace").strip()
    try:
        failure = json.loads(text.splitlines()[-1])
        raise ModelError(failure["error"], hint=failure["hint"])
    except (ValueError, IndexError, KeyError):
        raise ModelError(f"the program that reads the weights ended with status {done.returncode}:\n{text}") from None
