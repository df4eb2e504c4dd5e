"""Write poolings with ceil_mode without it, so that nobody miscounts their windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnxtrain.op_facts import POOLINGS
from onnxtrain.passes.shapes.outdated_sizes import forget_sizes_after
from onnxtrain.passes.tidy.constants import lift_constants

_SLICED = "onnxtrain.ceil_mode"
"""Key in the metadata of a pooling that keeps its ceil_mode, because a Slice behind it counts the windows."""


@dataclass(frozen=True)
class _Axis:
    """The windows along one axis with ceil_mode.

    Attributes:
        size: what they slide over, None where that is symbolic; `begin` and `end` its padding.
        kernel: taps of a window; `extent` from the first to the last of them.
        stride: from one window to the next.
    """

    size: int | None
    begin: int
    end: int
    kernel: int
    extent: int
    stride: int

    @property
    def longest(self) -> int:
        """The end padding with which floor mode has as many windows, whatever the size.

        Rounding up is rounding down with a stride less one more. A window that starts behind the input does not
        count: it would need the padding of a whole extent.
        """
        return min(self.end + self.stride - 1, self.extent - 1)

    @property
    def needed(self) -> int:
        """The least such padding, where the size is known: the last window reads all of it."""
        if self.size is None:
            return self.longest
        last = (self.size + self.begin + self.longest - self.extent) // self.stride
        return max(0, last * self.stride + self.extent - self.begin - self.size)


class CeilModePass(ir.passes.InPlacePass):
    """Rewrite poolings with ceil_mode by the end padding that floor mode needs for the same windows.

    The specification ignores a window that would start in the end padding, as PyTorch does. Shape inference (onnx
    1.23) counts it, and so does ONNX Runtime 1.20, which also divides averages that include the padding by positions
    beyond it. All agree on floor mode. What a pooling computes stays the same, for symbolic sizes too.

    ONNX Runtime takes no padding as long as the kernel, which dilated windows may need: their results are cut to the
    windows that count.
    """

    def __init__(self, *, keep_sizes: bool = False) -> None:
        """Sets what is done with the sizes that follow.

        Args:
            keep_sizes: Whether those that are annotated are right; else they are forgotten, to be inferred again.
        """
        super().__init__()
        self._keep_sizes = keep_sizes

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite in place, in subgraphs too."""
        nodes = [n for n in ir.traversal.RecursiveGraphIterator(model.graph) if _counts_up(n)]
        for node in nodes:
            _rewrite(node)
            if not self._keep_sizes:
                forget_sizes_after(model.graph, node)
        if nodes:
            lift_constants(model)
        return ir.passes.PassResult(model, bool(nodes))


def _counts_up(node: ir.Node) -> bool:
    return (
        node.domain == ""
        and node.op_type in POOLINGS
        and bool(node.attributes.get_int("ceil_mode", 0))
        and _SLICED not in node.metadata_props
        and node.inputs[0] is not None
    )


def _rewrite(node: ir.Node) -> None:
    if node.attributes.get_string("auto_pad", "NOTSET").startswith("SAME"):  # says how many windows there are
        _set(node, ceil_mode=0)
        return
    axes = _axes(node)
    begins, ends = [axis.begin for axis in axes], [axis.needed for axis in axes]
    source = node.inputs[0]
    if node.attributes.get_int("count_include_pad", 0) and any(
        a.needed > a.end or a.size is None for a in axes
    ):
        # What lies beyond the padding does not count in the average: let the padding be input, and the rest padding.
        if any(axis.begin or axis.end for axis in axes):
            _pad_before(node, axes)
        begins, ends = [0] * len(axes), [max(0, axis.needed - axis.end) for axis in axes]
        _set(node, count_include_pad=0)
    node.attributes.pop("auto_pad", None)
    if all(end < axis.kernel for end, axis in zip(ends, axes, strict=True)):
        _set(node, ceil_mode=0, pads=begins + ends)
    else:
        if node.inputs[0] is not source:
            _set(node, pads=[0] * 2 * len(axes))
        _cut_after(node, source, axes)


def _axes(node: ir.Node) -> list[_Axis]:
    """Return the spatial axes of a pooling with explicit padding."""
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
    """Let the pooling read its input with the padding around it."""
    value = node.inputs[0]
    assert value is not None
    amounts = _constant([0, 0, *(axis.begin for axis in axes), 0, 0, *(axis.end for axis in axes)])
    pad = ir.node("Pad", [value, amounts.outputs[0]])
    node.prepend([amounts, pad])
    padded = pad.outputs[0]
    padded.type = value.type
    if value.shape is not None:
        sizes = [None if a.size is None else a.begin + a.size + a.end for a in axes]
        padded.shape = ir.Shape([*value.shape.dims[:2], *sizes])
    node.replace_input_with(0, padded)


def _cut_after(node: ir.Node, source: ir.Value | None, axes: Sequence[_Axis]) -> None:
    """Keep the windows that count, by the sizes of `source`, of all results of the pooling."""
    node.metadata_props[_SLICED] = "cut"
    rank = len(axes)
    sizes = ir.node("Shape", [source], {"start": 2})
    reach = _constant([axis.begin + axis.longest - axis.extent for axis in axes])
    strides, one = _constant([axis.stride for axis in axes]), _constant([1])
    room = ir.node("Add", [sizes.outputs[0], reach.outputs[0]])
    behind_first = ir.node("Div", [room.outputs[0], strides.outputs[0]])
    counts = ir.node("Add", [behind_first.outputs[0], one.outputs[0]])
    starts, places = _constant([0] * rank), _constant(list(range(2, 2 + rank)))
    made = [sizes, reach, strides, one, room, behind_first, counts, starts, places]
    for value in node.outputs:
        if not value.name:
            continue
        cut = ir.Value(name=value.name, type=value.type, shape=value.shape)
        value.name, value.shape = f"{value.name}_with_empty_windows", None
        value.replace_all_uses_with(cut, replace_graph_outputs=True)
        inputs = [value, *(n.outputs[0] for n in (starts, counts, places))]
        made.append(ir.node("Slice", inputs, outputs=[cut]))
    node.append(made)


def _constant(numbers: Sequence[int]) -> ir.Node:
    return ir.node("Constant", [], {"value": ir.tensor(numbers, dtype=ir.DataType.INT64)})


def _set(node: ir.Node, **attributes: Any) -> None:
    node.attributes.update(
        {name: ir.convenience.convert_attribute(name, v) for name, v in attributes.items()}
    )


def _integers(node: ir.Node, name: str, default: Sequence[int]) -> list[int]:
    return list(node.attributes.get_ints(name, default))
