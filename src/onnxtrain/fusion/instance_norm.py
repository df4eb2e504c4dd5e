"""Recognise reversible instance normalisations."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.emitter import Emitter, static_dims
from onnxtrain.functions import (
    instance_standardization,
    reversible_instance_normalization,
)
from onnxtrain.fusion._patterns import PatternPass, inner_node, is_op
from onnxtrain.passes import is_stop_gradient

__all__ = ["RINormFusionPass"]

_DTYPES = (ir.DataType.FLOAT, ir.DataType.DOUBLE)


@dataclass(frozen=True)
class _Match:
    """The statistics of a chain.

    Attributes:
        x: what is normalised, over `axes`.
        epsilon: what is added to the variance.
        mean: the first Identity behind the mean, which stops gradients; `stdev` that behind the standard deviation.
    """

    x: ir.Value
    axes: tuple[int, ...]
    epsilon: float
    mean: ir.Node
    stdev: ir.Node


class RINormFusionPass(PatternPass):
    """Rewrite chains of ops that normalise each series by constant statistics as one op.

    - `(x - mean) * (weight / stdev) + bias`: `ReversibleInstanceNormalization`;
    - `(x - mean) / stdev`: `InstanceStandardization`.

    Mean and `stdev = sqrt(mean((x - mean)²) + epsilon)` are over all axes but the first and the last, or over both of
    two, gradients stop at both, and epsilon is a constant. Other readers of the two read them from the op, behind the
    same stop. A chain stays as it is where anything else reads a value before a stop, or the product.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite in place."""
        op: Emitter | None = None
        for node in tuple(model.graph):
            match: _Match | None = None
            affine: tuple[ir.Value, ...] = ()
            if is_op(node, "Div"):
                match = self._statistics(*node.inputs)
            elif is_op(node, "Add"):
                match, affine = self._affine(node)
            if match is not None:
                op = op or Emitter(model.graph, functions=model.functions)
                _rewrite(model, op, node, match, affine)
        return ir.passes.PassResult(model, op is not None)

    def _affine(self, node: ir.Node) -> tuple[_Match | None, tuple[ir.Value, ...]]:
        """(x - mean) * (weight / stdev) + bias."""
        for index in (0, 1):
            product, bias = inner_node(node.inputs[index]), node.inputs[1 - index]
            if product is None or bias is None or not is_op(product, "Mul"):
                continue
            for centered, quotient in (product.inputs, product.inputs[::-1]):
                factor = quotient.producer() if quotient is not None else None
                if factor is None or not is_op(factor, "Div"):
                    continue
                weight, stdev = factor.inputs
                match = self._statistics(centered, stdev)
                if match and weight is not None and all(_is_parameter(v, match.x) for v in (weight, bias)):
                    return match, (weight, bias)
        return None, ()

    def _statistics(self, centered: ir.Value | None, deviation: ir.Value | None) -> _Match | None:
        """`centered` = x - mean, and its standard deviation."""
        difference = centered.producer() if centered is not None else None
        if difference is None or not is_op(difference, "Sub"):
            return None
        x, mean_of_x = difference.inputs
        mean, stdev = _first_stop(mean_of_x), _first_stop(deviation)
        if x is None or x.dtype not in _DTYPES or mean is None or stdev is None:
            return None
        average, root = inner_node(mean.inputs[0]), inner_node(stdev.inputs[0])
        if average is None or not is_op(average, "ReduceMean") or not _same(average.inputs[0], x):
            return None
        total = inner_node(root.inputs[0]) if root is not None and is_op(root, "Sqrt") else None
        if total is None or not is_op(total, "Add"):
            return None
        axes = _series_axes(average, x)
        for index in (0, 1):
            variance, epsilon = inner_node(total.inputs[index]), self._number(total.inputs[1 - index])
            if variance is None or epsilon is None or not is_op(variance, "ReduceMean"):
                continue
            square = inner_node(variance.inputs[0])
            if square is None or not self._squares(square, centered):
                continue
            if axes is not None and _series_axes(variance, x) == axes:
                return _Match(x, axes, epsilon, mean, stdev)
        return None

    def _squares(self, node: ir.Node, value: ir.Value | None) -> bool:
        if is_op(node, "Pow"):
            return _same(node.inputs[0], value) and self._number(node.inputs[1]) == 2
        return is_op(node, "Mul") and all(_same(factor, value) for factor in node.inputs)


def _rewrite(
    model: ir.Model, op: Emitter, last: ir.Node, match: _Match, affine: tuple[ir.Value, ...]
) -> None:
    """Moves the last node of a chain to its front and turns it into the composite op; removes what nothing reads."""
    x, average = match.x, match.mean.inputs[0]
    assert x.dtype is not None
    assert average is not None
    front = average.producer()
    assert front is not None
    loose = [value.producer() for value in (*last.inputs, match.stdev.inputs[0]) if value is not None]
    composite = reversible_instance_normalization if affine else instance_standardization
    inputs = [x, *affine, op.const(match.epsilon, x.dtype)]
    last.domain, last.op_type, _ = op.function(composite, x.dtype)
    last.attributes.clear()
    last.attributes.add(ir.AttrInt64s("axes", match.axes))
    last.resize_inputs(len(inputs))
    for index, value in enumerate(inputs):
        last.replace_input_with(index, value)
    last.resize_outputs(4 if affine else 3)
    for stop, output, name in zip(
        (match.mean, match.stdev), last.outputs[1:3], ("mean", "stdev"), strict=True
    ):
        output.name = op.unique_name(f"{last.outputs[0].name}_{name}")
        output.shape, output.type = stop.outputs[0].shape, x.type
        stop.replace_input_with(0, output)
    for output in last.outputs[3:]:
        output.name = op.unique_name(f"{last.outputs[0].name}_centered")
        output.shape, output.type = x.shape, x.type
    model.graph.remove(last)
    model.graph.insert_before(front, last)
    _remove_unread(model.graph, [front, *loose])


def _remove_unread(graph: ir.Graph, nodes: list[ir.Node | None]) -> None:
    """Removes those of the nodes, and of the nodes that these read, whose outputs nothing reads."""
    while nodes:
        node = nodes.pop()
        if node is None or node.graph is not graph:
            continue
        if any(value.uses() or value.is_graph_output() for value in node.outputs):
            continue
        nodes += [value.producer() for value in node.inputs if value is not None]
        graph.remove(node, safe=True)


def _first_stop(value: ir.Value | None) -> ir.Node | None:
    """Returns the first of the Identity nodes behind one another that a value comes from and that stop gradients."""
    first = None
    while value is not None and (node := value.producer()) is not None and is_stop_gradient(node):
        first, value = node, node.inputs[0]
    return first


def _same(value: ir.Value | None, other: ir.Value | None) -> bool:
    """Whether a value is another one, or that behind a stop of gradients."""
    while value is not None and value is not other:
        node = value.producer()
        value = node.inputs[0] if node is not None and is_stop_gradient(node) else None
    return value is not None


def _series_axes(node: ir.Node, x: ir.Value) -> tuple[int, ...] | None:
    """Returns the axes that a node reduces and keeps, where they are those of a series."""
    if x.shape is None or node.attributes.get_int("keepdims", 1) != 1:
        return None
    rank = x.shape.rank()
    axes = node.inputs[1] if len(node.inputs) > 1 else None
    if axes is None:
        reduced = [] if node.attributes.get_int("noop_with_empty_axes", 0) else list(range(rank))
    else:
        tensor = ir.convenience.get_const_tensor(axes)
        reduced = [] if tensor is None else sorted(axis % rank for axis in tensor.numpy().ravel().tolist())
    return tuple(reduced) if reduced and reduced == (list(range(1, rank - 1)) or [0, 1]) else None


def _is_parameter(value: ir.Value, x: ir.Value) -> bool:
    """Whether no node computes a value, which has a number for each element of the last axis of x."""
    dims = static_dims(x)
    size = dims[-1] if dims else None
    return (
        value.producer() is None
        and value.dtype == x.dtype
        and size is not None
        and static_dims(value) == (size,)
    )
