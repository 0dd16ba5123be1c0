"""The Triton ops on rows (norms, activations, rotary, cache writes, embedding) against their references."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from paged import make_batch

from headrace.kernels import ops
from headrace.kernels.reference.attention import CacheScales
from headrace.kernels.reference.decode import RowsState
from headrace.kernels.reference.rotary_cache import LayerCache, Rotation
from headrace.kernels.reference.rows import LARGEST_STORED
from headrace.kernels.triton import activation, decode, embedding, norms, rotary_cache

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ULP = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""The largest relative difference of an output: one rounding of its dtype."""


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    bound = ULP[expected.dtype]
    torch.testing.assert_close(found.float(), expected.float(), rtol=bound, atol=bound / 2)


def case_norms_add_the_residual_and_round_once() -> None:
    for dtype, (size, shape) in itertools.product(DTYPES, ((1, (5,)), (20, (2, 3)), (129, (5,)))):
        x, residual = (torch.randn(2, *shape, size) * 3).to(dtype)
        weight, bias = torch.randn(2, size)
        norm_cases: tuple[tuple[str, Callable[..., Any], tuple[torch.Tensor | None, ...]], ...] = (
            ("rms_norm", norms.rms_norm, (weight,)),
            ("layer_norm", norms.layer_norm, (weight, bias)),
            ("layer_norm", norms.layer_norm, (None, None)),
        )
        for name, function, affine in norm_cases:
            for second in (None, residual):
                expected, total = ops()[name].reference(x, second, *affine, 1e-5)
                found, found_total = function(x, second, *affine, 1e-5)
                assert_close(found, expected)
                assert torch.equal(found_total, total)


def case_norm_adds_in_place_and_reads_strided_rows() -> None:
    wide = torch.randn(4, 96).bfloat16()
    x, residual, weight = wide[:, 32:64], torch.randn(4, 32).bfloat16(), torch.rand(32)
    expected, total = ops()["rms_norm"].reference(x, residual, weight, 1e-6)
    found, found_total = norms.rms_norm(x, residual, weight, 1e-6, total_out=residual)
    assert found_total is residual
    assert torch.equal(residual, total)
    assert_close(found, expected)


def case_activations() -> None:
    kinds = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "silu_to_7", "silu_below_10", "normal_cdf")
    for dtype, kind in itertools.product(DTYPES, kinds):
        x = (torch.randn(3, 74) * 4).to(dtype)
        assert_close(activation.activate(x, kind), ops()["activate"].reference(x, kind))
        expected = ops()["activate_and_multiply"].reference(x, kind)
        bound = ULP[dtype] * 8  # the activation may round differently in the reference, and up multiplies it
        torch.testing.assert_close(activation.activate_and_multiply(x, kind), expected, rtol=2 * ULP[dtype], atol=bound)


def case_rotary_turns_whole_and_partial_heads() -> None:
    shapes = (((6, 2), 16, 8), ((7, 1), 20, 6), ((4, 0), 16, 8))
    for dtype, (heads, head_dim, half) in itertools.product(DTYPES, shapes):
        joined = torch.randn(5, sum(heads), head_dim).to(dtype)
        query, key = joined.split(heads, dim=1)
        angles = torch.rand(5, half) * 6
        expected = ops()["rotary"].reference(query, key, angles.cos(), angles.sin())
        found = rotary_cache.rotary(query, key, angles.cos(), angles.sin())
        assert_close(found[0], expected[0])
        assert_close(found[1], expected[1])


def case_rotary_and_write_equals_its_parts_and_leaves_padding_alone() -> None:
    kinds = [(False, True, 10), (True, True, 6), (False, False, 6), (True, False, 10), (False, True, 0)]
    for dtype, (interleaved, normed, half) in itertools.product((torch.float32, torch.bfloat16), kinds):
        batch, keys, values = make_batch([(2, 20), (1, 0), (1, 5)], 4, 3, 20, dtype)
        query, key, value = (torch.randn(4, 9 + 3 + 3, 20) * 2).to(dtype).split((9, 3, 3), dim=1)
        angles = torch.rand(4, max(1, half)) * 6
        rotation = Rotation(
            cos=angles.cos() if half else None,
            sin=angles.sin() if half else None,
            interleaved=interleaved,
            query_norm=torch.rand(20) if normed else None,
            key_norm=torch.rand(20) if normed else None,
            eps=1e-6,
        )
        mine, theirs = LayerCache(keys.clone(), values.clone()), LayerCache(keys, values)
        expected = ops()["rotary_and_write"].reference(query, key, value, rotation, theirs, batch)
        assert_close(rotary_cache.rotary_and_write(query, key, value, rotation, mine, batch), expected)
        for found, wanted in ((mine.keys, keys), (mine.values, values)):
            assert torch.equal(found.isnan(), wanted.isnan()), "a slot that is nobody's was written"
            assert_close(found.nan_to_num(), wanted.nan_to_num())


def case_write_cache_stores_scaled_rows_as_the_reference_does() -> None:
    for (row, dtype), (column, stored) in itertools.product(enumerate(DTYPES), enumerate(LARGEST_STORED)):
        per = ("layer", "head", "row")[(row + column) % 3]  # each pair of the three once
        batch, keys, _ = make_batch([(3, 20), (1, 5), (2, 0), (9, 9)], 4, 2, 24, torch.float32)
        key, value = (torch.randn(2, 15, 2, 24) * 100).to(dtype)
        key[0, 0] = 0
        key[1, 1] *= 1e-3  # subnormal as e4m3
        key[2, 0] *= 1e-7  # subnormal as e5m2
        caches, scales = [], []
        for _ in range(2):
            caches.append(torch.zeros(2, *keys.shape).to(stored))
            rows = torch.zeros(2, *keys.shape[:3])
            of_heads = CacheScales(torch.tensor([0.9, 0.5]), torch.tensor([0.3, 1.3]))
            whole = of_heads if per == "head" else CacheScales(key=0.9, value=0.3)
            scales.append(CacheScales(keys=rows[0], values=rows[1]) if per == "row" else whole)
        ops()["write_cache"].reference(key, value, *caches[0], batch, scales[0])
        rotary_cache.write_cache(key, value, caches[1][0], caches[1][1], batch, scales[1])
        assert torch.equal(caches[0].view(torch.uint8), caches[1].view(torch.uint8))
        if per == "row":
            assert torch.equal(scales[0].keys, scales[1].keys)
            assert torch.equal(scales[0].values, scales[1].values)


def case_write_cache_hides_nothing_that_is_not_finite() -> None:
    for dtype, stored, per_row in itertools.product(DTYPES, LARGEST_STORED, (True, False)):
        if stored == torch.int8 and not per_row:
            continue  # int8 has scales per row alone
        batch, keys, _ = make_batch([(3, 20), (1, 5)], 4, 2, 24, torch.float32)
        key, value = torch.randn(2, 4, 2, 24).to(dtype)
        key[1, 0, 3], value[2, 1, 5] = float("nan"), float("inf")
        cache = torch.zeros(2, *keys.shape).to(stored)
        rows = torch.ones(2, *keys.shape[:3])
        scales = CacheScales(keys=rows[0], values=rows[1]) if per_row else CacheScales(key=0.9, value=0.3)
        rotary_cache.write_cache(key, value, cache[0], cache[1], batch, scales)
        found = cache.float() * rows[..., None]
        slots = batch.slot_mapping
        for written, given in zip(found, (key, value), strict=True):
            spoilt = ~given.isfinite()
            expected = spoilt.any(-1, keepdim=True).expand_as(spoilt) if per_row else spoilt
            stored_rows = written.permute(0, 2, 1, 3).flatten(0, 1)[slots]
            assert torch.equal(~stored_rows.isfinite(), expected)


def case_embedding_of_a_part_of_the_vocabulary() -> None:
    for dtype, scale, ids_dtype in itertools.product(DTYPES, (1.0, 5.6568), (torch.int32, torch.int64)):
        table = torch.randn(11, 40).to(dtype)
        token_ids = torch.tensor([7, 8, 18, 19, -1, 0, 12], dtype=ids_dtype)
        expected = ops()["embed"].reference(token_ids, table, 8, scale)
        assert torch.equal(embedding.embed(token_ids, table, 8, scale), expected)
        assert not expected[[0, 3, 4, 5]].any()


def case_inputs_of_a_decode_are_gathered_and_its_rows_move_on() -> None:
    """Wide tables need several programs; the padding row does not advance."""
    for max_blocks, num_blocks in ((3, 3), (2100, 2100), (2100, 5)):
        computed = [4 * num_blocks - 1, 0, 17 % (4 * num_blocks), 2, 0]
        columns = [torch.randint(0, 1000, (5,), dtype=torch.int32) for _ in range(2)]
        table = torch.randint(0, 1 << 30, (3, 5, max_blocks), dtype=torch.int32)  # of three cache groups
        batch_rows = torch.tensor([3, 0, 2, 4, 4], dtype=torch.int32)
        states = [RowsState(table, columns[0], torch.tensor(computed, dtype=torch.int32), columns[1]) for _ in range(2)]
        expected = ops()["decode_inputs"].reference(batch_rows, states[0], 4, num_blocks)
        found = decode.decode_inputs(batch_rows, states[1], 4, num_blocks)
        for name, value in expected._asdict().items():
            assert torch.equal(getattr(found, name), value), name
            assert getattr(found, name).dtype == value.dtype, name
        assert torch.equal(states[0].num_computed, states[1].num_computed)
        assert found.next_positions.tolist() == [3, 4 * num_blocks, computed[2] + 1, 0, 0]
