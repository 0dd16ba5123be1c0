"""A beginning that all requests share, read once by the interpreted kernels of a whole step: the CPU path's tokens."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from model_driver import DictSource
from plan_maker import PlanMaker

from headrace import kernels
from headrace.executor.cpu.batch import BatchState
from headrace.executor.cpu.runner import ModelRunner
from headrace.executor.gpu.cascade import CascadeRule
from headrace.executor.gpu.device_state import HostDevice
from headrace.executor.gpu.runner import GpuRunner, RunnerLimits
from headrace.executor.models import kv_cache
from headrace.executor.models.decoder import Decoder
from headrace.executor.models.families import spec_from_config
from headrace.executor.models.sizes import weight_shapes
from headrace.kernels.registry import choose_reference

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 48,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 60, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "num_hidden_layers": 1, "tie_word_embeddings": True,
}  # fmt: skip
BEGINNING = [random.Random(1).randrange(3, 60) for _ in range(70)]
NUM_ROWS = 6


class Again:
    """In the place of graphs, which cannot record what the interpreter does: runs the step of the captured size on
    the state as it is then, as a replay would."""

    pool_bytes = 0

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        return lambda: run() and None, run()

    def forget(self) -> None:
        """Nothing is kept."""


class Chosen:
    """Triton's version of what is tested here; the rest is torch's, which takes a thousandth of the time."""

    num_calls = 0

    def __call__(self, op: str, **facts: Any) -> Callable[..., Any]:
        if op != "cascade_attention":
            return choose_reference(op)
        (version,) = kernels.ops()[op].versions
        assert version.why_not(**facts) == ""

        def counted(*args: Any) -> Any:
            self.num_calls += 1
            return version.function(*args)

        return counted


def tokens_of(step: Callable[[Any], Any]) -> list[list[int]]:
    """Requests enter, find the beginning's blocks, are preempted, come back and leave, one of them a stranger."""
    maker, ended = PlanMaker(block_size=16), []

    def steps(count: int) -> None:
        for _ in range(count):
            for row in maker.tokens:
                maker.compute(row)
            result = step(maker.plan())
            maker.sampled(result.rows, result.token_ids)

    maker.enter(0, BEGINNING, temperature=0.0)
    steps(1)
    for row in (1, 2):
        maker.enter(row, [*BEGINNING, 5 + row], like=0, temperature=0.0)
    steps(4)
    preempted = list(maker.tokens[0])
    maker.release(0)
    maker.enter(3, [*BEGINNING[:40], 9, 8, 7], like=1, temperature=0.0)
    steps(3)
    ended.append(maker.tokens[3])
    maker.release(3)
    maker.enter(0, preempted, len(BEGINNING), like=2, temperature=0.0)
    maker.enter(4, [11, 12, 13], temperature=0.0)
    steps(2)
    ended.append(maker.tokens[4])
    maker.release(4)
    steps(2)
    return [*ended, *(maker.tokens[row] for row in sorted(maker.tokens))]


def case_a_whole_steps_tokens_are_the_cpu_paths() -> None:
    spec = spec_from_config(CONFIG)
    weights = {name: torch.randn(shape) * 0.2 for name, shape in weight_shapes(spec).items()}
    reference = ModelRunner(
        Decoder(spec, DictSource(weights), torch.float32, choose=choose_reference),
        kv_cache.allocate(spec, 64, 16, torch.float32),
        BatchState(NUM_ROWS, 128, 16),
        vocab_size=60,
    )
    expected = tokens_of(reference.step)
    assert len({token for tokens in expected for token in tokens[70:]}) > 5, "these weights choose many tokens"
    decoder = Decoder(spec, DictSource(weights), torch.float32, choose=(chosen := Chosen()))
    limits = RunnerLimits(NUM_ROWS, 128, 16, 60, capture_sizes=(NUM_ROWS,), cascade=CascadeRule(2, 32, 0))
    runner = GpuRunner(decoder, kv_cache.allocate(spec, 64, 16, torch.float32), HostDevice(), limits, Again())

    def step(plan: Any) -> Any:
        runner.submit(plan)
        result = runner.collect()
        while runner.idle():
            pass
        return result

    assert tokens_of(step) == expected
    assert chosen.num_calls >= runner.num_cascaded > 4
