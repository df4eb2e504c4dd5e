"""Finds traces of Dropout modules in files from PyTorch's exporter, and inserts Dropout there."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.passes.tidy.constants import add_constant
from onnxtrain.passes.tidy.unique_names import fresh_name

# Metadata key of PyTorch's Dynamo exporter: the classes of the modules that contain a node, outermost first.
_CLASSES = "pkg.torch.onnx.class_hierarchy"
_DROPOUT_CLASS = "torch.nn.modules.dropout."
# Metadata key of Dropout nodes that belong to adapters.
_ADAPTER = "onnxtrain.adapter"


def dropout_traces(graph: ir.Graph) -> list[ir.Node]:
    """Returns the Identity nodes that replace Dropout modules, including subgraphs.

    PyTorch's Dynamo exporter (2.13) writes an Identity for `nn.Dropout` in inference mode, without the ratio; its
    metadata contains the class of the module. `optimize=False` keeps this Identity. A module with `p=0` leaves the same
    Identity. Dropout2d, AlphaDropout, the function `dropout` and the `dropout_p` of attention leave no distinguishable
    node.

    Args:
        graph: main graph of a model.
    """
    return [
        node
        for node in ir.traversal.RecursiveGraphIterator(graph)
        if node.op_type == "Identity"
        and node.domain == ""
        and _DROPOUT_CLASS in node.metadata_props.get(_CLASSES, "")
    ]


def constant_ratio(model: ir.Model, ratio: float) -> ir.Value:
    """Returns a new constant for the ratio of Dropout nodes."""
    name = fresh_name(model, "onnxtrain.ratio")
    return add_constant(model.graph, ir.tensor(np.array(ratio, np.float32), name=name))


def write_dropout(model: ir.Model, node: ir.Node, ratio: ir.Value) -> ir.Node:
    """Inserts an inference-mode Dropout of a node's first input before the node, and returns the Dropout."""
    value = node.inputs[0]
    assert value is not None
    dropout = ir.node("Dropout", [value, ratio], name=f"{node.name or node.outputs[0].name}.dropout")
    result = dropout.outputs[0]
    result.name = fresh_name(model, f"{value.name}.dropout")
    result.type, result.shape = value.type, value.shape
    # A Dropout for a trace keeps its metadata, so that patterns can find it by the module's name.
    dropout.metadata_props.update(node.metadata_props if node.op_type == "Identity" else {})
    node.prepend(dropout)
    return dropout


def set_ratio(node: ir.Node, ratio: ir.Value) -> None:
    """Sets the ratio of a Dropout node, an optional input that defaults to 0.5."""
    node.resize_inputs(max(2, len(node.inputs)))
    node.replace_input_with(1, ratio)


def mark_adapter_dropout(node: ir.Node) -> None:
    """Marks a Dropout as an adapter's, whose ratio and mode follow the adapter's settings."""
    node.metadata_props[_ADAPTER] = "true"


def is_adapter_dropout(node: ir.Node) -> bool:
    """True if :func:`mark_adapter_dropout` has marked a node."""
    return _ADAPTER in node.metadata_props
