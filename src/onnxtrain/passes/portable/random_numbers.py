"""Replaces random number generators of ONNX Runtime, whose state is hidden in the session, with a graph input."""

from __future__ import annotations

import math
from collections.abc import Collection

import onnx_ir as ir

from onnxtrain._words import argument
from onnxtrain.errors import GraphBuildError
from onnxtrain.op_facts import RANDOM_OPS
from onnxtrain.passes.parameters.training_mode import trains
from onnxtrain.passes.portable._nodes import every_node
from onnxtrain.passes.portable._squares import ELEMENTS, HOLDS, Squares
from onnxtrain.passes.portable.dropout import write_mask
from onnxtrain.passes.shapes.infer import infer_shapes
from onnxtrain.passes.tidy.replace_value import WriterBefore, replace_node
from onnxtrain.passes.tidy.unique_names import fresh_name

_FLOAT = ir.DataType.FLOAT


def draw_from_input(model: ir.Model, op_types: Collection[str] = RANDOM_OPS) -> ir.Value | None:
    """Replaces random ops with integer ops on an added input, in place.

    ONNX Runtime keeps the state of RandomNormal and other ops in the session, where checkpoints cannot include it, and
    the same seed gives different numbers in a browser and in Python. Numbers computed from the input are the same on
    every host and after resuming. Run this before differentiation.

    Args:
        model: canonical model. The seeds of its training-mode Dropout nodes are removed.
        op_types: ops to replace. Dropout may be omitted: in ONNX Runtime, it draws from one generator for all sessions,
            which a host can seed before each run, and is several times as fast as a mask computed by integer ops.

    Returns:
        The added graph input, the last one: int64 [3] with the fields in :data:`HOLDS`. None if no op was replaced.

    Raises:
        GraphBuildError: a training-mode Dropout to be replaced is in a subgraph. Other ops in subgraphs are not
            replaced.
    """
    nodes = []
    for node in every_node(model):
        if node.domain != "" or node.op_type not in RANDOM_OPS:
            continue
        if node.op_type == "Dropout":
            # A node with a seed has its own generator in each session.
            node.attributes.pop("seed", None)
            if not trains(node):
                continue
        if node.op_type not in op_types:
            continue
        # The body of a Loop runs several times, but its counters would be the same in every iteration.
        if node.graph is not model.graph:
            if node.op_type != "Dropout":
                continue
            raise GraphBuildError(
                f"building the training graph: the Dropout {node.name!r} is in a subgraph (If, Loop or "
                f"Scan), but {argument('profile', 'portable')} supports Dropout only in the main graph. "
                f"Move it out of the subgraph, or pass {argument('batch_norm', 'inference')}."
            )
        nodes.append(node)
    if not nodes:
        return None
    if any(node.inputs and node.inputs[0] is not None and node.inputs[0].dtype is None for node in nodes):
        infer_shapes(model)
    source = ir.Value(
        name=fresh_name(model, "onnxtrain.random"),
        shape=ir.Shape([len(HOLDS)]),
        type=ir.TensorType(ir.DataType.INT64),
    )
    model.graph.inputs.append(source)
    key = Squares(nodes[0]).key(source)
    for number, node in enumerate(nodes):
        if node.op_type == "Dropout":
            write_mask(node, key, number)
        else:
            _Numbers(node, key, number * ELEMENTS).replace()
    return source


class _Numbers:
    """Replaces a random op with ops that compute its output with the Squares counter-based generator.

    Args:
        node: the random op, e.g. a RandomNormal.
        key: the generator's key, int64 scalar. It differs from run to run.
        first: the node's first counter. Nodes have disjoint ranges of counters, so they draw independent numbers.
    """

    def __init__(self, node: ir.Node, key: ir.Value, first: int) -> None:
        self._node, self._key, self._first = node, key, first
        self._write, self._squares = WriterBefore(node), Squares(node)

    def replace(self) -> None:
        """Replaces the random op with Squares-based ops and a Cast to its output dtype, in place."""
        drawn = {
            "RandomUniform": self._uniform,
            "RandomUniformLike": self._uniform,
            "RandomNormal": self._normal,
            "RandomNormalLike": self._normal,
            "Bernoulli": self._bernoulli,
            "Multinomial": self._multinomial,
        }[self._node.op_type]()
        data = self._node.inputs[0] if self._node.inputs else None
        # The default dtype is int32 for Multinomial, that of the input for the Like ops and Bernoulli, and float32 for
        # others.
        like = None if data is None or self._node.op_type == "Multinomial" else data.dtype
        default = ir.DataType.INT32 if self._node.op_type == "Multinomial" else like or _FLOAT
        dtype = ir.DataType(self._node.attributes.get_int("dtype", default))
        result = self._write("Cast", drawn, to=dtype)
        result.type, result.shape = ir.TensorType(dtype), self._node.outputs[0].shape
        replace_node(self._node, result)

    def _shape(self) -> ir.Value:
        """Emits the shape of the output, int64 [rank]."""
        if self._node.inputs:
            return self._write("Shape", self._node.inputs[0])
        return self._write("Identity", list(self._node.attributes.get_ints("shape", ())))

    def _number(self, name: str, default: float) -> ir.Value:
        """Emits an attribute as a float32 scalar."""
        return self._write.number(self._node.attributes.get_float(name, default), _FLOAT)

    def _drawn(self, shape: ir.Value, offset: int = 0, *, positive: bool = False) -> ir.Value:
        """Emits uniform random float32 numbers in [0, 1), or in (0, 1] if `positive`.

        Args:
            shape: shape of the result, int64 [rank].
            offset: offset of the first counter in the node's range of counters.
            positive: True to exclude 0 and include 1.
        """
        count = self._write("Reshape", self._write("ReduceProd", shape, keepdims=0), [1])
        flat = self._squares.uniform(count, self._first + offset, self._key, positive=positive)
        return self._write("Reshape", flat, shape, allowzero=1)

    def _uniform(self) -> ir.Value:
        low, high = self._number("low", 0.0), self._number("high", 1.0)
        width = self._write("Sub", high, low)
        return self._write("Add", self._write("Mul", self._drawn(self._shape()), width), low)

    def _normal(self) -> ir.Value:
        """Emits mean + scale · sqrt(-2 ln u) cos(2 pi v) for uniform u and v.

        Source: Box and Muller, "A Note on the Generation of Random Normal Deviates", 1958.
        """
        shape = self._shape()
        logarithm = self._write("Log", self._drawn(shape, positive=True))
        radius = self._write("Sqrt", self._write("Mul", logarithm, self._write.number(-2.0, _FLOAT)))
        turn = self._drawn(shape, ELEMENTS // 2)
        angle = self._write("Mul", turn, self._write.number(2 * math.pi, _FLOAT))
        normal = self._write("Mul", radius, self._write("Cos", angle))
        scaled = self._write("Mul", normal, self._number("scale", 1.0))
        return self._write("Add", scaled, self._number("mean", 0.0))

    def _bernoulli(self) -> ir.Value:
        probability = self._write("Cast", self._node.inputs[0], to=_FLOAT)
        return self._write("Less", self._drawn(self._shape()), probability)

    def _multinomial(self) -> ir.Value:
        """Emits random class indices [batch, samples], drawn by inverting the cumulative distribution."""
        weights = self._write("Softmax", self._write("Cast", self._node.inputs[0], to=_FLOAT), axis=1)
        sums = self._write("CumSum", weights, 1)
        classes = self._write.size(weights, 1)
        total = self._write("Slice", sums, [-1], [1 << 62], [1])
        samples = [self._node.attributes.get_int("sample_size", 1)]
        batch = self._write.size(weights, 0)
        drawn = self._drawn(self._write("Concat", batch, self._write("Identity", samples), axis=0))
        places = self._write("Unsqueeze", self._write("Mul", drawn, total), [2])
        below = self._write("LessOrEqual", self._write("Unsqueeze", sums, [1]), places)
        number = self._write("ReduceSum", self._write("Cast", below, to=ir.DataType.INT64), [2], keepdims=0)
        return self._write("Min", number, self._write("Sub", classes, 1))
