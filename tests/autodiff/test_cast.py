"""Casts between dtypes: the cotangent returns in the dtype of the primal, and integers stop it."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from onnxtrain.autodiff import differentiate


def _gradient(text: str, x: np.ndarray) -> np.ndarray:
    model = differentiate(onnx.parser.parse_model(text), of="y", wrt=["x"])
    onnx.checker.check_model(model, full_check=True)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(["x_grad"], {"x": x})[0]


@pytest.mark.parametrize("source", ["float16", "float", "double"])
@pytest.mark.parametrize("target", [1, 11], ids=["to-float", "to-double"])
@pytest.mark.parametrize("node", ["Cast<to={target}>(x)", "CastLike(x, like)"])
def test_cotangent_has_the_dtype_of_the_primal(source: str, target: int, node: str) -> None:
    name = {1: "float", 11: "double"}[target]
    x = np.array(
        [-1.5, 0.25, 3.0], {"float16": np.float16, "float": np.float32, "double": np.float64}[source]
    )
    gradient = _gradient(
        f"""<ir_version: 10, opset_import: ["": 21]> g ({source}[n] x) => ({name} y) {{
            like = Constant<value = {name}[1] {{1}}>()  c = {node.format(target=target)}
            s = Mul(c, c)  y = ReduceSum<keepdims=0>(s) }}""",
        x,
    )
    assert gradient.dtype == x.dtype
    np.testing.assert_array_equal(gradient, 2 * x)


def test_integers_carry_no_cotangent() -> None:
    """d/dx sum(x * floor(x)) through a cast to integers is floor(x), as if it were detached."""
    gradient = _gradient(
        """<ir_version: 10, opset_import: ["": 21]> g (float[n] x) => (float y) {
            i = Cast<to=7>(x)  f = Cast<to=1>(i)  p = Mul(x, f)  y = ReduceSum<keepdims=0>(p) }""",
        np.array([1.5, 2.25, 3.75], np.float32),
    )
    np.testing.assert_array_equal(gradient, np.array([1.0, 2.0, 3.0], np.float32))
