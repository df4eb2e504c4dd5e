"""Faults and gaps of ONNX Runtime are avoided in artifacts and in results of `differentiate` alike."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import numpy_helper

from onnxtrain.autodiff import differentiate
from onnxtrain.losses import MSELoss
from tolerances import BFLOAT16, norm_relative_error
from training_run import Run

BF16 = np.dtype(ml_dtypes.bfloat16)
W = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)


def last_axis() -> onnx.ModelProto:
    return onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (float[b, 3, 4] x) => (float[b, 3] y)
        <float[4] w = {1.0, 2.0, 3.0, 4.0}, int64[1] last = {-1}>
        { p = Mul(x, w)  y = ReduceSum<keepdims = 0>(p, last) }"""
    )


@pytest.mark.parametrize("batch", [2, 0])
def test_an_empty_batch_is_trained_and_differentiated(tmp_path: Path, batch: int) -> None:
    x, target = np.ones((batch, 3, 4), np.float32), np.ones((batch, 3), np.float32)
    w = torch.arange(1.0, 5.0, requires_grad=True)
    loss = torch.nn.functional.mse_loss((torch.tensor(x) * w).sum(-1), torch.tensor(target), reduction="sum")
    loss.backward()
    assert w.grad is not None
    run = Run.generate(tmp_path, last_axis(), loss=MSELoss(reduction="sum"), error_if_nonfinite=False)
    assert run.module(x, target) == pytest.approx(loss.item())
    np.testing.assert_allclose(run.state.parameters["w"].grad, w.grad.numpy())
    run.module.eval()
    assert run.module(x, target) == pytest.approx(loss.item())
    step = ort.InferenceSession(differentiate(last_axis(), "y", ["w"], cotangent="ct").SerializeToString())
    y, gradient = step.run(None, {"x": x, "ct": target})
    assert y.shape == target.shape
    np.testing.assert_allclose(gradient, [3 * batch] * 4)


def narrow() -> onnx.ModelProto:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (float[b, 4] x) => (float[b, 3] y)
        { n = Cast<to = 16>(x)  m = MatMul(n, w)  t = Tanh(m)  y = Cast<to = 1>(t) }"""
    )
    model.graph.initializer.append(numpy_helper.from_array(W.astype(BF16), "w"))
    return model


def torch_gradient(x: np.ndarray, target: np.ndarray) -> tuple[float, np.ndarray]:
    w = torch.tensor(W).bfloat16().requires_grad_()
    y = torch.tanh(torch.tensor(x).bfloat16() @ w).float()
    loss = torch.nn.functional.mse_loss(y, torch.tensor(target))
    loss.backward()
    assert w.grad is not None
    return loss.item(), w.grad.float().numpy()


def test_bfloat16_is_trained_and_differentiated_on_the_cpu(tmp_path: Path) -> None:
    """Sums are rounded in another order than PyTorch's."""
    rng = np.random.default_rng(1)
    x, target = rng.normal(size=(5, 4)).astype(np.float32), rng.normal(size=(5, 3)).astype(np.float32)
    want_loss, want = torch_gradient(x, target)
    run = Run.generate(tmp_path, narrow(), loss="mse", optimizer="sgd")
    run.optimizer.set_learning_rate(0.1)
    assert run.module(x, target) == pytest.approx(want_loss, rel=1e-2)
    gradient = np.asarray(run.state.parameters["w"].grad).view(BF16).astype(np.float32)
    assert norm_relative_error(gradient, want) <= BFLOAT16
    run.optimizer.step()
    moved = np.asarray(run.state.parameters["w"].data).view(BF16).astype(np.float32)
    assert norm_relative_error(moved, W - 0.1 * want) <= BFLOAT16

    step = ort.InferenceSession(differentiate(narrow(), "y", ["x"], cotangent="ct").SerializeToString())
    got = step.run(["x_grad"], {"x": x, "ct": target})[0]
    twin = torch.tensor(x, requires_grad=True)
    y = torch.tanh(twin.bfloat16() @ torch.tensor(W).bfloat16()).float()
    (y * torch.tensor(target)).sum().backward()
    assert twin.grad is not None
    assert norm_relative_error(got, twin.grad.numpy()) <= BFLOAT16


PACKED = {
    "queries, keys and values": ("float[b, 3, 2, 3, 4] p", 'p, "", ""'),
    "keys and values": ("float[b, 3, 8] q, float[b, 5, 2, 2, 4] p", 'q, p, ""'),
}


@pytest.mark.parametrize("kind", PACKED)
def test_packed_attention_before_the_parameters_runs_on_the_cpu(tmp_path: Path, kind: str) -> None:
    """onnxruntime has no such kernel there; the training model does not differentiate the node, nor does evaluation."""
    inputs, call = PACKED[kind]
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
        g ({inputs}) => (float[b, 3, 2] y) <float[2] w = {{1.0, 2.0}}> {{
            h = com.microsoft.MultiHeadAttention<num_heads = 2>({call})
            m = ReduceMean<keepdims = 1>(h, last)  y = Mul(m, w) }}"""
    )
    model.graph.initializer.append(numpy_helper.from_array(np.array([-1]), "last"))
    rng = np.random.default_rng(0)
    shapes = {"q": (2, 3, 8), "p": (2, 3, 2, 3, 4) if "queries" in kind else (2, 5, 2, 2, 4)}
    feeds = {
        value.name: rng.normal(size=shapes[value.name]).astype(np.float32) for value in model.graph.input
    }
    packed = torch.from_numpy(feeds["p"]).permute(3, 0, 2, 1, 4)
    query = [torch.from_numpy(feeds["q"]).reshape(2, 3, 2, 4).transpose(1, 2)] if "q" in feeds else []
    heads = torch.nn.functional.scaled_dot_product_attention(*query, *packed)
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    y = heads.transpose(1, 2).flatten(2).mean(-1, keepdim=True) * w
    target = rng.normal(size=y.shape).astype(np.float32)
    loss = torch.nn.functional.mse_loss(y, torch.from_numpy(target))
    loss.backward()
    assert w.grad is not None
    run = Run.generate(tmp_path, model, loss="mse")
    assert float(run.module(*feeds.values(), target)) == pytest.approx(loss.item(), rel=1e-5)
    np.testing.assert_allclose(run.state.parameters["w"].grad, w.grad.numpy(), rtol=1e-4)
    run.module.eval()
    assert float(run.module(*feeds.values(), target)) == pytest.approx(loss.item(), rel=1e-5)
    step = ort.InferenceSession(differentiate(model, "y", ["w"], cotangent="ct").SerializeToString())
    np.testing.assert_allclose(
        step.run(["y"], {**feeds, "ct": target})[0], y.detach().numpy(), rtol=1e-4, atol=1e-6
    )


def _computed(op: str, dtype: str, *arrays: np.ndarray) -> np.ndarray:
    """Returns the result of one node in ONNX Runtime."""
    names = ", ".join("abc"[: len(arrays)])
    inputs = ", ".join(f"{dtype}[n{name}] {name}" for name in names.split(", "))
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g ({inputs}) => ({dtype}[m] y) {{ y = {op}({names}) }}'
    )
    feeds = dict(zip(names.split(", "), arrays, strict=True))
    return np.asarray(ort.InferenceSession(model.SerializeToString()).run(None, feeds)[0])


def test_onnxruntime_rounds_sums_and_products_of_integers() -> None:
    """If this fails, `_integer_sum` and `_integer_product` of aten/reduction.py may be ReduceSum and ReduceProd."""
    numbers = np.array([2**53, 1, 1, 1])
    assert _computed("ReduceSum", "int64", numbers) != numbers.sum()
    factors = np.array([2**53 + 1, 3])
    assert _computed("ReduceProd", "int64", factors) != factors.prod()


def test_onnxruntime_finds_wrong_unique_numbers_beside_nan() -> None:
    """If this fails, `_unique_floats` of aten/searching.py may go."""
    assert len(_computed("Unique", "float", np.array([np.nan, 1, np.nan, 1], np.float32))) != 3


def test_onnxruntime_ends_at_the_smallest_integer_divided_by_minus_one() -> None:
    """If this fails, `truncated_quotient` of aten/arithmetic.py may be a Div."""
    program = """
import numpy as np, onnx, onnxruntime as ort
model = onnx.parser.parse_model(
    '<ir_version: 10, opset_import: ["": 21]> g (int64[n] a, int64[n] b) => (int64[n] y) { y = Div(a, b) }'
)
session = ort.InferenceSession(model.SerializeToString())
session.run(None, {"a": np.array([-(2**63)]), "b": np.array([-1])})
"""
    ended = subprocess.run([sys.executable, "-c", program], check=False)
    assert ended.returncode == -signal.SIGFPE


def test_onnxruntime_transforms_sizes_other_than_powers_of_two_inaccurately() -> None:
    """If this fails, `_bluestein_at_run_time` of aten/fourier.py may be a DFT of the size itself."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (float[b, n, 2] x) => (float[b, n, 2] y)
        { axis = Constant<value_int = 1>()  y = DFT(x, , axis) }"""
    )
    session = ort.InferenceSession(model.SerializeToString())
    errors = {}
    for size in (8192, 10007):
        x = np.random.default_rng(0).normal(size=(1, size, 2))
        want = np.fft.fft(x[0, :, 0] + 1j * x[0, :, 1])
        y = session.run(None, {"x": x.astype(np.float32)})[0][0]
        errors[size] = norm_relative_error(y, np.stack([want.real, want.imag], -1))
    assert errors[8192] < 1e-6
    assert errors[10007] > 1e-4
