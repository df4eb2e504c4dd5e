"""Rewrites Slice with negative steps, and Pad in mode "wrap", as Gather."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.passes.portable._nodes import constant_input, standard_nodes
from onnxtrain.passes.tidy.replace_value import WriterBefore, replace_node


class NegativeStepsPass(ir.passes.InPlacePass):
    """Turns a Slice with negative steps into a Gather along each reversed axis.

    The default bundle of onnxruntime-web (JSEP, 1.30) silently returns wrong elements on WebGPU. Starts and ends may be
    computed at run time, but axes and steps must be constants.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites nodes of the model in place."""
        nodes = [node for node in standard_nodes(model, "Slice") if _axes_and_steps(node) is not None]
        for node in nodes:
            _reverse(node)
        return ir.passes.PassResult(model, bool(nodes))


def _axes_and_steps(node: ir.Node) -> tuple[list[int], list[int]] | None:
    """Returns the axes and steps of a Slice with a negative step.

    Returns None for other Slices, and if the axes or steps are not constants.
    """
    steps = constant_input(node, 4)
    # A step of 0 is invalid; the runtime raises an error.
    if steps is None or np.min(steps, initial=1) > 0:
        return None
    if len(node.inputs) < 4 or node.inputs[3] is None:
        return list(range(steps.size)), [int(step) for step in steps]
    axes = constant_input(node, 3)
    return None if axes is None else ([int(axis) for axis in axes], [int(step) for step in steps])


def _reverse(node: ir.Node) -> None:
    """Replaces a Slice that has a negative step with one Gather or Slice per axis."""
    write, found = WriterBefore(node), _axes_and_steps(node)
    assert found is not None
    result, starts, ends = node.inputs[:3]
    assert result is not None
    for place, (axis, step) in enumerate(zip(*found, strict=True)):
        # Starts and ends may be int32, which Min and Max cannot combine with int64 sizes.
        start, end = (
            write("Gather", write("Cast", x, to=ir.DataType.INT64), [place]) for x in (starts, ends)
        )
        if step > 0:
            result = write("Slice", result, start, end, [axis], [step])
            continue
        size = write("Gather", write("Shape", result), [axis])
        # As in the standard: negative bounds count from the end, and are then clamped to -1 .. size - 1.
        first, stop = (
            write("Squeeze", write("Max", write("Min", counted, write("Sub", size, 1)), -1))
            for counted in (
                write("Where", write("Less", bound, 0), write("Add", bound, size), bound)
                for bound in (start, end)
            )
        )
        result = write("Gather", result, write("Range", first, stop, step), axis=axis)
    replace_node(node, result)


class WrappingPadPass(ir.passes.InPlacePass):
    """Replaces a Pad in mode "wrap" with a Gather along each padded axis.

    The default bundle of onnxruntime-web (JSEP, 1.30) silently pads with wrong elements on WebGPU. The pads must be
    constants.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites nodes of the model in place."""
        nodes = [
            node
            for node in standard_nodes(model, "Pad")
            if node.attributes.get_string("mode", "constant") == "wrap" and _pads(node) is not None
        ]
        for node in nodes:
            write, result = WriterBefore(node), node.inputs[0]
            assert result is not None
            for axis, before, after in _pads(node) or ():
                size = write("Gather", write("Shape", result), [axis])
                around = write.range(-before, write("Add", size, before + after))
                # Integer Mod has the sign of the divisor, so positions before the first one count from the end.
                result = write("Gather", result, write("Mod", around, size), axis=axis)
            # All pads may be 0, but the node's output must not become the input itself.
            replace_node(node, write("Identity", result))
        return ir.passes.PassResult(model, bool(nodes))


def _pads(node: ir.Node) -> Sequence[tuple[int, int, int]] | None:
    """Returns (axis, leading padding, trailing padding) for each padded axis of a Pad.

    Returns None if the pads or the axes are not constants.
    """
    pads = constant_input(node, 1)
    axes = constant_input(node, 3)
    if pads is None or (axes is None and len(node.inputs) > 3 and node.inputs[3] is not None):
        return None
    count = pads.size // 2
    axes = np.arange(count) if axes is None else axes
    return [
        (int(axis), int(before), int(after))
        for axis, before, after in zip(axes, pads[:count], pads[count:], strict=True)
        if before or after
    ]
