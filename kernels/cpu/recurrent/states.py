"""Layers that keep a state per sequence, on the CPU kernels: with the references' signatures and in programs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.cpu.linear.args import ACTIVATIONS, DTYPES
from headrace.kernels.cpu.linear.linear import Runtime, runtime
from headrace.kernels.cpu.ops import why_no_op
from headrace.kernels.cpu.program.parts import Buffer
from headrace.kernels.cpu.program.program import Builder
from headrace.kernels.cpu.recurrent.args import (
    ConvolveArgs,
    DraftedC,
    GatedLruArgs,
    LinearAttentionArgs,
    ScanArgs,
    SelectiveArgs,
    StateStepC,
    StateUnitsC,
)
from headrace.kernels.cpu.runtime.pointers import pointer
from headrace.kernels.cpu.runtime.threads import Step
from headrace.kernels.reference.gated_lru import GatedLruParams
from headrace.kernels.reference.linear_attention import LinearAttentionParams
from headrace.kernels.reference.selective import SelectiveParams
from headrace.kernels.reference.states import ConvolveParams, LayerState, ScanParams, StateBatch
from headrace.kernels.registry import Version

MOST_WIDTH = 16
"""`kMostConvolveWidth` in states.h."""
MOST_VECTOR_BYTES = 64
"""Of the widest vectors."""


def write_convolve(
    builder: Builder, x: Buffer, out: Buffer, params: ConvolveParams, states: StateStepC, state: LayerState
) -> None:
    """out = `reference.states.convolve` of x, for the sequences in `states` of each step."""
    args, kept = _convolve_args(params, state)
    channels = params.weight.shape[0]
    if x.columns != channels * (3 if params.gated else 1) or out.columns != channels:
        raise ValueError(f"a convolution of {channels} channels does not fit {x.columns} and {out.columns} columns.")
    args.states = ctypes.addressof(states)
    args.x, args.x_stride, args.x_type = x.address, x.stride, x.type
    args.out, args.out_stride, args.out_type = out.address, out.stride, out.type
    builder.need_scratch(params.weight.nbytes)
    builder.op("hr_op_convolve", args, (x,), (out,), keep=(kept, states, state))


def write_scan(
    builder: Builder,
    mixed: Buffer,
    steps: Buffer,
    gate: Buffer,
    out: Buffer,
    params: ScanParams,
    states: StateStepC,
    state: LayerState,
) -> None:
    """out = `reference.states.scan`, for the sequences in `states` of each step."""
    args, kept = _scan_args(params, state)
    inner, shared = params.num_heads * params.head_dim, params.num_groups * params.state_size
    found = [each.columns for each in (mixed, steps, gate, out)]
    if found != [inner + 2 * shared, params.num_heads, inner, inner]:
        raise ValueError(f"a scan of {params.num_heads} heads of {params.head_dim} does not fit columns {found}.")
    if {each.tensor.dtype for each in (mixed, steps, gate)} != {torch.float32}:
        raise ValueError("a scan reads float32.")
    args.states = ctypes.addressof(states)
    args.mixed, args.steps, args.gate, args.out = mixed.address, steps.address, gate.address, out.address
    args.mixed_stride, args.steps_stride, args.gate_stride = mixed.stride, steps.stride, gate.stride
    args.out_stride, args.out_type = out.stride, out.type
    builder.need_scratch(scan_scratch_bytes(builder.runtime, params))
    builder.op("hr_op_scan", args, (mixed, steps, gate), (out,), keep=(kept, states, state))


def scan_scratch_bytes(used: Runtime, params: ScanParams) -> int:
    """Bytes of scratch that each thread needs."""
    find = used.library.dll.hr_scan_scratch_bytes
    find.restype, find.argtypes = ctypes.c_int64, [ctypes.c_int64, ctypes.c_int64]
    return int(find(params.head_dim, params.state_size))


def write_selective_scan(
    builder: Builder,
    inputs: Mapping[str, Buffer],
    out: Buffer,
    params: SelectiveParams,
    states: StateStepC,
    state: LayerState,
) -> None:
    """out = `reference.selective.selective_scan` of the inputs x, steps, shared and gate, for the sequences in `states`
    of each step."""
    args, kept = _selective_args(params, state)
    size, channels = params.sizes
    found = [inputs[name].columns for name in ("x", "steps", "shared", "gate")] + [out.columns]
    if found != [channels, channels, 2 * size, channels, channels]:
        raise ValueError(f"a selective scan of {channels} channels does not fit columns {found}.")
    if {each.tensor.dtype for each in inputs.values()} != {torch.float32}:
        raise ValueError("a selective scan reads float32.")
    for name, each in inputs.items():
        setattr(args, name, each.address)
        setattr(args, f"{name}_stride", each.stride)
    args.states, args.out = ctypes.addressof(states), out.address
    args.out_stride, args.out_type = out.stride, out.type
    builder.need_scratch(size * MOST_VECTOR_BYTES)
    builder.op("hr_op_selective_scan", args, tuple(inputs.values()), (out,), keep=(kept, states, state))


def write_linear_attention(
    builder: Builder,
    mixed: Buffer,
    decays: Buffer | None,
    rates: Buffer | None,
    out: Buffer,
    params: LinearAttentionParams,
    states: StateStepC,
    state: LayerState,
) -> None:
    """out = `reference.linear_attention`, for the sequences in `states` of each step."""
    args, kept = _linear_attention_args(params, state)
    given = {"decays": decays, "rates": rates}
    found = [mixed.columns, out.columns, *(0 if each is None else each.columns for each in given.values())]
    heads, values = params.num_heads, params.num_heads * params.value_dim
    if found != [sum(params.parts), values, heads * args.decay_columns, heads if params.correction else 0]:
        raise ValueError(f"linear attention of {heads} heads of {params.value_dim} does not fit columns {found}.")
    args.states, args.mixed, args.out = ctypes.addressof(states), mixed.address, out.address
    args.mixed_stride, args.mixed_type = mixed.stride, mixed.type
    args.out_stride, args.out_type = out.stride, out.type
    for name, each in given.items():
        if each is not None:
            if each.tensor.dtype != torch.float32:
                raise ValueError(f"the {name} of linear attention are float32.")
            setattr(args, name, each.address)
            setattr(args, f"{name}_stride", each.stride)
    builder.need_scratch(linear_attention_scratch_bytes(builder.runtime, params))
    reads = (mixed, *(each for each in given.values() if each is not None))
    builder.op("hr_op_linear_attention", args, reads, (out,), keep=(kept, states, state))


def write_gated_lru(
    builder: Builder, x: Buffer, out: Buffer, params: GatedLruParams, states: StateStepC, state: LayerState
) -> None:
    """out = `reference.gated_lru` of x, for the sequences in `states` of each step."""
    args, kept = _gated_lru_args(params, state)
    if {x.columns, out.columns} != {len(params.decay)} or x.tensor.dtype != torch.float32:
        raise ValueError(f"a recurrence of {len(params.decay)} float32 channels does not fit {x.columns} columns.")
    args.states, args.x, args.x_stride = ctypes.addressof(states), x.address, x.stride
    args.out, args.out_stride, args.out_type = out.address, out.stride, out.type
    builder.need_scratch(4 * args.head_dim)
    builder.op("hr_op_gated_lru", args, (x,), (out,), keep=(kept, states, state))


def linear_attention_scratch_bytes(used: Runtime, params: LinearAttentionParams) -> int:
    """Bytes of scratch that each thread needs."""
    find = used.library.dll.hr_linear_attention_scratch_bytes
    find.restype, find.argtypes = ctypes.c_int64, [ctypes.c_int64, ctypes.c_int64]
    return int(find(params.key_dim, params.value_dim))


class StateOps:
    """The ops on one runtime."""

    def __init__(self, used: Runtime) -> None:
        self.runtime = used

    def convolve(self, x: Tensor, params: ConvolveParams, batch: StateBatch, state: LayerState) -> Tensor:
        """As `reference.states.convolve`."""
        args, kept = _convolve_args(params, state)
        x, out = x.contiguous(), torch.empty(len(x), params.weight.shape[0], dtype=x.dtype)
        args.x, args.x_stride, args.x_type = pointer(x), x.stride(0), DTYPES[x.dtype]
        args.out, args.out_stride, args.out_type = pointer(out), out.stride(0), DTYPES[out.dtype]
        self.runtime.pool.reserve(0, params.weight.nbytes)
        self._run("hr_op_convolve", args, batch, len(x))
        del kept  # until here
        return out

    def scan(
        self, mixed: Tensor, steps: Tensor, gate: Tensor, params: ScanParams, batch: StateBatch, state: LayerState
    ) -> Tensor:
        """As `reference.states.scan`."""
        args, kept = _scan_args(params, state)
        out = torch.empty(gate.shape, dtype=mixed.dtype)
        mixed, steps, gate = (each.float().contiguous() for each in (mixed, steps, gate))
        args.mixed, args.steps, args.gate, args.out = pointer(mixed), pointer(steps), pointer(gate), pointer(out)
        args.mixed_stride, args.steps_stride = mixed.stride(0), steps.stride(0)
        args.gate_stride, args.out_stride, args.out_type = gate.stride(0), out.stride(0), DTYPES[out.dtype]
        self.runtime.pool.reserve(0, scan_scratch_bytes(self.runtime, params))
        self._run("hr_op_scan", args, batch, len(mixed))
        del kept
        return out

    def linear_attention(
        self,
        mixed: Tensor,
        decays: Tensor | None,
        rates: Tensor | None,
        params: LinearAttentionParams,
        batch: StateBatch,
        state: LayerState,
    ) -> Tensor:
        """As `reference.linear_attention`."""
        args, kept = _linear_attention_args(params, state)
        mixed = mixed.contiguous()
        out = torch.empty(len(mixed), params.num_heads * params.value_dim, dtype=mixed.dtype)
        args.mixed, args.mixed_stride, args.mixed_type = pointer(mixed), mixed.stride(0), DTYPES[mixed.dtype]
        args.out, args.out_stride, args.out_type = pointer(out), out.stride(0), DTYPES[out.dtype]
        given = {"decays": decays, "rates": rates}
        floats = {name: each.float().contiguous() for name, each in given.items() if each is not None}
        for name, each in floats.items():
            setattr(args, name, pointer(each))
            setattr(args, f"{name}_stride", each.stride(0))
        self.runtime.pool.reserve(0, linear_attention_scratch_bytes(self.runtime, params))
        self._run("hr_op_linear_attention", args, batch, len(mixed))
        del kept, floats  # until here
        return out

    def selective_scan(
        self,
        x: Tensor,
        steps: Tensor,
        shared: Tensor,
        gate: Tensor,
        params: SelectiveParams,
        batch: StateBatch,
        state: LayerState,
    ) -> Tensor:
        """As `reference.selective.selective_scan`."""
        args, kept = _selective_args(params, state)
        out = torch.empty(x.shape, dtype=x.dtype)
        given = {"x": x, "steps": steps, "shared": shared, "gate": gate}
        floats = {name: each.float().contiguous() for name, each in given.items()}
        for name, each in floats.items():
            setattr(args, name, pointer(each))
            setattr(args, f"{name}_stride", each.stride(0))
        args.out, args.out_stride, args.out_type = pointer(out), out.stride(0), DTYPES[out.dtype]
        self.runtime.pool.reserve(0, params.sizes[0] * MOST_VECTOR_BYTES)
        self._run("hr_op_selective_scan", args, batch, len(x))
        del kept, floats  # until here
        return out

    def gated_lru(self, x: Tensor, params: GatedLruParams, batch: StateBatch, state: LayerState) -> Tensor:
        """As `reference.gated_lru`."""
        args, kept = _gated_lru_args(params, state)
        out, x = torch.empty(x.shape, dtype=x.dtype), x.float().contiguous()
        args.x, args.x_stride = pointer(x), x.stride(0)
        args.out, args.out_stride, args.out_type = pointer(out), out.stride(0), DTYPES[out.dtype]
        self.runtime.pool.reserve(0, 4 * args.head_dim)
        self._run("hr_op_gated_lru", args, batch, len(x))
        del kept  # until here
        return out

    def _run(self, op: str, args: Any, batch: StateBatch, num_tokens: int) -> None:
        query_start = batch.query_start.to(torch.int32).contiguous()
        states, kept = _states_of(batch)
        args.states = ctypes.addressof(states)
        step = Step(num_tokens=num_tokens, num_seqs=len(query_start) - 1, query_start=pointer(query_start))
        self.runtime.pool.run_op(op, args, step)
        del kept


def _states_of(batch: StateBatch) -> tuple[StateStepC, object]:
    sequences = torch.arange(len(batch.rows)).repeat_interleave(batch.snapshot_start.diff())
    tensors = {
        "rows": batch.rows,
        "pages": batch.pages,
        "sources": batch.sources,
        "has_source": batch.has_source,
        "replayed": batch.replayed,
        "committed": batch.committed,
        "snapshot_sequences": sequences,
        "snapshot_ends": batch.snapshot_ends,
        "snapshot_pages": batch.snapshot_pages,
    }
    kept = {name: tensor.to(torch.int32).contiguous() for name, tensor in tensors.items()}
    found = StateStepC(num_snapshots=len(sequences), pages_per_state=batch.pages.shape[1])
    for name, tensor in kept.items():
        setattr(found, name, pointer(tensor))
    return found, kept


def _convolve_args(params: ConvolveParams, state: LayerState) -> tuple[ConvolveArgs, object]:
    channels, width = params.weight.shape
    if not 1 <= width <= MOST_WIDTH:
        raise ValueError(f"the CPU convolution reads up to {MOST_WIDTH} inputs, not {width}.")
    weight = params.weight.T.contiguous()
    args = ConvolveArgs(
        history=StateUnitsC.of(state.kept[params.history]),
        drafted=DraftedC.of(state.drafted, params.first_draft_element),
        weight=pointer(weight),
        bias=None if params.bias is None else pointer(params.bias),
        channels=channels,
        width=width,
        gated=params.gated,
        activation=ACTIVATIONS[params.activation or "none"],
    )
    return args, (weight, params)


def _scan_args(params: ScanParams, state: LayerState) -> tuple[ScanArgs, object]:
    args = ScanArgs(
        state=StateUnitsC.of(state.kept["state"]),
        drafted=DraftedC.of(state.drafted, params.first_draft_element),
        decay=pointer(params.decay),
        skip=pointer(params.skip),
        step_bias=pointer(params.step_bias),
        num_heads=params.num_heads,
        head_dim=params.head_dim,
        state_size=params.state_size,
        num_groups=params.num_groups,
        least_step=params.step_limits[0],
        most_step=params.step_limits[1],
    )
    return args, params


def _linear_attention_args(params: LinearAttentionParams, state: LayerState) -> tuple[LinearAttentionArgs, object]:
    bias = params.decay_bias
    args = LinearAttentionArgs(
        state=StateUnitsC.of(state.kept["state"]),
        drafted=DraftedC.of(state.drafted, params.first_draft_element),
        key_of_head=pointer(params.key_of_head),
        decay=pointer(params.decay),
        decay_bias=None if bias is None else pointer(bias),
        num_heads=params.num_heads,
        num_key_heads=params.num_key_heads,
        key_dim=params.key_dim,
        value_dim=params.value_dim,
        decay_columns=0 if bias is None else len(bias) // params.num_heads,
        correction=params.correction,
        scale=params.scale,
        decay_floor=params.decay_floor,
        unit_keys=params.unit_keys,
    )
    return args, params


def _selective_args(params: SelectiveParams, state: LayerState) -> tuple[SelectiveArgs, object]:
    size, channels = params.sizes
    decay = params.decay.contiguous()
    args = SelectiveArgs(
        state=StateUnitsC.of(state.kept["state"]),
        drafted=DraftedC.of(state.drafted, channels),
        decay=pointer(decay),
        skip=pointer(params.skip),
        channels=channels,
        state_size=size,
    )
    return args, (decay, params)


def _gated_lru_args(params: GatedLruParams, state: LayerState) -> tuple[GatedLruArgs, object]:
    heads, head_dim, _ = params.input_weight.shape
    rates = params.rates
    kept = {
        name: getattr(params, name).contiguous()
        for name in ("input_weight", "input_bias", "recurrence_weight", "recurrence_bias")
    }
    args = GatedLruArgs(
        state=StateUnitsC.of(state.kept["state"]),
        drafted=DraftedC.of(state.drafted, heads * head_dim),
        rates=pointer(rates),
        num_heads=heads,
        head_dim=head_dim,
        **{name: pointer(each) for name, each in kept.items()},
    )
    return args, (kept, rates)


def _offer(op: str) -> Version:
    def serve(*args: Any) -> Any:
        found: Callable[..., Any] = getattr(StateOps(runtime()), op)
        return found(*args)

    return Version(op, "cpu_native", serve, why_no_op)


VERSIONS = tuple(_offer(op) for op in ("convolve", "scan", "linear_attention", "selective_scan", "gated_lru"))
