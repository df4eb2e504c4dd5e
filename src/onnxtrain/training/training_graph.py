"""Builds the training, eval and inference models from a canonical model with a loss.

`build_training_graphs` runs steps 3 to 8 of "The life of one model" in `notes/architecture.md`, in order.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from onnxtrain.losses import loss_mean
from onnxtrain.recipe import Recipe
from onnxtrain.runtime.manifest import METADATA_KEY
from onnxtrain.selection import select_parameters
from onnxtrain.training.eval_graph import build_eval_model
from onnxtrain.training.export_warnings import warn_of_export, warn_of_integer_weights
from onnxtrain.training.forward_graph import build_forward_graph, named
from onnxtrain.training.gradient_graph import build_training_model
from onnxtrain.training.inference_graph import build_inference_model, inference_entry
from onnxtrain.training.trained_parameters import promote_parameters, start_build
from onnxtrain.training.training_manifest import describe_training


@dataclass(frozen=True)
class TrainingGraphs:
    """The models of a training run, with their manifest and initial values.

    Attributes:
        training: model that computes loss, additional outputs, gradients and updated statistics from inputs, targets
            and parameters.
        eval: model that computes loss and additional outputs, with Dropout and BatchNormalization in inference mode.
        manifest: the manifest (`docs/reference/file-formats.md`), without `files` and `optimizer`.
        parameters: initial value of each parameter, trainable or frozen, in graph order, e.g. {"fc.weight": ...}.
        statistics: initial value of each BatchNorm running statistic, in graph order.
        inference: model that computes the original model's outputs from its inputs and the parameters; None if no
            outputs were requested.
        unreached: names of the parameters that were selected for training although the loss does not depend on them;
            they are not trained.
        adapters: description of the model's LoRA adapters as JSON text; None for a model without adapters.
        learning_rate_scales: factor of the learning rate by name of trained parameter; empty if all have the same rate.
    """

    training: ir.Model
    eval: ir.Model
    manifest: dict[str, Any]
    parameters: dict[str, ir.TensorProtocol]
    statistics: dict[str, ir.TensorProtocol]
    inference: ir.Model | None = None
    unreached: Sequence[str] = ()
    adapters: str | None = None
    learning_rate_scales: Mapping[str, float] = field(default_factory=dict)

    @property
    def trainable(self) -> list[str]:
        """Names of the trainable parameters."""
        return [entry["name"] for entry in self.manifest["parameters"] if entry["trainable"]]


def build_training_graphs(
    model: ir.Model,
    loss: str,
    recipe: Recipe,
    *,
    adapters: Collection[str] = (),
    input_gradients: Sequence[str] = (),
    inference_outputs: Sequence[str] = (),
) -> TrainingGraphs:
    """Builds the training, eval and inference models from a canonical model that computes the scalar `loss`.

    Args:
        model: canonical model in which the recipe's parameters were excluded from constant folding (`variable` of
            `canonicalize`); it is not changed. Inputs with metadata :data:`TARGET_KEY` are targets.
        loss: name of the scalar to minimize.
        recipe: how to train. Its `loss`, `loss_input_names`, `sample_weight`, `optimizer` and `lora` are not read: the
            caller has already applied them to the model, or applies them later.
        adapters: names of trained parameters that were added for this training run; the loss must depend on them.
        input_gradients: names of floating-point inputs whose gradients the training model also returns.
        inference_outputs: names of the outputs of the inference model; empty for no inference model.

    Raises:
        DifferentiationError: one of `input_gradients` is not a floating-point value.
        GraphBuildError: a name is unknown, is both trainable and frozen, or would be returned twice; the loss is not a
            scalar; a parameter in `sparse_gradients` is read by an op other than Gather on axis 0; the loss does not
            depend on one of `adapters`.
        NothingToTrain: no parameter is left to train, or the loss depends on none of them.
        NoGradientRule: an op between loss and parameters has no gradient rule.
    """
    mean = loss_mean(named(model, loss))
    forward, unchosen = build_forward_graph(model, loss, recipe)
    selection = select_parameters(
        forward, recipe.requires_grad, recipe.frozen_params, recipe.sparse_gradients
    )
    build, active = start_build(forward, selection, adapters)
    build.input_gradients = input_gradients
    warn_of_export(forward, build.trainable, active, unchosen)
    # With chosen parameters, such as those of adapters, the integers stay as they are on purpose.
    if recipe.straight_through and recipe.requires_grad is None:
        warn_of_integer_weights(forward, build.trainable)
    promote_parameters(build)
    evaluation = build_eval_model(
        build, model, inference_outputs, as_deployed=recipe.activations == "deployed"
    )
    training = build_training_model(build, recipe)
    manifest = describe_training(build, training) | {
        "loss_mean": mean,
        "activations": recipe.activations,
        "profile": recipe.profile,
    }
    parameters, statistics = list(build.parameters), list(build.statistics)
    inference = build_inference_model(model, inference_outputs, parameters, statistics)
    manifest["inference"] = None if inference is None else inference_entry(inference, parameters + statistics)
    # Each model contains the manifest, so that a host needs no other file.
    for graph_model in (training, evaluation):
        graph_model.metadata_props[METADATA_KEY] = json.dumps(manifest | {"files": {}, "optimizer": None})
    return TrainingGraphs(
        training, evaluation, manifest, build.parameters, build.statistics, inference, build.unreached
    )
