"""Frozen BatchNormalization is folded into convolutions; losses and gradients stay PyTorch's."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from onnxtrain.api import CheckpointState, Module
from onnxtrain.artifacts import generate_artifacts

pytestmark = pytest.mark.torch


class Net(nn.Module):
    """A trained layer below a frozen backbone, and a trained head above it."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 3, 1)
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, padding=1, bias=bias), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, groups=4, bias=bias), nn.BatchNorm2d(8, eps=0.1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm1(self.conv1(self.stem(x))))
        return self.head(torch.relu(self.norm2(self.conv2(x))).mean((2, 3)))


X = np.random.default_rng(0).normal(size=(4, 2, 6, 6)).astype(np.float32)
LABELS = np.array([0, 1, 2, 3])
TRAINED = ["stem.weight", "stem.bias", "head.weight", "head.bias"]


def net(bias: bool = True) -> Net:
    torch.manual_seed(0)
    made = Net(bias)
    for norm in (made.norm1, made.norm2):
        nn.init.normal_(norm.weight, 1, 0.3)
        nn.init.normal_(norm.bias)
        nn.init.normal_(norm.running_mean)
        nn.init.uniform_(norm.running_var, 0.5, 2)
    return made.eval()


def exported(module: nn.Module) -> onnx.ModelProto:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter
        program = torch.onnx.export(
            module,
            (torch.from_numpy(X),),
            dynamo=True,
            optimize=False,
            verbose=False,
            dynamic_shapes=({0: "n"},),
        )
    assert program is not None
    return program.model_proto


def norms(path: Path) -> int:
    return sum(node.op_type == "BatchNormalization" for node in onnx.load(path).graph.node)


@pytest.mark.parametrize("bias", [True, False])
def test_losses_and_gradients_are_those_of_pytorch(bias: bool, tmp_path: Path) -> None:
    module = net(bias)
    generate_artifacts(
        exported(module), requires_grad=TRAINED, loss="cross_entropy", artifact_directory=tmp_path
    )
    assert norms(tmp_path / "training_model.onnx") == 0
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    loss = Module(tmp_path / "training_model.onnx", state)(X, LABELS)
    reference = module.double()
    expected = nn.functional.cross_entropy(reference(torch.from_numpy(X).double()), torch.from_numpy(LABELS))
    expected.backward()
    assert float(loss) == pytest.approx(expected.item(), rel=1e-6)
    for name in TRAINED:
        gradient = reference.get_parameter(name).grad.numpy()
        assert np.abs(state.parameters[name].grad - gradient).max() <= 1e-5 * np.abs(gradient).max()


@pytest.mark.parametrize(
    ("options", "left"),
    [
        # Parameters in the checkpoint may be set by the device, frozen ones too.
        ({"requires_grad": TRAINED, "frozen_params": ["norm1.weight"]}, 1),
        ({"requires_grad": [*TRAINED, "norm2.bias"]}, 1),
        ({"requires_grad": [*TRAINED, "conv2.weight"]}, 1),
    ],
)
def test_what_the_device_sets_is_not_folded(options: dict[str, object], left: int, tmp_path: Path) -> None:
    generate_artifacts(exported(net()), loss="cross_entropy", artifact_directory=tmp_path, **options)  # type: ignore[arg-type]
    assert norms(tmp_path / "training_model.onnx") == left


def test_a_convolution_that_others_read_keeps_its_result(tmp_path: Path) -> None:
    model = exported(net())
    inner = next(
        node.output[0]
        for node in model.graph.node
        if node.op_type == "Conv" and node.input[1] == "conv1.weight"
    )
    generate_artifacts(
        model,
        requires_grad=TRAINED,
        loss="cross_entropy",
        additional_output_names=[inner],
        artifact_directory=tmp_path,
    )
    assert norms(tmp_path / "training_model.onnx") == 1


def test_the_exported_model_is_as_it_was(tmp_path: Path) -> None:
    generate_artifacts(
        exported(net()), requires_grad=TRAINED, loss="cross_entropy", artifact_directory=tmp_path
    )
    assert norms(tmp_path / "inference_model.onnx") == 2


def test_statistics_of_the_batch_are_not_folded(tmp_path: Path) -> None:
    generate_artifacts(
        exported(net()),
        requires_grad=TRAINED,
        loss="cross_entropy",
        batch_norm="training",
        artifact_directory=tmp_path,
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    loss = Module(tmp_path / "training_model.onnx", state)(X, LABELS)
    expected = nn.functional.cross_entropy(net().train()(torch.from_numpy(X)), torch.from_numpy(LABELS))
    assert float(loss) == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("kernels", ["off", "auto"])
def test_a_frozen_layer_with_pooling_behind_it_trains_by_statistics_of_the_batch(
    kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.head = nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(torch.max_pool2d(self.norm(self.conv(x)), 2))
            return self.head(x.mean((2, 3)))

    monkeypatch.setenv("ONNXTRAIN_KERNELS", kernels)
    torch.manual_seed(0)
    module = Pooled()
    generate_artifacts(
        exported(module.eval()),
        requires_grad=["head.weight", "head.bias"],
        loss="cross_entropy",
        batch_norm="training",
        artifact_directory=tmp_path,
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    loss = Module(tmp_path / "training_model.onnx", state)(X, LABELS)
    expected = nn.functional.cross_entropy(module.train()(torch.from_numpy(X)), torch.from_numpy(LABELS))
    assert float(loss) == pytest.approx(expected.item(), rel=1e-5)
    expected.backward()
    np.testing.assert_allclose(
        state.parameters["head.weight"].grad, module.head.weight.grad, rtol=1e-4, atol=1e-6
    )
