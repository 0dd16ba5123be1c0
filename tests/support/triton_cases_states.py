"""Triton's kernels of layers that keep a state per sequence: against their references, and bitwise the same however
tokens are divided among steps, with replayed drafts and from snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from state_ops import CASES, Case, Part, attention, in_chunks, kept, recurrence, run
from torch import Tensor

from headrace.kernels.triton import linear_attention, scan
from headrace.kernels.triton.convolve import convolve

OPS: dict[str, Callable[..., Tensor]] = {
    "convolve": convolve,
    "scan": scan.scan,
    "linear_attention": linear_attention.linear_attention,
}
SERVED = {name: case for name, case in CASES.items() if case.op in OPS}
FEW_HEADS = {
    "two heads, groups, limits": recurrence(2, 7, 20, 2, (0.01, 0.8)),
    "two heads of odd sizes, with decays of channels": attention(2, 1, 19, 21, decays=19, correction=2.0),
}
"""For what does not depend on how many there are: the interpreter takes as much time for each."""
SERVED |= FEW_HEADS
OF_EACH_KIND = (
    *("LFM2's convolution", "Mamba's convolution", "odd sizes, groups, limits"),
    *("of odd sizes, with decays of channels", "of constant decays, without corrections"),
    "a layer's second convolution",
)
"""Each op with all of its inputs and without those that it can do without. The others differ in sizes and in what a
state is multiplied by."""
OF_EACH_OP = ("Mamba's convolution", *FEW_HEADS)
"""Each op once, with the most that it does."""


# The interpreter's time depends on the number of programs; the largest states are still divided in two.
scan.TILE_ELEMENTS = linear_attention.TILE_ELEMENTS = 8192


def op_of(case: Case) -> Callable[..., Tensor]:
    return OPS[case.op]


def expect_the_references(name: str, dtype: torch.dtype, bound: float, num_tokens: int) -> None:
    """In one step: a sequence of `num_tokens`, one of half as many and one of a single token."""
    case, half = SERVED[name], num_tokens // 2
    inputs = [tuple(each.to(dtype) for each in case.inputs(num_tokens, seed)) for seed in range(3)]
    parts = [
        Part(0, 0, num_tokens, drafts=2, snapshots=((16, 5), (num_tokens - 3, 6))),
        Part(1, 0, half, snapshots=((half, 7),)),
        Part(2, 0, 1, snapshots=((-1, 8), (1, 9))),
    ]
    ours, theirs = case.state(), case.state()
    found, wanted = (
        torch.cat(run(case, op, state, parts, inputs)).float()
        for op, state in ((op_of(case), ours), (case.reference, theirs))
    )
    torch.testing.assert_close(found, wanted, rtol=bound, atol=bound, msg=name)
    for number in (0, 1, 2, 5, 6, 7, 9):
        torch.testing.assert_close(kept(case, ours, number), kept(case, theirs, number), rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(ours.drafted, theirs.drafted, equal_nan=True, rtol=1e-6, atol=1e-6)
    for mine, other in zip(ours.kept.values(), theirs.kept.values(), strict=True):
        assert torch.equal(mine.memory.isnan(), other.memory.isnan()), "nothing else is written"


def case_results_states_and_drafts_are_the_references() -> None:
    for name in OF_EACH_KIND:
        expect_the_references(name, torch.float32, 2e-5, 20)


def long_case_results_of_16_bits_are_the_references() -> None:
    for name in OF_EACH_OP[:2]:  # the states of 16 bits tell of the third
        expect_the_references(name, torch.bfloat16, 2**-7, 20)


def long_case_results_of_longer_sequences_and_all_types_are_the_references() -> None:
    for name in SERVED:
        for dtype, bound in ((torch.float32, 2e-5), (torch.bfloat16, 2**-7)):
            expect_the_references(name, dtype, bound, 40)


def case_states_of_16_bits_are_rounded_where_a_step_keeps_them() -> None:
    expect_rounded_states(OF_EACH_OP)


def long_case_states_of_16_bits_of_all_sizes_are_rounded_where_a_step_keeps_them() -> None:
    expect_rounded_states(SERVED)


def expect_rounded_states(names: Iterable[str]) -> None:
    for case in map(SERVED.__getitem__, names):
        inputs = [case.inputs(40, seed) for seed in range(2)]
        steps = [
            [Part(0, 0, 20, snapshots=((16, 5),)), Part(1, 0, 23, drafts=2)],
            [Part(0, 20, 20, source=5), Part(1, 23, 1, replayed=2, source=1)],
        ]
        ours, theirs = case.state(torch.bfloat16), case.state(torch.bfloat16)
        for parts in steps:
            found, wanted = (
                torch.cat(run(case, op, state, parts, inputs))
                for op, state in ((op_of(case), ours), (case.reference, theirs))
            )
            torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
            for number in (0, 1, 5):
                step = 4 * torch.finfo(torch.bfloat16).eps
                torch.testing.assert_close(kept(case, ours, number), kept(case, theirs, number), rtol=step, atol=step)


def case_results_and_states_do_not_depend_on_the_chunks() -> None:
    expect_the_same_in_chunks(OF_EACH_OP, 18)


def long_case_results_and_states_of_longer_sequences_do_not_depend_on_the_chunks() -> None:
    expect_the_same_in_chunks(SERVED, 40)


def expect_the_same_in_chunks(names: Iterable[str], num_tokens: int, sizes: Sequence[int] = (1, 17)) -> None:
    for case in map(SERVED.__getitem__, names):
        inputs, op, whole = [case.inputs(num_tokens)], op_of(case), case.state()
        wanted = in_chunks(case, op, inputs, num_tokens, whole)
        for size in (1, 3, 16, 17) if case.op == "convolve" else sizes:
            chunked = case.state()
            assert torch.equal(in_chunks(case, op, inputs, size, chunked), wanted), size
            assert torch.equal(kept(case, chunked, 0), kept(case, whole, 0)), size


def long_case_results_do_not_depend_on_the_batch() -> None:
    expect_the_same_in_batches(OF_EACH_OP, 2)


def long_case_results_of_all_sizes_do_not_depend_on_the_batch() -> None:
    expect_the_same_in_batches(SERVED, 3)


def expect_the_same_in_batches(names: Iterable[str], num_sequences: int) -> None:
    total, numbers = 10 + 5 * num_sequences, range(num_sequences)
    for case in map(SERVED.__getitem__, names):
        inputs, op = [case.inputs(total, seed) for seed in numbers], op_of(case)
        alone = [in_chunks(case, op, [each], total, case.state()) for each in inputs]
        state = case.state()
        cuts = [5 + 7 * seq for seq in numbers]
        first = run(case, op, state, [Part(seq, 0, cuts[seq]) for seq in numbers], inputs)
        rest = run(case, op, state, [Part(seq, cuts[seq], total - cuts[seq], source=seq) for seq in numbers], inputs)
        for parts in zip(first, rest, alone, strict=True):
            assert torch.equal(torch.cat(parts[:2]), parts[2])


def case_accepted_drafts_are_replayed_and_others_leave_no_trace() -> None:
    convolution, scan, attention = OF_EACH_OP
    expect_replayed_drafts([convolution], 5, 16)
    expect_replayed_drafts([scan], 5, 16, (1,))
    expect_replayed_drafts([attention], 5, 16, (0, 3))


def long_case_accepted_drafts_of_all_sizes_are_replayed_and_others_leave_no_trace() -> None:
    expect_replayed_drafts(SERVED, 20, 36)


def expect_replayed_drafts(names: Iterable[str], begun: int, total: int, numbers: Sequence[int] = (0, 1, 3)) -> None:
    """Drafts come after `begun` tokens, and `total` are computed in all. numbers: how many drafts are accepted."""
    for case in map(SERVED.__getitem__, names):
        inputs, others, op, wanted_state = case.inputs(total), case.inputs(total, seed=1), op_of(case), case.state()
        wanted = in_chunks(case, op, [inputs], total, wanted_state)
        for accepted in numbers:
            state = case.state()
            found = run(case, op, state, [Part(0, 0, begun)], [inputs])
            # A step of one token and three drafts, of which only the first `accepted` are the sequence's own.
            known = begun + 1 + accepted
            guessed = tuple(torch.cat([own[:known], other[known:]]) for own, other in zip(inputs, others, strict=True))
            found.append(run(case, op, state, [Part(0, begun, 4, drafts=3, source=0)], [guessed])[0][: 1 + accepted])
            # The next is of one token, and a snapshot is taken as the replay passes it.
            one = Part(0, known, 1, replayed=accepted, source=0, snapshots=((accepted, 8), (accepted + 1, 9)))
            found += run(case, op, state, [one], [inputs])
            found += run(case, op, state, [Part(0, known + 1, 3, drafts=2, source=0)], [inputs])
            found += run(case, op, state, [Part(0, known + 4, total - 4 - known, replayed=2, source=0)], [inputs])
            assert torch.equal(torch.cat(found), wanted)
            assert torch.equal(kept(case, state, 0), kept(case, wanted_state, 0))
            # Another sequence begins at a snapshot, which stays as it is.
            for number, first in ((8, known), (9, known + 1)):
                before = kept(case, state, number)
                part = Part(1, first, total - first, source=number)
                again = run(case, op, state, [part], [inputs, inputs])[0]
                assert torch.equal(again, wanted[first:])
                assert torch.equal(kept(case, state, number), before)
                assert torch.equal(kept(case, state, 1), kept(case, wanted_state, 0))
