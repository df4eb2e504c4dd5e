"""The L2 Normalizer of ai.onnx.ml, whose kernel reads what it has written where it computes in place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx.helper import make_tensor_value_info

from onnxtrain import Trainer, differentiate

A = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)


def model(norm: str, *, shapes: bool = False) -> onnx.ModelProto:
    """A layer, the Normalizer, and a layer; with the shapes of what is in between if asked for."""
    made = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17, "ai.onnx.ml": 1]>
        g (float[n, 5] x) => (float[n, 1] y) <float[3, 1] w = {{1, -2, 3}}> {{
            h = MatMul(x, a)  z = ai.onnx.ml.Normalizer<norm = "{norm}">(h)  y = MatMul(z, w) }}""")
    made.graph.initializer.append(onnx.numpy_helper.from_array(A, "a"))
    if shapes:
        made.graph.value_info.extend(make_tensor_value_info(name, 1, ["n", 3]) for name in "hz")
    return made


def samples() -> np.ndarray:
    x = np.random.default_rng(1).standard_normal((6, 5)).astype(np.float32)
    x[2] = 0
    return x


def expected(norm: str, x: np.ndarray) -> np.ndarray:
    h = x.astype(np.float64) @ A
    size = {"L2": np.sqrt((h**2).sum(1)), "L1": np.abs(h).sum(1), "MAX": h.max(1)}[norm][:, None]
    return h / np.where(size == 0, 1, size) @ [[1.0], [-2], [3]]


@pytest.mark.parametrize("norm", ["L2", "L1", "MAX"])
@pytest.mark.parametrize("shapes", [False, True])
def test_predictions_and_exports_are_those_of_numpy(norm: str, shapes: bool, tmp_path: Path) -> None:
    x = samples()
    trainer = Trainer(model(norm, shapes=shapes), "mse", requires_grad=["w"])
    trainer.export(tmp_path / "out.onnx")
    exported = ort.InferenceSession(tmp_path / "out.onnx").run(None, {"x": x})[0]
    want = expected(norm, x)
    np.testing.assert_allclose(trainer.predict(x), want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(exported, want, rtol=1e-4, atol=1e-5)
    assert trainer.evaluate(x, want.astype(np.float32))["loss"] < 1e-10


@pytest.mark.parametrize("kind", ["float", "double", "int32", "int64"])
def test_other_dtypes_and_vectors_are_normalised_as_the_file_does(kind: str) -> None:
    for dims, x in (("[n, 3]", np.array([[3, -4, 0], [0, 0, 0]])), ("[3]", np.array([2, -1, 2]))):
        given = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17, "ai.onnx.ml": 1]>
            g ({kind}{dims} x, float[3] w) => (float{dims} y, float z) {{
                y = ai.onnx.ml.Normalizer<norm = "L2">(x)  p = Mul(y, w)  z = ReduceSum<keepdims = 0>(p) }}""")
        feeds = {
            "x": x.astype(kind.replace("float", "float32").replace("double", "float64")),
            "w": np.ones(3, "f4"),
        }
        want = ort.InferenceSession(given.SerializeToString()).run(["y"], feeds)[0]
        step = ort.InferenceSession(differentiate(given, of="z", wrt=["w"]).SerializeToString())
        np.testing.assert_allclose(step.run(["y"], feeds)[0], want, rtol=1e-6)


def test_onnxruntime_computes_l2_wrongly_in_place() -> None:
    """If this fails, a new ONNX Runtime computes it: NormalizerPass may go."""
    x = samples()
    wrong = ort.InferenceSession(model("L2", shapes=True).SerializeToString()).run(None, {"x": x})[0]
    assert np.abs(wrong - expected("L2", x)).max() > 1e-3
