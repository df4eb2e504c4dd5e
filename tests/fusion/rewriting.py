"""A model after a fusion pass, and the ops it is then made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from onnxtrain.autodiff._differentiate import add_gradients, append_outputs
from onnxtrain.passes import canonicalize, load_model, promote_initializers, to_proto


def rewritten(proto: onnx.ModelProto, fusion: ir.passes.PassBase, parameters: Sequence[str] = ()) -> ir.Model:
    result = canonicalize(load_model(proto))
    promote_initializers(result, parameters)
    fusion(result)
    RemoveUnusedNodesPass()(result)
    return result


def ops(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def with_gradients(model: ir.Model, wrt: Sequence[str], of: str = "y") -> onnx.ModelProto:
    """Return the model with the gradients of an output, whose cotangent is the input `ct`, as further outputs."""
    joint, gradients = add_gradients(model, of, wrt, cotangent="ct")
    append_outputs(joint, wrt, gradients)
    return to_proto(joint)
