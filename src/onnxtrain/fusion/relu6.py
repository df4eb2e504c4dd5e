"""Rewrites ReLU6, which exporters emit as a Clip."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.emitter import Emitter
from onnxtrain.functions import hardtanh
from onnxtrain.passes import is_training_batch_norm


class Relu6Pass(ir.passes.InPlacePass):
    """Turns each ReLU6 after a training-mode BatchNormalization, i.e. each Clip to [0, 6], into a Hardtanh.

    The gradient of Hardtanh is zero at the bounds, as in PyTorch, and is computed from the output, so the normalized
    values need not be saved.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites float32 nodes of the main graph in place; subgraphs are not modified."""
        op = Emitter(model.graph, functions=model.functions)
        clips = [node for node in model.graph if _is_relu6(node)]
        for node in clips:
            node.domain, node.op_type, _ = op.function(hardtanh, ir.DataType.FLOAT)
        return ir.passes.PassResult(model, bool(clips))


def _is_relu6(node: ir.Node) -> bool:
    if (node.op_type, node.domain, len(node.inputs)) != ("Clip", "", 3):
        return False
    x, *bounds = node.inputs
    normalized = x.producer() if x is not None and x.dtype == ir.DataType.FLOAT else None
    # Only after BatchNormalization: outputs of other ops may well lie exactly on a bound, where a Clip has the gradient
    # of torch.clamp.
    return (
        normalized is not None
        and is_training_batch_norm(normalized)
        and all(
            bound is not None and bound.const_value is not None and bound.const_value.numpy().item() == limit
            for bound, limit in zip(bounds, (0, 6), strict=True)
        )
    )
