"""Layers that keep a state per sequence, on the CPU kernels: against their references, and bitwise the same however
tokens are divided among steps, threads and batches, with replayed drafts and from snapshots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from cpu_pools import many_threads_ops, two_threads_ops  # noqa: F401
from state_ops import CASES, Case, Part, convolution, in_chunks, kept, run
from thinned import every
from torch import Tensor

from headrace import kernels
from headrace.kernels.cpu.ops import CpuOps
from headrace.kernels.cpu.recurrent import args as mirrors
from headrace.kernels.cpu.recurrent.states import StateOps


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


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


@pytest.mark.parametrize("size", every(2, [1, 3, 16, 17, 32, 33]))
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
