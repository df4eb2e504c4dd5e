"""Ops on quantized numbers: values beside their kernels, and gradients, straight through, beside PyTorch's.

PyTorch computes with what the integers stand for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as fn
from onnx import helper, numpy_helper

from onnxtrain import differentiate
from onnxtrain.errors import NoGradientRule
from onnxtrain.op_bodies import op_bodies
from tolerances import NORM_RELATIVE, norm_relative_error

_RNG = np.random.default_rng(0)
XS, XZ = np.float32(0.02), np.uint8(120)
WS, WZ = np.float32(0.01), np.int8(3)
YS, YZ = np.float32(0.05), np.uint8(130)


def _weights(*shape: int) -> np.ndarray:
    return _RNG.integers(-60, 60, shape).astype(np.int8)


def _real(q: np.ndarray, scale: Any, zero: Any) -> torch.Tensor:
    return torch.from_numpy((q.astype(np.float64) - np.float64(zero)) * np.float64(scale))


X, IMAGE = (_RNG.uniform(-1, 1, shape).astype(np.float32) for shape in [(3, 4), (1, 2, 5, 4)])
W, BYTES, KERNEL, BIAS = (
    _weights(4, 5),
    (_weights(3, 4) + 120).astype(np.uint8),
    _weights(3, 2, 2, 2),
    np.array([50, -80, 20], np.int32),
)
BYTE_KERNEL = (KERNEL + 120).astype(np.uint8)
WIDE, FLOATS = _weights(8, 24), _RNG.uniform(-1, 1, 24).astype(np.float32)
COLUMNS = np.linspace(0.01, 0.02, 5, dtype=np.float32)
BY_OUTPUT, WHOLE = np.linspace(0.005, 0.01, 24, dtype=np.float32), np.zeros(24, np.int8)
IN, OUT = ["q", XS, XZ], [YS, YZ]


@dataclass(frozen=True)
class Quantized:
    """An op on `q`, the quantized x, and arrays; `twin` computes with what the integers stand for."""

    op: str
    inputs: Sequence[Any]
    twin: Callable[[torch.Tensor], torch.Tensor]
    attrs: dict[str, Any] = field(default_factory=dict)
    domain: str = "com.microsoft"
    x: np.ndarray = field(default_factory=lambda: X)
    floats: bool = False
    """True if the result is floating point."""
    step: float = float(YS)


def _attention(
    x: torch.Tensor, scale: np.ndarray | np.float32 = WS, zero: np.ndarray | np.int8 = WZ
) -> torch.Tensor:
    joint = x @ _real(WIDE, scale, zero) + torch.from_numpy(FLOATS.astype(np.float64))
    q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in joint.chunk(3, -1))
    return fn.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


CASES = [
    Quantized("QLinearMatMul", [*IN, W, WS, WZ, *OUT], lambda x: x @ _real(W, WS, WZ), domain=""),
    Quantized(
        "QLinearMatMul", [*IN, W, COLUMNS, np.zeros(5, np.int8), *OUT], lambda x: x @ _real(W, COLUMNS, 0), domain=""
    ),
    Quantized(
        "QLinearConv", [*IN, KERNEL, WS, np.int8(0), *OUT, BIAS],
        lambda x: fn.conv2d(x, _real(KERNEL, WS, 0), _real(BIAS, np.float64(XS) * WS, 0), padding=1),
        {"pads": [1] * 4}, domain="", x=IMAGE,
    ),
    Quantized("QLinearAdd", [*IN, BYTES, WS, XZ, *OUT], lambda x: x + _real(BYTES, WS, XZ)),
    Quantized("QLinearMul", [*IN, BYTES, WS, XZ, *OUT], lambda x: x * _real(BYTES, WS, XZ)),
    Quantized("QLinearSigmoid", [*IN, np.float32(1 / 256), np.uint8(0)], torch.sigmoid, step=1 / 256),
    Quantized("QLinearLeakyRelu", [*IN, *OUT], lambda x: fn.leaky_relu(x, 0.2), {"alpha": 0.2}),
    Quantized(
        "QLinearSoftmax", [*IN, np.float32(1 / 256), np.uint8(0)], lambda x: x.softmax(-1), {"axis": -1, "opset": 13},
        step=1 / 256,
    ),
    Quantized(
        "QLinearAveragePool", [*IN, *OUT], lambda x: fn.avg_pool2d(x, 2, 1), {"kernel_shape": [2, 2]}, x=IMAGE,
    ),
    Quantized("QLinearGlobalAveragePool", [*IN, *OUT], lambda x: x.mean((2, 3), keepdim=True), x=IMAGE),
    # As onnxruntime lays quantized files out for the CPU (levels 3 and above).
    Quantized(
        "QLinearConv", [*IN, KERNEL, WS, np.int8(0), *OUT, BIAS],
        lambda x: fn.conv2d(x.movedim(-1, 1), _real(KERNEL, WS, 0), _real(BIAS, np.float64(XS) * WS, 0), padding=1)
        .movedim(1, -1),
        {"pads": [1] * 4, "channels_last": 1}, x=np.moveaxis(IMAGE, 1, -1).copy(),
    ),
    Quantized(
        "QLinearAveragePool", [*IN, *OUT], lambda x: fn.avg_pool2d(x.movedim(-1, 1), 2, 1).movedim(1, -1),
        {"kernel_shape": [2, 2], "channels_last": 1}, x=np.moveaxis(IMAGE, 1, -1).copy(),
    ),
    Quantized(
        "QLinearGlobalAveragePool", [*IN, *OUT], lambda x: x.mean((1, 2), keepdim=True), {"channels_last": 1},
        x=np.moveaxis(IMAGE, 1, -1).copy(),
    ),
    Quantized(
        "QLinearConcat", [*OUT, *IN, BYTES, XS, XZ],
        lambda x: torch.cat([x, _real(BYTES, XS, XZ)], 1), {"axis": 1},
    ),
    Quantized("DequantizeLinear", IN, lambda x: x, floats=True),
    Quantized(
        "QGemm", [*IN, W, WS, np.int8(0), np.arange(5, dtype=np.int32), *OUT],
        lambda x: x @ _real(W, WS, 0) + _real(np.arange(5), np.float64(XS) * WS, 0),
    ),
    Quantized("MatMulIntegerToFloat", ["q", W, XS, WS, XZ, WZ], lambda x: x @ _real(W, WS, WZ), floats=True),
    Quantized("DynamicQuantizeMatMul", ["x", W, WS, WZ], lambda x: x @ _real(W, WS, WZ), floats=True),
    Quantized(
        "QAttention", ["q", WIDE, FLOATS, XS, WS, None, XZ, WZ], _attention, {"num_heads": 2}, floats=True,
        x=_RNG.uniform(-1, 1, (2, 3, 8)).astype(np.float32),
    ),
    Quantized(
        "QAttention", ["q", WIDE, FLOATS, XS, BY_OUTPUT, None, XZ, WHOLE], lambda x: _attention(x, BY_OUTPUT, WHOLE),
        {"num_heads": 2}, floats=True, x=_RNG.uniform(-1, 1, (2, 3, 8)).astype(np.float32),
    ),
    Quantized("MatMulInteger", ["q", W, XZ, WZ], lambda x: x @ _real(W, 1, WZ) / XS, domain="", floats=True),
    Quantized(
        "MatMulInteger", ["q", W[:, 0].copy(), XZ, WZ], lambda x: x @ _real(W[:, 0], 1, WZ) / XS, domain="", floats=True
    ),
    Quantized(
        "ConvInteger", ["q", BYTE_KERNEL, XZ, XZ], lambda x: fn.conv2d(x, _real(BYTE_KERNEL, 1, XZ), stride=2) / XS,
        {"strides": [2, 2]}, domain="", x=IMAGE, floats=True,
    ),
]  # fmt: skip
WITH_A_TEST_OF_THEIR_OWN = {("com.microsoft", "DynamicQuantizeLSTM")}
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.op)


def _model(case: Quantized) -> onnx.ModelProto:
    """The loss is sum(y * w)."""
    stored = {"xs": XS, "xz": XZ, "ys": YS, "yz": YZ}
    names = []
    for k, value in enumerate(case.inputs):
        names.append("" if value is None else value if isinstance(value, str) else f"c{k}")
        if isinstance(value, np.ndarray | np.generic):
            stored[names[-1]] = value
    nodes = [helper.make_node("QuantizeLinear", ["x", "xs", "xz"], ["q"])]
    nodes.append(helper.make_node(case.op, names, ["r"], domain=case.domain, **case.attrs))
    if case.floats:
        nodes.append(helper.make_node("Cast", ["r"], ["y"], to=1))
    else:
        scale, zero = (
            (names[0], names[1])
            if case.op == "QLinearConcat"
            else names[-3:-1]
            if case.op == "QLinearConv"
            else names[-2:]
        )
        nodes.append(helper.make_node("DequantizeLinear", ["r", scale, zero], ["y"]))
    nodes += [
        helper.make_node("Mul", ["y", "w"], ["p"]),
        helper.make_node("ReduceSum", ["p"], ["loss"], keepdims=0),
    ]
    shape = case.twin(torch.from_numpy(case.x.astype(np.float64))).shape
    infos = [helper.make_tensor_value_info(n, 1, s) for n, s in (("x", case.x.shape), ("w", shape))]
    outputs = [helper.make_tensor_value_info("loss", 1, []), helper.make_tensor_value_info("y", 1, None)]
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in stored.items()]
    graph = helper.make_graph(nodes, "g", infos, outputs, tensors)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _run(proto: onnx.ModelProto, names: list[str], feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(names, feeds)


@each_case
def test_gradient_is_that_of_what_the_integers_stand_for(case: Quantized) -> None:
    proto = _model(case)
    q = np.clip(np.rint(case.x / XS) + XZ, 0, 255)
    real = _real(q, XS, XZ).requires_grad_()
    if case.op == "DynamicQuantizeMatMul":
        real = torch.from_numpy(case.x.astype(np.float64)).requires_grad_()
    result = case.twin(real)
    w = np.random.default_rng(1).uniform(0.5, 1.5, tuple(result.shape)).astype(np.float32)
    (expected,) = torch.autograd.grad((result * torch.from_numpy(w)).sum(), real)
    feeds = {"x": case.x, "w": w}
    (kernel,) = _run(proto, ["y"], feeds)
    y, gradient = _run(differentiate(proto, "loss", ["x"], straight_through=True), ["y", "x_grad"], feeds)
    if case.floats:
        assert norm_relative_error(y, kernel) <= NORM_RELATIVE[np.dtype(np.float32)]
    else:
        assert np.abs(y - kernel).max() <= 1.01 * case.step
        assert np.abs(kernel - result.detach().numpy()).max() <= 1.01 * case.step, (
            "the torch twin computes something else"
        )
    assert norm_relative_error(gradient, expected.numpy()) <= 10 * NORM_RELATIVE[np.dtype(np.float32)]


@pytest.mark.parametrize("by_output", [False, True])
def test_an_lstm_with_quantized_weights(by_output: bool) -> None:
    """The gradient is that of an LSTM with the numbers that the integers stand for, at the rounded X."""
    rng = np.random.default_rng(5)
    hidden, axes = 4, (2, 16) if by_output else (2,)
    weights = {
        "W": rng.integers(-90, 90, (2, 3, 16), np.int8),
        "R": rng.integers(-90, 90, (2, 4, 16), np.int8),
    }
    weights |= {f"{k}s": rng.uniform(4e-3, 9e-3, axes).astype(np.float32) for k in "WR"}
    weights |= {f"{k}z": np.zeros(axes, np.int8) for k in "WR"}
    bias = rng.uniform(-1, 1, (2, 32)).astype(np.float32)
    given = {"X": rng.uniform(-1, 1, (5, 2, 3)).astype(np.float32)}
    outputs = "Y, H, C"
    head = """<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]> g (float[5, 2, 3] X) => (float loss) {"""
    tail = """ys = ReduceSum<keepdims = 0>(Y)  hs = ReduceSumSquare<keepdims = 0>(H)  cs = ReduceL1<keepdims = 0>(C)
        loss = Sum(ys, hs, cs) }"""
    attributes = f'<hidden_size = {hidden}, direction = "bidirectional">'
    quantized = onnx.parser.parse_model(
        f"{head} {outputs} = com.microsoft.DynamicQuantizeLSTM{attributes}(X, W, R, B, , , , , Ws, Wz, Rs, Rz) {tail}"
    )
    whole = onnx.parser.parse_model(f"{head} {outputs} = LSTM{attributes}(X, W, R, B) {tail}")
    scales = {k: weights[f"{k}s"].reshape(2, 1, -1) for k in "WR"}
    real = {k: (weights[k] * scales[k]).swapaxes(1, 2).astype(np.float32) for k in "WR"}
    for model, stored in ((quantized, weights), (whole, real)):
        for name, array in {**stored, "B": bias}.items():
            model.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
    rounding = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[5, 2, 3] X) => (float[5, 2, 3] y) {
        q, s, z = DynamicQuantizeLinear(X)  y = DequantizeLinear(q, s, z) }""")
    (rounded,) = _run(rounding, ["y"], given)
    (expected,) = _run(differentiate(whole, "loss", ["X"]), ["X_grad"], {"X": rounded})
    step = differentiate(quantized, "loss", ["X"], straight_through=True)
    loss, got = _run(step, ["loss", "X_grad"], given)
    assert norm_relative_error(got, expected) <= 10 * NORM_RELATIVE[np.dtype(np.float32)]
    assert abs(loss - _run(whole, ["loss"], {"X": rounded})[0]) < 0.05 * abs(loss)


CHAINS = {
    "moved": """q = QuantizeLinear(x, xs, xz)  m = Transpose(q)
        r = QLinearMatMul(m, xs, xz, c, ws, wz, ys, yz)  y = DequantizeLinear(r, ys, yz)""",
    "dynamic": """t = Transpose(x)  q, s, z = DynamicQuantizeLinear(t)  r = MatMulInteger(q, c, z, wz)
        f = Cast<to = 1>(r)  g = Mul(f, s)  y = Mul(g, ws)""",
    "dynamic and back": """t = Transpose(x)  q, s, z = DynamicQuantizeLinear(t)  d = DequantizeLinear(q, s, z)
        b = DequantizeLinear(c, ws, wz)  y = MatMul(d, b)""",
}


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_gradients_pass_integers_that_are_only_moved_and_ranges_of_run_time(chain: str) -> None:
    """A gradient that stops there would be zero, and nobody would know."""
    proto = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        g (float[4,3] x, float[3,5] v) => (float loss) {{
            {chain}  p = Mul(y, v)  loss = ReduceSum<keepdims=0>(p) }}""")
    values = {"xs": XS, "xz": XZ, "ws": WS, "wz": WZ, "ys": YS, "yz": YZ, "c": W}
    proto.graph.initializer.extend(numpy_helper.from_array(np.asarray(a), name) for name, a in values.items())
    with pytest.raises(NoGradientRule, match="it rounds: pass straight_through=True"):
        differentiate(proto, "loss", ["x"])
    v = _RNG.uniform(0.5, 1.5, (3, 5)).astype(np.float32)
    step = differentiate(proto, "loss", ["x"], straight_through=True)
    (gradient,) = _run(step, ["x_grad"], {"x": X.T.copy(), "v": v})
    expected = (torch.from_numpy(v).double() @ _real(W, WS, WZ).T).T
    assert norm_relative_error(gradient, expected.numpy()) <= NORM_RELATIVE[np.dtype(np.float32)]


def test_without_being_asked_what_rounds_is_a_clear_error() -> None:
    with pytest.raises(NoGradientRule, match="it rounds: pass straight_through=True"):
        differentiate(_model(CASES[0]), "loss", ["x"])


def test_every_quantized_body_has_a_case() -> None:
    tested = {(case.domain, case.op) for case in CASES} | WITH_A_TEST_OF_THEIR_OWN
    quantized = {key for key in op_bodies() if key[1].startswith("Q") or "Quantize" in key[1]}
    assert quantized - tested == {("com.microsoft", op) for op in ("QuickGelu", "QuantizeLinear")}
