"""Records of tensors and transformations of them: what one leaves out is an error, or changes nothing."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from gguf.constants import GGMLQuantizationType
from model_driver import DictSource
from tiny_gguf import save_gguf
from torch import Tensor

from headrace.core.options.engine_options import Options
from headrace.executor.checkpoints.checkpoint import Checkpoint, open_checkpoint
from headrace.executor.checkpoints.weights import Numbers, StoredTensor, Weights, WeightSource
from headrace.executor.cpu.decoder import CpuDecoder
from headrace.executor.cpu.program import StepLimits
from headrace.executor.models.families import spec_from_config
from headrace.executor.parallel.padding import packed_part
from headrace.ipc.failure import InconsistentError
from headrace.kernels.cpu import build
from headrace.kernels.cpu.linear.linear import runtime

needs_kernels = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))
NORM, DOWN = "model.norm.weight", "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A GGUF file whose matrices are Q8_0."""
    file = tmp_path_factory.mktemp("quantised") / "model.gguf"
    save_gguf(tiny_models.build("llama"), file, GGMLQuantizationType.Q8_0)
    return open_checkpoint(Options(model=str(file)))


def loaded(checkpoint: Checkpoint, weights: Any) -> CpuDecoder:
    spec, limits = spec_from_config(checkpoint.config), StepLimits(16, 2, 64, 0)
    return CpuDecoder(spec, weights, torch.bfloat16, limits, keep_packed=True, used=runtime(num_threads=1))


class PassesSomeOn:
    """Passes on what a source of floats needs, and forgets that tensors may be packed."""

    def __init__(self, source: WeightSource) -> None:
        self.names, self.shape, self.get = source.names, source.shape, source.get


@needs_kernels
def test_what_wraps_weights_and_forgets_the_packed_form_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(TypeError, match="a PassesSomeOn is no WeightSource"):
        loaded(checkpoint, PassesSomeOn(checkpoint.weights()))


@needs_kernels
def test_a_transformation_of_one_tensor_leaves_all_others_as_they_are_stored(checkpoint: Checkpoint) -> None:
    weights = checkpoint.weights()
    norm = weights.stored(NORM)
    doubled = StoredTensor.plain(norm.shape, norm.format, lambda *part: norm.numbers.part(*part) * 2)
    changed = weights.then("a doubled norm", frozenset({NORM}), lambda _: doubled)
    assert changed.names() == weights.names()
    assert changed.get(NORM).equal(weights.get(NORM) * 2)
    for name in weights.names() - {NORM}:
        before, after = weights.stored(name), changed.stored(name)
        assert (before.format, before.group, before.shape) == (after.format, after.group, after.shape)
        packed, now = weights.packed(name), changed.packed(name)
        assert (packed is None) == (now is None) == ("norm" in name)
        if isinstance(packed, tuple) and isinstance(now, tuple):
            assert np.array_equal(packed[1], now[1])
    one, other = loaded(checkpoint, weights), loaded(checkpoint, changed)
    assert one.weight_bytes == other.weight_bytes, "nothing became floats"
    assert [each.type_name for each in other._model.layers[0].ffn["down"].weights] == ["Q8_0"]


def test_a_record_must_have_every_field() -> None:
    whole = StoredTensor.plain((2, 2), "float32", lambda rows, columns: torch.zeros(2, 2))
    fields = {name: getattr(whole, name) for name in StoredTensor.__dataclass_fields__}
    assert StoredTensor(**fields) == whole
    for name in fields:
        with pytest.raises(TypeError, match=name):
            StoredTensor(**{each: value for each, value in fields.items() if each != name})
    with pytest.raises(TypeError, match="packed"):
        Numbers(whole.numbers.part)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="part"):
        replace(whole, part=whole.numbers.part)  # type: ignore[call-arg]


def test_a_source_must_have_records_and_nothing_beside_them() -> None:
    class NoRecords(WeightSource):
        def names(self) -> frozenset[str]:
            return frozenset()

    with pytest.raises(TypeError, match="stored"):
        NoRecords()  # type: ignore[abstract]
    with pytest.raises(TypeError, match=r"Doubling defines get, which follow from `stored`"):

        class Doubling(DictSource):
            def get(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
                return self.stored(name).numbers.part(rows, columns) * 2


def test_a_packed_form_that_is_not_its_records_is_found(checkpoint: Checkpoint) -> None:
    stored = checkpoint.weights().stored(DOWN)
    packed = checkpoint.weights().packed(DOWN)
    assert isinstance(packed, tuple)
    assert packed_part(stored, packed[1], (32, 34), None, None) is not None
    for shape in ((stored.shape[0] * 2, stored.shape[1]), (stored.shape[0], stored.shape[1] + 32)):
        with pytest.raises(InconsistentError, match="its record says"):
            packed_part(replace(stored, shape=shape), packed[1], (32, 34), None, None)


def test_the_list_of_transformations_is_printed() -> None:
    source = DictSource({"a": torch.zeros(4, 2), "b": torch.zeros(4, dtype=torch.bfloat16)})
    a = source.stored("a")
    halves = Weights(source).then(
        "halves", frozenset({"a.0", "a.1"}), lambda name: replace(a, shape=(2, 2)), frozenset({"a"})
    )
    assert str(halves).split("\n    ") == [
        "DictSource: 2 tensors",
        "1. halves: makes 2, removes 1",
        "= 3 tensors: 2 of float32, 1 of bfloat16",
    ]


@needs_kernels
def test_a_rank_logs_what_its_weights_are_made_of(checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="headrace.executor.models.reading"):
        loaded(checkpoint, checkpoint.weights())
    (line,) = caplog.messages
    assert "rank 0 reads GGUFWeights: 21 tensors" in line
    assert "of Q8_0 in groups of 32" in line
