"""Put values in the place of others, with what onnx_ir's own methods leave out."""

from __future__ import annotations

import onnx_ir as ir

__all__ = ["stand_in"]


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
