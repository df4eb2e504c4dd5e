"""Decides whether a cotangent can be masked with Mul, or only with Where.

The cotangent of Relu is `ct` where the output is positive, else 0. ONNX Runtime's Mul is four to eight times as fast as
its Where. But an infinite `ct` times a mask of 0 is NaN, e.g. in the gradient of sqrt(relu(x)) at 0. If the value feeds
a matrix product or a convolution, the difference doesn't matter: an infinite cotangent after such an op makes the
gradients of its weights, and of everything before it, infinite or NaN anyway.
"""

from __future__ import annotations

from collections.abc import Collection, Set

import onnx_ir as ir

from onnxtrain.op_facts import FINITE_COTANGENTS, MIXING

_SEARCH_LIMIT = 64
"""Once the search has visited this many nodes, it returns False at the next node that it would have to follow."""


def is_mixed(value: ir.Value, active: Set[ir.Value], of: Collection[ir.Value]) -> bool:
    """True if the cotangent of `value` may be masked with Mul, which is faster than Where but gives NaN for inf * 0.

    This is the case if every path from `value` to a differentiated value passes through an op in `MIXING`, such as
    MatMul or Conv, and all ops before it are in `FINITE_COTANGENTS`: then an infinite cotangent would make the
    gradients infinite or NaN in any case. Returns False if the search exceeds `_SEARCH_LIMIT`.

    Args:
        value: output of a forward node.
        active: values through which gradients flow. Nodes without an active output are ignored.
        of: the differentiated values, such as the loss. Their cotangents are chosen by the user, and may be infinite.
    """
    seen, waiting, nodes = {value}, [value], 0
    while waiting:
        current = waiting.pop()
        if current in of:
            return False
        for use in current.uses():
            node = use.node
            # Bounded, because the search runs for every mask, and the total cost must not be quadratic in the size of
            # the graph.
            nodes += 1
            reached = [output for output in node.outputs if output in active]
            if not reached or (node.domain == "" and node.op_type in MIXING):
                continue
            if node.domain != "" or node.op_type not in FINITE_COTANGENTS or nodes > _SEARCH_LIMIT:
                return False
            waiting += [output for output in reached if output not in seen]
            seen.update(reached)
    return True
