"""Runs `onnxtrain artifacts`, and prepares models for it and for `onnxtrain train`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnxtrain.artifacts import generate_artifacts
from onnxtrain.cli._declared import arguments_for
from onnxtrain.cli._inspect import run_command as inspect
from onnxtrain.cli._lora import chosen_lora
from onnxtrain.cli._loss import chosen_loss
from onnxtrain.cli._optimizer import chosen_optimizer
from onnxtrain.cli._options import ArtifactsOptions, ModelOptions
from onnxtrain.errors import GraphBuildError, InputError
from onnxtrain.losses import LOSSES
from onnxtrain.passes import canonicalize, load_model
from onnxtrain.recipe import BatchNormMode, DropoutRatios
from onnxtrain.surgery import replace_head
from onnxtrain.surgery._dynamic_batch import make_batch_dynamic
from onnxtrain.tables import PROPERTY as TABLE
from onnxtrain.training.key_value_cache import find_cache

_MODES = ("as_exported", "training", "inference")


def batch_norm_mode(texts: Sequence[str] | None) -> BatchNormMode:
    """Parses `--batch-norm`: one mode alone, or PATTERN=MODE for each layer. Raises GraphBuildError: neither."""
    modes: dict[str, Any] = {}
    for text in texts or ():
        # Split at the last "=": names of parameters may contain it, modes do not.
        pattern, equals, mode = text.rpartition("=")
        if mode not in _MODES or (equals and not pattern):
            raise GraphBuildError(
                f"--batch-norm is {text!r}; choose from {', '.join(_MODES)}, or give PATTERN=MODE for each layer"
            )
        modes[pattern if equals else "*"] = mode
    if modes.keys() == {"*"}:
        only: BatchNormMode = modes["*"]
        return only
    # Several modes are a mapping, of which the first pattern that matches a layer decides.
    return modes or "as_exported"


def dropout_ratios(texts: Sequence[str] | None) -> DropoutRatios:
    """Parses `--dropout`: one ratio alone, or PATTERN=RATIO for each layer. Raises InputError: neither."""
    ratios: dict[str, float] = {}
    for text in texts or ():
        # Split at the last "=": names of modules may contain it, numbers do not.
        pattern, equals, number = text.rpartition("=")
        try:
            ratio = float(number)
        except ValueError:
            ratio = math.nan
        if not 0 <= ratio < 1 or (equals and not pattern):
            raise InputError(
                f"--dropout is {text!r}; give a number from 0 up to 1, such as 0.1, or PATTERN=NUMBER for each layer, "
                "such as 'head.*=0.5'"
            )
        ratios[pattern if equals else "*"] = ratio
    return ratios["*"] if ratios.keys() == {"*"} else ratios or None


def check_loss(model: ir.Model, loss: str | None) -> None:
    """Raises GraphBuildError if no loss is named and the first output is no scalar."""
    output = model.graph.outputs[0]
    if loss is None and any(dim != 1 for dim in output.shape or ()):
        raise GraphBuildError(
            f"without --loss, the first output of the model must be the loss, but {output.name!r} has shape "
            f"{output.shape}; name a loss: --loss {', '.join(sorted(LOSSES))}"
        )


def prepared(path: Path, options: ModelOptions, *, seed: int) -> ir.Model:
    """Loads a model, and makes its batch dynamic and replaces its head if the options ask for it.

    Raises:
        InputError: the file was exported from a run on a table: its inputs are columns, partly texts.
    """
    model = load_model(path)
    # The encoding has strings as inputs, which have no gradient, and indices that a new table may not have.
    if TABLE in model.metadata_props:
        raise InputError(
            f"'{path}' takes the columns of a table as they are; what is trained is the network in it. Write that "
            "alone, by onnxtrain export RUN -o network.onnx --network, or go on with the run: onnxtrain train RUN."
        )
    if options.dynamic_batch:
        model = make_batch_dynamic(model)
    if options.replace_head is not None:
        model = replace_head(model, options.replace_head, seed=seed)
    return model


def returned_outputs(model: ir.Model, loss: str | None) -> list[str]:
    """Lists the outputs of a canonical model that training and eval models return beside the loss.

    The device predicts with the eval model, so they are all but the cache of a language model, and but the loss.
    """
    cached = find_cache(model.graph).values()
    outputs = [str(value.name) for value in model.graph.outputs if value.name not in cached]
    return outputs if loss is not None else outputs[1:]


def run_command(options: ArtifactsOptions) -> None:
    """Writes the artifacts, and shows them as `onnxtrain inspect` does."""
    model = prepared(options.source, options.model, seed=0)
    optimizer = chosen_optimizer(options.optimizer)
    loaded = canonicalize(model)
    loss = options.model.loss
    check_loss(loaded, loss)
    arguments = arguments_for(generate_artifacts, options) | {
        "model": model,
        "loss": chosen_loss(options.model),
        "optimizer": optimizer,
        "batch_norm": batch_norm_mode(options.model.batch_norm),
        "dropout": dropout_ratios(options.model.dropout),
        "lora": chosen_lora(options.lora),
        "additional_output_names": returned_outputs(loaded, loss),
    }
    generate_artifacts(**arguments)
    inspect(options.output, options.json)
