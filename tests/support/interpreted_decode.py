"""Runs tiny models through the GPU runner with every Triton kernel interpreted on the CPU: `python FILE CASE ...`.

A case is a model's name, and after a + the type of its cache or weights, or `adapters`. Prints one line of JSON per
case: its name, the ops for which a Triton kernel was used, and the tokens of each request.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

NUM_TOKENS = 3
NUM_BLOCKS = 32
REQUESTS: tuple[tuple[list[int], dict[str, Any]], ...] = (
    ([7, 8, 9, 10, 11, 12, 13], {"temperature": 0.0}),
    ([5], {"temperature": 0.9, "top_p": 0.8, "seed": 4}),
)


def tokens_of(step: Callable[[Any], Any], kind: str = "", state_pages: int = 0, groups: int = 1) -> list[list[int]]:
    """Runs REQUESTS through `step`, which maps a plan to its result. Returns the tokens of each request. state_pages:
    of each; the first prompt is then computed in two chunks. groups: cache groups with block tables."""
    from plan_maker import PlanMaker

    from headrace.ipc.adapters import RowAdapter

    maker = PlanMaker(16, groups, num_rows=2, state_pages=state_pages, num_blocks=NUM_BLOCKS)
    for row, (prompt, sampling) in enumerate(REQUESTS):
        adapters = (RowAdapter(1, 1.0), RowAdapter(0, 0.5)) if kind == "adapters" and row == 0 else ()
        maker.enter(row, list(prompt), adapters=adapters, **sampling)
    for index in range(NUM_TOKENS):
        for row in range(len(REQUESTS)):
            maker.compute(row, 4 if state_pages and index == row == 0 else None)
        result = step(maker.plan())
        maker.sampled(result.rows, result.token_ids)
    return [maker.tokens[row] for row in range(len(REQUESTS))]


def model_and_spec(name: str, kind: str = "") -> tuple[Any, Any]:
    """With adapters a matrix takes much longer, so that there is one layer. Of `published_models`, the name of one that
    stores its twin's weights as they are."""
    import published_models
    import tiny_models
    import tiny_recurrent

    from headrace.executor.models.families import spec_from_config

    if name in published_models.PUBLISHED:
        return published_models.twin_of(name), spec_from_config(published_models.config_of(name))
    if name in tiny_recurrent.FAMILIES:
        model = tiny_models.make(tiny_recurrent.FAMILIES[name])
    else:
        model = tiny_models.build(name, **{"num_hidden_layers": 1} if kind == "adapters" else {})
    return model, spec_from_config(model.config.to_dict() | {"architectures": [type(model).__name__]})


def source_of(model: Any, spec: Any) -> Any:
    """The model's weights in the layout of its checkpoints, with stacked experts for families that store them so."""
    import tiny_models
    from model_driver import DictSource

    return DictSource(tiny_models.state_of(model) if spec.stacked is None else model.state_dict())


def limits_of(kind: str, *, in_device_memory: bool = False) -> Any:
    """The limits of a case's adapters, or None."""
    from headrace.core.options.adapters import AdapterLimits

    if kind != "adapters":
        return None
    given = {"max_loras": 2, "slots": 2, "max_rank": 4, "dtype": "float32", "target_modules": ()}
    return AdapterLimits(**given, in_device_memory=in_device_memory)


def load_adapters(model: Any, spec: Any, decoder: Any, limits: Any) -> None:
    """Puts an adapter into each slot of the decoder."""
    from peft_adapters import PeftModels

    from headrace.executor.adapters.slots import AdapterSlots
    from headrace.executor.parallel.rank_place import SINGLE

    slots = AdapterSlots(limits, decoder, SINGLE, lambda: source_of(model, spec))
    with TemporaryDirectory() as folder:
        models = PeftModels(model, Path(folder))
        for slot, rank in enumerate((4, 2)):
            slots.load(slot, str(models.make(f"{slot}", seed=slot, r=rank)))


def dtype_of(kind: str) -> Any:
    """The dtype of a case's cache."""
    from headrace.executor.model_rank import CACHE_DTYPES

    return CACHE_DTYPES[kind.removeprefix("cache_") if kind.startswith("cache_") else "float32"]


def cache_of(spec: Any, kind: str = "") -> tuple[Any, int]:
    """A model's cache, with room for a draft of each row, and the pages of a row's state."""
    from headrace.executor.models import kv_cache
    from headrace.executor.parallel.rank_place import SINGLE

    groups = kv_cache.cache_groups(spec) if spec.has_states else kv_cache.ONE_GROUP
    cache = kv_cache.allocate(spec, NUM_BLOCKS, 16, dtype_of(kind), groups=groups)
    return kv_cache.with_drafts(cache, spec, SINGLE, 2, 1), groups[-1].pages


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
            for version in kernels.ops()[op].versions if op != "linear" or kind in ("linear", "adapters") else ():
                if version.name == "triton" and not version.why_not(**facts):
                    served.add(op)
                    return version.function
            return kernels.choose_reference(op)

        model, spec = model_and_spec(name, kind)
        chosen = quantised(choose, kind)
        limits = limits_of(kind, in_device_memory=True)
        decoder = Decoder(spec, source_of(model, spec), torch.float32, choose=chosen, adapters=limits)
        if limits is not None:
            load_adapters(model, spec, decoder, limits)
        cache, pages = cache_of(spec, kind)
        limits_of_runner = RunnerLimits(
            *(2, 32, 16, spec.vocab_size), block_factors=cache.factors, most_adapters=2, state_pages=pages
        )
        runner = GpuRunner(decoder, cache, HostDevice(), limits_of_runner)

        def step(plan: Any, runner: GpuRunner = runner) -> Any:
            runner.submit(plan)
            return runner.collect()

        tokens = tokens_of(step, kind, pages, len(cache.factors))
        print(json.dumps({"name": case, "served": sorted(served), "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
