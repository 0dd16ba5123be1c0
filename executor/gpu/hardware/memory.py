"""Measures a step's and the graphs' GPU memory, before the cache is given the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from headrace.executor.gpu.device_state import Device
from headrace.executor.gpu.graphs import Capturer, GraphKey
from headrace.executor.gpu.runner import GpuRunner, RunnerLimits
from headrace.executor.gpu.sampler import StepEnding
from headrace.executor.gpu.steps import MixedInputs
from headrace.executor.step.inputs import states_of
from headrace.executor.step.states import StateArrays
from headrace.kernels.low_rank import SlottedTokens
from headrace.kernels.reference.states import StateBatch

CHOICES_CAPTURED = 2
"""Number of `StepEnding`s for which graphs are usually captured: greedy, and what the model's defaults ask for."""


class Meter(Protocol):
    def peak_bytes(self, run: Callable[[], Any]) -> int:
        """Calls run; returns by how much the peak of memory exceeded the memory before."""
        ...


@dataclass(frozen=True)
class StepMemory:
    activation_bytes: int
    """The peak of a step of max_num_batched_tokens, of choosing max_num_seqs tokens, or of changing and reporting their
    logits, whichever is largest."""
    state_bytes: int
    """Per-row state on the device."""
    graph_bytes: int
    """All decode graphs, estimated from the measured sizes of the largest and the smallest."""


def measure(
    runner: GpuRunner,
    device: Device,
    limits: RunnerLimits,
    max_num_batched_tokens: int,
    meter: Meter,
    capturer: Capturer | None,
) -> StepMemory:
    """Runs the largest possible steps; the runner's cache consists of block 0 only, the null block."""
    peaks = [
        meter.peak_bytes(lambda: largest_prefill(runner, device, limits, max_num_batched_tokens)),
        meter.peak_bytes(lambda: runner.steps.decode(limits.max_num_seqs, StepEnding.TRUNCATE)),
    ]
    if runner.chooses:
        peaks.append(meter.peak_bytes(lambda: runner.selection.visit(limits.max_num_seqs)))
    if limits.most_adapters:
        peaks.append(meter.peak_bytes(lambda: largest_prefill(runner, device, limits, max_num_batched_tokens, 1)))
    visit_kernels(runner, device, limits, max_num_batched_tokens)
    state_bytes = runner.state.nbytes + runner.tokens.nbytes + runner.steps.results.nbytes
    return StepMemory(max(peaks), state_bytes, _graph_bytes(runner, limits, capturer))


def visit_kernels(runner: GpuRunner, device: Device, limits: RunnerLimits, max_num_batched_tokens: int) -> None:
    """Launches the other kernels of steps, so that no request waits for a compiler later: there are kernels for each
    `StepEnding`, and some for batches up to a power of two."""
    num_tokens = 2 * limits.max_num_seqs
    while num_tokens < max_num_batched_tokens:
        largest_prefill(runner, device, limits, num_tokens)
        num_tokens *= 2
    sizes = [1 << bits for bits in range(limits.max_num_seqs.bit_length())]
    for size in sizes:
        for most_adapters in range(1 + min(1, limits.most_adapters)):  # further ones launch the same again
            runner.steps.decode(size, StepEnding.ARGMAX, most_adapters=most_adapters)
    runner.steps.decode(1, StepEnding.DRAW, num_blocks=1)  # a context so short that batch-invariant sums have one part


def largest_prefill(
    runner: GpuRunner, device: Device, limits: RunnerLimits, num_tokens: int, most_adapters: int = 0
) -> None:
    """Runs a step of num_tokens prompt tokens, in as few requests as can have them. All read and write block 0.
    most_adapters: that each token has, all in slot 0."""
    counts: list[int] = []
    while (left := num_tokens - sum(counts)) > 0 and len(counts) < limits.max_num_seqs:
        counts.append(min(left, limits.max_model_len))
    ends = np.cumsum(counts)
    num_seqs, total = len(counts), int(ends[-1])
    padding_row = runner.state.padding_row
    host = {
        "token_ids": np.zeros(total),
        "positions": np.concatenate([np.arange(count) for count in counts]),
        "query_start": np.array([0, *ends]),
        "seq_lens": np.array(counts),
        "rows": np.full(num_seqs, padding_row),
        "logits_indices": ends - 1,
        "sampled_rows": np.full(num_seqs, padding_row),
    }
    tensors = {name: torch.from_numpy(values.astype(np.int32)).to(device.device) for name, values in host.items()}
    slots = torch.arange(total, dtype=torch.int32, device=device.device) % limits.block_size
    slot, scale = torch.zeros_like(slots), torch.ones(total, device=device.device)
    adapters = SlottedTokens(((slot, scale),) * most_adapters) if most_adapters else None
    sent = MixedInputs(
        **tensors,  # type: ignore[arg-type]
        slot_mapping=(slots,) * len(limits.block_factors),
        adapters=adapters,
        states=_states(limits, device, tensors["query_start"], counts) if limits.state_pages else None,
    )
    _, logits = runner.steps.mixed(sent, -(-max(counts) // limits.block_size), max(counts))
    runner.steps.take(logits, sent.sampled_rows.long(), sent.seq_lens.long(), StepEnding.TRUNCATE)
    runner.state.num_computed.zero_()


def _states(limits: RunnerLimits, device: Device, query_start: Tensor, counts: list[int]) -> StateBatch:
    """Of sequences that compute so many tokens from nothing, all in block 0."""
    zeros = np.zeros(len(counts), np.int32)
    pages, snapshots = np.zeros((len(counts), limits.state_pages), np.int32), zeros[:0]
    arrays = StateArrays(
        *(zeros, pages, pages, zeros, zeros, np.array(counts, np.int32)), snapshots, snapshots, pages[:0]
    )
    parts = [torch.from_numpy(each).to(device.device) for each in arrays.parts]
    return states_of(parts, query_start, max(counts))


def _graph_bytes(runner: GpuRunner, limits: RunnerLimits, capturer: Capturer | None) -> int:
    if capturer is None or not limits.capture_sizes:
        return 0
    sizes, took = limits.capture_sizes, list[int]()
    kinds = CHOICES_CAPTURED * (2 if limits.most_adapters else 1)  # with and without adapters
    most = min(1, limits.most_adapters)
    keys = list(dict.fromkeys(GraphKey(size, StepEnding.ARGMAX, most) for size in (sizes[-1], sizes[0])))
    for key in keys:
        before_bytes = capturer.pool_bytes
        try:
            capturer.capture(lambda key=key: runner.steps.decode(key.size, key.ending, None, key.most_adapters))  # type: ignore[misc]
        except RuntimeError:
            return 0  # the runner will fail in the same way, and log why
        took.append(capturer.pool_bytes - before_bytes)
    return took[0] + took[-1] * (kinds * len(sizes) - 1)
