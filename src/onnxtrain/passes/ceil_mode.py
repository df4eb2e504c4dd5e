"""Say how many windows a pooling with ceil_mode has so that nobody miscounts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

__all__ = ["CeilModePass"]

_POOLS = frozenset({"AveragePool", "LpPool", "MaxPool"})


@dataclass(frozen=True)
class _Axis:
    """The windows along one axis with ceil_mode; `size` is what they slide over, `begin` and `end` its padding."""

    size: int
    begin: int
    end: int
    extent: int
    stride: int

    @property
    def rounded_up(self) -> int:
        """Number of windows by division alone."""
        return -(-(self.size + self.begin + self.end - self.extent) // self.stride) + 1

    @property
    def rounded_down(self) -> int:
        """Number of windows without ceil_mode."""
        return (self.size + self.begin + self.end - self.extent) // self.stride + 1

    @property
    def count(self) -> int:
        """Number of windows, without one that starts after the input."""
        return self.rounded_up - int((self.rounded_up - 1) * self.stride >= self.begin + self.size)

    @property
    def covered_end(self) -> int:
        """The end padding of which the last window reads all."""
        return (self.count - 1) * self.stride + self.extent - self.begin - self.size


class CeilModePass(ir.passes.InPlacePass):
    """Rewrite poolings whose last window would start in the end padding, by floor mode or less padding.

    The specification ignores such a window, as PyTorch and the kernels of ONNX Runtime do, but shape inference
    (onnx 1.23) counts it. What a pooling computes stays the same. Needs static spatial sizes; forgets the sizes that
    follow from the miscounted one, to be inferred again.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite the first such node in place: whether later ones are miscounted may follow from it."""
        node = next((n for n in ir.traversal.RecursiveGraphIterator(model.graph) if _rewrite(n)), None)
        if node is not None:
            _forget_shapes(model.graph, node, set())
        return ir.passes.PassResult(model, node is not None)


def _rewrite(node: ir.Node) -> bool:
    """Return whether `node` was a pooling that is miscounted, and now is not."""
    axes = _axes(node)
    if all(axis is None or axis.count == axis.rounded_up for axis in axes):
        return False
    if all(axis is not None and axis.count == axis.rounded_down for axis in axes):
        node.attributes["ceil_mode"] = ir.AttrInt64("ceil_mode", 0)
        return True
    pads = _integers(node, "pads", [0] * 2 * len(axes))
    for place, axis in enumerate(axes, start=len(axes)):
        if axis is not None and axis.count != axis.rounded_up:
            pads[place] = axis.covered_end
    if min(pads) < 0:
        return False
    node.attributes["pads"] = ir.AttrInt64s("pads", pads)
    node.attributes.pop("auto_pad", None)
    return True


def _axes(node: ir.Node) -> list[_Axis | None]:
    """Return the spatial axes of a pooling with ceil_mode, None for each of symbolic size."""
    value = node.inputs[0] if node.inputs else None
    if (
        node.domain != ""
        or node.op_type not in _POOLS
        or not node.attributes.get_int("ceil_mode", 0)
        or node.attributes.get_string("auto_pad", "NOTSET").startswith("SAME")
        or value is None
        or value.shape is None
    ):
        return []
    kernel = _integers(node, "kernel_shape", [])
    rank = len(kernel)
    pads = _integers(node, "pads", [0] * 2 * rank)
    strides = _integers(node, "strides", [1] * rank)
    dilations = _integers(node, "dilations", [1] * rank)
    return [
        _Axis(size, pads[i], pads[rank + i], (kernel[i] - 1) * dilations[i] + 1, strides[i])
        if isinstance(size, int)
        else None
        for i, size in enumerate(value.shape.dims[2:])
    ]


def _integers(node: ir.Node, name: str, default: Sequence[int]) -> list[int]:
    return list(node.attributes.get_ints(name, default))


def _forget_shapes(graph: ir.Graph, start: ir.Node, changed: set[ir.Value]) -> bool:
    """Remove the sizes of the outputs of `start` and of all that follow; return whether `graph` has such."""
    found = False
    for node in graph:
        inside = [_forget_shapes(body, start, changed) for body in _bodies(node)]
        if node is start or any(inside) or any(value in changed for value in node.inputs):
            found = True
            for value in node.outputs:
                value.shape = None if value.shape is None else ir.Shape([None] * value.shape.rank())
                changed.add(value)
    return found


def _bodies(node: ir.Node) -> list[ir.Graph]:
    graphs = [attr.as_graph() for attr in node.attributes.values() if attr.type == ir.AttributeType.GRAPH]
    return graphs + [
        g for a in node.attributes.values() if a.type == ir.AttributeType.GRAPHS for g in a.as_graphs()
    ]
