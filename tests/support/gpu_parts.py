"""Shared parts of tests of the GPU runner: a small model made only of tensor operations, and devices that delay their
copies on purpose."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from gloo_for_nccl import open_gloo_for_nccl
from graph_recorder import RecordingCapturer
from torch import Tensor

from headrace.core.options.engine_options import Options
from headrace.executor.gpu.collectives import GpuCollectives
from headrace.executor.gpu.device_state import HostDevice
from headrace.executor.gpu.hardware.device import GpuFacts
from headrace.executor.gpu.rank import GpuRank
from headrace.executor.parallel.rank_place import SINGLE, RankCoordinates
from headrace.executor.parallel.rendezvous import Rendezvous
from headrace.executor.placement.in_process import InProcessExecutor
from headrace.executor.step.inputs import StepInputs
from headrace.ipc.step import StepPlan
from headrace.kernels.reference.attention import AttentionParams, CacheScales, PagedBatch
from headrace.kernels.reference.rows import LARGEST_STORED, narrow
from headrace.kernels.registry import choose_reference

BLOCK_SIZE = 4
NUM_ROWS = 6
MAX_MODEL_LEN = 32
VOCAB_SIZE = 50
NUM_HASHES = 997
POISON = 13
"""A token that makes the small model's logits NaN from its position on."""


class TensorHashModel:
    """A model whose logits follow from a hash of all tokens in context. It reads each token from its cache slot, so a
    wrong slot leads to other tokens.

    No operation's shape depends on the values of its inputs, so that a graph can capture it.
    """

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self._factors = torch.randint(1, NUM_HASHES, (MAX_MODEL_LEN,), generator=generator)
        self._logits = torch.randn(NUM_HASHES, VOCAB_SIZE, generator=generator) * 2
        self._logits[:, POISON] = -torch.inf

    def forward(self, inputs: StepInputs, kv_cache: Tensor) -> Tensor:
        """kv_cache: [num_slots] int64 token ids. Returns hashes [num_tokens, 1] int64, -1 with POISON in context."""
        kv_cache[inputs.slot_mapping[0]] = inputs.token_ids
        tokens = torch.arange(len(inputs.token_ids))
        seqs = torch.searchsorted(inputs.query_start[1:], tokens, right=True)
        tables = inputs.block_tables[0][seqs].long()
        slots = (tables[:, :, None] * inputs.block_size + torch.arange(inputs.block_size)).flatten(1)
        seen = torch.arange(slots.shape[1]) <= inputs.positions[:, None]
        context = torch.where(seen, kv_cache[slots], 0)
        hashes = (context * self._factors[: slots.shape[1]] + seen).sum(1) % NUM_HASHES
        return torch.where((context == POISON).any(1), -1, hashes)[:, None]

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.where(hidden < 0, torch.nan, self._logits[hidden[:, 0].clamp(min=0)])


def new_cache(num_blocks: int = 1000) -> Tensor:
    """A cache filled with a token that no request has, so that reading a slot too early is detected."""
    return torch.full((num_blocks * BLOCK_SIZE,), VOCAB_SIZE + 1)


class LateEvent:
    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._before = self._asked = 0

    def record(self) -> None:
        self._before = self._device.num_copies
        self._at_s = time.monotonic()
        self._asked = 0

    def seconds_since(self, earlier: LateEvent) -> float:
        return self._at_s - earlier._at_s

    def query(self) -> bool:
        """Returns False twice and then True, as for a device that makes progress."""
        self._asked += 1
        return self._asked > 2

    def synchronize(self) -> None:
        self._device.num_waits += 1
        self._device.arrive(self._before)


class LateDevice(HostDevice):
    """A device whose copies to the host arrive only when the host waits for a later event; until then the target holds
    wrong values."""

    def __init__(self) -> None:
        super().__init__()
        self.num_copies = self.num_waits = 0
        self._under_way: list[tuple[int, Tensor, Tensor]] = []

    def event(self) -> LateEvent:
        return LateEvent(self)

    mark = event

    def to_host(self, into: Tensor, source: Tensor) -> None:
        into.fill_(-77)
        self.num_copies += 1
        self._under_way.append((self.num_copies, into, source.clone()))

    def arrive(self, last: int) -> None:
        """Completes the copies up to number `last`."""
        with torch.inference_mode():
            while self._under_way and self._under_way[0][0] <= last:
                _, into, snapshot = self._under_way.pop(0)
                into.copy_(snapshot)


class LateSide:
    """A side stream whose copies arrive only when they are waited for; until then the targets hold wrong values."""

    def __init__(self) -> None:
        self.num_copies = 0

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        self.num_copies += 1
        for into, _ in pairs:
            into.fill_(-77)

        def wait() -> None:
            for into, source in pairs:
                into.copy_(source)

        return wait


class HostBackend:
    """`executor.gpu.Backend` for the CPU, with the delayed devices and the memory figures of a test."""

    def __init__(self, gpu: GpuFacts, capturer: Any = None) -> None:
        self.device = torch.device("cpu")
        self.side = LateDevice()
        self.copies = LateSide()
        self._gpu, self._capturer = gpu, capturer
        self.num_measured = 0

    def facts(self) -> GpuFacts:
        return self._gpu

    def here(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def host_side(self) -> LateDevice:
        return self.side

    def capturer(self) -> Any:
        return self._capturer

    def side_stream(self) -> LateSide:
        return self.copies

    def meter(self) -> HostBackend:
        return self

    def peak_bytes(self, run: Callable[[], Any]) -> int:
        run()
        self.num_measured += 1
        return 1000 * self.num_measured

    def link(self, rendezvous: Rendezvous, options: Options) -> GpuCollectives:
        return open_gloo_for_nccl(rendezvous, in_order=options.batch_invariant)

    def memory(self) -> tuple[int, int]:
        return self._gpu.free_bytes, self._gpu.total_bytes


def choose_capturable(op: str, **facts: Any) -> Callable[..., Any]:
    """Chooses the references, but replaces those that read values on the host, which a graph cannot capture."""
    own: dict[str, Callable[..., Any]] = {
        "paged_attention": dense_attention,
        "write_cache": scatter_cache,
    }
    return own.get(op) or choose_reference(op, **facts)


def dense_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    params: AttentionParams,
    scales: CacheScales | None = None,
) -> Tensor:
    """`reference.attention.paged_attention`, by gathering every token's whole block table."""
    if scales is not None and scales.keys is not None and scales.values is not None:
        key_cache = key_cache.float() * scales.keys[..., None]
        value_cache = value_cache.float() * scales.values[..., None]
    tokens = torch.arange(len(query), dtype=torch.int32)
    seqs = torch.searchsorted(batch.query_start[1:].contiguous(), tokens, right=True)
    positions = batch.seq_lens[seqs] - (batch.query_start[1:][seqs] - tokens)
    tables = batch.block_tables[seqs].long()
    keys, values = (cache[tables].transpose(1, 2).flatten(2, 3).float() for cache in (key_cache, value_cache))
    place = torch.arange(keys.shape[2])
    seen = place <= positions[:, None]
    if params.sliding_window is not None:
        seen = seen & (place > positions[:, None] - params.sliding_window)
    group = query.shape[1] // keys.shape[1]
    keys, values = (torch.where(seen[:, None, :, None], x, 0).repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("thd,thnd->thn", query.float(), keys) * params.scale
    if params.soft_cap is not None:
        scores = params.soft_cap * torch.tanh(scores / params.soft_cap)
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("thn,thnd->thd", weights, values).to(query.dtype)


def scatter_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    scales: CacheScales | None = None,
) -> None:
    blocks, offsets = batch.slot_mapping // batch.block_size, batch.slot_mapping % batch.block_size
    scales = scales or CacheScales()
    for rows, cache, row_scales in ((key, key_cache, scales.keys), (value, value_cache, scales.values)):
        if row_scales is None:
            cache[blocks, :, offsets] = rows
            continue
        largest = rows.float().abs().amax(-1)
        divisor = torch.where(largest > 0, largest / LARGEST_STORED[cache.dtype], 1.0)
        row_scales[blocks, :, offsets] = divisor
        cache[blocks, :, offsets] = narrow(rows.float() / divisor[..., None], cache.dtype)


class GpuOnCpu(GpuRank):
    """For the option worker_cls: a GPU rank that runs on the CPU, with recorded graphs."""

    choose = staticmethod(choose_capturable)

    def __init__(self, options: Options, place: RankCoordinates = SINGLE) -> None:
        gpu = GpuFacts("GPU on CPU", (9, 0), 4 << 30, 3 << 30)
        self.recorder = RecordingCapturer()
        super().__init__(options, torch.device("cpu"), HostBackend(gpu, self.recorder), place)
        self.submitted_ahead = 0
        GpuOnCpu.latest = self

    latest: GpuOnCpu

    def submit(self, plan: StepPlan) -> None:
        super().submit(plan)
        self.submitted_ahead += len(self.steps._in_flight) > 1


class GpuOnCpuExecutor(InProcessExecutor):
    """For the option distributed_executor_backend: `GpuOnCpu` in this process."""

    def __init__(self, options: Options) -> None:
        super().__init__(options, GpuOnCpu(options))
