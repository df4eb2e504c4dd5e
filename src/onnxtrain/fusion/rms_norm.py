"""Recognise root mean square normalisations."""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.emitter import Emitter, static_dims
from onnxtrain.functions import (
    CompositeOp,
    floored_rms_normalization,
    inverse_rms_normalization,
)
from onnxtrain.fusion._patterns import PatternPass, inner_node, is_op

__all__ = ["RMSNormFusionPass"]

_DTYPES = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@dataclass(frozen=True)
class _Match:
    """A chain that a composite op computes.

    Attributes:
        composite: the op; `x` its first input and `numbers` its scalars, which follow the scale.
        nodes: the chain without its last node, each before the nodes that it reads.
    """

    composite: CompositeOp
    x: ir.Value
    numbers: tuple[float, ...]
    nodes: tuple[ir.Node, ...]


class RMSNormFusionPass(PatternPass):
    """Rewrite chains of ops that normalise by the root mean square as one op with two outputs.

    - `x / max(c * ||x||, floor) * scale`, as darts' RMSNorm: `FlooredRMSNormalization`;
    - `x / sqrt(mean(x²) + epsilon) * scale`, as `torch.nn.RMSNorm` and Llama's: `InverseRMSNormalization`.

    Norm and mean are over the last axis, `scale` has its size, and the numbers are constants. A chain stays as it is
    where anything else reads a value inside of it. The second output is for the gradient.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite in place."""
        op: Emitter | None = None
        for node in tuple(model.graph):
            if node.op_type != "Mul" or node.domain != "":
                continue
            for index in (0, 1):
                scale = node.inputs[1 - index]
                match = self._match(node.inputs[index])
                if match is None or scale is None or not _is_scale(scale, node.outputs[0], match.x):
                    continue
                op = op or Emitter(model.graph, functions=model.functions)
                _rewrite(model, op, node, match, scale)
                break
        return ir.passes.PassResult(model, op is not None)

    def _match(self, standard: ir.Value | None) -> _Match | None:
        """Returns the chain that computes x / rms(x)."""
        node = inner_node(standard)
        if node is None or node.op_type not in ("Div", "Mul"):
            return None
        orders = [(0, 1)] if node.op_type == "Div" else [(0, 1), (1, 0)]
        for first, second in orders:
            x, divisor = node.inputs[first], node.inputs[second]
            if x is None or x.dtype not in _DTYPES or not x.shape:
                continue
            if node.op_type == "Div":
                match = self._floored(x, divisor) or self._root(x, divisor)
            else:
                match = self._inverse(x, divisor)
            if match is not None:
                return _Match(match.composite, x, match.numbers, (node, *match.nodes))
        return None

    def _floored(self, x: ir.Value, value: ir.Value | None) -> _Match | None:
        """Max(c * ||x||, floor)."""
        bounded = inner_node(value)
        if bounded is None or not (self._is_clip(bounded) or is_op(bounded, "Max", inputs=2)):
            return None
        scaled, floor = bounded.inputs[0], self._number(bounded.inputs[1])
        if floor is None and bounded.op_type == "Max":
            scaled, floor = bounded.inputs[1], self._number(bounded.inputs[0])
        product = inner_node(scaled)
        if floor is None or product is None or not (is_op(product, "Mul") or is_op(product, "Div")):
            return None
        left, right = product.inputs
        factor = self._number(right)
        if factor is not None and is_op(product, "Div"):
            factor = 1 / factor if factor else None
        elif factor is None and is_op(product, "Mul"):
            left, factor = right, self._number(left)
        norm = inner_node(left)
        if factor is None or norm is None or not _reduces(norm, "ReduceL2", x):
            return None
        return _Match(floored_rms_normalization, x, (factor, floor), (bounded, product, norm))

    def _is_clip(self, node: ir.Node) -> bool:
        """Whether a node bounds its input from below only."""
        upper = [value for value in node.inputs[2:] if value is not None]
        return (
            is_op(node, "Clip")
            and len(node.inputs) > 1
            and all(self._number(value) == math.inf for value in upper)
        )

    def _inverse(self, x: ir.Value, value: ir.Value | None) -> _Match | None:
        """1 / sqrt(mean(x²) + epsilon)."""
        node = inner_node(value)
        if node is None:
            return None
        if is_op(node, "Pow") and self._number(node.inputs[1]) == -0.5:
            return self._mean_square(x, node)
        if is_op(node, "Div") and self._number(node.inputs[0]) == 1:
            root = self._root(x, node.inputs[1])
        else:
            root = self._root(x, node.inputs[0]) if is_op(node, "Reciprocal") else None
        return root and _Match(root.composite, x, root.numbers, (node, *root.nodes))

    def _root(self, x: ir.Value, value: ir.Value | None) -> _Match | None:
        """sqrt(mean(x²) + epsilon)."""
        node = inner_node(value)
        if node is None:
            return None
        if is_op(node, "Sqrt") or (is_op(node, "Pow") and self._number(node.inputs[1]) == 0.5):
            return self._mean_square(x, node)
        return None

    def _mean_square(self, x: ir.Value, root: ir.Node) -> _Match | None:
        """The chain below `root`: mean(x²) + epsilon."""
        total = inner_node(root.inputs[0])
        if total is None or not is_op(total, "Add"):
            return None
        for index in (0, 1):
            epsilon, mean = self._number(total.inputs[1 - index]), inner_node(total.inputs[index])
            if epsilon is None or mean is None or not _reduces(mean, "ReduceMean"):
                continue
            square = inner_node(mean.inputs[0])
            if square is not None and self._squares(square, x):
                return _Match(inverse_rms_normalization, x, (epsilon,), (root, total, mean, square))
        return None

    def _squares(self, node: ir.Node, x: ir.Value) -> bool:
        if node.inputs[0] is not x:
            return False
        if is_op(node, "Pow"):
            return self._number(node.inputs[1]) == 2
        return is_op(node, "Mul") and node.inputs[1] is x


def _rewrite(model: ir.Model, op: Emitter, last: ir.Node, match: _Match, scale: ir.Value) -> None:
    """Turns the last node of a chain into the composite op, and removes the others."""
    x = match.x
    assert x.dtype is not None
    assert x.shape is not None
    inputs = [x, scale, *(op.const(number, x.dtype) for number in match.numbers)]
    last.domain, last.op_type, _ = op.function(match.composite, x.dtype)
    last.attributes.clear()
    last.resize_inputs(len(inputs))
    for index, value in enumerate(inputs):
        last.replace_input_with(index, value)
    last.resize_outputs(2)
    saved = last.outputs[1]
    saved.name = op.unique_name(f"{last.outputs[0].name}_saved")
    saved.shape, saved.type = ir.Shape([*x.shape[:-1], 1]), x.type
    for node in match.nodes:
        model.graph.remove(node, safe=True)


def _reduces(node: ir.Node, op_type: str, x: ir.Value | None = None) -> bool:
    """Whether a node reduces (x over) the last axis, and keeps it."""
    source = node.inputs[0]
    if (
        not is_op(node, op_type, inputs=2)
        or source is None
        or source.shape is None
        or x not in (None, source)
    ):
        return False
    axes = ir.convenience.get_const_tensor(node.inputs[1]) if node.inputs[1] is not None else None
    last = source.shape.rank() - 1
    return (
        axes is not None
        and axes.numpy().ravel().tolist() in ([-1], [last])
        and node.attributes.get_int("keepdims", 1) == 1
    )


def _is_scale(scale: ir.Value, y: ir.Value, x: ir.Value) -> bool:
    """Whether y = x * scale has the shape of x, and scale a number for each element of the last axis."""
    dims = static_dims(x)
    size = dims[-1] if dims else None
    return scale.dtype == x.dtype == y.dtype and size is not None and static_dims(scale) == (size,)
