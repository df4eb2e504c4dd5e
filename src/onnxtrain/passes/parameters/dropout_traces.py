"""Find what PyTorch's exporter has left of Dropout modules."""

from __future__ import annotations

import onnx_ir as ir

# Metadata key of PyTorch's Dynamo exporter: the classes of the modules around a node, outermost first.
_CLASSES = "pkg.torch.onnx.class_hierarchy"
_DROPOUT_CLASS = "torch.nn.modules.dropout."


def dropout_traces(graph: ir.Graph) -> list[ir.Node]:
    """Return the Identity nodes that stand in the place of Dropout modules.

    PyTorch's Dynamo exporter (2.13) writes an Identity for `nn.Dropout` in inference mode, without the ratio;
    its metadata names the class of the module. `optimize=False` keeps this Identity. A module with `p=0` leaves the
    same Identity. Dropout2d, AlphaDropout and the function `dropout` leave none that could be told from others.

    Args:
        graph: Main graph of a model.
    """
    return [
        node
        for node in graph
        if node.op_type == "Identity"
        and node.domain == ""
        and _DROPOUT_CLASS in node.metadata_props.get(_CLASSES, "")
    ]
