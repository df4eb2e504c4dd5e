"""Fresh networks whose equal parameters PyTorch's exporters merge by default, against PyTorch."""

from __future__ import annotations

import copy
import io
import logging
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn
from torch.nn import functional

from exported.zoo import Encoder, WithLoss, norms
from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.artifacts import generate_artifacts
from onnxtrain.autodiff import differentiate

EXPORTERS = {
    "torchscript": {"dynamo": False, "do_constant_folding": False, "opset_version": 17},
    "dynamo": {"dynamo": True, "verbose": False, "opset_version": 18},
}


def exported(net: nn.Module, inputs: tuple[torch.Tensor, ...], exporter: str) -> onnx.ModelProto:
    """Exports in eval mode, where both exporters merge equal parameters."""
    names = [f"input{i}" for i in range(len(inputs))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        buffer = io.BytesIO()
        result = torch.onnx.export(
            copy.deepcopy(net).eval(),
            inputs,
            buffer,
            input_names=names,
            output_names=["y"],
            **EXPORTERS[exporter],
        )
    return result.model_proto if result is not None else onnx.load_from_string(buffer.getvalue())


def gradients(
    model: onnx.ModelProto, names: list[str], inputs: tuple[torch.Tensor, ...]
) -> dict[str, np.ndarray]:
    step = differentiate(model, of="y", wrt=names)
    session = ort.InferenceSession(step.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {f"input{i}": t.numpy() for i, t in enumerate(inputs)}
    return dict(zip(names, session.run([f"{name}_grad" for name in names], feeds), strict=True))


def encoder() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Two copies of a layer, equal altogether, and norms that are fresh."""
    net = Encoder()
    for layer in net.encoder.layers:
        nn.init.normal_(layer.self_attn.out_proj.bias)  # the Dynamo exporter drops biases of zeros
    return WithLoss(net, functional.cross_entropy), (torch.randint(0, 50, (4, 7)), torch.randint(0, 5, (4,)))


def batch_norms() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """All scales and variances are equal, and all biases and means."""
    layers = [nn.Linear(6, 6), nn.Tanh(), nn.BatchNorm1d(6), nn.ReLU(), nn.BatchNorm1d(6), nn.Linear(6, 3)]
    return WithLoss(nn.Sequential(*layers), functional.mse_loss), (torch.randn(5, 6), torch.randn(5, 3))


class Tied(nn.Module):
    """An output layer that is the embedding, and a layer whose parameters are another's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.second.weight, self.second.bias = self.first.weight, self.first.bias
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.second(self.first(self.embedding(tokens)).tanh()))
        return logits.square().mean()


@pytest.mark.torch
@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("make", [encoder, batch_norms], ids=lambda make: make.__name__)
def test_every_parameter_gets_its_own_gradient(
    make: Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]], exporter: str
) -> None:
    torch.manual_seed(0)
    net, inputs = make()
    model = exported(net, inputs, exporter)
    assert not {name for name, _ in net.named_parameters()} <= {
        value.name for value in model.graph.initializer
    }
    wide = copy.deepcopy(net).double().eval()
    wide(*(t.double() if t.is_floating_point() else t for t in inputs)).backward()
    reference = {name: p.grad.numpy() for name, p in wide.named_parameters()}
    for name, gradient in gradients(model, list(reference), inputs).items():
        np.testing.assert_allclose(gradient, reference[name], rtol=1e-4, atol=2e-6, err_msg=name)


@pytest.mark.torch
@pytest.mark.parametrize("exporter", EXPORTERS)
def test_tied_parameters_stay_tied(exporter: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, tokens = Tied(), torch.randint(0, 11, (3, 5))
    generate_artifacts(
        exported(net, (tokens,), exporter),
        optimizer="sgd",
        loss_input_names=["y"],
        artifact_directory=tmp_path,
    )
    losses, sizes = train(tmp_path, (tokens,), 0.5)
    assert sorted(sizes) == sorted(tuple(p.shape) for p in net.parameters())
    np.testing.assert_allclose(losses, train_torch(net, lambda n: n(tokens), 0.5), rtol=1e-5)


@pytest.mark.torch
@pytest.mark.parametrize("exporter", EXPORTERS)
def test_training_batch_norms_is_that_of_pytorch(exporter: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, inputs = batch_norms()
    model = exported(net, inputs, exporter)
    generate_artifacts(
        model, optimizer="sgd", loss_input_names=["y"], batch_norm="training", artifact_directory=tmp_path
    )
    losses, _ = train(tmp_path, inputs, 0.5)
    np.testing.assert_allclose(losses, train_torch(net.train(), lambda n: n(*inputs), 0.5), rtol=1e-5)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    assert {name for name, _ in state.parameters} == {name for name, _ in net.named_parameters()}


def train(
    directory: Path, inputs: tuple[torch.Tensor, ...], rate: float
) -> tuple[list[float], list[tuple[int, ...]]]:
    """Losses of five steps on the device, and the shapes of what was trained."""
    state = CheckpointState.load_checkpoint(directory / "checkpoint")
    module = Module(directory / "training_model.onnx", state, directory / "eval_model.onnx")
    optimizer = Optimizer(directory / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(rate)
    losses = []
    for _ in range(5):
        losses.append(float(module(*(t.numpy() for t in inputs))))
        optimizer.step()
        module.lazy_reset_grad()
    return losses, [p.data.shape for _, p in state.parameters if p.requires_grad]


def train_torch(net: nn.Module, loss: Callable[[nn.Module], torch.Tensor], rate: float) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), rate)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        value = loss(net)
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return losses


class Constants(nn.Module):
    """A parameter among what is none: a buffer, a fixed norm, constants, and what is computed from them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 9, 4))
        self.register_buffer("positions", torch.randn(1, 9, 4))
        self.norm = nn.LayerNorm((6, 4), elementwise_affine=False)
        self.plain = torch.randn(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wave = torch.arange(6.0).unsqueeze(1).sin()
        return self.norm(x * self.weight[:, :6] + self.positions[:, :6] + wave) + self.plain


@pytest.mark.torch
@pytest.mark.parametrize("optimize", [True, False])
def test_buffers_and_constants_are_not_trained(optimize: bool, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            Constants(), (torch.randn(2, 6, 4),), dynamo=True, optimize=optimize, verbose=False
        )
    generate_artifacts(program.model_proto, loss="mse", optimizer="sgd", artifact_directory=tmp_path)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    (trained,) = (p.data.shape for _, p in state.parameters if p.requires_grad)
    assert trained == ((1, 6, 4) if optimize else (1, 9, 4))  # the optimizer has cut it


@pytest.mark.torch
def test_one_warning_names_parameters_that_are_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Another test may have the same network.
    monkeypatch.setattr("onnxtrain.training.export_warnings._reported", set())
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 2))
    model = exported(net, (torch.randn(4, 2, 6, 6),), "dynamo")
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        for _ in range(2):
            generate_artifacts(model, loss="mse", optimizer="sgd", artifact_directory=tmp_path)
    (message,) = (r.getMessage() for r in caplog.records if "optimizer removed" in r.getMessage())
    assert "removed 2 parameters" in message
    assert "1.weight, 1.bias" in message


@pytest.mark.torch
def test_a_warning_names_transposed_weights_that_are_merged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layer, buffer = nn.Linear(3, 3), io.BytesIO()
    net = nn.Sequential(layer, nn.Tanh(), copy.deepcopy(layer))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(net, (torch.randn(2, 5, 3),), buffer, dynamo=False, opset_version=17)
    model = onnx.load_from_string(buffer.getvalue())
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        generate_artifacts(model, loss="mse", optimizer="sgd", artifact_directory=tmp_path)
    assert "/0/MatMul, /2/MatMul share it" in caplog.text


@pytest.mark.torch
def test_normalisations_of_the_default_export_train_like_pytorch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, inputs = norms(), (torch.randn(4, 3, 16, 16), torch.randn(4, 4))
    generate_artifacts(
        exported(net, inputs, "dynamo"), optimizer="sgd", loss_input_names=["y"], artifact_directory=tmp_path
    )
    losses, sizes = train(tmp_path, inputs, 0.01)
    assert len(sizes) == len(list(net.parameters()))
    np.testing.assert_allclose(losses, train_torch(net, lambda n: n(*inputs), 0.01), rtol=1e-5)
