"""Restore meanings that onnx's version converter loses on the way to the canonical opset.

Each of these was found by comparing ONNX Runtime's results before and after conversion.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import UnsupportedOpsetError

_BATCH_NORM_MODE = 14
"""From this opset on an attribute says that a BatchNormalization trains; before, its further outputs do."""


def drop_saved_statistics(model: ir.Model, opset: int) -> None:
    """Remove the outputs 4 and 5 of BatchNormalization, in place, which the converter does not take.

    PyTorch writes them into models of opset 13 and older that it exports in training mode: mean and variance of the
    batch, for a backward pass. Nothing reads them.

    Raises:
        UnsupportedOpsetError: Something does.
    """
    if opset >= _BATCH_NORM_MODE:
        return
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if (node.domain, node.op_type) != ("", "BatchNormalization") or len(node.outputs) <= 3:
            continue
        read = [str(value.name) for value in node.outputs[3:] if value.uses() or value.is_graph_output()]
        if read:
            raise UnsupportedOpsetError(
                f"Cannot convert the model from opset {opset}: {', '.join(map(repr, read))} of the BatchNormalization "
                f"{node.name!r} is read, the mean or variance of a batch, which newer opsets do not return. Compute "
                "it with ReduceMean, or export the model with opset 14 or newer."
            )
        node.resize_outputs(3)


def restore_legacy_semantics(model: ir.Model, opset: int) -> None:
    """Make the ops of a converted model, in place, mean what they meant at `opset`, where it came from."""
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


_FLOAT_SETTINGS = {"Clip": (1, 2), "Pad": (2,)}


def _restore_setting(node: ir.Node) -> None:
    """The attributes of Clip-6 and Pad-2 are floats whatever their input is, the inputs that they become are not."""
    source = node.inputs[0]
    if source is None or source.dtype == ir.DataType.FLOAT:
        return
    for index in _FLOAT_SETTINGS[node.op_type]:
        value = node.inputs[index] if index < len(node.inputs) else None
        if value is not None:
            cast = ir.node("CastLike", [value, source])
            node.prepend(cast)
            node.replace_input_with(index, cast.outputs[0])


def _restore_resize(node: ir.Node) -> None:
    """Upsample and Resize-10 sample at `i / scale`; Resize-11 by default at the centres of pixels.

    In nearest mode ONNX Runtime rounds up where it shrinks and down where it enlarges.
    """
    scales = node.inputs[2].const_value if len(node.inputs) > 2 and node.inputs[2] is not None else None
    shrinks = scales is not None and bool(np.all(scales.numpy() <= 1))
    node.attributes.add(ir.AttrString("coordinate_transformation_mode", "asymmetric"))
    node.attributes.add(ir.AttrString("nearest_mode", "ceil" if shrinks else "floor"))


def _restore_hardmax(node: ir.Node) -> None:
    """Hardmax-11 sees its input as a matrix, rows being the dimensions before `axis` (default 1)."""
    axis = node.attributes.get_int("axis", 1)
    source = node.inputs[0]
    result = node.outputs[0]
    if source is None or axis == -1 or (source.shape is not None and axis == len(source.shape) - 1):
        node.attributes.add(ir.AttrInt64("axis", axis))
        return
    shape = ir.node("Shape", [source])
    matrix = ir.node("Flatten", [source], attributes={"axis": axis})
    node.prepend([shape, matrix])
    node.replace_input_with(0, matrix.outputs[0])
    node.attributes.add(ir.AttrInt64("axis", -1))
    name, result.name = result.name, None
    back = ir.node(
        "Reshape",
        [result, shape.outputs[0]],
        outputs=[ir.Value(name=name, type=result.type, shape=result.shape)],
    )
    result.replace_all_uses_with(back.outputs[0], replace_graph_outputs=True)
    back.replace_input_with(0, result)
    result.shape = None
    node.append(back)
