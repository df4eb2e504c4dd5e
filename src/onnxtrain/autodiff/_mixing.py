"""Whether cotangents can be infinite where a value is masked: what decides how a mask is written.

A Relu's cotangent is `ct` where the result is positive, else 0. ONNX Runtime computes a product with the mask four to
eight times as fast as Where, but where `ct` is infinite and the mask 0 it is NaN, as behind sqrt(relu(x)). Behind a
matrix product or a convolution this makes no difference: an infinite cotangent there makes those of its weights and of
all that it was computed from infinite or NaN anyway.
"""

from __future__ import annotations

from collections.abc import Collection, Set

import onnx_ir as ir

from onnxtrain.op_facts import FINITE_COTANGENTS, MIXING

_FAR = 64
"""How many nodes are looked at: what is further away counts as not mixed."""


def is_mixed(value: ir.Value, active: Set[ir.Value], of: Collection[ir.Value]) -> bool:
    """Returns whether everything between `value` and what is differentiated starts with sums over many elements.

    Args:
        value: result of a forward node.
        active: the values through which gradients flow.
        of: the values that are differentiated; their cotangents can be anything.
    """
    seen, waiting, nodes = {value}, [value], 0
    while waiting:
        current = waiting.pop()
        if current in of:
            return False
        for use in current.uses():
            node = use.node
            nodes += 1
            reached = [output for output in node.outputs if output in active]
            if not reached or (node.domain == "" and node.op_type in MIXING):
                continue
            if node.domain != "" or node.op_type not in FINITE_COTANGENTS or nodes > _FAR:
                return False
            waiting += [output for output in reached if output not in seen]
            seen.update(reached)
    return True
