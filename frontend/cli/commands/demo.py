"""Ask the model a question, stream its answer, and print how fast it was."""

from __future__ import annotations

import argparse
import os
import time
from typing import TYPE_CHECKING

from headrace.frontend.cli.engine_arguments import add_engine_arguments, check_sampling, open_engine, sampling_params

if TYPE_CHECKING:
    from headrace.frontend.request.outputs import RequestMetrics

DEFAULT_PROMPT = "Why is the sky blue?"
DEFAULT_MAX_TOKENS = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompt",
        default=os.environ.get("PROMPT") or DEFAULT_PROMPT,
        help="What to ask (default: the environment's PROMPT, else a question about the sky)",
    )
    add_engine_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    check_sampling(arguments)
    began_s = time.monotonic()
    with open_engine(arguments) as llm:
        ready_s = time.monotonic() - began_s
        params = sampling_params(arguments, llm.get_default_sampling_params())
        if "max_tokens" not in vars(arguments):
            params.max_tokens = DEFAULT_MAX_TOKENS
        if "temperature" not in vars(arguments) and "temperature" not in llm.engine.generation_defaults:
            params.temperature = 0.0  # at 1.0, the neutral value, small models lose the thread
        tokenizer = llm.get_tokenizer()
        conversation = [{"role": "user", "content": arguments.prompt}]
        text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        prompt = {"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}
        print(f"> {arguments.prompt}")
        metrics = None
        for output in llm.stream(prompt, params):
            print(output.outputs[0].text, end="", flush=True)
            metrics = output.metrics or metrics
        phases = llm.engine.startup_s
    print()
    if metrics is not None:
        started = None if arguments.engine else ready_s
        print(figures(metrics, phases, started))
    return 0


def figures(metrics: RequestMetrics, phases: dict[str, float], ready_s: float | None) -> str:
    """One line: time to first token, decode speed, and start-up by phase when this command started the engine."""
    parts = []
    if metrics.first_token_latency is not None:
        parts.append(f"time to first token {metrics.first_token_latency:.3f} s")
    steps = metrics.num_generation_tokens - 1
    if steps > 0 and metrics.decode_s:
        parts.append(f"decode {steps / metrics.decode_s:.1f} tokens/s over {metrics.num_generation_tokens} tokens")
    by_phase = ", ".join(f"{name} {seconds:.2f}" for name, seconds in phases.items())
    if ready_s is not None:
        parts.append(f"start-up {ready_s:.2f} s ({by_phase})")
    return "; ".join(parts)
