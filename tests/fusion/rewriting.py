"""A model after a fusion pass, and the ops it is then made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
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


def feeds_of(proto: onnx.ModelProto, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Return normal numbers for each input of a model with these symbolic sizes."""
    rng = np.random.default_rng(0)
    shapes = {
        value.name: [dim.dim_value or sizes[dim.dim_param] for dim in value.type.tensor_type.shape.dim]
        for value in proto.graph.input
    }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def ops(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def with_gradients(model: ir.Model, wrt: Sequence[str], of: str = "y") -> onnx.ModelProto:
    """Return the model with the gradients of an output, whose cotangent is the input `ct`, as further outputs."""
    joint, gradients = add_gradients(model, of, wrt, cotangent="ct")
    append_outputs(joint, wrt, gradients)
    return to_proto(joint)
