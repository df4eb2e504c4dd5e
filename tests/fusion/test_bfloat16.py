"""Products of matrices as ops that round their factors to bfloat16, and what else the passes of bfloat16 rewrite."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from fusion.rewriting import ops
from onnxtrain.autodiff import differentiate
from onnxtrain.emitter import Emitter
from onnxtrain.functions import gelu_gradient
from onnxtrain.fusion import Bfloat16ProductPass, Bfloat16RoundingPass, NativeOpsPass, WideCompositesPass
from onnxtrain.passes import infer_shapes, load_model, to_proto, widen_narrow_floats
from passes._models import normal

HEADER = """<ir_version: 10, opset_import: ["": 21]>
net """
ROUNDED = "{name}n = Cast<to = 16>({name})  {name}r = Cast<to = 1>({name}n)"


def net(text: str) -> ir.Model:
    return infer_shapes(load_model(onnx.parser.parse_model(HEADER + text)))


def bfloat16(x: np.ndarray) -> np.ndarray:
    """The nearest numbers of bfloat16."""
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def on_stock(model: ir.Model, **feeds: np.ndarray) -> np.ndarray:
    """The output of the bodies, with all that ONNX Runtime optimizes."""
    session = ort.InferenceSession(to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[0]


@pytest.mark.parametrize(
    ("body", "left", "right", "op"),
    [
        ("y = MatMul(a, b)", (5, 40), (40, 6), "MatMulBfloat16"),
        ("t = Transpose<perm = [1, 0]>(a) y = MatMul(t, b)", (40, 5), (40, 6), "MatMulPermutedLeftBfloat16"),
        ("t = Transpose<perm = [1, 0]>(b) y = MatMul(a, t)", (5, 40), (6, 40), "MatMulPermutedRightBfloat16"),
        (
            "s = Transpose<perm = [1, 0]>(a) t = Transpose<perm = [1, 0]>(b) y = MatMul(s, t)", (40, 5),
            (6, 40), "MatMulPermutedBothBfloat16",
        ),
        (
            "s = Transpose<perm = [1, 0]>(a) t = Transpose<perm = [1, 0]>(s) y = MatMul(t, b)", (5, 40),
            (40, 6), "MatMulBfloat16",
        ),
        (
            "s = Transpose<perm = [0, 2, 1, 3]>(a) t = Transpose<perm = [0, 1, 3, 2]>(s) y = MatMul(t, b)",
            (2, 40, 3, 5), (40, 6), "MatMulPermutedLeftBfloat16",
        ),
        ("y = Gemm<transB = 1, alpha = 0.5>(a, b)", (5, 40), (6, 40), "GemmBfloat16"),
        ("t = Transpose<perm = [1, 0]>(a) y = Gemm<transB = 1>(t, b)", (40, 5), (6, 40), "GemmBfloat16"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.endswith("16") else "",
)  # fmt: skip
def test_a_product_and_what_transposes_its_factors_become_one_op(
    body: str, left: tuple[int, ...], right: tuple[int, ...], op: str
) -> None:
    text = f"(float{list(left)} a, float{list(right)} b) => (float[...] y) {{ {body} }}".replace(
        "[...]", str(["d"] * max(len(left), len(right))).replace("'", "")
    )
    plain, model = net(text), net(text)
    assert Bfloat16ProductPass()(model).modified
    assert ops(model) == {f"{op}_float": 1}
    onnx.checker.check_model(to_proto(model))
    a, b = normal(*left), normal(*right, seed=1)
    exact = on_stock(plain, a=bfloat16(a), b=bfloat16(b))
    np.testing.assert_allclose(on_stock(model, a=a, b=b), exact, rtol=1e-5, atol=1e-5)
    assert not np.allclose(on_stock(plain, a=a, b=b), exact, rtol=1e-5, atol=1e-5)


def test_an_order_in_which_no_numbers_of_a_matrix_lie_side_by_side_stays() -> None:
    model = net(
        "(float[5, 3, 4] a, float[3, 6] b) => (float[4, 5, 6] y)"
        "{ t = Transpose<perm = [2, 0, 1]>(a) y = MatMul(t, b) }"
    )
    Bfloat16ProductPass()(model)
    assert ops(model) == {"Transpose": 1, "MatMulBfloat16_float": 1}


def test_a_transpose_that_others_read_stays_for_them() -> None:
    model = net(
        "(float[4, 5] a, float[4, 6] b) => (float[5, 6] y, float[5, 4] z)"
        "{ t = Transpose<perm = [1, 0]>(a) y = MatMul(t, b) z = Exp(t) }"
    )
    Bfloat16ProductPass()(model)
    assert ops(model) == {"Transpose": 1, "Exp": 1, "MatMulPermutedLeftBfloat16_float": 1}


@pytest.mark.parametrize("dtype", ["double", "float16", "int32"])
def test_products_of_other_types_stay(dtype: str) -> None:
    model = net(f"({dtype}[4, 5] a, {dtype}[5, 6] b) => ({dtype}[4, 6] y) {{ y = MatMul(a, b) }}")
    assert not Bfloat16ProductPass()(model).modified
    assert ops(model) == {"MatMul": 1}


def test_a_gemm_keeps_its_summand_and_scales() -> None:
    text = (
        "(float[40, 5] a, float[40, 6] b, float[6] c) => (float[5, 6] y)"
        "{ y = Gemm<transA = 1, alpha = 0.5, beta = -2.0>(a, b, c) }"
    )
    plain, model = net(text), net(text)
    Bfloat16ProductPass()(model)
    a, b, c = normal(40, 5), normal(40, 6, seed=1), normal(6, seed=2)
    exact = on_stock(plain, a=bfloat16(a), b=bfloat16(b), c=c)
    np.testing.assert_allclose(on_stock(model, a=a, b=b, c=c), exact, rtol=1e-5, atol=1e-5)


def test_products_in_subgraphs() -> None:
    model = net(
        """(bool q, float[4, 5] a, float[5, 6] b) => (float[4, 6] y) {
  y = If(q) <then_branch = yes () => (float[4, 6] p) { p = MatMul(a, b) },
             else_branch = no () => (float[4, 6] r) { m = MatMul(a, b) r = Neg(m) }>
}"""
    )
    Bfloat16ProductPass()(model)
    found = Counter(node.op_type for node in ir.traversal.RecursiveGraphIterator(model.graph))
    assert found == {"If": 1, "MatMulBfloat16_float": 2, "Neg": 1}
    a, b = normal(4, 5), normal(5, 6, seed=1)
    exact = bfloat16(a) @ bfloat16(b)
    np.testing.assert_allclose(on_stock(model, q=np.array(False), a=a, b=b), -exact, rtol=1e-5, atol=1e-6)


def test_of_products_of_rounded_factors_the_roundings_become_part() -> None:
    """Also behind views and transposes, as casts in autocast are; a product of other factors stays."""
    model = net(
        f"""(float[6, 5] a, float[2, 3, 5] b) => (float[6, 6] y) {{
  {ROUNDED.format(name="a")}
  {ROUNDED.format(name="b")}
  shape = Constant<value = int64[2] {{6, 5}}>()
  v = Reshape(br, shape)
  t = Transpose<perm = [1, 0]>(v)
  p = MatMul(ar, t)
  y = MatMul(p, p)
}}"""
    )
    a, b = normal(6, 5), normal(2, 3, 5, seed=1)
    before = on_stock(model, a=a, b=b)
    Bfloat16ProductPass(of_rounded=True)(model)
    assert ops(model) == {"Constant": 1, "Reshape": 1, "MatMulPermutedRightBfloat16_float": 1, "MatMul": 1}
    np.testing.assert_allclose(on_stock(model, a=a, b=b), before, rtol=1e-5)


def test_casts_to_bfloat16_and_back_become_one_op() -> None:
    model = net(
        f"""(float[6] a, float[6] b) => (float[6] y, bfloat16[6] bn) {{
  {ROUNDED.format(name="a")}
  {ROUNDED.format(name="b")}
  y = Add(ar, br)
}}"""
    )
    Bfloat16RoundingPass()(model)
    assert ops(model) == {"RoundToBfloat16_float": 1, "Cast": 2, "Add": 1}
    a, b = normal(6), normal(6, seed=1)
    session = ort.InferenceSession(to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(["y"], {"a": a, "b": b})
    np.testing.assert_array_equal(found, bfloat16(a) + bfloat16(b))


def test_composites_of_bfloat16_round_once() -> None:
    kind = ir.DataType.BFLOAT16
    inputs = [ir.Value(name=name, type=ir.TensorType(kind), shape=ir.Shape([64])) for name in ("ct", "x")]
    graph = ir.Graph(inputs, [], nodes=[], opset_imports={"": 21}, name="net")
    model = ir.Model(graph, ir_version=10)
    op = Emitter(graph, functions=model.functions)
    y = op.call(gelu_gradient, *inputs)
    y.name, y.shape, y.type = "y", inputs[0].shape, ir.TensorType(kind)
    graph.outputs.append(y)
    assert WideCompositesPass()(model).modified
    wide = widen_narrow_floats(model)
    assert ops(wide) == {"Cast": 3, "GeluGradient_float": 1}
    assert [value.name for value in wide.graph.outputs] == ["y"]
    onnx.checker.check_model(to_proto(wide), full_check=True)


def test_convolutions_and_their_gradients() -> None:
    """Depthwise ones stay. Beside the same on rounded numbers."""
    model = net(
        """(float[2, 6, 9] x, float[4, 6, 3] w, float[4] b, float[4, 1, 3] v) => (float[2, 4, 5] y) {
  h = Conv<strides = [1], pads = [1, 1]>(x, w, b)
  y = Conv<group = 4, strides = [2], pads = [1, 1]>(h, v)
}"""
    )
    joint = ir.from_proto(differentiate(to_proto(model), of="y", wrt=["w", "v"], cotangent="ct"))
    NativeOpsPass()(joint)
    plain = to_proto(joint)
    assert Bfloat16ProductPass()(joint).modified
    onnx.checker.check_model(to_proto(joint))
    called = {op for op in ops(joint) if "Convolution" in op}
    assert called == {
        *("DepthwiseConvolution0_float", "ConvolutionGradient0_float"),
        *("ConvolutionBfloat16_float", "ConvolutionBfloat16WeightGradient0_float"),
    }
    feeds = {
        "x": normal(2, 6, 9),
        "w": normal(4, 6, 3),
        "b": normal(4),
        "v": normal(4, 1, 3),
        "ct": normal(2, 4, 5),
    }
    exact, rounded = (
        ort.InferenceSession(proto.SerializeToString()).run(None, feeds) for proto in (plain, to_proto(joint))
    )
    for near, far in zip(rounded, exact, strict=True):
        assert 0 < np.abs(near - far).max() <= 2**-6 * np.abs(far).max()
