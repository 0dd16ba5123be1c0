"""How long the router takes to choose among many engines, for prompts of 64 blocks of which some engines hold half.

    python benchmarks/router.py [--engines 1000] [--versions 1] [--requests 20000]

Processor time of this thread, without waits for a core that other processes use. Target: 20 us among 1,000 engines.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

from headrace.frontend.fleet.decisions import RoutedRequest, RouterOptions
from headrace.frontend.fleet.members import EngineFacts
from headrace.frontend.fleet.router import Router
from headrace.ipc.codec import Tensor

PROMPT_TOKENS = 1024
SHARED_TOKENS = 512
ROUND = 1000


class Quiet:
    """A request without any events."""

    num_tokens = 0
    first_token_s = num_cached_tokens = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=1000)
    parser.add_argument("--versions", type=int, default=1, help="How many a rolling change has brought")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--prefixes", type=int, default=2000, help="How many different beginnings prompts have")
    arguments = parser.parse_args()
    chance, router = random.Random(1), Router(RouterOptions(), random.Random(2))
    for index in range(arguments.engines):
        facts = EngineFacts(name=f"engine {index}", models=("m",), version=f"v{index % arguments.versions}", rank=index)
        router.join(facts, 0.0)
    beginnings = [[chance.randrange(32_000) for _ in range(SHARED_TOKENS)] for _ in range(arguments.prefixes)]
    choose_us, place_us, end_us = [], [], []
    for _ in range(0, arguments.requests, ROUND):
        requests = []
        for _ in range(ROUND):
            rest = [chance.randrange(32_000) for _ in range(PROMPT_TOKENS - SHARED_TOKENS)]
            tokens = bytes(Tensor.of("int32", chance.choice(beginnings) + rest).data)
            requests.append(RoutedRequest("m", Quiet(), num_prompt_tokens=PROMPT_TOKENS, tokens=tokens))
        began_s = time.thread_time()
        for request in requests:
            router._choose(request, 0.0)
        chosen_s = time.thread_time()
        for request in requests:
            request._names = None
            router.place(request, 0.0)
        placed_s = time.thread_time()
        for request in requests:
            router.end(request, 0.0)
        choose_us.append((chosen_s - began_s) / ROUND * 1e6)
        place_us.append((placed_s - chosen_s) / ROUND * 1e6)
        end_us.append((time.thread_time() - placed_s) / ROUND * 1e6)
    measured = {"choose": choose_us, "choose and put on board": place_us, "end": end_us}
    result = {f"{name}, us": round(statistics.median(values), 2) for name, values in measured.items()}
    asked = {"engines": arguments.engines, "versions": arguments.versions}
    print(json.dumps({**asked, **result, "choices": dict(router.choices)}))


if __name__ == "__main__":
    main()
