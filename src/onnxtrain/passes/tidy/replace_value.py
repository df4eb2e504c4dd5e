"""Put values in the place of others, with what onnx_ir's own methods leave out."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir


def stand_in(output: ir.Value, result: ir.Value, before: ir.Node) -> None:
    """Let all that read the output of a node read another value; a graph output keeps its name.

    Args:
        output: The output, which nothing reads afterwards.
        result: What stands in for it.
        before: The node before which a copy of `result` is written, if the output is one of the graph.
    """
    if not output.is_graph_output():
        output.replace_all_uses_with(result)
        return
    kept = successor(output)
    kept.type, kept.shape = result.type, result.shape
    before.prepend(ir.node("Identity", [result], outputs=[kept]))


def successor(output: ir.Value) -> ir.Value:
    """Give the name of a node's output to a new value that its readers, and graph outputs, read from now on.

    The caller makes the new value the output of a node that reads `output`. `output` is left without a name.
    """
    value = ir.Value(name=output.name, type=output.type, shape=output.shape)
    output.name = None
    output.replace_all_uses_with(value, replace_graph_outputs=True)
    return value


def replace_node(node: ir.Node, result: ir.Value) -> None:
    """Remove a node of one output; `result` stands in for the output, and takes its dtype and shape if it has none."""
    output = node.outputs[0]
    result.type = output.type if result.type is None else result.type
    result.shape = output.shape if result.shape is None else result.shape
    stand_in(output, result, node)
    assert node.graph is not None
    node.graph.remove(node, safe=True)


def write_before(
    node: ir.Node, role: str, op_type: str, *inputs: ir.Value | None, **attributes: Any
) -> ir.Value:
    """Write a node of a standard op before another one.

    Args:
        node: The other one.
        role: What the result is for; its name is that of the other node's first output, and this.
        op_type: The op.
        inputs: Its inputs.
        attributes: Its attributes.

    Returns:
        Its result, of which nothing is annotated.
    """
    new = ir.node(op_type, inputs, attributes)
    new.outputs[0].name = f"{node.outputs[0].name}/{role}"
    node.prepend(new)
    return new.outputs[0]
