"""What the passes have in common: what they ask of nodes and values."""

from __future__ import annotations

import onnx_ir as ir

__all__ = ["PatternPass", "inner_node", "is_op"]


def inner_node(value: ir.Value | None) -> ir.Node | None:
    """Returns the node that computes a value which only one node reads."""
    if value is None or value.is_graph_output() or len(value.uses()) != 1:
        return None
    return value.producer()


def is_op(node: ir.Node, op_type: str, inputs: int | None = None) -> bool:
    """Whether a node is that op of the standard domain, with that many inputs."""
    return node.op_type == op_type and node.domain == "" and inputs in (None, len(node.inputs))


class PatternPass(ir.passes.InPlacePass):
    """A pass that recognises chains of ops in which some numbers must be constants."""

    def _number(self, value: ir.Value | None) -> float | None:
        """Returns the number that a value always has."""
        node = value.producer() if value is not None else None
        if node is not None and is_op(node, "Cast"):  # what a float64 graph reads a float32 constant through
            value = node.inputs[0]
        if value is None or value.is_graph_input():
            return None
        tensor = ir.convenience.get_const_tensor(value)
        return float(tensor.numpy().item()) if tensor is not None and tensor.size == 1 else None
