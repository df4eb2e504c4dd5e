"""`lower_training_ops` beside the node tests of ONNX, PyTorch, and its optimizers."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnx.backend.test.case.node import _NodeTestCases
from onnx.backend.test.case.test_case import TestCase
from onnx.backend.test.loader import load_model_tests

import onnxtrain
from onnxtrain.errors import DifferentiationError, ModelError

TRAINING = "ai.onnx.preview.training"
_MODULES = (
    "adagrad", "adam", "batch_normalization", "dropout", "momentum", "negativeloglikelihoodloss",
    "softmax_cross_entropy_loss",
)  # fmt: skip
_NAMES = re.compile(
    "test_(ada|momentum|nesterov|training_dropout|batchnorm_.*training_mode|sce_|nllloss_|gradient)"
)


def _node_tests() -> dict[str, TestCase]:
    for module in _MODULES:
        importlib.import_module(f"onnx.backend.test.case.node.{module}")
    cases = [*_NodeTestCases, *(case for case in load_model_tests(kind="simple"))]
    return {case.name: case for case in cases if _NAMES.match(case.name)}


CASES = _node_tests()


def lowered(model: onnx.ModelProto) -> ort.InferenceSession:
    result = onnxtrain.lower_training_ops(model)
    onnx.checker.check_model(result, full_check=True)
    assert TRAINING not in {imported.domain for imported in result.opset_import}
    for kind in ("input", "output"):
        assert [v.name for v in getattr(result.graph, kind)] == [v.name for v in getattr(model.graph, kind)]
    return ort.InferenceSession(result.SerializeToString())


def read(case: TestCase) -> tuple[onnx.ModelProto, list[np.ndarray], list[np.ndarray]]:
    """Returns the model of a test with its inputs and expected outputs: from memory, or from the files of onnx."""
    if case.data_sets is not None:
        ((inputs, outputs),) = case.data_sets
        return case.model, inputs, outputs
    folder = Path(case.model_dir)
    arrays = [
        [onnx.numpy_helper.to_array(onnx.load_tensor(path)) for path in sorted(folder.glob(f"*/{kind}_*.pb"))]
        for kind in ("input", "output")
    ]
    return onnx.load(folder / "model.onnx"), *arrays


def test_all_of_them_are_there() -> None:
    kinds = ("ada", "momentum", "nesterov", "gradient", "training_dropout", "batchnorm", "sce", "nllloss")
    names = [name for name in CASES if not name.endswith("_expanded")]
    counts = [sum(name.startswith(f"test_{kind}") for name in names) for kind in kinds]
    assert all(count >= least for count, least in zip(counts, (4, 2, 1, 2, 6, 2, 34, 18), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_node_tests_of_onnx(name: str) -> None:
    model, inputs, expected = read(CASES[name])
    feeds = {i.name: np.asarray(array) for i, array in zip(model.graph.input, inputs, strict=True)}
    got = lowered(model).run(None, feeds)
    if name.startswith("test_training_dropout") and "zero_ratio" not in name:
        check_dropout(model, inputs, got)
        check_dropout(model, inputs, expected)
        return
    for value, want in zip(got, expected, strict=True):
        assert (value.dtype, value.shape) == (want.dtype, want.shape)
        np.testing.assert_allclose(value, want, CASES[name].rtol, CASES[name].atol)


def check_dropout(model: onnx.ModelProto, inputs: list[np.ndarray], outputs: list[np.ndarray]) -> None:
    """The numbers that are drawn are numpy's in the test and the runtime's here: what both of them must fulfil."""
    x, ratio = inputs[0], float(inputs[1]) if model.graph.node[0].input[1] else 0.5
    kept = outputs[0] != 0
    np.testing.assert_allclose(outputs[0], np.where(kept, x / (1 - ratio), 0), rtol=1e-6)
    # Six standard deviations of the number of kept elements.
    assert abs(kept.sum() - x.size * (1 - ratio)) <= 6 * np.sqrt(x.size * ratio * (1 - ratio))
    for mask in outputs[1:]:
        assert mask.dtype == bool
        assert (mask == kept).all()


def parse(body: str) -> onnx.ModelProto:
    imports = f'["": 21, "{TRAINING}": 1]'
    body = re.sub(r"(Gradient|Adam|Adagrad|Momentum) *<", rf"{TRAINING}.\1<", body)
    return onnx.parser.parse_model(f"<ir_version: 10, opset_import: {imports}> step {body}")


OPTIMIZERS = {
    "Adam<alpha = 0.9, beta = 0.99, epsilon = 1e-30, norm_coefficient = 0.5>": (
        torch.optim.Adam, {"betas": (0.9, 0.99), "eps": 0, "weight_decay": 0.5}, 1, 2
    ),
    "Adagrad<decay_factor = 0.25, epsilon = 1e-6, norm_coefficient = 0.5>": (
        torch.optim.Adagrad, {"lr_decay": 0.25, "eps": 1e-6, "weight_decay": 0.5}, 0, 1
    ),
    'Momentum<alpha = 0.75, beta = 1.0, mode = "standard", norm_coefficient = 0.5>': (
        torch.optim.SGD, {"momentum": 0.75, "weight_decay": 0.5}, 0, 1
    ),
    'Momentum<alpha = 0.75, beta = 1.0, mode = "nesterov", norm_coefficient = 0.5>': (
        torch.optim.SGD, {"momentum": 0.75, "weight_decay": 0.5, "nesterov": True}, 0, 1
    ),
}  # fmt: skip
"""The op, the optimizer of PyTorch, the count of the first update, and the number of moments."""


@pytest.mark.parametrize("op", OPTIMIZERS)
def test_training_steps_written_with_gradient_and_an_optimizer(op: str) -> None:
    kind, options, first, moments = OPTIMIZERS[op]
    m_in = "".join(f", double[3] w_m{k}, double b_m{k}" for k in range(moments))
    m_out = "".join(f", double[3] w_n{k}, double b_n{k}" for k in range(moments))
    reads, writes = ("".join(f", w_{letter}{k}, b_{letter}{k}" for k in range(moments)) for letter in "mn")
    model = parse(f"""(double[1] rate, int64 t, double[n, 3] x, double[3] w, double b{m_in})
        => (double[3] w_new, double b_new{m_out}) {{
        p = Mul(x, w)  q = Add(p, b)  s = Tanh(q)  loss = ReduceSum<keepdims = 0>(s)
        gw, gb = Gradient<xs = ["w", "b"], zs = ["x"], y = "loss">(w, b, x)
        w_new, b_new{writes} = {op}(rate, t, w, b, gw, gb{reads}) }}""")
    session = lowered(model)
    rng = np.random.default_rng(0)
    x, state = rng.normal(size=(4, 3)), [rng.normal(size=3), rng.normal(size=())]
    weights = [torch.tensor(array, requires_grad=True) for array in state]
    optimizer = kind(weights, lr=0.125, **options)
    state += [np.zeros(()) if k % 2 else np.zeros(3) for k in range(2 * moments)]
    for step in range(3):
        names = [value.name for value in model.graph.input][3:]
        feeds = {"rate": np.array([0.125]), "t": np.array(first + step), "x": x}
        state = session.run(None, feeds | dict(zip(names, map(np.asarray, state), strict=True)))
        optimizer.zero_grad()
        torch.tanh(torch.from_numpy(x) * weights[0] + weights[1]).sum().backward()
        optimizer.step()
        for got, want in zip(state, weights, strict=False):
            # beta and alpha are float32 in a file.
            np.testing.assert_allclose(got, want.detach().numpy(), rtol=1e-6)


def test_gradient_of_a_gradient() -> None:
    model = parse("""(double[3] x, double[3] w, double[3] l) => (double[3] gx, double[3] hw) {
        p = Mul(x, w)  e = Exp(p)  d = Sub(e, l)  s = Mul(d, d)  o = ReduceSum<keepdims = 0>(s)
        hx, hw = Gradient<xs = ["x", "w"], zs = ["l"], y = "gw">(x, w, l)
        gx, gw = Gradient<xs = ["x", "w"], zs = ["l"], y = "o">(x, w, l) }""")
    rng = np.random.default_rng(0)
    x, w, label = (torch.tensor(rng.normal(size=3), requires_grad=True) for _ in range(3))
    gx, gw = torch.autograd.grad(((torch.exp(x * w) - label) ** 2).sum(), [x, w], create_graph=True)
    (hw,) = torch.autograd.grad(gw.sum(), w)
    feeds = {name: tensor.detach().numpy() for name, tensor in (("x", x), ("w", w), ("l", label))}
    for got, want in zip(lowered(model).run(None, feeds), (gx, hw), strict=True):
        np.testing.assert_allclose(got, want.detach().numpy(), rtol=1e-12)


def test_gradient_at_other_values_and_of_intermediate_tensors() -> None:
    """The standard's example: dY/dH where H is H_1, beside the graph at its own values."""
    model = parse("""(double[2, 2] x, double[2, 2] w, double[2, 2] h1, double[2, 2] z)
        => (double[2, 2] y, double[2, 2] of_h, double[2, 2] at_h1, double[2, 2] of_z) {
        h = MatMul(x, w)  e = Exp(h)  y = MatMul(e, z)
        of_h = Gradient<xs = ["h"], zs = ["z"], y = "y">(h, z)
        at_h1, of_z = Gradient<xs = ["h", "z"], y = "y">(h1, z) }""")
    rng = np.random.default_rng(0)
    x, w, h1, z = (rng.normal(size=(2, 2)) for _ in range(4))
    y, of_h, at_h1, of_z = lowered(model).run(None, {"x": x, "w": w, "h1": h1, "z": z})
    ones = np.ones((2, 2))
    np.testing.assert_allclose(y, np.exp(x @ w) @ z, rtol=1e-12)
    np.testing.assert_allclose(of_h, np.exp(x @ w) * (ones @ z.T), rtol=1e-12)
    np.testing.assert_allclose(at_h1, np.exp(h1) * (ones @ z.T), rtol=1e-12)
    np.testing.assert_allclose(of_z, np.exp(h1).T @ ones, rtol=1e-12)


def test_gradient_through_the_dropout_that_was_drawn() -> None:
    model = parse("""(float[64] x) => (float[64] y, float[64] g) {
        ratio = Constant<value_float = 0.5>()  on = Constant<value = bool {1}>()
        y = Dropout(x, ratio, on)  g = Gradient<xs = ["x"], y = "y">(x) }""")
    y, g = lowered(model).run(None, {"x": np.ones(64, np.float32)})
    assert set(np.unique(y)) == {0.0, 2.0}
    np.testing.assert_array_equal(y, g)


def test_gradient_of_the_first_step_of_adam() -> None:
    """At step 0 the rate is not adjusted, and the quotient that adjusts it is one of zeros."""
    model = parse("""(double rate, int64 t, double[2] x, double[2] g, double[2] v, double[2] h)
        => (double[2] x_new, double[2] v_new, double[2] h_new) {
        x_new, v_new, h_new = Adam<alpha = 0.5, beta = 0.75, epsilon = 0.0>(rate, t, x, g, v, h) }""")
    of_rate = onnxtrain.differentiate(onnxtrain.lower_training_ops(model), "x_new", ["rate"], cotangent="ct")
    session = ort.InferenceSession(of_rate.SerializeToString())
    feeds = {"rate": np.array(0.1), "t": np.array(0), "h": np.full(2, 4.0), "ct": np.ones(2)}
    feeds |= {"x": np.ones(2), "g": np.full(2, 2.0), "v": np.array([1.0, 3.0])}
    # v_new = v / 2 + g / 2, h_new = 3 / 4 h + g² / 4
    (got,) = session.run(["rate_grad"], {i.name: feeds[i.name] for i in session.get_inputs()})
    np.testing.assert_allclose(got, -((1.5 + 2.5) / 2.0), rtol=1e-6)


def test_gradients_that_nobody_wants_and_that_are_zero() -> None:
    model = parse("""(double[2] x, double[2] z) => (double[2] gz) {
        f = Floor(z)  y = Mul(x, f)  gx, gz = Gradient<xs = ["x", "z"], y = "y">(x, z) }""")
    model.graph.node[-1].output[0] = ""
    assert lowered(model).run(None, {"x": np.ones(2), "z": np.ones(2)})[0].tolist() == [0.0, 0.0]


def test_optimizer_in_a_branch_and_an_ir_model() -> None:
    model = parse("""(bool train, double rate, int64 t, double[2] w, double[2] g, double[2] v) => (double[2] w_new) {
        w_new = If<then_branch = yes () => (double[2] moved) {
            moved, v_new = Momentum<alpha = 0.5, beta = 1.0, mode = "standard", norm_coefficient = 0.0>(
                rate, t, w, g, v) }, else_branch = no () => (double[2] same) { same = Identity(w) }>(train) }""")
    result = onnxtrain.lower_training_ops(ir.from_proto(model))
    assert isinstance(result, ir.Model)
    session = ort.InferenceSession(ir.to_proto(result).SerializeToString())
    feeds = {"rate": np.array(0.5), "t": np.array(1), "w": np.ones(2), "g": np.ones(2), "v": np.full(2, 2.0)}
    for train, want in ((True, [0.0, 0.0]), (False, [1.0, 1.0])):
        assert session.run(None, feeds | {"train": np.array(train)})[0].tolist() == want


@pytest.mark.parametrize(
    ("nodes", "error", "message"),
    [
        ('y = Gradient<xs = ["x"], y = "nothing">(x)', DifferentiationError, "y names 'nothing'"),
        ('y = Gradient<xs = ["nothing"], y = "x">(x)', DifferentiationError, "xs names 'nothing'"),
        (
            'y = Gradient<xs = ["x"], zs = ["nothing"], y = "x">(x, x)',
            DifferentiationError,
            "zs names 'nothing'",
        ),
        ('y = Gradient<xs = ["x"], y = "x">(x, x)', ModelError, "2 inputs for the 1 tensors"),
        ('y = Gradient<xs = ["x"], y = "z">(x) z = Neg(y)', ModelError, "'z', depends on its own result"),
        ("y = Adam<alpha = 0.5>(rate, t, x, x)", ModelError, "4 inputs; it takes .* and 4 for each tensor"),
        (
            'y, v = Momentum<alpha = 0.5, beta = 1.0, mode = "odd", norm_coefficient = 0.0>(rate, t, x, x, x)',
            ModelError,
            "mode is 'odd'; choose standard or nesterov",
        ),
    ],
)
def test_ops_that_make_no_sense(nodes: str, error: type[Exception], message: str) -> None:
    model = parse(f"(double rate, int64 t, double[2] x) => (double[2] y) {{ {nodes} }}")
    with pytest.raises(error, match=message):
        onnxtrain.lower_training_ops(model)
