"""Reshapes to the same shape are removed."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest

from onnxtrain.passes import load_model, to_proto
from onnxtrain.passes.tidy.unchanged_shape import UnchangedShapePass
from passes._models import run


@pytest.mark.parametrize(
    ("size", "body", "expected"),
    [
        ("6, 4", "a = Neg(x) b = Reshape(a, shape) y = Exp(b)", {"Neg": 1, "Exp": 1}),
        ("6, 4", "a = Neg(x) y = Reshape(a, shape)", {"Neg": 1}),
        ("6, 4", "y = Reshape(x, shape)", {"Identity": 1}),
        ("4, 6", "a = Neg(x) y = Reshape(a, shape)", {"Neg": 1, "Reshape": 1}),
        ("n, 4", "a = Neg(x) y = Reshape(a, shape)", {"Neg": 1, "Reshape": 1}),
    ],
    ids=["inside", "an output", "an output of an input", "another shape", "an unknown size"],
)
def test_reshapes(size: str, body: str, expected: dict[str, int]) -> None:
    proto = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]> g (float[{size}] x) => (float[6, 4] y)
        <int64[2] shape = {{6, 4}}> {{ {body} }}"""
    )
    model = load_model(onnx.shape_inference.infer_shapes(proto))
    UnchangedShapePass()(model)
    assert Counter(node.op_type for node in model.graph) == expected
    x = np.arange(24, dtype=np.float32).reshape([int(s) if s.isdigit() else 6 for s in size.split(", ")])
    np.testing.assert_array_equal(run(to_proto(model), {"x": x})[0], run(proto, {"x": x})[0])
