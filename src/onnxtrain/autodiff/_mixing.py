"""Decides if the mask of a cotangent may be a product, or must be a Where.

The cotangent of Relu is `ct` where the result is positive, else 0. ONNX Runtime multiplies by a mask four to eight
times as fast as it runs Where. But an infinite `ct` times a mask of 0 is NaN, as in the gradient of sqrt(relu(x)) at 0.
If the value goes into a matrix product or a convolution, that makes no difference: an infinite cotangent behind such an
op makes the gradients of its weights, and of all that comes before it, infinite or NaN anyway.
"""

from __future__ import annotations

from collections.abc import Collection, Set

import onnx_ir as ir

from onnxtrain.op_facts import FINITE_COTANGENTS, MIXING

_FAR = 64
"""Number of nodes that the search visits before it gives up and answers no."""


def is_mixed(value: ir.Value, active: Set[ir.Value], of: Collection[ir.Value]) -> bool:
    """Says if every path from `value` to a differentiated value soon meets an op that sums over many elements.

    Args:
        value: result of a forward node.
        active: values through which gradients flow.
        of: differentiated values. The user may seed them with any cotangent, also an infinite one.
    """
    seen, waiting, nodes = {value}, [value], 0
    while waiting:
        current = waiting.pop()
        if current in of:
            return False
        for use in current.uses():
            node = use.node
            # Bounded, because the question is asked for every mask and must not cost the square of the graph.
            nodes += 1
            reached = [output for output in node.outputs if output in active]
            if not reached or (node.domain == "" and node.op_type in MIXING):
                continue
            if node.domain != "" or node.op_type not in FINITE_COTANGENTS or nodes > _FAR:
                return False
            waiting += [output for output in reached if output not in seen]
            seen.update(reached)
    return True
