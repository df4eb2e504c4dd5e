"""`vjp`, `jvp` and `hessian_vector_product` beside `torch.func`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch.func import grad, jvp, vjp

import onnxtrain
from autodiff.reference import ReferenceEvaluator
from functional.nets import CONV, LOOP, MLP, NETS, Net
from onnxtrain.autodiff import local_rules
from onnxtrain.autodiff import vjp as rule
from onnxtrain.errors import DifferentiationError, NoGradientRule
from tolerances import norm_relative_error

# What PyTorch says of itself when it takes its first forward-mode derivative.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")

# Twice differentiated float32 results are some units in the last place of larger intermediate values apart.
TOLERANCE = {np.float64: 1e-9, np.float32: 2e-4}

CASES = [*((name, np.float64) for name in NETS), ("mlp", np.float32), ("conv", np.float32)]


def check(model: onnx.ModelProto) -> None:
    onnx.checker.check_model(model, full_check=True)


def run(
    net: Net, model: onnx.ModelProto, feeds: dict[str, np.ndarray], names: Sequence[str]
) -> list[np.ndarray]:
    """In ONNX Runtime; by the reference evaluator where that lacks float64."""
    check(model)
    assert {value.name for value in model.graph.input} == set(feeds)
    if not net.float64 and any(array.dtype == np.float64 for array in feeds.values()):
        return ReferenceEvaluator(model).run(list(names), feeds)
    return ort.InferenceSession(model.SerializeToString()).run(list(names), feeds)


def tensors(arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def normal(seed: int, *arrays: np.ndarray) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [np.asarray(rng.normal(size=array.shape), array.dtype) for array in arrays]


def agree(got: Sequence[np.ndarray], expected: Sequence[torch.Tensor], dtype: type) -> None:
    for value, want in zip(got, expected, strict=True):
        assert value.dtype == dtype
        assert value.shape == tuple(want.shape)
        assert norm_relative_error(value, want.detach().numpy()) <= TOLERANCE[dtype]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_vjp_and_jvp_of_both_outputs_match_torch(name: str, dtype: type) -> None:
    net = NETS[name]
    arrays, leaves = net.arrays(dtype), list(net.shapes)
    given = tensors(arrays)

    def function(*values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return net.twin(given | dict(zip(leaves, values, strict=True)))

    primals = [given[leaf] for leaf in leaves]
    outputs, pull = vjp(function, *primals)
    cotangents = normal(1, *(output.numpy() for output in outputs))
    model = onnxtrain.vjp(net.model(dtype), ["y", "loss"], leaves)
    feeds = arrays | dict(zip(["y_cotangent", "loss_cotangent"], cotangents, strict=True))
    got = run(net, model, feeds, ["y", "loss", *(f"{leaf}_grad" for leaf in leaves)])
    agree(got, [*outputs, *pull(tuple(map(torch.from_numpy, cotangents)))], dtype)

    tangents = normal(2, *(arrays[leaf] for leaf in leaves))
    model = onnxtrain.jvp(net.model(dtype), ["y", "loss"], leaves)
    feeds = arrays | {f"{leaf}_tangent": t for leaf, t in zip(leaves, tangents, strict=True)}
    got = run(net, model, feeds, ["y", "loss", "y_tangent", "loss_tangent"])
    outputs, derivatives = jvp(function, tuple(primals), tuple(map(torch.from_numpy, tangents)))
    agree(got, [*outputs, *derivatives], dtype)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_hessian_vector_product_matches_torch(name: str, dtype: type) -> None:
    """Forward over reverse in PyTorch, reverse over reverse here."""
    net = NETS[name]
    arrays, leaves = net.arrays(dtype), list(net.shapes)
    given = tensors(arrays)

    def loss(values: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return net.twin(given | dict(zip(leaves, values, strict=True)))[1]

    vectors = normal(3, *(arrays[leaf] for leaf in leaves))
    primals = tuple(given[leaf] for leaf in leaves)
    gradients, products = jvp(grad(loss), (primals,), (tuple(map(torch.from_numpy, vectors)),))
    model = onnxtrain.hessian_vector_product(net.model(dtype), "loss", leaves)
    feeds = arrays | {f"{leaf}_vector": v for leaf, v in zip(leaves, vectors, strict=True)}
    names = [f"{leaf}{suffix}" for suffix in ("_grad", "_hvp") for leaf in leaves]
    agree(run(net, model, feeds, names), [*gradients, *products], dtype)


def test_jvp_costs_one_more_forward_computation() -> None:
    """Nodes that only the vector-Jacobian product needs are gone: no transposed convolution is left."""
    model = onnxtrain.jvp(CONV.model(np.float32), ["y"], ["kernel", "x"])
    # The tangent of one Conv is the body of a function, which a native kernel can replace.
    parts = (model.graph, *model.functions)
    ops = [node.op_type for part in parts for node in part.node]
    assert (ops.count("Conv"), ops.count("MaxPool"), ops.count("ConvTranspose")) == (2, 1, 0)
    assert [value.name for value in model.graph.input][-2:] == ["kernel_tangent", "x_tangent"]
    assert [value.name for value in model.graph.output] == ["y", "loss", "y_tangent"]


def test_one_value_that_is_the_gradient_of_two() -> None:
    """d(a + b) is one cotangent; each has a tangent of its own."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        net (double[2] a, double[2] b) => (double[2] y) { y = Add(a, b) }""")
    step = onnxtrain.jvp(model, ["y"], ["a", "b"])
    feeds = {name: np.array([1.0, k]) for k, name in enumerate(["a", "b", "a_tangent", "b_tangent"])}
    got = ort.InferenceSession(step.SerializeToString()).run(["y_tangent"], feeds)[0]
    assert got.tolist() == [2.0, 5.0]


def test_where_nothing_depends_on_anything_there_are_zeros() -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        net (double[n] a, double[n] b) => (double[n] y, double z) {
            y = Mul(a, a)  r = Floor(b)  z = ReduceSum<keepdims = 0>(r) }""")
    feeds = {"a": np.ones(2), "b": np.ones(2), "b_tangent": np.ones(2)}
    step = onnxtrain.jvp(model, ["y", "z"], ["b"])
    got = ort.InferenceSession(step.SerializeToString()).run(["y_tangent", "z_tangent"], feeds)
    assert [value.tolist() for value in got] == [[0.0, 0.0], 0.0]
    feeds = {"a": np.ones(2), "b": np.ones(2), "b_vector": np.ones(2)}
    step = onnxtrain.hessian_vector_product(model, "z", ["b"])
    got = ort.InferenceSession(step.SerializeToString()).run(["b_grad", "b_hvp"], feeds)
    assert [value.tolist() for value in got] == [[0.0, 0.0], [0.0, 0.0]]


def test_jvp_passes_rounding_straight_through() -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        net (double[n] a) => (double[n] y) { r = Round(a)  y = Mul(r, r) }""")
    step = onnxtrain.jvp(model, ["y"], ["a"], straight_through=True)
    feeds = {"a": np.array([1.2, 2.6]), "a_tangent": np.array([1.0, 10.0])}
    got = ort.InferenceSession(step.SerializeToString()).run(["y_tangent"], feeds)[0]
    assert got.tolist() == [2.0, 60.0]


STEPS = {
    "GridSample": ("double[1,2,4,5] x, double[1,2,3,2] grid", 'y = GridSample<mode = "linear">(x, grid)'),
    "GridSample, reflection": (
        "double[1,2,4,5] x, double[1,2,3,2] grid",
        'y = GridSample<mode = "cubic", padding_mode = "reflection">(x, grid)',
    ),
    "DeformConv": (
        "double[1,2,5,5] x, double[3,2,2,2] w, double[1,8,4,4] offset",
        "y = DeformConv<kernel_shape = [2, 2]>(x, w, offset)",
    ),
    "Abs": ("double[3,4] a", "y = Abs(a)"),
}


@pytest.mark.parametrize("name", STEPS)
def test_only_the_steps_of_the_model_are_straight_through(name: str) -> None:
    """The Floor, Round or Sign inside of a gradient has derivative zero, whatever replaces that of the model's own.

    At 3, a straight-through Round is i and a straight-through Sign is i - 2, in value and in derivative: the products
    are differences of the gradients of a model with these.
    """
    inputs, line = STEPS[name]
    text = f"""<ir_version: 10, opset_import: ["": 21]> g ({inputs}, double[1] r) => (double loss) {{
        {line}  i = ROUND  s = SIGN  z = Mul(y, i)  q = Mul(z, z)  p = Mul(q, s)
        loss = ReduceSum<keepdims = 0>(p) }}"""
    text = text.replace("{", "<double two = {2.0}> {", 1)
    stepped, smooth = (
        onnx.parser.parse_model(text.replace("ROUND", round_).replace("SIGN", sign))
        for round_, sign in (("Round(r)", "Sign(i)"), ("Identity(r)", "Sub(i, two)"))
    )
    rng = np.random.default_rng(0)
    arrays = {
        value.name: rng.uniform(0.1, 0.9, [dim.dim_value for dim in value.type.tensor_type.shape.dim])
        for value in smooth.graph.input
    }
    arrays["r"] = np.array([3.0])
    names, vectors = list(arrays), dict(zip(arrays, normal(1, *arrays.values()), strict=True))
    gradient = ReferenceEvaluator(onnxtrain.differentiate(smooth, "loss", names))

    def slopes(step: float) -> list[np.ndarray]:
        moved = {name: array + step * vectors[name] for name, array in arrays.items()}
        return gradient.run([f"{name}_grad" for name in names], moved)

    expected = [(a - b) / 2e-5 for a, b in zip(slopes(1e-5), slopes(-1e-5), strict=True)]
    feeds = arrays | {f"{name}_vector": vector for name, vector in vectors.items()}
    with local_rules():
        rule("Sign", wrt=("input",))(lambda op, n, ct: ct)
        model = onnxtrain.hessian_vector_product(stepped, "loss", names, straight_through=True)
    got = ReferenceEvaluator(model).run([f"{name}_hvp" for name in names], feeds)
    for value, want in zip(got, expected, strict=True):
        assert norm_relative_error(value, want) <= 1e-7
    # `differentiate` of a model that it has made, where every step is told apart by the file alone.
    total = 0.0
    for name in names:
        with local_rules():
            rule("Sign", wrt=("input",))(lambda op, n, ct: ct)
            once = onnxtrain.differentiate(stepped, "loss", [name], straight_through=True)
            twice = onnxtrain.differentiate(
                once, f"{name}_grad", names[:1], cotangent="v", straight_through=True
            )
        last = twice.graph.output[-1].name
        total += ReferenceEvaluator(twice).run([last], arrays | {"v": vectors[name]})[0]
    assert norm_relative_error(total, expected[0]) <= 1e-7


def test_a_step_that_a_loop_computes_again_stays_straight_through() -> None:
    """The gradient of a Loop holds copies of the model's own Round."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        net (double[2] a) => (double loss) <int64 three = {3}, bool yes = {1}> {
            y = Loop(three, yes, a) <body = b (int64 i, bool c, double[2] h) => (bool d, double[2] k) {
                d = Identity(c)  r = Round(h)  k = Mul(r, h) }>
            loss = ReduceSum<keepdims = 0>(y) }""")
    step = onnxtrain.hessian_vector_product(model, "loss", ["a"], straight_through=True)
    feeds = {"a": np.array([1.0, 2.0]), "a_vector": np.array([1.0, 10.0])}
    got = ort.InferenceSession(step.SerializeToString()).run(["a_grad", "a_hvp"], feeds)
    assert [value.tolist() for value in got] == [
        [8.0, 8 * 2.0**7],
        [56.0, 560 * 2.0**6],
    ]  # of a to the power of 8


def test_parameters_that_are_initializers_and_names_that_are_taken() -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        net (float[n, 2] x_tangent, float[n, 2] x) => (float[n, 2] y) <float[2] w = {3.0, 4.0}> {
            p = Mul(x, w)  y = Add(p, x_tangent) }""")
    step = onnxtrain.jvp(ir.from_proto(model), ["y"], ["x", "w"])
    assert isinstance(step, ir.Model)
    assert [value.name for value in step.graph.inputs] == ["x_tangent", "x", "x_tangent_1", "w_tangent"]
    feeds = {"x_tangent": np.zeros((1, 2)), "x": [[1, 2]], "x_tangent_1": [[1, 1]], "w_tangent": [1, 10]}
    session = ort.InferenceSession(ir.to_proto(step).SerializeToString())
    got = session.run(["y_tangent"], {k: np.asarray(v, np.float32) for k, v in feeds.items()})[0]
    assert got.tolist() == [[4.0, 24.0]]


def test_batches_of_any_size_of_none_too() -> None:
    step = onnxtrain.hessian_vector_product(MLP.model(np.float64), "loss", ["w0"])
    session = ort.InferenceSession(step.SerializeToString())
    for size in (1, 7):
        arrays = MLP.arrays(np.float64)
        feeds = arrays | {
            "x": np.ones((size, 4)),
            "labels": np.zeros(size, np.int64),
            "w0_vector": arrays["w0"],
        }
        assert session.run(["w0_hvp"], feeds)[0].shape == (4, 5)
    forward = onnxtrain.jvp(LOOP.model(np.float64), ["y"], ["x"])
    feeds = {"x": np.ones((0, 3)), "x_tangent": np.ones((0, 3)), "w": np.ones((3, 3))}
    assert ort.InferenceSession(forward.SerializeToString()).run(["y_tangent"], feeds)[0].shape == (0, 3)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: onnxtrain.vjp(m, "y", ["x"]), TypeError, "of is the str 'y'"),
        (lambda m: onnxtrain.jvp(m, ["y"], "x"), TypeError, "wrt is the str 'x'"),
        (
            lambda m: onnxtrain.jvp(m, ["y"], ["z"]),
            DifferentiationError,
            "wrt names 'z', which is not a value",
        ),
        (lambda m: onnxtrain.vjp(m, ["y", "y"], ["x"]), DifferentiationError, "of names y more than once"),
        (lambda m: onnxtrain.jvp(m, ["y"], ["labels"]), DifferentiationError, "'labels' is INT64"),
        (lambda m: onnxtrain.hessian_vector_product(m, "y", ["x"]), DifferentiationError, "not a scalar"),
    ],
)
def test_requests_that_make_no_sense(call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(MLP.model(np.float32))


def test_op_without_a_rule_is_named() -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21, "my.domain": 1]>
        net (float[2] x) => (float[2] y) { y = my.domain.Strange(x) }""")
    model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    with pytest.raises(NoGradientRule, match="Strange"):
        onnxtrain.jvp(model, ["y"], ["x"])


@pytest.mark.parametrize("name", NETS)
def test_third_derivatives_of_differentiated_models(name: str) -> None:
    """`differentiate` of its own output, twice, beside autograd three times over."""
    net = NETS[name]
    leaves = list(net.shapes)
    last = leaves[-1]
    arrays = net.arrays(np.float64)
    given = tensors(arrays)
    v1, v2 = normal(5, arrays[last], arrays[last])
    model = onnxtrain.differentiate(net.model(np.float64), "loss", [last])
    model = onnxtrain.differentiate(model, f"{last}_grad", [last], cotangent="v1")
    model = onnxtrain.differentiate(model, f"{last}_grad_1", leaves, cotangent="v2")
    names = [output.name for output in model.graph.output][-len(leaves) :]
    values = {leaf: given[leaf].clone().requires_grad_() for leaf in leaves}
    result = net.twin(given | values)[1]
    for vector in (v1, v2):
        (slope,) = torch.autograd.grad(result, values[last], create_graph=True)
        result = (slope * torch.from_numpy(vector)).sum()
    third = torch.autograd.grad(result, list(values.values()))
    got = run(net, model, arrays | {"v1": v1, "v2": v2}, names)
    agree(got, third, np.float64)


@pytest.mark.parametrize(
    "line",
    [
        "y = ReduceL2<keepdims = 0>(x, one)",
        "y = LpNormalization<axis = 1>(x)",
        "y = LpNormalization<axis = 1, p = 1>(x)",
    ],
)
def test_tangents_at_a_norm_of_zero_are_those_of_the_gradient(line: str) -> None:
    """The gradient is zero in the row of zeros; a division by the norm there must not make tangents or products NaN."""
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        net (float[2, 3] x) => (float loss) <int64[1] one = {{1}}> {{
            {line}  s = Sin(y)  loss = ReduceSum<keepdims = 0>(s) }}""")
    x, tangent = np.array([[0, 0, 0], [1, 3, -2]], np.float32), np.array([[1, 2, 3], [4, 5, 6]], np.float32)

    def run(step: onnx.ModelProto, feeds: dict[str, np.ndarray], name: str) -> np.ndarray:
        return ort.InferenceSession(step.SerializeToString()).run([name], {"x": x} | feeds)[0]

    forward = run(onnxtrain.jvp(model, ["loss"], ["x"]), {"x_tangent": tangent}, "loss_tangent")
    gradient = run(onnxtrain.differentiate(model, "loss", ["x"]), {}, "x_grad")
    assert not gradient[0].any()
    np.testing.assert_allclose(forward, (gradient * tangent).sum(), rtol=1e-5)
    product = run(onnxtrain.hessian_vector_product(model, "loss", ["x"]), {"x_vector": tangent}, "x_hvp")
    assert not product[0].any()
    assert np.isfinite(product).all()


def test_products_with_zeros_have_the_second_derivatives_of_torch() -> None:
    """The gradient at one element depends on the zero at another, though it is zero there."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        net (double[5, 3] x) => (double loss) <int64[1] one = {1}> {
            y = ReduceProd<keepdims = 0>(x, one)  s = Sin(y)  e = Exp(s)  loss = ReduceSum<keepdims = 0>(e) }""")
    rows = [[1.0, 0, -2], [0, 1, 2], [0, 0, 3], [0, 0, 0], [0.5, 1, 2]]
    x = torch.tensor(rows, dtype=torch.float64, requires_grad=True)
    vector = torch.from_numpy(np.random.default_rng(0).normal(size=(5, 3)))
    (gradient,) = torch.autograd.grad(x.prod(1).sin().exp().sum(), x, create_graph=True)
    (product,) = torch.autograd.grad((gradient * vector).sum(), x)
    step = onnxtrain.hessian_vector_product(model, "loss", ["x"])
    session = ort.InferenceSession(step.SerializeToString())
    got = session.run(["x_grad", "x_hvp"], {"x": np.array(rows), "x_vector": vector.numpy()})
    np.testing.assert_allclose(got[0], gradient.detach(), atol=1e-12)
    np.testing.assert_allclose(got[1], product, atol=1e-12)


@pytest.mark.parametrize("exclusive", [0, 1])
@pytest.mark.parametrize("reverse", [0, 1])
def test_cumulative_products_with_zeros_have_the_second_derivatives_of_torch(
    exclusive: int, reverse: int
) -> None:
    model = onnx.parser.parse_model(f"""<ir_version: 13, opset_import: ["": 26]>
        net (double[6, 4] x) => (double loss) <int64 one = {{1}}> {{
            y = CumProd<exclusive = {exclusive}, reverse = {reverse}>(x, one)
            s = Sin(y)  e = Exp(s)  loss = ReduceSum<keepdims = 0>(e) }}""")
    rows = [[1, 0, -2, 3], [0, 1, 2, 0], [0, 0, 3, 1], [2, 0, 3, 0], [0, 0, 0, 2], [0.5, 1, 2, -1]]
    x = torch.tensor(rows, dtype=torch.float64, requires_grad=True)
    turned = x.flip(1) if reverse else x
    y = turned.cumprod(1)
    if exclusive:
        y = torch.cat([torch.ones_like(y[:, :1]), y[:, :-1]], 1)
    vector = torch.from_numpy(np.random.default_rng(0).normal(size=(6, 4)))
    (gradient,) = torch.autograd.grad(y.sin().exp().sum(), x, create_graph=True)
    (product,) = torch.autograd.grad((gradient * vector).sum(), x)
    step = onnxtrain.hessian_vector_product(model, "loss", ["x"])
    feeds = {"x": np.array(rows, np.float64), "x_vector": vector.numpy()}
    got = ReferenceEvaluator(step).run(["x_grad", "x_hvp"], feeds)  # onnxruntime has no CumProd of float64
    np.testing.assert_allclose(got[0], gradient.detach(), atol=1e-12)
    np.testing.assert_allclose(got[1], product, atol=1e-12)
