"""Draw the masks of Dropout by integer ops inside the graph, so that every host drops the same elements."""

from __future__ import annotations

import functools

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import GraphBuildError
from onnxtrain.passes.portable._nodes import WriterBefore, constant_input, standard_nodes
from onnxtrain.passes.shapes.infer import infer_shapes
from onnxtrain.passes.tidy.replace_value import replace_node, stand_in
from onnxtrain.passes.tidy.unique_names import fresh_name

HOLDS = ("seed", "step", "run")
"""Elements of the input that hosts feed: the run's seed, the optimizer steps taken so far, and the runs of the training
model since the last of these steps."""

# Odd numbers with irregular digits in base 2: their multiples of small seeds, steps and runs share no value. The first
# three multiply seed, step and run; the last is the key by which the sum is hashed.
_FACTORS = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)
_KEY = 0x548C9DECBCE65297

# Elements of one Dropout are counted from a multiple of this number, so no two nodes share a counter.
_ELEMENTS = 1 << 33


def draw_masks(model: ir.Model) -> ir.Value | None:
    """Replace Dropout in training mode by a product with a mask that integer ops compute, in place.

    Seeds of ONNX Runtime's Dropout give other masks in a browser than in Python. These masks follow from the input
    alone. Expects a graph that is not differentiated yet.

    Returns:
        The input that was added behind all others, int64 [3] of :data:`HOLDS`; None if the model has no such Dropout.

    Raises:
        GraphBuildError: A Dropout in training mode stands in a subgraph.
    """
    nodes = [node for node in standard_nodes(model, "Dropout") if _trains(node)]
    if not nodes:
        return None
    for node in nodes:
        # A body of a Loop runs several times, and each of its iterations would count the same elements.
        if node.graph is not model.graph:
            raise GraphBuildError(
                f"building the training graph: the Dropout {node.name!r} stands in a subgraph (If, Loop or Scan), and "
                "profile='portable' draws masks in the main graph only. Move it out of the subgraph, or set "
                "batch_norm to put it into inference mode."
            )
        if node.inputs[0] is not None and node.inputs[0].dtype is None:
            infer_shapes(model)
    source = ir.Value(
        name=fresh_name(model, "onnxtrain.random"),
        shape=ir.Shape([len(HOLDS)]),
        type=ir.TensorType(ir.DataType.INT64),
    )
    model.graph.inputs.append(source)
    key = _Squares(nodes[0]).key(source)
    for number, node in enumerate(nodes):
        _rewrite(node, key, number)
    return source


def remove_idle_dropout(model: ir.Model) -> None:
    """Replace Dropout in inference mode by what it returns: its input, and a mask of ones; in place.

    onnxruntime-web's bundles with WebGPU have no Dropout at all.
    """
    for node in standard_nodes(model, "Dropout"):
        write, data = WriterBefore(node), node.inputs[0]
        if data is None or _trains(node):
            continue
        mask = None
        if len(node.outputs) > 1 and (node.outputs[1].uses() or node.outputs[1].is_graph_output()):
            mask = write("Expand", write("Cast", 1, to=ir.DataType.BOOL), write("Shape", data))
        _replace(node, write("Identity", data), mask)


def _replace(node: ir.Node, result: ir.Value, mask: ir.Value | None) -> None:
    """Remove a Dropout; the values stand in for its outputs."""
    if mask is not None and len(node.outputs) > 1:
        # Dtypes and shapes, which the gradient rules read before shapes are inferred again.
        mask.type, mask.shape = ir.TensorType(ir.DataType.BOOL), result.shape or node.outputs[0].shape
        stand_in(node.outputs[1], mask, node)
    node.resize_outputs(1)
    replace_node(node, result)


def _trains(node: ir.Node) -> bool:
    """Tell if a Dropout drops elements, or may do so because its mode is computed at run time."""
    if len(node.inputs) < 3 or node.inputs[2] is None:
        return False
    mode = constant_input(node, 2)
    return mode is None or bool(mode)


class _Squares:
    """Write random integers: the generator Squares of B. Widynski, "Squares: A Fast Counter-Based RNG", 2020.

    Number i of it is four or five rounds of squaring of (counter i) * key in 64 bits, each of which exchanges the upper
    and the lower 32 bits. Products are of int64, which wrap around in every build of ONNX Runtime; 1.20 cannot multiply
    uint64. Shifts are of uint64, as BitShift takes unsigned integers only.

    Args:
        node: The node to write before.
    """

    def __init__(self, node: ir.Node) -> None:
        self._write = WriterBefore(node)
        self._half = self._write.number(32, ir.DataType.UINT64)

    def key(self, source: ir.Value) -> ir.Value:
        """Hash seed, step and run into the key of a run of the model, an odd int64 scalar."""
        terms = self._write("Mul", source, list(_FACTORS))
        # Not by ReduceSum, which adds int64 up in floating point (ONNX Runtime 1.32) and so loses the lower bits.
        first, *others = (self._write("Gather", terms, place) for place in range(len(HOLDS)))
        counter = functools.reduce(lambda total, term: self._write("Add", total, term), others, first)
        mixed, y = self._rounds(counter, self._write("Identity", _KEY))
        # One round more than for the words below: the key uses all 64 bits.
        mixed = self._square_plus(self._swap_halves(mixed), y)
        return self._write("Add", self._write("Mul", mixed, 2), 1)

    def words(self, count: ir.Value, first: int, key: ir.Value) -> ir.Value:
        """Write integers from 0 to 2³² - 1, int64, for the `count` (int64 [1]) counters from `first` on."""
        mixed, _ = self._rounds(self._write.range(first, count), key)
        return self._signed(self._shifted(mixed, "RIGHT"))

    def _rounds(self, counters: ir.Value, key: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Write four rounds; return the sum of the last one, and counters * key."""
        y = self._write("Mul", counters, key)
        z = self._write("Add", y, key)
        x = self._square_plus(y, y)
        for term in (z, y, z):
            x = self._square_plus(self._swap_halves(x), term)
        return x, y

    def _square_plus(self, x: ir.Value, term: ir.Value) -> ir.Value:
        return self._write("Add", self._write("Mul", x, x), term)

    def _swap_halves(self, x: ir.Value) -> ir.Value:
        # The halves have no bit in common, so that Xor joins them.
        return self._signed(self._write("BitwiseXor", self._shifted(x, "RIGHT"), self._shifted(x, "LEFT")))

    def _shifted(self, x: ir.Value, direction: str) -> ir.Value:
        unsigned = self._write("Cast", x, to=ir.DataType.UINT64)
        return self._write("BitShift", unsigned, self._half, direction=direction)

    def _signed(self, x: ir.Value) -> ir.Value:
        return self._write("Cast", x, to=ir.DataType.INT64)


def _rewrite(node: ir.Node, key: ir.Value, number: int) -> None:
    """Replace one Dropout by data * (mask ? 1 / (1 - ratio) : 0)."""
    write, data, mode = WriterBefore(node), node.inputs[0], node.inputs[2]
    assert data is not None
    dtype = data.dtype or ir.DataType.FLOAT
    threshold, scale = _limits(node, dtype)
    count = write("Reshape", write("Size", data), [1])
    words = _Squares(node).words(count, number * _ELEMENTS, key)
    kept = write("GreaterOrEqual", words, threshold)
    mask = write("Reshape", kept, write("Shape", data), allowzero=1)
    if constant_input(node, 2) is None:
        # The mode is computed at run time: outside of training everything is kept as it is.
        mask = write("Or", mask, write("Not", mode))
        scale = write("Where", mode, scale, write.number(1, dtype))
    factor = write("Where", mask, scale, write.number(0, dtype))
    factor.type, factor.shape = ir.TensorType(dtype), data.shape
    result = write("Mul", data, factor)
    result.shape = data.shape
    _replace(node, result, mask)


def _limits(node: ir.Node, dtype: ir.DataType) -> tuple[ir.Value, ir.Value]:
    """Write the least word that keeps an element, int64, and the factor of kept elements in `dtype`."""
    write = WriterBefore(node)
    absent = len(node.inputs) < 2 or node.inputs[1] is None
    ratio = np.array(0.5) if absent else constant_input(node, 1)
    if ratio is not None:
        number = float(ratio.item())
        # A ratio of 1 drops everything, as in PyTorch: the factor would be infinite.
        return write("Identity", round(number * 2**32)), write.number(
            1 / (1 - number) if number < 1 else 0, dtype
        )
    # A frozen parameter or an input of the model, which devices may set.
    wide = write("Cast", node.inputs[1], to=ir.DataType.FLOAT)
    one, words, none = (write.number(number, ir.DataType.FLOAT) for number in (1, 2**32, 0))
    limit = write("Cast", write("Mul", wide, words), to=ir.DataType.INT64)
    share = write("Where", write("Less", wide, one), write("Reciprocal", write("Sub", one, wide)), none)
    return limit, write("Cast", share, to=dtype)
