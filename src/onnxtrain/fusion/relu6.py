"""ReLU6, which exporters write as a Clip."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.emitter import Emitter
from onnxtrain.functions import hardtanh
from onnxtrain.passes import is_training_batch_norm


class Relu6Pass(ir.passes.InPlacePass):
    """Rewrite a Clip between 0 and 6 of what training BatchNormalization gives as a Hardtanh.

    That is ReLU6, whose gradient at the bounds is zero, as PyTorch's is, and can be told from its result: what is
    normalised need not be kept. For other ops' results, which may well lie on a bound, a Clip has the gradient of
    `torch.clamp`.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite in place, in float32; subgraphs stay."""
        op = Emitter(model.graph, functions=model.functions)
        found = [node for node in model.graph if _is_relu6(node)]
        for node in found:
            node.domain, node.op_type, _ = op.function(hardtanh, ir.DataType.FLOAT)
        return ir.passes.PassResult(model, bool(found))


def _is_relu6(node: ir.Node) -> bool:
    if (node.op_type, node.domain, len(node.inputs)) != ("Clip", "", 3):
        return False
    x, *bounds = node.inputs
    normalized = x.producer() if x is not None and x.dtype == ir.DataType.FLOAT else None
    return (
        normalized is not None
        and is_training_batch_norm(normalized)
        and all(
            bound is not None and bound.const_value is not None and bound.const_value.numpy().item() == limit
            for bound, limit in zip(bounds, (0, 6), strict=True)
        )
    )
