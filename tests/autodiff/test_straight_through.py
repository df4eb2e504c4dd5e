"""Gradients through rounding as if it did nothing, beside PyTorch's fake quantization and its estimators."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)

import models
from onnxtrain import differentiate
from onnxtrain.errors import NoGradientRule
from training_run import Run

X = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32) * 3


def gradients(text: str, wrt: list[str], **feeds: np.ndarray) -> list[np.ndarray]:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g {text}')
    with pytest.raises(NoGradientRule, match="straight_through=True"):
        differentiate(model, "y", wrt, cotangent="ct")
    step = differentiate(model, "y", wrt, cotangent="ct", straight_through=True)
    session = ort.InferenceSession(step.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run([f"{name}_grad" for name in wrt], feeds)


@pytest.mark.parametrize("op", ["Round", "Ceil", "Floor"])
def test_rounding_passes_cotangents_on(op: str) -> None:
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        g (float[n, 4] x) => (float[n, 4] y) {{ r = {op}(x)  y = Mul(r, x) }}""")
    step = differentiate(model, "y", ["x"], cotangent="ct", straight_through=True)
    session = ort.InferenceSession(step.SerializeToString(), providers=["CPUExecutionProvider"])
    ct = np.random.default_rng(1).normal(size=X.shape).astype(np.float32)
    x = torch.tensor(X, requires_grad=True)
    rounded = getattr(torch, op.lower())(x).detach() + x - x.detach()
    (expected,) = torch.autograd.grad(rounded * x, x, torch.tensor(ct))
    np.testing.assert_allclose(session.run(["x_grad"], {"x": X, "ct": ct})[0], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("integers", "passes"),
    [
        ("r = Round(x)  q = Cast<to=6>(r)", True),
        # Indices and masks.
        ("r = Round(x)  q = Cast<to=7>(r)", False),
        ("q = Cast<to=6>(x)", False),
    ],
)
def test_a_cast_of_rounded_values_to_int32_passes_cotangents_on(integers: str, passes: bool) -> None:
    """As biases are rounded, which QuantizeLinear cannot."""
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        g (float[n, 4] x) => (float[n, 4] y) {{ {integers}  f = Cast<to=1>(q)  y = Mul(f, x) }}""")
    step = differentiate(model, "y", ["x"], cotangent="ct", straight_through=True)
    session = ort.InferenceSession(step.SerializeToString(), providers=["CPUExecutionProvider"])
    ct = np.random.default_rng(1).normal(size=X.shape).astype(np.float32)
    rounded = np.rint(X) if "Round" in integers else np.trunc(X)
    expected = ct * rounded + (ct * X if passes else 0)
    np.testing.assert_allclose(session.run(["x_grad"], {"x": X, "ct": ct})[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("zero", [0, 5])
def test_fake_quantization_per_tensor_is_that_of_torch(zero: int) -> None:
    """Values and gradients, with values beyond the range; the scale's too (Learned Step Size Quantization)."""
    ct = np.random.default_rng(1).normal(size=X.shape).astype(np.float32)
    text = f"""(float[n, 4] x, float s) => (float[n, 4] y) <int8 z = {{{zero}}}>
        {{ q = QuantizeLinear(x, s, z)  y = DequantizeLinear(q, s, z) }}"""
    got_x, got_s = gradients(text, ["x", "s"], x=X, s=np.array(0.03, np.float32), ct=ct)
    x, s = torch.tensor(X, requires_grad=True), torch.tensor([0.03], requires_grad=True)
    y = torch._fake_quantize_learnable_per_tensor_affine(x, s, torch.tensor([float(zero)]), -128, 127, 1.0)
    expected = torch.autograd.grad(y, [x, s], torch.tensor(ct))
    assert (expected[0].numpy() == 0).any()
    np.testing.assert_allclose(got_x, expected[0], rtol=1e-5)
    np.testing.assert_allclose(got_s, expected[1][0], rtol=1e-4)


def test_fake_quantization_per_channel_is_that_of_torch() -> None:
    ct = np.random.default_rng(1).normal(size=X.shape).astype(np.float32)
    scales = np.array([0.01, 0.02, 0.03, 0.04], np.float32)
    text = """(float[n, 4] x, float[4] s) => (float[n, 4] y) <uint8[4] z = {100, 120, 128, 130}>
        { q = QuantizeLinear<axis = 1>(x, s, z)  y = DequantizeLinear<axis = 1>(q, s, z) }"""
    got_x, got_s = gradients(text, ["x", "s"], x=X, s=scales, ct=ct)
    x, s = torch.tensor(X, requires_grad=True), torch.tensor(scales, requires_grad=True)
    zero = torch.tensor([100.0, 120.0, 128.0, 130.0])
    y = torch._fake_quantize_learnable_per_channel_affine(x, s, zero, 1, 0, 255, 1.0)
    expected = torch.autograd.grad(y, [x, s], torch.tensor(ct))
    assert (expected[0].numpy() == 0).any()
    np.testing.assert_allclose(got_x, expected[0], rtol=1e-5)
    np.testing.assert_allclose(got_s, expected[1], rtol=1e-4)


def test_blocks_have_scales_of_their_own() -> None:
    """As per-channel quantization of the blocks one below the other."""
    ct = np.random.default_rng(1).normal(size=X.shape).astype(np.float32)
    scales = np.random.default_rng(2).uniform(0.01, 0.05, (6, 2)).astype(np.float32)
    text = """(float[6, 4] x, float[6, 2] s) => (float[6, 4] y) <int8[6, 2] z = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}>
        { q = QuantizeLinear<axis = 1, block_size = 2>(x, s, z)
          y = DequantizeLinear<axis = 1, block_size = 2>(q, s, z) }"""
    got_x, got_s = gradients(text, ["x", "s"], x=X, s=scales, ct=ct)
    x, s = torch.tensor(X, requires_grad=True), torch.tensor(scales, requires_grad=True)
    rows = torch._fake_quantize_learnable_per_channel_affine(
        x.reshape(12, 2), s.reshape(12), torch.zeros(12), 0, -128, 127, 1.0
    )
    expected = torch.autograd.grad(rows.reshape(6, 4), [x, s], torch.tensor(ct))
    np.testing.assert_allclose(got_x, expected[0], rtol=1e-5)
    np.testing.assert_allclose(got_s, expected[1], rtol=1e-4)


class _Data(CalibrationDataReader):
    def __init__(self) -> None:
        self._left = iter([{"x": X}])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._left, None)


@pytest.mark.filterwarnings("ignore")  # of the quantizer
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_file_of_the_quantizer_learns(tmp_path: Path, kind: str) -> None:
    """Biases, or scales that are named, are trained, as they stay in floating point; otherwise rounding is an error."""
    source, target = tmp_path / "net.onnx", tmp_path / "quantized.onnx"
    onnx.save(models.mlp(), source)
    if kind == "static":
        quantize_static(source, target, _Data(), QuantFormat.QDQ, activation_type=QuantType.QUInt8)
    else:
        quantize_dynamic(source, target, op_types_to_quantize=["Gemm"])
    scales = {"requires_grad": ["*scale"]} if kind == "static" else {}  # its biases are integers, too
    run = Run.generate(
        tmp_path / "run",
        str(target),
        loss="cross_entropy",
        optimizer="adamw",
        straight_through=True,
        **scales,
    )
    assert list(run.state.parameters)
    run.optimizer.set_learning_rate(0.05)
    labels = np.argmax(X[:, :3], 1)
    losses = [run.step(X, labels) for _ in range(30)]
    assert losses[-1] < 0.8 * losses[0]


def test_what_is_quantized_behind_any_op_names_the_way_out() -> None:
    """Whatever op of onnxruntime the quantized numbers come from."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
        g (float[2, 4] x, float s) => (float[2, 4] y) <uint8 z = {128}, float t = {0.1}> {
            a = QuantizeLinear(x, t, z)
            b = com.microsoft.QLinearSigmoid(a, s, z, t, z)
            y = DequantizeLinear(b, t, z)
        }"""
    )
    with pytest.raises(NoGradientRule, match="straight_through=True"):
        differentiate(model, "y", ["s"], cotangent="ct")


def test_int8_loads_with_the_optimizers_of_a_stock_runtime(tmp_path: Path) -> None:
    """One of them adds a QuantizeLinear behind a Reshape of the gradient, and another makes uint8 of half of it."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]>
        g (float[1, 2, 4, 4] x) => (float[1, 3, 6, 6] y) <int8 z = {0}> {
            s = Constant<value = float {0.1}>()
            h = Mul(x, w)
            q = QuantizeLinear(h, s, z)
            d = DequantizeLinear(q, s, z)
            y = ConvTranspose(d, v)
        }"""
    )
    rng = np.random.default_rng(0)
    for name, shape in {"w": (4,), "v": (2, 3, 3, 3)}.items():
        array = rng.normal(size=shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    run = Run.generate(tmp_path, model, loss="mse", optimizer="sgd", straight_through=True)
    x, target = (rng.normal(size=shape).astype(np.float32) for shape in ((1, 2, 4, 4), (1, 3, 6, 6)))
    w, v = (torch.tensor(run.state.parameters[name].data.copy(), requires_grad=True) for name in "wv")
    quantized = torch.fake_quantize_per_tensor_affine(torch.tensor(x) * w, 0.1, 0, -128, 127)
    loss = torch.nn.functional.mse_loss(
        torch.nn.functional.conv_transpose2d(quantized, v), torch.tensor(target)
    )
    np.testing.assert_allclose(float(run.module(x, target)), loss.item(), rtol=1e-4)
    for name, gradient in zip("wv", torch.autograd.grad(loss, [w, v]), strict=True):
        np.testing.assert_allclose(run.state.parameters[name].grad, gradient, rtol=1e-3, atol=1e-5)


def test_an_op_without_a_rule_is_blamed_for_the_rank_that_it_hides() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
        g (float[1, 8, 4, 4] x, float[8, 8, 1, 1] w) => (float[1, 8, 4, 4] y) {
            a = com.microsoft.QEmbedLayerNormalization(x, w, w)
            y = ConvTranspose(a, w)
        }"""
    )
    with pytest.raises(NoGradientRule, match="it multiplies integers"):
        differentiate(model, "y", ["w"], cotangent="ct")


def test_an_image_of_integers_is_resized() -> None:
    """As onnxruntime's quantizer leaves a Resize between two ops on integers."""
    text = """(float[1, 1, 4, 4] x) => (float[1, 1, 8, 8] y)
        <float s = {0.02}, uint8 z = {128}, float[4] scales = {1.0, 1.0, 2.0, 2.0}> {
            q = QuantizeLinear(x, s, z)
            r = Resize<mode = "linear">(q, , scales)
            y = DequantizeLinear(r, s, z)
        }"""
    rng = np.random.default_rng(2)
    x, ct = (rng.uniform(-1, 1, (1, 1, n, n)).astype(np.float32) for n in (4, 8))
    (got,) = gradients(text, ["x"], x=x, ct=ct)
    given = torch.tensor(x, requires_grad=True)
    resized = torch.nn.functional.interpolate(given, scale_factor=2, mode="bilinear")
    (expected,) = torch.autograd.grad(resized, given, torch.tensor(ct))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


MOVES = {
    "Concat": "r = Concat<axis = 1>(q, q)",
    "DepthToSpace": "r = DepthToSpace<blocksize = 2>(q)",
    "Expand": "r = Expand(q, six)",
    "Flatten": "r = Flatten(q)",
    "Gather": "r = Gather<axis = 2>(q, places)",
    "Identity": "r = Identity(q)",
    "MaxPool": "r = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(q)",
    "Pad": "r = Pad(q, pads, z)",
    "ReduceMax": "r = ReduceMax(q, places)",
    "Reshape": "r = Reshape(q, flat)",
    "Slice": "r = Slice(q, one, three, three)",
    "SpaceToDepth": "r = SpaceToDepth<blocksize = 2>(q)",
    "Split": "unread, r = Split<axis = 1, num_outputs = 2>(q)",
    "Tile": "r = Tile(q, repeats)",
    "Transpose": "r = Transpose<perm = [0, 2, 3, 1]>(q)",
}


@pytest.mark.parametrize("name", MOVES)
def test_what_moves_quantized_values_moves_their_gradients(name: str) -> None:
    """As onnxruntime's quantizer leaves them between two ops on integers."""
    sizes = {"six": [2, 4, 4, 4], "places": [2, 1], "pads": [0, 0, 1, 0, 0, 0, 0, 2], "flat": [2, -1]}
    sizes |= {"one": [1], "three": [3], "repeats": [1, 1, 2, 1]}
    numbers = ", ".join(f"int64[{len(n)}] {key} = {{{', '.join(map(str, n))}}}" for key, n in sizes.items())
    moved = MOVES[name].replace("z)", "zero)").replace("(q", "(x").replace(", q)", ", x)")
    end = "y = ReduceSum<keepdims = 0>(s)"
    whole = f"""(float[2, 4, 4, 4] x) => (float y) <float zero = {{0}}, {numbers}> {{
        {moved}  s = Mul(r, r)  {end} }}"""
    stepped = f"""(float[2, 4, 4, 4] x) => (float y) <float scale = {{0.5}}, uint8 z = {{0}}, {numbers}> {{
        q = QuantizeLinear(x, scale, z)  {MOVES[name]}  d = DequantizeLinear(r, scale, z)  s = Mul(d, d)  {end} }}"""
    levels = np.random.default_rng(3).permutation(128).reshape(2, 4, 4, 4)
    given = {"x": (0.5 * levels).astype(np.float32), "ct": np.ones((), np.float32)}
    step = differentiate(
        onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g {whole}'),
        "y",
        ["x"],
        cotangent="ct",
    )
    session = ort.InferenceSession(step.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,), (got,) = session.run(["x_grad"], given), gradients(stepped, ["x"], **given)
    np.testing.assert_array_equal(got, expected)
    assert np.any(got)
