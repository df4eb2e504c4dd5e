"""A file that quantizes, without the jumps: real numbers that go on from the values of a run as if nothing rounded.

That is what gradients are of that pass rounding straight through: what rounding added to each value for the given
inputs and parameters is added still, whatever these become; what was beyond the range of its integers stays on its end;
and the range that DynamicQuantizeLinear found stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from files import session
from onnx import TensorProto
from quantized_ops import expanded

__all__ = ["quantizes", "smooth"]

Array = npt.NDArray[Any]
_ROUNDING = {"QuantizeLinear", "DynamicQuantizeLinear"}


def quantizes(model: onnx.ModelProto) -> bool:
    """Returns whether any value of a model is quantized while it runs."""
    return any(node.op_type in _ROUNDING or "QLinear" in node.op_type for node in model.graph.node)


def smooth(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> onnx.ModelProto:
    """Returns a file that computes in floats what `model` computes of these inputs, rounding errors included."""
    copy = expanded(model)
    values = _values(copy, feeds)
    graph = copy.graph
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.op_type == "QuantizeLinear":
            nodes += _quantize(node, values, graph)
        elif node.op_type == "DynamicQuantizeLinear":
            nodes += _quantize_dynamically(node, values, graph)
        elif node.op_type == "DequantizeLinear":
            nodes += _dequantize(node, values)
        elif node.op_type in ("MatMulInteger", "ConvInteger"):
            nodes += _integer_product(node)
        else:
            nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    del graph.value_info[:]
    return copy


def _values(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Return the inputs and outputs of the nodes that quantize, and of those that undo it."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    known = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer} | dict(feeds)
    kinds = {*_ROUNDING, "DequantizeLinear"}
    names = {
        name
        for node in model.graph.node
        if node.op_type in kinds
        for name in (*node.input, *node.output)
        if name
    }
    wanted = sorted(names - set(known))
    del copy.graph.output[:]
    copy.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted)
    return known | dict(zip(wanted, session(copy).run(wanted, dict(feeds)), strict=True))


def _per_axis(
    node: onnx.NodeProto, name: str, values: Mapping[str, Array]
) -> tuple[list[onnx.NodeProto], str]:
    """A scale or zero point as floats that broadcast with what is quantized."""
    axis = next((a.i for a in node.attribute if a.name == "axis"), 1)
    if any(a.name == "block_size" and a.i for a in node.attribute):
        raise NotImplementedError("blocks")
    made = [
        onnx.helper.make_node("Cast", [name], [new := f"{node.output[0]}/{name}/float"], to=TensorProto.FLOAT)
    ]
    rank = values[node.input[0]].ndim
    if values[name].size > 1:
        axes = [i for i in range(rank) if i != axis % rank]
        spread = f"{new}/spread"
        shape = onnx.helper.make_node(
            "Constant", [], [f"{spread}/shape"], value_ints=[1 if i in axes else -1 for i in range(rank)]
        )
        made += [shape, onnx.helper.make_node("Reshape", [new, f"{spread}/shape"], [spread])]
        new = spread
    return made, new


def _constant(graph: onnx.GraphProto, name: str, value: Array) -> str:
    graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), name))
    return name


def _quantize(
    node: onnx.NodeProto, values: Mapping[str, Array], graph: onnx.GraphProto
) -> list[onnx.NodeProto]:
    """v = x / scale + what rounding and the zero point added, or the end of the range where x lay beyond it."""
    x, q = values[node.input[0]].astype(np.float64), values[node.output[0]]
    made, scale = _per_axis(node, node.input[1], values)
    factor = _aligned(values[node.input[1]], x, node)
    zero = _aligned(values[node.input[2]], x, node) if len(node.input) > 2 and node.input[2] else np.zeros(())
    free = np.round(x / factor) + zero
    limits = np.iinfo(q.dtype)
    inside = (free >= limits.min) & (free <= limits.max)
    y = node.output[0]
    rest = _constant(graph, f"{y}/rest", np.where(inside, q - x / factor, q).astype(np.float32))
    mask = _constant(graph, f"{y}/inside", inside.astype(np.float32))
    return [
        *made,
        onnx.helper.make_node("Div", [node.input[0], scale], [f"{y}/steps"]),
        onnx.helper.make_node("Mul", [f"{y}/steps", mask], [f"{y}/kept"]),
        onnx.helper.make_node("Add", [f"{y}/kept", rest], [y]),
    ]


def _aligned(value: Array, x: Array, node: onnx.NodeProto) -> Array:
    axis = next((a.i for a in node.attribute if a.name == "axis"), 1)
    wide = value.astype(np.float64)
    if wide.size == 1:
        return wide.reshape(())
    return wide.reshape([-1 if i == axis % x.ndim else 1 for i in range(x.ndim)])


def _quantize_dynamically(
    node: onnx.NodeProto, values: Mapping[str, Array], graph: onnx.GraphProto
) -> list[onnx.NodeProto]:
    x, (q, scale, zero) = values[node.input[0]], (values[name] for name in node.output)
    wide = scale.astype(np.float64)
    y = node.output[0]
    rest = _constant(graph, f"{y}/rest", (q - x.astype(np.float64) / wide).astype(np.float32))
    _constant(graph, node.output[1], scale)
    _constant(graph, node.output[2], zero)
    return [
        onnx.helper.make_node("Div", [node.input[0], node.output[1]], [f"{y}/steps"]),
        onnx.helper.make_node("Add", [f"{y}/steps", rest], [y]),
    ]


def _dequantize(node: onnx.NodeProto, values: Mapping[str, Array]) -> list[onnx.NodeProto]:
    made, scale = _per_axis(node, node.input[1], values)
    y = node.output[0]
    made.append(onnx.helper.make_node("Cast", [node.input[0]], [steps := f"{y}/steps"], to=TensorProto.FLOAT))
    if len(node.input) > 2 and node.input[2]:
        more, zero = _per_axis(node, node.input[2], values)
        made += [*more, onnx.helper.make_node("Sub", [steps, zero], [f"{y}/shifted"])]
        steps = f"{y}/shifted"
    return [*made, onnx.helper.make_node("Mul", [steps, scale], [y])]


def _integer_product(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    y = node.output[0]
    made: list[onnx.NodeProto] = []
    factors: Sequence[str] = []
    for index in (0, 1):
        name = f"{y}/{index}"
        made.append(onnx.helper.make_node("Cast", [node.input[index]], [name], to=TensorProto.FLOAT))
        if len(node.input) > index + 2 and node.input[index + 2]:
            zero = node.input[index + 2]
            made.append(onnx.helper.make_node("Cast", [zero], [f"{name}/zero"], to=TensorProto.FLOAT))
            made.append(onnx.helper.make_node("Sub", [name, f"{name}/zero"], [f"{name}/shifted"]))
            name = f"{name}/shifted"
        factors = [*factors, name]
    product = onnx.helper.make_node(node.op_type.removesuffix("Integer"), factors, [y])
    product.attribute.extend(node.attribute)
    return [*made, product]
