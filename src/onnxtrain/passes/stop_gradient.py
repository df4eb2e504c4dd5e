"""Recognise where the gradients of a PyTorch model stop."""

from __future__ import annotations

import onnx_ir as ir

__all__ = ["is_stop_gradient", "mark_stop_gradient", "mark_stopped_gradients"]

_KEY, _ORIGIN = "pkg.torch.onnx.fx_node", "aten.detach"


def is_stop_gradient(node: ir.Node) -> bool:
    """Return whether `node` is the Identity that torch's exporter leaves of a `detach()`."""
    return (
        node.op_type == "Identity"
        and node.domain == ""
        and any(_ORIGIN in text for text in node.metadata_props.values())
    )


def mark_stop_gradient(identity: ir.Node) -> None:
    """Mark an Identity so that :func:`is_stop_gradient` knows it; the mark survives cloning and saving."""
    identity.metadata_props[_KEY] = f"{_ORIGIN}.default"


def mark_stopped_gradients(model: ir.Model) -> ir.Model:
    """Turn each `Where(true, x, x)` into a marked Identity, in place; return `model`.

    `onnxtrain.nn.stop_gradient` is exported as such a Where, because exporters remove every Identity. It says that
    no gradient passes: code that computes something has no reason to choose between a value and itself by a
    constant.
    """
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.op_type == "Where" and node.domain == "" and _chooses_nothing(node):
            value = node.inputs[1]
            node.op_type = "Identity"
            node.resize_inputs(1)
            node.replace_input_with(0, value)
            mark_stop_gradient(node)
    return model


def _chooses_nothing(node: ir.Node) -> bool:
    condition, first, second = node.inputs
    if first is not second or condition is None or condition.is_graph_input():
        return False
    tensor = ir.convenience.get_const_tensor(condition)
    return tensor is not None and tensor.shape.rank() == 0 and bool(tensor.numpy())
