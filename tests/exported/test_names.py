"""Names of parameters in files of PyTorch's Dynamo exporter."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from onnxtrain.artifacts import generate_artifacts
from onnxtrain.errors import GraphBuildError


@pytest.mark.parametrize("optimize", [True, False])
def test_what_to_do_about_parameters_that_the_exporter_has_replaced(optimize: bool, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            nn.Linear(3, 2), (torch.randn(4, 5, 3),), dynamo=True, optimize=optimize, verbose=False
        )
    run = {"loss": "mse", "optimizer": "sgd", "requires_grad": ["weight"], "artifact_directory": tmp_path}
    if optimize:  # the file has the transposed weight instead
        with pytest.raises(
            GraphBuildError, match=r"names 'weight'.* such as 'val_0', .* with optimize=False"
        ):
            generate_artifacts(program.model_proto, **run)
    else:
        generate_artifacts(program.model_proto, **run)
        assert (tmp_path / "training_model.onnx").exists()
