"""Functions that are inlined keep their values apart from those of bodies beside them."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser

from onnxtrain.passes import canonicalize, load_model, to_proto
from passes._models import normal, run

BESIDE_A_BODY = """<ir_version: 10, opset_import: ["": 21, "own": 1]>
    net (float[3] x, bool which) => (float[3] y) {
        doubled = own.twice(x)
        y = If (which) <
            then_branch = upper () => (float[3] a) { sum = Add(doubled, x)  a = Neg(sum) },
            else_branch = lower () => (float[3] b) { sum = Mul(doubled, x)  b = Abs(sum) }
        >
    }
    <domain: "own", opset_import: ["": 21]>
    twice (v) => (w) { sum = Add(v, v)  w = Identity(sum) }"""


def test_a_value_of_a_function_has_the_name_of_one_in_a_body() -> None:
    model = onnx.parser.parse_model(BESIDE_A_BODY)
    onnx.checker.check_model(model)
    inlined = to_proto(canonicalize(load_model(model)))
    onnx.checker.check_model(inlined)
    for which in (False, True):
        given = {"x": normal(3), "which": np.array(which)}
        np.testing.assert_array_equal(run(inlined, given)[0], run(model, given)[0])
