"""`onnxtrain artifacts`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import onnx_ir as ir

from onnxtrain.artifacts import generate_artifacts
from onnxtrain.cli._inspect import run_command as inspect
from onnxtrain.cli._select import float_parameters, match
from onnxtrain.errors import GraphBuildError
from onnxtrain.losses import LOSSES
from onnxtrain.passes import canonicalize, load_model
from onnxtrain.training_graph import BatchNormMode

__all__ = ["batch_norm_mode", "check_loss", "run_command"]


def batch_norm_mode(text: str) -> BatchNormMode:
    """Returns `text` if it is one of the modes.

    Raises:
        GraphBuildError: it is not.
    """
    for mode in get_args(BatchNormMode):
        if text == mode:
            return mode  # type: ignore[no-any-return]
    raise GraphBuildError(f"--batch-norm is {text!r}; choose from {', '.join(get_args(BatchNormMode))}")


def check_loss(model: ir.Model, loss: str | None) -> None:
    """Raises GraphBuildError if no loss is named and the first output cannot be one."""
    output = model.graph.outputs[0]
    if loss is None and any(dim != 1 for dim in output.shape or ()):
        raise GraphBuildError(
            f"without --loss, the first output of the model must be the loss, but {output.name!r} has shape "
            f"{output.shape}; name a loss: --loss {', '.join(sorted(LOSSES))}"
        )


def run_command(
    model: Path,
    loss: str | None,
    optimizer: str,
    output: Path,
    train: Sequence[str] | None,
    freeze: Sequence[str] | None,
    batch_norm: str,
    nominal: bool,
    json: bool,
) -> None:
    """Writes the artifacts, and shows them as `onnxtrain inspect` does."""
    loaded = canonicalize(load_model(model))
    check_loss(loaded, loss)
    names = float_parameters(loaded)
    outputs = [str(value.name) for value in loaded.graph.outputs]
    generate_artifacts(
        model,
        requires_grad=match(names, train),
        frozen_params=match(names, freeze),
        loss=loss,
        optimizer=optimizer,
        artifact_directory=output,
        additional_output_names=outputs if loss is not None else outputs[1:],
        nominal_checkpoint=nominal,
        batch_norm=batch_norm_mode(batch_norm),
    )
    inspect(output, json)
