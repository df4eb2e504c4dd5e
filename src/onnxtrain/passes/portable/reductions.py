"""Lowers the rank of reductions over tensors of rank 4 and more, and computes long sums in float32."""

from __future__ import annotations

import math

import onnx_ir as ir

from onnxtrain.op_facts import REDUCTIONS
from onnxtrain.passes.portable._nodes import constant_input, standard_nodes
from onnxtrain.passes.runtime_faults.long_sums import is_long_sum
from onnxtrain.passes.tidy.replace_value import WriterBefore, replace_node


class Float32SumsPass(ir.passes.InPlacePass):
    """Accumulates long sums in float32, because onnxruntime-web's bundles with WebGPU have no float64 kernels.

    Rewrites the Casts to float64 that `LongSumsPass` and function bodies mark with `mark_long_sum`. This makes sums
    less accurate: for ten million equal numbers, the relative error of the two-level sum is 1e-3 in float32 and 1e-7 in
    float64. A single-level sum in float32 would have an error of 1e-2.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites nodes of the model in place."""
        casts = [node for node in standard_nodes(model, "Cast") if is_long_sum(node)]
        for cast in casts:
            cast.attributes["to"] = ir.AttrInt64("to", ir.DataType.FLOAT)
            wide = [cast.outputs[0]]
            # Up to the Cast that ends the sum.
            for value in wide:
                value.type = ir.TensorType(ir.DataType.FLOAT)
                wide += [node.outputs[0] for node in value.consumers() if node.op_type != "Cast"]
        return ir.passes.PassResult(model, bool(casts))


class ReductionRankPass(ir.passes.InPlacePass):
    """Merges the trailing reduced axes of a reduction into one axis if its input has rank 4 or more.

    ONNX Runtime's WebGPU provider (1.30) fails for inputs of rank 4, e.g. in the gradient of a convolution's bias
    over [batch, channels, height, width]. The sum over [batch, channels, height * width] is the same.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites nodes of the model in place."""
        modified = False
        for op_type in sorted(REDUCTIONS):
            for node in standard_nodes(model, op_type):
                modified |= _merge(node)
        return ir.passes.PassResult(model, modified)


def _merge(node: ir.Node) -> bool:
    """Merges the trailing reduced axes of a reduction's input. Returns True if the node was rewritten."""
    x, constant = node.inputs[0], constant_input(node, 1)
    if x is None or x.shape is None or x.shape.rank() < 4 or constant is None or not constant.size:
        return False
    rank = x.shape.rank()
    axes = {int(axis) % rank for axis in constant.ravel().tolist()}
    first = next(axis for axis in range(rank, -1, -1) if axis - 1 not in axes)
    # Merging a single axis, or all axes, has no effect.
    if not 0 < first < rank - 1:
        return False
    write, sizes = WriterBefore(node), list(x.shape)[first:]
    # Not -1 if possible: it cannot be computed for an empty batch.
    known = [size for size in sizes if isinstance(size, int)]
    merged = math.prod(known) if len(known) == len(sizes) else -1
    flat = write("Reshape", x, [*[0] * first, merged])
    keepdims = node.attributes.get_int("keepdims", 1)
    result = write(node.op_type, flat, sorted(axis for axis in axes if axis <= first), keepdims=keepdims)
    if keepdims:
        result = write("Unsqueeze", result, list(range(first + 1, rank)))
    replace_node(node, result)
    return True
