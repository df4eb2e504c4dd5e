"""Converts poolings from ceil mode, where onnx and ONNX Runtime miscount windows, to floor mode with more padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnxtrain.op_facts import POOLINGS
from onnxtrain.passes.shapes.outdated_sizes import forget_downstream_sizes
from onnxtrain.passes.tidy.constants import lift_constants
from onnxtrain.passes.tidy.replace_value import successor, write_before

# Metadata key of a pooling that keeps ceil_mode because a Slice removes its extra windows; not to be rewritten again.
_SLICED = "onnxtrain.ceil_mode"


@dataclass(frozen=True)
class _Axis:
    """Windows of a pooling op with ceil_mode=1 along one spatial axis.

    Attributes:
        size: input size, e.g. 7, or None if symbolic.
        begin: padding before the input, e.g. 1.
        end: padding after the input, e.g. 1.
        kernel: kernel size, e.g. 3.
        extent: dilated kernel size, (kernel - 1)·dilation + 1, e.g. 5 with dilation 2.
        stride: stride of the windows, e.g. 2.
    """

    size: int | None
    begin: int
    end: int
    kernel: int
    extent: int
    stride: int

    @property
    def longest(self) -> int:
        """End padding with which floor mode has as many windows as ceil mode, for any input size.

        Ceil mode is equivalent to stride - 1 more elements of end padding, as ceil(n / stride) = floor((n + stride - 1)
        / stride). The padding is limited to extent - 1, because a window that starts after the input does not count.
        """
        return min(self.end + self.stride - 1, self.extent - 1)

    @property
    def needed(self) -> int:
        """Minimum end padding that covers the last window, or :attr:`longest` if the size is symbolic."""
        if self.size is None:
            return self.longest
        last = (self.size + self.begin + self.longest - self.extent) // self.stride
        return max(0, last * self.stride + self.extent - self.begin - self.size)


class CeilModePass(ir.passes.InPlacePass):
    """Rewrites poolings with ceil_mode=1 as ceil_mode=0 with the end padding that gives the same windows.

    According to the specification, and in PyTorch, a window that starts in the end padding does not count. onnx's shape
    inference (1.23) counts it. So does ONNX Runtime 1.20, which also includes positions beyond the padding in averages
    with count_include_pad. All agree for ceil_mode=0. The rewrite is exact, also for symbolic sizes.

    Dilated windows may need as much padding as the kernel size, which ONNX Runtime rejects. In that case, the pooling
    keeps ceil_mode, and a Slice removes the windows that start in the end padding.
    """

    def __init__(self, *, keep_sizes: bool = False) -> None:
        """Creates the pass.

        Args:
            keep_sizes: True if the annotated sizes are correct. False removes the sizes that depend on the poolings, so
                that they are inferred again.
        """
        super().__init__()
        self._keep_sizes = keep_sizes

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites poolings in the main graph and its subgraphs, in place."""
        nodes = [n for n in ir.traversal.RecursiveGraphIterator(model.graph) if _counts_up(n)]
        for node in nodes:
            _rewrite(node)
            if not self._keep_sizes:
                forget_downstream_sizes(model.graph, node)
        if nodes:
            lift_constants(model)
        return ir.passes.PassResult(model, bool(nodes))


def _counts_up(node: ir.Node) -> bool:
    """True if a node is a pooling op with ceil_mode=1 that has not been rewritten yet."""
    return (
        node.domain == ""
        and node.op_type in POOLINGS
        and bool(node.attributes.get_int("ceil_mode", 0))
        and _SLICED not in node.metadata_props
        and node.inputs[0] is not None
    )


def _rewrite(node: ir.Node) -> None:
    """Rewrites a pooling op with ceil_mode=1 to floor mode, or removes its extra windows with a Slice."""
    # With auto_pad SAME, there are ceil(size / stride) windows in either mode.
    if node.attributes.get_string("auto_pad", "NOTSET").startswith("SAME"):
        _set(node, ceil_mode=0)
        return
    axes = _axes(node)
    begins, ends = [axis.begin for axis in axes], [axis.needed for axis in axes]
    source = node.inputs[0]
    if node.attributes.get_int("count_include_pad", 0) and any(
        a.needed > a.end or a.size is None for a in axes
    ):
        # The average includes the given padding, but not what ceil_mode adds. The former is inserted into the input as
        # zeros, the latter becomes padding that is not included.
        if any(axis.begin or axis.end for axis in axes):
            _pad_before(node, axes)
        begins, ends = [0] * len(axes), [max(0, axis.needed - axis.end) for axis in axes]
        _set(node, count_include_pad=0)
    node.attributes.pop("auto_pad", None)
    # ONNX Runtime rejects padding of a whole kernel or more, which only dilated windows can need.
    if all(end < axis.kernel for end, axis in zip(ends, axes, strict=True)):
        _set(node, ceil_mode=0, pads=begins + ends)
    else:
        # A Pad before the pooling already does the padding.
        if node.inputs[0] is not source:
            _set(node, pads=[0] * 2 * len(axes))
        _cut_after(node, source, axes)


def _axes(node: ir.Node) -> list[_Axis]:
    """Returns the spatial axes of a pooling, with the padding given by `pads`."""
    kernel = _integers(node, "kernel_shape", [])
    rank = len(kernel)
    pads = _integers(node, "pads", [0] * 2 * rank)
    strides = _integers(node, "strides", [1] * rank)
    dilations = _integers(node, "dilations", [1] * rank)
    value = node.inputs[0]
    sizes = [None] * rank if value is None or value.shape is None else list(value.shape.dims[2:])
    return [
        _Axis(
            size=size if isinstance(size, int) else None,
            begin=pads[i],
            end=pads[rank + i],
            kernel=kernel[i],
            extent=(kernel[i] - 1) * dilations[i] + 1,
            stride=strides[i],
        )
        for i, size in enumerate(sizes)
    ]


def _pad_before(node: ir.Node, axes: Sequence[_Axis]) -> None:
    """Inserts a Pad with the padding of `axes` before a pooling op."""
    value = node.inputs[0]
    assert value is not None
    pads = [0, 0, *(axis.begin for axis in axes), 0, 0, *(axis.end for axis in axes)]
    padded = write_before(
        node, "padded", "Pad", value, write_before(node, "pads", "Constant", value_ints=pads)
    )
    padded.type = value.type
    if value.shape is not None:
        sizes = [None if a.size is None else a.begin + a.size + a.end for a in axes]
        padded.shape = ir.Shape([*value.shape.dims[:2], *sizes])
    node.replace_input_with(0, padded)


def _cut_after(node: ir.Node, source: ir.Value | None, axes: Sequence[_Axis]) -> None:
    """Appends a Slice to each output of a pooling op, to remove windows that start in the end padding.

    The number of remaining windows per axis is computed at run time: (size + begin + longest - extent) // stride + 1,
    as in floor mode with an end padding of :attr:`_Axis.longest`.

    Args:
        node: the pooling op, which keeps ceil_mode=1.
        source: the input before any added Pad; its sizes are read at run time.
        axes: the spatial axes.
    """
    node.metadata_props[_SLICED] = "cut"

    def constant(role: str, numbers: Sequence[int]) -> ir.Value:
        return write_before(node, role, "Constant", value_ints=numbers)

    sizes = write_before(node, "sizes", "Shape", source, start=2)
    reach = constant("reach", [axis.begin + axis.longest - axis.extent for axis in axes])
    room = write_before(node, "room", "Add", sizes, reach)
    behind_first = write_before(
        node, "behind_first", "Div", room, constant("strides", [a.stride for a in axes])
    )
    counts = write_before(node, "counts", "Add", behind_first, constant("one", [1]))
    starts, places = constant("starts", [0] * len(axes)), constant("places", range(2, 2 + len(axes)))
    for value in node.outputs:
        if value.name:
            cut = successor(value)
            value.name, value.shape = f"{cut.name}_with_empty_windows", None
            node.append(ir.node("Slice", [value, starts, counts, places], outputs=[cut]))


def _set(node: ir.Node, **attributes: Any) -> None:
    node.attributes.update(
        {name: ir.convenience.convert_attribute(name, v) for name, v in attributes.items()}
    )


def _integers(node: ir.Node, name: str, default: Sequence[int]) -> list[int]:
    return list(node.attributes.get_ints(name, default))
