"""MaxUnpool into sizes larger than its own, where ONNX's reference and ONNX Runtime do not write to the same places."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest

from autodiff.reference import ReferenceEvaluator
from onnxtrain.autodiff import differentiate

Feeds = dict[str, np.ndarray]
MODEL = """<ir_version: 10, opset_import: ["": 21]>
    net (float[1,2,2,2] x, int64[1,2,2,2] i, int64[4] shape, float[N,C,H,W] w) => (float loss) {
        y = MaxUnpool<kernel_shape=[2, 2], strides=[2, 2]>(x, i, shape)
        z = Mul(y, w)
        loss = ReduceSum<keepdims=0>(z)
    }"""


def on_onnxruntime(model: onnx.ModelProto, outputs: list[str], feeds: Feeds) -> np.ndarray:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(outputs, feeds)[0]


def by_reference(model: onnx.ModelProto, outputs: list[str], feeds: Feeds) -> np.ndarray:
    return ReferenceEvaluator(model).run(outputs, feeds)[0]


@pytest.mark.parametrize("run", [on_onnxruntime, by_reference])
def test_each_element_has_the_cotangent_of_where_it_goes(
    run: Callable[[onnx.ModelProto, list[str], Feeds], np.ndarray],
) -> None:
    """The loss is linear: its derivative in an element is the loss of that element alone."""
    model, rng = onnx.parser.parse_model(MODEL), np.random.default_rng(0)
    places = np.array([5, 2, 8, 15, 16, 22, 27, 29]).reshape(1, 2, 2, 2)
    feeds = {
        "i": places,
        "shape": np.array([1, 2, 5, 6]),
        "w": rng.uniform(0.5, 1.5, (1, 2, 5, 6)).astype(np.float32),
    }
    expected = [
        run(model, ["loss"], {**feeds, "x": unit.reshape(1, 2, 2, 2)}) for unit in np.eye(8, dtype=np.float32)
    ]
    x = rng.normal(size=(1, 2, 2, 2)).astype(np.float32)
    gradient = run(differentiate(model, "loss", ["x"]), ["x_grad"], {**feeds, "x": x})
    np.testing.assert_allclose(gradient.reshape(-1), expected, rtol=1e-6)
