"""Files with all weights in Constant nodes, as paddle2onnx and spox write them, are trained as others are."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

from onnxtrain import Trainer
from onnxtrain.errors import NothingToTrain
from onnxtrain.lora import LoraConfig

# A hard swish, whose 3 and 6 are numbers of a formula, as paddle2onnx writes it, and a layer of one unit.
HARD_SWISH = """<ir_version: 8, opset_import: ["": 13]> g (float[n, 3] x) => (float[n, 1] y) {
    w = Constant<value = float[3, 2] {1.0, -2.0, 3.0, 0.5, 0.1, -1.0}>()  b = Constant<value_floats = [1.0, 2.0]>()
    v = Constant<value = float[2, 1] {1.0, 2.0}>()  c = Constant<value = float[1] {0.5}>()
    three = Constant<value = float[1] {3.0}>()  six = Constant<value = float {6.0}>()
    zero = Constant<value = float {0.0}>()
    m = MatMul(x, w)  h = Add(m, b)  a = Add(h, three)  k = Clip(a, zero, six)  p = Mul(h, k)  d = Div(p, six)
    y = Gemm(d, v, c) }"""

# As silero_vad: everything is inside of an If.
BRANCHES = """<ir_version: 8, opset_import: ["": 13]> g (float[n, 3] x) => (float[n, 2] y) {
    s = ReduceSum<keepdims = 0>(x)  zero = Constant<value = float {0.0}>()  positive = Less(zero, s)
    y = If(positive) <
        then_branch = t () => (float[n, 2] u) {
            w = Constant<value = float[3, 2] {1.0, -2.0, 3.0, 0.5, 0.1, -1.0}>()  u = MatMul(x, w) },
        else_branch = e () => (float[n, 2] o) {
            v = Constant<value = float[3, 2] {1.0, 2.0, 3.0, 4.0, 5.0, 6.0}>()  o = MatMul(x, v) }> }"""


def trained_names(trainer: Trainer) -> list[str]:
    return [name for name, parameter in trainer.parameters if parameter.requires_grad]


@pytest.mark.parametrize(("choice", "expected"), [
    (None, {"w", "b", "v", "c"}), ("*", {"w", "b", "v", "c"}), ("[vc]", {"v", "c"}), (["w"], {"w"}),
])  # fmt: skip
def test_patterns_and_the_default_find_them(choice: str | list[str] | None, expected: set[str]) -> None:
    trainer = Trainer(onnx.parser.parse_model(HARD_SWISH), "mse", requires_grad=choice)
    assert set(trained_names(trainer)) == expected


def test_they_train_as_in_torch() -> None:
    model = onnx.parser.parse_model(HARD_SWISH)
    x = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    target = np.ones((4, 1), np.float32)
    trainer = Trainer(model, "mse", "sgd", learning_rate=0.1)
    given = ort.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]
    np.testing.assert_allclose(trainer.predict(x), given, rtol=1e-6)
    parameters = {name: torch.tensor(np.array(p.data), requires_grad=True) for name, p in trainer.parameters}
    trainer.fit(x, target, batch_size=4, verbose=False)

    hidden = torch.nn.functional.hardswish(torch.tensor(x) @ parameters["w"] + parameters["b"])
    loss = (hidden @ parameters["v"] + parameters["c"] - torch.tensor(target)).square().mean()
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    for (name, value), gradient in zip(parameters.items(), gradients, strict=True):
        expected = (value - 0.1 * gradient).detach().numpy()
        np.testing.assert_allclose(np.array(trainer.parameters[name].data), expected, rtol=1e-4, atol=1e-6)


def test_those_in_branches_are_found_too() -> None:
    trainer = Trainer(onnx.parser.parse_model(BRANCHES), "mse")
    assert set(trained_names(trainer)) == {"w", "v"}


def test_adapters_are_put_beside_them() -> None:
    trainer = Trainer(onnx.parser.parse_model(HARD_SWISH), "mse", lora=LoraConfig(r=1, target_modules=["w"]))
    assert {name.partition(".lora_")[0] for name in trained_names(trainer)} == {"w"}


def test_beside_initializers_constants_are_numbers_of_formulas() -> None:
    """PyTorch's TorchScript exporter writes tensors that a module makes itself as Constant nodes."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]> g (float[n, 3] x) => (float[n, 3] y)
        <float[3] w = {1, 2, 3}> { c = Constant<value_floats = [1.0, 2.0, 3.0]>()  h = Mul(x, w)  y = Add(h, c) }""")
    assert trained_names(Trainer(model, "mse")) == ["w"]


def test_numbers_alone_are_no_weights() -> None:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]> g (float[n, 3] x) => (float[n, 3] y)
        { c = Constant<value = float[1] {2.0}>()  y = Mul(x, c) }""")
    with pytest.raises(NothingToTrain):
        Trainer(model, "mse")
