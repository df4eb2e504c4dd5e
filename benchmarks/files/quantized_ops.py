"""Ops on quantized numbers as the ops on real numbers that they stand for, between two that convert them."""

from __future__ import annotations

from collections.abc import Callable

import onnx
from onnx import TensorProto
from onnx.helper import make_node

__all__ = ["expanded"]

Nodes = list[onnx.NodeProto]
_UNARY = {
    "QLinearSigmoid": "Sigmoid", "QLinearLeakyRelu": "LeakyRelu", "QLinearSoftmax": "Softmax",
    "QLinearAveragePool": "AveragePool", "QLinearGlobalAveragePool": "GlobalAveragePool",
}  # fmt: skip
_BINARY = {"QLinearAdd": "Add", "QLinearMul": "Mul"}
_OWN = {"channels_last", "opset"}
"""Attributes that the op on real numbers does not have."""


def expanded(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns the model with these ops in place of those on quantized numbers."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    nodes: Nodes = []
    for node in model.graph.node:
        nodes += _EXPANSIONS[node.op_type](node) if node.op_type in _EXPANSIONS else [node]
    del copy.graph.node[:]
    copy.graph.node.extend(nodes)
    if any(entry.domain in ("", "ai.onnx") and entry.version < 13 for entry in copy.opset_import):
        for node in nodes:  # one scale for all, so far
            if node.op_type == "DequantizeLinear":
                del node.attribute[:]
        del copy.graph.node[:]
        copy.graph.node.extend(nodes)
    return copy


def _real(node: onnx.NodeProto, names: tuple[str, str, str], axis: int | None = None) -> tuple[Nodes, str]:
    new = f"{node.output[0]}/{names[0]}/real"
    attributes = {} if axis is None else {"axis": axis}
    return [make_node("DequantizeLinear", [name for name in names if name], [new], **attributes)], new


def _rounded(node: onnx.NodeProto, scale: str, zero: str) -> tuple[Nodes, str]:
    new = f"{node.output[0]}/real"
    return [make_node("QuantizeLinear", [new, scale, zero], [node.output[0]])], new


def _with(
    node: onnx.NodeProto, op: str, inputs: list[str], output: str, names: set[str] | None = None
) -> onnx.NodeProto:
    new = make_node(op, inputs, [output])
    new.attribute.extend(
        a for a in node.attribute if a.name not in _OWN and (names is None or a.name in names)
    )
    return new


def _unary(node: onnx.NodeProto) -> Nodes:
    x, xs, xz, ys, yz = [*node.input, ""][:5]
    before, real = _real(node, (x, xs, xz))
    after, y = _rounded(node, ys, yz)
    return [*before, _with(node, _UNARY[node.op_type], [real], y), *after]


def _binary(node: onnx.NodeProto) -> Nodes:
    a, az, azz, b, bs, bz, cs, cz = [*node.input, ""][:8]
    first, real_a = _real(node, (a, az, azz))
    second, real_b = _real(node, (b, bs, bz))
    after, y = _rounded(node, cs, cz)
    return [*first, *second, make_node(_BINARY[node.op_type], [real_a, real_b], [y]), *after]


def _bias(node: onnx.NodeProto, bias: str, scales: tuple[str, str]) -> tuple[Nodes, str]:
    new = f"{node.output[0]}/bias"
    made = [
        make_node("Cast", [bias], [f"{new}/steps"], to=TensorProto.FLOAT),
        make_node("Mul", [f"{new}/steps", scales[0]], [f"{new}/half"]),
        make_node("Mul", [f"{new}/half", scales[1]], [new]),
    ]
    return made, new


def _convolution(node: onnx.NodeProto) -> Nodes:
    x, xs, xz, w, ws, wz, ys, yz, bias = [*node.input, ""][:9]
    made, real_x = _real(node, (x, xs, xz))
    more, real_w = _real(node, (w, ws, wz), 0)
    inputs = [real_x, real_w]
    if bias:
        last, real_bias = _bias(node, bias, (xs, ws))
        more, inputs = [*more, *last], [*inputs, real_bias]
    after, y = _rounded(node, ys, yz)
    return [*made, *more, _with(node, "Conv", inputs, y), *after]


def _product(node: onnx.NodeProto) -> Nodes:
    a, az, azz, b, bs, bz, ys, yz = node.input
    first, real_a = _real(node, (a, az, azz))
    second, real_b = _real(node, (b, bs, bz), -1)
    after, y = _rounded(node, ys, yz)
    return [*first, *second, make_node("MatMul", [real_a, real_b], [y]), *after]


def _gemm(node: onnx.NodeProto) -> Nodes:
    a, az, azz, b, bs, bz, c, ys, yz = [*node.input, "", "", ""][:9]
    transposed = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
    first, real_a = _real(node, (a, az, azz))
    second, real_b = _real(node, (b, bs, bz), 0 if transposed else 1)
    inputs = [real_a, real_b]
    if c:
        more, bias = _bias(node, c, (az, bs))
        second, inputs = [*second, *more], [*inputs, bias]
    after, y = _rounded(node, ys, yz) if ys else ([], node.output[0])
    return [*first, *second, _with(node, "Gemm", inputs, y, {"transA", "transB", "alpha"}), *after]


def _dynamic_product(node: onnx.NodeProto) -> Nodes:
    a, b, bs, bz, bias = [*node.input, "", ""][:5]
    q = [f"{node.output[0]}/{name}" for name in ("q", "scale", "zero")]
    return [make_node("DynamicQuantizeLinear", [a], q), *_float_product(node, q, (b, bs, bz), bias)]


def _integer_product(node: onnx.NodeProto) -> Nodes:
    a, b, az, bs, azz, bz, bias = [*node.input, "", "", ""][:7]
    return _float_product(node, [a, az, azz], (b, bs, bz), bias)


def _float_product(node: onnx.NodeProto, a: list[str], b: tuple[str, str, str], bias: str) -> Nodes:
    first, real_a = _real(node, (a[0], a[1], a[2]))
    second, real_b = _real(node, b, -1)
    y = f"{node.output[0]}/product" if bias else node.output[0]
    last = [make_node("Add", [y, bias], [node.output[0]])] if bias else []
    return [*first, *second, make_node("MatMul", [real_a, real_b], [y]), *last]


def _concat(node: onnx.NodeProto) -> Nodes:
    made: Nodes = []
    parts = []
    for k in range(2, len(node.input), 3):
        more, part = _real(node, (node.input[k], node.input[k + 1], node.input[k + 2]))
        made, parts = [*made, *more], [*parts, part]
    after, y = _rounded(node, node.input[0], node.input[1])
    return [*made, _with(node, "Concat", parts, y), *after]


def _standard(node: onnx.NodeProto) -> Nodes:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.domain = ""
    return [copy]


_EXPANSIONS: dict[str, Callable[[onnx.NodeProto], Nodes]] = {
    **dict.fromkeys(_UNARY, _unary),
    **dict.fromkeys(_BINARY, _binary),
    "QLinearConv": _convolution,
    "QLinearMatMul": _product,
    "QGemm": _gemm,
    "QLinearConcat": _concat,
    "DynamicQuantizeMatMul": _dynamic_product,
    "MatMulIntegerToFloat": _integer_product,
    "QuantizeLinear": _standard,
    "DequantizeLinear": _standard,
}
