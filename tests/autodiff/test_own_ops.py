"""Gradients and bodies of users' ops: what they compute, where they hold, and which mistakes are reported."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnxscript import opset17, opset18, script
from onnxscript.values import Opset

import onnxtrain
from onnxtrain import check_op, register_body, register_gradient
from onnxtrain.autodiff import differentiate
from onnxtrain.errors import (
    DifferentiationError,
    InputError,
    NoGradientRule,
    NothingToTrain,
    OnnxTrainError,
    RuleDefinitionError,
)
from onnxtrain.functional import GradientCheck
from tolerances import NORM_RELATIVE, norm_relative_error

MINE = Opset("com.example", 1)
FLOAT32 = NORM_RELATIVE[np.dtype(np.float32)]
X = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
HEADER = '<ir_version: 10, opset_import: ["": 21, "com.example": 1]>'


@pytest.fixture(autouse=True)
def local() -> Iterator[None]:
    with onnxtrain.local_rules():
        yield


def model(nodes: str, inputs: str = "float[N, 3] x") -> onnx.ModelProto:
    """A model with the scalar output `z`, the sum of the squares of `y`."""
    return onnx.parser.parse_model(
        f"{HEADER} g ({inputs}) => (float z) {{ {nodes} s = Mul(y, y)  z = ReduceSum<keepdims=0>(s) }}"
    )


def gradients(proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    session = ort.InferenceSession(differentiate(proto, "z", list(feeds)).SerializeToString())
    results: list[np.ndarray] = session.run([f"{name}_grad" for name in feeds], feeds)
    return results


def torch_gradients(function: Any, *arrays: np.ndarray) -> list[np.ndarray]:
    tensors = [torch.tensor(array, dtype=torch.float64, requires_grad=True) for array in arrays]
    (function(*tensors) ** 2).sum().backward()
    return [tensor.grad.numpy() for tensor in tensors]  # type: ignore[union-attr]


def close(values: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    for value, reference in zip(values, wanted, strict=True):
        assert value.shape == reference.shape
        assert norm_relative_error(value, reference) < FLOAT32


def swish_body(op: Any, n: Any) -> Any:
    return op.Mul(n.X, op.Sigmoid(op.Mul(n.X, n.attr("alpha"))))


def swish_gradient(op: Any, n: Any, ct: Any) -> Any:
    scaled = op.Mul(n.X, n.attr("alpha"))
    s = op.Sigmoid(scaled)
    return op.Mul(ct, op.Add(s, op.Mul(scaled, op.Mul(s, op.Sub(1.0, s)))))


@script(MINE, default_opset=opset18)
def logistic(x, alpha: float):  # type: ignore[no-untyped-def]
    return opset18.Sigmoid(alpha * x)


@script(MINE, default_opset=opset18)
def swish_function(x, alpha: float):  # type: ignore[no-untyped-def]
    return x * logistic(x, alpha=alpha)


@script(MINE, default_opset=opset18)
def swish_gradient_function(x, ct, alpha: float):  # type: ignore[no-untyped-def]
    s = logistic(x, alpha=alpha)
    return ct * (s + alpha * x * s * (1.0 - s))


swish_gradient_proto = onnx.parser.parse_function("""
    <opset_import: ["" : 21], domain: "com.example"> gradient <alpha> (x, ct) => (r)
    { k = Constant <value_float: float = @alpha> ()  a = Mul(x, k)  s = Sigmoid(a)  c = Sub(k, k)  e = Exp(c)
      o = Sub(e, s)  t = Mul(a, o)  u = Add(t, e)  v = Mul(u, s)  r = Mul(v, ct) }""")
NAMES: dict[str, Any] = {"inputs": "X", "outputs": "Y"}
ALPHA = NAMES | {"attributes": {"alpha": 1.0}}
SWISH = model("y = com.example.Swish2<alpha = 1.5>(x)")


def torch_swish(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.5 * x)


@pytest.mark.parametrize(
    ("body", "gradient"),
    [
        (swish_body, None),
        (swish_body, swish_gradient),
        (swish_body, swish_gradient_function),
        (swish_function, None),
        (swish_body, swish_gradient_proto),
    ],
    ids=["body", "formula", "onnxscript", "onnxscript body", "proto"],
)
def test_an_op_is_differentiated_as_in_torch(body: Any, gradient: Any) -> None:
    register_body("com.example", "Swish2", body, **({} if body is swish_function else ALPHA))
    if gradient is not None:
        register_gradient("com.example", "Swish2", gradient, **ALPHA)
    close(gradients(SWISH, {"x": X}), torch_gradients(torch_swish, X))


def test_an_op_with_several_inputs_and_outputs() -> None:
    """X, Y = R·cos(T), R·sin(T); the loss reads Y alone, so that the cotangent of X is zero."""
    names: dict[str, Any] = {"inputs": ["R", "T"], "outputs": ["X", "Y"]}
    register_body(
        "com.example", "Polar", lambda op, n: (op.Mul(n.R, op.Cos(n.T)), op.Mul(n.R, op.Sin(n.T))), **names
    )

    @register_gradient("com.example", "Polar", **names)
    def polar(op: Any, n: Any, ct: Any) -> Any:
        x, y = ct
        radial = op.Add(op.Mul(x, op.Cos(n.T)), op.Mul(y, op.Sin(n.T)))
        return {"R": radial, "T": op.Sub(op.Mul(y, n.out.X), op.Mul(x, n.out.Y))}

    r, t = X, X[::-1].copy()
    both = model("a, b = com.example.Polar(r, t)  y = Concat<axis = 0>(a, b)", "float[N, 3] r, float[N, 3] t")
    close(
        gradients(both, {"r": r, "t": t}),
        torch_gradients(lambda r, t: torch.cat([r * torch.cos(t), r * torch.sin(t)]), r, t),
    )
    one = model("a, y = com.example.Polar(r, t)", "float[N, 3] r, float[N, 3] t")
    close(gradients(one, {"r": r, "t": t}), torch_gradients(lambda r, t: r * torch.sin(t), r, t))
    # Only one of the inputs has a gradient.
    assert [check.name for check in check_op("com.example", "Polar", [r, t], wrt=["T"], of="Y")] == ["T"]


@script(MINE, default_opset=opset17)
def centered(x):  # type: ignore[no-untyped-def]
    # In opset 17, the axes are an attribute; in opset 18 and later, an input.
    return x - opset17.ReduceMean(x, axes=[1], keepdims=1)


def test_functions_of_older_opsets_are_converted() -> None:
    register_body("com.example", "Center", centered)
    register_gradient("com.example", "Center", centered_gradient)
    close(
        gradients(model("y = com.example.Center(x)"), {"x": X}),
        torch_gradients(lambda x: x - x.mean(1, keepdim=True), X),
    )


@script(MINE, default_opset=opset17)
def centered_gradient(x, ct):  # type: ignore[no-untyped-def]
    return ct - opset17.ReduceMean(ct, axes=[1], keepdims=1)


def test_the_gradient_of_a_standard_op_is_replaced_in_a_block_only() -> None:
    """Guided backpropagation: only positive cotangents pass a Relu."""
    relu = model("t = Neg(x)  y = Relu(t)")

    def guided(op: Any, n: Any, ct: Any) -> Any:
        return op.Where(op.Greater(n.X, 0.0), op.Mul(ct, 10.0), 0.0)

    with pytest.raises(RuleDefinitionError, match=r"Relu: it already has a rule. Pass override=True"):
        raise_outside_of_blocks("Relu", guided)
    before = gradients(relu, {"x": X})[0]
    with onnxtrain.local_rules():
        register_gradient("", "Relu", guided, override=True)
        np.testing.assert_array_equal(gradients(relu, {"x": X})[0], 10 * before)
    np.testing.assert_array_equal(gradients(relu, {"x": X})[0], before)
    # A body replaces the op, and so its gradient, where a gradient flows.
    with onnxtrain.local_rules():
        register_body("", "Relu", lambda op, n: op.Mul(n.X, 5.0), override=True)
        np.testing.assert_allclose(gradients(relu, {"x": X})[0], 50 * X, rtol=1e-6)


def raise_outside_of_blocks(op_type: str, formula: Any) -> None:
    """Registers a gradient in another thread, in which no block of local rules is open."""
    errors: list[Exception] = []

    def work() -> None:
        try:
            register_gradient("", op_type, formula)
        except RuleDefinitionError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    raise errors[0]


FUNCTION = f"""{HEADER} g (float[N, 3] x) => (float z) {{ y = com.example.Twice <by = 3.0> (x)  s = Mul(y, y)
z = ReduceSum<keepdims = 0>(s) }}
<opset_import: ["": 21], domain: "com.example"> Twice <by>(x) => (y) {{ k = Constant <value_float: float = @by> ()
t = Tanh(x)  y = Mul(t, k) }}"""


def test_functions_of_a_model_are_differentiated_through_their_body_or_by_a_gradient() -> None:
    proto = onnx.parser.parse_model(FUNCTION)
    wanted = torch_gradients(lambda x: 3 * torch.tanh(x), X)
    close(gradients(proto, {"x": X}), wanted)

    @register_gradient("com.example", "Twice", inputs="x", outputs="y")
    def doubled(op: Any, n: Any, ct: Any) -> Any:
        t = op.Tanh(n.x)
        return op.Mul(op.Mul(ct, 2 * n.attr("by")), op.Sub(1.0, op.Mul(t, t)))

    close(gradients(proto, {"x": X}), [2 * wanted[0]])


NETWORK = f"""{HEADER} g (float[N, 3] x) => (float[N, 2] y) <float[3, 2] w = {{1, 2, 3, 4, 5, 6}}>
{{ a = MatMul(x, w)  y = com.example.Swish2<alpha = 1.5>(a) }}"""


def test_a_body_trains_and_is_exported_in_place_of_its_op(tmp_path: Path) -> None:
    """As PyTorch does, in float64, over three steps of SGD."""
    register_body("com.example", "Swish2", swish_body, **ALPHA)
    trainer = onnxtrain.Trainer(onnx.parser.parse_model(NETWORK), "mse", "sgd", 0.1)
    target = X[:, :2]
    trainer.fit(X, target, epochs=3, batch_size=5, shuffle=False, verbose=False)
    w = torch.tensor(np.arange(1, 7).reshape(3, 2), dtype=torch.float64, requires_grad=True)
    for _ in range(3):
        loss = torch.nn.functional.mse_loss(
            torch_swish(torch.tensor(X).double() @ w), torch.tensor(target).double()
        )
        (step,) = torch.autograd.grad(loss, w)
        w = (w - 0.1 * step).detach().requires_grad_()
    assert norm_relative_error(trainer.parameters["w"].data, w.detach().numpy()) < FLOAT32
    trainer.export(tmp_path / "trained.onnx")
    session = ort.InferenceSession(tmp_path / "trained.onnx")
    assert norm_relative_error(session.run(None, {"x": X})[0], trainer.predict(X)) < FLOAT32
    assert all(node.domain == "" for node in onnx.load(tmp_path / "trained.onnx").graph.node)


SCALED = f"""{HEADER} g (float[N, 3] x) => (float[N, 3] y)
<float[3, 3] w = {{1, 2, 3, 4, 5, 6, 7, 8, 9}}, float[3] gain = {{1, 1, 1}}>
{{ a = MatMul(x, w)  y = com.example.Scaled(a, gain) }}"""


class Scaled(torch.autograd.Function):
    """x * gain, whose gradient flows to one of the inputs."""

    @staticmethod
    def forward(ctx: Any, x: Any, gain: Any, to_x: bool) -> Any:
        ctx.to_x = to_x
        ctx.save_for_backward(x, gain)
        return x * gain

    @staticmethod
    def backward(ctx: Any, ct: Any) -> Any:
        x, gain = ctx.saved_tensors
        return (ct * gain, None, None) if ctx.to_x else (None, (ct * x).sum(0), None)


@pytest.mark.parametrize("to_x", [True, False])
def test_parameters_with_a_gradient_of_none_keep_their_values_as_in_torch(
    caplog: pytest.LogCaptureFixture, to_x: bool
) -> None:
    """Steps of AdamW, whose weight decay would change them. None for `a` stops the gradient of `w`, too."""
    names: dict[str, Any] = {"inputs": "X G", "outputs": "Y"}
    register_body("com.example", "Scaled", lambda op, n: op.Mul(n.X, n.G), **names)

    @register_gradient("com.example", "Scaled", **names)
    def scaled(op: Any, n: Any, ct: Any) -> Any:
        return (op.Mul(ct, n.G), None) if to_x else (None, op.ReduceSum(op.Mul(ct, n.X), [0], keepdims=0))

    trainer = onnxtrain.Trainer(onnx.parser.parse_model(SCALED), "mse", "adamw", 0.1)
    trainer.fit(X, X[::-1].copy(), epochs=3, batch_size=5, shuffle=False, verbose=False)
    w = torch.arange(1.0, 10.0, dtype=torch.float64).reshape(3, 3).requires_grad_()
    gain = torch.ones(3, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.AdamW([w, gain], lr=0.1)
    x, y = torch.tensor(X).double(), torch.tensor(X[::-1].copy()).double()
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(Scaled.apply(x @ w, gain, to_x), y).backward()
        optimizer.step()
    stopped, trained = ("gain", "w") if to_x else ("w", "gain")
    for name, wanted in (("w", w), ("gain", gain)):
        assert norm_relative_error(trainer.parameters[name].data, wanted.detach().numpy()) < FLOAT32
    assert not trainer.parameters[stopped].requires_grad
    assert trainer.parameters[trained].requires_grad
    (warning,) = [r.getMessage() for r in caplog.records if "No gradient flows" in r.getMessage()]
    assert f"to 1 of the 2 parameters to train: {stopped}, because" in warning


def test_gradients_of_none_for_all_parameters_are_refused() -> None:
    names: dict[str, Any] = {"inputs": "X G", "outputs": "Y"}
    register_body("com.example", "Scaled", lambda op, n: op.Mul(n.X, n.G), **names)
    register_gradient("com.example", "Scaled", lambda op, n, ct: (None, None), **names)
    with pytest.raises(
        NothingToTrain, match=r"parameters to train \(w, gain\): the gradients that were registered"
    ):
        onnxtrain.Trainer(onnx.parser.parse_model(SCALED), "mse")


@pytest.mark.parametrize("opset", [18, 20, 21])
def test_an_onnxscript_body_named_as_the_op_may_have_a_gradient_of_its_own(opset: int) -> None:
    """The op is named as its body, `com.example::swish_function`, and the gradient is the identity."""
    register_body("com.example", "swish_function", swish_function)
    register_gradient("com.example", "swish_function", lambda op, n, ct: ct)
    proto = onnx.parser.parse_model(NETWORK.replace("Swish2", "swish_function"))
    proto.opset_import[0].version = opset
    trainer = onnxtrain.Trainer(proto, "mse", "sgd", 0.1)
    w = np.arange(1, 7).reshape(3, 2)
    swished = torch_swish(torch.tensor(X.astype(np.float64) @ w)).numpy()
    assert norm_relative_error(trainer.predict(X), swished) < FLOAT32
    target = X[:, :2]
    trainer.fit(X, target, epochs=1, batch_size=5, shuffle=False, verbose=False)
    # The gradient of the loss at the result of the op, as if the op were the identity.
    step = X.astype(np.float64).T @ (2 * (swished - target) / target.size)
    assert norm_relative_error(trainer.parameters["w"].data, w - 0.1 * step) < FLOAT32


def test_an_op_with_a_kernel_stays_in_the_inference_model(tmp_path: Path) -> None:
    register_body("com.example", "Swish2", swish_body, has_kernel=True, **ALPHA)
    onnxtrain.generate_artifacts(onnx.parser.parse_model(NETWORK), loss="mse", artifact_directory=tmp_path)
    ops = {
        name: {n.op_type for n in onnx.load(tmp_path / name).graph.node}
        for name in ("training_model.onnx", "inference_model.onnx")
    }
    assert "Swish2" in ops["inference_model.onnx"]
    assert "Swish2" not in ops["training_model.onnx"]


@pytest.mark.parametrize(
    ("formula", "message"),
    [
        (lambda op, n, ct: (ct, ct), r"returned 2 cotangents, but is registered for 1 input \(X\)"),
        (lambda op, n, ct: (), r"returned 0 cotangents, but is registered for 1 input \(X\)"),
        (lambda op, n, ct: 3.0, "returned a float for the input 'X'; return a value that `op` has emitted"),
        (lambda op, n, ct: {"Z": ct}, "returned a cotangent for 'Z'; it is registered for X"),
        (
            lambda op, n, ct: op.Cast(ct, to=11),
            r"cotangent of dtype DOUBLE for the input 'X' \('x'\), which is FLOAT",
        ),
        (
            lambda op, n, ct: op.ReduceSum(ct, [1]),
            r"of shape \[N,1\] for the input 'X' .* which has shape \[N,3\]",
        ),
        (lambda op, n, ct: op.ReduceSum(ct, [1], keepdims=0), r"cotangent of shape \[N\] for the input 'X'"),
        (lambda op, n, ct: op.Mul(ct, n.W), r"Swish2 has no input 'W'"),
    ],
    ids=["two", "none", "number", "name", "dtype", "size", "rank", "input"],
)
def test_wrong_cotangents_are_refused(formula: Any, message: str) -> None:
    register_body("com.example", "Swish2", swish_body, **ALPHA)
    register_gradient("com.example", "Swish2", formula, **ALPHA)
    with pytest.raises(OnnxTrainError, match=message):
        differentiate(SWISH, "z", ["x"])


@pytest.mark.parametrize(
    ("register", "message"),
    [
        (lambda: register_gradient("com.example", "A", swish_gradient), "ONNX knows no such op, so its inputs have no"),
        (lambda: register_gradient("", "Nothing", swish_gradient), "no such op in opsets"),
        (lambda: register_gradient("com.example", "A", swish_gradient, wrt="Z", **NAMES), "has no input 'Z'"),
        (lambda: register_gradient("com.example", "A", swish_gradient, saves="M", **NAMES), "has no output 'M'"),
        (lambda: register_gradient("com.example", "A", 3, **NAMES), "the formula is a int; pass a function"),
        (lambda: register_gradient("com.example", "A", swish_function, **NAMES),
         r"swish_function has 1 inputs \(x\), but needs 2: X, Y"),
        (lambda: register_gradient("com.example", "A", swish_gradient, shapes="Z", **NAMES), "shapes='Z' is not an"),
        (lambda: register_body("com.example", "A", 3, **NAMES), "received a int; pass a function"),
        (lambda: register_body("com.example", "A", swish_body), "pass them, e.g. inputs="),
        (lambda: register_body("", "Relu", swish_body), "already has a gradient, which the body would not change"),
        (lambda: register_body("com.example", "logistic", swish_function), "calls the op itself"),
        (lambda: [register_body("com.example", "A", swish_body, **NAMES) for _ in range(2)], "already has a body"),
        (lambda: [register_gradient("com.example", "A", swish_gradient, **NAMES) for _ in range(2)],
         "has already registered a rule"),
    ],
)  # fmt: skip
def test_wrong_registrations_are_refused(register: Any, message: str) -> None:
    with pytest.raises(RuleDefinitionError, match=message):
        register()


def test_unknown_attributes_of_a_body_are_refused() -> None:
    register_body("com.example", "Swish2", swish_body, attributes={"beta": 1.0}, **NAMES)
    with pytest.raises(
        OnnxTrainError, match=r"its body does not support the attribute 'alpha'.*Use a custom op"
    ):
        differentiate(SWISH, "z", ["x"])


def test_an_op_without_a_gradient_is_reported_with_the_call_that_it_needs() -> None:
    proto = model("y = com.example.Unknown(x)")
    proto.graph.value_info.append(onnx.helper.make_tensor_value_info("y", 1, ["N", 3]))
    calls = r'register_body\("com.example", "Unknown", ...\), .*register_gradient\("com.example", "Unknown", ...\): '
    with pytest.raises(NoGradientRule, match=calls):
        differentiate(proto, "z", ["x"])
    with pytest.raises(OnnxTrainError, match=r"pass shapes to onnxtrain.register_gradient\("):
        onnxtrain.generate_artifacts(model("y = com.example.Unknown(x)"), loss="mse", loss_input_names=["y"])


def test_shapes_of_an_op_without_a_body_may_resemble_an_input() -> None:
    """The model is differentiated, but only a library of custom ops could run it."""
    register_gradient("com.example", "Unknown", lambda op, n, ct: op.Mul(ct, 2.0), shapes="X", **NAMES)
    step = differentiate(model("y = com.example.Unknown(x)"), "z", ["x"])
    assert "Unknown" in {node.op_type for node in step.graph.node}
    with pytest.raises(
        OnnxTrainError, match=r"onnxruntime has no op 'Unknown' of the domain 'com.example'. Register"
    ):
        check_op("com.example", "Unknown", [X])


def checks(**options: Any) -> list[GradientCheck]:
    return check_op("com.example", "Swish2", {"X": X}, attributes={"alpha": 1.5}, **options)


def test_check_op_names_the_input_and_both_numbers() -> None:
    register_body("com.example", "Swish2", swish_body, **ALPHA)
    assert [(check.name, check.verdict, check.precision) for check in checks()] == [
        ("X", "agrees", "float64")
    ]
    register_gradient(
        "com.example", "Swish2", lambda op, n, ct: op.Mul(swish_gradient(op, n, ct), 2.0), **ALPHA
    )
    wrong = checks(raise_exception=False)[0]
    assert wrong.verdict == "differs"
    assert wrong.derivative == pytest.approx(2 * wrong.difference, rel=1e-4)
    with pytest.raises(
        DifferentiationError, match="Swish2: input 'X' differs: along a random direction"
    ) as caught:
        checks()
    assert f"{wrong.derivative:.6g}" in str(caught.value)
    assert f"{wrong.difference:.6g}" in str(caught.value)


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        ({"Z": X}, {}, "it has no input 'Z'; its inputs are X"),
        ([X, X], {}, "received 2 inputs, but the op has 1"),
        ([], {}, "no inputs are given"),
        ([X], {"wrt": ["Z"]}, "wrt names 'Z'"),
        ([X], {"of": "Z"}, "of is 'Z'; the outputs are Y"),
        ([X.astype(np.int64)], {}, "none of the inputs is floating point"),
    ],
)
def test_check_op_refuses_what_the_op_has_not(inputs: Any, options: dict[str, Any], message: str) -> None:
    register_body("com.example", "Swish2", swish_body, **ALPHA)
    with pytest.raises(InputError, match=message):
        check_op("com.example", "Swish2", inputs, **options)


def test_check_op_checks_ops_of_the_standard() -> None:
    q = np.array([[1, 2, 3]], np.int64)
    assert [
        check.name for check in check_op("", "Gemm", [X, X.T.copy(), None], attributes={"alpha": 0.5})
    ] == ["A", "B"]
    assert [check.verdict for check in check_op("", "GatherElements", [X, q])] == ["agrees"]
