"""Defines `Emitter`, which appends standard nodes and provides computations that gradient rules and losses share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.emitter._node_writer import NodeWriter, Operand
from onnxtrain.emitter._values import static_dims
from onnxtrain.passes.parameters.stop_gradient import mark_stop_gradient


class Emitter(NodeWriter):
    """Appends nodes to a graph or a function body.

    `op.Name(*inputs, **attributes)` appends one node of the standard domain and returns its output. An input is a
    value, None for an omitted optional input, or a number or (nested) list, which becomes a constant: int64 for
    integers, bool for booleans, and for floats the dtype of the first floating-point value among the inputs.
    `_outputs=k` returns a tuple of k outputs.

    Args:
        graph: the graph to append to, or the graph of a function body.
        opset: version of the standard domain. Default: the version that the graph imports.
        functions: the model's function table. Only :meth:`call` and :meth:`function` need it.
        in_function: True writes constants as Constant nodes, because function bodies have no initializers.

    Attributes:
        scope: prefix of the names of new nodes and values, e.g. "encoder/".
        metadata: `metadata_props` for new nodes, by op type of the standard domain, e.g. {"Floor": {"onnxtrain.origin":
            "gradient"}}. Emitters of subgraphs inherit it. Nodes that :meth:`copy_of` copies keep their own.
    """

    def shape_of(self, value: ir.Value) -> ir.Value:
        """Returns the shape of `value`, int64 [rank]: a constant if it is static, else the output of a Shape node.

        Later calls for the same value reuse the Shape node.
        """
        # A constant lets later passes fold and fuse nodes; a Shape node would hide the sizes.
        dims = static_dims(value)
        if dims is not None and None not in dims:
            return self.const(np.array(dims, dtype=np.int64))
        if value not in self._shapes:
            self._shapes[value] = self.Shape(value)
        return self._shapes[value]

    def dim(self, value: ir.Value, axis: int) -> ir.Value:
        """Returns the size of `value` along `axis`, as int64 [1]."""
        dims = static_dims(value)
        if dims is not None:
            size = dims[axis]
            if size is not None:
                return self.const([size])
        if axis == -1:
            # With end=0, Shape would return an empty tensor.
            output: ir.Value = self.Shape(value, start=-1)
        else:
            output = self.Shape(value, start=axis, end=axis + 1)
        return output

    def reshape_like(self, value: ir.Value, like: ir.Value) -> ir.Value:
        """Returns `value` reshaped to the shape of `like`, which has the same number of elements."""
        # Without allowzero, a size of 0 would mean "copy the size of the input's axis".
        output: ir.Value = self.Reshape(value, self.shape_of(like), allowzero=1)
        output.shape = like.shape
        return output

    def reshape_after(self, value: ir.Value, shape: Operand, signal: ir.Value) -> ir.Value:
        """Returns `value` reshaped to `shape`, with a Reshape that cannot run before `signal` is computed.

        A runtime may run a node as soon as its inputs are available. To delay the Reshape, a zero computed from the
        first element of the signal is added to the shape. No optimizer folds that zero: it is computed as x < x, which
        is false for NaN as well.

        Args:
            value: the tensor to reshape.
            shape: the target shape, int64 [rank].
            signal: a floating-point tensor.
        """
        if signal not in self._zeros:
            first = self.Slice(self.Reshape(signal, [-1]), [0], [1])
            none = self.Cast(self.Less(first, first), to=ir.DataType.INT64)
            self._zeros[signal] = self.ReduceSum(none, keepdims=0)
        return self.Reshape(value, self.Add(shape, self._zeros[signal]), allowzero=1)

    def merge_from(self, value: ir.Value, axis: int) -> ir.Value:
        """Flattens `axis` and all later axes of `value` into one; also works for empty tensors.

        A Reshape to [0, 0, -1] can't infer the last size of an empty tensor, and ONNX Runtime rejects it.
        """
        sizes = (static_dims(value) or (None,) * (axis + 1))[axis:]
        count = None if None in sizes else math.prod(size for size in sizes if size is not None)
        if count:
            return self.Reshape(value, [0] * axis + [count])
        merged = self.Shape(self.Flatten(value, axis=axis), start=1)
        shape = self.Concat(self.Shape(value, start=0, end=axis), merged, axis=0)
        return self.Reshape(value, shape, allowzero=1)

    def pad(
        self,
        value: ir.Value,
        pads: ir.Value | Sequence[int],
        axes: Sequence[int],
        rank: int,
        constant: Operand = None,
        mode: str | None = None,
    ) -> ir.Value:
        """Returns `value` padded along the given axes.

        Args:
            value: the tensor to pad.
            pads: int64 [2 * len(axes)], the number of elements to add before each of `axes`, then after each.
            axes: non-negative axes.
            rank: rank of `value`.
            constant: scalar to pad with. Default: zero.
            mode: the `mode` attribute of Pad.
        """
        # Pad's `axes` input is avoided: ONNX Runtime (at least up to 1.31) ignores it when it moves a Transpose past a
        # Pad, and the optimized graph fails.
        if list(axes) != list(range(rank)):
            places = np.array([*axes, *(axis + rank for axis in axes)], dtype=np.int64)
            everywhere = np.zeros(2 * rank, dtype=np.int64)
            constant_pads = pads.const_value if isinstance(pads, ir.Value) else np.array(pads, dtype=np.int64)
            if constant_pads is not None:
                everywhere[places] = (
                    constant_pads.numpy() if isinstance(constant_pads, ir.TensorProtocol) else constant_pads
                )
                pads = self.const(everywhere)
            else:
                pads = self.ScatterElements(everywhere, places, pads, axis=0)
        fill = () if constant is None else (constant,)
        return self.Pad(value, pads, *fill, mode=mode)

    def stop_gradient(self, value: ir.Value) -> ir.Value:
        """Returns an Identity of `value` through which no gradient flows."""
        result: ir.Value = self.Identity(value)
        result.shape = value.shape
        node = result.producer()
        assert node is not None
        mark_stop_gradient(node)
        return result

    def zeros_like(self, value: ir.Value, dtype: ir.DataType | None = None) -> ir.Value:
        """Returns zeros with the shape of `value`, and with its dtype unless `dtype` is given."""
        return self._filled(value, 0, dtype)

    def ones_like(self, value: ir.Value) -> ir.Value:
        """Returns ones with the shape and dtype of `value`."""
        return self._filled(value, 1)

    def _filled(self, value: ir.Value, number: int, dtype: ir.DataType | None = None) -> ir.Value:
        dtype = dtype or value.dtype or ir.DataType.FLOAT
        # ConstantOfShape has no bfloat16 kernel on the CPU; Expand has every dtype.
        output: ir.Value = self.Expand(self.const(number, dtype), self.shape_of(value))
        output.shape = value.shape
        return output
