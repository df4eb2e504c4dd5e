"""Finds traces of Dropout modules that PyTorch's exporter has removed, and inserts Dropout nodes there."""

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
    return [node for node in ir.traversal.RecursiveGraphIterator(graph) if _is_trace(node)]


def _is_trace(node: ir.Node) -> bool:
    """True for an Identity that an exporter wrote for a Dropout module."""
    return (
        node.op_type == "Identity"
        and node.domain == ""
        and _DROPOUT_CLASS in node.metadata_props.get(_CLASSES, "")
    )


def write_dropout(model: ir.Model, ratios: Mapping[ir.Node, float]) -> list[ir.Node]:
    """Sets the ratios of Dropout nodes, and inserts Dropout at other nodes, in place; the modes stay as they are.

    Args:
        model: the model.
        ratios: ratio per place: a Dropout, a trace (:func:`dropout_traces`), which Dropout replaces, or another node,
            whose first input will be dropped.

    Returns:
        The Dropout nodes of all places; new ones are in inference mode.
    """
    new = [node for node in ratios if node.op_type != "Dropout"]
    numbers = list(dict.fromkeys(ratios.values()))
    bases = ["onnxtrain.ratio"] * len(numbers) + [f"{_dropped(node).name}.dropout" for node in new]
    names = fresh_names(model, bases)
    constants = {
        ratio: add_constant(model.graph, ir.tensor(np.array(ratio, np.float32), name=name))
        for ratio, name in zip(numbers, names, strict=False)
    }
    results = dict(zip(new, names[len(numbers) :], strict=True))
    return [
        _insert(node, constants[ratio], results[node])
        if node in results
        else _set_ratio(node, constants[ratio])
        for node, ratio in ratios.items()
    ]


def _dropped(node: ir.Node) -> ir.Value:
    """Returns the value that a Dropout at this node drops."""
    value = node.inputs[0]
    assert value is not None
    return value


def _set_ratio(node: ir.Node, ratio: ir.Value) -> ir.Node:
    """Sets the ratio of a Dropout node, an optional input that defaults to 0.5; returns the node."""
    node.resize_inputs(max(2, len(node.inputs)))
    node.replace_input_with(1, ratio)
    return node


def _insert(node: ir.Node, ratio: ir.Value, name: str) -> ir.Node:
    """Inserts a Dropout before a node, or in place of a trace; returns the Dropout, whose result gets the name."""
    value = _dropped(node)
    dropout = ir.node("Dropout", [value, ratio], name=f"{node.name or node.outputs[0].name}.dropout")
    result = dropout.outputs[0]
    result.name, result.type, result.shape = name, value.type, value.shape
    node.prepend(dropout)
    if _is_trace(node):
        # Keeps its metadata, so that patterns find the Dropout by the module's name.
        dropout.metadata_props.update(node.metadata_props)
        replace_node(node, result)
    else:
        node.replace_input_with(0, result)
    return dropout


def mark_adapter_dropout(node: ir.Node) -> None:
    """Marks a Dropout as an adapter's, whose ratio and mode follow the adapter's settings."""
    node.metadata_props[_ADAPTER] = "true"


def is_adapter_dropout(node: ir.Node) -> bool:
    """True if :func:`mark_adapter_dropout` has marked a node."""
    return _ADAPTER in node.metadata_props
