"""A model that mixes dtypes is refused by the name of the node, as ONNX Runtime refuses it."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from onnxtrain import Trainer
from onnxtrain.errors import ModelError
from onnxtrain.passes import canonicalize, load_model

MIXED = {
    "MatMul": "y = MatMul(x, w)",
    "Add, unnamed": "a = Add(x, x)  y = Mul(w, a)",
    "Concat": "y = Concat<axis = 0>(x, x, w)",
    "in a branch": """s = ReduceMax<keepdims = 0>(x)  z = Constant<value_float = 0.0>()  k = Greater(s, z)
        y = If(k) <then_branch = t () => (float[m, 2] a) { a = Add(x, w) }, else_branch = e () => (float[m, 2] b)
        { b = Identity(x) }>""",
}


def model(body: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]> g (float[n, 2] x) => (float[m, 2] y)
        <double[2, 2] w = {{1, 2, 3, 4}}> {{ {body} }}"""
    )


@pytest.mark.parametrize("body", MIXED.values(), ids=MIXED)
def test_mixed_dtypes_are_refused(body: str) -> None:
    with pytest.raises(Exception, match=r"(?i)type"):
        ort.InferenceSession(model(body).SerializeToString())
    with pytest.raises(ModelError, match=r"'x' is FLOAT and 'w' is DOUBLE|'w' is DOUBLE and '[xa]' is FLOAT"):
        canonicalize(load_model(model(body)))


def test_the_trainer_says_what_to_do() -> None:
    with pytest.raises(
        ModelError, match=r"MatMul node that computes 'y'.*Convert one of them with a Cast node"
    ):
        Trainer(model("y = MatMul(x, w)"), loss="mse")


def test_ops_that_mix_dtypes_by_right_are_left_alone() -> None:
    body = "i = Constant<value_ints = [0, 1]>()  c = Cast<to = 1>(w)  p = Pow(x, w)  g = Gather(p, i)  y = Mul(g, c)"
    proto = model(body)
    canonicalize(load_model(proto))
    assert np.isfinite(
        ort.InferenceSession(proto.SerializeToString()).run(None, {"x": np.ones((2, 2), "f")})[0]
    ).all()
