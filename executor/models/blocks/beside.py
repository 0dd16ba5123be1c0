"""A residual stream of one or several rows of hidden values per token, with columns beside them that layers read
and, where none removes any, may write. A CPU program computes it, too."""

from __future__ import annotations

from headrace.executor.models.arch import LayerSpec
from headrace.executor.models.blocks import Held, LayerHeld, LayerOps, Ops, Stream, Value
from headrace.executor.models.blocks.tensor_ops import beside, columns


class Beside(Stream):
    """hidden values | the columns beside them. A layer's ops are emitted by `emit`. Its `LayerOps` have the hidden
    values as their stream or, of several rows, a row that the layer computes: it replaces that and puts the rows."""

    hidden: int
    """Columns of a row."""

    @property
    def rows(self) -> int:
        return 1

    @property
    def width_of_rows(self) -> int:
        return self.rows * self.hidden

    @property
    def why_no_program(self) -> str:
        return ""

    @property
    def taken(self) -> int:
        """How many of the columns beside the hidden values, the first ones, each layer reads and removes; 0: every
        layer reads all, and none removes any."""
        return self.width(0) - self.width(1)

    def first_beside(self, ops: Ops, held: Held, embedded: Value, inputs: Value | None) -> Value | None:
        """What is beside the hidden values before the first layer, from what `begin` is given; None: nothing is."""
        raise NotImplementedError

    def first_rows(self, ops: Ops, held: Held, embedded: Value) -> Value:
        """The rows before the first layer, [num_tokens, rows * hidden]."""
        return embedded

    def last_row(self, ops: Ops, held: Held, rows: Value) -> Value:
        """rows: after the last layer -> [num_tokens, hidden], before the final norm"""
        return rows

    def emit(self, layer: LayerSpec, held: LayerHeld, ops: LayerOps) -> None:
        """Emits a layer's ops."""
        raise NotImplementedError

    def begin(self, ops: Ops, held: Held, embedded: Value, inputs: Value | None) -> Value:
        found = self.first_beside(ops, held, embedded, inputs)
        rows = self.first_rows(ops, held, embedded)
        return rows if found is None else ops.call(beside, rows, found)

    def end(self, ops: Ops, held: Held, x: Value) -> Value:
        return self.last_row(ops, held, ops.call(columns, x, 0, self.width_of_rows))
