"""The GPU executor with the CPU in the GPU's place: from a checkpoint to tokens, memory, and graphs of real models."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from gpu_parts import GpuOnCpu, HostBackend, LateDevice, choose_capturable
from graph_recorder import RecordingCapturer
from model_driver import DictSource
from plan_maker import PlanMaker
from thinned import every

from headrace import LLM, SamplingParams
from headrace.core.options.engine_options import Options
from headrace.core.options.memory import fit_cache, ledger
from headrace.core.options.plan import MemoryReading, Plan
from headrace.core.options.resolve import resolve
from headrace.executor.checkpoints.sources.dummy_weights import DUMMY_STANDARD_DEVIATION, DummyWeights
from headrace.executor.gpu.hardware.device import GpuFacts
from headrace.executor.gpu.rank import GpuRank
from headrace.executor.gpu.runner import GpuRunner, RunnerLimits
from headrace.executor.gpu.weights.staging import staged
from headrace.executor.models import kv_cache
from headrace.executor.models.decoder import Decoder
from headrace.executor.models.families import spec_from_config
from headrace.ipc.control import DescribeEngine, StartProfile, StopProfile
from headrace.ipc.failure import HeadraceError, OptionError

GIB = 1 << 30
GPU = GpuFacts("NVIDIA H200", (9, 0), 8 * GIB, 7 * GIB)
PROMPTS = ([7, 8, 9, 10, 11, 12, 13], [5], [20, 21, 22], [40, 41, 42, 43, 44])
NEW_TOKENS = 14


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save("llama", tmp_path_factory.mktemp("llama"))


def greedy(name: str, prompt: list[int]) -> list[int]:
    generated = tiny_models.build(name).generate(
        torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    tokens: list[int] = generated[0].tolist()
    return tokens


def run(maker: PlanMaker, submit: Any, collect: Any) -> None:
    """PROMPTS enter one after another, the first in two pieces, and go until each has NEW_TOKENS; two steps in flight.

    The maker counts a token as known when its step is submitted, as the core does, and learns it a step later.
    """
    in_flight: deque[tuple[np.ndarray, list[int]]] = deque()

    def read() -> None:
        rows, columns = in_flight.popleft()
        result = collect()
        assert result.rows.tolist() == rows.tolist()
        assert not result.failures
        for row, column, token in zip(rows.tolist(), columns, result.token_ids.tolist(), strict=True):
            maker.tokens[row][column] = token

    for step in range(100):
        if step < len(PROMPTS):
            maker.enter(step, list(PROMPTS[step]), temperature=0.0)
        for row, tokens in maker.tokens.items():
            if len(tokens) < len(PROMPTS[row]) + NEW_TOKENS:
                maker.compute(row, 4 if step == row == 0 else None)
        plan = maker.plan()
        if not len(plan.rows):
            break
        submit(plan)
        rows = plan.rows[plan.sampled]
        in_flight.append((rows, [len(maker.tokens[row]) for row in rows.tolist()]))
        for row in rows.tolist():
            maker.tokens[row].append(-1)
        if len(in_flight) == 2:
            read()
    while in_flight:
        read()


# --- graphs of real models --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", every(2, ["llama_gqa_tied", "qwen3", "gemma2", "llama_dynamic", "opt"]))
def test_tokens_through_graphs_are_transformers(name: str) -> None:
    model = tiny_models.build(name)
    spec = spec_from_config(model.config.to_dict() | {"architectures": [type(model).__name__]})
    decoder = Decoder(spec, DictSource(model.state_dict()), torch.float32, choose=choose_capturable)
    cache = kv_cache.allocate(spec, 64, 4, torch.float32)
    for tensor in (*cache.keys, *cache.values):
        tensor[1:].fill_(torch.nan)
    limits = RunnerLimits(6, 64, 4, spec.vocab_size, capture_sizes=(1, 2, 6))
    capturer = RecordingCapturer()
    runner = GpuRunner(decoder, cache, LateDevice(), limits, capturer)
    while runner.idle():
        pass
    maker = PlanMaker(block_size=4)
    run(maker, runner.submit, runner.collect)
    assert [maker.tokens[row] for row in range(len(PROMPTS))] == [greedy(name, prompt) for prompt in PROMPTS]
    assert len(capturer.graphs) == 3, "none failed"
    assert capturer.num_replays >= NEW_TOKENS - len(PROMPTS), "all but the steps in which prompts came"


# --- the executor -----------------------------------------------------------------------------------------------


def started(model: Path, gpu: GpuFacts = GPU, capturer: Any = None, **options: Any) -> tuple[Any, ...]:
    settings = {"dtype": "float32", "block_size": 4, "max_num_seqs": 4, "max_model_len": 64, **options}
    asked = Options(model=str(model), skip_tokenizer_init=True, **settings)
    backend = HostBackend(gpu, capturer)
    executor, phases = GpuRank(asked, torch.device("cpu"), backend), list[str]()
    if capturer is not None:
        executor.choose = choose_capturable
    plan = resolve(asked, executor.describe(phases.append))
    return executor, plan, executor.load(plan, phases.append), backend, phases


def test_from_a_folder_to_the_tokens_of_transformers(checkpoint: Path) -> None:
    executor, _, reading, backend, phases = started(checkpoint, load_format="auto")
    assert phases == ["find model", "load weights", "measure memory"]
    assert executor.max_steps_in_flight == 2
    assert reading.device == "NVIDIA H200"
    assert (reading.total_bytes, reading.available_bytes) == (8 * GIB, 7 * GIB)
    assert reading.activation_bytes == 3000, "the most of the three peaks"
    assert reading.state_bytes > 3 * 5 * tiny_models.VOCAB_SIZE // 8, "bits of tokens are part of it"
    assert reading.graph_bytes == 0
    executor.allocate(num_blocks=64, max_model_len=64)
    maker = PlanMaker(block_size=4)
    run(maker, executor.submit, executor.collect)
    assert [maker.tokens[row] for row in range(len(PROMPTS))] == [greedy("llama", prompt) for prompt in PROMPTS]
    assert backend.num_measured == 3
    executor.stop()
    executor.stop()


def test_graphs_are_measured_by_the_largest_and_the_smallest(checkpoint: Path) -> None:
    _, _, reading, _, _ = started(checkpoint, capturer=RecordingCapturer(), load_format="dummy")
    # Sizes 1, 2 and 4, for two kinds of choice: the largest, and five more like the smallest, of 1000 bytes each.
    assert reading.graph_bytes == 6000
    _, _, reading, _, _ = started(checkpoint, capturer=RecordingCapturer(), load_format="dummy", enforce_eager=True)
    assert reading.graph_bytes == 0


def test_a_gpu_that_is_full_too_old_or_asked_for_too_much_is_refused(checkpoint: Path) -> None:
    with pytest.raises(
        OptionError, match=r"holding 0\.00 billion weights of .* needs 0\.00 GiB, and 0\.00 GiB of the 8"
    ):
        started(checkpoint, GpuFacts("NVIDIA H200", (9, 0), 8 * GIB, 1000))
    with pytest.raises(OptionError, match=r"bfloat16 needs compute capability 8\.0"):
        started(checkpoint, GpuFacts("Tesla T4", (7, 5), 8 * GIB, 7 * GIB), dtype="bfloat16")


def test_a_profile_has_the_runners_phases_and_a_description_its_graphs(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "profiles"
    options = {"load_format": "dummy", "profiler_config": {"torch_profiler_dir": str(folder)}}
    executor, *_ = started(checkpoint, capturer=RecordingCapturer(), **options)
    executor.allocate(num_blocks=64, max_model_len=64)
    while executor.idle():
        pass
    assert executor.control(StartProfile(prefix="slow")).files == ()
    with pytest.raises(HeadraceError, match="is being recorded already"):
        executor.control(StartProfile())
    run(PlanMaker(block_size=4), executor.submit, executor.collect)
    answer = executor.control(StopProfile())
    (file,) = answer.files
    assert Path(file).name.startswith("slow-rank0-")
    names = {event.get("name") for event in json.loads(Path(file).read_text())["traceEvents"]}
    assert {"prepare", "ship", "replay", "mixed", "wait", "result"} <= names
    answer = executor.control(DescribeEngine())
    facts = answer.facts
    assert (facts["gpu"], facts["graphs"], facts["why_eager"]) == ("NVIDIA H200", 3, "")
    parts = {name: value for name, value in facts["step_us"].items() if name not in ("total_us", "num_steps")}
    assert sum(parts.values()) == pytest.approx(facts["step_us"]["total_us"])
    assert min(parts.values()) >= 0
    assert facts["step_us"]["num_steps"] >= NEW_TOKENS
    with pytest.raises(HeadraceError, match="no profile is being recorded"):
        executor.control(StopProfile())


def test_an_engine_plans_ahead_captures_while_idle_and_answers_as_on_the_cpu(checkpoint: Path) -> None:
    options: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4, "max_model_len": 64, "skip_tokenizer_init": True}
    params = [
        SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0.9, top_p=0.8, seed=3, max_tokens=20, logprobs=2),
        SamplingParams(temperature=1.0, seed=4, frequency_penalty=0.5, max_tokens=20, stop_token_ids=[77, 78, 79, 80]),
    ] * 3
    prompts = [{"prompt_token_ids": [*prompt, 3 + index]} for index, prompt in enumerate(PROMPTS * 3)][: len(params)]
    answers = []
    for backend in ("uni", "gpu_parts:GpuOnCpuExecutor"):
        with LLM(
            str(checkpoint), in_process=True, device="cpu", distributed_executor_backend=backend, **options
        ) as llm:
            outputs = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]
        answers.append([[(o.outputs[0].token_ids, o.outputs[0].finish_reason) for o in each] for each in outputs])
    assert answers[0] == answers[1]
    executor = GpuOnCpu.latest
    assert executor.submitted_ahead > 10
    assert executor.recorder.num_replays > 10


# --- memory -----------------------------------------------------------------------------------------------------


def reading_of(plan: Plan, **changes: int) -> MemoryReading:
    sizes = {"total_bytes": 100 << 20, "available_bytes": 80 << 20, "weights_bytes": 10 << 20} | changes
    return MemoryReading(activation_bytes=5 << 20, graph_bytes=3 << 20, state_bytes=2 << 20, device="GPU", **sizes)


def test_the_cache_is_given_what_weights_steps_rows_and_graphs_leave_of_the_share(checkpoint: Path) -> None:
    sizes = {"max_num_seqs": 4096, "max_num_batched_tokens": 4096, "max_model_len": None}
    _, plan, *_ = started(checkpoint, load_format="dummy", **sizes)
    block = plan.block_size * plan.model.kv_elements_per_token * 4
    facts = fit_cache(plan, reading_of(plan))
    assert facts.num_blocks == (int(0.9 * (100 << 20)) - (20 << 20)) // block
    # Less is free than the share allows: another process holds it.
    facts = fit_cache(plan, reading_of(plan, available_bytes=30 << 20))
    assert facts.num_blocks == (20 << 20) // block
    rows = {line.split("  ")[0].strip() for line in ledger(facts, plan).splitlines()}
    assert rows == {"weights", "activations", "row state", "graphs", "KV cache", "total"}
    facts = fit_cache(plan, reading_of(plan, available_bytes=(10 << 20) + 40 * block))
    assert facts.max_model_len == 39 * plan.block_size
    assert "max_model_len is shortened to 156" in facts.warnings[0]


# --- weights ----------------------------------------------------------------------------------------------------


def test_weights_pass_through_small_buffers_unchanged_whatever_their_shape_and_part() -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "large": torch.randn(300, 70, generator=generator).bfloat16(),
        "vector": torch.randn(17, generator=generator),
        "bytes": torch.randint(0, 255, (5, 33), dtype=torch.uint8, generator=generator),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
    }
    device = LateDevice()
    on_device = staged(DictSource(tensors), device, staging_bytes=1 << 10)
    assert on_device.names() == set(tensors)
    for name, tensor in tensors.items():
        assert on_device.shape(name) == tuple(tensor.shape)
        assert on_device.get(name).equal(tensor)
    assert on_device.get("large", slice(10, 200), slice(3, 60)).equal(tensors["large"][10:200, 3:60])
    assert device.num_waits > 20, "a buffer is written again only after the copy from it"


def test_dummy_weights_are_made_where_they_are_used() -> None:
    shapes = {"a": (40, 30), "b": (40, 30), "c": (9,)}
    weights = DummyWeights(shapes, torch.bfloat16, torch.device("cpu"))
    a = weights.get("a")
    assert (a.dtype, tuple(a.shape)) == (torch.bfloat16, (40, 30))
    assert weights.get("a", slice(3, 9), slice(2, 4)).equal(a[3:9, 2:4])
    assert not weights.get("b").equal(a)
    assert 0 < float(a.float().std()) < 2 * DUMMY_STANDARD_DEVIATION
    assert tuple(weights.get("c", slice(1, 4)).shape) == (3,)
