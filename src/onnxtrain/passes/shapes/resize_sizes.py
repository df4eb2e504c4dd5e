"""Corrects rounded scales of Resize if onnx and ONNX Runtime compute different output sizes from them."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnxtrain.passes.shapes.outdated_sizes import forget_downstream_sizes
from onnxtrain.passes.tidy.constants import lift_constants, mark_constant
from onnxtrain.passes.tidy.replace_value import write_before

# If size·scale is within this relative distance of an integer, the scale is taken as rounded to float32 from that size.
_ROUNDING = 1e-5


class ResizeSizesPass(ir.passes.InPlacePass):
    """Replaces the scales of a Resize if onnx's shape inference and ONNX Runtime compute different sizes from them.

    TensorFlow's converters write the scale 0.7 to resize 10 pixels to 7. In float32, it is slightly less than 0.7. onnx
    (1.23) multiplies exactly and rounds down to 6; ONNX Runtime multiplies in float32 and gets 7. With the next larger
    float32, both get 7. In mode `nearest`, a larger scale could select a different pixel, so sizes replace the scales.
    They include all axes, because ONNX Runtime (1.32) cannot move a Resize with `axes` past a Transpose.

    Expects the resized axes to have static sizes.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites nodes of the main graph and its subgraphs in place."""
        ambiguous = [
            (node, axes, sizes)
            for node in ir.traversal.RecursiveGraphIterator(model.graph)
            if node.op_type == "Resize" and node.domain == ""
            for axes, sizes in [_intended_sizes(node)]
            if axes
        ]
        for node, axes, sizes in ambiguous:
            _rewrite(node, axes, sizes)
            forget_downstream_sizes(model.graph, node)
        if ambiguous:
            lift_constants(model)
        return ir.passes.PassResult(model, bool(ambiguous))


def _intended_sizes(node: ir.Node) -> tuple[list[int], list[int]]:
    """Returns the resized axes and their intended sizes, or two empty lists if onnx and ONNX Runtime agree."""
    source, *rest = node.inputs
    scales = rest[1].const_value if len(rest) > 1 and rest[1] is not None else None
    if (
        source is None
        or source.shape is None
        or scales is None
        or node.attributes.get_string("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize"
    ):
        return [], []
    scaled_axes = node.attributes.get_ints("axes", list(range(len(source.shape))))
    axes, sizes, disagree = [], [], False
    for axis, scale in zip(scaled_axes, scales.numpy().astype(np.float32), strict=False):
        if scale == 1:
            continue
        size = source.shape[axis]
        if not isinstance(size, int):
            return [], []
        result = int(scale * np.float32(size))
        if abs(float(scale) * size - result) > _ROUNDING * result:
            # Sizes would imply a different scale, and so different sampling positions.
            return [], []
        disagree |= math.floor(float(scale) * size) != result
        axes.append(axis)
        sizes.append(result)
    return (axes, sizes) if disagree else ([], [])


def _rewrite(node: ir.Node, axes: list[int], sizes: list[int]) -> None:
    """Changes a Resize so that onnx and ONNX Runtime compute the same output sizes.

    Rounds the scales of `axes` up to the next float32. In mode `nearest`, replaces the `scales` input with a `sizes`
    input instead.

    Args:
        node: the Resize.
        axes: the resized axes.
        sizes: the intended size of each of these axes.
    """
    scales = node.inputs[2]
    assert scales is not None
    assert scales.const_value is not None
    # Unread, the old scales would look like an unused parameter.
    mark_constant(scales)
    if node.attributes.get_string("mode", "nearest") != "nearest":
        node.replace_input_with(
            2, _constant(node, "scales", _enlarged(node, scales.const_value.numpy(), axes))
        )
        return
    node.attributes.pop("axes", None)
    node.resize_inputs(4)
    node.replace_input_with(1, None)
    node.replace_input_with(2, None)
    node.replace_input_with(3, _all_sizes(node, dict(zip(axes, sizes, strict=True))))


def _all_sizes(node: ir.Node, resized: dict[int, int]) -> ir.Value:
    """Emits the `sizes` input of a Resize, int64 [rank].

    Args:
        node: the Resize.
        resized: maps axes to new sizes. Other axes keep their sizes.
    """
    source = node.inputs[0]
    assert source is not None
    assert source.shape is not None
    parts = []
    for axis, source_size in enumerate(source.shape):
        size = resized.get(axis, source_size)
        # A symbolic size, such as the batch, is read at run time.
        if isinstance(size, int):
            parts.append(_constant(node, f"size_{axis}", np.array([size], np.int64)))
        else:
            parts.append(write_before(node, f"size_{axis}", "Shape", source, start=axis, end=axis + 1))
    return write_before(node, "sizes", "Concat", *parts, axis=0)


def _enlarged(node: ir.Node, scales: np.ndarray, axes: list[int]) -> np.ndarray:
    """Returns a copy of `scales` in which the scales of `axes` are rounded up to the next float32."""
    scaled_axes = list(node.attributes.get_ints("axes", range(len(scales))))
    larger = np.nextafter(scales.astype(np.float32), np.float32(np.inf))
    return np.where([axis in axes for axis in scaled_axes], larger, scales)


def _constant(node: ir.Node, role: str, array: np.ndarray) -> ir.Value:
    return write_before(node, role, "Constant", value=ir.tensor(array))
