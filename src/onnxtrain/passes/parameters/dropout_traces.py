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
    """Returns the Identity nodes that PyTorch's exporter writes in place of Dropout modules, also in subgraphs.

    The Dynamo exporter (2.13) writes an Identity for `nn.Dropout` in inference mode. The metadata of the Identity
    contains the class of the module, but not the ratio. `optimize=False` keeps this Identity. A module with `p=0`
    leaves the same Identity. Dropout2d, AlphaDropout, the function `dropout` and the `dropout_p` of attention leave no
    distinguishable node.

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
    """Sets, in place, the ratios of Dropout nodes, and inserts Dropout nodes where an exporter has removed them.

    Args:
        model: the model.
        ratios: maps each node to its ratio. The node is a Dropout, or an Identity (see :func:`dropout_traces`), which
            is replaced with a Dropout. For any other node, a Dropout is inserted before the node's first input.

    Returns:
        The Dropout nodes in the order of `ratios`. New nodes are in inference mode; other modes are not changed.
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
    """Marks a Dropout as part of a LoRA adapter: training enables it, whatever the settings of other layers."""
    node.metadata_props[_ADAPTER] = "true"


def is_adapter_dropout(node: ir.Node) -> bool:
    """True if :func:`mark_adapter_dropout` has marked a node."""
    return _ADAPTER in node.metadata_props
