"""Runs `onnxtrain artifacts`, and loads the model for `artifacts`, `plan` and `train`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from onnxtrain.artifacts import generate_artifacts, returned_outputs
from onnxtrain.cli._command_options import ArtifactsOptions, InspectOptions
from onnxtrain.cli._inspect import run_command as inspect
from onnxtrain.cli._options import ModelOptions
from onnxtrain.cli._recipe import chosen_recipe
from onnxtrain.errors import GraphBuildError, InputError
from onnxtrain.losses import LOSSES
from onnxtrain.passes import canonicalize, load_model
from onnxtrain.surgery import add_classes, replace_head
from onnxtrain.surgery._dynamic_batch import make_batch_dynamic
from onnxtrain.tables import PROPERTY as TABLE


def check_loss(model: ir.Model, loss: str | None) -> None:
    """Raises GraphBuildError if `loss` is None and the model's first output is not a scalar, so cannot be the loss."""
    output = model.graph.outputs[0]
    if loss is None and any(dim != 1 for dim in output.shape or ()):
        raise GraphBuildError(
            f"without --loss, the model's first output must be the loss, but {output.name!r} has shape "
            f"{output.shape}; name a loss: --loss {', '.join(sorted(LOSSES))}"
        )


def prepared(path: Path, options: ModelOptions, *, seed: int) -> ir.Model:
    """Loads a model, and applies `--dynamic-batch`, `--replace-head` and `--add-classes`.

    Args:
        path: path of the model.
        options: options of the command.
        seed: seed for the initial weights of the new head.

    Raises:
        InputError: the model was exported from a run on a table, so its inputs are unencoded columns; or both
            `--replace-head` and `--add-classes` are given.
    """
    if options.replace_head is not None and options.add_classes is not None:
        raise InputError(
            "--replace-head makes a new last layer, and --add-classes keeps it. Pass one of them."
        )
    model = load_model(path)
    # String inputs have no gradient, and a new table may not have the categories that were encoded.
    if TABLE in model.metadata_props:
        raise InputError(
            f"'{path}' takes the unencoded columns of a table; only the network in it can be trained. "
            "Write the network with onnxtrain export RUN -o network.onnx --network, or resume the run: "
            "onnxtrain train RUN."
        )
    if options.dynamic_batch:
        model = make_batch_dynamic(model)
    if options.replace_head is not None:
        model = replace_head(model, options.replace_head, seed=seed)
    if options.add_classes is not None:
        model = add_classes(model, options.add_classes, seed=seed)
    return model


def run_command(options: ArtifactsOptions) -> None:
    """Writes the artifacts, and prints the same summary as `onnxtrain inspect`."""
    recipe = chosen_recipe(options)
    model = prepared(options.source, options.model, seed=0)
    loaded = canonicalize(model)
    check_loss(loaded, options.model.loss)
    generate_artifacts(
        model,
        # The eval model returns the outputs, because a device predicts with it.
        recipe=replace(recipe, additional_output_names=returned_outputs(loaded.graph, recipe)),
        artifact_directory=options.output,
        nominal_checkpoint=options.nominal,
        share_weights=options.share_weights,
    )
    inspect(InspectOptions(options.output, json=options.json))
