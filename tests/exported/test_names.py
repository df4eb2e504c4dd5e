"""Names of parameters in files of PyTorch's exporters."""

from __future__ import annotations

import io
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from onnxtrain.api import CheckpointState
from onnxtrain.artifacts import generate_artifacts
from onnxtrain.errors import GraphBuildError


@pytest.mark.parametrize("optimize", [True, False])
def test_a_transposed_weight_has_its_own_name_and_shape(optimize: bool, tmp_path: Path) -> None:
    program = export(nn.Linear(3, 2), torch.randn(4, 5, 3), dynamo=True, optimize=optimize)
    run = {"loss": "mse", "optimizer": "sgd", "requires_grad": ["weight"], "artifact_directory": tmp_path}
    generate_artifacts(program, **run)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    assert state.parameters["weight"].data.shape == (2, 3)


@pytest.mark.parametrize(
    ("exporter", "net", "x", "computed", "option"),
    [
        ({"dynamo": True}, nn.GroupNorm(2, 4), torch.randn(3, 4, 2), r"val_\d+", "optimize=False"),
        (
            {"dynamo": False},
            nn.Linear(3, 2),
            torch.randn(4, 5, 3),
            r"onnx::MatMul_\d+",
            "do_constant_folding=False",
        ),
    ],
)
def test_what_to_do_about_parameters_that_the_exporter_has_replaced(
    exporter: dict[str, bool], net: nn.Module, x: torch.Tensor, computed: str, option: str, tmp_path: Path
) -> None:
    run = {"loss": "mse", "optimizer": "sgd", "requires_grad": ["weight"], "artifact_directory": tmp_path}
    with pytest.raises(
        GraphBuildError, match=rf"names 'weight'.* such as '{computed}': export with {option}"
    ):
        generate_artifacts(export(net, x, **exporter), **run)


def export(net: nn.Module, x: torch.Tensor, **exporter: bool) -> onnx.ModelProto:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(net, (x,), buffer, opset_version=18, verbose=False, **exporter)
    return onnx.load_from_string(buffer.getvalue())


def test_a_parameter_that_was_added_to_the_file_is_trained(tmp_path: Path) -> None:
    model = export(nn.Linear(3, 2), torch.randn(4, 3), dynamo=True)
    result = model.graph.output[0].name
    model.graph.node.append(onnx.helper.make_node("Mul", [result, "gain"], ["scaled"]))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(2, np.float32), "gain"))
    model.graph.output[0].name = "scaled"
    generate_artifacts(model, loss="mse", optimizer="sgd", artifact_directory=tmp_path)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    assert {name for name, _ in state.parameters} == {"weight", "bias", "gain"}
