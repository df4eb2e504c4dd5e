"""Parameters and layers by patterns, in every way in."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import models
from onnxtrain import CheckpointState, Trainer, generate_artifacts
from onnxtrain.errors import GraphBuildError
from onnxtrain.optimizers import SGD, ParameterGroup
from onnxtrain.selection import match_names


def odd_names() -> onnx.ModelProto:
    """`w[0]` is a name and, as a pattern, matches `w0`; so `b.*` and `b.1`."""
    model = models.mlp()
    renamed = {"w1": "w[0]", "w2": "w0", "b1": "b.*", "b2": "b.1"}
    for tensor in model.graph.initializer:
        tensor.name = renamed[tensor.name]
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = renamed.get(name, name)
    return model


def trained(**options: Any) -> set[str]:
    trainer = Trainer(odd_names(), "cross_entropy", "sgd", 0.1, **options)
    return {name for name, parameter in trainer.parameters if parameter.requires_grad}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"requires_grad": "w[0]"}, {"w[0]"}),
        ({"frozen_params": "w[0]"}, {"w0", "b.*", "b.1"}),
        ({"requires_grad": ["w?"]}, {"w0"}),
        ({"requires_grad": ["b.*"]}, {"b.*"}),
        ({"frozen_params": ["b*"]}, {"w[0]", "w0"}),
        ({"requires_grad": ["*"], "frozen_params": ["b*"]}, {"w[0]", "w0"}),
        ({"requires_grad": ["w*", "b.1"], "frozen_params": ["b*"]}, {"w[0]", "w0", "b.1"}),
    ],
)
def test_patterns_and_names(options: dict[str, Any], expected: set[str]) -> None:
    assert trained(**options) == expected


def test_names_that_hold_pattern_characters_are_names_in_groups() -> None:
    x = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    y = np.arange(8) % 3
    group = ParameterGroup(["w[0]", "b.*"], learning_rate_scale=0.0)
    trainer = Trainer(odd_names(), "cross_entropy", SGD(groups=(group,)), 0.1)
    before = {name: np.array(p.data) for name, p in trainer.parameters}
    trainer.fit(x, y, verbose=False)
    moved = {name for name, p in trainer.parameters if not np.array_equal(p.data, before[name])}
    assert moved == {"w0", "b.1"}


@pytest.mark.parametrize("option", ["requires_grad", "frozen_params"])
def test_a_pattern_that_matches_nothing_is_an_error(option: str, tmp_path: Path) -> None:
    message = rf"no parameter matches 'conv\*' of {option}; the parameters are w1, b1, w2, b2"
    with pytest.raises(GraphBuildError, match=message):
        Trainer(models.mlp(), "cross_entropy", **{option: ["conv*"]})
    with pytest.raises(GraphBuildError, match=message):
        generate_artifacts(
            models.mlp(), loss="cross_entropy", artifact_directory=tmp_path, **{option: ["conv*"]}
        )


def test_both_lists_name_a_parameter() -> None:
    with pytest.raises(GraphBuildError, match="w1 cannot be frozen and require gradient"):
        Trainer(models.mlp(), "cross_entropy", requires_grad=["w1"], frozen_params=["w1", "b*"])


def test_patterns_leave_what_is_no_parameter_alone(tmp_path: Path) -> None:
    """A pattern does not make inputs of sizes, scales and statistics, of which the graph needs the values."""
    nodes = [
        onnx.helper.make_node("Resize", ["x", "", "body.scales"], ["r"]),
        onnx.helper.make_node("Reshape", ["r", "body.shape"], ["f"]),
        onnx.helper.make_node("MatMul", ["f", "body.w"], ["y"]),
    ]
    values = {
        "body.scales": np.array([1, 1, 2, 2], np.float32),
        "body.shape": np.array([-1, 16]),
        "body.w": np.ones((16, 2), np.float32),
    }
    model = models.make_model(nodes, {"x": ["n", 1, 2, 2]}, {"y": ["n", 2]}, values)
    generate_artifacts(
        model, requires_grad=["body.*"], loss="mse", optimizer="sgd", artifact_directory=tmp_path
    )
    assert [name for name, _ in CheckpointState.load_checkpoint(tmp_path / "checkpoint").parameters] == [
        "body.w"
    ]


def test_the_values_that_a_pattern_names_are_not_built_in(tmp_path: Path) -> None:
    """Parameters that `frozen_params` names are inputs of the models, and so are those that its patterns match."""
    entries = []
    for index, names in enumerate((["w1", "b1"], ["?1"])):
        folder = tmp_path / str(index)
        generate_artifacts(models.mlp(), frozen_params=names, loss="cross_entropy", artifact_directory=folder)
        manifest = json.loads((folder / "manifest.json").read_text())
        entries.append((manifest["parameters"], onnx.load(folder / "training_model.onnx").graph))
    assert entries[0][0] == entries[1][0]
    assert entries[0][1] == entries[1][1]
    assert [entry["name"] for entry in entries[0][0] if not entry["trainable"]] == ["w1", "b1"]


class Net(nn.Module):
    """A backbone and a neck, each with BatchNorm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.neck = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(4 * 16, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.neck(self.backbone(x)))


def exported(net: nn.Module, path: Path, dynamo: bool) -> Path:
    example = (torch.randn(2, 2, 4, 4),)
    if dynamo:
        batch = {"x": {0: torch.export.Dim("batch")}}
        torch.onnx.export(
            net, example, str(path), input_names=["x"], dynamic_shapes=batch, optimize=False, verbose=False
        )
    else:
        torch.onnx.export(
            net, example, str(path), dynamo=False, input_names=["x"], dynamic_axes={"x": {0: "batch"}},
            training=torch.onnx.TrainingMode.PRESERVE, do_constant_folding=False,
        )  # fmt: skip
    return path


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    net = Net()
    for norm in (net.backbone[1], net.neck[1]):
        nn.init.uniform_(norm.running_mean, -0.5, 0.5)
        nn.init.uniform_(norm.running_var, 0.5, 1.5)
        nn.init.uniform_(norm.weight, 0.5, 1.5)
    return net.eval()


@pytest.mark.filterwarnings("ignore")  # of the exporters
@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
def test_batch_norm_by_layer_is_torchs(
    net: Net, dynamo: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The backbone in eval() and frozen, the rest in train(): five steps of both, parameters and statistics."""
    path = exported(net, tmp_path / "net.onnx", dynamo)
    start = {name: value.clone().numpy() for name, value in net.state_dict().items()}
    rng = np.random.default_rng(1)
    x = rng.standard_normal((40, 2, 4, 4)).astype(np.float32)
    y = rng.integers(0, 3, 40)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        trainer = Trainer(
            path, "cross_entropy", "sgd", 0.1, frozen_params=["backbone.*"],
            batch_norm={"backbone.*": "inference", "*": "training"},
        )  # fmt: skip
    assert "inference mode" not in caplog.text
    trainer.fit(x, y, batch_size=8, shuffle=False, verbose=False)
    trainer.export(tmp_path / "trained.onnx")

    net.train()
    net.backbone.eval()
    net.backbone.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1)
    for index in range(5):
        part = slice(8 * index, 8 * index + 8)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(torch.tensor(x[part])), torch.tensor(y[part])).backward()
        optimizer.step()
    got = {
        tensor.name: onnx.numpy_helper.to_array(tensor)
        for tensor in onnx.load(tmp_path / "trained.onnx").graph.initializer
    }
    for name, value in net.state_dict().items():
        if name.endswith("num_batches_tracked"):
            continue
        if name.startswith("backbone"):
            np.testing.assert_array_equal(got[name], start[name], err_msg=name)
        else:
            assert not np.array_equal(got[name], start[name])
            np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=2e-5, err_msg=name)
    for name, parameter in trainer.parameters:
        if name.startswith("backbone"):
            np.testing.assert_array_equal(parameter.data, start[name], err_msg=name)


@pytest.mark.parametrize(
    ("modes", "running"),
    [
        ({"bn": "training"}, True),
        ({"bn.scale": "training"}, True),
        ({"b?": "inference", "*": "training"}, False),
        ({"*": "training", "bn": "inference"}, True),
    ],
)
def test_the_first_pattern_that_matches_decides(modes: dict[str, Any], running: bool, tmp_path: Path) -> None:
    generate_artifacts(
        models.conv_bn(training=False), loss="cross_entropy", artifact_directory=tmp_path, batch_norm=modes
    )
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert bool(manifest["statistics"]) == running


def test_layers_that_no_pattern_matches_are_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(GraphBuildError, match=r"matches 'body\.\*' of batch_norm; the model has bn"):
        generate_artifacts(models.conv_bn(), loss="mse", batch_norm={"body.*": "training"})
    with pytest.raises(ValueError, match="batch_norm='frozen': choose one of"):
        generate_artifacts(models.conv_bn(), loss="mse", batch_norm={"bn": "frozen"})
    generate_artifacts(models.conv_bn(training=False), loss="mse", artifact_directory=tmp_path)
    assert "1 BatchNormalization node(s) were exported in inference mode" in caplog.text


def test_match_names_tells_upper_from_lower_case() -> None:
    assert match_names(["A*", "x"], ["a1", "A1"]) == {"A*": ["A1"], "x": []}
