"""Transposes become calls of a native kernel, or Reshapes."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from fusion.rewriting import ops, rewritten
from onnxtrain.fusion import TransposePass
from onnxtrain.passes import to_proto
from passes._models import run

CASES = {
    "rows": ("float[9, 12, 32] x", "y = Transpose<perm = [1, 0, 2]>(x)", {"Transpose_float": 1}),
    "columns": ("float[n, 12, 32] x", "y = Transpose<perm = [0, 2, 1]>(x)", {"Transpose_float": 1}),
    "no order": ("float[9, 12, 32] x", "y = Transpose(x)", {"Transpose_float": 1}),
    "axes of size 1": ("float[9, 1, 32] x", "y = Transpose<perm = [1, 0, 2]>(x)", {"Reshape": 1}),
    "axes of size 1 of integers": ("int64[9, 1, 32] x", "y = Transpose<perm = [1, 0, 2]>(x)", {"Reshape": 1}),
    "integers": ("int64[9, 12, 32] x", "y = Transpose<perm = [1, 0, 2]>(x)", {"Transpose": 1}),
    "short rows": ("float[20, 3] x", "y = Transpose(x)", {"Transpose": 1}),
    "short columns": ("float[3, 20] x", "y = Transpose(x)", {"Transpose": 1}),
    "rows of two axes": (
        "float[9, 12, 3, 3] x",
        "y = Transpose<perm = [1, 0, 2, 3]>(x)",
        {"Transpose_float": 1},
    ),
    "short rows of two axes": (
        "float[9, 12, 2, 2] x",
        "y = Transpose<perm = [1, 0, 2, 3]>(x)",
        {"Transpose": 1},
    ),
    "no elements": ("float[0, 1, 32] x", "y = Transpose<perm = [1, 0, 2]>(x)", {"Transpose_float": 1}),
    "an unknown size": ("float[n, 1, 32] x", "y = Transpose<perm = [1, 0, 2]>(x)", {"Transpose_float": 1}),
    "a product": ("float[9, 12, 32] x", "t = Transpose<perm = [0, 2, 1]>(x) y = MatMul(x, t)", None),
    "a second one": ("float[9, 12, 32] x", "t = Transpose(x) y = Transpose(t)", None),
}


@pytest.mark.parametrize("case", CASES)
def test_transposes(case: str) -> None:
    given, body, expected = CASES[case]
    dtype = given.split("[")[0]
    result = ["", "[a, b]", "[a, b, c]", "[a, b, c, d]"][given.count(",")]
    proto = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g ({given}) => ({dtype}{result} y) {{ {body} }}'
    )
    model = rewritten(proto, TransposePass())
    found = {kind: count for kind, count in ops(model).items() if kind != "Constant"}
    # Of two Transposes, only the last one is replaced.
    assert found == (expected or found)
    if expected is None:
        assert found["Transpose"] == 1
    sizes = [7 if size == "n" else int(size) for size in given.split("[")[1].split("]")[0].split(", ")]
    x = np.arange(np.prod(sizes), dtype=np.float32 if dtype == "float" else np.int64).reshape(sizes)
    np.testing.assert_array_equal(run(to_proto(model), {"x": x})[0], run(proto, {"x": x})[0])
