"""Layers whose matrices take in norms, activations and additions, where there are few tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny_models
import torch
from model_driver import DictSource, Driver
from torch import Tensor

from headrace.executor.models.decoder import Decoder
from headrace.executor.models.families import spec_from_config
from headrace.executor.parallel.rank_place import RankCoordinates
from headrace.kernels.reference.rows import DenseLinear, activate_and_multiply, rms_norm
from headrace.kernels.registry import choose_reference

PROMPTS = [[5, 6, 7, 8, 9], [11], [12, 13, 14]]
NEW_TOKENS = 6


class Fusing(DenseLinear):
    """What a kernel of few rows computes, op by op."""

    most_fused_rows = 2

    def __init__(self, weight: Tensor, bias: Tensor | None, calls: list[tuple[int, bool, str | None, bool]]) -> None:
        super().__init__(weight, bias)
        self._calls = calls

    def apply_fused(
        self,
        x: Tensor,
        norm: tuple[Tensor, float] | None = None,
        activation: str | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        self._calls.append((len(x), norm is not None, activation, residual is not None))
        if norm is not None:
            x, _ = rms_norm(x, None, *norm)
        x = self.apply(x)
        if activation is not None:
            x = activate_and_multiply(x, activation)
        return x if residual is None else x + residual


def decoder_of(name: str, choose: Callable[..., Any], place: RankCoordinates | None = None) -> Decoder:
    model = tiny_models.build(name)
    spec = spec_from_config(model.config.to_dict() | {"architectures": [type(model).__name__]})
    return Decoder(spec, DictSource(model.state_dict()), torch.float32, choose=choose, place=place or RankCoordinates())


def fusing(calls: list[tuple[int, bool, str | None, bool]]) -> Callable[..., Any]:
    def choose(op: str, **facts: Any) -> Callable[..., Any]:
        return (lambda weight, bias: Fusing(weight, bias, calls)) if op == "linear" else choose_reference(op)

    return choose


@pytest.mark.parametrize("name", ["llama_biases", "qwen3"])
def test_few_tokens_are_computed_by_four_fused_matrices_a_layer_and_answer_the_same(name: str) -> None:
    calls: list[tuple[int, bool, str | None, bool]] = []
    decoder = decoder_of(name, fusing(calls))
    expected, _ = Driver(decoder_of(name, choose_reference)).greedy(PROMPTS[:2], NEW_TOKENS, 512)
    found, _ = Driver(decoder).greedy(PROMPTS[:2], NEW_TOKENS, 512)
    assert found == expected
    per_layer = [(True, None, False), (False, None, True), (True, "silu", False), (False, None, True)]
    assert [call[1:] for call in calls[:4]] == per_layer
    assert len(calls) % (4 * decoder.spec.num_layers) == 0
    assert {call[0] for call in calls} == {2}, "prompts are computed by the ops"
    calls.clear()
    assert Driver(decoder).greedy(PROMPTS, NEW_TOKENS, 512)[0][:2] == expected
    assert not calls, "three tokens are more than the kernel takes"


@pytest.mark.parametrize("name", ["gemma2", "opt", "opt_projected_post_norm"])
def test_other_norms_and_activations_are_computed_by_the_ops(name: str) -> None:
    calls: list[tuple[int, bool, str | None, bool]] = []
    expected, _ = Driver(decoder_of(name, choose_reference)).greedy(PROMPTS[:1], NEW_TOKENS, 512)
    found, _ = Driver(decoder_of(name, fusing(calls))).greedy(PROMPTS[:1], NEW_TOKENS, 512)
    assert found == expected
    assert not calls


def most_fused_rows(decoder: Any) -> int:
    return int(decoder._layers[0]._most_fused_rows)


def test_a_rank_among_several_adds_its_parts_after_each_matrix() -> None:
    assert most_fused_rows(decoder_of("llama", fusing([]))) == 2
    rank = RankCoordinates(tp_size=2)
    assert most_fused_rows(decoder_of("llama", fusing([]), rank)) == 0
    stage = RankCoordinates(pp_size=2)
    assert most_fused_rows(decoder_of("llama", fusing([]), stage)) == 0
