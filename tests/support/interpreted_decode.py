"""Runs tiny models through the GPU runner with every Triton kernel interpreted on the CPU: `python FILE CASE ...`.

A case is a model's name, and after a + the type of its cache or weights. Prints one line of JSON per case: its name,
the ops for which a Triton kernel was used, and the tokens of each request.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

NUM_TOKENS = 3
REQUESTS: tuple[tuple[list[int], dict[str, Any]], ...] = (
    ([7, 8, 9, 10, 11, 12, 13], {"temperature": 0.0}),
    ([5], {"temperature": 0.9, "top_p": 0.8, "seed": 4}),
)


def tokens_of(step: Callable[[Any], Any]) -> list[list[int]]:
    """Runs REQUESTS through `step`, which maps a plan to its result. Returns the tokens of each request."""
    from plan_maker import PlanMaker

    maker = PlanMaker(block_size=16)
    for row, (prompt, sampling) in enumerate(REQUESTS):
        maker.enter(row, list(prompt), **sampling)
    for _ in range(NUM_TOKENS):
        for row in range(len(REQUESTS)):
            maker.compute(row)
        result = step(maker.plan())
        maker.sampled(result.rows, result.token_ids)
    return [maker.tokens[row] for row in range(len(REQUESTS))]


def model_and_spec(name: str) -> tuple[Any, Any]:
    import tiny_models

    from headrace.executor.models.families import spec_from_config

    model = tiny_models.build(name)
    return model, spec_from_config(model.config.to_dict() | {"architectures": [type(model).__name__]})


def source_of(model: Any, spec: Any) -> Any:
    """The model's weights in the layout of its checkpoints, with stacked experts for families that store them so."""
    import tiny_models
    from model_driver import DictSource

    return DictSource(tiny_models.state_of(model) if spec.stacked is None else model.state_dict())


def dtype_of(kind: str) -> Any:
    """The dtype of a case's cache."""
    from headrace.executor.model_rank import CACHE_DTYPES

    return CACHE_DTYPES[kind.removeprefix("cache_") if kind.startswith("cache_") else "float32"]


def quantised(choose: Callable[..., Any], kind: str) -> Callable[..., Any]:
    """`choose` with the quantisation of a case's weights."""
    from headrace.executor.gpu.kernels import Rounding, quantising

    return quantising(choose, Rounding(kind, 32)) if kind in ("int8", "int4") else choose


def main() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    import torch
    from triton_language import stay_interpreted

    from headrace import kernels
    from headrace.executor.gpu.device_state import HostDevice
    from headrace.executor.gpu.runner import GpuRunner, RunnerLimits
    from headrace.executor.models import kv_cache
    from headrace.executor.models.decoder import Decoder
    from headrace.kernels.triton import configs

    warnings.simplefilter("ignore", RuntimeWarning)
    torch.set_num_threads(1)
    stay_interpreted()
    # The interpreter's time depends on the number of programs, so each gets 16 columns. Dense layers are interpreted
    # only if a case asks for them.
    configs.small_tiles = lambda *_: configs.SmallTiles(16, 1)
    for case in sys.argv[1:]:
        name, _, kind = case.partition("+")
        served: set[str] = set()

        def choose(op: str, served: set[str] = served, kind: str = kind, **facts: Any) -> Callable[..., Any]:
            """Chooses as on a GPU, where the Triton version is preferred to those of the CPU."""
            for version in kernels.ops()[op].versions if op != "linear" or kind == "linear" else ():
                if version.name == "triton" and not version.why_not(**facts):
                    served.add(op)
                    return version.function
            return kernels.choose_reference(op)

        model, spec = model_and_spec(name)
        chosen = quantised(choose, kind)
        decoder = Decoder(spec, source_of(model, spec), torch.float32, choose=chosen)
        cache = kv_cache.allocate(spec, 32, 16, dtype_of(kind))
        runner = GpuRunner(decoder, cache, HostDevice(), RunnerLimits(2, 32, 16, spec.vocab_size))

        def step(plan: Any, runner: GpuRunner = runner) -> Any:
            runner.submit(plan)
            return runner.collect()

        print(json.dumps({"name": case, "served": sorted(served), "tokens": tokens_of(step)}), flush=True)


if __name__ == "__main__":
    main()
