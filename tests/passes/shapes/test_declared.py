"""Shapes that a file declares and its nodes do not have: trained as ONNX Runtime runs them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

import models
from onnxtrain import Trainer, check_gradients, differentiate
from onnxtrain.passes import canonicalize, load_model

DIMS: list[list[int | str]] = [["batch", 7], ["batch", 3, 1], ["batch"], [5, 3], [0, 3], [7, 7], []]


def declaring(dims: list[int | str], name: str) -> onnx.ModelProto:
    """`models.mlp` that declares other dimensions of its output `logits`, or of the value `h` in it."""
    model = models.mlp()
    info = helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, dims)
    if name == "logits":
        model.graph.output[0].CopyFrom(info)
    else:
        model.graph.value_info.append(info)
    return model


def outputs(model: onnx.ModelProto, names: list[str], **inputs: Any) -> list[Any]:
    options = ort.SessionOptions()
    options.log_severity_level = 4  # it warns of the declaration
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(names, inputs)


@pytest.mark.parametrize("name", ["logits", "h"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_a_wrong_declaration_is_not_built_upon(dims: list[int | str], name: str) -> None:
    model = declaring(dims, name)
    rng = np.random.default_rng(0)
    x, ct = rng.standard_normal((6, 4)).astype("f4"), rng.standard_normal((6, 3)).astype("f4")
    weights = [tensor.name for tensor in model.graph.initializer]
    gradients = [
        outputs(
            differentiate(each, of="logits", wrt=weights, cotangent="ct"),
            [f"{weight}_grad" for weight in weights],
            x=x,
            ct=ct,
        )
        for each in (model, models.mlp())
    ]
    for found, expected in zip(*gradients, strict=True):
        np.testing.assert_array_equal(found, expected)
    trainer = Trainer(model, "mse", "sgd")
    trainer.fit(x, ct, epochs=1, batch_size=4, verbose=False)
    assert trainer.predict(x).shape == outputs(model, ["logits"], x=x)[0].shape
    assert {check.verdict for check in check_gradients(model)} == {"agrees"}


def test_declarations_stay_where_inference_knows_less() -> None:
    text = """<ir_version: 10, opset_import: ["": 21, "com.example": 1]>
        g (float[n, 4] x, int64[2] s) => (float[rows, 8] y)
        <float[k, 8] u> { u = com.example.Unknown(x)  v = Reshape(x, s)  y = Add(u, v) }"""
    model = canonicalize(load_model(onnx.parser.parse_model(text)))
    assert [str(value.shape) for value in model.graph.outputs] == ["[rows,8]"]
    assert str(next(node.outputs[0].shape for node in model.graph if node.op_type == "Unknown")) == "[k,8]"
