"""Put an open-loop load on any server of OpenAI's API.

Requests are sent when they are due, whatever the server does; latencies count from then. Failures are counted by
cause. The server may be ours, vLLM's, SGLang's or llama.cpp's.
"""

from __future__ import annotations

import argparse

from headrace.core.options.parsing import add_options, struct_from_arguments
from headrace.frontend.bench.options import (
    SamplingOptions,
    ServingResultOptions,
    TargetOptions,
    TrafficOptions,
    WorkloadOptions,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for struct in (TargetOptions, WorkloadOptions, TrafficOptions, SamplingOptions, ServingResultOptions):
        add_options(parser, struct)


def run(arguments: argparse.Namespace) -> int:
    from headrace.frontend.bench.serve import ServingRun, bench_serve

    return bench_serve(
        ServingRun(
            target=struct_from_arguments(arguments, TargetOptions),
            workload=struct_from_arguments(arguments, WorkloadOptions),
            traffic=struct_from_arguments(arguments, TrafficOptions),
            sampling=struct_from_arguments(arguments, SamplingOptions),
            result=struct_from_arguments(arguments, ServingResultOptions),
        )
    )
