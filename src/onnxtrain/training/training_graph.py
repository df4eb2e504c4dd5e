"""Builds the training model and the eval model from a forward graph with a loss.

Steps 3 to 8 of "The life of one model" in `docs/architecture.md`; `build_training_graphs` calls them in order.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnxtrain._printable import get_logger
from onnxtrain._words import argument
from onnxtrain.autodiff import active_values, add_gradients, append_outputs, expand_path
from onnxtrain.emitter import Emitter, values_by_name
from onnxtrain.errors import GraphBuildError, NothingToTrain
from onnxtrain.fusion import MeanLossPass, PackedProductPass, fuse_exported, fuse_kernels
from onnxtrain.losses import TARGET_KEY, loss_mean
from onnxtrain.op_facts import RANDOM_OPS
from onnxtrain.passes import (
    CleanupPass,
    FloatDequantizedPass,
    FloatProductsPass,
    FoldFrozenBatchNormPass,
    LongSumsPass,
    TrainingModePass,
    lift_constants,
    promote_initializers,
    settle_shapes,
    simplify_gradients,
    suit_runtime,
)
from onnxtrain.passes.portable import draw_from_input
from onnxtrain.recipe import Recipe
from onnxtrain.runtime.manifest import METADATA_KEY
from onnxtrain.selection import batch_norms, select_parameters, some_names
from onnxtrain.training.build_state import Build
from onnxtrain.training.export_warnings import check_training_mode, warn_of_export
from onnxtrain.training.file_ops import join_skip_norms, restore_file_ops
from onnxtrain.training.forward_graph import cut_to_loss, name_copies, named
from onnxtrain.training.inference_graph import build_inference_model, inference_entry
from onnxtrain.training.layer_modes import removed_dropouts, switch_modes
from onnxtrain.training.recompute import RecomputePass
from onnxtrain.training.running_variance import update_unbiased
from onnxtrain.training.sparse_gradients import keep_rows, match_sparse
from onnxtrain.training.training_manifest import describe_training

_log = get_logger()


@dataclass(frozen=True)
class TrainingGraphs:
    """The models of a training run, with their manifest and initial values.

    Attributes:
        training: computes loss, additional outputs, gradients and updated statistics from inputs, targets and
            parameters.
        eval: computes loss and additional outputs, with Dropout and BatchNormalization in inference mode.
        manifest: the manifest (`docs/contracts.md`), without `files` and `optimizer`.
        parameters: initial value of each parameter, trainable or frozen, in graph order, e.g. {"fc.weight": ...}.
        statistics: initial value of each BatchNorm running statistic, in graph order.
        inference: computes the outputs of the original model from its inputs and the parameters; None if not asked for.
        unreached: names of the parameters that were to be trained and that the loss does not depend on; they are not
            trained.
        adapters: description of the model's LoRA adapters as JSON text; None for a model without adapters.
    """

    training: ir.Model
    eval: ir.Model
    manifest: dict[str, Any]
    parameters: dict[str, ir.TensorProtocol]
    statistics: dict[str, ir.TensorProtocol]
    inference: ir.Model | None = None
    unreached: Sequence[str] = ()
    adapters: str | None = None

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
        model: canonical model, with the parameters that the recipe names among its `variable` ones; it is not changed.
            Inputs with metadata :data:`TARGET_KEY` are targets.
        loss: name of the scalar to minimize.
        recipe: how to train. Its `loss`, `loss_input_names` and `sample_weight` have done their work, `optimizer` and
            `lora` are not read.
        adapters: names of trained parameters that were added for this training: the loss must depend on them.
        input_gradients: names of floating-point inputs whose gradients the training model returns, too.
        inference_outputs: names of the outputs of the inference model; empty for no such model.

    Raises:
        DifferentiationError: one of `input_gradients` is no floating-point value.
        GraphBuildError: a name is unknown, both trainable and frozen, or to be returned twice; the loss is no scalar;
            one of `sparse_gradients` is read otherwise than by rows; the loss does not depend on one of `adapters`.
        NothingToTrain: no parameter is left to train, or the loss depends on none of them.
        NoGradientRule: an op between loss and parameters has no gradient rule.
    """
    mean = loss_mean(named(model, loss))
    as_deployed = recipe.activations == "deployed"
    forward, places = cut_to_loss(model, loss, recipe)
    as_exported = switch_modes(forward, recipe.batch_norm, places.decided)
    removed = removed_dropouts(places.removed, recipe.batch_norm)
    check_training_mode(forward, recipe.batch_norm, removed)
    # In both models: one with both kinds of products would compute neither the file's results nor those of the float
    # weights.
    if not as_deployed:
        FloatProductsPass()(forward)
    build = _choose_parameters(forward, recipe)
    build.input_gradients = input_gradients
    active = _active_values(forward, build.trainable)
    _check_adapters(forward, [name for name in build.trainable if name in adapters], active)
    _leave_out_unreached(build, active)
    warn_of_export(forward, build.trainable, active, as_exported=as_exported, removed=removed)
    _promote_parameters(build)
    evaluation = _evaluation_model(build, model, inference_outputs, as_deployed=as_deployed)
    # Before differentiation, so that the gradient has the same numbers. The eval model drops nothing, and draws other
    # numbers as the file does.
    build.random = draw_from_input(
        build.forward, RANDOM_OPS if recipe.profile == "portable" else RANDOM_OPS - {"Dropout"}
    )
    training = _training_model(build, recipe)
    manifest = describe_training(build, training) | {
        "loss_mean": mean,
        "activations": recipe.activations,
        "profile": recipe.profile,
    }
    parameters, statistics = list(build.parameters), list(build.statistics)
    inference = build_inference_model(model, inference_outputs, parameters, statistics)
    manifest["inference"] = None if inference is None else inference_entry(inference, parameters + statistics)
    # Each model carries the manifest, so that a host needs no other file.
    for graph_model in (training, evaluation):
        graph_model.metadata_props[METADATA_KEY] = json.dumps(manifest | {"files": {}, "optimizer": None})
    return TrainingGraphs(
        training, evaluation, manifest, build.parameters, build.statistics, inference, build.unreached
    )


def _choose_parameters(forward: ir.Model, recipe: Recipe) -> Build:
    """Starts a build: sorts the initializers into trainable, frozen and statistics, and keeps their values."""
    selection = select_parameters(forward, recipe.requires_grad, recipe.frozen_params)
    sparse = match_sparse(recipe.sparse_gradients or (), selection.trainable)
    values = {name: _tensor(forward, name) for name in forward.graph.initializers}
    return Build(
        forward,
        list(selection.trainable),
        sparse,
        parameters={name: tensor for name, tensor in values.items() if name in selection.parameters},
        statistics={name: values[name] for name in selection.statistics},
    )


def _promote_parameters(build: Build) -> None:
    """Makes parameters and statistics inputs of the forward graph, after the user's inputs and the targets."""
    # From this stage on nothing may rely on their values, which the device sets: shapes are inferred anew without them.
    inputs = build.forward.graph.inputs
    # The sort is stable: inputs in the file's order, then targets in that of the loss.
    users = sorted(inputs, key=lambda value: TARGET_KEY in value.metadata_props)
    inputs.clear()
    inputs.extend(users)
    promote_initializers(build.forward, [*build.parameters, *build.statistics])
    build.forward = settle_shapes(build.forward)


def _evaluation_model(
    build: Build, model: ir.Model, file_outputs: Collection[str], *, as_deployed: bool
) -> ir.Model:
    """Copies the forward graph and switches Dropout and BatchNormalization to inference mode.

    Args:
        build: the build.
        model: the canonical model.
        file_outputs: outputs of the file, of which copies and constants are kept by name.
        as_deployed: True to keep the numerics of the file.
    """
    # Before the training model is built, which changes the forward graph in place.
    evaluation = build.forward.clone()
    TrainingModePass(batch_norm="inference", dropout="inference")(evaluation)
    CleanupPass(keep=set())(evaluation)
    # By names, which may stand for other values once passes have written nodes.
    name_copies(evaluation, model, file_outputs)
    file_values = _computed_names(evaluation)
    evaluation = suit_runtime(evaluation)
    # Evaluation would otherwise need the memory of a float weight that training does not need.
    if not as_deployed:
        FloatDequantizedPass()(evaluation)
        PackedProductPass()(evaluation)
        MeanLossPass()(evaluation)
    LongSumsPass(file_values if as_deployed else ())(evaluation)
    lift_constants(evaluation)
    return evaluation


def _training_model(build: Build, recipe: Recipe) -> ir.Model:
    """Differentiates the forward graph and rewrites the result for ONNX Runtime.

    Its outputs are the loss and the additional outputs, the gradients of the parameters, the row numbers of sparse
    gradients, the updated statistics, and the gradients of inputs.
    """
    as_deployed = recipe.activations == "deployed"
    build.updated = _chain_statistics(build.forward, list(build.statistics))
    # Of a frozen backbone, whose values are constants of the graph.
    FoldFrozenBatchNormPass()(build.forward)
    # Chains of standard ops become ops with a better gradient, so before differentiation. But a kernel that adds in
    # another order than the chain differs in the last bit, and a value half-way between two integers is then rounded to
    # the other one: the loss of a small exported Llama was off by 2e-4.
    if as_deployed:
        join_skip_norms(build.forward)
    else:
        fuse_exported(build.forward)
    loss, wrt = str(build.forward.graph.outputs[0].name), [*build.trainable, *build.input_gradients]
    file_values = _computed_names(build.forward)
    # Bodies take the places of ops without a rule before the names are taken: afterwards nothing tells forward and
    # gradient nodes of one graph apart.
    forward = expand_path(build.forward, [loss], wrt, float_products=False)
    forward_values = _computed_names(forward)
    training, gradients = add_gradients(
        forward,
        loss,
        wrt,
        # What is to be in floating point is so already.
        float_products=False,
    )
    if as_deployed:
        restore_file_ops(training, build.forward)
    _append_gradients(build, training, gradients)
    CleanupPass(keep=set())(training)
    training = suit_runtime(training)
    simplify_gradients(training)
    FloatDequantizedPass(file_values if as_deployed else ())(training)
    # Calls of functions with native kernels come last: they hide the standard ops that the passes above match.
    fuse_kernels(training, bfloat16=recipe.precision == "bf16", kept=file_values if as_deployed else ())
    # After all merging of equal nodes, which would undo it.
    if recipe.recompute:
        RecomputePass(forward_values, products=recipe.recompute is True)(training)
    # After all passes that look for reductions.
    LongSumsPass(file_values if as_deployed else ())(training)
    lift_constants(training)
    return training


def _computed_names(model: ir.Model) -> set[str]:
    """Returns the names of the values that nodes of the graph compute."""
    return {str(value.name) for node in model.graph for value in node.outputs if value.name}


def _append_gradients(build: Build, training: ir.Model, gradients: Sequence[ir.Value]) -> None:
    """Makes gradients and updated statistics outputs of the training model; `describe_training` relies on the order."""
    count = len(build.trainable)
    append_outputs(training, build.trainable, gradients[:count])
    # From the outputs, as parameters may share one gradient (of x + y), which `append_outputs` then copies.
    tables = dict(zip(build.trainable, list(training.graph.outputs)[-count:], strict=True))
    parameters = {str(value.name): value for value in build.forward.graph.inputs}
    build.row_indices = keep_rows(training, {name: tables[name] for name in build.sparse}, parameters)
    values = values_by_name(training.graph)
    training.graph.outputs.extend(values[output] for output in build.updated.values())
    append_outputs(training, build.input_gradients, gradients[count:])


def _active_values(model: ir.Model, trainable: Sequence[str]) -> set[ir.Value]:
    """Returns the values between the parameters to train and the loss, the model's first output.

    Raises:
        NothingToTrain: the loss depends on none of the parameters.
    """
    loss = model.graph.outputs[0]
    active = active_values(model.graph, [loss], [model.graph.initializers[name] for name in trainable])
    if loss not in active:
        raise NothingToTrain(
            f"building the training graph: no gradient flows from the loss {loss.name!r} to any of the parameters to "
            f"train ({some_names(trainable, 5)}): it does not depend on them, or through ops without a gradient only. "
            f"Choose another value of the model in {argument('loss_input_names')}, or other parameters in "
            f"{argument('requires_grad')}."
        )
    return active


def _leave_out_unreached(build: Build, active: Collection[ir.Value]) -> None:
    """Leaves the parameters untrained that the loss does not depend on, and logs a warning that names them.

    PyTorch's optimizers skip parameters without a gradient (grad is None). Weight decay, momentum and moments would
    move them.
    """
    graph = build.forward.graph
    inactive = [name for name in build.trainable if graph.initializers[name] not in active]
    if not inactive:
        return
    # Behind Round or Sign the gradient is zero, which is a gradient: PyTorch's optimizers decay such parameters.
    reached = active_values(
        graph, [graph.outputs[0]], [graph.initializers[name] for name in inactive], through_steps=True
    )
    build.unreached = [name for name in inactive if graph.initializers[name] not in reached]
    if build.unreached:
        _log.warning(
            "The loss %r does not depend on %d of the %d parameters to train: %s. They get no gradient and keep their "
            "values, as parameters whose grad is None do in PyTorch. To silence this warning, name them in %s. To "
            "train them, choose another value of the model in %s.",
            graph.outputs[0].name,
            len(build.unreached),
            len(build.trainable),
            some_names(build.unreached),
            argument("frozen_params"),
            argument("loss_input_names"),
        )
    left_out = set(build.unreached)
    build.trainable = [name for name in build.trainable if name not in left_out]
    build.sparse = [name for name in build.sparse if name not in left_out]


def _check_adapters(model: ir.Model, names: Sequence[str], active: Collection[ir.Value]) -> None:
    """Raises GraphBuildError for adapters without a gradient, which would be saved and deployed as they were drawn."""
    lost = [name for name in names if model.graph.initializers[name] not in active]
    if lost:
        layers = list(dict.fromkeys(name.rpartition(".lora_")[0] for name in lost))
        raise GraphBuildError(
            f"building the training graph: no gradient flows from the loss {model.graph.outputs[0].name!r} to the "
            f"adapters of {some_names(layers, 5)}: it does not depend on these layers, or through ops without a "
            f"gradient only. Leave the layers out (target_modules, exclude_modules), pass "
            f"{argument('straight_through', True)} if Round, Ceil or Floor is in the way, or choose another value of "
            f"the model in {argument('loss_input_names')}"
        )


def _tensor(model: ir.Model, name: str) -> ir.TensorProtocol:
    """Returns the initial value of an initializer."""
    tensor = model.graph.initializers[name].const_value
    if tensor is None:
        raise GraphBuildError(
            f"building the training graph: the parameter {name!r} has no value; give its initializer a tensor"
        )
    return tensor


def _chain_statistics(model: ir.Model, names: Sequence[str]) -> dict[str, str]:
    """Makes every running statistic an output, named `<statistic>_updated`; returns these names.

    If several nodes share a statistic, each continues from the result of the previous node, as in PyTorch, where the
    layers run in turn.
    """
    latest: dict[str, ir.Value] = {}
    writer = Emitter(model.graph)
    for node, training in batch_norms(model):
        if not training:
            continue
        # Outputs 1 and 2, the updated mean and variance, are optional and may be left out in the file.
        node.resize_outputs(3)
        for index in (3, 4):
            statistic = node.inputs[index]
            if statistic is None or statistic.name not in names:
                continue
            name = str(statistic.name)
            if name in latest:
                node.replace_input_with(index, latest[name])
            output = node.outputs[index - 2]
            output.shape, output.type = statistic.shape, statistic.type
            latest[name] = output if index == 3 else update_unbiased(writer, node)
    for name, value in latest.items():
        value.name = writer.unique_name(f"{name}_updated")
    return {name: str(latest[name].name) for name in names}
