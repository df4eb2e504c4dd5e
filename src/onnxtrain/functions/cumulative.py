"""Defines cumulative sums and products, and sums over rows."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.emitter import AttributeRef, Emitter
from onnxtrain.passes import mark_long_sum

from ._composite import composite

_SETTINGS = dict.fromkeys(("axis", "exclusive", "reverse"), ir.AttributeType.INT)


@composite("RunningSum", ["x"], _SETTINGS)
def running_sum(
    op: Emitter, x: ir.Value, *, axis: AttributeRef, exclusive: AttributeRef, reverse: AttributeRef
) -> ir.Value:
    """Returns the sums of the elements of x up to each element, along one axis: CumSum computed in float64.

    Args:
        op: emitter of the function body.
        x: float, of rank 1 or more.
        axis: the axis; negative axes count from the last one.
        exclusive: 1 to leave each element out of its own sum.
        reverse: 1 to sum from the end of the axis.
    """
    wide = op.Cast(x, to=ir.DataType.DOUBLE)
    mark_long_sum(wide)
    return op.Cast(op.CumSum(wide, op.ints(axis), exclusive=exclusive, reverse=reverse), to=x.dtype)


@composite(
    "ColumnSum",
    ["x", "shape"],
    dict.fromkeys(("columns", "allowzero"), ir.AttributeType.INT),
    dtypes={"shape": ir.DataType.INT64},
)
def column_sum(
    op: Emitter, x: ir.Value, shape: ir.Value, *, columns: AttributeRef, allowzero: AttributeRef
) -> ir.Value:
    """Returns the sums over all but the last axes: of blocks of rows in float32, and of those in float64.

    Args:
        op: emitter of the function body.
        x: float, [*rows, *columns].
        shape: int64, the shape of the blocks: [blocks, rows of a block, *columns].
        columns: how many axes remain. The native kernel reads it in place of `shape`.
        allowzero: as of Reshape.
    """
    blocks = op.Reshape(x, shape, allowzero=allowzero)
    wide = op.Cast(op.ReduceSum(blocks, op.const([1]), keepdims=0), to=ir.DataType.DOUBLE)
    mark_long_sum(wide)
    return op.Cast(op.ReduceSum(wide, op.const([0]), keepdims=0), to=x.dtype)


@composite("CumulativeProduct", ["x"])
def cumulative_product(op: Emitter, x: ir.Value) -> ir.Value:
    """Returns the products of the rows of x up to each row: y_i = x_0 * ... * x_i.

    x: [rows, columns], like the result; at least one row.
    """
    body = op.subgraph({"product": x.dtype, "row": x.dtype})
    product, row = body.graph.inputs
    # ONNX Runtime (1.32) gives nondeterministic results if a value is two outputs of a Scan.
    result = body.Mul(product, row)
    body.graph.outputs.extend(_row(body.Identity(value)) for value in (result, result))
    ones = op.Expand(op.const(1, like=x), op.Shape(x, start=1))
    _, y = op.emit("Scan", ones, x, body=ir.AttrGraph("body", body.graph), num_scan_inputs=1, _outputs=2)
    return y


@composite("CumulativeProductGradient", ["ct", "x", "y"])
def cumulative_product_gradient(op: Emitter, ct: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    """VJP of CumulativeProduct, exact also where x has zeros.

    ct_x_i = g_i * y_(i-1), with the cotangent of the running product g_i = ct_i + x_(i+1) * g_(i+1).

    ct, x and y: [rows, columns], like the result.
    """
    body = op.subgraph({"carried": x.dtype, "ct": x.dtype, "row": x.dtype, "before": x.dtype})
    carried, ct_row, row, before = body.graph.inputs
    total = body.Add(carried, ct_row)
    body.graph.outputs.extend(_row(value) for value in (body.Mul(total, row), body.Mul(total, before)))
    columns = op.Shape(x, start=1)
    zeros, ones = (op.Expand(op.const(number, like=x), columns) for number in (0, 1))
    shifted = op.Concat(op.Unsqueeze(ones, [0]), op.Slice(y, [0], [-1], [0]), axis=0)
    _, result = op.emit(
        "Scan",
        zeros,
        ct,
        x,
        shifted,
        body=ir.AttrGraph("body", body.graph),
        num_scan_inputs=3,
        scan_input_directions=[1, 1, 1],
        scan_output_directions=[1],
        _outputs=2,
    )
    return result


def _row(value: ir.Value) -> ir.Value:
    """Declares the rank of an output of a Scan's body, which ONNX Runtime needs."""
    value.shape = ir.Shape([None])
    return value
