"""Layers that keep a state per sequence, on the CPU kernels: against their references, and bitwise the same however
tokens are divided among steps, threads and batches, with replayed drafts and from snapshots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from cpu_pools import many_threads_ops, two_threads_ops  # noqa: F401
from torch import Tensor

from headrace import kernels
from headrace.kernels.cpu.ops import CpuOps
from headrace.kernels.cpu.recurrent import args as mirrors
from headrace.kernels.cpu.recurrent.states import StateOps
from headrace.kernels.reference.gated_lru import GatedLruParams
from headrace.kernels.reference.linear_attention import LinearAttentionParams
from headrace.kernels.reference.selective import SelectiveParams
from headrace.kernels.reference.states import ConvolveParams, KeptUnits, LayerState, ScanParams, Snapshot, StateBatch

MOST_DRAFTS = 4
PAGES = 40


@dataclass(frozen=True)
class Case:
    """An op with its inputs for one token after another, and where its state lies."""

    op: str
    params: Any
    columns: tuple[int, ...]
    """Of each input; 0: it is None."""
    units: int
    shape: tuple[int, ...]
    draft_elements: int

    def state(self, dtype: torch.dtype = torch.float32) -> LayerState:
        elements = int(torch.tensor(self.shape).prod())
        per_page = -(-self.units // 2)  # of two pages
        page = torch.arange(self.units) // per_page
        offset = torch.arange(self.units) % per_page * (elements + 3) + 5
        memory = torch.full((PAGES, per_page * (elements + 3) + 9), torch.nan, dtype=dtype)
        name = "history" if self.op == "convolve" else "state"
        drafted = torch.full((8, MOST_DRAFTS, self.draft_elements), torch.nan)
        return LayerState({name: KeptUnits(memory, page, offset, self.shape)}, drafted)

    def inputs(self, num_tokens: int, seed: int = 0) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        return tuple(torch.randn(num_tokens, size, generator=generator) for size in self.columns)

    @property
    def reference(self) -> Callable[..., Tensor]:
        return kernels.choose_reference(self.op)


def convolution(channels: int, width: int, *, gated: bool = False, silu: bool = False, bias: bool = False) -> Case:
    params = ConvolveParams(
        torch.randn(channels, width), torch.randn(channels) if bias else None, "silu" if silu else None, gated
    )
    return Case("convolve", params, (channels * (3 if gated else 1),), width - 1, (channels,), channels)


def recurrence(heads: int, head_dim: int, size: int, groups: int, limits: tuple[float, float] = (0.0, 1e9)) -> Case:
    params = ScanParams(
        decay=-torch.rand(heads) * 4,
        skip=torch.randn(heads),
        step_bias=torch.randn(heads),
        step_limits=limits,
        num_heads=heads,
        head_dim=head_dim,
        state_size=size,
        num_groups=groups,
        first_draft_element=6,
    )
    inner, mixed = heads * head_dim, heads * head_dim + 2 * groups * size
    return Case("scan", params, (mixed, heads, inner), heads, (head_dim, size), 6 + mixed + heads)


def attention(
    heads: int,
    key_heads: int,
    key_dim: int,
    value_dim: int,
    *,
    decays: int,
    correction: float = 0.0,
    floor: float = 0.0,
) -> Case:
    """decays: columns of each head."""
    params = LinearAttentionParams(
        num_heads=heads,
        num_key_heads=key_heads,
        key_of_head=torch.arange(heads) % key_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        decay=-torch.rand(heads),
        decay_bias=torch.randn(heads * decays) if decays else None,
        correction=correction,
        unit_keys=correction > 0,
        scale=key_dim**-0.5,
        decay_floor=floor,
        first_draft_element=3,
    )
    columns = (sum(params.parts), heads * decays, heads if correction else 0)
    return Case("linear_attention", params, columns, heads, (key_dim, value_dim), 3 + sum(columns))


def selection(channels: int, size: int) -> Case:
    params = SelectiveParams(-torch.rand(size, channels) * 4, torch.randn(channels))
    columns = (channels, channels, 2 * size, channels)
    return Case("selective_scan", params, columns, size, (channels,), 3 * channels + 2 * size)


def linear_units(heads: int, head_dim: int) -> Case:
    channels, shape = heads * head_dim, (heads, head_dim, head_dim)
    params = GatedLruParams(
        decay=torch.randn(channels),
        input_weight=torch.randn(shape),
        input_bias=torch.randn(heads, 1, head_dim),
        recurrence_weight=torch.randn(shape),
        recurrence_bias=torch.randn(heads, 1, head_dim),
    )
    return Case("gated_lru", params, (channels,), heads, (head_dim,), 2 * channels)


torch.manual_seed(0)
CASES = {
    "LFM2's convolution": convolution(64, 3, gated=True),
    "Mamba's convolution": convolution(83, 4, silu=True, bias=True),
    "two taps": convolution(20, 2),
    "a scan": recurrence(4, 16, 128, 1),
    "odd sizes, groups, limits": recurrence(6, 7, 20, 3, (0.01, 0.8)),
    "a gated delta rule": attention(4, 2, 128, 128, decays=1, correction=1.0),
    "of odd sizes, with decays of channels": attention(3, 3, 19, 21, decays=19, correction=2.0),
    "of decays of channels with a floor": attention(3, 3, 19, 21, decays=19, correction=1.0, floor=-5.0),
    "of decays with a floor": attention(2, 2, 16, 32, decays=1, correction=1.0, floor=-5.0),
    "of constant decays, without corrections": attention(4, 4, 32, 80, decays=0),
    "a selective scan": selection(83, 16),
    "gated linear units": linear_units(3, 19),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@dataclass(frozen=True)
class Part:
    """A sequence's tokens in one step."""

    sequence: int
    first: int
    count: int
    drafts: int = 0
    """Of `count`, the last ones."""
    replayed: int = 0
    source: int | None = None
    """Sequence or snapshot whose pages have the state; None: zeros, in a first step; by default its own."""
    snapshots: tuple[tuple[int, int], ...] = ()
    """(inputs, number of the snapshot)"""


def pages(number: int) -> Tensor:
    return torch.tensor([2 * number + 1, 2 * number])


def run(case: Case, op: Callable[..., Tensor], state: LayerState, parts: Sequence[Part], inputs: Any) -> list[Tensor]:
    """One step; inputs: by sequence. Returns each part's rows."""
    tokens = [tuple(each[part.first : part.first + part.count] for each in inputs[part.sequence]) for part in parts]
    given = [torch.cat(each) if each[0].shape[1] else None for each in zip(*tokens, strict=True)]
    snapshots = [
        Snapshot(index, end, pages(number)) for index, part in enumerate(parts) for end, number in part.snapshots
    ]
    batch = StateBatch(
        query_start=torch.tensor([0, *(part.count for part in parts)]).cumsum(0).to(torch.int32),
        rows=torch.tensor([part.sequence for part in parts]),
        pages=torch.stack([pages(part.sequence) for part in parts]),
        sources=torch.stack([pages(part.source or 0) for part in parts]),
        has_source=torch.tensor([int(part.source is not None) for part in parts]),
        replayed=torch.tensor([part.replayed for part in parts]),
        committed=torch.tensor([part.count - part.drafts for part in parts]),
        snapshots=tuple(snapshots),
    )
    return list(op(*given, case.params, batch, state).split([part.count for part in parts]))


def in_chunks(case: Case, op: Callable[..., Tensor], inputs: Any, sizes: int, state: LayerState) -> Tensor:
    """All tokens of sequence 0, in steps of `sizes`."""
    total, found = len(inputs[0][0]), []
    for first in range(0, total, sizes):
        part = Part(0, first, min(sizes, total - first), source=None if first == 0 else 0)
        found += run(case, op, state, [part], inputs)
    return torch.cat(found)


def kept(case: Case, state: LayerState, number: int) -> Tensor:
    return next(iter(state.kept.values())).read(pages(number))


def of(case: Case, ops: CpuOps) -> Callable[..., Tensor]:
    found: Callable[..., Tensor] = getattr(StateOps(ops.runtime), case.op)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_ops_equal_their_references(case: Case, ops: CpuOps, dtype: torch.dtype) -> None:
    inputs = [tuple(each.to(dtype) for each in case.inputs(70, seed)) for seed in range(2)]
    parts = [Part(0, 0, 70, drafts=2, snapshots=((16, 5), (48, 6))), Part(1, 0, 40, snapshots=((40, 7),))]
    ours, theirs = case.state(), case.state()
    found, wanted = (
        torch.cat(run(case, op, state, parts, inputs)).float()
        for op, state in ((of(case, ops), ours), (case.reference, theirs))
    )
    bound = 2e-5 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(found, wanted, rtol=bound, atol=bound)
    for number in (0, 1, 5, 6, 7):
        torch.testing.assert_close(kept(case, ours, number), kept(case, theirs, number), rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(ours.drafted, theirs.drafted, equal_nan=True, rtol=1e-6, atol=1e-6)
    for mine, other in zip(ours.kept.values(), theirs.kept.values(), strict=True):
        assert torch.equal(mine.memory.isnan(), other.memory.isnan()), "nothing else is written"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_states_of_16_bits_are_rounded_where_a_step_keeps_them(case: Case, ops: CpuOps, dtype: torch.dtype) -> None:
    """Not between the tokens of one step."""
    inputs = [case.inputs(70, seed) for seed in range(2)]
    steps = [
        [Part(0, 0, 30, snapshots=((16, 5),)), Part(1, 0, 33, drafts=2)],
        [Part(0, 30, 40, source=5), Part(1, 33, 1, replayed=2, source=1)],
    ]
    ours, theirs, exact = case.state(dtype), case.state(dtype), case.state()
    for parts in steps:
        found, wanted, float_ = (
            torch.cat(run(case, op, state, parts, inputs))
            for op, state in ((of(case, ops), ours), (case.reference, theirs), (of(case, ops), exact))
        )
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)  # a value between two may be rounded to either
        assert torch.equal(found, float_) == (parts is steps[0])
        for number in (0, 1, 5):
            step = 4 * torch.finfo(dtype).eps
            torch.testing.assert_close(kept(case, ours, number), kept(case, theirs, number), rtol=step, atol=step)
    assert kept(case, ours, 0).dtype == torch.float32


@pytest.mark.parametrize("size", [1, 3, 16, 17, 32, 33])
def test_results_and_states_do_not_depend_on_the_chunks(case: Case, ops: CpuOps, size: int) -> None:
    inputs, op = [case.inputs(130)], of(case, ops)
    whole, chunked = case.state(), case.state()
    assert torch.equal(in_chunks(case, op, inputs, size, chunked), in_chunks(case, op, inputs, 130, whole))
    assert torch.equal(kept(case, chunked, 0), kept(case, whole, 0))


def test_results_do_not_depend_on_threads_nor_on_the_batch(case: Case, ops: CpuOps, other_ops: list[CpuOps]) -> None:
    inputs = [case.inputs(40, seed) for seed in range(7)]
    alone = [in_chunks(case, of(case, ops), [each], 40, case.state()) for each in inputs]
    for each in (ops, *other_ops):
        state, op = case.state(), of(case, each)
        first = run(case, op, state, [Part(seq, 0, 5 + seq) for seq in range(7)], inputs)
        rest = run(case, op, state, [Part(seq, 5 + seq, 35 - seq, source=seq) for seq in range(7)], inputs)
        for parts in zip(first, rest, alone, strict=True):
            assert torch.equal(torch.cat(parts[:2]), parts[2])


@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_accepted_drafts_are_replayed_and_others_leave_no_trace(
    case: Case, ops: CpuOps, other_ops: list[CpuOps], accepted: int
) -> None:
    (inputs,) = [case.inputs(60)]
    others = case.inputs(60, seed=1)
    wanted_state = case.state()
    wanted = in_chunks(case, of(case, ops), [inputs], 60, wanted_state)
    for each in (ops, *other_ops):
        state, op = case.state(), of(case, each)
        found = run(case, op, state, [Part(0, 0, 20)], [inputs])
        # A step of one token and three drafts, of which only the first `accepted` are the sequence's own.
        known = 21 + accepted
        guessed = tuple(torch.cat([own[:known], other[known:]]) for own, other in zip(inputs, others, strict=True))
        found.append(run(case, op, state, [Part(0, 20, 4, drafts=3, source=0)], [guessed])[0][: 1 + accepted])
        # The next has drafts, too; a snapshot is taken as the replay passes it.
        snapshot = ((accepted + 1, 9),)
        step = Part(0, known, 4, drafts=2, replayed=accepted, source=0, snapshots=snapshot)
        found += run(case, op, state, [step], [inputs])
        found += run(case, op, state, [Part(0, known + 4, 56 - known, replayed=2, source=0)], [inputs])
        assert torch.equal(torch.cat(found), wanted)
        assert torch.equal(kept(case, state, 0), kept(case, wanted_state, 0))
        # Another sequence begins at the snapshot, which stays as it is.
        before = kept(case, state, 9)
        again = run(case, op, state, [Part(1, known + 1, 59 - known, source=9)], [inputs, inputs])[0]
        assert torch.equal(again, wanted[known + 1 :])
        assert torch.equal(kept(case, state, 9), before)
        assert torch.equal(kept(case, state, 1), kept(case, wanted_state, 0))


def test_the_registry_offers_the_kernels_and_wide_convolutions_are_refused() -> None:
    cpu = {"device": torch.device("cpu"), "dtype": torch.float32}
    served = ("convolve", "scan", "linear_attention", "selective_scan", "gated_lru")
    assert [kernels.ops()[op].choose(**cpu).name for op in served] == ["cpu_native"] * 5
    case = convolution(8, 17)
    with pytest.raises(ValueError, match="up to 16 inputs, not 17"):
        run(case, kernels.choose("convolve", **cpu), case.state(), [Part(0, 0, 1)], [case.inputs(1)])
    wrong = replace(next(iter(case.state().kept.values())), page=torch.zeros(16, dtype=torch.int32))
    with pytest.raises(ValueError, match="int64"):
        mirrors.StateUnitsC.of(wrong)


@pytest.mark.system
@pytest.mark.parametrize("name", ["a gated delta rule", "of odd sizes, with decays of channels"])
def test_thousands_of_decoded_tokens_stay_near_float64(ops: CpuOps, name: str) -> None:
    """4,096 steps of one token each, whose state is float32 from step to step."""
    case, count = CASES[name], 4096
    params, op, state = case.params, of(case, ops), case.state()
    mixed, decays, rates = (each * 0.5 for each in case.inputs(count))
    found = in_chunks(case, op, [(mixed, decays, rates)], 1, state)
    query, key, value = (
        each.unflatten(1, (heads, -1)).double()
        for each, heads in zip(
            mixed.split(params.parts, dim=1),
            (params.num_key_heads, params.num_key_heads, params.num_heads),
            strict=True,
        )
    )
    query, key = (torch.nn.functional.normalize(each, dim=-1)[:, params.key_of_head] for each in (query, key))
    steps = torch.nn.functional.softplus(decays.double() + params.decay_bias).unflatten(1, (params.num_heads, -1))
    shares = torch.exp(params.decay.double()[:, None] * steps)
    rate = params.correction * rates.double().sigmoid()
    held, expected = torch.zeros(params.num_heads, params.key_dim, params.value_dim, dtype=torch.float64), []
    for token in range(count):
        held = shares[token][..., None] * held
        read = torch.einsum("hkv,hk->hv", held, key[token])
        held = held + torch.einsum("hk,hv->hkv", key[token], rate[token][:, None] * (value[token] - read))
        expected.append(torch.einsum("hkv,hk->hv", held, query[token] * params.scale).flatten())
    torch.testing.assert_close(found.double(), torch.stack(expected), rtol=1e-4, atol=2e-5)
