"""Draw random numbers from an input of the graph instead of a generator whose state is hidden in the session."""

from __future__ import annotations

import math
from collections.abc import Collection

import onnx_ir as ir

from onnxtrain._words import argument
from onnxtrain.errors import GraphBuildError
from onnxtrain.op_facts import RANDOM_OPS
from onnxtrain.passes.portable._nodes import every_node
from onnxtrain.passes.portable._squares import ELEMENTS, HOLDS, Squares
from onnxtrain.passes.portable.dropout import trains, write_mask
from onnxtrain.passes.shapes.infer import infer_shapes
from onnxtrain.passes.tidy.replace_value import WriterBefore, replace_node
from onnxtrain.passes.tidy.unique_names import fresh_name

_FLOAT = ir.DataType.FLOAT


def draw_from_input(model: ir.Model, op_types: Collection[str] = RANDOM_OPS) -> ir.Value | None:
    """Replace ops that draw random numbers by integer ops on an input, in place.

    ONNX Runtime keeps the state of RandomNormal and the like in the session, so that no checkpoint has it, and a seed
    gives other numbers in a browser than in Python. Numbers that follow from the input alone are the same on every host
    and after a resume. Expects a graph that is not differentiated yet.

    Args:
        model: Canonical model. Its Dropout nodes in training mode lose their seeds.
        op_types: Ops to replace. Dropout may be left out: ONNX Runtime's draws from one generator for all sessions,
            which a host may seed before each run, and is several times as fast as a mask of integer ops.

    Returns:
        The input that was added behind all others, int64 [3] of :data:`HOLDS`; None if nothing draws from it.

    Raises:
        GraphBuildError: A Dropout in training mode is to be replaced, and stands in a subgraph. Other ops in subgraphs
            are left as they are.
    """
    nodes = []
    for node in every_node(model):
        if node.domain != "" or node.op_type not in RANDOM_OPS:
            continue
        if node.op_type == "Dropout":
            # A node with a seed has a generator of its own in each session.
            node.attributes.pop("seed", None)
            if not trains(node):
                continue
        if node.op_type not in op_types:
            continue
        # A body of a Loop runs several times, and each of its iterations would count the same elements.
        if node.graph is not model.graph:
            if node.op_type != "Dropout":
                continue
            raise GraphBuildError(
                f"building the training graph: the Dropout {node.name!r} stands in a subgraph (If, Loop or Scan), and "
                f"{argument('profile', 'portable')} draws masks in the main graph only. Move it out of the subgraph, "
                f"or pass {argument('batch_norm', 'inference')}."
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
    """Writes what a node draws, in its place.

    Args:
        node: The node.
        key: Key of the run, int64.
        first: Counter of the node's first number.
    """

    def __init__(self, node: ir.Node, key: ir.Value, first: int) -> None:
        self._node, self._key, self._first = node, key, first
        self._write, self._squares = WriterBefore(node), Squares(node)

    def replace(self) -> None:
        """Replace the node."""
        drawn = {
            "RandomUniform": self._uniform,
            "RandomUniformLike": self._uniform,
            "RandomNormal": self._normal,
            "RandomNormalLike": self._normal,
            "Bernoulli": self._bernoulli,
            "Multinomial": self._multinomial,
        }[self._node.op_type]()
        data = self._node.inputs[0] if self._node.inputs else None
        # Multinomial gives int32, the Like ops and Bernoulli the dtype of their input, the others float32.
        like = None if data is None or self._node.op_type == "Multinomial" else data.dtype
        default = ir.DataType.INT32 if self._node.op_type == "Multinomial" else like or _FLOAT
        dtype = ir.DataType(self._node.attributes.get_int("dtype", default))
        result = self._write("Cast", drawn, to=dtype)
        result.type, result.shape = ir.TensorType(dtype), self._node.outputs[0].shape
        replace_node(self._node, result)

    def _shape(self) -> ir.Value:
        """Write the shape of the result, int64 [rank]."""
        if self._node.inputs:
            return self._write("Shape", self._node.inputs[0])
        return self._write("Identity", list(self._node.attributes.get_ints("shape", ())))

    def _number(self, name: str, default: float) -> ir.Value:
        """Write an attribute as a float32 scalar."""
        return self._write.number(self._node.attributes.get_float(name, default), _FLOAT)

    def _drawn(self, shape: ir.Value, offset: int = 0, *, positive: bool = False) -> ir.Value:
        """Write float32 numbers of a shape, uniform in [0, 1), or in (0, 1] if `positive`."""
        count = self._write("Reshape", self._write("ReduceProd", shape, keepdims=0), [1])
        flat = self._squares.uniform(count, self._first + offset, self._key, positive=positive)
        return self._write("Reshape", flat, shape, allowzero=1)

    def _uniform(self) -> ir.Value:
        low, high = self._number("low", 0.0), self._number("high", 1.0)
        width = self._write("Sub", high, low)
        return self._write("Add", self._write("Mul", self._drawn(self._shape()), width), low)

    def _normal(self) -> ir.Value:
        """Write mean + scale · sqrt(-2 ln u) cos(2 pi v), of Box and Muller, "Random Normal Deviates", 1958."""
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
        """Write the classes whose shares of the cumulative distribution the numbers fall into, [batch, samples]."""
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
