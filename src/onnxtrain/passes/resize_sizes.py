"""Say to what sizes a Resize goes whose scales are rounded, so that nobody computes others."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnxtrain.passes.constants import lift_constants, mark_constant
from onnxtrain.passes.forget import forget_sizes_after

__all__ = ["ResizeSizesPass"]

_ROUNDING = 1e-5
"""How far a size times its scale may be from a whole number that it was meant to be, relative to it."""


class ResizeSizesPass(ir.passes.InPlacePass):
    """Replace scales by sizes where shape inference and ONNX Runtime disagree on the sizes that follow.

    TensorFlow's converters write the scale 0.7 where an image of 10 is to become one of 7. Shape inference (onnx 1.23)
    rounds 10 times float32 0.7, which is less, down to 6; ONNX Runtime multiplies in float32, and gets 7.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite in place, in subgraphs too."""
        found = [
            (node, axes, sizes)
            for node in ir.traversal.RecursiveGraphIterator(model.graph)
            if node.op_type == "Resize" and node.domain == ""
            for axes, sizes in [_meant(node)]
            if axes
        ]
        for node, axes, sizes in found:
            _rewrite(node, axes, sizes)
            forget_sizes_after(model.graph, node)
        if found:
            lift_constants(model)
        return ir.passes.PassResult(model, bool(found))


def _meant(node: ir.Node) -> tuple[list[int], list[int]]:
    """Returns the axes that are resized and the sizes that they are meant to get, none where nobody disagrees."""
    source, *rest = node.inputs
    scales = rest[1].const_value if len(rest) > 1 and rest[1] is not None else None
    if (
        source is None
        or source.shape is None
        or scales is None
        or node.attributes.get_string("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize"
    ):
        return [], []
    given = node.attributes.get_ints("axes", list(range(len(source.shape))))
    axes, sizes, disagree = [], [], False
    for axis, scale in zip(given, scales.numpy().astype(np.float32), strict=False):
        if scale == 1:
            continue
        size = source.shape[axis]
        if not isinstance(size, int):
            return [], []
        result = int(scale * np.float32(size))
        if abs(float(scale) * size - result) > _ROUNDING * result:
            return [], []  # sizes would give another scale
        disagree |= math.floor(float(scale) * size) != result
        axes.append(axis)
        sizes.append(result)
    return (axes, sizes) if disagree else ([], [])


def _rewrite(node: ir.Node, axes: list[int], sizes: list[int]) -> None:
    constant = ir.node("Constant", [], attributes={"value": ir.tensor(np.array(sizes, np.int64))})
    constant.outputs[0].name = f"{node.outputs[0].name}/sizes"
    node.prepend(constant)
    node.attributes["axes"] = ir.AttrInt64s("axes", axes)
    if node.inputs[2] is not None:
        mark_constant(node.inputs[2])  # no parameter, though nothing may be left that reads it
    node.resize_inputs(4)
    node.replace_input_with(1, None)
    node.replace_input_with(2, None)
    node.replace_input_with(3, constant.outputs[0])
