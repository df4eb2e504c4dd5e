"""The driver: what it is asked for, what it refuses, and that it does nothing twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from onnxtrain.autodiff import Signature, defvjp, differentiate, nondifferentiable, vjp
from onnxtrain.autodiff._registry import NOT_YET, RULES, not_yet
from onnxtrain.errors import DifferentiationError, NoGradientRule, RuleDefinitionError
from runtimes import computes_float64
from tolerances import norm_relative_error


def parse(body: str, *, opset: int = 21) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> g {body}')


def run(model: onnx.ModelProto, outputs: Sequence[str], **feeds: np.ndarray) -> list[np.ndarray]:
    if any(node.op_type == "Cos" for node in model.graph.node) and not computes_float64("Cos"):
        pytest.skip(f"onnxruntime {ort.__version__} has no Cos of float64")
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(list(outputs), {name: np.asarray(value) for name, value in feeds.items()})


def doubles(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64)


SQUARES = parse(
    "(double[n] x, double[n] unused) => (double y) { q = Mul(x, x)  y = ReduceSum<keepdims=0>(q) }"
)


# What is asked for


def test_one_value_used_twice_by_one_node() -> None:
    (gradient,) = run(differentiate(SQUARES, "y", ["x"]), ["x_grad"], x=doubles(1, -3), unused=doubles(0, 0))
    assert gradient.tolist() == [2.0, -6.0]


def test_one_value_used_by_several_nodes() -> None:
    model = parse("""(double[n] x) => (double y)
        { a = Sin(x)  b = Exp(x)  c = Mul(a, x)  d = Add(b, c)  e = Add(d, x)
          y = ReduceSum<keepdims=0>(e) }""")
    x = doubles(0.3, -1.2)
    (gradient,) = run(differentiate(model, "y", ["x"]), ["x_grad"], x=x)
    np.testing.assert_allclose(gradient, np.exp(x) + np.sin(x) + x * np.cos(x) + 1, rtol=1e-14)


def test_unused_entry_of_wrt_gets_zeros_of_its_shape_and_dtype() -> None:
    model = differentiate(SQUARES, "y", ["unused", "x"])
    zeros, gradient = run(model, ["unused_grad", "x_grad"], x=doubles(1, 2), unused=doubles(5, 6))
    assert zeros.dtype == np.float64
    assert zeros.tolist() == [0.0, 0.0]
    assert gradient.tolist() == [2.0, 4.0]


def test_parameter_behind_a_nondifferentiable_op_gets_zeros() -> None:
    model = parse("(double[2] x) => (double y) { r = Round(x)  y = ReduceSum<keepdims=0>(r) }")
    (gradient,) = run(differentiate(model, "y", ["x"]), ["x_grad"], x=doubles(1.2, 3.4))
    assert gradient.tolist() == [0.0, 0.0]


def test_parameters_are_initializers() -> None:
    model = parse("""(double[2] x) => (double y) <double[2] w = {3.0, 4.0}>
        { p = Mul(x, w)  y = ReduceSum<keepdims=0>(p) }""")
    (gradient,) = run(differentiate(model, "y", ["w"]), ["w_grad"], x=doubles(1.5, 2.5))
    assert gradient.tolist() == [1.5, 2.5]


def test_gradients_that_are_one_and_the_same_value() -> None:
    model = parse("(double x, double c) => (double y) { y = Add(x, c) }")
    gradients = run(
        differentiate(model, "y", ["x", "c"]), ["x_grad", "c_grad"], x=doubles(2)[0], c=doubles(3)[0]
    )
    assert [gradient.tolist() for gradient in gradients] == [1.0, 1.0]


def test_value_with_respect_to_itself() -> None:
    (gradient,) = run(differentiate(SQUARES, "y", ["y"]), ["y_grad"], x=doubles(1, 2), unused=doubles(5, 6))
    assert gradient.tolist() == 1.0


def test_intermediate_values_on_either_end() -> None:
    model = parse("""(double[n] x) => (double z)
        { a = Mul(x, x)  b = Sin(a)  y = ReduceSum<keepdims=0>(b)  z = Exp(y) }""")
    result = differentiate(model, "y", ["a"])
    assert [output.name for output in result.graph.output] == ["z", "y", "a_grad"]
    x = doubles(0.5, 2.0)
    (gradient,) = run(result, ["a_grad"], x=x)
    np.testing.assert_allclose(gradient, np.cos(x**2), rtol=1e-14)


def test_leaf_that_depends_on_another_leaf() -> None:
    """`wrt` may name both ends of a path; each gets its whole gradient."""
    model = parse("(double[n] x) => (double y) { a = Mul(x, x)  b = Sin(a)  y = ReduceSum<keepdims=0>(b) }")
    x = doubles(0.5, 2.0)
    of_a, of_x = run(differentiate(model, "y", ["a", "x"]), ["a_grad", "x_grad"], x=x)
    np.testing.assert_allclose(of_a, np.cos(x**2), rtol=1e-14)
    np.testing.assert_allclose(of_x, 2 * x * np.cos(x**2), rtol=1e-14)


def test_cotangent_input_gives_the_vector_jacobian_product() -> None:
    model = parse("(double[n] x) => (double[n] y) { y = Sin(x) }")
    result = differentiate(model, "y", ["x"], cotangent="ct")
    assert [value.name for value in result.graph.input] == ["x", "ct"]
    x, ct = doubles(0.1, 0.2, 0.3), doubles(1, -2, 3)
    (gradient,) = run(result, ["x_grad"], x=x, ct=ct)
    np.testing.assert_allclose(gradient, ct * np.cos(x), rtol=1e-14)


def test_taken_output_name_gets_a_number() -> None:
    model = parse(
        "(double[2] x, double[2] x_grad) => (double y) { p = Mul(x, x_grad)  y = ReduceSum<keepdims=0>(p) }"
    )
    result = differentiate(model, "y", ["x"])
    assert [output.name for output in result.graph.output] == ["y", "x_grad_1"]


def test_model_in_model_out() -> None:
    given = ir.from_proto(SQUARES)
    assert isinstance(differentiate(given, "y", ["x"]), ir.Model)
    assert isinstance(differentiate(SQUARES, "y", ["x"]), onnx.ModelProto)


def test_path_is_taken(tmp_path) -> None:
    onnx.save(SQUARES, tmp_path / "m.onnx")
    result = differentiate(tmp_path / "m.onnx", "y", ["x"])
    assert isinstance(result, onnx.ModelProto)
    assert result.graph.output[1].name == "x_grad"


def test_input_objects_are_not_changed() -> None:
    proto, given = onnx.ModelProto(), ir.from_proto(SQUARES)
    proto.CopyFrom(SQUARES)
    before = ir.to_proto(given).SerializeToString(deterministic=True)
    differentiate(proto, "y", ["x"])
    differentiate(given, "y", ["x"])
    assert proto == SQUARES
    assert ir.to_proto(given).SerializeToString(deterministic=True) == before


def test_gradients_have_the_declared_shape_and_dtype() -> None:
    result = differentiate(SQUARES, "y", ["x"])
    gradient = result.graph.output[1].type.tensor_type
    assert gradient.elem_type == onnx.TensorProto.DOUBLE
    assert [dim.dim_param for dim in gradient.shape.dim] == ["n"]


def test_output_that_only_the_rule_needs_is_added_to_the_forward_node() -> None:
    """The final state of an LSTM alone, as torch's `h_n`: the rule reads all states."""
    model = parse("""(float[time, 2, 3] x, float[1, 16, 3] w, float[1, 16, 4] r) => (float y)
        { h = LSTM<hidden_size=4>(x, w, r)  y = ReduceSum<keepdims=0>(h) }""")
    del model.graph.node[0].output[:]
    model.graph.node[0].output.extend(["", "h"])
    rng = np.random.default_rng(2)
    shapes = {"x": (5, 2, 3), "w": (1, 16, 3), "r": (1, 16, 4)}
    feeds = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    got = run(differentiate(model, "y", ["x", "w", "r"]), ["x_grad", "w_grad", "r_grad"], **feeds)

    layer = torch.nn.LSTM(3, 4, bias=False).double()
    order = [0, 2, 3, 1]  # ONNX keeps the gates as i, o, f, c; torch as i, f, g, o
    blocks = {name: torch.tensor(feeds[name][0], dtype=torch.float64).chunk(4) for name in "wr"}
    with torch.no_grad():
        for name, parameter in zip("wr", (layer.weight_ih_l0, layer.weight_hh_l0), strict=True):
            parameter.copy_(torch.cat([blocks[name][k] for k in order]))
    x = torch.tensor(feeds["x"], dtype=torch.float64, requires_grad=True)
    layer(x)[1][0].sum().backward()
    back = [order.index(k) for k in range(4)]
    weights = [
        torch.cat([p.grad.chunk(4)[k] for k in back])[None] for p in (layer.weight_ih_l0, layer.weight_hh_l0)
    ]
    for value, want in zip(got, [x.grad, *weights], strict=True):
        assert norm_relative_error(value, want.numpy()) <= 2e-6


# What it does not do


def test_forward_nodes_are_not_computed_twice() -> None:
    model = parse("""(float[b, 4] x, float[4, 3] w, float[3] v) => (float y)
        { a = Exp(x)  b1 = Tanh(a)  c = Sigmoid(b1)  d = Softmax(c)  e = Mul(d, d)
          y = ReduceSum<keepdims=0>(e) }""")
    result = differentiate(model, "y", ["x"])
    counts = Counter(node.op_type for node in result.graph.node)
    for op_type in ("Exp", "Tanh", "Sigmoid", "Softmax"):
        assert counts[op_type] == 1


def test_frozen_values_cost_nothing() -> None:
    model = parse("(double[n] x, double[n] w) => (double y) { p = Mul(x, w)  y = ReduceSum<keepdims=0>(p) }")
    forward = Counter(node.op_type for node in model.graph.node)
    both, one = (
        Counter(node.op_type for node in differentiate(model, "y", wrt).graph.node)
        for wrt in (["x", "w"], ["x"])
    )
    assert one["Mul"] == forward["Mul"] + 1
    assert both["Mul"] == forward["Mul"] + 2


def test_dead_branches_get_no_gradient_nodes() -> None:
    model = parse(
        "(double[n] x) => (double y, double[n] s) { s = Sin(x)  q = Mul(x, x)  y = ReduceSum<keepdims=0>(q) }"
    )
    assert "Cos" not in {node.op_type for node in differentiate(model, "y", ["x"]).graph.node}


# Shapes known at run time only


@pytest.mark.parametrize("small", [(1, 3), (2, 1), (1, 1), (2, 3)])
def test_broadcasting_found_at_run_time(small: tuple[int, int]) -> None:
    model = parse(
        "(double[p, q] x, double[r, s] w) => (double y) { m = Mul(x, w)  y = ReduceSum<keepdims=0>(m) }"
    )
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 3)), rng.normal(size=small)
    gradient_x, gradient_w = run(differentiate(model, "y", ["x", "w"]), ["x_grad", "w_grad"], x=x, w=w)
    np.testing.assert_allclose(gradient_x, np.broadcast_to(w, (2, 3)), rtol=1e-14)
    axes = tuple(axis for axis in (0, 1) if small[axis] == 1)
    np.testing.assert_allclose(gradient_w, x.sum(axes, keepdims=True), rtol=1e-12)


# Again


def test_double_backward_is_the_hessian_vector_product() -> None:
    """A two-layer network: d/dw <dL/dw, v> against torch, both float64."""
    model = parse("""
        (double[b, 4] x, double[4, 5] w, double[5] c, double[5] v, double[4, 5] direction) => (double y)
        { s = Unsqueeze(x, axis)  t = Unsqueeze(w, zero)  m = Mul(s, t)  z = ReduceSum<keepdims=0>(m, one)
          zc = Add(z, c)  h = Tanh(zc)  p = Softmax(h)  q = Mul(p, v)  l = Mul(q, q)
          y = ReduceSum<keepdims=0>(l) }""")
    for name, number in {"axis": 2, "zero": 0, "one": 1}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([number]), name))
    first = differentiate(model, "y", ["w"])
    first.graph.node.extend(
        [
            onnx.helper.make_node("Mul", ["w_grad", "direction"], ["slope_terms"]),
            onnx.helper.make_node("ReduceSum", ["slope_terms"], ["slope"], keepdims=0),
        ]
    )
    second = differentiate(first, "slope", ["w", "v"])
    rng = np.random.default_rng(1)
    shapes = {"x": (3, 4), "w": (4, 5), "c": (5,), "v": (5,), "direction": (4, 5)}
    feeds = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    got = ReferenceEvaluator(second).run(["w_grad", "w_grad_1", "v_grad"], feeds)

    t = {name: torch.tensor(value, requires_grad=name in "wv") for name, value in feeds.items()}
    loss = ((torch.tanh(t["x"] @ t["w"] + t["c"]).softmax(-1) * t["v"]) ** 2).sum()
    (gradient,) = torch.autograd.grad(loss, t["w"], create_graph=True)
    expected = [gradient, *torch.autograd.grad((gradient * t["direction"]).sum(), [t["w"], t["v"]])]
    for value, want in zip(got, expected, strict=True):
        assert norm_relative_error(value, want.detach().numpy()) <= 1e-12


# What is refused


@pytest.mark.parametrize(
    ("of", "wrt", "cotangent", "message"),
    [
        (
            "nothing",
            ["x"],
            None,
            "of names 'nothing', which is not a value of the graph; .* are x, unused, y",
        ),
        ("y", ["w"], None, "wrt names 'w', which is not a value"),
        ("y", ["x", "x"], None, "wrt names x more than once"),
        ("q", ["x"], None, r"'q': its shape is .*, not a scalar; reduce it .* or name a cotangent"),
        ("y", ["x"], "q", "adding the cotangent input 'q': the model already has a value of that name"),
    ],
)
def test_requests_that_make_no_sense(of: str, wrt: list[str], cotangent: str | None, message: str) -> None:
    with pytest.raises(DifferentiationError, match=message):
        differentiate(SQUARES, of, wrt, cotangent=cotangent)


@pytest.mark.parametrize(("of", "wrt"), [("n", "x"), ("y", "i")])
def test_integers_have_no_gradients(of: str, wrt: str) -> None:
    model = parse(
        "(float[2] x, int64[2] i) => (float y, int64 n) { y = ReduceSum<keepdims=0>(x)  n = Size(i) }"
    )
    with pytest.raises(DifferentiationError, match="only floating-point values have gradients"):
        differentiate(model, of, [wrt])


def test_missing_rule_names_op_node_path_and_reason() -> None:
    model = parse("""(float[4] w, int64 i) => (float y)
        { a = Exp(w)  s = SplitToSequence<axis=0>(a)  e = SequenceAt(s, i)  y = ReduceSum<keepdims=0>(e) }""")
    model.graph.node[-2].name = "pick"
    with pytest.raises(NoGradientRule) as caught:
        differentiate(model, "y", ["w"])
    text = str(caught.value)
    for part in ("'SequenceAt'", "node 'pick'", "from 'y' to 'w'", NOT_YET["", "SequenceAt"], "Freeze"):
        assert part in text


def test_op_without_rule_off_the_path_does_no_harm() -> None:
    model = parse("""(float[2] w, float s) => (float y, uint8[2] q)
        { a = Exp(w)  q = QuantizeLinear(a, s)  y = ReduceSum<keepdims=0>(a) }""")
    feeds = {"w": np.array([0.0, 1], np.float32), "s": np.float32(0.1)}
    (gradient,) = run(differentiate(model, "y", ["w"]), ["w_grad"], **feeds)
    np.testing.assert_allclose(gradient, np.exp(feeds["w"]), rtol=1e-6)


def test_quantization_is_an_error_not_a_zero() -> None:
    """Its integer result has no cotangent of its own, so nothing else would tell."""
    model = parse("""(float[4] x, float s) => (float y)
        { q = QuantizeLinear(x, s)  d = DequantizeLinear(q, s)  y = ReduceSum<keepdims=0>(d) }""")
    with pytest.raises(
        NoGradientRule, match=r"'DequantizeLinear' with respect to its input 'x'.* from 'y' to 'x'"
    ):
        differentiate(model, "y", ["x"])


def test_quantization_by_a_function_body_is_an_error_too() -> None:
    model = parse("""(float[4] x) => (float y)
        { q, s, z = DynamicQuantizeLinear(x)  d = DequantizeLinear(q, s, z)
          y = ReduceSum<keepdims=0>(d) }""")
    with pytest.raises(NoGradientRule, match=r"straight-through|its input 'x'"):
        differentiate(model, "y", ["x"])


def test_attributes_without_a_formula_are_an_error() -> None:
    model = parse("""(float[4, 2, 3] x, float[1, 16, 3] w, float[1, 16, 4] r) => (float y)
        { h = LSTM<hidden_size=4, clip=1.0>(x, w, r)  y = ReduceSum<keepdims=0>(h) }""")
    with pytest.raises(NoGradientRule, match=r"LSTM .*: clip has no gradient rule"):
        differentiate(model, "y", ["w"])


@pytest.mark.parametrize(("wrt", "shown"), [("x", "the str 'x'"), (None, "None")])
def test_a_string_is_no_list_of_names(wrt: object, shown: str) -> None:
    with pytest.raises(TypeError, match=f"wrt is {shown}; pass a list"):
        differentiate(parse("(float[4] x) => (float y) { y = ReduceSum<keepdims=0>(x) }"), "y", wrt)


# Registration


def test_registering_twice_is_refused() -> None:
    with pytest.raises(RuleDefinitionError, match="Mul: it already has a rule"):
        defvjp("Mul", A=lambda op, n, ct: ct)
    with pytest.raises(RuleDefinitionError, match="Mul: it already has a rule"):
        nondifferentiable("Mul", reason="test")
    with pytest.raises(RuleDefinitionError, match="Shape: it is already declared nondifferentiable"):
        not_yet("Shape", reason="test")


def test_unknown_names_are_refused() -> None:
    with pytest.raises(RuleDefinitionError, match="Mull: no such op in opsets 21-26"):
        defvjp("Mull", A=lambda op, n, ct: ct)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"wrt": ("Z",)}, r"it has no input 'Z'; its inputs are \('A', 'B'\)"),
        ({"wrt": ("A",), "outputs": ("D",)}, r"it has no output 'D'; its outputs are \('C',\)"),
        ({"wrt": ("A",), "saves": ("E",)}, r"it has no output 'E'"),
    ],
)
def test_names_that_the_schema_lacks_are_refused(names: dict[str, tuple[str, ...]], message: str) -> None:
    signature = Signature(("A", "B"), ("C",))
    with pytest.raises(RuleDefinitionError, match=f"registering the rule of Made: {message}"):
        vjp("Made", domain="test", signature=signature, **names)(lambda op, n, ct: ct)
    assert ("test", "Made") not in RULES


def test_a_bias_of_more_axes_than_the_product_is_an_error() -> None:
    """onnx's checker passes it, and ONNX Runtime refuses to run it."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[n,4] x, float[4,2] w, float[1,1,2] c) => (float loss) {
            y = Gemm(x, w, c) loss = ReduceSum<keepdims=0>(y) }""")
    with pytest.raises(DifferentiationError, match=r"'c' of shape \[1,1,2\] cannot be broadcast to 'y'"):
        differentiate(model, "loss", ["c"])
