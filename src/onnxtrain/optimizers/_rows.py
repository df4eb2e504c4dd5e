"""Gathers and scatters the table rows of a sparse gradient, so that a step updates only these rows."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.emitter import Emitter
from onnxtrain.functions import embedding_gradient


class Rows:
    """Gathers and scatters the rows of a table for which a sparse gradient has entries, each row once.

    The methods call the number of distinct rows `rows`.

    Args:
        op: emitter of the optimizer model.
        reads: row indices of the sparse gradient, int64 [reads], in any order, possibly with duplicates.
    """

    def __init__(self, op: Emitter, reads: ir.Value) -> None:
        self._op = op
        # Distinct rows by TopK, which sorts, and a comparison of neighbors. Unique takes eight times as long (ONNX
        # Runtime 1.32) and only runs on CPUs.
        ordered, order = op.TopK(reads, op.Shape(reads), largest=0, _outputs=2)
        # Row indices are non-negative, so a leading -1 makes the first one differ from its predecessor.
        previous = op.Slice(op.Concat([-1], ordered, axis=0), [0], [-1])
        is_first = op.Not(op.Equal(ordered, previous))
        rows = op.Compress(ordered, is_first, axis=0)
        place = op.Sub(op.CumSum(op.Cast(is_first, to=ir.DataType.INT64), 0), 1)
        self._count = op.Shape(rows)
        self._places = op.ScatterElements(order, order, place)
        self._rows = rows

    def add_up(self, gradient: ir.Value) -> ir.Value:
        """Sums the gradients [reads, *rest] per distinct row; returns [rows, *rest]."""
        op = self._op
        shape = op.Concat(self._count, op.Shape(gradient, start=1), axis=0)
        return op.call(embedding_gradient, gradient, self._places, shape)

    def read(self, table: ir.Value) -> ir.Value:
        """Gathers the rows of a table [n, *rest]."""
        return self._op.Gather(table, self._rows)

    def write(self, table: ir.Value, values: ir.Value) -> ir.Value:
        """Replaces the rows of a table with `values` [rows, *rest]; returns the table."""
        # If a host binds the result to the table's memory, ONNX Runtime's ScatterND only writes these rows.
        return self._op.ScatterND(table, self._op.Unsqueeze(self._rows, [-1]), values)
