"""Adapters on a GPU rank, with the CPU in the GPU's place: the tokens are those of the CPU's rank."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from gpu_parts import HostBackend, choose_capturable
from graph_recorder import RecordingCapturer
from peft_adapters import PeftModels
from plan_maker import PlanMaker

from headrace.core.options.engine_options import Options
from headrace.core.options.resolve import resolve
from headrace.executor.cpu.rank import CpuRank
from headrace.executor.gpu.hardware.device import GpuFacts
from headrace.executor.gpu.rank import GpuRank
from headrace.ipc.adapters import RowAdapter
from headrace.ipc.failure import ModelError, OptionError

GPU = GpuFacts("NVIDIA H200", (9, 0), 8 << 30, 7 << 30)
PROMPTS = ([7, 8, 9, 10, 11, 12, 13], [5], [20, 21, 22], [40, 41, 42, 43, 44])
NEW_TOKENS = 14
ONE, TWO = RowAdapter(0, 1.0), RowAdapter(2, 0.5)
MIXES: tuple[tuple[tuple[RowAdapter, ...], ...], ...] = (
    ((ONE,), (TWO, ONE), (), (RowAdapter(0, 1.0, 5),)),
    ((), (), (), ()),
    ((ONE,), (TWO,), (), (ONE, TWO)),
)


def started(rank: Any, asked: Options) -> Any:
    rank.load(resolve(asked, rank.describe(str)), str)
    rank.allocate(num_blocks=64, max_model_len=64)
    return rank


def options_of(folder: Path, **more: Any) -> Options:
    settings = {"dtype": "float32", "block_size": 4, "max_num_seqs": 4, "max_model_len": 64, **more}
    return Options(model=str(folder), skip_tokenizer_init=True, enable_lora=True, max_loras=3, **settings)


def gpu_rank(asked: Options, capturer: Any = None) -> Any:
    rank = GpuRank(asked, torch.device("cpu"), HostBackend(GPU, capturer))
    rank.choose = choose_capturable
    return started(rank, asked)


def answers(rank: Any, adapters: tuple[tuple[RowAdapter, ...], ...], ahead: int) -> list[list[int]]:
    """The tokens of PROMPTS, which enter one after another, with `ahead` steps in flight."""
    maker, in_flight = PlanMaker(block_size=4), deque[tuple[np.ndarray, list[int]]]()

    def read() -> None:
        rows, columns = in_flight.popleft()
        for row, column, token in zip(rows.tolist(), columns, rank.collect().token_ids.tolist(), strict=True):
            maker.tokens[row][column] = token

    for step in range(100):
        if step < len(PROMPTS):
            maker.enter(step, list(PROMPTS[step]), temperature=0.0, adapters=adapters[step])
        for row, tokens in maker.tokens.items():
            if len(tokens) < len(PROMPTS[row]) + NEW_TOKENS:
                maker.compute(row, 4 if step == row == 0 else None)
        plan = maker.plan()
        if not len(plan.rows):
            break
        rank.submit(plan)
        rows = plan.rows[plan.sampled]
        in_flight.append((rows, [len(maker.tokens[row]) for row in rows.tolist()]))
        for row in rows.tolist():
            maker.tokens[row].append(-1)
        if len(in_flight) == ahead:
            read()
    while in_flight:
        read()
    found = [maker.tokens[row] for row in range(len(PROMPTS))]
    for row in range(len(PROMPTS)):
        maker.release(row)
    rank.submit(maker.plan())
    rank.collect()
    return found


@pytest.mark.parametrize("name", ["llama_biases", pytest.param("qwen3", marks=pytest.mark.system)])
def test_tokens_of_mixed_batches_through_graphs_are_those_of_the_cpus_rank(name: str, tmp_path: Path) -> None:
    asked = options_of(tiny_models.save(name, tmp_path / name))
    models = PeftModels(tiny_models.build(name), tmp_path)
    adapters = {0: models.make("one", seed=1), 2: models.make("two", seed=2, use_dora=True, size=0.1)}
    capturer = RecordingCapturer()
    on_cpu, rank = started(CpuRank(asked), asked), gpu_rank(asked, capturer)
    while rank.idle():
        pass
    for slot, path in adapters.items():
        assert rank.load_adapter(slot, str(path)).identity == on_cpu.load_adapter(slot, str(path)).identity
    expected = [answers(on_cpu, mix, 1) for mix in MIXES]
    assert expected[0] != expected[1], "the adapters change nothing"
    for _ in range(2):
        assert [answers(rank, mix, 2) for mix in MIXES] == expected
        while rank.idle():
            pass  # the second time, steps with adapters go through graphs
    assert not rank.steps.graphs.why_eager
    assert {graph.most_adapters for graph in rank.steps.graphs._graphs} == {0, 1, 2}


def test_what_a_gpu_cannot_add_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    folder = tiny_models.save("llama", tmp_path / "llama")
    models = PeftModels(tiny_models.build("llama"), tmp_path)
    rank = gpu_rank(options_of(folder))
    for module in ("lm_head", "embed_tokens"):
        path = models.make(module, target_modules=[module, "q_proj"])
        with pytest.raises(ModelError, match=rf"changes \S*{module} and its like, which adapters can on a CPU alone"):
            rank.load_adapter(1, str(path))
    with pytest.raises(OptionError, match="enable_lora cannot apply with cpu_offload_gb"):
        gpu_rank(options_of(folder, cpu_offload_gb=0.001))
