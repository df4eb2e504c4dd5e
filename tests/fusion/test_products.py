"""Products of which native kernels know a faster way become one op."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from fusion.rewriting import ops, rewritten
from onnxtrain.fusion import ProductPass
from onnxtrain.passes import to_proto
from passes._models import run

WEIGHT_GRADIENT = """<ir_version: 10, opset_import: ["": 21]>
net (float[n, 3] x, float[n, 4] ct) => (float[3, 4] y) { t = Transpose<perm = [1, 0]>(x)  y = MatMul(t, ct) }"""


def product(shapes: dict[str, tuple[int, ...]], body: str) -> onnx.ModelProto:
    """A model y of inputs of these shapes."""
    inputs = ", ".join(f"float[{', '.join(map(str, shape))}] {name}" for name, shape in shapes.items())
    return onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> net ({inputs}) => (float[r, c] y) {{ {body} }}'
    )


@pytest.mark.parametrize(
    ("shapes", "body"),
    [
        ({"a": (5, 3), "b": (5, 4)}, "t = Transpose<perm = [1, 0]>(a)  y = MatMul(t, b)"),
        ({"a": (5, 3), "b": (5, 4)}, "t = Transpose(a)  y = MatMul(t, b)"),
        ({"a": (5, 3), "b": (5, 4)}, "y = Gemm<transA = 1>(a, b)"),
        ({"a": (5, 3), "b": (4, 5)}, "t = Transpose(b)  y = Gemm<transA = 1>(a, t)"),
        ({"a": (5, 3), "b": (4, 5)}, "t = Transpose(a)  y = Gemm<transB = 1>(t, b)"),
        ({"a": (2, 4096), "b": (4096, 3)}, "y = MatMul(a, b)"),
        ({"a": (2, 5000), "b": (3, 5000)}, "y = Gemm<transB = 1>(a, b)"),
        ({"a": (1024, 512), "b": (512, 512)}, "y = MatMul(a, b)"),
        ({"a": (1025, 300), "b": (900, 300)}, "y = Gemm<transB = 1>(a, b)"),
    ],
)
def test_becomes_one_op(shapes: dict[str, tuple[int, ...]], body: str) -> None:
    proto = product(shapes, body)
    model = rewritten(proto, ProductPass())
    assert ops(model) == {"MatrixProduct_float": 1}
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    np.testing.assert_allclose(run(to_proto(model), feeds)[0], run(proto, feeds)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("shapes", "body"),
    [
        ({"a": (3, 5), "b": (5, 4)}, "y = MatMul(a, b)"),
        ({"a": (3, 5), "b": (4, 5)}, "y = Gemm<transB = 1>(a, b)"),
        ({"a": (1023, 512), "b": (512, 512)}, "y = MatMul(a, b)"),
        ({"a": (1024, 512), "b": (512, 511)}, "y = MatMul(a, b)"),
        ({"a": (5, 3), "b": (5, 4)}, "y = Gemm<transA = 1, alpha = 0.5>(a, b)"),
        ({"a": (5, 3), "b": (5, 4), "c": (3, 4)}, "y = Gemm<transA = 1>(a, b, c)"),
        # Transposed twice.
        ({"a": (5, 3), "b": (3, 4)}, "t = Transpose(a)  y = Gemm<transA = 1>(t, b)"),
        ({"a": (2, 5, 3), "b": (2, 5, 4)}, "t = Transpose<perm = [0, 2, 1]>(a)  y = MatMul(t, b)"),
        ({"a": (5, 3), "b": (2, 5, 4)}, "t = Transpose(a)  y = MatMul(t, b)"),
    ],
)
def test_other_products_stay(shapes: dict[str, tuple[int, ...]], body: str) -> None:
    assert "MatrixProduct_float" not in ops(rewritten(product(shapes, body), ProductPass()))


def test_other_dtypes_stay() -> None:
    proto = onnx.parser.parse_model(WEIGHT_GRADIENT.replace("float[", "double["))
    assert ops(rewritten(proto, ProductPass())) == {"Transpose": 1, "MatMul": 1}


def test_a_transpose_that_others_read_stays() -> None:
    proto = onnx.parser.parse_model(
        WEIGHT_GRADIENT.replace("=> (float[3, 4] y)", "=> (float[3, 4] y, float[3, n] t)")
    )
    model = rewritten(proto, ProductPass())
    assert ops(model) == {"Transpose": 1, "MatrixProduct_float": 1}
    feeds = {"x": np.ones((2, 3), np.float32), "ct": np.ones((2, 4), np.float32)}
    assert run(to_proto(model), feeds)[0].tolist() == [[2] * 4] * 3


LAYERS = {
    "a weight as PyTorch stores it": (
        "float[64, 20] w",
        "y = Gemm<transB = 1>(x, w, b)",
        {"Linear_float": 1},
    ),
    "a weight as it is": ("float[20, 64] w", "y = Gemm(x, w, b)", {"Linear_float": 1}),
    "a transposed weight": ("float[64, 20] w", "t = Transpose(w) y = Gemm(x, t, b)", {"Linear_float": 1}),
    "a ReLU": ("float[64, 20] w", "z = Gemm<transB = 1>(x, w, b) y = Relu(z)", {"LinearRelu_float": 1}),
    "another reader": (
        "float[64, 20] w",
        "z = Gemm<transB = 1>(x, w, b) r = Relu(z) y = Add(r, z)",
        {"Linear_float": 1, "Relu": 1, "Add": 1},
    ),
    "another activation": (
        "float[20, 64] w",
        "z = Gemm(x, w, b) y = Tanh(z)",
        {"Linear_float": 1, "Tanh": 1},
    ),
}


def layer(
    weight: str, body: str, rows: str = "1500", bias: str = "64", columns: str = "64"
) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]>
        net (float[{rows}, 20] x, {weight}, float[{bias}] b) => (float[{rows}, {columns}] y) {{ {body} }}"""
    )


@pytest.mark.parametrize("case", LAYERS)
def test_a_linear_layer_of_many_rows_becomes_one_op(case: str) -> None:
    weight, body, expected = LAYERS[case]
    proto = layer(weight, body)
    model = rewritten(proto, ProductPass())
    assert ops(model) == expected
    rng = np.random.default_rng(0)
    feeds = {
        value.name: rng.standard_normal([d.dim_value for d in value.type.tensor_type.shape.dim]).astype(
            np.float32
        )
        for value in proto.graph.input
    }
    np.testing.assert_allclose(run(to_proto(model), feeds)[0], run(proto, feeds)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "proto",
    [
        layer("float[64, 20] w", "y = Gemm<transB = 1>(x, w, b)", rows="1000"),
        layer("float[64, 20] w", "y = Gemm<transB = 1>(x, w, b)", rows="n"),
        layer("float[20, 8] w", "y = Gemm(x, w, b)", bias="8", columns="8"),
        layer("float[20, 64] w", "y = Gemm<alpha = 2.0>(x, w, b)"),
        layer("float[20, 64] w", "y = Gemm<beta = 2.0>(x, w, b)"),
        layer("float[20, 64] w", "y = Gemm(x, w, b)", bias="1"),
        layer("float[20, 64] w", "y = Gemm(x, w, b)", bias="1500, 1"),
        layer("float[20, 64] w", "y = Gemm(x, w)"),
    ],
    ids=["few rows", "symbolic rows", "few columns", "alpha", "beta", "one number", "a column", "no bias"],
)
def test_other_layers_stay(proto: onnx.ModelProto) -> None:
    assert ops(rewritten(proto, ProductPass())) == {"Gemm": 1}


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "op_type"),
    [
        (64, 20, 512, "Linear_float"),
        (64, 512, 512, "Linear_float"),
        (63, 20, 512, "Gemm"),
        (64, 20, 511, "Gemm"),
        (64, 513, 512, "Gemm"),
        (64, "k", 512, "Gemm"),
    ],
)
def test_a_wide_layer_of_few_rows_becomes_one_op(
    rows: int, depth: int | str, columns: int, op_type: str
) -> None:
    proto = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]>
        net (float[{rows}, {depth}] x, float[{depth}, {columns}] w, float[{columns}] b)
            => (float[{rows}, {columns}] y) {{ y = Gemm(x, w, b) }}"""
    )
    assert ops(rewritten(proto, ProductPass())) == {op_type: 1}


def test_kept_nodes_stay() -> None:
    proto = layer("float[20, 64] w", "z = Gemm(x, w, b) y = Relu(z)")
    assert ops(rewritten(proto, ProductPass({"z"}))) == {"Gemm": 1, "Relu": 1}
    assert ops(rewritten(proto, ProductPass({"y"}))) == {"Linear_float": 1, "Relu": 1}
