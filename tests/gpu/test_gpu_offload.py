"""Weights that stay in the host's memory: the tokens of a model that is all on the device, through graphs and sleep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from gpu_parts import GpuOnCpu, LateDevice, LateSide
from thinned import every
from torch import Tensor

from headrace import LLM, SamplingParams
from headrace.core.engine.engine import load_executor
from headrace.core.options.engine_options import Options
from headrace.executor.gpu.weights import offload as gpu_offload
from headrace.executor.gpu.weights import residency as weight_residency
from headrace.executor.gpu.weights.offload import ALIGNMENT, Offload, OffloadedLayer, layers_to_offload
from headrace.executor.gpu.weights.residency import tensors_of
from headrace.executor.models.families import spec_from_config
from headrace.executor.models.sizes import layer_elements
from headrace.executor.parallel.rank_place import SINGLE
from headrace.ipc.failure import ModelError, OptionError
from headrace.ipc.process.host import HostMemory
from headrace.kernels.reference.rows import DenseLinear

PROMPTS: list[Any] = [{"prompt_token_ids": [7, 8, 9, 10, 11, 12, 13]}, {"prompt_token_ids": [5]}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
NUM_LAYERS = 5
LLAMA = {"architectures": ["LlamaForCausalLM"]}


def tokens_of(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def engine(model: Path, **options: Any) -> LLM:
    return LLM(
        str(model), in_process=True, device="cpu", distributed_executor_backend="gpu_parts:GpuOnCpuExecutor",
        skip_tokenizer_init=True, dtype="float32", max_model_len=64, max_num_seqs=4, enable_sleep_mode=True, **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save("llama", tmp_path_factory.mktemp("deep"), num_hidden_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def expected(model: Path) -> tuple[list[list[int]], int]:
    """The tokens of the whole model on the device, and what its weights take there."""
    with engine(model) as llm:
        return tokens_of(llm), llm.describe_engine().workers[0]["weight_bytes"]


@pytest.mark.parametrize(("num_offloaded", "quantization"), every(2, [(NUM_LAYERS, None), (1, None), (4, "int4")]))
def test_offloaded_layers_give_the_same_tokens_eagerly_through_graphs_and_after_sleep(
    num_offloaded: int, quantization: str | None, model: Path, expected: tuple[list[list[int]], int]
) -> None:
    spec = spec_from_config(tiny_models.build("llama").config.to_dict() | LLAMA)
    layer_bytes = 4 * layer_elements(spec, spec.layers[0])
    if quantization:
        layer_bytes = layer_bytes * 5 // 32
    with engine(model, cpu_offload_gb=(num_offloaded - 0.5) * layer_bytes / 2**30, quantization=quantization) as llm:
        executor = GpuOnCpu.latest
        decoder = executor._residence.decoder
        assert sum(isinstance(each, OffloadedLayer) and each._order is not None for each in decoder._layers) == (
            num_offloaded
        )
        first, second = tokens_of(llm), tokens_of(llm)
        assert executor.recorder.num_replays > 5
        if quantization is None:
            assert first == expected[0]
            saved = expected[1] - llm.describe_engine().workers[0]["weight_bytes"]
            assert saved == pytest.approx(max(0, num_offloaded - 2) * layer_bytes, rel=0.05)
        assert second == first
        for level in (1, 2):
            llm.sleep(level=level)
            llm.wake_up()
            assert tokens_of(llm) == first
        llm.reload_weights()
        assert tokens_of(llm) == first


def test_layers_are_spread_and_never_more_than_there_are() -> None:
    assert layers_to_offload(range(10), 100, 1) == {9}
    assert layers_to_offload(range(10), 100, 201) == {2, 5, 9}
    assert layers_to_offload(range(8, 12), 100, 200) == {9, 11}
    assert layers_to_offload(range(4), 100, 10**6) == {0, 1, 2, 3}


class Events:
    """A side stream that notes what is asked of it, and by which buffer."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def copy(self, pairs: Any) -> Any:
        name = f"{pairs[0][0].untyped_storage().data_ptr()}"
        self.log.append(f"copy {name}")
        return lambda: self.log.append(f"wait {name}")


def test_a_copy_waits_for_the_layer_that_had_its_buffer_and_a_layer_for_its_copy() -> None:
    side = Events()
    offload = Offload(frozenset((0, 1, 3)), LateDevice(), side)

    def layer(index: int) -> Any:
        weight = DenseLinear(torch.full((4, 4), float(index)), None)

        def call() -> None:
            side.log.append(f"layer {index}")

        kept = offload.keep(index, weight)
        return OffloadedLayer(offload, call, kept._order, kept._is_first) if isinstance(kept, OffloadedLayer) else call

    for each in [layer(index) for index in range(4)]:
        each()
    a, b = (str(buffer.untyped_storage().data_ptr()) for buffer in offload._buffers)
    assert side.log == [
        *(f"copy {a}", f"copy {b}", f"wait {a}", "layer 0", f"copy {a}"),
        *(f"wait {b}", "layer 1", "layer 2", f"wait {a}", "layer 3"),
    ]


def test_tensors_of_different_sizes_share_a_buffer_that_grows() -> None:
    offload = Offload(frozenset(range(3)), LateDevice(), LateSide())
    codes = [torch.arange(size, dtype=torch.int8) for size in (5, 3, 90)]
    weights = [DenseLinear(each, each.view(torch.uint8)[1:]) for each in codes]
    layers = [offload.keep(index, weight) for index, weight in enumerate(weights)]
    assert offload.offloaded_bytes == 3 * ALIGNMENT
    assert offload.saved_bytes == ALIGNMENT
    larger = DenseLinear(torch.arange(300.0), torch.arange(7, dtype=torch.int8))
    offload._which |= {3, 4}
    layers += [offload.keep(3, larger), offload.keep(4, DenseLinear(torch.arange(8.0), None))]
    found: list[list[Tensor]] = []
    for layer in layers:
        layer._layer = lambda layer=layer, inner=layer._layer: found.append([t.clone() for t in tensors_of(inner)])
        layer()
    for (weight, bias), size in zip(found[:3], (5, 3, 90), strict=True):
        assert weight.tolist() == list(range(size))
        assert bias.tolist() == list(range(1, size))
    assert (found[3][0].tolist(), found[3][1].tolist()) == (list(range(300)), list(range(7)))
    assert found[4][0].tolist() == list(range(8))
    assert tensors_of({"own": larger, "link": SINGLE}) == [larger.weight, larger.bias]


def test_layers_that_run_several_times_are_not_offloaded(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cpu_offload_gb: layers of this HrmTextForCausalLM run several times"):
        engine(tiny_models.save("hrm_text", tmp_path), cpu_offload_gb=1.0)


def test_what_cannot_be_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="cpu_offload_gb keeps a GPU's weights in the host's memory, which is where"):
        load_executor(Options(device="cpu", cpu_offload_gb=1.0))
    for module in (gpu_offload, weight_residency):
        monkeypatch.setattr(module, "host_memory", lambda: HostMemory(1 << 30, 1 << 10))
    with pytest.raises(
        ModelError, match=r"cpu_offload_gb needs 0\.00 GiB more of the host's memory for the next layer"
    ):
        engine(model, cpu_offload_gb=1.0)
