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
    name, output.name = output.name, None
    copy = ir.node("Identity", [result], outputs=[ir.Value(name=name, type=result.type, shape=result.shape)])
    before.prepend([copy])
    output.replace_all_uses_with(copy.outputs[0], replace_graph_outputs=True)


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
