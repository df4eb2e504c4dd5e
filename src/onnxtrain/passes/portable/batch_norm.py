"""Rewrites training-mode BatchNormalization as elementary ops."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.passes.parameters.training_mode import STATISTICS, is_training_batch_norm
from onnxtrain.passes.portable._nodes import standard_nodes
from onnxtrain.passes.tidy.replace_value import WriterBefore, stand_in


class TrainingBatchNormPass(ir.passes.InPlacePass):
    """Replaces training-mode BatchNormalization, including the update of its running statistics, with elementary ops.

    ONNX Runtime's WebGPU provider (1.30) fails when it runs a BatchNormalization with training_mode=1, and its CUDA
    provider (1.31) has no kernel for it. The new nodes are Reshape, ReduceMean and elementwise ops. The batch is
    reshaped to rank 3 first, because the WebGPU provider also fails to reduce rank-4 tensors.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites nodes of the model in place."""
        nodes = [node for node in standard_nodes(model, "BatchNormalization") if is_training_batch_norm(node)]
        for node in nodes:
            _rewrite(node)
        return ir.passes.PassResult(model, bool(nodes))


def _rewrite(node: ir.Node) -> None:
    """Replaces a BatchNormalization with elementary ops that compute the formulas of BatchNormalization-15."""
    write = WriterBefore(node)
    x, scale, bias = node.inputs[:3]

    def setting(name: str, default: float, like: ir.Value | None) -> ir.Value:
        number = node.attributes.get_float(name, default)
        return write("CastLike", write.number(number, ir.DataType.FLOAT), like)

    def column(vector: ir.Value | None) -> ir.Value:
        return write("Reshape", write("CastLike", vector, x), [-1, 1])

    # [batch, channels, positions]: for rank 2, one position.
    batch = write("Reshape", x, [0, 0, -1])
    mean = write("ReduceMean", batch, [0, 2], keepdims=0)
    centered = write("Sub", batch, column(mean))
    # From centered values: the mean of squares minus the squared mean would lose digits if the mean is large.
    variance = write("ReduceMean", write("Mul", centered, centered), [0, 2], keepdims=0)
    deviation = write("Sqrt", write("Add", variance, setting("epsilon", 1e-5, x)))
    slope = column(write("Div", write("CastLike", scale, x), deviation))
    result = write("Add", write("Mul", centered, slope), column(bias))
    for (source, target), of_batch in zip(STATISTICS, (mean, variance), strict=True):
        running = node.inputs[source]
        if len(node.outputs) <= target:
            continue
        # Statistics may have a wider dtype than the batch.
        momentum = setting("momentum", 0.9, running)
        kept = write("Mul", running, momentum)
        share = write("Sub", write("CastLike", 1, running), momentum)
        _stand_in(node, target, write("Add", kept, write("Mul", write("CastLike", of_batch, running), share)))
    _stand_in(node, 0, write("Reshape", result, write("Shape", x), allowzero=1))
    assert node.graph is not None
    node.graph.remove(node, safe=True)


def _stand_in(node: ir.Node, index: int, result: ir.Value) -> None:
    """Redirects readers of output `index` to `result`, which gets the output's type and shape."""
    output = node.outputs[index]
    result.type, result.shape = output.type, output.shape
    stand_in(output, result, node)
