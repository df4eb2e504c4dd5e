"""Writes ONNX nodes that encode the columns of a table. Their error messages name the column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.emitter import Emitter

_ML = "ai.onnx.ml"
# Opset of LabelEncoder; the attributes used here exist since version 2.
_ML_VERSION = 3


class ColumnWriter:
    """Writes ONNX nodes that look up and check the values of columns.

    Attributes:
        op: emitter of the model's graph.
        missing: strings that stand for a missing value, in addition to the empty string, e.g. ["NA"].
    """

    def __init__(self, op: Emitter, missing: Sequence[str]) -> None:
        self.op = op
        self.missing = missing

    def look_up(self, x: ir.Value, numbers: Mapping[str, int], default: int) -> ir.Value:
        """Writes a node that maps strings to integers.

        Args:
            x: the strings [rows].
            numbers: integer for each known string.
            default: integer for all other strings.

        Returns:
            The integers, int64 [rows].
        """
        self.op.graph.opset_imports.setdefault(_ML, _ML_VERSION)
        node = ir.node(
            "LabelEncoder",
            [x],
            domain=_ML,
            attributes={
                "keys_strings": list(numbers),
                "values_int64s": list(numbers.values()),
                "default_int64": default,
            },
            num_outputs=1,
        )
        index = node.outputs[0]
        index.name = self.op.unique_name(f"{x.name}_number")
        index.type = ir.TensorType(ir.DataType.INT64)
        self.op.graph.append(node)
        return index

    def pick_rows(self, rows: np.ndarray, index: ir.Value, message: str) -> ir.Value:
        """Writes a Gather node that computes `rows[index]`; the model fails with `message` if an index is out of range.

        ONNX has no op that raises an error, but Gather fails for an index out of range, and ONNX Runtime's error quotes
        the name of the node. The node is therefore named `message`.

        Args:
            rows: table to select from, [n] or [n, width].
            index: row numbers, int64 [rows].
            message: the error message.

        Returns:
            The selected rows, double [rows] or [rows, width].
        """
        picked: ir.Value = self.op.Gather(self.op.const(rows, ir.DataType.DOUBLE), index)
        node = picked.producer()
        assert node is not None
        node.name = message
        return picked

    def fail_if(self, condition: ir.Value, message: str) -> ir.Value:
        """Writes a check: running the model fails with `message` if `condition` is True for any row.

        Returns:
            Zeros, double [rows]. The caller adds them to the column, so that the column depends on the check.
        """
        return self.pick_rows(np.zeros(1), self.op.Cast(condition, to=ir.DataType.INT64), message)
