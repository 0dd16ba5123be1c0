"""What ranks cannot share evenly is filled up with zeros: how far, and where they lie."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_driver import DictSource
from torch import Tensor

from headrace.executor.models.arch import ArchSpec, LayerSpec, NormSpec
from headrace.executor.models.blocks.attention import Attention
from headrace.executor.models.blocks.dense import Dense
from headrace.executor.parallel.padding import packed_part, padded_for
from headrace.executor.parallel.rank_place import RankCoordinates
from headrace.ipc.failure import ModelError

HEAD_DIM, HIDDEN = 4, 6


def spec_of(num_heads: int, num_kv_heads: int, inner: int = 8) -> ArchSpec:
    mixer = Attention(num_heads, num_kv_heads, HEAD_DIM, scale=1.0, rope=None, bias=True, output_bias=True)
    return ArchSpec(
        architecture="Tiny",
        hidden_size=HIDDEN,
        vocab_size=16,
        max_positions=8,
        layers=(LayerSpec(mixer, Dense(inner, "silu")),),
        norm=NormSpec("rms", 1e-6),
    )


def sizes(spec: ArchSpec) -> tuple[int, int, int]:
    return spec.num_heads, spec.mixers[0].cache.num_heads, spec.intermediate_size


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp_size", "padded"),
    [
        (9, 3, 1, (9, 3)),
        (9, 3, 2, (12, 4)),
        (9, 3, 3, (9, 3)),
        (9, 3, 4, (12, 4)),  # the last rank has padding alone
        (9, 3, 8, (16, 4)),  # each key/value head on two ranks, which halve a group of 4 for 3
        (6, 1, 4, (8, 1)),
        (6, 2, 4, (8, 2)),
        (7, 1, 2, (8, 1)),
        (8, 4, 6, (12, 6)),
        (32, 8, 4, (32, 8)),
        (32, 8, 16, (32, 8)),
    ],
)
def test_heads_become_what_ranks_can_share(heads: int, kv_heads: int, tp_size: int, padded: tuple[int, int]) -> None:
    assert sizes(spec_of(heads, kv_heads).for_ranks(tp_size))[:2] == padded


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 24), st.integers(1, 70), st.sampled_from([1, 32]))
def test_every_rank_has_the_same_whole_heads_and_blocks(
    kv_heads: int, group: int, tp_size: int, inner: int, block: int
) -> None:
    spec = spec_of(kv_heads * group, kv_heads, inner)
    if spec.num_heads < tp_size:
        with pytest.raises(ModelError, match=f"{spec.num_heads} attention heads cannot be divided among {tp_size}"):
            spec.for_ranks(tp_size)
        return
    padded = spec.for_ranks(tp_size, block)
    heads, kv, columns = sizes(padded)
    assert heads % tp_size == 0
    assert kv % tp_size == 0 or tp_size % kv == 0
    assert heads % kv == 0
    # A rank's query heads belong to its own key/value heads, and to no others.
    assert (heads // tp_size) % max(1, kv // tp_size) == 0
    assert tp_size == 1 or columns % (tp_size * block) == 0
    assert all(now >= was for now, was in zip(sizes(padded), sizes(spec), strict=True))
    assert padded.for_ranks(tp_size, block) == padded


def checkpoint(spec: ArchSpec) -> dict[str, Tensor]:
    queries, keys, inner = spec.num_heads * HEAD_DIM, spec.mixers[0].cache.num_heads * HEAD_DIM, spec.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (queries, HIDDEN),
        "self_attn.q_proj.bias": (queries,),
        "self_attn.k_proj.weight": (keys, HIDDEN),
        "self_attn.v_proj.weight": (keys, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, queries),
        "self_attn.o_proj.bias": (HIDDEN,),
        "mlp.gate_proj.weight": (inner, HIDDEN),
        "mlp.up_proj.weight": (inner, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, inner),
    }
    return {"model.embed_tokens.weight": torch.zeros(16, HIDDEN)} | {
        f"model.layers.0.{name}": torch.arange(1, 1 + int(np.prod(shape))).reshape(shape).to(torch.float16)
        for name, shape in shapes.items()
    }


def padded_by_hand(name: str, tensor: Tensor, spec: ArchSpec, padded: ArchSpec) -> Tensor:
    """With whole tensors and no spans: as [groups, heads of a group, head_dim], filled up at each end."""
    if "q_proj" in name or "o_proj.weight" in name:
        rows = tensor if "q_proj" in name else tensor.T
        group, padded_group = (each.num_heads // each.mixers[0].cache.num_heads for each in (spec, padded))
        by_head = rows.reshape(spec.mixers[0].cache.num_heads, group, HEAD_DIM, *rows.shape[1:])
        whole = by_head.new_zeros(padded.mixers[0].cache.num_heads, padded_group, HEAD_DIM, *rows.shape[1:])
        whole[: spec.mixers[0].cache.num_heads, :group] = by_head
        whole = whole.reshape(-1, *rows.shape[1:])
        return whole if "q_proj" in name else whole.T
    added = {
        "k_proj": padded.mixers[0].cache.num_heads - spec.mixers[0].cache.num_heads,
        "v_proj": padded.mixers[0].cache.num_heads - spec.mixers[0].cache.num_heads,
    }
    for part, heads in added.items():
        if part in name:
            return torch.nn.functional.pad(tensor, (0, 0, 0, heads * HEAD_DIM))
    inner = padded.intermediate_size - spec.intermediate_size
    if "gate" in name or "up_proj" in name:
        return torch.nn.functional.pad(tensor, (0, 0, 0, inner))
    return torch.nn.functional.pad(tensor, (0, inner)) if "down" in name else tensor


@given(st.data())
def test_any_part_is_that_of_the_whole_padded_tensor(data: Any) -> None:
    heads, kv_heads, tp_size = data.draw(st.sampled_from([(9, 3, 2), (9, 3, 4), (9, 3, 8), (6, 2, 4), (5, 1, 2)]))
    spec = spec_of(heads, kv_heads, inner=7)
    tensors = checkpoint(spec)
    padded, source = padded_for(spec, DictSource(tensors), RankCoordinates.of(1, tp_size, 1))
    name = data.draw(st.sampled_from(sorted(tensors)))
    expected = padded_by_hand(name, tensors[name], spec, padded)
    assert source.shape(name) == tuple(expected.shape)

    def cut(size: int) -> slice | None:
        ends = st.tuples(st.integers(0, size), st.integers(0, size))
        return data.draw(st.none() | ends.map(lambda both: slice(min(both), max(both))))

    rows = cut(expected.shape[0])
    columns = cut(expected.shape[1]) if expected.dim() > 1 else None
    part = expected[rows or slice(None)]
    assert torch.equal(source.get(name, rows=rows, columns=columns), part if columns is None else part[:, columns]) or (
        part.numel() == 0
    )


def test_blocks_are_cut_where_they_end_and_nowhere_else() -> None:
    """Blocks of 4 elements in 2 bytes: 3 groups of 1 head of 4 columns, a fourth of padding."""
    spec = spec_of(3, 3)
    name = "model.layers.0.self_attn.o_proj.weight"
    padded, source = padded_for(spec, DictSource(checkpoint(spec)), RankCoordinates.of(1, 2, 1))
    stored = source.stored(name)
    data = np.arange(1, 1 + HIDDEN * 6, dtype=np.uint8).reshape(HIDDEN, 6)
    last_half = packed_part(stored, data, (4, 2), slice(2, 4), slice(8, 16))
    assert last_half is not None
    assert last_half.tolist() == [[17, 18, 0, 0], [23, 24, 0, 0]]
    assert packed_part(stored, data, (8, 4), None, slice(8, 16)) is None  # half of the second block is padding
    plain = packed_part(DictSource(checkpoint(spec)).stored(name), data, (4, 2), None, slice(4, 12))
    assert plain is not None
    assert np.shares_memory(plain, data)
    assert padded.mixers[0].cache.num_heads == 4


def test_a_tensor_of_another_shape_is_named_with_the_models_own_numbers() -> None:
    spec = spec_of(9, 3)
    tensors = checkpoint(spec) | {"model.layers.0.self_attn.k_proj.weight": torch.zeros(8, HIDDEN)}
    _, source = padded_for(spec, DictSource(tensors), RankCoordinates.of(0, 2, 1))
    with pytest.raises(ModelError, match=r"k_proj\.weight has shape \[8, 6\], but the config needs \[12, 6\]"):
        source.shape("model.layers.0.self_attn.k_proj.weight")


def test_what_divides_is_left_as_it_is() -> None:
    spec = spec_of(8, 4)
    source = DictSource(checkpoint(spec))
    assert padded_for(spec, source, RankCoordinates.of(3, 4, 1)) == (spec, source)
    assert dataclasses.replace(spec.for_ranks(4)) == spec
