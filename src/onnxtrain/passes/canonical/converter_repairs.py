"""Repairs ops whose results onnx's version converter changes.

Each repair was found by comparing ONNX Runtime's results before and after conversion.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import UnsupportedOpsetError
from onnxtrain.passes.tidy.replace_value import successor, write_before

# Since this opset, the attribute training_mode selects training. Before, BatchNormalization trained if it had more than
# one output.
_BATCH_NORM_MODE = 14


def drop_saved_statistics(model: ir.Model, opset: int) -> None:
    """Removes, in place, the saved mean and variance that a BatchNormalization returns.

    These are its fourth and fifth output, which the version converter rejects. PyTorch writes them when it exports in
    training mode to opset 13 or older. They are meant for a backward pass, so nothing in the file reads them.

    Raises:
        UnsupportedOpsetError: a node or a graph output reads a saved statistic.
    """
    if opset >= _BATCH_NORM_MODE:
        return
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if (node.domain, node.op_type) != ("", "BatchNormalization") or len(node.outputs) <= 3:
            continue
        read = [str(value.name) for value in node.outputs[3:] if value.uses() or value.is_graph_output()]
        if read:
            raise UnsupportedOpsetError(
                f"Cannot convert the model from opset {opset}: the graph reads "
                f"{', '.join(map(repr, read))} of the BatchNormalization {node.name!r}, a batch mean or "
                "variance that newer opsets do not return. Compute it with ReduceMean, or export the "
                "model with opset 14 or newer."
            )
        node.resize_outputs(3)


def restore_legacy_semantics(model: ir.Model, opset: int) -> None:
    """Repairs, in place, ops whose results the version converter has changed.

    Args:
        model: a model that the version converter has converted from `opset` to the canonical opset.
        opset: the original opset.
    """
    for node in tuple(ir.traversal.RecursiveGraphIterator(model.graph)):
        if node.domain != "":
            continue
        if node.op_type == "Resize" and opset <= 10:
            _restore_resize(node)
        elif node.op_type == "Hardmax" and opset <= 12:
            _restore_hardmax(node)
        elif node.op_type in _FLOAT_SETTINGS and opset <= 10:
            _restore_setting(node)
        elif (
            node.op_type == "BatchNormalization"
            and opset < _BATCH_NORM_MODE
            and any(value.name for value in node.outputs[1:])
        ):
            node.attributes.add(ir.AttrInt64("training_mode", 1))


# Inputs that were float attributes up to opset 10: bounds of Clip, fill value of Pad.
_FLOAT_SETTINGS = {"Clip": (1, 2), "Pad": (2,)}


def _restore_setting(node: ir.Node) -> None:
    """Casts the bounds of Clip and the fill value of Pad to the dtype of the data.

    In Clip-6 and Pad-2, these settings were float32 attributes for data of any dtype. As inputs, they must have the
    dtype of the data.
    """
    source = node.inputs[0]
    if source is None or source.dtype == ir.DataType.FLOAT:
        return
    for index in _FLOAT_SETTINGS[node.op_type]:
        value = node.inputs[index] if index < len(node.inputs) else None
        if value is not None:
            node.replace_input_with(index, write_before(node, f"input_{index}", "CastLike", value, source))


def _restore_resize(node: ir.Node) -> None:
    """Restores the sampling positions `i / scale` of an Upsample or Resize-10. Resize-11 defaults to pixel centers.

    In nearest mode, the position is rounded up when shrinking and down when enlarging, as in ONNX Runtime.
    """
    scales = node.inputs[2].const_value if len(node.inputs) > 2 and node.inputs[2] is not None else None
    shrinks = scales is not None and bool(np.all(scales.numpy() <= 1))
    node.attributes.add(ir.AttrString("coordinate_transformation_mode", "asymmetric"))
    node.attributes.add(ir.AttrString("nearest_mode", "ceil" if shrinks else "floor"))


def _restore_hardmax(node: ir.Node) -> None:
    """Flattens the input of Hardmax to a matrix at `axis`, as Hardmax-11 does. Hardmax-13 works along one axis."""
    axis = node.attributes.get_int("axis", 1)
    source = node.inputs[0]
    result = node.outputs[0]
    if source is None or axis == -1 or (source.shape is not None and axis == len(source.shape) - 1):
        # Both versions agree on the last axis, but the default axis has changed from 1 to -1.
        node.attributes.add(ir.AttrInt64("axis", axis))
        return
    shape = write_before(node, "shape", "Shape", source)
    node.replace_input_with(0, write_before(node, "matrix", "Flatten", source, axis=axis))
    node.attributes.add(ir.AttrInt64("axis", -1))
    back = successor(result)
    result.shape = None
    node.append(ir.node("Reshape", [result, shape], outputs=[back]))
