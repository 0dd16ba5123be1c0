"""Ops of a program on several rows of hidden values of each token, which lie side by side, and sparse gates."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from headrace.kernels.cpu.elementwise.args import (
    CorrectRowsArgs,
    LikeRowsArgs,
    MixRowsArgs,
    ScaleColumnsArgs,
    SparseGateArgs,
)
from headrace.kernels.cpu.linear.args import ACTIVATIONS
from headrace.kernels.cpu.program.parts import Buffer, check_vector, require_same
from headrace.kernels.cpu.program.program import ROW_COUNTS, Builder
from headrace.kernels.cpu.runtime.pointers import pointer


def write_mix_rows(builder: Builder, x: Buffer, shares: Buffer, out: Buffer) -> None:
    """out = x + shares x, for each token's rows x [count, size] and shares [count, count]."""
    count = _root(shares.columns)
    require_same(x.columns, out.columns, "the columns of rows", "their output's")
    args = MixRowsArgs(size=_size(x, count), count=count)
    _write(builder, "mix_rows", args, {"input": x, "shares": shares}, out)


def write_correct_rows(
    builder: Builder, x: Buffer, computed: Buffer, shares: Buffer, out: Buffer, *, active: int
) -> None:
    """out[r] = (computed - x[active]) * (shares[r] + 1) + x[r], for each row r of a token."""
    count = shares.columns
    require_same(x.columns, out.columns, "the columns of rows", "their output's")
    require_same(computed.columns, _size(x, count), "the columns of a computed row", "those of each row")
    args = CorrectRowsArgs(size=computed.columns, count=count, active=active)
    _write(builder, "correct_rows", args, {"input": x, "computed": computed, "shares": shares}, out)


def write_like_rows(
    builder: Builder, x: Buffer, pattern: Buffer, out: Buffer, *, least: float, adds: bool = False
) -> None:
    """out = each row of x times a factor, with the mean square of the pattern then; or (adds) the mean of these rows
    and the pattern. least: the least mean square of x, by whose root is divided."""
    count = x.columns // pattern.columns
    require_same(_size(x, count), pattern.columns, "the columns of a row", "the pattern's")
    require_same(out.columns, pattern.columns if adds else x.columns, "the output's columns", "its input's")
    args = LikeRowsArgs(size=pattern.columns, count=count, least=least, adds=adds)
    _write(builder, "like_rows", args, {"input": x, "pattern": pattern}, out)


def write_sparse_gate(
    builder: Builder, gate: Buffer, up: Buffer, out: Buffer, *, cutoff: float, activation: str
) -> None:
    """out = activation(relu(gate - lowest)) * up, where lowest is the gate's mean plus cutoff standard deviations, of
    each token."""
    require_same({gate.columns, up.columns}, {out.columns}, "the columns of gate and up projection", "their output's")
    args = SparseGateArgs(size=out.columns, cutoff=cutoff, activation=ACTIVATIONS[activation], output_type=out.type)
    _write(builder, "sparse_gate", args, {"gate": gate, "up": up}, out)


def write_scale_columns(builder: Builder, x: Buffer, factors: Tensor, out: Buffer) -> None:
    """out = x * factors [columns], float32."""
    require_same(x.columns, out.columns, "the columns that are scaled", "their output's")
    check_vector(factors, x.columns, "the factors of columns")
    args = ScaleColumnsArgs(factors=pointer(factors), size=x.columns)
    _write(builder, "scale_columns", args, {"input": x}, out, factors)


def _write(
    builder: Builder, name: str, args: ctypes.Structure, inputs: dict[str, Buffer], out: Buffer, *kept: object
) -> None:
    """Fills in the fields NAME and NAME_stride of each buffer and the rows."""
    for field, buffer in (*inputs.items(), ("output", out)):
        if buffer.tensor.dtype != torch.float32 and not (buffer is out and hasattr(args, "output_type")):
            raise ValueError(f"rows are float32, not {buffer.tensor.dtype}.")
        require_same(buffer.rows, out.rows, f"the rows of the {field}", "those of the output")
        setattr(args, field, buffer.address)
        setattr(args, f"{field}_stride", buffer.stride)
    args.rows = ROW_COUNTS[out.rows]
    builder.op(f"hr_op_{name}", args, inputs.values(), (out,), keep=kept)


def _size(x: Buffer, count: int) -> int:
    if x.columns % count:
        raise ValueError(f"{x.columns} columns are not {count} rows.")
    return x.columns // count


def _root(number: int) -> int:
    root = int(number**0.5)
    require_same(root * root, number, "the square of the number of rows", "the number of their shares")
    return root
