"""A model after a fusion pass, and the ops it is then made of."""

from __future__ import annotations

from collections import Counter

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from onnxtrain.passes import canonicalize, load_model


def rewritten(proto: onnx.ModelProto, fusion: ir.passes.PassBase) -> ir.Model:
    result = canonicalize(load_model(proto))
    fusion(result)
    RemoveUnusedNodesPass()(result)
    return result


def ops(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)
