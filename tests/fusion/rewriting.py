"""A model after a fusion pass, and the ops it is then made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from onnxtrain.passes import canonicalize, load_model, promote_initializers


def rewritten(proto: onnx.ModelProto, fusion: ir.passes.PassBase, parameters: Sequence[str] = ()) -> ir.Model:
    result = canonicalize(load_model(proto))
    promote_initializers(result, parameters)
    fusion(result)
    RemoveUnusedNodesPass()(result)
    return result


def ops(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)
