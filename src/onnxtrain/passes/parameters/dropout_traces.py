"""Finds traces of Dropout modules that PyTorch's exporter has removed, and inserts Dropout nodes in their place."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from onnxtrain.passes.tidy.constants import add_constant
from onnxtrain.passes.tidy.replace_value import replace_node
from onnxtrain.passes.tidy.unique_names import fresh_names

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


def write_dropout(model: ir.Model, ratios: Mapping[ir.Node, float]) -> list[ir.Node]:
    """Sets the ratios of Dropout nodes, and inserts Dropout at other nodes, in place; modes are not changed.

    Args:
        model: the model.
        ratios: ratio for each node. The node is a Dropout, a trace (:func:`dropout_traces`) to be replaced with a
            Dropout, or any other node, whose first input gets a Dropout.

    Returns:
        The Dropout nodes in the order of `ratios`; new ones are in inference mode.
    """
    new = {node: value for node in ratios if node.op_type != "Dropout" and (value := node.inputs[0])}
    numbers = list(dict.fromkeys(ratios.values()))
    bases = ["onnxtrain.ratio"] * len(numbers) + [f"{value.name}.dropout" for value in new.values()]
    names = iter(fresh_names(model, bases))
    constants = {
        number: add_constant(model.graph, ir.tensor(np.array(number, np.float32), name=next(names)))
        for number in numbers
    }
    written = []
    for node, number in ratios.items():
        dropout, value = node, node.inputs[0]
        if node in new and value is not None:
            dropout = ir.node("Dropout", [value], name=f"{node.name or node.outputs[0].name}.dropout")
            result = dropout.outputs[0]
            result.name, result.type, result.shape = next(names), value.type, value.shape
            node.prepend(dropout)
            if node.op_type == "Identity":
                # Keeps the trace's metadata, so that patterns find the Dropout by its module's name.
                dropout.metadata_props.update(node.metadata_props)
                replace_node(node, result)
            else:
                node.replace_input_with(0, result)
        # The ratio is an optional input that defaults to 0.5.
        dropout.resize_inputs(max(2, len(dropout.inputs)))
        dropout.replace_input_with(1, constants[number])
        written.append(dropout)
    return written


def mark_adapter_dropout(node: ir.Node) -> None:
    """Marks a Dropout as an adapter's, whose ratio and mode follow the adapter's settings."""
    node.metadata_props[_ADAPTER] = "true"


def is_adapter_dropout(node: ir.Node) -> bool:
    """True if :func:`mark_adapter_dropout` has marked a node."""
    return _ADAPTER in node.metadata_props
