"""A program's ops in order, with the barriers between them that `program` describes."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.kernels.cpu.program.args import ProgramOp
from headrace.kernels.cpu.program.parts import Buffer

Span = tuple[int, int, int]
"""(address, first byte, end): the bytes of each row of a buffer that an op reads or writes. Memory that is no buffer is
(address, 0, 1)."""


@dataclass
class OpList:
    """Ops in order, and the spans read and written since the last barrier."""

    ops: list[ProgramOp] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    written: set[Span] = field(default_factory=set)
    read: set[Span] = field(default_factory=set)

    def append(self, name: str, op: ProgramOp, reads: set[Span], writes: set[Span]) -> None:
        barrier = _overlap(reads, self.written) or _overlap(writes, self.written | self.read)
        if barrier:
            self.written.clear()
            self.read.clear()
        self.written |= writes
        self.read |= reads
        op.barrier_before = barrier
        self.ops.append(op)
        self.names.append(name)


def _overlap(some: set[Span], others: set[Span]) -> bool:
    return any(a[0] == b[0] and a[1] < b[2] and b[1] < a[2] for a in some for b in others)


def shared_spans(touched: tuple[Buffer | int, ...], own: bool) -> set[Span]:
    """The spans that several threads share. With own, buffers of which each thread has a copy are left out."""
    return {
        (part, 0, 1) if isinstance(part, int) else part.span
        for part in touched
        if not (own and isinstance(part, Buffer) and part.copies is not None)
    }
