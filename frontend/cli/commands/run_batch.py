"""Run a file of requests in OpenAI's batch format, and write a file of results.

Each line of the input is {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions" or "/v1/completions",
"body": {...}}. Results are written in the input's order, or with --as-completed in the order of completion. The result
of a line that fails is its error; the other lines still run, and the exit status is 0 (1 with --fail-on-error).
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from headrace.core.options.parsing import add_options
    from headrace.frontend.http.options import ADAPTERS, CHAT, ServeOptions

    parser.add_argument(
        "-i", "--input-file", required=True, metavar="FILE", help="File of requests, one JSON object per line"
    )
    parser.add_argument("-o", "--output-file", required=True, metavar="FILE", help="File for the results")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="Continue an output file: requests that have a result in it are not run again",
    )
    parser.add_argument("--overwrite", action="store_true", help="Replace the output file if it exists")
    parser.add_argument(
        "--as-completed",
        action="store_true",
        help="Write results in the order of completion instead of the input's order",
    )
    parser.add_argument("--fail-on-error", action="store_true", help="Exit with status 1 if a result is an error")
    parser.add_argument(
        "--max-concurrency",
        type=int,
        metavar="N",
        help="Maximum number of concurrent requests (default: twice the engine's max_num_seqs, so that it never waits)",
    )
    parser.add_argument(
        "--engine", metavar="ADDRESS", help="Attach to the engine-core at this address instead of starting one"
    )
    for group in (CHAT, ADAPTERS):
        add_options(parser, ServeOptions, only_group=group, folded=True)
    add_options(parser, folded=True)


def run(arguments: argparse.Namespace) -> int:
    from headrace.core.options.parsing import struct_from_arguments
    from headrace.frontend.batch_file.file import Results
    from headrace.frontend.batch_file.run import BatchRun, engines_of
    from headrace.frontend.client.event_loop import run_async
    from headrace.frontend.http.options import ServeOptions
    from headrace.ipc.failure import OptionError

    if arguments.max_concurrency is not None and arguments.max_concurrency < 1:
        raise OptionError(f"--max-concurrency={arguments.max_concurrency}: it must be at least 1")
    source_path, result_path = Path(arguments.input_file), Path(arguments.output_file)
    if not source_path.is_file():
        why = "it must be a regular file, which can be read twice" if source_path.exists() else "there is no such file"
        raise OptionError(f"cannot read the input file {source_path}: {why}")
    if result_path.exists() and source_path.samefile(result_path):
        raise OptionError("the output file is the input file: name another")
    if arguments.resume and arguments.overwrite:
        raise OptionError("--resume goes on with the output file and --overwrite begins it anew: choose one")
    options = struct_from_arguments(arguments, ServeOptions)
    results = Results(result_path, resume=arguments.resume, overwrite=arguments.overwrite)
    try:
        batch = BatchRun(
            source_path,
            results,
            arguments.max_concurrency,
            as_completed=arguments.as_completed,
            fails_on_error=arguments.fail_on_error,
            options=options,
        )
        return run_async(lambda: batch.run(engines_of(arguments)))
    finally:
        results.close()
