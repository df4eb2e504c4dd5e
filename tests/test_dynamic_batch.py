"""`make_batch_dynamic`: files that PyTorch exported for one size, run at another, beside PyTorch."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import nn

from onnxtrain import Trainer, make_batch_dynamic
from onnxtrain.errors import ModelError
from onnxtrain.passes import load_model, to_proto


def made_dynamic(model: Any, *arguments: Any, **options: Any) -> ir.Model:
    """Call `make_batch_dynamic`; assert that it returns the kind of model it was given, and load that."""
    result = make_batch_dynamic(model, *arguments, **options)
    assert isinstance(result, ir.Model if isinstance(model, ir.Model) else onnx.ModelProto)
    return load_model(result)


class Attention(nn.Module):
    """Patches, a class token, positions, an encoder layer with the batch in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.positions = nn.Parameter(torch.randn(1, 5, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return self.head(self.encoder(x)[:, 0])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Upsampled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.interpolate(self.conv(x), size=(13, 11), mode="bilinear").view(x.shape[0], -1)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 3),
    )


NETS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "convolutions": (convolutions, (3, 8, 8)),
    "attention": (Attention, (3, 8, 8)),
    "recurrent": (Recurrent, (5, 4)),
    "upsampled": (Upsampled, (3, 8, 8)),
}


def export(net: nn.Module, shape: tuple[int, ...], batch: int, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        torch.onnx.export(net, (torch.randn(batch, *shape),), path, dynamo=False)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", NETS)
def test_any_number_of_samples(name: str, batch: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, shape = NETS[name]
    net = make().eval()
    export(net, shape, batch, tmp_path / "net.onnx")
    model = made_dynamic(tmp_path / "net.onnx")
    assert [str(value.shape[0]) for value in (*model.graph.inputs, *model.graph.outputs)] == ["batch"] * 2
    session = ort.InferenceSession(to_proto(model).SerializeToString())
    for count in (1, 4, 7):
        x = torch.randn(count, *shape)
        (result,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        np.testing.assert_allclose(result, net(x).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_training_is_that_of_a_dynamic_export(tmp_path: Path) -> None:
    """A default export has a batch of 1; made dynamic it trains as PyTorch does with batches of 8."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    export(net, (4,), 1, tmp_path / "net.onnx")
    x = np.random.default_rng(0).standard_normal((20, 4)).astype(np.float32)
    y = x[:, :3].argmax(axis=1)
    trainer = Trainer(made_dynamic(tmp_path / "net.onnx"), "cross_entropy", "sgd", 0.1)
    trainer.fit(x, y, epochs=3, batch_size=8, shuffle=False, verbose=False)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(3):
        for start in range(0, 20, 8):
            optimizer.zero_grad()
            scores = net(torch.tensor(x[start : start + 8]))
            nn.functional.cross_entropy(scores, torch.tensor(y[start : start + 8])).backward()
            optimizer.step()
    expected = net(torch.tensor(x)).detach().numpy()
    np.testing.assert_allclose(trainer.predict(x), expected, rtol=1e-4, atol=1e-5)


def parse(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "g (float[1, 3] x) => (float[1, 3] y) <int64[1] a = {0}> { m = ReduceMean(x, a) y = Sub(x, m) }",
            "the model mixes its samples",
        ),
        (
            "g (float[4, 3] x) => (float[4, 3] y) <float[4, 1] r = {1., 2., 3., 4.}> { y = Mul(x, r) }",
            r"\(Mul\) requires exactly 4 samples: it does not support another batch size",
        ),
        (
            "g (float[1, 3] x) => (float[3] y) <int64[1] a = {0}> { y = Squeeze(x, a) }",
            r"\(Squeeze\) requires exactly 1 samples",
        ),
        (
            "g (float[1, 3] x, float[2, 3] z) => (float[2, 3] y) { y = Add(x, z) }",
            "different sizes along axis 0",
        ),
        (
            "g (float[2, 3] x) => (float[1] y) { y = ReduceSum<keepdims = 0>(x) }",
            "has the samples along axis 0",
        ),
        # A Squeeze without axes removes the batch of 1 and keeps any other.
        (
            "g (float[1, 4] x) => (float[2, 2] y) <int64[2] s = {2, 2}> { a = Squeeze(x)  y = Reshape(a, s) }",
            "no axis is the batch axis alone",
        ),
    ],
)
def test_models_that_are_no_function_of_single_samples(text: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        made_dynamic(parse(text))


def test_a_model_that_is_dynamic_stays() -> None:
    model = made_dynamic(parse("g (float[n, 3] x) => (float[n, 3] y) { y = Relu(x) }"))
    assert str(model.graph.inputs[0].shape) == "[n,3]"


def recurrent(state: np.ndarray[Any, Any]) -> onnx.ModelProto:
    """A GRU [steps, 2 samples, 3] -> its last state [2, 4], with a constant state to start from."""
    generator = np.random.default_rng(1)
    weights = {"w": generator.normal(size=(1, 12, 3)), "r": generator.normal(size=(1, 12, 4)), "h": state}
    model = parse(
        "g (float[2, 5, 3] x) => (float[2, 4] y) {"
        " steps = Transpose<perm = [1, 0, 2]>(x)"
        " all, last = GRU<hidden_size = 4>(steps, w, r, , , h)"
        " axis = Constant<value_ints = [0]>() y = Squeeze(last, axis) }"
    )
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()
    )
    return model


@pytest.mark.parametrize(
    "state",
    [np.zeros((1, 2, 4)), np.random.default_rng(0).normal(size=(1, 1, 4)).repeat(2, axis=1)],
    ids=["zeros", "the same for each sample"],
)
def test_a_state_to_start_from_is_repeated(state: np.ndarray[Any, Any]) -> None:
    model = recurrent(state)
    fixed = ort.InferenceSession(model.SerializeToString())
    dynamic = ort.InferenceSession(to_proto(made_dynamic(model)).SerializeToString())
    x = np.random.default_rng(2).normal(size=(6, 5, 3)).astype(np.float32)
    expected = np.concatenate([fixed.run(None, {"x": x[i : i + 2]})[0] for i in (0, 2, 4)])
    for count in (6, 1):
        (actual,) = dynamic.run(None, {"x": x[:count]})
        np.testing.assert_allclose(actual, expected[:count], rtol=1e-5, atol=1e-6)


def test_a_state_of_its_own_for_each_sample_is_refused() -> None:
    with pytest.raises(ModelError, match="'h' has a different row for each sample"):
        made_dynamic(recurrent(np.random.default_rng(0).normal(size=(1, 2, 4))))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("steps", [
    "e = Expand(b, no_axes)", "e = Expand(b, one_axis)", "e = Reshape(b, no_axes)", "e = Reshape(b, one_axis)",
])  # fmt: skip
def test_a_number_computed_from_the_batch_size_may_be_shaped(steps: str, batch: int) -> None:
    """TorchScript writes such nodes. Only the content of the number depends on the batch, not its shape."""
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
        net (float[{batch}, 3] x) => (float[{batch}, 2] y)
        <float[3, 2] w = {{1, 2, 3, 4, 5, 6}}, int64 first = {{0}}, int64[1] one_axis = {{1}}> {{
            s = Shape(x)  b = Gather(s, first)  {steps}  c = Cast<to = 1>(e)  unit = Div(c, c)
            h = MatMul(x, w)  y = Mul(h, unit) }}""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(0, np.int64), "no_axes"))
    x = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    session = ort.InferenceSession(make_batch_dynamic(model).SerializeToString())
    np.testing.assert_allclose(session.run(None, {"x": x})[0], x @ np.arange(1, 7).reshape(3, 2), rtol=1e-5)


@pytest.mark.parametrize("size", [-1, -2])
@pytest.mark.parametrize("source", ["file", "proto", "made dynamic"])
def test_negative_sizes_are_unknown_as_onnxruntime_takes_them(source: str, size: int, tmp_path: Path) -> None:
    """paddle2onnx declares a batch, and other sizes, as -1."""
    proto = onnx.parser.parse_model("""
      <ir_version: 8, opset_import: ["": 17]>
      net (float[n, 2, h] x) => (float[n, 3, h] y) <float[3, 2] w = {1., 2., 3., 4., 5., 6.}>
      { t = MatMul(w, x)  y = Relu(t) }""")
    for value in (proto.graph.input[0], proto.graph.output[0]):
        for axis in (0, 2):
            value.type.tensor_type.shape.dim[axis].dim_value = size
    x = np.random.default_rng(0).normal(size=(10, 2, 4)).astype(np.float32)
    path = tmp_path / "net.onnx"
    onnx.save(proto, path)
    model = {
        "file": path,
        "proto": proto,
        "made dynamic": make_batch_dynamic(proto) if "made" in source else None,
    }
    trainer = Trainer(model[source], "mse", "sgd", 0.01, metrics=[])
    expected = ort.InferenceSession(path).run(None, {"x": x})[0]
    np.testing.assert_allclose(trainer.predict(x, batch_size=4), expected, rtol=1e-6)
    before = trainer.evaluate(x, 0 * expected)["loss"]
    np.testing.assert_allclose(before, (expected**2).mean(), rtol=1e-5)
    trainer.fit(x, 0 * expected, epochs=3, batch_size=4, verbose=False)
    assert trainer.evaluate(x, 0 * expected)["loss"] < before
    trainer.export(path)
    np.testing.assert_allclose(
        ort.InferenceSession(path).run(None, {"x": x[:3, :, :1]})[0], trainer.predict(x[:3, :, :1]), rtol=1e-6
    )
