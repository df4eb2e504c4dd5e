"""Training in bfloat16: `generate_artifacts(precision="bf16")` beside float32, and beside PyTorch's autocast."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from models import make_model
from onnxtrain import Trainer
from onnxtrain.artifacts import generate_artifacts
from onnxtrain.optimizers import SGD
from training_run import Run

pytestmark = pytest.mark.torch

RATE, STEPS = 0.05, 12


class Encoder(nn.Module):
    """Embedding, a pre-norm transformer layer with two heads, mean over the sequence, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.norms = nn.ModuleList([nn.LayerNorm(32), nn.LayerNorm(32)])
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down, self.head = nn.Linear(32, 128), nn.Linear(128, 32), nn.Linear(32, 7)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, 2, 16).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.transpose(-1, -2) / 4, -1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        x = x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))
        return self.head(x.mean(1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 33), nn.Tanh(), nn.Linear(33, 7))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 7)
    )


INPUTS: dict[Callable[[], nn.Module], Callable[[], torch.Tensor]] = {
    Encoder: lambda: torch.randint(0, 50, (8, 12)),
    mlp: lambda: torch.randn(16, 40),
    cnn: lambda: torch.randn(8, 3, 8, 8),
}


def batch(make: Callable[[], nn.Module]) -> tuple[torch.Tensor, torch.Tensor]:
    x = INPUTS[make]()
    return x, torch.randint(0, 7, (len(x),))


def exported(net: nn.Module, x: torch.Tensor) -> onnx.ModelProto:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(copy.deepcopy(net), (x,), dynamo=True, optimize=False, verbose=False)
    return program.model_proto


def in_torch(
    net: nn.Module, x: torch.Tensor, y: torch.Tensor, *, autocast: bool
) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses of some steps of SGD, and the first gradients."""
    net, losses, first = copy.deepcopy(net), [], {}
    optimizer = torch.optim.SGD(net.parameters(), RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        first = first or {name: p.grad.numpy().copy() for name, p in net.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    return losses, first


def trained(
    directory: Path, net: nn.Module, x: torch.Tensor, y: torch.Tensor, **options: Any
) -> tuple[list[float], dict[str, np.ndarray]]:
    """The same on artifacts."""
    names = [name for name, _ in net.named_parameters()]
    run = Run.generate(
        directory, exported(net, x), requires_grad=names, loss="cross_entropy", optimizer=SGD(), **options
    )
    assert run.optimizer is not None
    run.optimizer.set_learning_rate(RATE)
    run.module.train()
    feed = (x.numpy(), y.numpy())
    run.module(*feed)
    first = {name: run.state.parameters[name].grad.copy() for name in names}
    run.module.lazy_reset_grad()
    return [run.step(*feed) for _ in range(STEPS)], first


def distance(some: dict[str, np.ndarray], others: dict[str, np.ndarray]) -> float:
    """Of all gradients, relative to the norm of the others."""
    both = [(some[name], others[name]) for name in others]
    return float(np.sqrt(sum(np.sum((a - b) ** 2) for a, b in both) / sum(np.sum(b**2) for _, b in both)))


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("make", INPUTS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_losses_and_gradients_are_as_near_to_float32_as_those_of_autocast(
    make: Callable[[], nn.Module], kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONNXTRAIN_KERNELS", kernels)
    torch.manual_seed(0)
    net, (x, y) = make(), batch(make)
    exact, exact_gradients = in_torch(net, x, y, autocast=False)
    autocast, autocast_gradients = in_torch(net, x, y, autocast=True)
    losses, gradients = trained(tmp_path / "bf16", net, x, y, precision="bf16")
    wide, wide_gradients = trained(tmp_path / "fp32", net, x, y, precision="fp32")
    own = distance(autocast_gradients, exact_gradients)
    assert (
        distance(wide_gradients, exact_gradients) < 1e-5 < 1e-4 < distance(gradients, exact_gradients) <= own
    )
    assert losses[-1] < 0.9 * losses[0]
    np.testing.assert_allclose(wide, exact, rtol=1e-4)
    farthest = np.abs(np.subtract(autocast, exact)).max()
    assert np.abs(np.subtract(losses, exact)).max() <= farthest


def linear() -> onnx.ModelProto:
    weight = np.random.default_rng(0).normal(size=(64, 48)).astype(np.float32)
    nodes = [
        onnx.helper.make_node("MatMul", ["x", "w"], ["h"]),
        onnx.helper.make_node("Gemm", ["h", "v", "b"], ["y"]),
    ]
    more = {"v": weight[:48, :3].copy(), "b": np.zeros(3, np.float32)}
    return make_model(nodes, {"x": ["n", 64]}, {"y": ["n", 3]}, {"w": weight, **more})


def test_only_the_products_of_the_training_model_change(tmp_path: Path) -> None:
    found = {}
    for precision in ("fp32", "bf16"):
        directory = tmp_path / precision
        generate_artifacts(linear(), loss="mse", artifact_directory=directory, precision=precision)
        for name in ("training", "eval", "inference"):
            model = onnx.load(directory / f"{name}_model.onnx")
            onnx.checker.check_model(model)
            found[precision, name] = Counter(node.op_type for node in model.graph.node)
            values = (*model.graph.input, *model.graph.output)
            assert {value.type.tensor_type.elem_type for value in values} == {onnx.TensorProto.FLOAT}
    products = {"MatMul", "Gemm", "Transpose"}
    rounded = {
        "MatMulBfloat16_float",
        "MatMulPermutedLeftBfloat16_float",
        "MatMulPermutedRightBfloat16_float",
        "GemmBfloat16_float",
    }
    assert not rounded & found["fp32", "training"].keys()
    assert not products & found["bf16", "training"].keys()
    assert (
        sum(found["bf16", "training"][op] for op in rounded)
        == sum(found["fp32", "training"][op] for op in ("MatMul", "Gemm", "MatrixProduct_float"))
        == 5
    )
    assert found["bf16", "eval"] == found["fp32", "eval"]
    assert found["bf16", "inference"] == found["fp32", "inference"]


def test_an_unknown_precision_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"precision='bfloat16' is unknown; pass one of 'fp32', 'bf16'"):
        generate_artifacts(linear(), loss="mse", artifact_directory=tmp_path, precision="bfloat16")
    assert not list(tmp_path.iterdir())


def test_the_trainer_trains_in_bfloat16(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(256, 64)).astype(np.float32)
    y = (x[:, :3] * 2).astype(np.float32)
    losses = {}
    for precision in ("fp32", "bf16"):
        trainer = Trainer(
            linear(), "mse", learning_rate=0.01, precision=precision, directory=tmp_path / precision
        )
        losses[precision] = trainer.fit(x, y, epochs=3, batch_size=32, verbose=False)["loss"]
        model = onnx.load(tmp_path / precision / "training_model.onnx")
        assert any("Bfloat16" in node.op_type for node in model.graph.node) == (precision == "bf16")
    assert losses["bf16"] != losses["fp32"]
    np.testing.assert_allclose(losses["bf16"], losses["fp32"], rtol=1e-2)
