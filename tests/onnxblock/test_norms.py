"""The normalisation blocks beside `onnxtrain.nn`: values, gradients, training."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from onnx.reference import ReferenceEvaluator

import onnxtrain.nn
from onnxblock.nets import ELEM, Outputs, built, identity, run
from onnxtrain import onnxblock
from onnxtrain.errors import GraphBuildError
from onnxtrain.onnxblock import blocks
from tolerances import norm_relative_error
from training_run import Run

SIZE = 6
TOLERANCE = {np.float64: 1e-12, np.float32: 1e-6}
OPSETS = {
    "LayerNorm": (17, 18, 21),
    "LayerNormNoBias": (17, 18, 21),
    "RMSNorm": (13, 18, 21),
    "RINorm": (13, 18, 21),
}

LAYERS = [
    ("LayerNorm", {}),
    ("LayerNorm", {"eps": 0.125, "bias": False}),
    ("LayerNorm", {"elementwise_affine": False}),
    ("LayerNormNoBias", {}),
    ("RMSNorm", {}),
    ("RMSNorm", {"eps": 0.7}),
    ("RINorm", {}),
    ("RINorm", {"eps": 0.1}),
    ("RINorm", {"affine": False}),
]  # fmt: skip
LAYER_IDS = ["-".join([name, *(f"{k}={v}" for k, v in kwargs.items())]) for name, kwargs in LAYERS]
CASES = [
    pytest.param(name, kwargs, opset, id=f"{id_}-{opset}")
    for (name, kwargs), id_ in zip(LAYERS, LAYER_IDS, strict=True)
    for opset in OPSETS[name]
]


class SquareOf(onnxblock.TrainingBlock):
    """The mean of the squares of 1 + the results of a builder, which are outputs too."""

    def __init__(self, builder: Any) -> None:
        super().__init__()
        self.builder = builder
        self.loss = onnxblock.loss.MSELoss()

    def build(self, *names: str) -> Any:
        y = self.builder(*names)
        return self.loss(y), y


def shifted(dtype: type, opset: int, shape: list[int | str]) -> onnx.ModelProto:
    """y = x * shift: a parameter before the layer, so that statistics could pass a gradient on."""
    x, y = (helper.make_tensor_value_info(name, ELEM[np.dtype(dtype)], shape) for name in "xy")
    shift = onnx.numpy_helper.from_array(np.linspace(0.5, 1.5, SIZE).astype(dtype), "shift")
    graph = helper.make_graph([helper.make_node("Mul", ["x", "shift"], ["y"])], "g", [x], [y], [shift])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def sampled(*shape: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.normal(size=shape) * rng.uniform(0.5, 2, (shape[0], 1, 1)) + 0.3


def gradients(builder: Any, model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Outputs of the training model; parameters are what they start as."""
    block = built(SquareOf(builder), model)
    training, _ = block.to_model_proto()
    trained, frozen = block.parameters()
    values = {t.name: onnx.numpy_helper.to_array(t) for t in (*trained, *frozen)}
    return run(training, values | feeds)


def torch_gradients(
    net: Any, layer: torch.nn.Module, x: np.ndarray, target: np.ndarray
) -> dict[str, np.ndarray]:
    shift = torch.linspace(0.5, 1.5, SIZE, dtype=torch.float64, requires_grad=True)
    y = net(torch.from_numpy(x) * shift)
    loss = torch.nn.functional.mse_loss(y, torch.from_numpy(target))
    loss.backward()
    named = {name: p.grad.numpy() for name, p in layer.named_parameters()}
    return {"loss": loss.detach().numpy(), "y": y.detach().numpy(), "shift": shift.grad.numpy(), **named}


def assert_same(got: dict[str, np.ndarray], want: dict[str, np.ndarray], tolerance: float) -> None:
    """The loss, then y, then the gradients, whose names end as the parameters of the module do."""
    loss, y, *rest = got.values()
    assert norm_relative_error(loss, want.pop("loss")) <= tolerance
    assert norm_relative_error(y, want.pop("y")) <= tolerance
    assert len(rest) == len(want)
    for (name, reference), value in zip(want.items(), rest, strict=True):
        (key,) = [key for key in got if key.endswith(f"{name}_grad")]
        assert value is got[key]
        assert value.shape == reference.shape
        assert norm_relative_error(value, reference) <= tolerance


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(("name", "kwargs", "opset"), CASES)
def test_values_and_gradients_of_the_module(name, kwargs, opset, dtype):
    x, target = sampled(3, 5, SIZE).astype(dtype), sampled(3, 5, SIZE, seed=1).astype(dtype)
    block = getattr(blocks, name)(SIZE, **kwargs)
    got = gradients(block, shifted(dtype, opset, ["n", 5, SIZE]), {"x": x, "target": target})
    layer = getattr(onnxtrain.nn, name)(SIZE, **kwargs).double()
    # The epsilon of LayerNormalization is float32.
    tolerance = 1e-8 if name.startswith("LayerNorm") and dtype == np.float64 else TOLERANCE[dtype]
    want = torch_gradients(layer, layer, x.astype(np.float64), target.astype(np.float64))
    assert_same(got, want, 3 * tolerance)


def test_rin_norm_of_large_numbers_in_float16():
    """Whose squares float16 does not hold. ONNX Runtime computes in float32 here; the reference does not."""
    norm, x = blocks.RINorm(SIZE), (sampled(3, 96, SIZE) * 500 + 1000).astype(np.float16)

    net = Outputs(lambda y: norm(y))
    with onnxblock.base(identity(["n", 96, SIZE], np.float16)):
        net("y")
    (y,) = ReferenceEvaluator(net.to_model_proto()).run(None, {"x": x})
    assert y.dtype == np.float16
    want = onnxtrain.nn.RINorm(SIZE).double()(torch.from_numpy(x).double()).detach().numpy()
    assert norm_relative_error(y.astype(np.float64), want) <= 2e-3


@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
def test_transform_and_inverse_of_the_module(affine):
    norm = blocks.RINorm(SIZE, affine=affine)

    def there_and_back(y: str) -> str:
        z = blocks.Add()(blocks.Sigmoid()(norm(y)), norm.transform("x"))
        return norm.inverse(unsqueezed(z))

    def unsqueezed(name: str) -> str:
        return Unsqueezed()(name)

    class Unsqueezed(onnxblock.Block):
        def build(self, name: str) -> str:
            return self._append(lambda op, x: op.Unsqueeze(x, [-1]), name)

    x, target = sampled(3, 5, SIZE), sampled(3, 5, SIZE, seed=1)[..., None]
    got = gradients(there_and_back, shifted(np.float64, 21, ["n", 5, SIZE]), {"x": x, "target": target})
    layer = onnxtrain.nn.RINorm(SIZE, affine=affine).double()

    def twin(y: torch.Tensor) -> torch.Tensor:
        z = torch.sigmoid(layer(y)) + layer.transform(torch.from_numpy(x))
        return layer.inverse(z.unsqueeze(-1))

    assert_same(got, torch_gradients(twin, layer, x, target), 1e-12)


@pytest.mark.parametrize("shape", [(3, SIZE), (2, 3, 4, SIZE)], ids=["2d", "4d"])
@pytest.mark.parametrize("opset", OPSETS["RINorm"])
def test_rin_norm_of_other_ranks(shape, opset):
    """Of two axes both are reduced, as in PyTorch."""
    rng = np.random.default_rng(0)
    x, target = rng.normal(size=shape) * 3 + 1, rng.normal(size=shape)
    model = shifted(np.float64, opset, ["n", *shape[1:]])
    got = gradients(blocks.RINorm(SIZE), model, {"x": x, "target": target})
    layer = onnxtrain.nn.RINorm(SIZE).double()
    assert_same(got, torch_gradients(layer, layer, x, target), 3e-12)


def test_inverse_undoes_the_layer():
    norm = blocks.RINorm(SIZE)

    class Unsqueezed(onnxblock.Block):
        def build(self, name: str) -> str:
            return self._append(lambda op, x: op.Unsqueeze(x, [-1]), name)

    onnx_unsqueeze = Unsqueezed()
    both, x = Outputs(lambda y: norm.inverse(onnx_unsqueeze(norm(y)))), sampled(3, 5, SIZE) * 10 + 350
    with onnxblock.base(identity(["n", 5, SIZE], np.float64)):
        name = both("y")
    model = both.to_model_proto()
    back = run(model, {"x": x})[name]
    np.testing.assert_allclose(back[..., 0], x, rtol=1e-9)
    values = {t.name.rpartition(".")[2]: t for t in model.graph.initializer}
    for kind, number in (("affine_weight", 0.0), ("affine_bias", 0.7)):
        values[kind].CopyFrom(onnx.numpy_helper.from_array(np.full(SIZE, number), values[kind].name))
    # A weight of zero leaves the mean.
    flat = np.broadcast_to(x.mean(1, keepdims=True), x.shape)
    np.testing.assert_allclose(run(model, {"x": x})[name][..., 0], flat, rtol=1e-14)


@pytest.mark.parametrize(("name", "kwargs"), LAYERS, ids=LAYER_IDS)
def test_training_on_the_device(name, kwargs, tmp_path):
    """From an identity and a layer to a layer with the scale of another one."""

    class Net(onnxblock.Block):
        def __init__(self) -> None:
            super().__init__()
            self.norm = getattr(blocks, name)(SIZE, **kwargs)
            self.mul = blocks.Mul()
            self.loss = onnxblock.loss.MSELoss()

        def build(self, y: str) -> str:
            return self.loss(self.mul(self.norm(y), "shift"))

    model = shifted(np.float32, 21, ["n", 5, SIZE])
    trained = Run.generate(tmp_path, model, loss=Net(), optimizer="adamw")
    rng = np.random.default_rng(3)
    layer = getattr(onnxtrain.nn, name)(SIZE, **kwargs)
    scale = torch.linspace(2, 1, SIZE)
    losses = []
    for _ in range(150):
        x = rng.normal(size=(8, 5, SIZE)).astype(np.float32)
        target = (layer(torch.from_numpy(x)) * scale).detach().numpy()
        trained.optimizer.set_learning_rate(0.02)
        losses.append(trained.step(x, target))
    assert losses[-1] < 0.1 * losses[0]


def test_the_training_model_has_the_fused_ops():
    def ops(name: str) -> Counter[str]:
        block = built(SquareOf(getattr(blocks, name)(SIZE)), shifted(np.float32, 21, [3, 5, SIZE]))
        return Counter(node.op_type for node in block.to_model_proto()[0].graph.node)

    rms, layer, rin = ops("RMSNorm"), ops("LayerNorm"), ops("RINorm")
    assert rms["FlooredRMSNormalization_float"] == rms["FlooredRMSNormalizationGradient_float"] == 1
    assert rms["ReduceL2"] == rms["Clip"] == 0
    assert layer["LayerNormalizationTraining_float"] == layer["LayerNormalizationGradient_float"] == 1
    normalization = "ReversibleInstanceNormalization"
    assert rin[f"{normalization}_float"] == rin[f"{normalization}Gradient_float"] == 1
    assert rin["Sqrt"] == rin["Where"] == 0


@pytest.mark.parametrize(
    ("block", "shape", "message"),
    [
        (blocks.LayerNorm(SIZE + 1), ["n", SIZE], "last axes of 'y' must have the sizes"),
        (blocks.LayerNorm((2, SIZE)), ["n", SIZE + 2, SIZE], "last axes"),
        (blocks.RMSNorm(1), ["n", SIZE], "last axes"),
        (blocks.RINorm(1), ["n", 5, SIZE], "last axes"),
        (blocks.RINorm(SIZE).inverse, ["n", 5, SIZE, 1], "call the layer on the input series first"),
        (blocks.RINorm(SIZE).transform, ["n", 5, SIZE], "call the layer on the input series first"),
        (blocks.RINorm(SIZE).inverse, ["n", 5, SIZE + 1, 1], "axes before the last 1"),
    ],
)  # fmt: skip
def test_bad_sizes_raise(block, shape, message):
    with onnxblock.base(identity(shape)), pytest.raises(GraphBuildError, match=message):
        block("y")


def test_layer_norm_needs_opset_17():
    with (
        onnxblock.base(identity(["n", SIZE], opset=13)),
        pytest.raises(GraphBuildError, match="needs opset 17 or newer, but the base model imports 13"),
    ):
        blocks.LayerNorm(SIZE)("y")


def test_integers_cannot_be_normalised():
    info = [helper.make_tensor_value_info(name, onnx.TensorProto.INT64, ["n", SIZE]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", info[:1], info[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    with onnxblock.base(model), pytest.raises(GraphBuildError, match="pass a floating-point value"):
        blocks.RMSNorm(SIZE)("y")
