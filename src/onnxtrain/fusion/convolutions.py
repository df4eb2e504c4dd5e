"""Forward convolutions as the function that native kernels know."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.emitter import Emitter, static_dims
from onnxtrain.functions import convolution

__all__ = ["ConvolutionPass"]


class ConvolutionPass(ir.passes.InPlacePass):
    """Rewrite each float32 Conv whose padding is known as a call of `Convolution`.

    To be run on a graph that has its gradients: the function has no rule, Conv has.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite in place; of subgraphs nothing."""
        op: Emitter | None = None
        for node in tuple(model.graph):
            geometry = _geometry(node) if (node.op_type, node.domain) == ("Conv", "") else None
            if geometry is not None:
                op = op or Emitter(model.graph, functions=model.functions)
                node.domain, node.op_type, _ = op.function(convolution, ir.DataType.FLOAT)
                node.attributes.clear()
                for name, value in geometry.items():
                    node.attributes.add(ir.convenience.convert_attribute(name, value))
        return ir.passes.PassResult(model, op is not None)


def _geometry(node: ir.Node) -> dict[str, int | list[int]] | None:
    """Returns the attributes of the function; None where it does not apply."""
    x, weight = node.inputs[:2]
    dims = static_dims(weight) if weight is not None else None
    if x is None or x.dtype != ir.DataType.FLOAT or dims is None or None in dims[2:] or not 3 <= len(dims) <= 5:
        return None
    if node.attributes.get_string("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return None
    rank = len(dims) - 2
    pads = node.attributes.get_ints("pads") if node.attributes.get_string("auto_pad", "NOTSET") == "NOTSET" else None
    return {
        "strides": list(node.attributes.get_ints("strides") or [1] * rank),
        "dilations": list(node.attributes.get_ints("dilations") or [1] * rank),
        "pads": list(pads or [0] * 2 * rank),
        "group": node.attributes.get_int("group", 1),
    }
