"""Fourier transforms of older opsets, and beside what shape inference says of them."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

from onnxtrain import differentiate
from tolerances import NORM_RELATIVE, norm_relative_error


def _gradient(text: str, of_x: np.ndarray) -> np.ndarray:
    step = differentiate(onnx.parser.parse_model(text), "loss", ["x"])
    session = ort.InferenceSession(step.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(["x_grad"], {"x": of_x})[0]


@pytest.mark.parametrize(("attribute", "axis"), [("", 1), ("axis=2", 2), ("axis=-2", 2)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_axis_that_is_an_attribute(attribute: str, axis: int, dtype: type) -> None:
    x = np.random.default_rng(0).uniform(-1, 1, (2, 5, 6, 1)).astype(dtype)
    elem = "float" if dtype is np.float32 else "double"
    got = _gradient(
        f"""<ir_version: 8, opset_import: ["": 17]>
        g ({elem}[2,5,6,1] x) => ({elem} loss) {{
          y = DFT<{attribute}>(x)  squares = Mul(y, y)  fourth = Mul(squares, squares)
          loss = ReduceSum<keepdims=0>(fourth) }}""".replace("<>", ""),
        x,
    )
    twin = torch.from_numpy(x.astype(np.float64)).requires_grad_()
    torch.view_as_real(torch.fft.fft(twin[..., 0], dim=axis)).pow(4).sum().backward()
    assert got.dtype == dtype
    assert norm_relative_error(got, twin.grad.numpy()) <= NORM_RELATIVE[np.dtype(dtype)]


def test_stft_without_the_attribute_and_without_a_rank() -> None:
    """Shape inference takes the default of `onesided` for 0; the rank of what a Loop or Reshape gives may be open."""
    x = np.random.default_rng(1).uniform(-1, 1, 24).astype(np.float32)
    got = _gradient(
        """<ir_version: 8, opset_import: ["": 17]>
        g (float[24] x) => (float loss) <int64 step = {3}, int64 size = {6}> {
          form = Constant<value_ints = [2, 12, 1]>()  signal = Reshape(x, form)
          y = STFT(signal, step, , size)  squares = Mul(y, y)  fourth = Mul(squares, squares)
          loss = ReduceSum<keepdims=0>(fourth) }""",
        x,
    )
    twin = torch.from_numpy(x.astype(np.float64)).requires_grad_()
    torch.view_as_real(torch.fft.rfft(twin.reshape(2, 12).unfold(1, 6, 3))).pow(4).sum().backward()
    assert norm_relative_error(got, twin.grad.numpy()) <= NORM_RELATIVE[np.dtype(np.float32)]
