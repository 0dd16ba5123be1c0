"""Serve a model over HTTP, compatible with OpenAI's API.

Starts an engine-core for MODEL, or attaches to running ones (--engine, --coordinator), and listens at --host
and --port.
"""

from __future__ import annotations

import argparse

import msgspec

from headrace.core.options.parsing import add_options, given_options, options_from_arguments, struct_from_arguments
from headrace.frontend.http.options import ServeOptions, check_serve_options
from headrace.ipc.failure import OptionError
from headrace.ipc.transport.keys import use_keys

_OF_THE_SERVER_TOO = ("shutdown_timeout", "peer_timeout", "disable_log_stats", "coordinator")
"""Engine options that also apply to the server, so they are allowed when it attaches to running engines."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, positional_model=True)
    add_options(parser, ServeOptions)


def run(arguments: argparse.Namespace) -> int:
    serve_options = struct_from_arguments(arguments, ServeOptions)
    check_serve_options(serve_options)
    engine_options = options_from_arguments(arguments)
    given = given_options(arguments)
    if "data_parallel_rank" in given:
        serve_options = msgspec.structs.replace(serve_options, data_parallel_external_lb=True)
    use_keys(serve_options.keys, serve_options.insecure)
    if serve_options.engine or engine_options.coordinator:
        needless = [written for name, written in given.items() if name not in _OF_THE_SERVER_TOO]
        if needless:
            which = "--engine attaches to" if serve_options.engine else "--coordinator finds"
            raise OptionError(f"{which} an engine that has its options; leave out {', '.join(needless)}")
        from headrace.ipc.transport.sockets import check_address

        for address in (*serve_options.engine, *engine_options.coordinator):
            check_address(address)
    from headrace.frontend.http.process.launch import launch

    return launch(engine_options, serve_options)
