"""The reference ops against plain formulas, and how a version of an op is chosen."""

from __future__ import annotations

import random

import pytest
import torch
from thinned import every, pairs
from torch import Tensor

from headrace.kernels import Op, Version, ops
from headrace.kernels.reference.attention import AttentionParams, PagedBatch, paged_attention

BOUND = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}
"""Largest error of an output near 1: a few roundings of the output's own dtype."""


def make_batch(
    lengths: list[tuple[int, int]], block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[PagedBatch, Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """Caches that hold NaN wherever no sequence of (new tokens, context) has written; and the dense keys and values."""
    numbers = random.Random(3)
    counts = [-(-context // block_size) for _, context in lengths]
    free = list(range(sum(counts) + 5))
    numbers.shuffle(free)
    shape = (len(free), num_kv_heads, block_size, head_dim)
    keys, values = torch.full(shape, float("nan"), dtype=dtype), torch.full(shape, float("nan"), dtype=dtype)
    tables = torch.full((len(lengths), max(counts) + 2), free.pop(), dtype=torch.int32)
    dense, slots = [], []
    for i, (new, context) in enumerate(lengths):
        blocks = [free.pop() for _ in range(counts[i])]
        tables[i, : counts[i]] = torch.tensor(blocks, dtype=torch.int32)
        key, value = torch.randn(2, context, num_kv_heads, head_dim).to(dtype)
        dense.append((key, value))
        for position in range(context):
            block, offset = blocks[position // block_size], position % block_size
            keys[block, :, offset], values[block, :, offset] = key[position], value[position]
        slots += [blocks[p // block_size] * block_size + p % block_size for p in range(context - new, context)]
    starts = torch.tensor([0] + [new for new, _ in lengths], dtype=torch.int32).cumsum(0).to(torch.int32)
    seq_lens = torch.tensor([context for _, context in lengths], dtype=torch.int32)
    return PagedBatch(starts, seq_lens, tables, torch.tensor(slots), block_size), keys, values, dense


def plain_attention(query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
    """query [new, heads, d], key and value [context, kv_heads, d] -> [new, heads, d], in float64."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(group, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * params.scale
    if params.soft_cap is not None:
        scores = params.soft_cap * torch.tanh(scores / params.soft_cap)
    at = torch.arange(len(key) - len(query), len(key))[:, None]
    columns = torch.arange(len(key))
    hidden = (columns > at) & params.causal
    if params.sliding_window is not None:
        hidden |= (columns - at).abs() >= params.sliding_window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), value)


@pytest.mark.parametrize("dtype", list(BOUND), ids=str)
@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize(("window", "heads"), pairs((None, 1, 19, 300), ((6, 2), (7, 1), (3, 3))))
def test_paged_attention_equals_dense_attention(
    dtype: torch.dtype, soft_cap: float | None, window: int | None, heads: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    lengths = [(1, 1), (5, 5), (1, 40), (600, 610), (1, 33), (1, 16), (17, 300), (1, 301), (2, 32)]
    batch, keys, values, dense = make_batch(lengths, 16, heads[1], 20, dtype)
    query = torch.randn(sum(new for new, _ in lengths), heads[0], 20).to(dtype)
    params = AttentionParams(20**-0.5, window, soft_cap)
    out = paged_attention(query, keys, values, batch, params)
    assert out.dtype == dtype
    for i, (key, value) in enumerate(dense):
        span = slice(batch.query_starts[i], batch.query_starts[i + 1])
        expected = plain_attention(query[span], key, value, params)
        assert (out[span].double() - expected).abs().max() < BOUND[dtype] * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("soft_cap", every(2, [None, 1.5]))
@pytest.mark.parametrize("window", [None, 1, 19, 300])
def test_attention_to_later_tokens_too(soft_cap: float | None, window: int | None) -> None:
    torch.manual_seed(0)
    lengths = [(1, 1), (5, 5), (600, 600), (16, 16), (17, 17), (17, 300)]
    batch, keys, values, dense = make_batch(lengths, 16, 2, 20, torch.float32)
    query = torch.randn(sum(new for new, _ in lengths), 6, 20)
    params = AttentionParams(20**-0.5, window, soft_cap, causal=False)
    out = paged_attention(query, keys, values, batch, params)
    for i, (key, value) in enumerate(dense):
        span = slice(batch.query_starts[i], batch.query_starts[i + 1])
        expected = plain_attention(query[span], key, value, params)
        assert (out[span].double() - expected).abs().max() < BOUND[torch.float32] * max(
            1.0, float(expected.abs().max())
        )
    for version in ops()["paged_attention"].versions:
        if version.name != "cpu_native":  # tests/models/test_encoders.py compares models that compute by it
            assert "causal" in version.why_not(head_dim=24, num_heads=6, num_kv_heads=2, is_causal=False)


@pytest.mark.parametrize("dtype", list(BOUND), ids=str)
def test_write_cache_fills_the_slots_and_no_other(dtype: torch.dtype) -> None:
    batch, keys, values, dense = make_batch([(3, 20), (1, 5), (9, 9)], 4, 2, 6, dtype)
    filled_keys, filled_values = keys.clone(), values.clone()
    at = [(slot // 4, slot % 4) for slot in batch.slot_mapping.tolist()]
    for block, offset in at:
        keys[block, :, offset] = values[block, :, offset] = float("nan")
    key = torch.cat([k[-new:] for (k, _), new in zip(dense, (3, 1, 9), strict=True)])
    value = torch.cat([v[-new:] for (_, v), new in zip(dense, (3, 1, 9), strict=True)])
    ops()["write_cache"].reference(key, value, keys, values, batch)
    torch.testing.assert_close(keys, filled_keys, atol=0, rtol=0, equal_nan=True)
    torch.testing.assert_close(values, filled_values, atol=0, rtol=0, equal_nan=True)


def test_norms_add_the_residual_and_round_once() -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(2, 5, 48).bfloat16()
    weight, bias = torch.randn(2, 48)
    total = x + residual
    wide = total.double()
    normed, added = ops()["rms_norm"].reference(x, residual, weight, 1e-5)
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert torch.equal(added, total)
    assert torch.equal(normed, expected.bfloat16())
    normed, added = ops()["layer_norm"].reference(x, residual, weight, bias, 1e-5)
    centred = wide - wide.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double() + bias.double()
    assert torch.equal(added, total)
    assert torch.equal(normed, expected.bfloat16())
    normed, added = ops()["rms_norm"].reference(x, None, weight, 1e-5)
    assert added is x


def test_rotary_turns_pairs_by_their_angle_and_leaves_the_rest() -> None:
    query, key = torch.randn(4, 3, 10), torch.randn(4, 1, 10)
    angles = torch.rand(4, 3) * 6
    for x, turned in zip((query, key), ops()["rotary"].reference(query, key, angles.cos(), angles.sin()), strict=True):
        pairs = torch.complex(x[..., :3], x[..., 3:6]) * torch.polar(torch.ones(4, 3), angles)[:, None]
        torch.testing.assert_close(turned, torch.cat([pairs.real, pairs.imag, x[..., 6:]], dim=-1))


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu", "relu2", "normal_cdf"])
def test_activate_and_multiply_takes_the_gate_from_the_first_half(kind: str) -> None:
    gate, up = torch.randn(2, 3, 8)
    fused = ops()["activate_and_multiply"].reference(torch.cat([gate, up], dim=-1), kind)
    torch.testing.assert_close(fused, ops()["activate"].reference(gate, kind) * up)


@pytest.mark.parametrize(("kind", "limit"), [("silu_to_7", 7.0), ("silu_to_16", 16.0)])
def test_a_limit_is_that_of_the_activated_gate_and_of_the_magnitude_of_up(kind: str, limit: float) -> None:
    gate, up = (torch.linspace(first, -first, 41) for first in (-40.0, 30.0))
    fused = ops()["activate_and_multiply"].reference(torch.cat([gate, up]), kind)
    activated = torch.where(gate > limit, limit, gate * gate.sigmoid()).clamp(max=limit)
    torch.testing.assert_close(fused, activated * up.clamp(-limit, limit))
    assert fused.abs().max() == limit * limit


def test_a_gate_may_have_a_limit_before_it_is_activated() -> None:
    gate, up = (torch.linspace(first, -first, 41) for first in (-40.0, 30.0))
    fused = ops()["activate_and_multiply"].reference(torch.cat([gate, up]), "silu_below_10")
    below = torch.where(gate > 10, 10.0, gate)
    torch.testing.assert_close(fused, below * below.sigmoid() * up.clamp(-10, 10))


def test_choose_takes_the_first_version_that_has_no_reason_against_it() -> None:
    def only_bf16(dtype: torch.dtype, **_: object) -> str:
        return "" if dtype == torch.bfloat16 else f"computes bfloat16 only, not {dtype}"

    def slow() -> None: ...
    def fast() -> None: ...

    op = Op("demo", slow, (Version("demo", "fast", fast, only_bf16),))
    device = torch.device("cpu")
    assert op.choose(device=device, dtype=torch.bfloat16).function is fast
    choice = op.choose(device=device, dtype=torch.float32)
    assert (choice.name, choice.function) == ("reference", slow)
    assert choice.refused == (("fast", "computes bfloat16 only, not torch.float32"),)


def test_a_refused_version_is_logged_once_for_each_reason(caplog: pytest.LogCaptureFixture) -> None:
    def only_small(size: int, **_: object) -> str:
        return "" if size <= 8 else f"holds rows of up to 8 values, not {size}."

    def small() -> None: ...
    def reference() -> None: ...

    op = Op("logged", reference, (Version("logged", "small", small, only_small, device_type="cpu"),))
    caplog.set_level("INFO", "headrace.kernels.registry")
    for size in (8, 9, 9, 10, 9):
        op.choose(device=torch.device("cpu"), dtype=torch.float32, size=size)
    op.choose(device=torch.device("meta"), dtype=torch.float32, size=11)
    assert [record.getMessage() for record in caplog.records] == [
        f"the small version of logged is not used: holds rows of up to 8 values, not {size}." for size in (9, 10)
    ], "each once, and nothing of a device that it is not made for"


def test_versions_are_made_for_the_device_of_their_package() -> None:
    made_for = {version.name: version.device_type for op in ops().values() for version in op.versions}
    assert made_for["cpu_native"] == made_for["cpu_packed"] == "cpu"
    assert made_for["triton"] == "cuda"


def test_every_op_of_the_decoder_has_a_reference() -> None:
    assert {
        "linear", "rms_norm", "layer_norm", "rotary", "write_cache", "paged_attention", "activate",
        "activate_and_multiply",
    } <= ops().keys()  # fmt: skip
